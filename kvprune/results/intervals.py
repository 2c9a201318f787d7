"""Whether two models differ by more than chance: paired intervals over documents, by bootstrap (Efron 1979)."""

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95
Sums = Sequence[Sequence[float]]  # of each document: its loss in nats, and what that is over (tokens, words, bytes)


def perplexity(sums: Sums) -> float:
    """exp of the mean loss over all predictions."""
    return math.exp(sum(total for total, _ in sums) / sum(count for _, count in sums))


def ratio_interval(one: Sums, other: Sums, *, level: float = LEVEL, seed: int = 0) -> tuple[float, float, float]:
    """Perplexity of `one` over that of `other` on the same documents, and its interval: documents resampled together.

    Both have the same counts of predictions, document by document.
    """
    a, b = np.array(one), np.array(other)
    drawn = np.random.default_rng(seed).integers(len(a), size=(RESAMPLES, len(a)))
    logs = (a[:, 0] - b[:, 0])[drawn].sum(1) / a[:, 1][drawn].sum(1)
    low, high = np.quantile(np.exp(logs), [(1 - level) / 2, (1 + level) / 2])
    return perplexity(one) / perplexity(other), float(low), float(high)


def difference_interval(
    one: Sequence[float], other: Sequence[float], *, level: float = LEVEL, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of `one` less that of `other` over the same questions, and its interval: questions resampled together."""
    apart = np.array(one) - np.array(other)
    drawn = np.random.default_rng(seed).integers(len(apart), size=(RESAMPLES, len(apart)))
    low, high = np.quantile(apart[drawn].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(apart.mean()), float(low), float(high)
