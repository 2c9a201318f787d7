"""What refitting the values is worth: method, target, tokens, text and budget, side by side in one run.

    KVPRUNE_DATA=folder python scripts/bench_refit.py --runs runs/bench

SmolLM2-135M-Instruct (builtin: the dequantised 4-bit file), sequences of 512, round_to 1. Perplexity on the first
12 x 1,024 tokens of WikiText-2 test and 10 x 1,024 tokens of LAMBADA's running text, no BOS, 1,023 predictions a
window. Values are refitted and kept exactly as an export writes them; removed slots are masked, which tests hold to be
the same. What is done is kept in the folder and not done again.
"""

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from bench_scores import perplexity

import kvprune
from kvprune.artifacts import RunFolder, read_plan, read_tensors, write_json
from kvprune.dense import Dense, open_dense
from kvprune.recipe import make_recipe
from kvprune.results.table import grid
from kvprune.schema import COLLECTED
from kvprune.sources.models import BUILTIN, load_tokenizer
from kvprune.stages.export import mask_slots, put_values

LAMBADA_TEXTS = 400  # enough for the tokens that are read


def test_tokens(data: Path, tokenizer: Any) -> dict[str, tuple[list[int], int]]:
    """Token ids of each test text, and how many windows of it are read."""
    wikitext = (data / "wikitext2.test.txt").read_text(encoding="utf-8")
    rows = (data / "lambada_openai.test.jsonl").read_text(encoding="utf-8").split("\n")[:LAMBADA_TEXTS]
    lambada = "\n\n".join(json.loads(row)["text"] for row in rows)
    texts = {"WikiText-2": (wikitext, 12), "LAMBADA": (lambada, 10)}
    return {name: (tokenizer(text, verbose=False)["input_ids"], windows) for name, (text, windows) in texts.items()}


def judge(dense: Dense, run: RunFolder | None, refitted: bool, tests: dict[str, tuple[list[int], int]]) -> list[float]:
    """Perplexities of the plan of `run`, or of the dense model."""
    model = dense.load("auto", "cpu")
    if run is not None:
        plan = read_plan(run.plan)
        mask_slots(model, dense.layout, plan)
        put_values(model, dense.layout, plan, read_tensors(run.values)[0] if refitted else {})
    return [perplexity(model, tokens, windows) for tokens, windows in tests.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder for runs and results, used again")
    parser.add_argument(
        "--texts", nargs="+", default=["wikitext", "self", "half"], choices=["wikitext", "self", "half"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--keep", nargs="+", type=float, default=[0.8, 0.6])
    parser.add_argument("--scores", nargs="+", default=["wanda"], help="as wanda, or contribution,p=3.0")
    parser.add_argument(
        "--refits",
        nargs="+",
        default=["none", "oneshot", "sequential"],
        help="as none, oneshot, or sequential,target=output,ridge=auto",
    )
    parser.add_argument("--allocations", nargs="+", default=["uniform"], choices=["uniform", "global", "sensitivity"])
    arguments = parser.parse_args()
    if not os.environ.get("KVPRUNE_DATA"):
        raise SystemExit("KVPRUNE_DATA is not set: it names the folder with WikiText-2 and LAMBADA")
    data = Path(os.environ["KVPRUNE_DATA"])
    dense = open_dense(BUILTIN)
    tests = test_tokens(data, load_tokenizer(dense.source))
    kept = arguments.runs / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}

    def result(name: str, make: Any) -> list[Any]:
        if name not in results:
            started = time.perf_counter()
            results[name] = [*make(), round(time.perf_counter() - started)]
            write_json(kept, results)
            print(name, *results[name], flush=True)
        found: list[Any] = results[name]
        return found

    arguments.runs.mkdir(parents=True, exist_ok=True)
    rows = [["text", "tokens", "keep", "score", "refit", "allocation", *tests, "seconds"]]
    rows.append(["(dense)", *[""] * 5, *_cells(result("dense", lambda: judge(dense, None, False, tests)))])
    wikitext = str(data / "wikitext2.valid.txt")
    sources: dict[str, Any] = {"wikitext": wikitext, "self": "self", "half": [wikitext, "self"]}
    cells = itertools.product(
        arguments.texts,
        arguments.tokens,
        arguments.keep,
        arguments.scores,
        arguments.refits,
        arguments.allocations,
    )
    for text, tokens, keep, score, refit, allocation in cells:
        collected = COLLECTED.get(score.partition(",")[0])
        place = arguments.runs / "-".join([text, str(tokens), *([collected] if collected else [])])
        recipe = make_recipe(
            {
                "model": BUILTIN,
                "calibrate": {
                    "text": sources[text],
                    "tokens": tokens,
                    "sequence_length": 512,
                    "collect": ["counts", *([collected] if collected else [])],
                },
                "plan": {"round_to": 1},
            }
        )
        overrides = [f"plan.budget.keep={keep}", *_options("plan.score", score), f"plan.allocation={allocation}"]

        def make(
            recipe: Any = recipe, place: Path = place, overrides: list[str] = overrides, refit: str = refit
        ) -> list[float]:
            kvprune.calibrate(recipe, place)
            kvprune.plan(place, overrides=overrides)
            kvprune.refit(place, overrides=_options("refit.method", refit))
            return judge(dense, RunFolder(place), refit != "none", tests)

        found = result(
            " ".join(map(str, (text, tokens, keep, score, refit, allocation))).removesuffix(" uniform"), make
        )
        rows.append([text, str(tokens), str(keep), score, refit, allocation, *_cells(found)])
    print(grid(rows))


def _options(key: str, text: str) -> list[str]:
    """`score,p=3.0` as recipe values of that section."""
    first, *rest = text.split(",")
    section = key.partition(".")[0]
    return [f"{key}={first}", *(f"{section}.{item}" for item in rest)]


def _cells(found: list[Any]) -> list[str]:
    return [*(f"{value:.2f}" for value in found[:-1]), str(found[-1])]


if __name__ == "__main__":
    main()
