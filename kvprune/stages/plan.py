"""Plan: decide which slots stay. Milliseconds, from the statistics alone; no weight is read."""

import math

import torch
from torch import Tensor

from kvprune.artifacts import FfnPlan, Plan, RunFolder, Size, digest, provenance
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import Checkpoint
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.scores import SCORES, giants
from kvprune.ffn.stats import FfnStats
from kvprune.recipe import PlanSection, Recipe, stage_recipe


def model_size(layout: Layout, checkpoint: Checkpoint, names: dict[str, str], width: int) -> Size:
    """The size of the model with every FFN cut to `width`; at the full width, as it is.

    `names` maps model parameters to names on disk. Bytes are those of the weight files; a slim file's header is never
    longer than the dense one's, so they are an upper bound that is met to a few bytes.
    """
    removed = layout.width - width
    per_slot = sum(ffn.params_per_slot for ffn in layout.ffns)
    return Size(
        slots=width * len(layout.ffns),
        ffn_params=sum(ffn.params_per_slot * width + ffn.hidden * ffn.value.bias for ffn in layout.ffns),
        total_params=layout.total_params - removed * per_slot,
        bytes=checkpoint.bytes - removed * sum(_bytes_per_slot(ffn, checkpoint, names) for ffn in layout.ffns),
    )


def _bytes_per_slot(ffn: Ffn, checkpoint: Checkpoint, names: dict[str, str]) -> int:
    entries = [checkpoint.tensors[names[name]] for name in ffn.cuts()]
    return sum((entry.end - entry.start) // ffn.width for entry in entries)


def choose_width(section: PlanSection, layout: Layout, checkpoint: Checkpoint, names: dict[str, str]) -> int:
    """The width of every FFN that meets the budget: nearest for `keep`, at most for `params` and `bytes`.

    Raises KvpruneError, with what is possible, where no multiple of `round_to` does.
    """
    budget, full = section.budget, layout.width
    rounded = [*range(section.round_to, full, section.round_to), full]  # nothing removed is always a width
    widths = [width for width in rounded if width >= min(section.floor, full)]
    least = model_size(layout, checkpoint, names, widths[0])
    if budget.keep is not None:
        wanted = budget.keep * full
        width = min([0, *rounded], key=lambda width: (abs(width - wanted), -width))  # a tie keeps more
        if width < widths[0]:
            raise KvpruneError(
                f"plan.budget.keep: {budget.keep:g} of {full} slots is {wanted:.0f}, and the smallest width that "
                f"round_to {section.round_to} and floor {section.floor} allow is {widths[0]}; raise keep or lower them"
            )
    else:
        unit, ceiling = ("total_params", budget.params) if budget.params is not None else ("bytes", budget.bytes)
        assert ceiling is not None  # a budget has exactly one unit
        fitting = [width for width in widths if getattr(model_size(layout, checkpoint, names, width), unit) <= ceiling]
        if not fitting:
            raise KvpruneError(
                f"plan.budget: {ceiling:,} {unit.removeprefix('total_')} cannot be met: with round_to {section.round_to} "
                f"and floor {section.floor} the smallest width is {widths[0]}, and the model then has "
                f"{least.total_params:,} params and {least.bytes:,} bytes"
            )
        width = max(fitting)
    _check_protected(section, layout, width)
    return width


def _check_protected(section: PlanSection, layout: Layout, width: int) -> None:
    for index, slots in section.protect.items():
        if index >= len(layout.ffns):
            raise KvpruneError(f"plan.protect.{index}: the model has layers 0 to {len(layout.ffns) - 1}")
        if slots and max(slots) >= layout.width:
            raise KvpruneError(f"plan.protect.{index}: slot {max(slots)} is out of range 0 to {layout.width - 1}")
        if len(set(slots)) > width:
            raise KvpruneError(f"plan.protect.{index}: {len(set(slots))} slots are more than the width {width} of the plan")


def make_plan(
    recipe: Recipe,
    layout: Layout,
    checkpoint: Checkpoint,
    names: dict[str, str],
    stats: list[FfnStats],
    run: RunFolder,
) -> Plan:
    """Score the slots and keep the best of each FFN. Deterministic: ties go to the lower slot."""
    section = recipe.plan
    width = choose_width(section, layout, checkpoint, names)
    score = SCORES[section.score]
    ffns = []
    for index, (ffn, item) in enumerate(zip(layout.ffns, stats, strict=True)):
        protected = sorted(set(section.protect.get(index, [])))
        guarded = [slot for slot in giants(item) if slot not in protected] if section.guard else []
        guarded = sorted(guarded[: width - len(protected)])
        kept = best_slots(score(item, section, index), width, [*protected, *guarded])
        ffns.append(FfnPlan(ffn.name, ffn.width, kept, guarded, protected))
    before = model_size(layout, checkpoint, names, layout.width)
    return Plan(
        provenance=provenance("plan", stage_recipe(recipe, "plan"), {"stats": digest(run.stats)}),
        budget=section.budget.model_dump(exclude_none=True),
        before=before,
        after=model_size(layout, checkpoint, names, width),
        ffns=ffns,
    )


def best_slots(scores: Tensor, width: int, always: list[int]) -> list[int]:
    """The `width` slots with the highest of `scores` `[slots]`, `always` first, sorted by number."""
    if not bool(torch.isfinite(scores).all()):
        raise KvpruneError(f"slot {int((~torch.isfinite(scores)).nonzero()[0])} has a score that is not finite")
    ranked = scores.clone()
    ranked[always] = math.inf
    return sorted(torch.argsort(ranked, descending=True, stable=True)[:width].tolist())
