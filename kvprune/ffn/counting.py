"""Counting coefficients into `FfnStats`: the inner loop of a calibration.

A sequence is counted alone, in chunks of a fixed size, and sequences are added in their order: the result depends
neither on the batch size nor on the number of threads. Each thread counts whole sequences by itself, since handing
every small step to all cores would cost more than the step.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn.experts import Seen
from kvprune.ffn.stats import BINS, LOWEST_EXPONENT, PEAK_BINS, FfnStats, add, empty_stats

CHUNK_ELEMENTS = 2**18  # tokens x slots counted at once: what stays in a core's cache
ACCELERATOR_CHUNK_ELEMENTS = 2**26  # there, few large steps are better
LANES = 16
SMALLEST_RMS = 1e-18  # below it squares underflow in float32, and the token is silent


@dataclass(frozen=True)
class Scratch:
    """Buffers `[rows, slots]` that chunks are counted in: fresh memory for every step would cost more than the step."""

    exact: Tensor  # float64
    magnitude: Tensor  # of the coefficients' own type
    loudness: Tensor  # float32
    ratio: Tensor  # float32
    tenths: Tensor  # uint8
    slot_bins: Tensor  # int32 [slots], what turns the exponent bits of a slot's ratio into its bin
    slot_lane: Tensor  # uint8 [slots], neighbours count into different lanes: one hot counter would wait for itself


def make_scratch(width: int, dtype: torch.dtype, device: torch.device) -> Scratch:
    """Buffers to count coefficients of `dtype` of FFNs of this width; reusable, and empty between calls."""
    rows = max(1, (CHUNK_ELEMENTS if device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS) // width)

    def buffer(kind: torch.dtype) -> Tensor:
        return torch.empty(rows, width, dtype=kind, device=device)

    slots = torch.arange(width, dtype=torch.int32, device=device)
    return Scratch(
        exact=buffer(torch.float64),
        magnitude=buffer(dtype),
        loudness=buffer(torch.float32),
        ratio=buffer(torch.float32),
        tenths=buffer(torch.uint8),
        slot_bins=slots * BINS - (126 + LOWEST_EXPONENT),
        slot_lane=(slots % LANES * PEAK_BINS).to(torch.uint8),
    )


@dataclass(frozen=True)
class Counters:
    """Threads that count, and the buffers of each by width. One thread on an accelerator, which needs no help."""

    threads: int
    pool: ThreadPoolExecutor
    scratches: list[dict[int, Scratch]]

    def scratch(self, worker: int, width: int, dtype: torch.dtype, device: torch.device) -> Scratch:
        """The buffers of a thread for FFNs of this width."""
        if width not in self.scratches[worker]:
            self.scratches[worker][width] = make_scratch(width, dtype, device)
        return self.scratches[worker][width]


@contextmanager
def make_counters(device: torch.device) -> Iterator[Counters]:
    """Counters for coefficients on `device`."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield Counters(threads, pool, [{} for _ in range(threads)])


@dataclass(frozen=True)
class Part:
    """What one sequence shows of an FFN: coefficients `[tokens, slots]`; of the first `skip`, the maximum only."""

    h: Tensor
    skip: int


def by_sequence(seen: Seen, sequences: int, length: int, skip_first: int) -> list[Part]:
    """What a batch of `sequences` of `length` shows, cut into its sequences; of an expert, those that it is used in."""
    if seen.tokens is None:
        if len(seen.h) != sequences * length:
            raise KvpruneError(f"{len(seen.h)} rows reach an FFN where there are {sequences * length} tokens")
        return [Part(h, skip_first) for h in seen.h.view(sequences, length, seen.h.shape[-1])]
    ends = torch.searchsorted(seen.tokens, torch.arange(1, sequences, device=seen.tokens.device) * length)
    cuts = ends.tolist()
    skipped = (seen.tokens % length < skip_first).tensor_split(cuts)
    parts = zip(seen.h.tensor_split(cuts), skipped, strict=True)
    return [Part(h, int(skip.sum())) for h, skip in parts if len(h)]


def counted_rows(seen: Seen, length: int, skip_first: int) -> Tensor:
    """Coefficients `[tokens, slots]` of all tokens that count, of a batch of sequences of `length`."""
    if seen.tokens is None:
        return seen.h.view(-1, length, seen.h.shape[-1])[:, skip_first:].flatten(0, 1)
    return seen.h[seen.tokens % length >= skip_first]


def count_seen(
    stats: FfnStats, seen: Seen, sequences: int, length: int, skip_first: int, counters: Counters | None = None
) -> None:
    """Add what a batch of `sequences` of `length` tokens shows of an FFN to its `stats`, in place."""
    count(stats, by_sequence(seen, sequences, length, skip_first), counters)
    if stats.gate_total is not None and seen.tokens is not None:
        gates = torch.ones_like(seen.tokens, dtype=torch.float64) if seen.gates is None else seen.gates.double()
        stats.gate_total += gates[seen.tokens % length >= skip_first].sum()


def count(stats: FfnStats, parts: Sequence[Part], counters: Counters | None = None) -> None:
    """Add the sequences `parts` to `stats`, in place."""
    few = sum(part.h.numel() for part in parts) < CHUNK_ELEMENTS
    if counters is None or counters.threads == 1 or few:
        counts = [_counted(stats, part, counters, 0) for part in parts]
    else:
        counts = _count_in_threads(stats, parts, counters)
    for item in counts:
        add(stats, item)


def _counted(stats: FfnStats, part: Part, counters: Counters | None, worker: int) -> FfnStats:
    scratch = counters.scratch(worker, stats.width, part.h.dtype, part.h.device) if counters else None
    return count_sequence(stats, part.h, part.skip, scratch)


def _count_in_threads(stats: FfnStats, parts: Sequence[Part], counters: Counters) -> list[FfnStats]:
    threads = torch.get_num_threads()

    @torch.inference_mode()
    def share(worker: int) -> list[FfnStats]:
        return [_counted(stats, part, counters, worker) for part in parts[worker :: counters.threads]]

    shares = list(counters.pool.map(share, range(counters.threads)))
    torch.set_num_threads(threads)  # a thread of the pool that started has set it to 1 for libraries that ask globally
    return [shares[index % counters.threads][index // counters.threads] for index in range(len(parts))]


def count_sequence(stats: FfnStats, sequence: Tensor, skip_first: int, scratch: Scratch | None = None) -> FfnStats:
    """The statistics of one sequence of coefficients `[tokens, slots]` of the FFN that `stats` is of."""
    scratch = scratch or make_scratch(stats.width, sequence.dtype, sequence.device)
    rows = scratch.exact.shape[0]
    part = empty_stats(stats.value_norm, stats.key_norm)  # no gates: they are counted for the whole batch
    for chunk in _chunks(sequence[:skip_first], rows):
        _count_loudness(part, chunk, scratch)
    for chunk in _chunks(sequence[skip_first:], rows):
        _count_moments(part, chunk, scratch)
        c = _count_loudness(part, chunk, scratch)
        _count_exponents(part, c, scratch)
        _count_peaks(part, c, scratch)
    part.sequence_norms += part.total_square.sqrt()
    part.tokens += max(0, sequence.shape[0] - skip_first)
    part.sequences += 1
    return part


def _chunks(tokens: Tensor, rows: int) -> tuple[Tensor, ...]:
    return torch.split(tokens, rows) if len(tokens) else ()


def _count_moments(stats: FfnStats, a: Tensor, scratch: Scratch) -> None:
    """Sums of a, |a| and a^2 in float64."""
    exact = scratch.exact[: a.shape[0]].copy_(a)
    stats.total += exact.sum(0)
    stats.total_abs += exact.abs_().sum(0)
    stats.total_square += exact.square_().sum(0)


def _count_loudness(stats: FfnStats, a: Tensor, scratch: Scratch) -> Tensor:
    """Contributions c `[tokens, slots]` in a buffer; the maximum is taken over all of them."""
    magnitude = torch.abs(a, out=scratch.magnitude[: a.shape[0]])
    c = scratch.loudness[: a.shape[0]].copy_(magnitude).mul_(stats.value_norm)
    torch.maximum(stats.maximum, c.amax(0), out=stats.maximum)
    return c


def _count_exponents(stats: FfnStats, c: Tensor, scratch: Scratch) -> None:
    """Histogram of floor(log2(c / rms(c))), read from the exponent bits of the float32 ratio."""
    rms = torch.linalg.vector_norm(c, dim=1, keepdim=True).div_(stats.width**0.5)
    ratio = torch.div(c, rms.masked_fill_(rms < SMALLEST_RMS, torch.inf), out=scratch.ratio[: c.shape[0]])
    ratio.abs_()  # a NaN may have a sign, and no bin is below the first
    bits = ratio.clamp_(min=2.0 ** (LOWEST_EXPONENT - 1)).view(torch.int32)  # the silent bin is the exponent below
    bins = bits.bitwise_right_shift_(23).add_(scratch.slot_bins)
    size = stats.histogram.numel()
    # What is not finite lands beyond its bins; `first_bad_slot` tells of it.
    stats.histogram += torch.bincount(bins.view(-1), minlength=size)[:size].view_as(stats.histogram)


def _count_peaks(stats: FfnStats, c: Tensor, scratch: Scratch) -> None:
    """Histogram of c relative to the token's largest, in tenths."""
    peak = c.amax(1, keepdim=True)
    ratio = torch.div(c, peak.masked_fill_(peak == 0, torch.inf), out=scratch.ratio[: c.shape[0]])
    tenths = scratch.tenths[: c.shape[0]].copy_(ratio.mul_(PEAK_BINS - 1)).add_(scratch.slot_lane)
    size = LANES * PEAK_BINS
    stats.peak_histogram += torch.bincount(tenths.view(-1), minlength=size)[:size].view(LANES, PEAK_BINS).sum(0)
