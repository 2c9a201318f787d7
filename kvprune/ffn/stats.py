"""What is known of an FFN's slots: how loudly they fire, as counts and sums that add up.

For every counted token, the contribution `c_i = |a_i| * |v_i|` of slot i (coefficient times the length of its value)
is taken relative to the root mean square of all contributions of that FFN on that token. The binary exponent of
that ratio picks a bin. Counts are integers and sums are float64, so statistics of parts add up to those of the whole.
"""

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import read_tensors
from kvprune.errors import KvpruneError
from kvprune.ranks import Ranks

LOWEST_EXPONENT = -16
BINS = 33  # bin 0: silent (zero or below 2^-16); bin b: ratio in [2^(b-17), 2^(b-16))
PEAK_BINS = 11  # bin b: contribution in [b/10, (b+1)/10) of the token's loudest; the last bin is that loudest slot


@dataclass
class FfnStats:
    """What is known of one FFN's slots. Additive fields first; every tensor is on one device."""

    histogram: Tensor  # int64 [slots, BINS]
    peak_histogram: Tensor  # int64 [PEAK_BINS], over all slots
    total: Tensor  # float64 [slots], sum of a over counted tokens
    total_abs: Tensor  # float64 [slots], sum of |a|
    total_square: Tensor  # float64 [slots], sum of a^2
    sequence_norms: Tensor  # float64 [slots], sum over sequences of the L2 norm of a in the sequence
    maximum: Tensor  # float32 [slots], largest c over all tokens, uncounted ones too
    tokens: Tensor  # int64 [], counted tokens
    sequences: Tensor  # int64 []
    value_norm: Tensor  # float32 [slots], |v|, with the weight of a norm that follows the FFN folded in
    key_norm: Tensor  # float32 [slots], product of the norms of the slot's keys
    # From the Gram matrix of all counted tokens, where it was collected; see gram.elimination.
    removal_cost: Tensor | None = None  # float64 [slots]
    removal_turn: Tensor | None = None  # int64 [slots]
    gradient: Tensor | None = None  # float64 [slots], sum of (a dL/da)^2, L the loss of its sequence in nats
    # Of an expert, whose `tokens` are those that are routed to it: the sum of the router's weights over them.
    gate_total: Tensor | None = None  # float64 []

    @property
    def width(self) -> int:
        return self.histogram.shape[0]


ADDED = ("histogram", "peak_histogram", "total", "total_abs", "total_square", "sequence_norms", "tokens", "sequences")


def empty_stats(value_norm: Tensor, key_norm: Tensor, *, routed: bool = False) -> FfnStats:
    """Nothing counted yet, for an FFN with these norms `[slots]`; `routed` for an expert."""
    width, device = value_norm.shape[0], value_norm.device

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return FfnStats(
        histogram=zeros(width, BINS, dtype=torch.int64),
        peak_histogram=zeros(PEAK_BINS, dtype=torch.int64),
        total=zeros(width, dtype=torch.float64),
        total_abs=zeros(width, dtype=torch.float64),
        total_square=zeros(width, dtype=torch.float64),
        sequence_norms=zeros(width, dtype=torch.float64),
        maximum=zeros(width, dtype=torch.float32),
        tokens=zeros(dtype=torch.int64),
        sequences=zeros(dtype=torch.int64),
        value_norm=value_norm.float(),
        key_norm=key_norm.float(),
        gate_total=zeros(dtype=torch.float64) if routed else None,
    )


def add(stats: FfnStats, more: FfnStats) -> FfnStats:
    """Add the counts and sums of `more`, of the same FFN, to `stats` in place, and return it."""
    for name in ADDED:
        getattr(stats, name).add_(getattr(more, name))
    if stats.gate_total is not None and more.gate_total is not None:
        stats.gate_total += more.gate_total
    torch.maximum(stats.maximum, more.maximum, out=stats.maximum)
    return stats


def sum_over(ranks: Ranks, stats: FfnStats) -> None:
    """Make `stats` those of all ranks' tokens, in place."""
    ranks.sum(*(getattr(stats, name) for name in ADDED))
    ranks.sum(*(item for item in (stats.gate_total, stats.gradient) if item is not None))
    ranks.largest(stats.maximum)


def fire_rate(stats: FfnStats, threshold: float) -> Tensor:
    """Share of counted tokens on which each slot fires, float64 `[slots]`: its ratio is at least `threshold` (2^k)."""
    first = int(math.log2(threshold)) - LOWEST_EXPONENT + 1
    return stats.histogram[:, first:].sum(1).double() / stats.tokens.clamp(min=1)


def first_bad_slot(stats: FfnStats) -> int | None:
    """The first slot whose coefficients were not all finite, or None."""
    bad = ~(torch.isfinite(stats.total_square) & torch.isfinite(stats.value_norm))
    return int(bad.nonzero()[0]) if bad.any() else None


def to_tensors(stats: Sequence[FfnStats], names: Sequence[str]) -> dict[str, Tensor]:
    """All statistics as one flat dictionary, "FFN:field" to tensor on the CPU."""
    return {
        f"{name}:{field.name}": value.cpu().contiguous()
        for name, item in zip(names, stats, strict=True)
        for field in fields(FfnStats)
        if (value := getattr(item, field.name)) is not None
    }


def from_tensors(tensors: dict[str, Tensor], names: Sequence[str], device: str = "cpu") -> list[FfnStats]:
    """The inverse of `to_tensors`. Raises KeyError where one is missing."""

    def value(name: str, field: Field[Any]) -> Tensor | None:
        key = f"{name}:{field.name}"
        return None if field.default is None and key not in tensors else tensors[key].to(device)

    return [FfnStats(**{field.name: value(name, field) for field in fields(FfnStats)}) for name in names]  # type: ignore[arg-type]


def read_stats(path: Path) -> tuple[list[FfnStats], dict[str, Any]]:
    """The statistics of a run, in layer order, and their provenance. Raises KvpruneError where they are missing."""
    tensors, meta = read_tensors(path)
    try:
        return from_tensors(tensors, [ffn["name"] for ffn in meta["layout"]["ffns"]]), meta
    except (KeyError, TypeError) as error:
        raise KvpruneError(f"{path}: incomplete ({error}); run: kvprune calibrate") from None
