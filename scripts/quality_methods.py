"""Pruning methods by their formulas, where kvprune itself has them not, each over the same calibration tokens.

All leave `width` slots in every FFN. What they need of the tokens is gathered in one pass over the dense model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvprune.artifacts import Plan
from kvprune.ffn.experts import Seen
from kvprune.ffn.layout import Layout
from kvprune.ffn.watching import value_rows
from kvprune.progress import progress
from kvprune.reading.passes import each_pass
from kvprune.reading.values import Values

GRAIL_RIDGE = 1e-3  # of the mean diagonal


@dataclass
class Gathered:
    """Of one FFN over all tokens, H being its coefficients `[tokens, slots]`."""

    gram: Tensor  # float64 [slots, slots], H'H
    total: Tensor  # float64 [slots], sums of H
    sequence_squares: Tensor  # float64 [slots], sum over sequences of (mean |h| over the sequence)²
    tokens: int = 0


@torch.inference_mode()
def gather(model: torch.nn.Module, layout: Layout, tokens: Tensor, batch_size: int = 8) -> dict[str, Gathered]:
    """Sums over `tokens` `[sequences, length]`, by names of FFNs."""
    found: dict[str, Gathered] = {}
    length, batches = tokens.shape[1], torch.split(tokens, batch_size)

    def see(_: int, seen: Seen, values: Values) -> None:
        h, name = seen.h.float(), values.ffn.name
        if name not in found:
            slots = h.shape[1]
            zeros = torch.zeros(slots, dtype=torch.float64)
            found[name] = Gathered(torch.diag(zeros), zeros.clone(), zeros)
        mine = found[name]
        mine.gram += h.T @ h
        mine.total += h.sum(0, dtype=torch.float64)
        mine.sequence_squares += h.abs().view(-1, length, h.shape[1]).mean(1).square().sum(0)
        mine.tokens += len(h)

    for _ in progress(each_pass(model, layout, batches, see), total=len(batches), label="gather", unit="batches"):
        pass
    return found


def minitron(found: Gathered) -> Tensor:
    """L2 over sequences of the mean |h| over each: Muralidharan et al. 2024 (arXiv:2407.14679), (mean, L2), on h."""
    return found.sequence_squares.sqrt()


def highest(scores: Mapping[str, Tensor], width: int) -> dict[str, list[int]]:
    """The `width` slots of the highest scores of each FFN, sorted."""
    return {
        name: sorted(score.argsort(descending=True, stable=True)[:width].tolist()) for name, score in scores.items()
    }


def flap_biases(model: torch.nn.Module, layout: Layout, plan: Plan, found: Mapping[str, Gathered]) -> dict[str, Tensor]:
    """Value biases that make up for the mean of what removed slots wrote: An et al. 2024 (arXiv:2312.11983), eq. 6."""
    biases = {}
    for ffn, item in zip(layout.ffns, plan.ffns, strict=True):
        mine, removed = found[ffn.name], item.removed
        mean = mine.total[removed] / mine.tokens
        own = model.get_parameter(ffn.value_bias).double() if ffn.value_bias else 0
        biases[ffn.bias_key] = (own + mean @ value_rows(model, ffn)[removed].double()).float()
    return biases


def grail_values(
    model: torch.nn.Module, layout: Layout, plan: Plan, found: Mapping[str, Gathered]
) -> dict[str, Tensor]:
    """Values of the kept slots by ridge regression of all that the FFN wrote, shrunk to zero (GRAIL, 2026).

    Rows of values V `[slots, hidden]`: V'_K = (G_KK + λI)⁻¹ G_K: V, λ a thousandth of the mean diagonal of G.
    """
    values = {}
    for ffn, item in zip(layout.ffns, plan.ffns, strict=True):
        gram, kept = found[ffn.name].gram, item.kept
        damped = gram[kept][:, kept] + GRAIL_RIDGE * gram.diagonal().mean() * torch.eye(len(kept), dtype=gram.dtype)
        rows = torch.linalg.solve(damped, gram[kept] @ value_rows(model, ffn).double())
        values[ffn.value_key] = (rows if ffn.axis(ffn.value) == 0 else rows.T).float().contiguous()
    return values


def with_kept(plan: Plan, kept: Mapping[str, Sequence[int]]) -> Plan:
    """The plan with other slots of the same numbers."""
    return replace(plan, ffns=[replace(item, kept=list(kept[item.name]), guarded=[]) for item in plan.ffns])
