"""What a run is: model, recipe, state of each stage, budget, how its slots fire, and results."""

from dataclasses import asdict
from typing import Any

import torch

from kvprune.artifacts import RunFolder, budget_words, read_json, read_meta, read_plan
from kvprune.errors import KvpruneError
from kvprune.ffn.stats import FfnStats, fire_rate, read_stats
from kvprune.reading.firing import grouped
from kvprune.recipe import dump_recipe
from kvprune.results.table import budget_table, grid, recovery_text, refit_table, results_table, width_lines
from kvprune.schema import Recipe
from kvprune.staleness import StageState, artifact

QUANTILE_ELEMENTS = 2**24  # as many as torch.quantile takes
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
        groups = grouped(meta["layout"]["ffns"])
        about["counted"] = {"tokens": meta["counted"], **meta["run"]}
        about["firing"] = {
            "threshold": threshold,
            "ffns": [
                {"name": name, **firing_summary([stats[at] for at in members], threshold)}
                for name, members in groups.items()
            ],
        }
    if artifact(run, "plan").is_file():
        plan = read_plan(run.plan)
        about["plan"] = {
            "budget": plan.budget,
            "before": asdict(plan.before),
            "after": asdict(plan.after),
            "loads": plan.loads,
            "ffns": [
                {
                    "name": ffn.name,
                    "before": ffn.width_before,
                    "after": ffn.width,
                    "guarded": ffn.guarded,
                    "protected": ffn.protected,
                    "tokens": ffn.tokens,
                }
                for ffn in plan.ffns
            ],
        }
    if recipe.refit.method != "none" and artifact(run, "refit").is_file():
        about["refit"] = read_meta(run.values)["ffns"]
    if artifact(run, "export").is_file():
        about["checkpoint"] = {"path": str(run.model), "verified": read_json(run.model / "kvprune.json")["verified"]}
    if recipe.recover.method != "none" and artifact(run, "recover").is_file():
        about["recover"] = {key: value for key, value in read_json(run.recovered).items() if key != "provenance"}
    if artifact(run, "evaluate").is_file():
        about["results"] = read_json(run.results)
    return about


def firing_summary(stats: list[FfnStats], threshold: float) -> dict[str, float]:
    """How the slots of an FFN, or of a layer's experts, fire: share of rare slots, median and 99th percentile of rates.

    `over_tenth_of_peak` is the share of slots whose contribution is over a tenth of the token's loudest, as mean.
    `experts` counts them, and `never` those that no token was routed to.
    """
    used = [item for item in stats if int(item.tokens)]
    if not used and stats[0].gate_total is None:
        raise KvpruneError("nothing is counted in these statistics; run: kvprune calibrate")
    rates = torch.cat([fire_rate(item, threshold) for item in used or stats])
    peaks = torch.stack([item.peak_histogram.double() for item in stats]).sum(0)
    experts = sum(item.gate_total is not None for item in stats)
    return {
        "rare": float((rates < RARE).double().mean()),
        "median": float(rates.median()),
        "p99": float(torch.quantile(rates[:QUANTILE_ELEMENTS], 0.99)),
        "over_tenth_of_peak": float(peaks[1:].sum() / peaks.sum().clamp(min=1)),
        "experts": experts,
        "never": experts - len(used) if experts else 0,
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
        guarded = sum(len(item["guarded"]) for item in plan["ffns"])
        parts += ["", f"plan: requested {budget_words(plan['budget'])}"]
        parts += [f"  {line}" for line in width_lines(plan["ffns"])]
        parts += [f"guarded slots (rare giants): {guarded}"] if guarded else []
        parts += [budget_table(plan["before"], plan["after"]), plan["loads"]]
    if "refit" in about:
        parts += ["", refit_table(about["refit"])]
    if "checkpoint" in about:
        parts += ["", f"checkpoint {about['checkpoint']['path']}"]
    if "recover" in about:
        parts += ["", recovery_text(about["recover"])]
    if "results" in about:
        parts += ["", results_table(about["results"])]
    return "\n".join(parts)


def _firing_table(about: dict[str, Any]) -> str:
    firing = about["firing"]
    head = (
        f"firing rate: share of {about['counted']['tokens']:,} tokens on which a slot writes at least "
        f"{firing['threshold']:g} x the rms of its layer"
    )
    rows = [["FFN", "rare (<0.1%)", "median", "p99", "over 1/10 of peak"]]
    keys = ("rare", "median", "p99", "over_tenth_of_peak")
    rows += [[_firing_name(item), *(f"{item[key]:.2%}" for key in keys)] for item in firing["ffns"]]
    return f"{head}\n{grid(rows)}"


def _firing_name(item: dict[str, Any]) -> str:
    if not item["experts"]:
        return str(item["name"])
    never = f", {item['never']} never routed to" if item["never"] else ""
    return f"{item['name']} ({item['experts']:.0f} experts{never})"
