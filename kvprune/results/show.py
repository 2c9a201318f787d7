"""What a run is: model, recipe, state of each stage, budget, how its slots fire, and results."""

from dataclasses import asdict
from typing import Any

import torch

from kvprune.artifacts import RunFolder, budget_words, read_json, read_meta, read_plan
from kvprune.errors import KvpruneError
from kvprune.ffn.stats import FfnStats, fire_rate, read_stats
from kvprune.recipe import dump_recipe
from kvprune.results.table import budget_table, grid, refit_table, results_table
from kvprune.schema import Recipe
from kvprune.staleness import StageState, artifact

RARE = 1e-3  # a slot is rare when it fires on a smaller share of the tokens
DEFAULT_THRESHOLD = 2.0


def describe(run: RunFolder, recipe: Recipe, states: dict[str, StageState]) -> dict[str, Any]:
    """All that `show` prints, as plain data."""
    about: dict[str, Any] = {
        "run": str(run.path),
        "recipe": recipe.model_dump(mode="json"),
        "stages": [asdict(state) for state in states.values()],
    }
    if artifact(run, "calibrate").is_file():
        stats, meta = read_stats(run.stats)
        threshold = recipe.plan.threshold or DEFAULT_THRESHOLD
        about["model"] = meta["model"]
        about["counted"] = {"tokens": int(stats[0].tokens), **meta["run"]}
        about["firing"] = {
            "threshold": threshold,
            "layers": [firing_summary(item, threshold) for item in stats],
        }
    if artifact(run, "plan").is_file():
        plan = read_plan(run.plan)
        about["plan"] = {
            "budget": plan.budget,
            "before": asdict(plan.before),
            "after": asdict(plan.after),
            "layers": [
                {
                    "name": ffn.name,
                    "before": ffn.width_before,
                    "after": ffn.width,
                    "guarded": ffn.guarded,
                    "protected": ffn.protected,
                }
                for ffn in plan.ffns
            ],
        }
    if recipe.refit.method != "none" and artifact(run, "refit").is_file():
        about["refit"] = read_meta(run.values)["layers"]
    if artifact(run, "export").is_file():
        about["checkpoint"] = {"path": str(run.model), "verified": read_json(run.model / "kvprune.json")["verified"]}
    if artifact(run, "evaluate").is_file():
        about["results"] = read_json(run.results)
    return about


def firing_summary(stats: FfnStats, threshold: float) -> dict[str, float]:
    """How one FFN's slots fire: share of rare slots, median and 99th percentile of the firing rate, loud keys.

    `over_tenth_of_peak` is the share of slots whose contribution is over a tenth of the token's loudest, as mean.
    """
    if int(stats.tokens) == 0:
        raise KvpruneError("nothing is counted in these statistics; run: kvprune calibrate")
    rates = fire_rate(stats, threshold)
    peaks = stats.peak_histogram.double()
    return {
        "rare": float((rates < RARE).double().mean()),
        "median": float(rates.median()),
        "p99": float(torch.quantile(rates, 0.99)),
        "over_tenth_of_peak": float(peaks[1:].sum() / peaks.sum()),
    }


def render(about: dict[str, Any]) -> str:
    """`describe`'s data as text."""
    parts = [f"run {about['run']}", "", dump_recipe(Recipe.model_validate(about["recipe"])).rstrip(), ""]
    for state in about["stages"]:
        reason = f" ({state['reason']})" if state["reason"] else ""
        parts.append(f"{state['stage']:<10} {state['status']}{reason}")
    if "model" in about:
        model = about["model"]
        commit = f" at commit {model['commit']}" if model["commit"] else ""
        parts += ["", f"model {model['title']}{commit}{', ' + model['note'] if model['note'] else ''}"]
        parts += ["", _firing_table(about)]
    if "plan" in about:
        plan = about["plan"]
        layer = plan["layers"][0]
        requested = budget_words(plan["budget"])
        guarded = sum(len(item["guarded"]) for item in plan["layers"])
        parts += [
            "",
            f"plan: width {layer['before']} -> {layer['after']} in {len(plan['layers'])} layers; requested {requested}",
        ]
        parts += [f"guarded slots (rare giants): {guarded}"] if guarded else []
        parts += [budget_table(plan["before"], plan["after"])]
    if "refit" in about:
        parts += ["", refit_table(about["refit"])]
    if "checkpoint" in about:
        parts += ["", f"checkpoint {about['checkpoint']['path']}"]
    if "results" in about:
        parts += ["", results_table(about["results"])]
    return "\n".join(parts)


def _firing_table(about: dict[str, Any]) -> str:
    firing = about["firing"]
    head = (
        f"firing rate: share of {about['counted']['tokens']:,} tokens on which a slot writes at least "
        f"{firing['threshold']:g} x the rms of its layer"
    )
    rows = [["layer", "rare (<0.1%)", "median", "p99", "over 1/10 of peak"]]
    rows += [
        [str(index), *(f"{layer[key]:.2%}" for key in ("rare", "median", "p99", "over_tenth_of_peak"))]
        for index, layer in enumerate(firing["layers"])
    ]
    return f"{head}\n{grid(rows)}"
