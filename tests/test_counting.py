"""The truths of counting: hand-computed coefficients, bins by definition, and parts that add up."""

import math

import pytest
import torch
from torch import Tensor

from kvprune.ffn.counting import CHUNK_ELEMENTS, Part, count, make_counters
from kvprune.ffn.find import find_layout
from kvprune.ffn.forwards import count_batch, empty
from kvprune.ffn.stats import (
    ADDED,
    BINS,
    PEAK_BINS,
    FfnStats,
    add,
    empty_stats,
    fire_rate,
    first_bad_slot,
    from_tensors,
    to_tensors,
)
from tests.conftest import SHAPES, tiny_config, tiny_model

SLOTS = 40


def norms(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SLOTS, generator=generator) + 0.5, torch.rand(SLOTS, generator=generator) + 0.5


def coefficients(sequences: int = 6, tokens: int = 30, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Heavy-tailed, with silent slots."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(sequences, tokens, SLOTS, generator=generator).pow(3)
    a[..., 5] = 0
    return a.to(dtype)


def counted(a: Tensor, skip: int = 1) -> FfnStats:
    stats = empty_stats(*norms())
    count(stats, [Part(sequence, skip) for sequence in a])
    return stats


def assert_equal(first: FfnStats, second: FfnStats) -> None:
    left, right = to_tensors([first], ["x"]), to_tensors([second], ["x"])
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_statistic_by_its_definition(dtype: torch.dtype) -> None:
    a = coefficients(dtype=dtype)
    stats = counted(a, skip=2)
    exact = a[:, 2:].double()
    assert torch.allclose(stats.total, exact.sum((0, 1)), rtol=1e-12)
    assert torch.allclose(stats.total_abs, exact.abs().sum((0, 1)), rtol=1e-12)
    assert torch.allclose(stats.total_square, exact.square().sum((0, 1)), rtol=1e-12)
    assert torch.allclose(stats.sequence_norms, exact.square().sum(1).sqrt().sum(0), rtol=1e-12)
    c = a.float().abs() * norms()[0]
    assert torch.equal(stats.maximum, c.amax((0, 1)))
    assert int(stats.tokens) == 6 * 28
    assert int(stats.sequences) == 6


def test_bins_are_the_binary_exponents_of_contribution_over_rms() -> None:
    a = coefficients(1, 12)
    stats = counted(a, skip=0)
    expected = torch.zeros(SLOTS, BINS, dtype=torch.int64)
    peaks = torch.zeros(PEAK_BINS, dtype=torch.int64)
    value_norm = norms()[0].tolist()
    for row in a[0].tolist():
        c = [abs(x) * v for x, v in zip(row, value_norm, strict=True)]
        rms = math.sqrt(sum(x * x for x in c) / SLOTS)
        for slot, x in enumerate(c):
            exponent = math.frexp(x / rms)[1] - 1 if x else -100
            expected[slot, max(0, exponent + 17)] += 1
            peaks[int(x / max(c) * 10)] += 1
    assert torch.equal(stats.histogram, expected)
    assert torch.equal(stats.peak_histogram, peaks)


def test_counts_add_up_to_the_tokens() -> None:
    stats = counted(coefficients())
    assert torch.equal(stats.histogram.sum(1), stats.tokens.expand(SLOTS))
    assert int(stats.peak_histogram.sum()) == int(stats.tokens) * SLOTS
    assert int(stats.peak_histogram[-1]) >= int(stats.tokens)  # every token has a loudest slot
    assert int(stats.histogram[5, 0]) == int(stats.tokens)  # the silent slot is always silent


def test_a_silent_token_is_silent_and_not_nan() -> None:
    a = coefficients()
    a[0, 3] = 0
    stats = counted(a)
    assert int(stats.histogram.sum()) == int(stats.tokens) * SLOTS
    assert bool(torch.isfinite(stats.total_square).all())


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    a = coefficients(8)
    both = add(counted(a[:3]), counted(a[3:]))
    whole = counted(a)
    for name in ADDED:
        left, right = getattr(both, name), getattr(whole, name)
        assert torch.equal(left, right) if left.dtype == torch.int64 else torch.allclose(left, right, rtol=1e-14), name
    assert torch.equal(both.maximum, whole.maximum)


@pytest.mark.parametrize("batch", [1, 3, 5, 8])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_batch_size_and_the_threads_change_no_bit(batch: int, threads: int) -> None:
    tokens = 2 * CHUNK_ELEMENTS // SLOTS  # enough that torch itself would share a step among threads
    a = coefficients(8, tokens)
    former = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = counted(a)
        torch.set_num_threads(threads)
        split = empty_stats(*norms())
        with make_counters(a.device) as counters:
            assert counters.threads == threads
            for part in torch.split(a, batch):
                count(split, [Part(sequence, 1) for sequence in part], counters)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(former)
    assert_equal(whole, split)


@pytest.mark.parametrize("slot", [0, 3, 5, SLOTS - 1])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_found_in_its_slot(slot: int, value: float) -> None:
    a = coefficients()
    a[2, 9, slot] = value
    assert first_bad_slot(counted(a)) == slot


def test_chunks_longer_than_the_buffers_are_counted_whole() -> None:
    tokens = CHUNK_ELEMENTS // SLOTS + 7
    a = coefficients(1, tokens)
    assert int(counted(a, skip=0).histogram.sum()) == tokens * SLOTS


def test_skipped_tokens_count_for_the_maximum_only() -> None:
    a = coefficients(1)
    a[0, 0, 7] = 1e6
    stats = counted(a, skip=1)
    assert float(stats.maximum[7]) == float(a[0, 0, 7].abs() * norms()[0][7])
    assert float(stats.total_abs[7]) < 1e6
    assert int(stats.tokens) == 29


def test_fire_rate_at_a_power_of_two() -> None:
    a = coefficients(2)
    stats = counted(a, skip=0)
    c = (a.abs() * norms()[0]).double()
    ratio = c / c.square().mean(-1, keepdim=True).sqrt()
    for threshold in (0.25, 1.0, 2.0, 4.0):
        expected = (ratio >= threshold).double().mean((0, 1))
        assert torch.allclose(fire_rate(stats, threshold), expected, atol=1e-12)


def test_tensors_round_trip() -> None:
    stats = counted(coefficients())
    assert_equal(stats, from_tensors(to_tensors([stats], ["a.b"]), ["a.b"])[0])


def test_the_hook_sees_the_coefficient_of_the_formula_in_a_gated_model() -> None:
    config = tiny_config("llama-bias-tied")
    model, layout = tiny_model(config), find_layout(config)
    tokens = torch.randint(0, 256, (2, 10))
    inputs: list[Tensor] = []
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    found = empty(model, layout)
    count_batch(model, layout, found, tokens, 0)
    stats = found[layout.ffns[1].name]
    x = inputs[-1].double()
    gate = x @ mlp.gate_proj.weight.double().T + mlp.gate_proj.bias.double()
    up = x @ mlp.up_proj.weight.double().T + mlp.up_proj.bias.double()
    a = gate * torch.sigmoid(gate) * up
    assert torch.allclose(stats.total, a.sum((0, 1)), rtol=1e-4, atol=1e-5)
    assert torch.allclose(stats.total_square, a.square().sum((0, 1)), rtol=1e-4)
    assert torch.allclose(stats.value_norm, mlp.down_proj.weight.norm(dim=0))
    key_norm = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1)
    assert torch.allclose(stats.key_norm, key_norm)


def test_the_hook_sees_the_coefficient_of_the_formula_in_gpt2() -> None:
    config = tiny_config("gpt2")
    model, layout = tiny_model(config), find_layout(config)
    inputs: list[Tensor] = []
    mlp = model.transformer.h[0].mlp
    mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    found = empty(model, layout)
    count_batch(model, layout, found, torch.randint(0, 256, (2, 10)), 0)
    stats = found[layout.ffns[0].name]
    x = inputs[-1].double() @ mlp.c_fc.weight.double() + mlp.c_fc.bias.double()
    a = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(stats.total, a.sum((0, 1)), rtol=1e-4, atol=1e-5)
    assert torch.allclose(stats.value_norm, mlp.c_proj.weight.norm(dim=1))


@pytest.mark.parametrize(("shape", "gain"), [("gemma2", "1+w"), ("gemma3", "1+w"), ("olmo2", "w"), ("llama", "none")])
def test_the_weight_of_a_norm_after_the_ffn_is_folded_into_the_value(shape: str, gain: str) -> None:
    config = tiny_config(shape, num_hidden_layers=7)
    model = tiny_model(config)
    layout = find_layout(config)
    found = empty(model, layout)
    for layer, ffn in zip(model.model.layers, layout.ffns, strict=True):
        stats = found[ffn.name]
        values = layer.mlp.down_proj.weight
        if gain != "none":
            weight = layer.post_feedforward_layernorm.weight
            values = values * ((1 + weight) if gain == "1+w" else weight)[:, None]
        assert torch.allclose(stats.value_norm, values.norm(dim=0), rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 5])
def test_a_models_counts_do_not_depend_on_the_batch_size(shape: str, batch: int) -> None:
    config = tiny_config(shape)
    model, layout = tiny_model(config).double(), find_layout(config)
    tokens = torch.randint(0, 256, (8, 24), generator=torch.Generator().manual_seed(3))
    whole, split = empty(model, layout), empty(model, layout)
    count_batch(model, layout, whole, tokens, 1)
    for part in torch.split(tokens, batch):
        count_batch(model, layout, split, part, 1)
    assert list(whole) == list(split) == [ffn.name for ffn in layout.ffns]
    for left, right in zip(whole.values(), split.values(), strict=True):
        assert torch.equal(left.histogram, right.histogram)
        assert torch.equal(left.peak_histogram, right.peak_histogram)
        assert torch.allclose(left.total_square, right.total_square, rtol=1e-9)
