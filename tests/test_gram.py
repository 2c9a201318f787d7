"""Gram sums are the products they stand for, fits are ridge regressions, and slots fall as brain surgeons have it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn import gram
from kvprune.ffn.gram import (
    SCORE_RIDGE,
    Fit,
    Gram,
    Problem,
    add_tokens,
    as_problem,
    elimination,
    empty_gram,
    fit,
    joined,
    mirror,
    removal_problem,
    square_error,
)

TOKENS = 90
SLOTS = 11
HIDDEN = 6
WIDTHS = [1, 3, 7, 48]  # narrower than the blocks, not a multiple of them, a multiple
RIDGES = [1e-6, 0.01, 1.0]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coefficients(slots: int = SLOTS, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    """Correlated, of different sizes and with means, float64 `[tokens, slots]` that float32 holds exactly."""
    h = noise(tokens, slots, seed=seed) @ (torch.eye(slots, dtype=torch.float64) + 0.4 * noise(slots, slots, seed=7))
    return (h * torch.linspace(0.2, 3, slots) + torch.linspace(-1, 1, slots)).float().double()


def rest(tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return (noise(tokens, HIDDEN, seed=seed) + 0.7).float().double()


def summed(h: Tensor, r: Tensor | None = None, pieces: int = 1) -> Gram:
    sums = empty_gram(h.shape[1], HIDDEN if r is not None else 0)
    parts = [None] * pieces if r is None else r.tensor_split(pieces)
    for piece, part in zip(h.tensor_split(pieces), parts, strict=True):
        add_tokens(sums, piece, part)
    return mirror(sums)


def problem(h: Tensor, r: Tensor) -> Problem:
    """A problem in float64 throughout, so that only the mathematics is compared."""
    return Problem(h.T @ h, h.T @ r, h.sum(0), r.sum(0), float(r.square().sum()), float(len(h)))


def lengths(slots: int = SLOTS) -> Tensor:
    return noise(slots, seed=3).exp()


def ridge_solution(h: Tensor, r: Tensor, length: Tensor, ridge: float, *, bias: bool) -> tuple[Tensor, Tensor]:
    """The least squares that a fit is, on rows: tokens, then one damping row a slot. A constant has no such row."""
    centred = h - h.mean(0) if bias else h
    mean = float((centred * length).square().sum(0).mean())
    damping = torch.diag(math.sqrt(ridge * mean) / length)
    rows = torch.cat([h, damping])
    if bias:
        ones = torch.cat([torch.ones(len(h), dtype=h.dtype), torch.zeros(len(damping), dtype=h.dtype)])
        rows = torch.cat([rows, ones[:, None]], dim=1)
    targets = torch.cat([r, torch.zeros(len(damping), r.shape[1], dtype=r.dtype)])
    solved = torch.linalg.lstsq(rows, targets, driver="gelsd").solution
    return solved[: h.shape[1]], solved[h.shape[1] :]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    scale = float(expected.abs().max())
    return found.shape == expected.shape and float((found - expected).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("slots", WIDTHS)
def test_sums_over_pieces_are_the_products_over_all_tokens(slots: int, pieces: int, kind: torch.dtype) -> None:
    h, r = coefficients(slots).to(kind), rest().to(kind)
    sums = summed(h, r, pieces)
    exact_h, exact_r = h.double(), r.double()
    assert sums.gram.dtype == sums.cross.dtype == torch.float32
    assert close(sums.gram.double(), exact_h.T @ exact_h, 1e-6)
    assert close(sums.gram.T, sums.gram, 1e-6)
    assert close(sums.cross.double(), exact_h.T @ exact_r, 1e-6)
    assert close(sums.slot_sum, exact_h.sum(0), 1e-6)
    assert close(sums.rest_sum, exact_r.sum(0), 1e-6)
    assert float(sums.rest_square) == pytest.approx(float(exact_r.square().sum()), rel=1e-6)
    assert float(sums.weight) == TOKENS


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_token_with_a_weight_counts_as_often_as_its_square_says(kind: torch.dtype) -> None:
    h, r = coefficients().to(kind), rest().to(kind)
    times = torch.arange(TOKENS) % 4
    sums = empty_gram(SLOTS, HIDDEN)
    add_tokens(sums, h, r, times.sqrt())
    often = summed(h.repeat_interleave(times, 0), r.repeat_interleave(times, 0))
    for found, expected in zip(mirror(sums).parts(), often.parts(), strict=True):
        assert close(found.double(), expected.double(), 1e-5)
    assert torch.equal(h, coefficients().to(kind))


def test_sums_without_a_rest_have_none() -> None:
    sums = summed(coefficients(), pieces=3)
    assert sums.cross.shape == (SLOTS, 0)
    assert float(sums.rest_square) == 0
    assert close(sums.gram.double(), coefficients().T @ coefficients(), 1e-6)


def test_all_parts_of_the_sums_add_up_over_processes() -> None:
    halves = [empty_gram(SLOTS, HIDDEN) for _ in range(2)]
    for half, h, r in zip(halves, coefficients().chunk(2), rest().chunk(2), strict=True):
        add_tokens(half, h, r)
    for mine, other in zip(halves[0].parts(), halves[1].parts(), strict=True):
        mine.add_(other)
    whole = as_problem(summed(coefficients(), rest()))
    both = as_problem(mirror(halves[0]))
    assert set(halves[0].parts()) == set(vars(halves[0]).values())
    for name, value in vars(whole).items():
        assert torch.allclose(torch.as_tensor(getattr(both, name)), torch.as_tensor(value), rtol=1e-5, atol=1e-4), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ridge", RIDGES)
def test_a_fit_is_the_ridge_regression(ridge: float, bias: bool) -> None:
    h, r = coefficients(), rest()
    found = fit(problem(h, r), lengths(), ridge, bias=bias)
    change, constant = ridge_solution(h, r, lengths(), ridge, bias=bias)
    assert close(found.change, change, 1e-7)
    assert (found.bias is not None) == bias
    if found.bias is not None:
        assert close(found.bias, constant[0], 1e-7)
    assert found.damping == found.ridge == ridge


def test_a_bias_is_not_damped() -> None:
    h, r = coefficients(), rest() + 100
    found = fit(problem(h, r), lengths(), 1e9, bias=True)
    assert found.bias is not None
    assert close(found.bias, r.mean(0), 1e-6)


def test_a_constant_slot_and_a_bias_can_be_told_apart() -> None:
    """Centred, such a slot is silent: the bias takes its part, and its value stays."""
    h = coefficients()
    h[:, 4] = 2
    r = 2 * torch.ones(TOKENS, 1, dtype=torch.float64) @ noise(1, HIDDEN, seed=5)
    found = fit(problem(h, r), lengths(), 0.01, bias=True)
    assert found.bias is not None
    assert close(found.bias, r[0], 1e-6)
    assert float(found.change.abs().max()) < 1e-6


def test_a_bias_never_makes_the_fitted_error_larger() -> None:
    for seed in range(5):
        sums = problem(coefficients(seed=seed), rest(seed=seed + 50))
        errors = [square_error(sums, fit(sums, lengths(), 1e-9, bias=bias)) for bias in (False, True)]
        assert errors[1] < errors[0]


@pytest.mark.parametrize("bias", [False, True])
def test_without_damping_the_error_is_at_right_angles_to_every_slot(bias: bool) -> None:
    h, r = coefficients(), rest()
    found = fit(problem(h, r), lengths(), 1e-13, bias=bias)
    left = r - h @ found.change - (0 if found.bias is None else found.bias)
    assert float((h.T @ left).abs().max()) < 1e-6 * float((h.T @ r).abs().max())


def test_an_endless_ridge_changes_nothing() -> None:
    sums = problem(coefficients(), rest())
    sizes = [float(fit(sums, lengths(), ridge).change.norm()) for ridge in (1e-3, 1.0, 1e3, 1e12)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-10 * sizes[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ridge", RIDGES)
def test_how_keys_and_values_share_a_factor_changes_nothing_that_is_written(ridge: float, bias: bool) -> None:
    h, r, length, share = coefficients(), rest(), lengths(), noise(SLOTS, seed=8).exp()
    one = fit(problem(h, r), length, ridge, bias=bias)
    other = fit(problem(h * share, r), length / share, ridge, bias=bias)
    assert close((h * share) @ other.change, h @ one.change)
    assert close(other.change * share[:, None], one.change)


@pytest.mark.parametrize("bias", [False, True])
def test_the_square_error_is_that_of_the_tokens(bias: bool) -> None:
    h, r = coefficients(), rest()
    found = fit(problem(h, r), lengths(), 0.1, bias=bias)
    others, goal = coefficients(seed=20), rest(seed=21)  # tokens that it was not fitted on
    left = goal - others @ found.change - (0 if found.bias is None else found.bias)
    assert square_error(problem(others, goal), found) == pytest.approx(float(left.square().sum()), rel=1e-10)
    assert square_error(problem(others, goal), None) == pytest.approx(float(goal.square().sum()), rel=1e-10)


@pytest.mark.parametrize("kept", [[0, 2, 3, 7, 10], [4], list(range(SLOTS))])
def test_a_removal_problem_asks_for_what_the_removed_slots_wrote(kept: list[int]) -> None:
    h, w = coefficients(), noise(SLOTS, HIDDEN, seed=4)
    gone = [slot for slot in range(SLOTS) if slot not in kept]
    found = removal_problem(summed(h), w, kept)
    expected = problem(h[:, kept], h[:, gone] @ w[gone])
    for name, value in vars(expected).items():
        scale = float(problem(h, h @ w).gram.abs().max()) if gone else 1.0
        assert torch.allclose(
            torch.as_tensor(getattr(found, name)).double(), torch.as_tensor(value).double(), atol=1e-6 * scale
        ), name


def test_with_nothing_removed_nothing_changes() -> None:
    w = noise(SLOTS, HIDDEN, seed=4)
    asked = removal_problem(summed(coefficients()), w, list(range(SLOTS)))
    for bias in (False, True):
        found = fit(asked, w.norm(dim=1), 0.01, bias=bias)
        assert float(found.change.abs().max()) == 0
        assert found.bias is None or float(found.bias.abs().max()) == 0
        assert square_error(asked, found) == 0


def test_joined_problems_are_the_problem_of_all_tokens() -> None:
    h, r = coefficients(), rest()
    both, all_of_them = joined(problem(h[:30], r[:30]), problem(h[30:], r[30:])), problem(h, r)
    for name, value in vars(all_of_them).items():
        assert torch.allclose(torch.as_tensor(getattr(both, name)), torch.as_tensor(value), rtol=1e-12), name


def test_a_wide_layer_is_solved_in_float32_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, w = summed(coefficients(), rest()), noise(SLOTS, HIDDEN, seed=4)
    before = fit(as_problem(sums), lengths(), 0.1), elimination(sums, w)
    monkeypatch.setattr(gram, "EXACT_WIDTH", SLOTS - 1)
    after = fit(as_problem(sums), lengths(), 0.1), elimination(sums, w)
    assert after[0].change.dtype == torch.float32
    assert before[0].change.dtype == torch.float64
    assert close(after[0].change.double(), before[0].change, 1e-4)
    assert close(after[1][0], before[1][0], 1e-4)


def test_a_gram_matrix_without_a_factor_is_damped_until_it_has_one_and_says_so() -> None:
    h = coefficients(SLOTS, tokens=4)  # fewer tokens than slots, and float32 sums: not positive definite
    found = fit(as_problem(summed(torch.cat([h, h], dim=1), rest(tokens=4))), lengths(2 * SLOTS), 1e-12)
    assert found.ridge == 1e-12
    assert found.damping > 1e-12
    assert math.log10(found.damping / found.ridge) == pytest.approx(round(math.log10(found.damping / found.ridge)))
    assert bool(torch.isfinite(found.change).all())


def test_a_gram_matrix_that_no_damping_mends_is_refused() -> None:
    sums = problem(coefficients(), rest())
    bad = Problem(-sums.gram, sums.cross, sums.slot_sum, sums.rest_sum, sums.rest_square, sums.weight)
    with pytest.raises(KvpruneError, match="no Cholesky factor"):
        fit(bad, lengths(), 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["coefficients", "rest", "length"])
def test_sums_that_are_not_finite_are_refused(where: str, bad: float) -> None:
    given = {"coefficients": coefficients(), "rest": rest(), "length": lengths()}
    given[where].view(-1)[5] = bad
    with pytest.raises(KvpruneError, match="not finite"):
        fit(as_problem(summed(given["coefficients"], given["rest"])), given["length"], 0.01)


@pytest.mark.parametrize("where", ["coefficients", "rest"])
def test_an_error_that_is_not_finite_is_no_error_to_compare(where: str) -> None:
    found = fit(problem(coefficients(), rest()), lengths(), 0.01)
    given = {"coefficients": coefficients(), "rest": rest()}
    given[where][3, 2] = math.nan
    with pytest.raises(KvpruneError, match="not finite"):
        square_error(as_problem(summed(given["coefficients"], given["rest"])), found)


@pytest.mark.parametrize("bias", [False, True])
def test_slots_that_never_fire_are_not_changed(bias: bool) -> None:
    silent = fit(problem(torch.zeros(TOKENS, SLOTS, dtype=torch.float64), rest()), lengths(), 0.01, bias=bias)
    assert float(silent.change.abs().max()) == 0
    h = coefficients()
    h[:, [2, 5]] = 0
    assert float(fit(problem(h, rest()), lengths(), 0.01, bias=bias).change[[2, 5]].abs().max()) == 0


def damped(sums: Gram, w: Tensor) -> Tensor:
    """G + λD as the scores see it, with the scale of the values taken out again."""
    g, length = sums.gram.double(), w.norm(dim=1)
    mean = float((g.diagonal() * length.square()).mean())
    return g + torch.diag(SCORE_RIDGE * mean / length.square())


def greedy_reference(sums: Gram, w: Tensor) -> list[int]:
    """Slots in the order in which they fall one by one, all that is left being solved from scratch each time."""
    whole, fallen = damped(sums, w), list[int]()
    while len(fallen) < len(w):
        rest = [slot for slot in range(len(w)) if slot not in fallen]
        inverse = torch.linalg.inv(whole[rest][:, rest])
        new = w[rest] + inverse @ whole[rest][:, fallen] @ w[fallen]
        fallen.append(rest[int((new.square().sum(1) / inverse.diagonal()).argmin())])
    return fallen


@pytest.mark.parametrize("slots", [1, 9, 48])
def test_the_cost_of_a_removal_is_that_of_the_optimal_brain_surgeon(slots: int) -> None:
    sums, w = summed(coefficients(slots)), noise(slots, HIDDEN, seed=4)
    cost = w.square().sum(1) / torch.linalg.inv(damped(sums, w)).diagonal()
    found, turn = elimination(sums, w)
    assert close(found, cost, 1e-6)
    assert sorted(turn.tolist()) == list(range(slots))
    assert found.dtype == torch.float64


def test_the_cost_is_the_damped_error_that_is_left_when_the_others_are_refitted() -> None:
    h, w = coefficients(), noise(SLOTS, HIDDEN, seed=4)
    found, whole = elimination(summed(h), w)[0], damped(summed(h), w)
    for slot in range(SLOTS):
        others = [other for other in range(SLOTS) if other != slot]
        change = torch.zeros_like(w)
        change[others] = torch.linalg.solve(whole[others][:, others], whole[others][:, [slot]] @ w[[slot]])
        change[slot] = -w[slot]
        assert float(found[slot]) == pytest.approx(float((change * (whole @ change)).sum()), rel=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 64])
def test_the_cheapest_block_falls_first(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "ELIMINATION_STEPS", steps)
    cost, turn = elimination(summed(coefficients(20)), noise(20, HIDDEN, seed=4))
    block = -(-20 // steps)
    assert cost.argsort()[:block].tolist() == turn.argsort()[:block].tolist()
    assert sorted(turn.tolist()) == list(range(20))


@pytest.mark.parametrize("seed", range(3))
def test_one_by_one_slots_fall_as_a_solution_from_scratch_has_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "ELIMINATION_STEPS", 10**9)
    sums, w = summed(coefficients(20, seed=seed)), noise(20, HIDDEN, seed=4 + seed)
    cost, turn = elimination(sums, w)
    assert turn.argsort().tolist() == greedy_reference(sums, w)
    assert turn.argsort().tolist() != cost.argsort().tolist()  # a refit in between matters


def test_how_keys_and_values_share_a_factor_changes_no_cost_and_no_turn() -> None:
    h, w, share = coefficients(), noise(SLOTS, HIDDEN, seed=4), 2.0 ** noise(SLOTS, seed=8).round()
    one, other = elimination(summed(h), w), elimination(summed(h * share), w / share[:, None])
    assert close(other[0], one[0])
    assert torch.equal(other[1], one[1])


@pytest.mark.parametrize("steps", [64, 10**9])
def test_of_two_slots_that_do_the_same_one_falls_first_and_one_stays_long(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gram, "ELIMINATION_STEPS", steps)
    h, w = noise(TOKENS, SLOTS), noise(SLOTS, HIDDEN, seed=4)
    h[:, 6] = h[:, 2] = 3 * h[:, 2]
    w[6] = w[2]
    cost, turn = elimination(summed(h), w)
    assert sorted(cost.argsort()[:2].tolist()) == [2, 6]
    assert 0 in (int(turn[2]), int(turn[6]))
    assert max(int(turn[2]), int(turn[6])) > 1


def test_slots_that_write_nothing_cost_nothing_and_fall_first() -> None:
    h, w = coefficients(), noise(SLOTS, HIDDEN, seed=4)
    h[:, 3] = 0
    w[7] = 0
    cost, turn = elimination(summed(h), w)
    assert float(cost[7]) == 0
    assert sorted(turn.argsort()[:2].tolist()) == [3, 7]
    assert bool(torch.isfinite(cost).all())


def test_what_is_given_is_not_changed() -> None:
    sums, w = summed(coefficients(), rest()), noise(SLOTS, HIDDEN, seed=4)
    asked = as_problem(sums)
    before: list[Any] = [item.clone() for item in (*sums.parts(), w, asked.gram, asked.cross)]
    found: Fit = fit(asked, w.norm(dim=1), 0.01, bias=True)
    square_error(asked, found)
    elimination(sums, w)
    removal_problem(sums, w, [0, 1])
    assert all(map(torch.equal, before, (*sums.parts(), w, asked.gram, asked.cross)))
