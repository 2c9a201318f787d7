"""Ways to count the exponent histogram, and what it costs beside the layer whose coefficients it counts, in one run.

    python scripts/bench_counting.py

One thread each, as a calibration counts; coefficients of one sequence of 512 tokens of a layer of the builtin model, in
bfloat16. Alternating rounds, medians. numba is tried where it is installed (`pip install numba`).
"""

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvprune.dense import open_dense
from kvprune.ffn.counting import Scratch, _count_exponents, _count_loudness, _count_moments, _count_peaks, make_scratch
from kvprune.ffn.stats import BINS, LOWEST_EXPONENT, FfnStats, empty_stats
from kvprune.ffn.walk import Setup
from kvprune.sources.models import BUILTIN

TOKENS = 512
ROUNDS = 15


def bins(c: Tensor, width: int) -> Tensor:
    """Flat bin of every coefficient, int64: what index_add and scatter_add need."""
    rms = torch.linalg.vector_norm(c, dim=1, keepdim=True) / width**0.5
    bits = (c / rms).clamp_(min=2.0 ** (LOWEST_EXPONENT - 1)).view(torch.int32) >> 23
    slots: Tensor = torch.arange(width, dtype=torch.int32) * BINS - (126 + LOWEST_EXPONENT)
    flat: Tensor = (bits + slots).view(-1).long()
    return flat


def numba_kernel() -> Callable[[Any, Any], None]:
    """Norm and histogram in two passes over the rows, compiled."""
    import numba  # type: ignore[import-not-found,unused-ignore]
    import numpy as np

    @numba.njit(fastmath=True)  # type: ignore[untyped-decorator]
    def count(values: Any, histogram: Any) -> None:
        tokens, width = values.shape
        row = np.empty(width, dtype=np.float32)
        bits = row.view(np.int32)
        for t in range(tokens):
            total = np.float32(0)
            for j in range(width):
                total += values[t, j] * values[t, j]
            scale = np.float32(1) / np.sqrt(total / np.float32(width))
            for j in range(width):
                row[j] = max(values[t, j] * scale, np.float32(2.0**-17))
            for j in range(width):
                histogram[j, (bits[j] >> 23) - 110] += 1

    return count  # type: ignore[no-any-return]


def median_times(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each work, in turn; a first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for at in range(ROUNDS + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if at:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def count_all(stats: FfnStats, a: Tensor, scratch: Scratch) -> None:
    """Every statistic, as a calibration counts them."""
    for chunk in torch.split(a, scratch.exact.shape[0]):
        _count_moments(stats, chunk, scratch)
        c = _count_loudness(stats, chunk, scratch)
        _count_exponents(stats, c, scratch)
        _count_peaks(stats, c, scratch)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    dense = open_dense(BUILTIN)
    ffn = dense.layout.ffns[10]
    width = ffn.width
    walker = dense.walker(Setup("cpu", torch.bfloat16, 1), TOKENS)
    hidden, calls = walker.record(torch.randint(0, 40000, (1, TOKENS), generator=torch.Generator().manual_seed(0)))
    with walker.filled(10) as layer:
        seen: list[Tensor] = []
        module = walker.model.get_submodule(ffn.module)
        handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        calls[10].run(layer, hidden)
        handle.remove()
        a = seen[0]
        stats: FfnStats = empty_stats(torch.ones(width), torch.ones(width))
        scratch: Scratch = make_scratch(width, a.dtype, a.device)
        c = a.float().abs()
        rows = scratch.exact.shape[0]
        ones = torch.ones(c.numel(), dtype=torch.int64)
        target = torch.zeros(width * BINS, dtype=torch.int64)

        def shipped() -> None:
            for chunk in torch.split(c, rows):
                _count_exponents(stats, chunk, scratch)

        works: dict[str, Callable[[], Any]] = {
            "the layer": lambda: calls[10].run(layer, hidden),
            "all counting": lambda: count_all(stats, a, scratch),
            "histogram: bincount (as shipped)": shipped,
            "histogram: index_add": lambda: target.index_add_(0, bins(c, width), ones),
            "histogram: scatter_add": lambda: target.scatter_add_(0, bins(c, width), ones),
            "histogram: bins alone": lambda: bins(c, width),
        }
        if find_spec("numba") is not None:
            kernel, view, histogram = numba_kernel(), c.numpy(), stats.histogram.numpy()
            works["histogram: numba"] = lambda: kernel(view, histogram)
        times = median_times(works)
    for name, seconds in times.items():
        print(f"{name:<34} {seconds * 1e3:7.2f} ms   {seconds / times['the layer']:.3f} of the layer")


if __name__ == "__main__":
    main()
