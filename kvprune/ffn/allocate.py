"""Sharing a budget out among layers: how wide each one's FFNs stay.

A unit is what has one width: the FFNs of one layer whose width one field of the config sets (all experts of a layer,
say). Units grow step by step from their smallest width; the step that is worth most for what it costs comes first.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprune.ffn.layout import Ffn, Field, Layout


@dataclass(frozen=True)
class Unit:
    """The FFNs of one layer under one field, and the values that the field may have there, ascending."""

    layer: str
    field: Field
    ffns: tuple[Ffn, ...]
    steps: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.layer}:{self.field.name}"


def units_of(layout: Layout, steps: Mapping[str, Sequence[int]], least: Mapping[str, int]) -> list[Unit]:
    """All units of a model. `steps` are allowed values by field names, `least` needed slots by FFN names."""
    units = []
    for index, layer in enumerate(layout.layers):
        members = [layout.ffns[at] for at in layout.in_layer(index)]
        for field in layout.fields:
            ffns = tuple(ffn for ffn in members if ffn.name in field.multiples)
            if ffns:
                floor = max(least.get(ffn.name, 0) / field.multiples[ffn.name] for ffn in ffns)
                allowed = tuple(value for value in steps[field.name] if value >= floor)
                units.append(Unit(layer, field, ffns, allowed))
    return units


@dataclass(frozen=True)
class Limit:
    """What the widths may cost in all: `cost` is one slot's of an FFN; `nearest` lets them be a little over."""

    amount: float
    cost: Callable[[Ffn], int]
    nearest: bool

    def of(self, unit: Unit, value: int) -> int:
        """What a unit costs at a value of its field."""
        return sum(self.cost(ffn) * unit.field.width(ffn, value) for ffn in unit.ffns)


def allocate(units: Sequence[Unit], worth: Sequence[Sequence[float]], limit: Limit) -> list[int] | None:
    """A value for each unit. `worth` has for each unit what each step up from its smallest value brings, falling.

    None where not even the smallest widths are within the limit.
    """
    at = [0] * len(units)
    spent = sum(limit.of(unit, unit.steps[0]) for unit in units)
    if spent > limit.amount and not limit.nearest:
        return None
    queue: list[tuple[float, int]] = []

    def push(index: int) -> None:
        unit, step = units[index], at[index]
        if step + 1 < len(unit.steps):
            more = limit.of(unit, unit.steps[step + 1]) - limit.of(unit, unit.steps[step])
            heapq.heappush(queue, (-worth[index][step] / more, index))

    for index in range(len(units)):
        push(index)
    while queue:
        _, index = heapq.heappop(queue)
        unit, step = units[index], at[index]
        more = limit.of(unit, unit.steps[step + 1]) - limit.of(unit, unit.steps[step])
        over = spent + more - limit.amount
        if over > 0 and not (limit.nearest and over < limit.amount - spent):
            continue  # this unit stays; one with a smaller step may still fit
        at[index] += 1
        spent += more
        push(index)
    return [unit.steps[step] for unit, step in zip(units, at, strict=True)]


def score_worth(unit: Unit, scores: Mapping[str, Tensor]) -> list[float]:
    """What each step of a unit brings: the scores of the slots that it keeps in addition, best ones first."""
    sums = []
    for ffn in unit.ffns:
        total = torch.cat([torch.zeros(1, dtype=torch.float64), scores[ffn.name].double().sort(descending=True).values])
        sums.append(total.cumsum(0)[[unit.field.width(ffn, value) for value in unit.steps]])
    kept = torch.stack(sums).sum(0)
    return (kept[1:] - kept[:-1]).tolist()


def curve_worth(unit: Unit, losses: Mapping[int, float]) -> list[float]:
    """What each step of a unit brings: how much lower the loss is, along the lower convex hull of measured `losses`.

    `losses` by values of the field; below the smallest that was measured the hull goes on as it begins.
    """
    hull: list[tuple[int, float]] = []
    for point in sorted(losses.items()):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    found = []
    for low, high in zip(unit.steps, unit.steps[1:], strict=False):
        middle = (low + high) / 2
        at = next((at for at in range(1, len(hull)) if middle <= hull[at][0]), len(hull) - 1)
        found.append(-_slope(hull[at - 1], hull[at]) * (high - low) if at else 0.0)
    return found


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else math.inf
