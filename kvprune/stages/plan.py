"""Plan: decide which slots stay, from the statistics, and from losses where they were measured; no weight is read."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from kvprune.artifacts import FfnPlan, Plan, Size, budget_words, provenance
from kvprune.dense import Dense
from kvprune.errors import KvpruneError, naming
from kvprune.ffn.allocate import Limit, allocate, curve_worth, score_worth, units_of
from kvprune.ffn.layout import Ffn, Field, Layout
from kvprune.ffn.scores import SCORES, giants
from kvprune.ffn.stats import FfnStats
from kvprune.recipe import stage_recipe
from kvprune.schema import PlanSection, Recipe

Widths = dict[str, int]  # values of the config's width fields, by their names
ALIGNED_BYTES = 16  # transformers' grouped products of experts fail on rows that are no multiple of this


def ffn_widths(layout: Layout, widths: Widths) -> list[int]:
    """Slots of every FFN with the fields at these values."""
    fields = {name: field for field in layout.fields for name in field.multiples}
    return [fields[ffn.name].width(ffn, widths[fields[ffn.name].name]) for ffn in layout.ffns]


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
    steps = field_steps(section, layout)
    if budget.keep is not None:
        widths = {field.name: _nearest(section, field, steps[field.name]) for field in layout.fields}
    else:
        widths = _under_ceiling(section, dense, steps)
    _check_alignment(dense, ffn_widths(layout, widths))
    return widths


def field_steps(section: PlanSection, layout: Layout) -> dict[str, list[int]]:
    """The values that each field may have, ascending."""
    return {field.name: _steps(section, layout, field) for field in layout.fields}


def _steps(section: PlanSection, layout: Layout, field: Field) -> list[int]:
    rounded = [*range(section.step, field.value, section.step), field.value]  # nothing removed is always a width
    least, pieces = min(field.multiples.values()), math.lcm(*(item.denominator for item in field.multiples.values()))
    floor = min(section.floor, field.value * least)
    return [value for value in rounded if value % pieces == 0 and value * least >= floor]


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
    full = {field.name: field.value for field in layout.fields}

    def at(share: Fraction) -> Widths:
        return {
            name: max((step for step in values if step <= share * full[name]), default=values[0])
            for name, values in steps.items()
        }

    shares = sorted({Fraction(step, full[name]) for name, values in steps.items() for step in values})
    least = model_size(dense, ffn_widths(layout, at(shares[0])))
    if getattr(least, unit) > ceiling:
        raise KvpruneError(
            f"plan.budget.{key}: {ceiling:,} cannot be met: round_to {section.round_to} and "
            f"floor {section.floor} allow no width below {', '.join(str(values[0]) for values in steps.values())}, and "
            f"the model then has {least.total_params:,} params and {least.bytes:,} bytes"
        )
    fitting = bisect_right(
        shares, ceiling, key=lambda share: getattr(model_size(dense, ffn_widths(layout, at(share))), unit)
    )
    return at(shares[fitting - 1])


def _check_alignment(dense: Dense, widths: Sequence[int]) -> None:
    """Experts of a width that their kernels cannot multiply load, and fail at the first forward."""
    for ffn, width in zip(dense.layout.ffns, widths, strict=True):
        if ffn.expert is None or width == ffn.width:
            continue
        aligned = ALIGNED_BYTES // dense.entries(ffn.value.name)[0].itemsize
        if width % aligned:
            raise KvpruneError(
                f"plan.round_to: width {width} of experts is no multiple of {aligned}, which transformers' products "
                f"of experts need in {dense.entries(ffn.value.name)[0].dtype}; set plan.round_to to moe or to a "
                f"multiple of {aligned}"
            )


def check_protected(section: PlanSection, layout: Layout, widths: list[int]) -> None:
    """Raise KvpruneError where slots that are never removed are none, or more than an FFN's width of `widths`."""
    for index, slots in section.protect.items():
        if index >= len(layout.layers):
            raise KvpruneError(f"plan.protect.{index}: the model has layers 0 to {len(layout.layers) - 1}")
        if not slots:
            continue
        mine = layout.in_layer(index)
        if len(mine) != 1:
            raise KvpruneError(
                f"plan.protect.{index}: layer {index} has {len(mine)} FFNs; slots of an only one can be protected"
            )
        full, width = layout.ffns[mine[0]].width, widths[mine[0]]
        if slots and max(slots) >= full:
            raise KvpruneError(f"plan.protect.{index}: slot {max(slots)} is out of range 0 to {full - 1}")
        if len(set(slots)) > width:
            raise KvpruneError(
                f"plan.protect.{index}: {len(set(slots))} slots are more than the width {width} of the plan"
            )


Scores = dict[str, Tensor]  # float64 [slots] by FFN names, higher ones stay
Curves = dict[str, dict[int, float]]  # losses by units and values of their fields


def slot_scores(section: PlanSection, layout: Layout, stats: list[FfnStats]) -> Scores:
    """Scores of all slots."""
    score = SCORES[section.score]
    items = enumerate(zip(layout.ffns, stats, strict=True))
    return {ffn.name: score(item, section, index).double() for index, (ffn, item) in items}


def protected_slots(section: PlanSection, layout: Layout, ffn: Ffn) -> list[int]:
    """The slots of an FFN that are never removed."""
    return sorted(set(section.protect.get(layout.layers.index(ffn.layer), [])))


def make_plan(
    recipe: Recipe, dense: Dense, stats: list[FfnStats], stats_digest: str, curves: Curves | None = None
) -> Plan:
    """Score the slots and keep the best of each FFN. Deterministic: ties go to the lower slot.

    `curves` are what allocation sensitivity has measured. Raises KvpruneError where the budget cannot be met.
    """
    section, layout = recipe.plan, dense.layout
    scores = slot_scores(section, layout, stats)
    if section.allocation == "uniform":
        widths = ffn_widths(layout, choose_widths(section, dense))
    else:
        widths = _widths_by_layer(section, dense, scores, curves)
    check_protected(section, layout, widths)
    ffns = []
    for ffn, item, width in zip(layout.ffns, stats, widths, strict=True):
        protected = protected_slots(section, layout, ffn)
        guarded = [slot for slot in giants(item) if slot not in protected] if section.guard else []
        guarded = sorted(guarded[: width - len(protected)])
        with naming(ffn.name):
            kept = best_slots(scores[ffn.name], width, [*protected, *guarded])
        ffns.append(FfnPlan(ffn.name, ffn.width, kept, guarded, protected, int(item.tokens)))
    return Plan(
        provenance=provenance("plan", stage_recipe(recipe, "plan"), {"stats": stats_digest}),
        budget=section.budget.model_dump(exclude_none=True),
        before=model_size(dense, [ffn.width for ffn in layout.ffns]),
        after=model_size(dense, widths),
        ffns=ffns,
        layers=layer_fields(layout, widths),
    )


def _widths_by_layer(section: PlanSection, dense: Dense, scores: Scores, curves: Curves | None) -> list[int]:
    """Slots of every FFN where layers differ: one cut through all scores, or along measured curves."""
    layout, budget = dense.layout, section.budget
    least = {ffn.name: len(protected_slots(section, layout, ffn)) for ffn in layout.ffns}
    units = units_of(layout, field_steps(section, layout), least)
    worth = [score_worth(unit, scores) if curves is None else curve_worth(unit, curves[unit.name]) for unit in units]
    full = model_size(dense, [ffn.width for ffn in layout.ffns])
    slots = sum(ffn.width for ffn in layout.ffns)
    if budget.keep is not None:
        limit = Limit(budget.keep * slots, lambda _: 1, nearest=True)
    elif budget.params is not None:
        outside = full.total_params - sum(ffn.params_per_slot * ffn.width for ffn in layout.ffns)
        limit = Limit(budget.params - outside, lambda ffn: ffn.params_per_slot, nearest=False)
    else:
        assert budget.bytes is not None  # a budget has exactly one unit
        sizes = {ffn.name: dense.bytes_per_slot(ffn) for ffn in layout.ffns}
        outside = full.bytes - sum(sizes[ffn.name] * ffn.width for ffn in layout.ffns)
        limit = Limit(budget.bytes - outside, lambda ffn: sizes[ffn.name], nearest=False)
    values = allocate(units, worth, limit)
    if values is None:
        raise KvpruneError(
            f"plan.budget: {budget_words(budget.model_dump())} cannot be met with round_to {section.round_to} and "
            f"floor {section.floor}; lower them or raise the budget"
        )
    widths = {
        ffn.name: unit.field.width(ffn, value) for unit, value in zip(units, values, strict=True) for ffn in unit.ffns
    }
    found = [widths[ffn.name] for ffn in layout.ffns]
    _check_alignment(dense, found)
    return found


def layer_fields(layout: Layout, widths: Sequence[int]) -> list[dict[str, int]]:
    """For each layer the values of the fields that set widths in it."""
    found: list[dict[str, int]] = [{} for _ in layout.layers]
    for ffn, width in zip(layout.ffns, widths, strict=True):
        field = layout.field_of(ffn)
        found[layout.layers.index(ffn.layer)][field.name] = int(width / field.multiples[ffn.name])
    return found


def best_slots(scores: Tensor, width: int, always: list[int]) -> list[int]:
    """The `width` slots with the highest of `scores` `[slots]`, `always` first, sorted by number."""
    if not bool(torch.isfinite(scores).all()):
        raise KvpruneError(f"slot {int((~torch.isfinite(scores)).nonzero()[0])} has a score that is not finite")
    ranked = scores.clone()
    ranked[always] = math.inf
    return sorted(torch.argsort(ranked, descending=True, stable=True)[:width].tolist())
