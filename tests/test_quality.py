"""The formulas of the quality benchmark against their definitions, written out, and its intervals against chance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvprune.dense import open_dense
from kvprune.ffn.watching import value_rows, watched
from kvprune.results.intervals import difference_interval, ratio_interval
from kvprune.stages.export import mask_slots, put_values
from tests.conftest import VOCABULARY, random_plan

SCRIPTS = Path(__file__).parents[1] / "scripts"
LENGTH = 16


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def seen_coefficients(model: Any, dense: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """All coefficients, float64 `[tokens, slots]`, by names of FFNs."""
    found: dict[str, torch.Tensor] = {}
    with torch.inference_mode(), watched(model, dense.layout.ffns, lambda ffn, seen: found.update({ffn.name: seen.h})):
        model(input_ids=tokens, use_cache=False)
    return {name: h.double() for name, h in found.items()}


@pytest.fixture(params=["llama", "llama-bias-tied", "gpt2"])
def opened(request: Any, make_folder: Callable[..., Path]) -> Any:
    dense = open_dense(str(make_folder(request.param)))
    model = dense.load("float32", "cpu")
    tokens = torch.randint(0, VOCABULARY - 4, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    plan = random_plan(dense, [ffn.width // 2 for ffn in dense.layout.ffns], seed=2)
    return dense, model, tokens, plan


def test_sums_and_minitron_are_those_of_the_coefficients(opened: Any) -> None:
    import quality_methods as formulas

    dense, model, tokens, _ = opened
    found, all_h = formulas.gather(model, dense.layout, tokens, 4), seen_coefficients(model, dense, tokens)
    for name, h in all_h.items():
        torch.testing.assert_close(found[name].gram, h.T @ h, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[name].total, h.sum(0), rtol=1e-5, atol=1e-5)
        scores = [sum(float(h[at : at + LENGTH, slot].abs().mean()) ** 2 for at in range(0, len(h), LENGTH)) ** 0.5
                  for slot in range(h.shape[1])]  # fmt: skip
        torch.testing.assert_close(formulas.minitron(found[name]), torch.tensor(scores).double(), rtol=1e-5, atol=1e-6)
        kept = formulas.highest({name: torch.tensor(scores)}, 5)[name]
        assert kept == sorted(sorted(range(len(scores)), key=lambda slot: -scores[slot])[:5])


def test_biases_of_flap_keep_the_mean_of_what_an_ffn_writes(opened: Any) -> None:
    import quality_methods as formulas

    dense, model, tokens, plan = opened
    found = formulas.gather(model, dense.layout, tokens)
    ffn, item = dense.layout.ffns[0], plan.ffns[0]  # later ones have other inputs once this one is cut
    values = value_rows(model, ffn).double()
    own = model.get_parameter(ffn.value_bias).double() if ffn.value_bias else torch.zeros(ffn.hidden).double()
    wrote = seen_coefficients(model, dense, tokens)[ffn.name] @ values + own
    biases = formulas.flap_biases(model, dense.layout, plan, found)
    mask_slots(model, dense.layout, plan)
    put_values(model, dense.layout, plan, biases)
    h = seen_coefficients(model, dense, tokens)[ffn.name]
    bias = model.get_submodule(ffn.bias_key.rpartition(".")[0]).bias.double()
    slim = h[:, item.kept] @ values[item.kept] + bias
    torch.testing.assert_close(slim.mean(0), wrote.mean(0), rtol=1e-4, atol=1e-5)
    assert (slim - wrote).square().sum() < (slim - bias + own - wrote).square().sum()


def test_values_of_grail_solve_its_ridge_regression(opened: Any) -> None:
    import quality_methods as formulas

    dense, model, tokens, plan = opened
    found = formulas.gather(model, dense.layout, tokens)
    values = formulas.grail_values(model, dense.layout, plan, found)
    for ffn, item in zip(dense.layout.ffns, plan.ffns, strict=True):
        h = seen_coefficients(model, dense, tokens)[ffn.name]
        damping = (1e-3 * h.square().sum(0).mean()).sqrt() * torch.eye(item.width).double()
        wanted = torch.cat([h @ value_rows(model, ffn).double(), torch.zeros(item.width, ffn.hidden).double()])
        solved = torch.linalg.lstsq(torch.cat([h[:, item.kept], damping]), wanted, driver="gelsd").solution
        new = values[ffn.value_key].double()
        torch.testing.assert_close(new if ffn.axis(ffn.value) == 0 else new.T, solved, rtol=1e-2, atol=2e-3)


def test_the_interval_of_a_ratio_covers_it_as_often_as_it_says() -> None:
    draw, covered = np.random.default_rng(0), 0
    for trial in range(200):
        counts = draw.integers(200, 3000, 60)
        base = 3 + draw.normal(0, 0.5, 60)
        apart = 0.02 + draw.normal(0, 0.03, 60)
        one, other = ([[float(total), int(count)] for total, count in zip(losses * counts, counts, strict=True)]
                      for losses in (base + apart, base))  # fmt: skip
        _, low, high = ratio_interval(one, other, seed=trial)
        covered += low <= np.exp(0.02) <= high
    assert 0.88 <= covered / 200 <= 0.99  # 95 % but for chance, and 60 documents


def test_the_difference_of_a_model_to_itself_is_none() -> None:
    assert ratio_interval([[10.0, 5], [2.0, 4]], [[10.0, 5], [2.0, 4]]) == (1, 1, 1)
    assert difference_interval([1, 0, 1], [1, 0, 1]) == (0, 0, 0)
    mean, low, high = difference_interval([1.0] * 30 + [0.0] * 70, [0.0] * 100)
    assert mean == pytest.approx(0.3)
    assert 0.2 < low < 0.3 < high < 0.4
