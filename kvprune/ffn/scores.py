"""Scores: how much a slot matters, from an FFN's statistics. Slots with the lowest score go first.

Every score is a pure function of `FfnStats` to a float64 tensor `[slots]`. Notation: a coefficient, v value, k key,
n counted tokens, c = |a|·‖v‖ contribution.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn import stats as counting
from kvprune.ffn.stats import FfnStats
from kvprune.schema import PlanSection

GUARD_FACTOR = 20.0  # a giant writes this many times the median slot's maximum
GUARD_SHARE = 0.01  # of the width at most


def fire_rate(stats: FfnStats, threshold: float) -> Tensor:
    """Share of tokens with c / rms(c) ≥ threshold. After Geva et al. 2021 (arXiv:2012.14913), on contributions."""
    return counting.fire_rate(stats, threshold)


def contribution(stats: FfnStats, p: float) -> Tensor:
    """Σ_e n_e · 2^(p·(e+½)) / n: the p-th moment of c / rms(c), from the histogram. p = 1 mean-like, 2 energy-like."""
    exponents = torch.arange(counting.BINS - 1, dtype=torch.float64) + counting.LOWEST_EXPONENT + 0.5
    return stats.histogram[:, 1:].double() @ torch.exp2(p * exponents) / stats.tokens.clamp(min=1)


def wanda(stats: FfnStats) -> Tensor:
    """‖a‖₂ · ‖v‖₂ over the counted tokens. Sun et al. 2023 (arXiv:2306.11695), summed over a value's entries."""
    return stats.total_square.sqrt() * stats.value_norm.double()


def fluctuation(stats: FfnStats) -> Tensor:
    """Var(a) · ‖v‖². FLAP, An et al. 2024 (arXiv:2312.11983); the variance is the unbiased one."""
    n = stats.tokens.double()
    variance = (stats.total_square - stats.total.square() / n.clamp(min=1)) / (n - 1).clamp(min=1)
    return variance.clamp(min=0) * stats.value_norm.double().square()


def activation_norm(stats: FfnStats) -> Tensor:
    """Mean over sequences of ‖a‖₂. First stage of 2SSP, Sandri et al. 2025 (arXiv:2501.17771)."""
    return stats.sequence_norms / stats.sequences.clamp(min=1)


def reconstruction(stats: FfnStats) -> Tensor:
    """‖v‖² / ((G + λD)⁻¹)_ii: the cost of removing the slot, once the others make up for it (gram.elimination)."""
    return _collected(stats.removal_cost)


def greedy(stats: FfnStats) -> Tensor:
    """When the slot falls, where slots fall block by block and the others are refitted (gram.elimination)."""
    return _collected(stats.removal_turn).double()


def _collected(found: Tensor | None) -> Tensor:
    if found is None:
        raise KvpruneError(
            "plan.score: the statistics have no Gram scores; calibrate with calibrate.collect=[counts, gram]"
        )
    return found


def taylor(stats: FfnStats) -> Tensor:
    """Σ (a ∂L/∂a)²: what the loss changes by, squared, to first order, when the slot falls silent on one token.

    Molchanov et al. 2019 (arXiv:1906.10771). In nats², the same in every layer.
    """
    if stats.gradient is None:
        raise KvpruneError(
            "plan.score: the statistics have no gradients; calibrate with calibrate.collect=[counts, gradient]"
        )
    return stats.gradient


def weight_norm(stats: FfnStats) -> Tensor:
    """Π‖k‖ · ‖v‖, without data: bounds c by Cauchy–Schwarz, and no rescaling of keys against values changes it."""
    return stats.key_norm.double() * stats.value_norm.double()


def random(stats: FfnStats, seed: int, index: int) -> Tensor:
    """Uniform in [0, 1) from `seed` and the FFN's index: the floor that any other score must beat."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
    return torch.rand(stats.width, dtype=torch.float64, generator=generator)


SCORES: dict[str, Callable[[FfnStats, PlanSection, int], Tensor]] = {
    "fire_rate": lambda stats, plan, _: fire_rate(stats, plan.threshold or 2.0),
    "contribution": lambda stats, plan, _: contribution(stats, plan.p or 1.0),
    "wanda": lambda stats, *_: wanda(stats),
    "fluctuation": lambda stats, *_: fluctuation(stats),
    "activation_norm": lambda stats, *_: activation_norm(stats),
    "reconstruction": lambda stats, *_: reconstruction(stats),
    "greedy": lambda stats, *_: greedy(stats),
    "taylor": lambda stats, *_: taylor(stats),
    "weight_norm": lambda stats, *_: weight_norm(stats),
    "random": lambda stats, plan, index: random(stats, plan.seed or 0, index),
}


def giants(stats: FfnStats) -> list[int]:
    """Slots that fire rarely but enormously, loudest first: losing one ruins the model, and a frequency cannot see it.

    Those whose largest contribution is over GUARD_FACTOR × the median of the live slots' maxima, at most GUARD_SHARE
    of the width.
    """
    live = stats.maximum[stats.maximum > 0]
    if not len(live):
        return []
    order = torch.argsort(stats.maximum, descending=True, stable=True)
    loud = int((stats.maximum > GUARD_FACTOR * live.median()).sum())
    return [int(slot) for slot in order[: min(loud, int(GUARD_SHARE * stats.width))]]
