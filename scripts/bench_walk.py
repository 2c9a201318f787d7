"""What walking a model layer by layer costs, in time and memory, each against the least that could do, in one run.

    python scripts/bench_walk.py [time] [memory] [processes]

time       a calibration, one that also collects Gram matrices, and a sequential refit, each against the same model's
           plain forward without the head over the same tokens: alternating rounds, medians
memory     peak anonymous memory, over the importing process, of calibrating a random Llama of 3 billion parameters in
           bfloat16 (made here, 6 GB on disk), in a process of its own
processes  the statistics of one process against those of two that torchrun starts

Model, but for memory: builtin SmolLM2-135M in bfloat16. Machines are noisy: read ratios, not seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_calibrate import anonymous_bytes, seconds, watching_memory

import kvprune
from kvprune.artifacts import RunFolder, digest, write_plan
from kvprune.dense import open_dense
from kvprune.ffn.stats import read_stats
from kvprune.ffn.walk import Setup
from kvprune.recipe import make_recipe
from kvprune.sources.models import BUILTIN, load_tokenizer
from kvprune.sources.texts import sequences
from kvprune.stages import calibrate as calibrating
from kvprune.stages import plan as planning
from kvprune.stages import refit

BIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 3200,
    "intermediate_size": 8640,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@torch.inference_mode()
def bench_time(tokens: int, rounds: int) -> None:
    """The two stages that walk, against the plain forward."""
    dense = open_dense(BUILTIN)
    model = dense.load("auto", "cpu")
    section = {"sequence_length": 512, "tokens": tokens}
    plan = {"budget": {"keep": 0.8}, "round_to": 128}
    refitting = {"method": "sequential"}
    counts = make_recipe({"model": BUILTIN, "calibrate": section, "plan": plan, "refit": refitting})
    gram = make_recipe({"model": BUILTIN, "calibrate": {**section, "collect": ["counts", "gram"]}, "plan": plan})
    ids = sequences(counts.calibrate, load_tokenizer(dense.source))
    setup = Setup("cpu", torch.bfloat16, 8)
    walker = dense.walker(setup, 512)

    def forward() -> None:
        for batch in torch.split(ids, 8):
            model.base_model(input_ids=batch, use_cache=False)

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        run, other = RunFolder(Path(name) / "counts"), RunFolder(Path(name) / "gram")
        calibrating.calibrate(counts, dense, walker, ids[:16], run, setup)  # all is warm after it
        planned = planning.make_plan(counts, dense, read_stats(run.stats)[0], digest(run.stats))
        write_plan(run.plan, planned)
        works: dict[str, Callable[[], None]] = {
            "forward": forward,
            "calibrate (counts)": lambda: calibrating.calibrate(counts, dense, walker, ids, run, setup),
            "calibrate (counts, gram)": lambda: calibrating.calibrate(gram, dense, walker, ids, other, setup),
            "refit (sequential)": lambda: refit.refit(counts, dense, walker, planned, ids, run, setup),
        }
        times = [{key: seconds(work) for key, work in works.items()} for _ in range(rounds)]
    base = statistics.median(taken["forward"] for taken in times)
    print(f"{tokens:,} tokens, forward without head: {tokens / base:,.0f} tokens/s")
    targets = {"calibrate (counts)": " (target: at most 1.3)", "refit (sequential)": " (target: at most 4)"}
    for key in list(works)[1:]:
        ratio = statistics.median(taken[key] for taken in times) / base
        print(f"{key} / forward: {ratio:.3f}{targets.get(key, '')}")


def make_big(folder: Path) -> None:
    """A random Llama of 3 billion parameters, one file a layer, written tensor by tensor; and a tokenizer of bytes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BIG), encoding="utf-8")
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            .state_dict()
            .items()
        }
    generator = torch.Generator().manual_seed(0)
    files: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}.safetensors", []).append(name)
    for file, names in files.items():
        block = torch.randn(2**20, generator=generator).mul_(0.02).bfloat16()
        tensors = {}
        for name in names:
            size = torch.Size(shapes[name]).numel()
            tensor = torch.ones(size) if "norm" in name else block.repeat(-(-size // len(block)))[:size]
            tensors[name] = tensor.to(torch.bfloat16).view(shapes[name])
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def measure_memory(folder: Path, tokens: int) -> None:
    """Run in a process of its own: peak anonymous memory of a calibration over what the process had before, as JSON."""
    text = folder / "text.txt"
    text.write_text("".join(chr(97 + at * at % 26) for at in range(tokens * 12)), encoding="utf-8")
    recipe = make_recipe(
        {
            "model": str(folder),
            "calibrate": {"text": str(text), "tokens": tokens, "sequence_length": min(512, tokens)},
        }
    )
    before = anonymous_bytes()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, watching_memory() as peak:
        kvprune.calibrate(recipe, Path(name) / "run", options=kvprune.Options(batch_size=2))
    print(json.dumps({"peak": peak[0] - before, "seconds": time.perf_counter() - started}))


def bench_memory(folder: Path | None, tokens: int) -> None:
    """Peak anonymous memory of calibrating a model of 6 GB."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        place = folder or Path(name)
        if not (place / "model.safetensors.index.json").is_file():
            make_big(place)
        size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
        command = [sys.executable, __file__, "--measure", str(place), "--tokens", str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"a model of {size / 1e9:.2f} GB on disk, {tokens} tokens: {found['seconds']:.0f} s")
    print(f"peak anonymous memory over the importing process {found['peak'] / 2**30:.2f} GiB (target: at most 2.5)")


def bench_processes(tokens: int) -> None:
    """One process against two."""
    options = ["--set", f"calibrate.tokens={tokens}", "-q"]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        for count in (1, 2):
            launcher = (
                ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
            )
            command = [sys.executable, *launcher, "-m", "kvprune", "calibrate", "builtin:quickstart"]
            started = time.perf_counter()
            subprocess.run([*command, "-o", f"{name}/{count}", *options], check=True, capture_output=True)
            print(f"{count} process(es): {time.perf_counter() - started:.0f} s, start included")
        one, two = (read_stats(RunFolder(Path(name) / str(count)).stats)[0] for count in (1, 2))
    same = all(torch.equal(a.histogram, b.histogram) for a, b in zip(one, two, strict=True))
    apart = max(float(((a.total - b.total).abs() / a.total_abs).max()) for a, b in zip(one, two, strict=True))
    print(f"histograms identical: {same}; largest difference of sums, relative to sums of |a|: {apart:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["time", "memory", "processes"])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--big", type=Path, help="keep the large model in this folder")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_memory(arguments.measure, arguments.tokens)
        return
    if "time" in arguments.parts:
        bench_time(arguments.tokens or 32768, arguments.rounds)
    if "processes" in arguments.parts:
        bench_processes(arguments.tokens or 8192)
    if "memory" in arguments.parts:
        bench_memory(arguments.big, arguments.tokens or 1024)


if __name__ == "__main__":
    main()
