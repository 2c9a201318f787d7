"""Perplexity of one model under many plans: what the scores are worth, side by side in one run.

    KVPRUNE_DATA=folder python scripts/bench_scores.py

SmolLM2-135M-Instruct (builtin: the dequantised 4-bit file), counted on WikiText-2 validation (32,768 tokens in
sequences of 512), keep 0.8 in every layer, round_to 1; perplexity on the first 12 x 1,024 tokens of WikiText-2 test,
no BOS, 1,023 predictions a window, bfloat16. Removed slots are masked: tests hold that slim is the same.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from quality_judge import WINDOW, losses

import kvprune
from kvprune.artifacts import Plan
from kvprune.dense import Dense, open_dense
from kvprune.recipe import make_recipe
from kvprune.results import intervals
from kvprune.results.table import grid
from kvprune.sources.models import BUILTIN, load_tokenizer
from kvprune.stages.export import mask_slots

PLANS = [
    ["score=wanda"],
    ["score=fluctuation"],
    ["score=activation_norm"],
    ["score=contribution", "p=1.0"],
    ["score=contribution", "p=1.5"],
    ["score=contribution", "p=2.0"],
    ["score=contribution", "p=3.0"],
    ["score=contribution", "p=4.0"],
    ["score=contribution", "p=1.0", "guard=true"],
    ["score=fire_rate", "guard=false"],
    ["score=fire_rate", "guard=true"],
    ["score=fire_rate", "threshold=1.0", "guard=true"],
    ["score=fire_rate", "threshold=4.0", "guard=true"],
    ["score=weight_norm"],
    ["score=random"],
]


def perplexity(model: Any, tokens: list[int], windows: int) -> float:
    """exp of the mean cross-entropy over the first windows of 1,024 `tokens`, no BOS."""
    return intervals.perplexity(losses(model, [tokens[: windows * WINDOW]]))


def masked_perplexity(dense: Dense, plan: Plan, tokens: list[int], windows: int) -> float:
    """Perplexity of the model with the plan's removed slots masked."""
    model = dense.load("auto", "cpu")
    mask_slots(model, dense.layout, plan)
    return perplexity(model, tokens, windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12, help="of 1,024 tokens")
    parser.add_argument("--keep", type=float, default=0.8)
    parser.add_argument("--plans", type=int, default=len(PLANS), help="only the first plans of the list")
    arguments = parser.parse_args()
    if not os.environ.get("KVPRUNE_DATA"):
        raise SystemExit("KVPRUNE_DATA is not set: it names the folder with wikitext2.valid.txt and wikitext2.test.txt")
    data = Path(os.environ["KVPRUNE_DATA"])
    dense = open_dense(BUILTIN)
    text = (data / "wikitext2.test.txt").read_text(encoding="utf-8")
    tokens = load_tokenizer(dense.source)(text, verbose=False)["input_ids"]
    recipe = make_recipe(
        {
            "model": BUILTIN,
            "calibrate": {"text": str(data / "wikitext2.valid.txt"), "tokens": 32768, "sequence_length": 512},
            "plan": {"budget": {"keep": arguments.keep}, "round_to": 1},
        }
    )
    rows = [
        ["plan", "perplexity"],
        ["dense", f"{perplexity(dense.load('auto', 'cpu'), tokens, arguments.windows):.2f}"],
    ]
    print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        kvprune.calibrate(recipe, run)
        for options in PLANS[: arguments.plans]:
            plan = kvprune.plan(run, overrides=[f"plan.{option}" for option in options], dry_run=True)
            rows.append([", ".join(options), f"{masked_perplexity(dense, plan, tokens, arguments.windows):.2f}"])
            print(rows[-1], flush=True)
    print(grid(rows))


if __name__ == "__main__":
    main()
