"""Plan: decide which slots stay. Milliseconds, from the statistics alone; no weight is read."""

import math

import torch
from torch import Tensor

from kvprune.artifacts import FfnPlan, Plan, Size, provenance
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.scores import SCORES, giants
from kvprune.ffn.stats import FfnStats
from kvprune.recipe import stage_recipe
from kvprune.schema import PlanSection, Recipe


def model_size(dense: Dense, width: int) -> Size:
    """The size of the model with every FFN cut to `width`; at the full width, as it is.

    Bytes are those of the weight files; a slim file's header is never
    longer than the dense one's, so they are an upper bound that is met to a few bytes.
    """
    layout = dense.layout
    removed = layout.width - width
    per_slot = sum(ffn.params_per_slot for ffn in layout.ffns)
    return Size(
        slots=width * len(layout.ffns),
        ffn_params=sum(ffn.params_per_slot * width + ffn.hidden * ffn.value.bias for ffn in layout.ffns),
        total_params=layout.total_params - removed * per_slot,
        bytes=dense.checkpoint.bytes - removed * sum(_bytes_per_slot(ffn, dense) for ffn in layout.ffns),
    )


def _bytes_per_slot(ffn: Ffn, dense: Dense) -> int:
    entries = [dense.checkpoint.tensors[dense.names[name]] for name in ffn.cuts()]
    return sum((entry.end - entry.start) // ffn.width for entry in entries)


def choose_width(section: PlanSection, dense: Dense) -> int:
    """The width of every FFN that meets the budget: nearest for `keep`, at most for `params` and `bytes`.

    Raises KvpruneError, with what is possible, where no multiple of `round_to` does.
    """
    budget, full = section.budget, dense.layout.width
    rounded = [*range(section.round_to, full, section.round_to), full]  # nothing removed is always a width
    widths = [width for width in rounded if width >= min(section.floor, full)]
    least = model_size(dense, widths[0])
    if budget.keep is not None:
        wanted = budget.keep * full
        width = min([0, *rounded], key=lambda width: (abs(width - wanted), -width))  # a tie keeps more
        if width < widths[0]:
            raise KvpruneError(
                f"plan.budget.keep: {budget.keep:g} of {full} slots is {wanted:.0f}, and the smallest width that "
                f"round_to {section.round_to} and floor {section.floor} allow is {widths[0]}; raise keep or lower them"
            )
    else:
        key, ceiling = ("params", budget.params) if budget.params is not None else ("bytes", budget.bytes)
        assert ceiling is not None  # a budget has exactly one unit
        unit = {"params": "total_params", "bytes": "bytes"}[key]
        fitting = [width for width in widths if getattr(model_size(dense, width), unit) <= ceiling]
        if not fitting:
            raise KvpruneError(
                f"plan.budget.{key}: {ceiling:,} cannot be met: round_to {section.round_to} and "
                f"floor {section.floor} allow no width below {widths[0]}, and the model then has "
                f"{least.total_params:,} params and {least.bytes:,} bytes"
            )
        width = max(fitting)
    _check_protected(section, dense.layout, width)
    return int(width)


def _check_protected(section: PlanSection, layout: Layout, width: int) -> None:
    for index, slots in section.protect.items():
        if index >= len(layout.ffns):
            raise KvpruneError(f"plan.protect.{index}: the model has layers 0 to {len(layout.ffns) - 1}")
        if slots and max(slots) >= layout.width:
            raise KvpruneError(f"plan.protect.{index}: slot {max(slots)} is out of range 0 to {layout.width - 1}")
        if len(set(slots)) > width:
            raise KvpruneError(
                f"plan.protect.{index}: {len(set(slots))} slots are more than the width {width} of the plan"
            )


def make_plan(recipe: Recipe, dense: Dense, stats: list[FfnStats], stats_digest: str) -> Plan:
    """Score the slots and keep the best of each FFN. Deterministic: ties go to the lower slot."""
    section, layout = recipe.plan, dense.layout
    width = choose_width(section, dense)
    score = SCORES[section.score]
    ffns = []
    for index, (ffn, item) in enumerate(zip(layout.ffns, stats, strict=True)):
        protected = sorted(set(section.protect.get(index, [])))
        guarded = [slot for slot in giants(item) if slot not in protected] if section.guard else []
        guarded = sorted(guarded[: width - len(protected)])
        kept = best_slots(score(item, section, index), width, [*protected, *guarded])
        ffns.append(FfnPlan(ffn.name, ffn.width, kept, guarded, protected))
    before = model_size(dense, layout.width)
    return Plan(
        provenance=provenance("plan", stage_recipe(recipe, "plan"), {"stats": stats_digest}),
        budget=section.budget.model_dump(exclude_none=True),
        before=before,
        after=model_size(dense, width),
        ffns=ffns,
    )


def best_slots(scores: Tensor, width: int, always: list[int]) -> list[int]:
    """The `width` slots with the highest of `scores` `[slots]`, `always` first, sorted by number."""
    if not bool(torch.isfinite(scores).all()):
        raise KvpruneError(f"slot {int((~torch.isfinite(scores)).nonzero()[0])} has a score that is not finite")
    ranked = scores.clone()
    ranked[always] = math.inf
    return sorted(torch.argsort(ranked, descending=True, stable=True)[:width].tolist())
