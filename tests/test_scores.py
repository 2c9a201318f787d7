"""Each score is its formula, the guard finds giants and nothing else, and the best slots are the best."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn import scores
from kvprune.ffn.counting import Part, count
from kvprune.ffn.gram import add_tokens, elimination, empty_gram, mirror
from kvprune.ffn.scores import GUARD_FACTOR, GUARD_SHARE, SCORES, giants
from kvprune.ffn.stats import FfnStats, empty_stats
from kvprune.recipe import make_recipe
from kvprune.schema import PlanSection, Score
from kvprune.stages.plan import best_slots

SLOTS = 24
SKIP = 2


def norms(slots: int = SLOTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(slots, generator=generator) + 0.5, torch.rand(slots, generator=generator) + 0.5


def coefficients(sequences: int = 5, tokens: int = 40, slots: int = SLOTS) -> Tensor:
    """Heavy-tailed, slots of different sizes and means, one silent."""
    generator = torch.Generator().manual_seed(9)
    a = torch.randn(sequences, tokens, slots, generator=generator).pow(3)
    a = a * torch.linspace(0.1, 3, slots) + torch.linspace(-1, 1, slots)
    a[..., 5] = 0
    return a


def counted(a: Tensor, skip: int = SKIP) -> FfnStats:
    stats = empty_stats(*norms(a.shape[-1]))
    count(stats, [Part(sequence, skip) for sequence in a])
    return stats


def section(**values: Any) -> PlanSection:
    return make_recipe({"model": "m", "plan": values}).plan


def score(name: Score, stats: FfnStats, index: int = 0, **options: Any) -> Tensor:
    result = SCORES[name](stats, section(score=name, **options), index)
    assert result.dtype == torch.float64
    assert result.shape == (stats.width,)
    return result


def ratios(a: Tensor) -> Tensor:
    """Contribution over the root mean square of the token's contributions, `[tokens, slots]`."""
    c = (a[:, SKIP:].float().abs() * norms()[0]).double().flatten(0, 1)
    return c / c.square().mean(1, keepdim=True).sqrt()


def test_wanda_is_the_norm_of_the_coefficients_times_that_of_the_value() -> None:
    a = coefficients()
    expected = a[:, SKIP:].double().flatten(0, 1).norm(dim=0) * norms()[0].double()
    assert torch.allclose(score("wanda", counted(a)), expected, rtol=1e-12)


def test_fluctuation_is_the_unbiased_variance_times_the_squared_value() -> None:
    a = coefficients()
    expected = a[:, SKIP:].double().flatten(0, 1).var(0, correction=1) * norms()[0].double().square()
    assert torch.allclose(score("fluctuation", counted(a)), expected, rtol=1e-10)


def test_a_constant_slot_does_not_fluctuate() -> None:
    a = coefficients()
    a[..., 3] = 0.1
    result = score("fluctuation", counted(a))
    assert float(result[3]) == pytest.approx(0, abs=1e-12)
    assert bool((result >= 0).all())


def test_activation_norm_is_the_mean_over_sequences() -> None:
    a = coefficients()
    expected = a[:, SKIP:].double().norm(dim=1).mean(0)
    assert torch.allclose(score("activation_norm", counted(a)), expected, rtol=1e-12)


def test_weight_norm_is_the_product_of_the_norms_and_needs_no_data() -> None:
    value, key = norms()
    expected = value.double() * key.double()
    assert torch.equal(score("weight_norm", empty_stats(value, key)), expected)
    assert torch.equal(score("weight_norm", counted(coefficients())), expected)


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0, 8.0])
def test_fire_rate_is_the_share_of_tokens_over_the_threshold(threshold: float) -> None:
    a = coefficients()
    expected = (ratios(a) >= threshold).double().mean(0)
    assert torch.allclose(score("fire_rate", counted(a), threshold=threshold), expected, atol=1e-12)
    if threshold == 2.0:
        assert torch.equal(score("fire_rate", counted(a)), score("fire_rate", counted(a), threshold=2.0))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_contribution_is_the_moment_of_the_binned_ratio(p: int) -> None:
    a = coefficients()
    expected = []
    for slot in ratios(a).T.tolist():
        exponents = [math.frexp(ratio)[1] - 1 for ratio in slot if ratio]
        expected.append(sum(2.0 ** (p * (e + 0.5)) for e in exponents if e >= -16) / len(slot))
    assert torch.allclose(score("contribution", counted(a), p=p), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_contribution_is_within_half_a_bin_of_the_exact_moment(p: int) -> None:
    a = coefficients()
    exact = ratios(a).pow(p).mean(0)
    found = score("contribution", counted(a), p=p)
    assert bool((found <= exact * 2 ** (p / 2)).all())
    assert bool((found >= exact * 2 ** (-p / 2) - 2.0 ** (-16 * p)).all())


def test_random_is_seeded_and_differs_by_layer() -> None:
    stats = counted(coefficients())
    first = score("random", stats, 0, seed=3)
    assert torch.equal(first, score("random", stats, 0, seed=3))
    assert not torch.equal(first, score("random", stats, 1, seed=3))
    assert not torch.equal(first, score("random", stats, 0, seed=4))
    assert bool(((first >= 0) & (first < 1)).all())
    assert bool(torch.isfinite(score("random", stats, 3, seed=2**63 - 1)).all())


@pytest.mark.parametrize("name", ["wanda", "fluctuation", "activation_norm", "fire_rate", "contribution"])
def test_a_silent_slot_scores_nothing(name: Score) -> None:
    result = score(name, counted(coefficients()))
    assert float(result[5]) == 0
    assert int((result > 0).sum()) >= SLOTS // 2


@pytest.mark.parametrize("name", SCORES)
def test_nothing_counted_is_finite(name: Score) -> None:
    stats = empty_stats(*norms())
    stats.removal_cost, stats.removal_turn = elimination(mirror(empty_gram(SLOTS, 0)), torch.diag(norms()[0]))
    stats.gradient = torch.zeros_like(stats.total)
    assert bool(torch.isfinite(score(name, stats)).all())


def test_scores_of_a_gram_matrix_are_what_was_found_from_it_and_refused_without() -> None:
    a = coefficients()
    stats, sums = counted(a), empty_gram(SLOTS, 0)
    for name in ("reconstruction", "greedy"):
        with pytest.raises(KvpruneError, match=r"calibrate with calibrate\.collect=\[counts, gram\]"):
            SCORES[name](stats, section(score="wanda"), 0)
    add_tokens(sums, a[:, SKIP:].flatten(0, 1))
    values = torch.diag(norms()[0])  # no slot can stand in for another
    stats.removal_cost, stats.removal_turn = elimination(mirror(sums), values)
    assert torch.equal(score("reconstruction", stats), stats.removal_cost)
    assert score("greedy", stats).argsort().tolist() == stats.removal_turn.argsort().tolist()
    assert int(score("greedy", stats)[5]) == 0  # the silent slot falls first
    assert int(score("reconstruction", stats).argmin()) == 5


def wide(slots: int = 400) -> Tensor:
    """An even layer: every slot's coefficients have the same size."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 50, slots, generator=generator)


def test_a_slot_that_fires_once_but_enormously_is_a_giant() -> None:
    a = wide()
    a[..., 123] = 0
    a[1, 20, 123] = 1e4
    stats = counted(a)
    assert giants(stats) == [123]
    assert float(score("fire_rate", stats)[123]) == pytest.approx(1 / 96)  # a frequency cannot tell it from noise
    order = torch.argsort(score("fire_rate", stats), descending=True, stable=True).tolist()
    assert 123 not in order[:200]


def test_a_giant_on_a_skipped_token_is_one_too() -> None:
    a = wide()
    a[0, 0, 7] = 1e4
    assert giants(counted(a)) == [7]


def test_an_even_layer_has_no_giants() -> None:
    assert giants(counted(wide())) == []


def test_giants_are_at_most_a_share_of_the_width_loudest_first() -> None:
    a = wide()
    size = {slot: 1e3 * (1 + slot % 7) / float(norms(400)[0][slot]) for slot in range(10, 24)}
    for slot, value in size.items():
        a[0, 30, slot] = value
    found = giants(counted(a))
    assert len(found) == int(GUARD_SHARE * 400) == 4
    assert [slot % 7 for slot in found] == [6, 6, 5, 5]


def test_the_median_of_the_guard_is_that_of_live_slots() -> None:
    maxima = torch.zeros(200)
    maxima[150:] = 1
    stats = empty_stats(*norms(200))
    for value, found in [(GUARD_FACTOR * 0.99, []), (GUARD_FACTOR * 1.01, [160])]:
        maxima[160] = value
        stats.maximum = maxima.clone()
        assert giants(stats) == found


def test_a_silent_or_narrow_layer_has_no_giants() -> None:
    assert giants(empty_stats(*norms())) == []
    a = coefficients()
    a[0, 9, 3] = 1e6
    assert int(GUARD_SHARE * SLOTS) == 0
    assert giants(counted(a)) == []


def test_the_best_slots_are_those_with_the_highest_scores() -> None:
    values = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0], dtype=torch.float64)
    assert [best_slots(values, width, []) for width in range(1, 6)] == [
        [3],
        [3, 4],
        [0, 3, 4],
        [0, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]


def test_ties_go_to_the_lower_slot() -> None:
    assert best_slots(torch.zeros(1000, dtype=torch.float64), 10, []) == list(range(10))
    values = torch.zeros(1000, dtype=torch.float64)
    values[700:] = 1
    assert best_slots(values, 302, []) == [0, 1, *range(700, 1000)]


def test_what_is_always_kept_replaces_the_worst_and_not_the_best() -> None:
    values = torch.arange(10, dtype=torch.float64)
    assert best_slots(values, 4, [0, 2]) == [0, 2, 8, 9]
    assert best_slots(values, 2, [0, 2]) == [0, 2]
    assert values.tolist() == list(range(10))  # the scores are left as they were


def test_the_best_slots_are_always_the_same() -> None:
    values = torch.randint(0, 5, (500,), generator=torch.Generator().manual_seed(1)).double()
    first = best_slots(values, 200, [3, 400])
    assert all(best_slots(values.clone(), 200, [400, 3]) == first for _ in range(3))
    assert first == sorted(set(first))
    assert len(first) == 200


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_refused(bad: float) -> None:
    values = torch.ones(8, dtype=torch.float64)
    values[6] = bad
    with pytest.raises(KvpruneError, match=r"^slot 6 has a score that is not finite$"):
        best_slots(values, 4, [])


def test_every_score_of_a_recipe_can_be_computed() -> None:
    assert set(SCORES) == set(Score.__args__)  # type: ignore[attr-defined]
    assert all(callable(getattr(scores, name)) for name in SCORES)
