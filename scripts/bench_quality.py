"""Pruning tools and methods side by side: one model, one text, one width for all, judged document by document.

    KVPRUNE_DATA=folder python scripts/bench_quality.py --runs runs/quality [--methods NAME ...] [--keep 0.8 0.6]

SmolLM2-135M-Instruct (builtin: the dequantised 4-bit file), bfloat16. Calibration: 131,072 tokens of the first four
fifths of WikiText-2 validation, in sequences of 512. Widths are multiples of 4. Judged on the first 1,024 tokens of
every page of WikiText-2 test and of LAMBADA's first 400 texts, without BOS, and on tasks with a limit. Intervals are
95 %, paired by document or question. With --tune, only on what settings may be chosen by: the last fifth of the
validation text, and Python's documentation; a method may be values of a recipe, as plan.score=greedy,refit.bias=none.
A cell that is done is kept in results-TOKENS-LIMIT.json and not done again, so it runs in pieces. The peers of PyPI are
installed in a folder of their own first; `run_peer.py` says how.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import quality_methods as formulas
import torch
from quality_judge import WINDOW, judged, losses, open_tests, table
from safetensors.torch import save_file

import kvprune
from kvprune.artifacts import RunFolder, read_tensors, write_json, write_text
from kvprune.dense import Dense, open_dense
from kvprune.recipe import make_recipe, parse_yaml
from kvprune.results.intervals import perplexity
from kvprune.schema import COLLECTED, TextSource
from kvprune.sources.models import BUILTIN, load_model, load_tokenizer
from kvprune.sources.texts import TASK_TEXT, documents, sequences
from kvprune.stages.export import mask_slots, put_values

LENGTH, ROUND_TO = 512, 4
TUNING_WINDOWS = 24  # of each text
PROJECT = Path(__file__).parents[1]
Judging = Callable[[Any, str], dict[str, Any]]


@dataclass(frozen=True)
class Method:
    """How a slim model is made: by another tool, by values of a recipe, or by a formula of quality_methods."""

    kind: str  # peer, formula, ours
    values: list[str] = field(default_factory=list)  # of a recipe's plan and refit
    peer: list[str] = field(default_factory=list)  # arguments of run_peer.py
    formula: str = ""
    recipe: str = ""  # one that ships, on the common text
    own: float = 0.0  # share of the model's own samples among the calibration tokens


METHODS = {
    "optipfair MAW": Method("peer", peer=["optipfair"]),
    "optipfair MAW, data": Method("peer", peer=["optipfair", "--tokens"]),
    "Torch-Pruning": Method("peer", peer=["torch-pruning"]),
    "random": Method("formula", ["plan.score=random"]),
    "firing rate": Method("formula", ["plan.score=fire_rate"]),
    "Wanda-sp": Method("formula", ["plan.score=wanda"]),
    "FLAP": Method("formula", ["plan.score=fluctuation"], formula="flap"),
    "2SSP stage 1": Method("formula", ["plan.score=activation_norm"]),
    "Minitron": Method("formula", formula="minitron"),
    "OSSCAR": Method("formula", ["plan.score=greedy", "refit.method=oneshot", "refit.bias=none"]),
    "Wanda-sp + GRAIL": Method("formula", ["plan.score=wanda"], formula="grail"),
    "kvprune best": Method("ours", recipe="best"),
    "kvprune best, a quarter own samples": Method("ours", recipe="best", own=0.25),
    "kvprune best, all own samples": Method("ours", recipe="best", own=1.0),
    "kvprune large": Method("ours", recipe="large"),
    "kvprune global": Method("ours", recipe="global"),
    "kvprune global, a quarter own samples": Method("ours", recipe="global", own=0.25),
}


class Bench:
    """What all cells share."""

    def __init__(self, runs: Path, data: Path, limit: int, tokens: int) -> None:
        runs.mkdir(parents=True, exist_ok=True)
        self.runs, self.data = runs, data
        whole = (data / "wikitext2.valid.txt").read_text(encoding="utf-8")
        end = whole.rindex("\n", 0, len(whole) * 4 // 5) + 1
        self.text, self.held = runs / "calibrate.txt", whole[end:]
        if not self.text.is_file() or self.text.read_text(encoding="utf-8") != whole[:end]:
            write_text(self.text, whole[:end])  # a new time would make all that was counted stale
        self.dense: Dense = open_dense(BUILTIN)
        self.tokenizer = load_tokenizer(self.dense.source)
        self.limit, self.tokens = limit, tokens

    def calibrated(self, method: Method) -> RunFolder:
        """A run folder with the statistics that a method reads; methods share them."""
        values = dict(item.split("=", 1) for item in method.values) | (_recipe(method.recipe) if method.recipe else {})
        collect = ["counts", *({COLLECTED[score]} if (score := values.get("plan.score")) in COLLECTED else [])]
        text: Any = [{"source": str(self.text), "weight": 1 - method.own}]
        text += [{"source": "self", "weight": method.own}] if method.own else []
        text = "builtin" if method.own == 1 else text  # own samples of this very model, drawn before
        section = {"text": text, "tokens": self.tokens, "sequence_length": LENGTH, "collect": collect}
        recipe = make_recipe({"model": BUILTIN, "calibrate": section, "plan": {"round_to": ROUND_TO}})
        place = self.runs / "-".join([f"own-{method.own:g}" if method.own else "text", str(self.tokens), *collect[1:]])
        kvprune.calibrate(recipe, place)
        return RunFolder(place)

    def slim(self, method: Method, keep: float) -> Any:
        """The slim model."""
        if method.peer:
            return self._by_peer(method, keep)
        run = self.calibrated(method)
        run.values.unlink(missing_ok=True)  # of a cell before, which would be found done
        values = [f"{key}={value}" for key, value in _recipe(method.recipe).items()] if method.recipe else method.values
        plan_values = [item for item in values if item.startswith("plan.")]
        plan = kvprune.plan(run.path, overrides=[f"plan.budget.keep={keep}", *plan_values])
        kvprune.refit(
            run.path, overrides=[item for item in values if item.startswith("refit.")] or ["refit.method=none"]
        )
        model, layout = self.dense.load("auto", "cpu"), self.dense.layout
        new: dict[str, torch.Tensor] = {}
        if method.formula:
            found = self.gathered
            if method.formula == "minitron":
                scores = {name: formulas.minitron(item) for name, item in found.items()}
                plan = formulas.with_kept(plan, formulas.highest(scores, plan.ffns[0].width))
            else:
                new = {"flap": formulas.flap_biases, "grail": formulas.grail_values}[method.formula](
                    model, layout, plan, found
                )
        elif any(item.startswith("refit.method") and not item.endswith("none") for item in values):
            new = read_tensors(run.values)[0]
        mask_slots(model, layout, plan)
        put_values(model, layout, plan, new)
        return model

    @cached_property
    def gathered(self) -> dict[str, formulas.Gathered]:
        """What the formulas read, of the common text."""
        return formulas.gather(self.dense.load("auto", "cpu"), self.dense.layout, self._sequences())

    def _sequences(self) -> torch.Tensor:
        """The tokens of the common text, `[sequences, tokens]`."""
        recipe = make_recipe({"model": BUILTIN, "calibrate": {"text": str(self.text), "tokens": self.tokens}})
        return sequences(recipe.calibrate, self.tokenizer)

    def _by_peer(self, method: Method, keep: float) -> Any:
        out = self.runs / "peer"
        full = self.dense.layout.ffns[0].width
        width = min(range(ROUND_TO, full + 1, ROUND_TO), key=lambda each: abs(each - keep * full))
        arguments = [method.peer[0], self.dense.source.folder, out, "--width", width]
        if "--tokens" in method.peer:
            save_file({"tokens": self._sequences()}, self.runs / "tokens.safetensors")
            arguments += ["--tokens", self.runs / "tokens.safetensors"]
        path = os.pathsep.join([str(PROJECT / ".peers"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, PROJECT / "scripts" / "run_peer.py", *arguments]
        done = subprocess.run(
            [*map(str, command)], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{method.peer[0]}: {done.stderr[-2000:]}")
        return load_model(out, dtype=self.dense.run_dtype("auto", "cpu"), device="cpu")[0]


def _recipe(name: str) -> dict[str, str]:
    """The plan and refit values of a recipe that ships, but for the budget and the rounding."""
    data = parse_yaml((PROJECT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"), name)
    skipped = ("budget", "round_to")
    return {
        f"{section}.{key}": str(value)
        for section in ("plan", "refit")
        for key, value in data.get(section, {}).items()
        if key not in skipped
    }


def _judging(bench: Bench) -> Judging:
    """Judge by the test sets."""
    tests = open_tests(bench.data, bench.tokenizer, bench.limit)
    return lambda model, key: judged(
        model, tests, bench.runs / "eval" / key, key, running=key.startswith(("dense", "kvprune"))
    )


def tuning_texts(bench: Bench) -> dict[str, list[list[int]]]:
    """Windows of the held-back end of the calibration text, and of another domain, in the place of the judging one."""

    def windows(texts: Iterable[str]) -> list[list[int]]:
        ids = [token for text in texts for token in bench.tokenizer(text, verbose=False)["input_ids"]]
        return [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(TUNING_WINDOWS)]

    other = (str(text) for text in documents(TextSource(source=TASK_TEXT), 0))
    return {"wikitext": windows([bench.held]), "lambada": windows(other)}


def _tuning(bench: Bench) -> Judging:
    """Judge by what settings may be chosen by."""
    tests = tuning_texts(bench)
    return lambda model, _: {name: losses(model, some) for name, some in tests.items()}


def _method(name: str) -> Method | None:
    """The method of that name, or of those values of a recipe; None for the dense model."""
    return Method("ours", name.split(",")) if "=" in name else METHODS.get(name)


def _known(name: str) -> str:
    if _method(name) is None:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(METHODS)}")
    return name


def _a_line_a_cell(results: dict[str, Any]) -> str:
    """JSON of the results, sums of losses to 0.001."""
    short = json.loads(json.dumps(results), parse_float=lambda number: round(float(number), 3))
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in short.items()) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder for runs and results, used again")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), type=_known, metavar="NAME")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.8, 0.6])
    parser.add_argument("--tokens", type=int, default=131_072, help="of calibration")
    parser.add_argument("--limit", type=int, default=200, help="questions of each task")
    parser.add_argument("--against", default="kvprune best", choices=METHODS, metavar="NAME")
    parser.add_argument("--table", type=Path, help="write the table here, and its data beside it as .json")
    parser.add_argument("--tune", action="store_true", help="judge on what settings may be chosen by")
    arguments = parser.parse_args()
    if not os.environ.get("KVPRUNE_DATA"):
        raise SystemExit("KVPRUNE_DATA is not set: it names the folder with WikiText-2, LAMBADA and tasks")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    bench = Bench(
        arguments.runs.resolve(), Path(os.environ["KVPRUNE_DATA"]).resolve(), arguments.limit, arguments.tokens
    )
    into = arguments.table.resolve() if arguments.table else None
    os.chdir(bench.data)  # its task files name their data from there
    kept = bench.runs / (
        f"tune-{arguments.tokens}.json" if arguments.tune else f"results-{arguments.tokens}-{arguments.limit}.json"
    )
    results: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    judge = _tuning(bench) if arguments.tune else _judging(bench)
    cells = [("dense", 1.0), *((name, keep) for keep in arguments.keep for name in arguments.methods)]
    for name, keep in cells:
        key = f"{name} {keep:g}"
        if key not in results:
            method = _method(name)
            if method and not method.peer:
                # What methods share is not in their time.
                bench.calibrated(method)
                _ = bench.gathered if method.formula else None
            started = time.perf_counter()
            model = bench.slim(method, keep) if method else bench.dense.load("auto", "cpu")
            made = time.perf_counter()
            found = judge(model, key)
            results[key] = {
                **found,
                "kind": method.kind if method else "",
                "seconds": {"make": round(made - started), "judge": round(time.perf_counter() - made)},
            }
            write_json(kept, results)
            figures = {name: round(perplexity(found[name]), 3) for name in ("wikitext", "lambada")}
            print(key, figures, results[key]["seconds"], flush=True)
    text = table(results, arguments.keep, arguments.against)
    print(text)
    if into:
        write_text(into, text + "\n")
        write_text(into.with_suffix(".json"), _a_line_a_cell(results))


if __name__ == "__main__":
    main()
