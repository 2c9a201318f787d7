"""Whether two models differ by more than chance: paired intervals over documents, by bootstrap (Efron 1979)."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

RESAMPLES = 4000
LEVEL = 0.95
BLOCK = 2**22  # documents that are drawn at once
Sums = Sequence[Sequence[float]]  # of each document: its loss in nats, and what that is over (tokens, words, bytes)
Floats = npt.NDArray[np.float64]


def perplexity(sums: Sums) -> float:
    """exp of the mean loss over all predictions."""
    return math.exp(sum(total for total, _ in sums) / sum(count for _, count in sums))


def ratio_interval(
    one: Sums, other: Sums, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Perplexity of `one` over that of `other` on the same documents, and its interval: documents resampled together.

    Both have the same counts of predictions, document by document.
    """
    a, b = np.array(one, float), np.array(other, float)
    drawn = resampled_sums(np.stack([a[:, 0] - b[:, 0], a[:, 1]], 1), resamples, seed)
    low, high = (math.exp(end) for end in ends(drawn[:, 0] / drawn[:, 1], widened(level, len(a))))
    return perplexity(one) / perplexity(other), low, high


def difference_interval(
    one: Sequence[float], other: Sequence[float], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of `one` less that of `other` over the same questions, and its interval: questions resampled together."""
    apart = np.array(one, float) - np.array(other, float)
    drawn = resampled_sums(apart[:, None], resamples, seed)
    low, high = ends(drawn[:, 0] / len(apart), widened(level, len(apart)))
    return float(apart.mean()), low, high


def resampled_sums(columns: Floats, resamples: int, seed: int) -> Floats:
    """Sums of `columns` `[documents, columns]` over documents drawn with replacement: `[resamples, columns]`."""
    draw, documents = np.random.default_rng(seed), len(columns)
    sums = np.empty((resamples, columns.shape[1]))
    step = max(1, BLOCK // documents)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = draw.integers(documents, size=(rows, documents)) + np.arange(rows)[:, None] * documents
        times = np.bincount(drawn.ravel(), minlength=rows * documents).reshape(rows, documents)
        sums[start : start + rows] = times @ columns
    return sums


def ends(drawn: Floats, level: float) -> tuple[float, float]:
    """The two ends of the percentile interval of what was `drawn` `[resamples]`."""
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def widened(level: float, documents: int) -> float:
    """The level of the percentile interval that covers as often as `level` says: those of few documents are too narrow.

    By as much as Student's t is wider than the normal, and for the variance that resampling takes to be too small by
    one in `documents` (Hesterberg 2015, arXiv:1411.5279).
    """
    free = documents - 1
    return 2 * NormalDist().cdf(_student(level, free) * math.sqrt(documents / free)) - 1


def student_interval(columns: Floats, level: float) -> tuple[float, float]:
    """The ends of Student's t interval of the first of two `columns` `[documents, 2]` over the second, by their sums.

    For levels so high that resampling would not see their ends. Of a ratio with its linear error (Cochran 1977, 6.4).
    """
    documents = len(columns)
    total, count = columns.sum(0)
    value = float(total / count)
    squares = float(np.square(columns[:, 0] - value * columns[:, 1]).sum())
    reach = _student(level, documents - 1) * math.sqrt(squares * documents / (documents - 1)) / float(count)
    return value - reach, value + reach


def _student(level: float, free: int) -> float:
    """Student's t of `free` degrees that `level` lies within: the expansion of Abramowitz and Stegun, 26.7.5."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    return (
        z
        + (z**3 + z) / (4 * free)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * free**4)
    )
