"""What a recovery is worth: text, tokens, what is trained, where it starts and the learning rate, each alone.

    KVPRUNE_DATA=folder python scripts/bench_recover.py --runs runs/recover [--cells NAME ...] [--keep 0.8]

SmolLM2-135M-Instruct (builtin: the dequantised 4-bit file). The start is the recipe `best` on 131,072 tokens, two
thirds of them from the first four fifths of WikiText-2 validation and one third own samples, widths in multiples of 4.
Token perplexity, no BOS: of the last fifth of that text and of Python's documentation, which nothing counts or trains
on, and by which settings are chosen; and of the first 12 x 1,024 tokens of WikiText-2 test and 10 x 1,024 of LAMBADA's
running text, which judge. `control` spends the same tokens on the dense model, which learns the text itself. What is
done is kept in the folder and not done again.
"""

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_quality import Bench, Method, tuning_texts
from bench_refit import test_tokens
from bench_scores import perplexity
from quality_judge import losses

import kvprune
from kvprune.artifacts import RunFolder, read_json, write_json, write_text
from kvprune.options import DEFAULT, make_course
from kvprune.ranks import ALONE
from kvprune.recipe import load_recipe
from kvprune.results import intervals
from kvprune.results.table import grid
from kvprune.sources.models import load_model
from kvprune.teaching.kept import Kept
from kvprune.teaching.students import make_student
from kvprune.teaching.training import teach
from kvprune.tokens import counted_tokens, recovery_tokens

# Name to what differs from the default: half WikiText-2, half own samples, 50k tokens, ffn, from the sequential refit.
CELLS: dict[str, dict[str, str]] = {
    "none": {},
    "default": {},
    "text: WikiText-2": {"text": "wikitext"},
    "text: own samples": {"text": "self"},
    "100k tokens": {"tokens": "100k"},
    "200k tokens": {"tokens": "200k"},
    "400k tokens": {"tokens": "400k"},
    "train values": {"train": "values"},
    "train all": {"train": "all"},
    "train lora": {"train": "lora"},
    "from one-shot": {"start": "oneshot"},
    "learning rate 1e-4": {"learning_rate": "1e-4"},
    "learning rate 4e-4": {"learning_rate": "4e-4"},
    "learning rate 8e-4": {"learning_rate": "8e-4"},
    "200k tokens, 4e-4": {"tokens": "200k", "learning_rate": "4e-4", "text": "thirds"},
    "200k tokens, 8e-4": {"tokens": "200k", "learning_rate": "8e-4", "text": "thirds"},
    "control": {},
}
Judge = Callable[[Any], dict[str, list[float]]]
TEXTS = {
    "wikitext": "{text}",
    "self": "self",
    "half": "[{text}, self]",
    "thirds": "[{{source: {text}, weight: 2}}, self]",
}


def start(run: RunFolder, refit: str, keep: float) -> RunFolder:
    """The exported run that recoveries start from, of a calibrated `run`."""
    place = RunFolder(run.path.with_name(f"start-{refit}-{keep:g}-{run.path.name}"))
    if not place.path.exists():
        part = place.path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(run.path, part)
        kvprune.plan(part, overrides=["plan.score=taylor", f"plan.budget.keep={keep}"])
        kvprune.refit(part, overrides=[f"refit.method={refit}"])
        kvprune.export(part)
        part.rename(place.path)
    return place


def values(bench: Bench, cell: dict[str, str]) -> list[str]:
    """The recovery's recipe values."""
    text = TEXTS[cell.get("text", "half")].format(text=bench.text)
    own = {key: value for key, value in cell.items() if key not in ("text", "start")}
    section = {"method": "distill", "text": text, "tokens": "50k", **own}
    return [f"recover.{key}={value}" for key, value in section.items()]


def drawn(bench: Bench, base: RunFolder, cell: dict[str, str]) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """Recipe, tokens and held-out tokens of a cell. Own samples are drawn once for all cells, in the folder of all."""
    recipe = load_recipe(base.recipe, values(bench, cell))
    counted, _ = counted_tokens(recipe, base, bench.dense, DEFAULT)
    return recipe, *recovery_tokens(recipe, RunFolder(bench.runs), bench.dense, DEFAULT, counted, ())


def recovered(bench: Bench, base: RunFolder, name: str, cell: dict[str, str]) -> tuple[RunFolder, dict[str, Any]]:
    """A recovered copy of the run `base`, and its report."""
    place = RunFolder(base.path.with_name(f"{base.path.name}-{name.replace(': ', '-').replace(' ', '-')}"))
    if not place.path.exists():
        drawn(bench, base, cell)
        shutil.copytree(base.path, place.path)
        samples = RunFolder(bench.runs).recover_samples
        if samples.is_file():
            shutil.copyfile(samples, place.recover_samples)
    return place, kvprune.recover(place.path, overrides=values(bench, cell))


def control(bench: Bench, base: RunFolder, judge: Judge) -> dict[str, Any]:
    """The dense model, trained on the text itself with the same tokens."""
    recipe, tokens, held = drawn(bench, base, {})
    course = make_course(recipe, bench.dense, DEFAULT, ALONE, tokens, held)
    student = make_student(bench.dense.load("auto", "cpu"), bench.dense.layout, recipe.recover, None)
    curve = teach(student, None, course, Kept(bench.runs / "control", {}))
    model = student.model.to(getattr(torch, course.dtype))
    return {
        "looks": curve.looks,
        "best": curve.best,
        "seconds": curve.seconds,
        "tokens": len(curve.losses) * recipe.recover.batch_tokens,
        **judge(model),
    }


def stored(bench: Bench, run: RunFolder) -> Any:
    """The slim model of a run, in the type that the dense one is run in."""
    return load_model(run.model, dtype=bench.dense.run_dtype("auto", "cpu"), device="cpu")[0]


def judging(bench: Bench) -> Judge:
    """Tells perplexities of a model: of the texts that settings are chosen by, and of those that judge."""
    tuning, tests = tuning_texts(bench).values(), test_tokens(bench.data, bench.tokenizer).values()
    return lambda model: {
        "tuning": [intervals.perplexity(losses(model, some)) for some in tuning],
        "perplexity": [perplexity(model, some, windows) for some, windows in tests],
    }


def row(name: str, cell: dict[str, Any]) -> list[str]:
    """A line of the table."""
    minutes = f"{cell['seconds'] / 60:.1f}" if "seconds" in cell else "-"
    figures = (f"{value:.2f}" for value in (*cell["tuning"], *cell["perplexity"]))
    return [name, *figures, f"{cell.get('tokens', 0):,}", minutes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder for runs and results, used again")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=CELLS, metavar="NAME")
    parser.add_argument("--keep", type=float, default=0.8)
    parser.add_argument("--counted", type=int, default=131_072, help="tokens")
    parser.add_argument("--own", type=float, default=1 / 3, help="share of own samples in them")
    parser.add_argument("--table", type=Path, help="write the table here, and its data beside it as .json")
    arguments = parser.parse_args()
    if not os.environ.get("KVPRUNE_DATA"):
        raise SystemExit("KVPRUNE_DATA is not set: it names the folder with WikiText-2 and LAMBADA")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    data = Path(os.environ["KVPRUNE_DATA"]).resolve()
    bench = Bench(arguments.runs.resolve(), data, 0, arguments.counted)
    run, judge = bench.calibrated(Method("ours", ["plan.score=taylor"], own=arguments.own)), judging(bench)
    kept = bench.runs / f"results-{arguments.keep:g}-{run.path.name}.json"
    results: dict[str, Any] = read_json(kept) if kept.is_file() else {}
    for name in arguments.cells:
        if name in results:
            continue
        cell, started = CELLS[name], time.perf_counter()
        base = start(run, cell.get("start", "sequential"), arguments.keep)
        if name == "control":
            found = control(bench, base, judge)
        elif name == "none":
            found = judge(stored(bench, base))
        else:
            place, report = recovered(bench, base, name, cell)
            found = {key: report[key] for key in ("looks", "best", "seconds", "tokens", "learning")}
            found |= judge(stored(bench, place))
        results[name] = found
        write_json(kept, results)
        print(*row(name, found), f"{time.perf_counter() - started:.0f} s in all", flush=True)
    head = ["recovery", "validation", "documentation", "WikiText-2", "LAMBADA", "tokens", "minutes"]
    text = grid([head, *(row(name, results[name]) for name in CELLS if name in results)])
    print(text)
    if arguments.table:
        write_text(arguments.table, text + "\n")
        write_json(arguments.table.with_suffix(".json"), results)


if __name__ == "__main__":
    main()
