"""What models got document by document, from lm-eval's samples, and how far two of them are apart on the same ones."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvprune.errors import KvpruneError
from kvprune.results.intervals import LEVEL, RESAMPLES, Floats, ends, resampled_sums, student_interval, widened

FEWEST = 10  # documents that a verdict can rest on
MOST_RESAMPLES = 100_000
BEYOND = 10  # resamples that lie beyond an interval's end, so that it is not a matter of a few
WHOLE = 1e-3  # a number of tokens is whole, but for rounding
# The same loss over other counts, in the order in which people compare them: one of them is told.
ROLLING = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Scored:
    """What a model got in one metric: of each document a sum and what it is over, `[documents, 2]`.

    The metric is exp of the sums' ratio where the sums are losses (`ratio`), else the ratio itself.
    """

    sums: Floats
    ratio: bool
    documents: tuple[str, ...]  # digests of each one's text, prompt and target


@dataclass(frozen=True)
class Apart:
    """How far a model is from another in one metric: a ratio of perplexities, or a difference of means."""

    value: float
    interval: list[float] | None  # its two ends; None of too few documents
    corrected: list[float] | None  # the interval that the verdict rests on
    verdict: str
    by: str | None  # what the corrected interval is by, bootstrap or Student's t


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The rows of a samples file. Raises KvpruneError where it is missing or broken."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a document may hold other ends of lines
        return [dict(json.loads(line)) for line in lines if line]
    except (OSError, ValueError, TypeError) as error:
        what = (error.strerror or "cannot be read") if isinstance(error, OSError) else "is not JSON lines"
        folder = path.parents[1]
        raise KvpruneError(
            f"{path}: {what}: results without samples cannot be paired; remove {folder} and run: "
            f"kvprune evaluate {folder.parent}"
        ) from None


def told(metrics: Mapping[str, float]) -> list[str]:
    """The metrics that tell something of their own: of the perplexities of running text only the first."""
    found = list(metrics)
    first: dict[str, str] = {}  # of each task of a tag, whose metrics are called "task metric"
    for kind in ROLLING:
        for name in found:
            task, _, metric = name.rpartition(" ")
            if metric == kind:
                first.setdefault(task, name)
    return [name for name in found if name in first.values() or name.rpartition(" ")[2] not in ROLLING]


def scored(rows: Rows, metric: str, value: float) -> Scored | None:
    """The documents of `metric` among `rows`; None where its `value` is no mean and no perplexity over documents.

    The tokens of a document, which lm-eval does not know, are told by its bytes: their sum is exact.
    """
    task, _, rest = metric.rpartition(" ")
    name, _, kind = rest.partition(",")
    per_token = name == "token_perplexity"
    keys = ROLLING[:0:-1] if per_token else (name,)
    some = [row for row in rows if row.get("filter") == (kind or "none") and (not task or row.get("task") == task)]
    key = next((key for key in keys if some and all(key in row for row in some)), None)
    if key is None:
        return None
    sums = _sums([row[key] for row in some])
    if sums is None:
        return None
    if per_token and value > 1:
        tokens = sums[:, 0].sum() / math.log(value)
        if abs(tokens - round(tokens)) > WHOLE:
            return None
        sums[:, 1] *= tokens / sums[:, 1].sum()
    documents = tuple("-".join(str(row.get(f"{part}_hash")) for part in ("doc", "prompt", "target")) for row in some)
    mean = float(sums[:, 0].sum() / sums[:, 1].sum())
    for ratio, found in ((False, -mean), (True, math.exp(min(mean, 700)))):
        if math.isclose(found, value, rel_tol=1e-6, abs_tol=1e-9):
            return Scored(sums if ratio else sums * [-1, 1], ratio, documents)
    return None


def _sums(values: list[Any]) -> Floats | None:
    """Losses and what they are over `[documents, 2]`: of log-likelihoods with their counts, or of single numbers."""
    try:
        found = np.array(values, float)
    except (TypeError, ValueError):
        return None
    if found.ndim == 1:
        found = np.stack([found, np.ones(len(found))], 1)
    fits = found.ndim == 2 and found.shape[1] == 2 and bool(np.isfinite(found).all()) and bool((found[:, 1] > 0).all())
    return found * [-1, 1] if fits else None


def first_other(one: Scored, other: Scored) -> tuple[int, str, str] | None:
    """The first document that is not the same in both, and its digests; None where all are."""
    if len(one.documents) != len(other.documents):
        return min(len(one.documents), len(other.documents)), str(len(one.documents)), str(len(other.documents))
    pairs = enumerate(zip(one.documents, other.documents, strict=True))
    return next(((at, a[:12], b[:12]) for at, (a, b) in pairs if a != b), None)


def apart(pairs: Sequence[tuple[Scored, Scored, bool | None]], comparisons: int, *, seed: int = 0) -> Iterator[Apart]:
    """How far the first of each of `pairs` is from the second, on the same documents; the third: if higher is better.

    A verdict needs an interval without "no difference", at a level that is corrected for so many `comparisons`
    (Bonferroni); where that level takes more than MOST_RESAMPLES, it is Student's. The same resamples serve pairs with
    as many documents.
    """
    levels = LEVEL, 1 - (1 - LEVEL) / max(1, comparisons)
    by_size: dict[int, list[int]] = {}
    for at, (one, _, _) in enumerate(pairs):
        by_size.setdefault(len(one.sums), []).append(at)
    drawn: dict[int, Floats] = {}
    seen: dict[int, bool] = {}  # of each size: if resamples see the ends of the corrected interval
    for size, members in by_size.items():
        if size >= FEWEST:
            columns = [column for at in members for column in _columns(*pairs[at][:2]).T]
            wanted = BEYOND * 2 / max(1 - widened(levels[1], size), 1e-9)
            seen[size] = wanted <= MOST_RESAMPLES
            resamples = math.ceil(max(wanted, RESAMPLES)) if seen[size] else RESAMPLES
            sums = resampled_sums(np.stack(columns, 1), resamples, seed)
            drawn |= {at: sums[:, 2 * row] / sums[:, 2 * row + 1] for row, at in enumerate(members)}
    for at, (one, other, higher) in enumerate(pairs):
        both, size = _columns(one, other), len(one.sums)
        total, count = both.sum(0)
        intervals, by = None, None
        if at in drawn:
            intervals = [ends(drawn[at], widened(level, size)) for level in levels]
            by = "bootstrap" if seen[size] else "Student's t"
            if not seen[size]:
                intervals[1] = student_interval(both, levels[1])
        yield _told(float(total / count), intervals, one.ratio, higher, by)


def _columns(one: Scored, other: Scored) -> Floats:
    """Of each document how far the two are apart, and what that is over `[documents, 2]`."""
    return np.stack([one.sums[:, 0] - other.sums[:, 0], one.sums[:, 1]], 1)


def _told(
    value: float, intervals: list[tuple[float, float]] | None, ratio: bool, higher: bool | None, by: str | None
) -> Apart:
    """A value and its intervals, 0 where there is no difference, as people read them."""
    if intervals is None:
        verdict = f"fewer than {FEWEST} documents"
    elif intervals[1][0] <= 0 <= intervals[1][1]:
        verdict = "no difference shown"
    elif higher is None:
        verdict = "higher" if value > 0 else "lower"
    else:
        verdict = "better" if (value > 0) == higher else "worse"

    def scale(number: float) -> float:
        return math.exp(number) if ratio else number

    plain, corrected = ([scale(end) for end in interval] for interval in intervals) if intervals else (None, None)
    return Apart(scale(value), plain, corrected, verdict, by)


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The Pareto front of `points` (cost, quality): those that no other one beats in one and equals in the other.

    By cost, the cheapest first; what is not finite is left out.
    """
    found = {name: point for name, point in points.items() if all(map(math.isfinite, point))}

    def beaten(one: tuple[float, float]) -> bool:
        return any(other != one and other[0] <= one[0] and other[1] >= one[1] for other in found.values())

    return sorted((name for name, point in found.items() if not beaten(point)), key=lambda name: found[name][0])
