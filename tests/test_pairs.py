"""Paired intervals: they are what they say, verdicts hold for chance alone, fronts are those found by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprune.results.intervals import Floats, difference_interval, ratio_interval, student_interval, widened
from kvprune.results.pairs import FEWEST, Scored, apart, front, read_samples, scored, told


def losses(means: Any, counts: Any) -> Scored:
    """Documents of `counts` tokens with mean losses `means`, each `[documents]`."""
    found: Floats = np.stack([np.array(means) * counts, counts], 1).astype(np.float64)
    return Scored(found, True, ())


def scores(values: Any) -> Scored:
    return Scored(np.stack([np.array(values, float), np.ones(len(values))], 1), False, ())


def test_an_interval_is_that_of_the_definition() -> None:
    draw = np.random.default_rng(3)
    counts = draw.integers(5, 50, 40)
    first, second = (losses(draw.normal(3, 0.3, 40), counts) for _ in range(2))
    one, other = first.sums, second.sums
    found = next(apart([(first, second, False)], 1))
    assert found.interval is not None
    resampled = []
    for picked in np.random.default_rng(0).integers(40, size=(4000, 40)):
        a, b = one[picked], other[picked]
        resampled.append(math.exp(a[:, 0].sum() / a[:, 1].sum()) / math.exp(b[:, 0].sum() / b[:, 1].sum()))
    level = widened(0.95, 40)
    ends = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    assert found.interval == found.corrected == pytest.approx(ends, rel=1e-9)
    total = np.exp(one[:, 0].sum() / counts.sum()), np.exp(other[:, 0].sum() / counts.sum())
    assert found.value == pytest.approx(total[0] / total[1])
    assert [found.value, *found.interval] == pytest.approx(ratio_interval(one.tolist(), other.tolist()))
    mean = next(apart([(scores(one[:, 0]), scores(other[:, 0]), True)], 1))
    assert mean.interval is not None
    known = difference_interval(one[:, 0].tolist(), other[:, 0].tolist())
    assert [mean.value, *mean.interval] == pytest.approx(known)


@pytest.mark.parametrize(("documents", "ratio"), [(12, True), (40, True), (150, True), (40, False), (150, False)])
def test_the_interval_covers_the_truth_as_often_as_it_says(documents: int, ratio: bool) -> None:
    trials, truth, draw = 2000, 0.02, np.random.default_rng(7)
    pairs: list[tuple[Scored, Scored, bool | None]] = []
    for _ in range(trials):
        counts = draw.integers(200, 600, documents)
        base = draw.normal(3, 0.5, documents)
        more = base + draw.normal(truth, 0.05, documents)
        pairs.append(
            (losses(more, counts), losses(base, counts), False) if ratio else (scores(more), scores(base), True)
        )
    covered = 0
    for item in apart(pairs, 1, seed=1):
        assert item.interval is not None
        low, high = item.interval
        covered += low <= (math.exp(truth) if ratio else truth) <= high
    assert 0.93 <= covered / trials <= 0.97


def test_small_samples_are_widened_as_students_t_is() -> None:
    assert widened(0.95, 16) == pytest.approx(0.97229, abs=1e-4)  # t of 15 degrees: 2.1314, x sqrt(16 / 15)
    assert widened(0.95, 100_000) == pytest.approx(0.95, abs=1e-4)


def test_chance_alone_makes_no_verdicts_among_many_comparisons() -> None:
    families, each, documents = 40, 20, 60
    draw = np.random.default_rng(5)
    equal = [
        (scores(base + draw.normal(0, 0.1, documents)), scores(base), True)
        for base in draw.normal(0.5, 0.2, (families * each, documents))
    ]
    verdict = [item.verdict != "no difference shown" for item in apart(equal, each)]
    wrong = np.array(verdict).reshape(families, each).any(1).sum()
    alone = np.array([item.verdict != "no difference shown" for item in apart(equal, 1)])
    assert wrong <= 6  # one in twenty families, but for chance
    assert 0.03 <= alone.mean() <= 0.07
    assert alone.reshape(families, each).any(1).mean() > 0.4  # what the correction is for
    assert next(apart(equal[:1], 20)).corrected != next(apart(equal[:1], 1)).corrected


def test_verdicts_go_the_way_that_is_better() -> None:
    high, low = scores(np.linspace(0.6, 0.9, 30)), scores(np.linspace(0.1, 0.4, 30))
    pairs = [(high, low, True), (low, high, True), (high, low, False), (high, low, None), (high, high, True)]
    found = [item.verdict for item in apart(pairs, len(pairs))]
    assert found == ["better", "worse", "worse", "higher", "no difference shown"]
    few = next(apart([(scores([1.0] * (FEWEST - 1)), scores([0.0] * (FEWEST - 1)), True)], 1))
    assert (few.value, few.interval, few.verdict) == (1, None, f"fewer than {FEWEST} documents")


@pytest.mark.parametrize(("documents", "comparisons"), [(12, 2000), (400, 100_000)])
def test_among_very_many_comparisons_verdicts_rest_on_students_t(documents: int, comparisons: int) -> None:
    draw = np.random.default_rng(2)
    base = draw.normal(3, 0.5, documents)
    apart_by = draw.normal(0, 0.05, documents)
    apart_by -= apart_by.mean()
    error = apart_by.std(ddof=1) / math.sqrt(documents)
    for ratio in (False, True):
        shifts = (4.5, 20) if documents == 400 else (6, 20)  # in standard errors; t at the level is 5.1, and 6.9
        pairs: list[tuple[Scored, Scored, bool | None]] = []
        for shift in shifts:
            more = base + apart_by + shift * error
            counts = np.full(documents, 100)
            pairs.append(
                (losses(more, counts), losses(base, counts), False) if ratio else (scores(more), scores(base), False)
            )
        found = list(apart(pairs, comparisons))
        assert [item.verdict for item in found] == ["no difference shown", "worse"]
        assert {item.by for item in found} == {"Student's t"}
        assert next(apart(pairs[:1], 1)).by == "bootstrap"


@pytest.mark.parametrize(("free", "level", "known"), [(9, 0.999, 4.7809), (9, 0.99999, 8.8275), (29, 0.9999, 4.5055)])
def test_students_t_is_that_of_the_tables(free: int, level: float, known: float) -> None:
    columns = np.stack([np.linspace(-1, 1, free + 1), np.ones(free + 1)], 1)
    low, high = student_interval(columns, level)
    error = columns[:, 0].std(ddof=1) / math.sqrt(free + 1)
    assert [low, high] == pytest.approx([-known * error, known * error], rel=5e-3)


def test_a_document_may_hold_any_end_of_line(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\u2029c\x85d"}, {"text": "\r\x0b\x1c"}]
    file = tmp_path / "eval" / "slim" / "one.samples.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in rows), encoding="utf-8")
    assert read_samples(file) == rows


def row(**metrics: Any) -> dict[str, Any]:
    hashes = {"doc_hash": "d", "prompt_hash": "p", "target_hash": "t"}
    return {"task": "one", "filter": "none", **hashes, **metrics}


def test_a_metric_is_paired_where_its_samples_give_its_value() -> None:
    running = [
        row(byte_perplexity=[-30.0, 10], word_perplexity=[-30.0, 2]),
        row(byte_perplexity=[-50.0, 30], word_perplexity=[-50.0, 6]),
    ]
    by_bytes = scored(running, "byte_perplexity", math.exp(2))
    assert by_bytes is not None and by_bytes.ratio
    assert by_bytes.sums.tolist() == [[30, 10], [50, 30]]
    by_token = scored(running, "token_perplexity", math.exp(80 / 20))
    assert by_token is not None
    assert by_token.sums.tolist() == [[30, pytest.approx(5)], [50, pytest.approx(15)]]
    assert scored(running, "token_perplexity", math.exp(80 / 20.5)) is None  # half a token: other samples
    assert scored(running, "byte_perplexity", 7.0) is None
    single = [row(acc=1, perplexity=-2.0), row(acc=0, perplexity=-4.0)]
    accuracy, perplexity = scored(single, "acc", 0.5), scored(single, "perplexity", math.exp(3))
    assert accuracy is not None and accuracy.sums.tolist() == [[1, 1], [0, 1]] and not accuracy.ratio
    assert perplexity is not None and perplexity.sums.tolist() == [[2, 1], [4, 1]] and perplexity.ratio
    assert scored(single, "acc", 0.75) is None
    assert scored(single, "f1", 0.5) is None
    assert scored([row(acc="yes")], "acc", 1.0) is None
    strict = [row(exact=0.0), {**row(exact=1.0), "filter": "strict"}]
    found = scored(strict, "exact,strict", 1.0)
    assert found is not None and found.sums.tolist() == [[1, 1]]
    tag = [row(acc=1), {**row(acc=0), "task": "two"}]
    assert [scored(tag, f"{name} acc", value) is not None for name, value in (("one", 1.0), ("two", 0.0))] == [True] * 2


def test_of_perplexities_of_one_text_only_the_first_is_told() -> None:
    rolling = {"word_perplexity": 3.0, "byte_perplexity": 2.0, "bits_per_byte": 1.0}
    assert told({"token_perplexity": 4.0, **rolling}) == ["token_perplexity"]
    assert told(rolling) == ["word_perplexity"]
    assert told({"perplexity": 2.0, "acc": 0.5}) == ["perplexity", "acc"]
    assert told({f"{task} {name}": 1.0 for task in "ab" for name in rolling}) == [
        "a word_perplexity",
        "b word_perplexity",
    ]


def test_the_front_by_hand() -> None:
    points = {"a": (1, 1), "b": (2, 3), "c": (3, 2), "d": (4, 4), "e": (2, 3), "f": (1, 0), "g": (0, math.nan)}
    assert front(points) == ["a", "b", "e", "d"]
