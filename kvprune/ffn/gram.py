"""Gram matrices of an FFN's coefficients: what is left of its output when slots fall, and how the rest makes up for it.

H `[tokens, slots]` are coefficients, W `[slots, hidden]` values (row i is what slot i writes), so the FFN writes H W.
Slots are scaled by the length of their value before anything is damped: how an up and a down matrix share a factor
then changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.progress import log

BLOCKS = 4  # of a symmetric product, of which the lower ones are mirrored: 5/8 of the work
SCORE_RIDGE = 0.01  # damping of the inverse that scores are read from, relative to the mean of the scaled diagonal
ELIMINATION_STEPS = 64  # in how many blocks all slots fall
EXACT_WIDTH = 8192  # up to here solves are in float64; above, memory counts and they are in float32
DAMPING_TRIES = 8
NOT_FINITE = "a Gram matrix is not finite; check the weights, or try dtype: float32"


def warn_of_few(stage: str, tokens: int, slots: int, length: int) -> None:
    """Warn where there are fewer `tokens` than `slots` to tell apart, with a number of sequences of `length` to use."""
    if tokens < slots:
        log.warning(
            "%s: %s tokens are fewer than a layer's %s slots, so the damping decides; use calibrate.tokens=%d or more",
            stage,
            f"{tokens:,}",
            f"{slots:,}",
            -(-4 * slots // length) * length,
        )


@dataclass
class Gram:
    """Sums of coefficients H `[tokens, slots]`, and of what they should write in addition (R `[tokens, hidden]`).

    Products are float32, sums of rows float64. Of `gram` only the upper blocks hold until `mirror`.
    """

    gram: Tensor  # float32 [slots, slots], H'H
    cross: Tensor  # float32 [slots, hidden], H'R
    slot_sum: Tensor  # float64 [slots]
    rest_sum: Tensor  # float64 [hidden]
    rest_square: Tensor  # float64 []
    weight: Tensor  # float64 [], of all tokens: their number where they have no weights

    def parts(self) -> tuple[Tensor, ...]:
        """All that adds up."""
        return self.gram, self.cross, self.slot_sum, self.rest_sum, self.rest_square, self.weight


def empty_gram(slots: int, hidden: int, device: torch.device | str = "cpu") -> Gram:
    """Sums of nothing."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Gram(
        gram=zeros(slots, slots, dtype=torch.float32),
        cross=zeros(slots, hidden, dtype=torch.float32),
        slot_sum=zeros(slots),
        rest_sum=zeros(hidden),
        rest_square=zeros(),
        weight=zeros(),
    )


def add_tokens(sums: Gram, coefficients: Tensor, rest: Tensor | None = None, weights: Tensor | None = None) -> None:
    """Add coefficients `[tokens, slots]` and, where there is one, the rest `[tokens, hidden]`, in place.

    With `weights` `[tokens]`, errors count by their squares.
    """
    w = torch.ones(len(coefficients), 1, device=coefficients.device) if weights is None else weights.float()[:, None]
    h = coefficients.float().mul_(w) if coefficients.dtype != torch.float32 else coefficients * w
    for start, end in _blocks(h.shape[1]):
        sums.gram[start:end, start:].addmm_(h[:, start:end].T, h[:, start:])
    sums.slot_sum += (h.T @ w)[:, 0]
    sums.weight += w.square().sum(dtype=torch.float64)
    if rest is not None:
        r = rest.float() * w
        sums.cross.addmm_(h.T, r)
        sums.rest_sum += (r.T @ w)[:, 0]
        sums.rest_square += r.square().sum(dtype=torch.float64)


def mirror(sums: Gram) -> Gram:
    """Fill in the lower blocks of `gram`, in place."""
    for start, end in _blocks(sums.gram.shape[0]):
        sums.gram[end:, start:end] = sums.gram[start:end, end:].T
    return sums


def _blocks(size: int) -> list[tuple[int, int]]:
    edges = [size * at // BLOCKS for at in range(BLOCKS + 1)]
    return [(start, end) for start, end in pairwise(edges) if start < end]


@dataclass(frozen=True)
class Problem:
    """Find a change X `[slots, hidden]` of the values with H X close to R, given sums over tokens (all of one type)."""

    gram: Tensor  # [slots, slots], H'H
    cross: Tensor  # [slots, hidden], H'R
    slot_sum: Tensor  # [slots]
    rest_sum: Tensor  # [hidden]
    rest_square: float
    weight: float


def solving_type(slots: int) -> torch.dtype:
    """The type that problems of this width are solved in."""
    return torch.float64 if slots <= EXACT_WIDTH else torch.float32


def as_problem(sums: Gram) -> Problem:
    """Mirrored sums as a problem."""
    kind = solving_type(sums.gram.shape[0])
    return Problem(
        sums.gram.to(kind),
        sums.cross.to(kind),
        sums.slot_sum.to(kind),
        sums.rest_sum.to(kind),
        float(sums.rest_square),
        float(sums.weight),
    )


def removal_problem(sums: Gram, values: Tensor, kept: Sequence[int]) -> Problem:
    """What the kept slots should write in place of the others: R = H_P W_P, from mirrored sums over all slots."""
    kind = solving_type(sums.gram.shape[0])
    gone = torch.ones(values.shape[0], dtype=torch.bool)
    keep = torch.tensor(kept, dtype=torch.int64)
    gone[keep] = False
    removed = gone.nonzero().flatten()
    w = values[removed].to(kind)
    gone_gram = sums.gram[removed][:, removed].to(kind)
    return Problem(
        sums.gram[keep][:, keep].to(kind),
        sums.gram[keep][:, removed].to(kind) @ w,
        sums.slot_sum[keep].to(kind),
        w.T @ sums.slot_sum[removed].to(kind),
        float((w * (gone_gram @ w)).sum()),
        float(sums.weight),
    )


def joined(one: Problem, other: Problem) -> Problem:
    """The problem over the tokens of both."""
    return Problem(
        one.gram + other.gram,
        one.cross + other.cross,
        one.slot_sum + other.slot_sum,
        one.rest_sum + other.rest_sum,
        one.rest_square + other.rest_square,
        one.weight + other.weight,
    )


@dataclass(frozen=True)
class Fit:
    """A solution: add `change` `[slots, hidden]` to the kept values and `bias` `[hidden]` to what the FFN writes."""

    change: Tensor
    bias: Tensor | None
    ridge: float  # as asked
    damping: float  # as was needed for the Cholesky factor to exist; equal to ridge where all went well


def fit(problem: Problem, length: Tensor, ridge: float, *, bias: bool = False) -> Fit:
    """Ridge regression towards no change: (G + λD)⁻¹ H'R, D = mean diag(SGS) · S⁻², S = diag(`length`), λ = `ridge`.

    `length` `[slots]` are the lengths of the values. With `bias`, R is also met by a constant, which is not damped.
    Raises KvpruneError where the sums are not finite.
    """
    gram, cross = problem.gram, problem.cross
    if not torch.isfinite(cross).all():
        raise KvpruneError(NOT_FINITE)
    n = problem.weight or 1.0
    if bias:
        gram = gram - torch.outer(problem.slot_sum, problem.slot_sum) / n
        cross = cross - torch.outer(problem.slot_sum, problem.rest_sum) / n
    scale = length.to(gram)
    factor, damping = _factor(gram * scale[:, None] * scale[None, :], ridge)
    change = scale[:, None] * torch.cholesky_solve(scale[:, None] * cross, factor)
    constant = (problem.rest_sum - problem.slot_sum @ change) / n if bias else None
    return Fit(change, constant, ridge, damping)


def _factor(scaled: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Lower Cholesky factor of `scaled` + ridge · mean diagonal, and the ridge that it took. Overwrites `scaled`."""
    diagonal = scaled.diagonal().clone()
    mean = float(diagonal.mean())
    if not torch.isfinite(diagonal).all():
        raise KvpruneError(NOT_FINITE)
    damping = ridge
    for _ in range(DAMPING_TRIES):
        scaled.diagonal().copy_(diagonal + (damping * mean or 1.0))  # where nothing ever fires, nothing changes
        factor, info = torch.linalg.cholesky_ex(scaled)
        if not int(info):
            return factor, damping
        damping *= 10
    raise KvpruneError(f"a Gram matrix has no Cholesky factor, even damped by {damping / 10:g} of its mean diagonal")


def square_error(problem: Problem, found: Fit | None) -> float:
    """Σ over tokens of ‖R − H X − b‖²; without a fit, of ‖R‖². Raises KvpruneError where that is not finite."""
    error = problem.rest_square
    if found is not None:
        x, b = found.change, found.bias
        error += float((x * (problem.gram @ x)).sum()) - 2 * float((x * problem.cross).sum())
        if b is not None:
            error += float(problem.weight * b.dot(b) - 2 * b.dot(problem.rest_sum - problem.slot_sum @ x))
    if not math.isfinite(error):
        raise KvpruneError(NOT_FINITE)
    return error


def constant_error(problem: Problem, found: Fit) -> float:
    """The part of a fit's square error that one constant would take away: what a bias can be worth at most."""
    lacking = problem.rest_sum - problem.slot_sum @ found.change
    return float(lacking.square().sum()) / (problem.weight or 1.0)


def elimination(sums: Gram, values: Tensor) -> tuple[Tensor, Tensor]:
    """What each slot's removal costs once the others make up for it, and the order in which slots fall in turn.

    The cost, float64 `[slots]`, is ‖w‖² / (G + λD)⁻¹_ii (Optimal Brain Surgeon, Hassibi and Stork 1993). The order,
    int64 `[slots]`, is each slot's turn: the cheapest block falls, the others are refitted, and so on (OSSCAR, Meng et
    al. 2024, arXiv:2403.12983; SlimGPT, Ling et al. 2024, arXiv:2412.18110). `sums` are mirrored, over all slots.
    """
    kind = solving_type(values.shape[0])
    w = values.to(kind)
    length = torch.linalg.vector_norm(w, dim=1)
    factor, _ = _factor(sums.gram.to(kind) * length[:, None] * length[None, :], SCORE_RIDGE)
    inverse = torch.cholesky_inverse(factor)
    w = w / length.masked_fill(length == 0, 1)[:, None]
    cost = (w.square().sum(1) / inverse.diagonal()).double()
    alive = torch.arange(len(w), device=w.device)
    turn = torch.empty(len(w), dtype=torch.int64, device=w.device)
    block = -(-len(w) // ELIMINATION_STEPS)
    while len(alive):
        ranked = torch.argsort(w.square().sum(1) / inverse.diagonal(), stable=True)
        fallen, rest = ranked[:block], ranked[block:].sort().values
        turn[alive[fallen]] = torch.arange(len(fallen), device=w.device) + int(len(turn) - len(alive))
        share = torch.linalg.solve(inverse[fallen][:, fallen], inverse[fallen][:, rest]).T  # [rest, fallen]
        w = w[rest] - share @ w[fallen]
        inverse = inverse[rest][:, rest] - share @ inverse[fallen][:, rest]
        alive = alive[rest]
    return cost, turn
