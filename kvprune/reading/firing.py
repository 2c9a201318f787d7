"""How the slots of an FFN share the work: figures and curves of firing, from the histograms of a calibration.

A slot fires on a token when its contribution is at least a threshold times the root mean square over the FFN's slots;
its rate is the share of counted tokens on which it does. Geva et al. 2021 (arXiv:2012.14913) look at how many keys a
token activates; rates look at the same matrix along its other side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn.stats import FfnStats, fire_rate

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)  # in multiples of the rms
THRESHOLD = 2.0  # of the rates
# The same for every FFN and run, so that histograms can be compared: from never to always, four bins a decade.
EDGES = (0.0, *(10 ** (-5 + step / 4) for step in range(21)))
RANKS = 64  # points of a curve


def firing(stats: Sequence[FfnStats], ffns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figures of each FFN, the experts of a layer taken together: plain data.

    `ffns` are those of the statistics' provenance, with `name`, `layer` and `expert`, in the order of `stats`. Experts
    that no token was routed to are left out of rates. Raises KvpruneError where nothing is counted.
    """
    return [
        {"name": name, "layer": ffns[members[0]]["layer"], **_figures([stats[at] for at in members])}
        for name, members in grouped(ffns).items()
    ]


def grouped(ffns: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Indices of the FFNs that are told of together, by name: all experts of a layer, and each other FFN alone."""
    groups: dict[str, list[int]] = {}
    for at, ffn in enumerate(ffns):
        name = ffn["name"] if ffn["expert"] is None else ffn["name"].rpartition(".")[0]
        groups.setdefault(name, []).append(at)
    return groups


def _figures(stats: Sequence[FfnStats]) -> dict[str, Any]:
    """Figures of one FFN, or of all experts of a layer; means over tokens are over all that any of them was given."""
    experts = sum(item.gate_total is not None for item in stats)
    used = [item for item in stats if int(item.tokens)]
    if not used and not experts:
        raise KvpruneError("nothing is counted in these statistics; run: kvprune calibrate")
    rates = torch.cat([fire_rate(item, THRESHOLD) for item in used or stats]).cpu()
    peaks = torch.stack([item.peak_histogram for item in stats]).sum(0)
    return {
        "experts": experts,
        "never_routed": len(stats) - len(used),
        "width": stats[0].width,
        "tokens": sum(int(item.tokens) for item in stats),
        "over_peak": float(peaks[1:].sum() / peaks.sum().clamp(min=1)),
        "over_rms": {f"{threshold:g}": mean_share(stats, threshold) for threshold in THRESHOLDS},
        "rates": {"edges": list(EDGES), "slots": histogram(rates)},
        "ranked": ranked(rates),
        "rare_1000": float((rates < 1e-3).double().mean()),
        "rare_10000": float((rates < 1e-4).double().mean()),
        "gini": gini(rates),
        "effective": effective(rates),
    }


def mean_share(stats: Sequence[FfnStats], threshold: float) -> float:
    """Share of slots that fire on a token at this threshold, as mean over the tokens of all `stats`."""
    fired = sum(float(fire_rate(item, threshold).sum()) * int(item.tokens) for item in stats)
    return fired / max(1, sum(item.width * int(item.tokens) for item in stats))


def histogram(rates: Tensor) -> list[int]:
    """How many of the `rates` `[slots]` are in each bin [edge, next edge) of EDGES; those of 1 are in the last."""
    inner = torch.tensor(EDGES[1:-1], dtype=torch.float64)
    bins = torch.bucketize(rates.double(), inner, right=True)
    counts: list[int] = torch.bincount(bins, minlength=len(EDGES) - 1).tolist()
    return counts


def ranked(rates: Tensor, points: int = RANKS) -> list[list[float]]:
    """Up to `points` pairs of rank (1: the slot that fires most) and rate, evenly spaced in the logarithm of rank."""
    falling = rates.sort(descending=True).values
    spaced = torch.logspace(0, torch.log10(torch.tensor(float(len(rates)))).item(), points, dtype=torch.float64)
    ranks = sorted({min(round(rank), len(rates)) for rank in spaced.tolist()})
    return [[rank, float(falling[rank - 1])] for rank in ranks]


def gini(rates: Tensor) -> float:
    """Gini coefficient of `rates` `[slots]`: 0 where all are equal, 1 - 1/slots where one slot does all the firing.

    Σ_i (2i - n - 1) x_i / (n Σ_i x_i), x rising: half the mean difference between two slots, relative to the mean.
    """
    x = rates.double().sort().values
    n, total = len(x), float(x.sum())
    weights = 2 * torch.arange(1, n + 1, dtype=torch.float64) - n - 1
    return float(weights @ x) / (n * total) if total else 0.0


def effective(rates: Tensor) -> float:
    """Effective number of slots: exp of the entropy of rates/Σrates. n where n fire equally often; 0 without firing."""
    total = rates.double().sum()
    return float(torch.special.entr(rates.double() / total).sum().exp()) if total else 0.0
