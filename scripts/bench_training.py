"""What a step of a recovery costs: distillation against plain fine-tuning of the same parameters of the student.

    python scripts/bench_training.py RUN [--train ffn] [--steps 6]

RUN is an exported run folder. Each way runs in a process of its own, in turn, for its peak of resident memory; the
first step of each is not timed. Prints tokens a second and peaks, and the two ratios that matter: distillation against
a plain step and a forward of the teacher one after the other, and its peak against that of plain fine-tuning.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvprune.artifacts import RunFolder
from kvprune.dense import open_dense
from kvprune.options import Options, make_course
from kvprune.ranks import ALONE
from kvprune.recipe import load_recipe
from kvprune.sources.models import load_model
from kvprune.teaching.kept import Kept
from kvprune.teaching.students import make_student
from kvprune.teaching.training import prepare, take_step

WAYS = ("plain", "teacher", "distill")


def measure(way: str, run: RunFolder, train: str, steps: int, batch_size: int) -> dict[str, float]:
    """Seconds of the median step, and the peak of resident memory in bytes, of this process."""
    recipe = load_recipe(run.recipe, [f"recover.train={train}", "recover.method=distill"])
    dense, section = open_dense(recipe.model), recipe.recover
    generator = torch.Generator().manual_seed(0)
    shape = (steps * section.batch_tokens // section.sequence_length, section.sequence_length)
    tokens = torch.randint(0, dense.text_config.vocab_size, shape, generator=generator)
    course = make_course(recipe, dense, Options(batch_size=batch_size), ALONE, tokens, {})
    teacher: Any = dense.load(course.dtype, "cpu").requires_grad_(requires_grad=False) if way != "plain" else None
    if way == "teacher":

        @torch.inference_mode()
        def step(at: int) -> None:
            for batch in torch.split(tokens[at * course.per_step : (at + 1) * course.per_step], course.micro):
                teacher(input_ids=batch, use_cache=False)
    else:
        model, _ = load_model(run.model, dtype=course.dtype, device="cpu")
        student = make_student(model, dense.layout, section, teacher)
        with tempfile.TemporaryDirectory() as folder:
            work = prepare(student, teacher, course, Kept(Path(folder), {}))

        def step(at: int) -> None:
            take_step(work, at)

    seconds = []
    for at in range(steps):
        started = time.perf_counter()
        step(at)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"tokens": section.batch_tokens, "seconds": statistics.median(seconds[1:]), "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--train", default="ffn", choices=["values", "ffn", "all", "lora"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        run = RunFolder(arguments.run)
        print(json.dumps(measure(arguments.way, run, arguments.train, arguments.steps, arguments.batch_size)))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
        rate, peak = found[way]["tokens"] / found[way]["seconds"], found[way]["peak"]
        print(f"{way:8} {rate:8,.0f} tokens/s, peak {peak / 2**30:.2f} GiB", flush=True)
    one_by_one = found["plain"]["seconds"] + found["teacher"]["seconds"]
    share = one_by_one / found["distill"]["seconds"]
    print(f"tokens/s of distillation / of a plain step and a teacher's forward: {share:.3f}")
    print(f"peak of distillation / plain fine-tuning: {found['distill']['peak'] / found['plain']['peak']:.3f}")


if __name__ == "__main__":
    main()
