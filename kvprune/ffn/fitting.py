"""What a refit learns of one FFN from the tokens, and the choice among fits that held-back tokens make."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprune.ffn.experts import Seen
from kvprune.ffn.gram import (
    Fit,
    Gram,
    Problem,
    add_tokens,
    constant_error,
    empty_gram,
    fit,
    joined,
    square_error,
)
from kvprune.schema import Refit

BIAS_GAIN = 0.99  # a bias must bring the held-back error below so much of that without
SMALLEST_SQUARE = 1e-20  # of a hidden state, in the mean
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # what `auto` tries


def token_weights(after: Tensor, slim: Tensor | None = None) -> Tensor:
    """How much errors on each token count, `[sequences, tokens]`, from hidden states after the layer.

    The next layer sees them normed, so an error is one relative to their rms. Where the slim run is lost, farther from
    the dense one than nothing at all, there is nothing to learn: a massive activation that came up in one of the two
    alone would have the slots that write it silenced, and those make the attention sinks.
    """
    states = after.float()
    size = states.square().mean(2)
    weights = size.rsqrt().masked_fill(size < SMALLEST_SQUARE, 0)  # a state of zeros says nothing
    if slim is not None:
        lost = (slim.float() - states).square().sum(2) > states.square().sum(2)
        weights = weights.masked_fill(lost, 0)
    return weights


@dataclass
class Sums:
    """Sums of an FFN over fitted and over held-back tokens, and what it writes on the latter, squared."""

    fitted: Gram
    held: Gram
    energy: Tensor


def empty_sums(slots: int, hidden: int, device: str) -> Sums:
    """Sums of nothing."""
    fitted, held = (empty_gram(slots, hidden, device) for _ in range(2))
    return Sums(fitted, held, torch.zeros((), dtype=torch.float64, device=device))


def add_seen(sums: Sums, seen: Seen, y: Tensor, rest: Tensor | None, weights: Tensor, held: Tensor) -> None:
    """Add what a batch shows of an FFN: `y` is what the dense one writes, `weights` `[sequences, tokens]`."""
    back = held.to(weights.device)[:, None].expand(weights.shape).flatten()
    w = weights.flatten()
    if seen.tokens is not None:
        back, w = back[seen.tokens], w[seen.tokens]
    if seen.gates is not None:
        w = w * seen.gates.float()
    for part, mine in ((sums.fitted, ~back), (sums.held, back)):
        if mine.any():
            add_tokens(part, seen.h[mine], None if rest is None else rest[mine], w[mine])
    sums.energy += (y.float() * w[:, None])[back].square().sum(dtype=torch.float64)


@dataclass(frozen=True)
class Gathered:
    """Of one FFN: the problems over fitted and over held-back tokens, and what the dense FFN writes on the latter."""

    fitted: Problem
    held: Problem
    energy: float  # sum of squares
    target: str


def choose(gathered: Gathered, values: Tensor, section: Refit, *, bias: bool) -> tuple[Fit | None, dict[str, Any]]:
    """The fit that is best on held-back tokens, made again with them; None where none is better than no change.

    `values` `[slots, hidden]` are the kept ones. The report's errors are of the fit without the held-back tokens, as
    shares of what the dense FFN writes there.
    """
    length = torch.linalg.vector_norm(values.double(), dim=1)
    before = square_error(gathered.held, None)

    def attempt(ridge: float, with_bias: bool = False) -> tuple[float, Fit]:
        found = fit(gathered.fitted, length, ridge, bias=with_bias)
        return square_error(gathered.held, found), found

    after, best = _lowest(attempt, RIDGES) if section.ridge == "auto" else attempt(section.ridge)
    if bias and constant_error(gathered.held, best) > (1 - BIAS_GAIN) * after:
        with_bias = attempt(best.ridge, True)
        after, best = with_bias if with_bias[0] < BIAS_GAIN * after else (after, best)
    energy = max(gathered.energy, torch.finfo(torch.float64).tiny)
    report = {
        "error_before": max(before, 0.0) / energy,
        "error_after": max(min(after, before), 0.0) / energy,
        "error_tried": max(after, 0.0) / energy,
        "ridge": best.ridge,
        "damping": best.damping,
        "bias": after < before and best.bias is not None,
        "refitted": after < before,
    }
    if not after < before:
        return None, report
    return fit(joined(gathered.fitted, gathered.held), length, best.ridge, bias=best.bias is not None), report


def _lowest(attempt: Callable[[float], tuple[float, Fit]], ridges: tuple[float, ...]) -> tuple[float, Fit]:
    """The attempt of the lowest error, found downhill from the middle: errors fall and then rise with the ridge."""
    at = len(ridges) // 2
    best, errors = attempt(ridges[at]), {}
    while True:
        for near in (at - 1, at + 1):
            if 0 <= near < len(ridges) and near not in errors:
                found = attempt(ridges[near])
                errors[near] = found[0]
                if found[0] < best[0]:
                    errors[at], best, at = best[0], found, near
                    break
        else:
            return best
