"""Plan: decide which slots stay. Milliseconds, from the statistics alone; no weight is read."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from kvprune.artifacts import FfnPlan, Plan, Size, provenance
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.layout import Field, Layout
from kvprune.ffn.scores import SCORES, giants
from kvprune.ffn.stats import FfnStats
from kvprune.recipe import stage_recipe
from kvprune.schema import PlanSection, Recipe

Widths = dict[str, int]  # values of the config's width fields, by their names
ALIGNED_BYTES = 16  # transformers' grouped products of experts fail on rows that are no multiple of this


def full_widths(layout: Layout) -> Widths:
    """The fields as they are."""
    return {field.name: field.value for field in layout.fields}


def ffn_widths(layout: Layout, widths: Widths) -> list[int]:
    """Slots of every FFN with the fields at these values."""
    fields = {name: field for field in layout.fields for name in field.multiples}
    return [widths[fields[ffn.name].name] * fields[ffn.name].multiples[ffn.name] for ffn in layout.ffns]


def model_size(dense: Dense, widths: Sequence[int]) -> Size:
    """The size of the model with each FFN cut to its width of `widths`.

    Bytes are those of the weight files; a slim file's header is never
    longer than the dense one's, so they are an upper bound that is met to a few bytes.
    """
    layout = dense.layout
    removed = [(ffn, ffn.width - width) for ffn, width in zip(layout.ffns, widths, strict=True)]
    return Size(
        slots=sum(widths),
        ffn_params=sum(
            ffn.params_per_slot * width + ffn.hidden * (ffn.value_bias is not None)
            for ffn, width in zip(layout.ffns, widths, strict=True)
        ),
        total_params=layout.total_params - sum(ffn.params_per_slot * slots for ffn, slots in removed),
        bytes=dense.checkpoint.bytes - sum(dense.bytes_per_slot(ffn) * slots for ffn, slots in removed),
    )


def choose_widths(section: PlanSection, dense: Dense) -> Widths:
    """The width fields that meet the budget: each nearest for `keep`; for `params` and `bytes`, the largest share.

    Raises KvpruneError, with what is possible, where no multiple of `round_to` does.
    """
    layout, budget = dense.layout, section.budget
    steps = {field.name: _steps(section, layout, field) for field in layout.fields}
    if budget.keep is not None:
        widths = {field.name: _nearest(section, field, steps[field.name]) for field in layout.fields}
    else:
        widths = _under_ceiling(section, dense, steps)
    _check_alignment(dense, widths)
    _check_protected(section, layout, ffn_widths(layout, widths))
    return widths


def _steps(section: PlanSection, layout: Layout, field: Field) -> list[int]:
    """The values that a field may have, ascending."""
    rounded = [*range(section.step, field.value, section.step), field.value]  # nothing removed is always a width
    least = min(field.multiples.values())
    return [value for value in rounded if value * least >= min(section.floor, field.value * least)]


def _nearest(section: PlanSection, field: Field, steps: list[int]) -> int:
    keep, full = section.budget.keep, field.value
    assert keep is not None
    wanted = keep * full
    below = range(0, steps[0], section.step)
    width = min([*below, *steps], key=lambda width: (abs(width - wanted), -width))  # a tie keeps more
    if width < steps[0]:
        raise KvpruneError(
            f"plan.budget.keep: {keep:g} of {full} slots ({field.name}) is {wanted:.0f}, and the smallest width that "
            f"round_to {section.round_to} and floor {section.floor} allow is {steps[0]}; raise keep or lower them"
        )
    return int(width)


def _under_ceiling(section: PlanSection, dense: Dense, steps: dict[str, list[int]]) -> Widths:
    """Of every field the same share, as large as the budget allows, rounded down."""
    layout, budget = dense.layout, section.budget
    key, ceiling = ("params", budget.params) if budget.params is not None else ("bytes", budget.bytes)
    assert ceiling is not None  # a budget has exactly one unit
    unit = {"params": "total_params", "bytes": "bytes"}[key]
    full = full_widths(layout)

    def at(share: Fraction) -> Widths:
        return {
            name: max((step for step in values if step <= share * full[name]), default=values[0])
            for name, values in steps.items()
        }

    shares = sorted({Fraction(step, full[name]) for name, values in steps.items() for step in values})
    sizes = [model_size(dense, ffn_widths(layout, at(share))) for share in (shares[0], shares[-1])]
    if getattr(sizes[0], unit) > ceiling:
        raise KvpruneError(
            f"plan.budget.{key}: {ceiling:,} cannot be met: round_to {section.round_to} and "
            f"floor {section.floor} allow no width below {', '.join(str(values[0]) for values in steps.values())}, and "
            f"the model then has {sizes[0].total_params:,} params and {sizes[0].bytes:,} bytes"
        )
    fitting = bisect_right(
        shares, ceiling, key=lambda share: getattr(model_size(dense, ffn_widths(layout, at(share))), unit)
    )
    return at(shares[fitting - 1])


def _check_alignment(dense: Dense, widths: Widths) -> None:
    """Experts of a width that their kernels cannot multiply load, and fail at the first forward."""
    for ffn in dense.layout.ffns:
        field = dense.layout.field_of(ffn)
        width = widths[field.name] * field.multiples[ffn.name]
        aligned = ALIGNED_BYTES // dense.entries(ffn.value.name)[0].itemsize
        if ffn.expert is not None and width != ffn.width and width % aligned:
            raise KvpruneError(
                f"plan.round_to: experts' width {width} is no multiple of {aligned}, which transformers' products of "
                f"experts need ({field.name}); set plan.round_to to moe, or to a multiple of {aligned}"
            )


def _check_protected(section: PlanSection, layout: Layout, widths: list[int]) -> None:
    for index, slots in section.protect.items():
        if index >= len(layout.layers):
            raise KvpruneError(f"plan.protect.{index}: the model has layers 0 to {len(layout.layers) - 1}")
        mine = layout.in_layer(index)
        if len(mine) != 1:
            raise KvpruneError(
                f"plan.protect.{index}: layer {index} has {len(mine)} FFNs; only a single one's slots can be"
            )
        full, width = layout.ffns[mine[0]].width, widths[mine[0]]
        if slots and max(slots) >= full:
            raise KvpruneError(f"plan.protect.{index}: slot {max(slots)} is out of range 0 to {full - 1}")
        if len(set(slots)) > width:
            raise KvpruneError(
                f"plan.protect.{index}: {len(set(slots))} slots are more than the width {width} of the plan"
            )


def make_plan(recipe: Recipe, dense: Dense, stats: list[FfnStats], stats_digest: str) -> Plan:
    """Score the slots and keep the best of each FFN. Deterministic: ties go to the lower slot."""
    section, layout = recipe.plan, dense.layout
    widths = ffn_widths(layout, choose_widths(section, dense))
    score = SCORES[section.score]
    ffns = []
    for index, (ffn, item, width) in enumerate(zip(layout.ffns, stats, widths, strict=True)):
        protected = sorted(set(section.protect.get(layout.layers.index(ffn.layer), [])))
        guarded = [slot for slot in giants(item) if slot not in protected] if section.guard else []
        guarded = sorted(guarded[: width - len(protected)])
        kept = best_slots(score(item, section, index), width, [*protected, *guarded])
        ffns.append(FfnPlan(ffn.name, ffn.width, kept, guarded, protected, int(item.tokens)))
    return Plan(
        provenance=provenance("plan", stage_recipe(recipe, "plan"), {"stats": stats_digest}),
        budget=section.budget.model_dump(exclude_none=True),
        before=model_size(dense, [ffn.width for ffn in layout.ffns]),
        after=model_size(dense, widths),
        ffns=ffns,
    )


def best_slots(scores: Tensor, width: int, always: list[int]) -> list[int]:
    """The `width` slots with the highest of `scores` `[slots]`, `always` first, sorted by number."""
    if not bool(torch.isfinite(scores).all()):
        raise KvpruneError(f"slot {int((~torch.isfinite(scores)).nonzero()[0])} has a score that is not finite")
    ranked = scores.clone()
    ranked[always] = math.inf
    return sorted(torch.argsort(ranked, descending=True, stable=True)[:width].tolist())
