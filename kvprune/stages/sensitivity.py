"""Sensitivity: how much worse the model becomes when one layer is cut to one width, measured layer by layer.

The model runs on a few calibration sequences with the lowest-scored slots of one layer masked, for several widths; from
the curves the planner chooses widths for all layers at once. What was measured is kept, unit by unit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import Plan, provenance, read_json, write_json
from kvprune.ffn.allocate import Unit
from kvprune.ffn.layout import Ffn
from kvprune.ffn.watching import value_rows
from kvprune.progress import log, progress
from kvprune.schema import Recipe
from kvprune.sources.models import naming_memory

SEQUENCES = 4  # of the calibration, for each measurement
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2)  # of a unit's width


def describe(recipe: Recipe, stats_digest: str) -> dict[str, Any]:
    """The provenance of measured curves: all that they depend on."""
    plan = recipe.plan.model_dump(mode="json", include={"score", "threshold", "p", "seed", "round_to", "floor"})
    return provenance("sensitivity", {"plan": plan}, {"stats": stats_digest}, sequences=SEQUENCES)


@torch.inference_mode()
def measure(
    model: Any,
    units: Sequence[Unit],
    scores: dict[str, Tensor],
    tokens: Tensor,
    file: Path | None,
    about: dict[str, Any],
) -> dict[str, dict[int, float]]:
    """The loss in nats a token for each unit at several values of its field, on the first of `tokens`.

    Units that `file` (None to keep nothing) has already, under the same provenance `about`, are not measured again.
    """
    done: dict[str, dict[int, float]] = {}
    if file is not None and file.is_file() and (found := read_json(file))["provenance"] == about:
        done = {name: {int(value): loss for value, loss in curve.items()} for name, curve in found["curves"].items()}
    some = tokens[:SEQUENCES]
    left = [unit for unit in units if unit.name not in done]
    base = loss_of(model, some) if left else 0.0
    for unit in progress(left, total=len(left), label="sensitivity", unit="layers", per_item=1):
        done[unit.name] = {unit.steps[-1]: base}
        for value in sorted({_near(unit, share) for share in SHARES} - {unit.steps[-1]}):
            lowest = {ffn.name: _ranked(scores[ffn.name])[unit.field.width(ffn, value) :] for ffn in unit.ffns}
            with masked(model, unit.ffns, lowest):
                done[unit.name][value] = loss_of(model, some)
        if file is not None:
            write_json(file, {"provenance": about, "curves": done})
    return done


def _ranked(scores: Tensor) -> list[int]:
    """Slots from the highest of `scores` `[slots]` to the lowest."""
    return list(torch.argsort(scores, descending=True, stable=True).tolist())


def _near(unit: Unit, share: float) -> int:
    return min(unit.steps, key=lambda value: abs(value - share * unit.steps[-1]))


@contextmanager
def masked(model: Any, ffns: Sequence[Ffn], slots: dict[str, list[int]]) -> Iterator[None]:
    """Let the `slots` of `ffns`, by their names, write nothing, for as long as that."""
    kept = []
    for ffn in ffns:
        rows, gone = value_rows(model, ffn), slots[ffn.name]
        kept.append((rows, gone, rows[gone].clone()))
        rows[gone] = 0
    try:
        yield
    finally:
        for rows, gone, former in kept:
            rows[gone] = former


@torch.inference_mode()
def loss_of(model: Any, tokens: Tensor) -> float:
    """Mean loss of `tokens` `[sequences, tokens]` in nats a token, sequence by sequence."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in tokens.to(model.device):
        with naming_memory(1):
            logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum").double().cpu()
    return float(total) / (len(tokens) * (tokens.shape[1] - 1))


def better(model: Any, chosen: Plan, uniform: Plan, tokens: Tensor, ffns: Sequence[Ffn]) -> Plan:
    """The one of two plans whose masked model has the lower loss, with both losses in it."""
    losses = {}
    for name, plan in (("chosen", chosen), ("uniform", uniform)):
        with torch.inference_mode(), masked(model, ffns, {item.name: item.removed for item in plan.ffns}):
            losses[name] = loss_of(model, tokens[:SEQUENCES])
    log.info("plan: loss of masked slots: %.4f by layer, %.4f uniform", losses["chosen"], losses["uniform"])
    if losses["chosen"] > losses["uniform"]:
        log.warning("plan: uniform widths are better than those by layer, and are used")
    plan = chosen if losses["chosen"] <= losses["uniform"] else uniform
    plan.validated.update(losses)
    return plan
