"""Figures of firing are those of the coefficients themselves, and those of distributions that are known."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn.counting import counted_rows
from kvprune.ffn.experts import Seen
from kvprune.ffn.find import find_layout
from kvprune.ffn.forwards import count_batch, empty
from kvprune.ffn.layout import Ffn
from kvprune.ffn.watching import value_rows, watched
from kvprune.reading.firing import EDGES, effective, firing, gini, histogram, mean_share, ranked
from tests.conftest import tiny_model
from tests.families import family_config

SKIP = 1


def seen_and_told(name: str) -> tuple[dict[str, list[Tensor]], list[dict[str, Any]]]:
    """Contributions `[tokens, slots]` of each FFN, the experts of a layer in one list; and what `firing` tells."""
    config = family_config(name)
    model, layout = tiny_model(config), find_layout(config)
    batch = torch.randint(0, 250, (6, 20), generator=torch.Generator().manual_seed(3))
    found: dict[str, list[Tensor]] = {}

    def see(ffn: Ffn, seen: Seen) -> None:
        c = counted_rows(seen, batch.shape[1], SKIP).abs().double() * value_rows(model, ffn).double().norm(dim=1)
        found.setdefault(ffn.name if ffn.expert is None else ffn.name.rpartition(".")[0], []).append(c)

    with torch.inference_mode(), watched(model, layout.ffns, see):
        model(input_ids=batch, use_cache=False)
    stats = empty(model, layout)
    count_batch(model, layout, stats, batch, SKIP)
    ffns = [{"name": ffn.name, "layer": ffn.layer, "expert": ffn.expert} for ffn in layout.ffns]
    return found, firing([stats[ffn.name] for ffn in layout.ffns], ffns)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mixtral", "qwen2_moe"])
def test_figures_are_those_of_the_coefficients(name: str) -> None:
    found, told = seen_and_told(name)
    assert {item["name"] for item in told} == found.keys()
    for item in told:
        c = found[item["name"]]
        loud = [each / each.square().mean(1, keepdim=True).sqrt().clamp(min=1e-30) for each in c]
        rates = torch.cat([(each >= 2).double().mean(0) for each in loud])
        assert item["tokens"] == sum(map(len, c))
        assert item["width"] == c[0].shape[1]
        assert item["experts"] == (item["never_routed"] + len(c) if "experts" in item["name"] else 0)
        for threshold, share in item["over_rms"].items():
            assert share == pytest.approx(float(torch.cat([each >= float(threshold) for each in loud]).double().mean()))
        peaks = torch.cat([each >= each.amax(1, keepdim=True) / 10 for each in c if len(each)])
        assert item["over_peak"] == pytest.approx(float(peaks.double().mean()), abs=1e-3)
        assert item["gini"] == pytest.approx(gini(rates))
        assert item["effective"] == pytest.approx(effective(rates))
        assert item["rare_1000"] == item["rare_10000"] == float((rates == 0).double().mean())  # of so few tokens
        assert sum(item["rates"]["slots"]) == len(rates)
        assert item["ranked"][0] == [1, float(rates.max())]
        assert item["ranked"][-1] == [len(rates), float(rates.min())]
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("slots", [1, 2, 7, 1000])
def test_gini_and_effective_number_of_known_distributions(slots: int) -> None:
    equal, one = torch.full((slots,), 0.25), torch.eye(slots)[0] * 0.3
    assert [gini(equal), effective(equal)] == pytest.approx([0, slots], abs=1e-9)
    assert [gini(one), effective(one)] == pytest.approx([1 - 1 / slots, 1])
    assert gini(torch.zeros(slots)) == effective(torch.zeros(slots)) == 0


def test_gini_is_half_the_relative_mean_difference_and_knows_no_scale() -> None:
    x = torch.rand(30, generator=torch.Generator().manual_seed(0)).double().pow(3)
    assert gini(x) == pytest.approx(float((x[:, None] - x).abs().mean() / (2 * x.mean())))
    assert [gini(x / 7), effective(x / 7)] == pytest.approx([gini(x), effective(x)])
    assert effective(torch.tensor([0.5, 0.25, 0.25])) == pytest.approx(math.exp(1.5 * math.log(2)))


def test_every_rate_is_in_the_bin_of_its_edges() -> None:
    rates = torch.tensor([0, 1e-6, 1e-5, 1e-3, 9.99e-4, 0.5, 1.0], dtype=torch.float64)
    slots = histogram(rates)
    for at, count in enumerate(slots):
        upper = EDGES[at + 1] if at + 1 < len(slots) else 2.0
        assert count == int(((rates >= EDGES[at]) & (rates < upper)).sum())
    assert (len(slots), sum(slots), slots[0]) == (len(EDGES) - 1, len(rates), 2)


@pytest.mark.parametrize("slots", [1, 5, 64, 4096])
def test_the_curve_falls_from_the_first_rank_to_the_last(slots: int) -> None:
    rates = torch.rand(slots, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points = ranked(rates)
    ranks = [int(rank) for rank, _ in points]
    assert ranks[0] == 1 and ranks[-1] == slots and ranks == sorted(set(ranks)) and len(ranks) <= 64
    assert [rate for _, rate in points] == [float(rates.sort(descending=True).values[rank - 1]) for rank in ranks]


def test_what_was_never_counted_is_said() -> None:
    config = family_config("llama")
    layout = find_layout(config)
    stats = list(empty(tiny_model(config), layout).values())
    ffns = [{"name": ffn.name, "layer": ffn.layer, "expert": ffn.expert} for ffn in layout.ffns]
    with pytest.raises(KvpruneError, match="nothing is counted"):
        firing(stats, ffns)
    assert mean_share(stats, 2.0) == 0
