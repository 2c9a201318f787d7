"""The lens sees what a naive loop over positions sees; what was forgotten is blamed on the slots that knew it."""

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprune.artifacts import FfnPlan, Plan, Size
from kvprune.dense import open_dense
from kvprune.ffn.find import find_layout
from kvprune.ffn.layout import Layout
from kvprune.ffn.walk import Setup
from kvprune.ffn.watching import value_rows
from kvprune.reading.forgets import blame, forgets, most_risen, removed_slots, token_losses
from kvprune.reading.lens import compare, key_next, lens, next_pairs, sample, view_layers
from kvprune.reading.values import open_unembedding, walked_unembedding
from tests.conftest import tiny_model, tiny_tokenizer
from tests.families import family_config

FAMILIES = ["llama", "gemma2", "gpt2", "opt", "gpt_neox", "mixtral", "qwen2_moe", "bert"]
SEQUENCES, LENGTH = 5, 14
CHOSEN = 2  # experts of a token


def tokens() -> Tensor:
    return torch.randint(0, 250, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(3))


def model_of(name: str) -> tuple[Any, Layout]:
    config = family_config(name)
    model = tiny_model(config)
    model.set_experts_implementation("eager")
    return model, find_layout(config)


def inputs_of(model: Any, paths: list[str]) -> dict[str, Tensor]:
    """What modules are given in a forward over `tokens`, flattened `[tokens, …]`."""
    found: dict[str, Tensor] = {}

    def hook(path: str) -> Callable[..., None]:
        return lambda _, args: found.update({path: args[0].flatten(0, -2)})

    handles = [model.get_submodule(path).register_forward_pre_hook(hook(path)) for path in paths]
    with torch.inference_mode():
        model(input_ids=tokens(), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def coefficients_by_hand(model: Any, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each FFN of a layer: coefficients, weighed by the router `[tokens, slots]`, and values `[slots, hidden]`."""
    if hasattr(model, "transformer"):
        path = f"transformer.h.{layer}.mlp"
        c_proj = model.get_submodule(f"{path}.c_proj")
        return {path: (inputs_of(model, [f"{path}.c_proj"])[f"{path}.c_proj"], c_proj.weight)}
    path = f"model.layers.{layer}.mlp"
    mlp = model.get_submodule(path)
    if not hasattr(mlp, "experts"):
        values, a = mlp.down_proj.weight.T, inputs_of(model, [f"{path}.down_proj"])[f"{path}.down_proj"]
        if "Gemma2" in type(model).__name__:  # a norm follows
            a = a / (a @ values).square().mean(1, keepdim=True).sqrt()
            values = values * (1 + model.model.layers[layer].post_feedforward_layernorm.weight)
        return {path: (a, values)}
    x = inputs_of(model, [path])[path]
    weights, chosen = torch.softmax(x @ mlp.gate.weight.T, -1).topk(CHOSEN, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    found = {}
    for expert in range(len(mlp.experts.down_proj)):
        gate, up = (x @ mlp.experts.gate_up_proj[expert].T).chunk(2, -1)
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        found[f"{path}.experts.{expert}"] = (
            torch.nn.functional.silu(gate) * up * share,
            mlp.experts.down_proj[expert].T,
        )
    return found


def says(model: Any, direction: Tensor) -> int:
    """The token that a direction `[hidden]` promotes most, by the model's final norm and head."""
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    return int(model.lm_head(norm(direction / direction.square().mean().sqrt())).argmax())


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
@torch.inference_mode()
def test_tokens_and_shares_are_those_of_a_naive_loop(name: str) -> None:
    model, layout = model_of(name)
    places, unembedding = sample(tokens(), 20, 1, 0), open_unembedding(model, layout.layers)
    views = view_layers(model, layout, tokens(), places, unembedding, batch_size=2)
    told = lens(model, layout, tokens(), unembedding, positions=20, batch_size=2)
    logits = model(input_ids=tokens(), use_cache=False).logits.flatten(0, 1)[places]
    final = logits.argmax(1)
    norm = "transformer.ln_f" if name == "gpt2" else "model.norm"
    after = [inputs_of(model, [path])[path][places] for path in (*layout.layers[1:], norm)]
    for layer, (view, row) in enumerate(zip(views, told, strict=True)):
        ffns = coefficients_by_hand(model, layer)
        bias = model.transformer.h[layer].mlp.c_proj.bias if name == "gpt2" else 0
        for at, place in enumerate(places.tolist()):
            written = torch.cat([a[place, :, None] * values for a, values in ffns.values()])
            assert int(view.slot[at]) == says(model, written[written.norm(dim=1).argmax()])
            assert int(view.ffn[at]) == says(model, written.sum(0) + bias)
        here = model.lm_head(model.get_submodule(norm)(after[layer]))
        if name == "gemma2":
            here = torch.tanh(here / 30) * 30  # its cap on logits
        hits = [float((one == final).double().mean()) for one in (view.slot, view.ffn, here.argmax(1))]
        assert [row["slot_top"], row["ffn_top"], row["residual_top"]] == pytest.approx(hits)
        p, q = logits.double().log_softmax(1), here.double().log_softmax(1)
        assert row["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), abs=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_layer_is_the_final_prediction(name: str) -> None:
    model, layout = model_of(name)
    unembedding = open_unembedding(model, layout.layers)
    told = lens(model, layout, tokens(), unembedding, batch_size=2)
    assert json.loads(json.dumps(told)) == told
    assert [row["name"] for row in told] == list(layout.layers)
    assert (told[-1]["residual_top"], told[-1]["kl"]) == (1, 0)
    assert told[0]["kl"] > 0 and all(0 <= row[key] <= 1 for row in told for key in ("slot_top", "ffn_top"))
    places = sample(tokens(), 1000, 1, 0)
    assert torch.equal(places % LENGTH >= 1, torch.ones(SEQUENCES * (LENGTH - 1), dtype=torch.bool))
    last = view_layers(model, layout, tokens(), places, unembedding)[-1].residual
    with torch.inference_mode():
        logits = model(input_ids=tokens(), use_cache=False).logits.flatten(0, 1)[places]
    assert torch.equal(unembedding.logits(last).argmax(1), logits.argmax(1))


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "bert"])
def test_a_walk_sees_what_forwards_see_at_any_batch_size(name: str, tmp_path: Path) -> None:
    tiny_model(family_config(name)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    dense = open_dense(str(tmp_path))
    layout, model = dense.layout, dense.load("float32", "cpu")
    walker = dense.walker(Setup("cpu", torch.float32, 1), LENGTH)
    tops = {ffn.name: torch.arange(ffn.width) % tokens().numel() for ffn in layout.ffns}
    whole = lens(model, layout, tokens(), open_unembedding(model, layout.layers), tops=tops, positions=30)
    walked = lens(walker, layout, tokens(), walked_unembedding(walker), tops=tops, positions=30, batch_size=2)
    for one, other in zip(whole, walked, strict=True):
        assert {**one, "kl": 0} == {**other, "kl": 0}
        assert one["kl"] == pytest.approx(other["kl"], abs=1e-5)
    gone = {ffn.name: list(range(0, ffn.width, 2)) for ffn in layout.ffns}
    at = torch.tensor([[3, 4], [0, 12]])
    for one_place, other_place in zip(
        blame(model, layout, gone, tokens(), at), blame(walker, layout, gone, tokens(), at, batch_size=1), strict=True
    ):
        assert [(item["ffn"], item["slot"]) for item in one_place] == [(i["ffn"], i["slot"]) for i in other_place]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2_moe"])
def test_values_that_name_what_follows_their_trigger_always_agree(name: str) -> None:
    model, layout = model_of(name)
    unembedding = open_unembedding(model, layout.layers)
    norm = model.transformer.ln_f if name == "gpt2" else model.model.norm
    flat = tokens().flatten()
    tops, signs = {}, {}
    for ffn in layout.ffns:
        place = (torch.arange(ffn.width) * 3) % flat.numel()
        place = torch.where(place % LENGTH == LENGTH - 1, place - 1, place)
        sign = torch.arange(ffn.width) % 3 - 0.5  # some triggers have a negative coefficient
        with torch.no_grad():
            value_rows(model, ffn)[:] = sign[:, None] * unembedding.rows[flat[place + 1]] / norm.weight
        tops[ffn.name], signs[ffn.name] = place, sign
        tops[ffn.name][5] = -1  # never fired
        tops[ffn.name][6] = LENGTH - 1  # nothing follows
    told = lens(model, layout, tokens(), unembedding, tops=tops, signs=signs, positions=5)
    assert all(row["key_next"] == 1 and row["chance"] < 0.2 for row in told)
    pairs = next_pairs(model, layout, tokens(), unembedding, tops, signs)
    widths = {layer: sum(ffn.width - 2 for ffn in layout.ffns if ffn.layer == layer) for layer in layout.layers}
    assert {layer: len(named) for layer, (named, _) in pairs.items()} == widths
    without = lens(model, layout, tokens(), unembedding, positions=5)
    assert all(row["key_next"] is row["chance"] is None for row in without)


def test_chance_is_the_mean_over_all_shuffles() -> None:
    named, followed = torch.tensor([1, 1, 2, 3, 7]), torch.tensor([1, 2, 2, 1, 0])
    rates = [float((named == followed[list(order)]).double().mean()) for order in permutations(range(5))]
    told = key_next(named, followed)
    assert told == {"key_next": pytest.approx(0.4), "chance": pytest.approx(sum(rates) / len(rates))}


def test_memory_is_bounded_by_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout = model_of("llama")
    unembedding = open_unembedding(model, layout.layers)
    views = view_layers(model, layout, tokens(), sample(tokens(), 40, 1, 0), unembedding)
    whole = compare(views, unembedding)
    monkeypatch.setattr("kvprune.reading.values.CHUNK_ELEMENTS", 7 * len(unembedding.rows))
    for one, other in zip(compare(views, unembedding), whole, strict=True):
        assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-6)


def test_losses_are_those_of_the_next_token() -> None:
    model, _ = model_of("llama")
    with torch.inference_mode():
        logs = model(input_ids=tokens(), use_cache=False).logits.log_softmax(-1)
    losses = token_losses(model, tokens())
    assert losses.shape == (SEQUENCES, LENGTH - 1) and losses.dtype == torch.float64
    for sequence in range(SEQUENCES):
        for at in range(LENGTH - 1):
            expected = -float(logs[sequence, at, tokens()[sequence, at + 1]])
            assert float(losses[sequence, at]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral"])
@torch.inference_mode()
def test_blame_finds_the_loudest_of_the_removed_slots(name: str) -> None:
    model, layout = model_of(name)
    gone = {ffn.name: list(range(at % 3, ffn.width, 3)) for at, ffn in enumerate(layout.ffns)}
    at = torch.tensor([[3, 0], [1, 12], [3, 7], [1, 12]])
    found = blame(model, layout, gone, tokens(), at, count=4, batch_size=1)
    ffns = {
        key: item for layer in range(len(layout.layers)) for key, item in coefficients_by_hand(model, layer).items()
    }
    for (sequence, column), some in zip(at.tolist(), found, strict=True):
        loudness = {
            (ffn, slot): float((a[sequence * LENGTH + column, slot] * values[slot]).norm())
            for ffn, (a, values) in ffns.items()
            for slot in gone[ffn]
        }
        expected = sorted(loudness, key=lambda key: -loudness[key])[:4]
        assert [(item["ffn"], item["slot"]) for item in some] == expected
        assert [item["contribution"] for item in some] == pytest.approx([loudness[key] for key in expected], rel=1e-4)


def test_forgetting_is_told_of_the_tokens_that_a_removed_slot_had_predicted() -> None:
    model, layout = model_of("llama")
    ffn, slot, text = layout.ffns[-1], 11, tokens()
    with torch.inference_mode():
        value_rows(model, ffn)[slot] *= 30
    dense = token_losses(model, text)
    before = value_rows(model, ffn)[slot].clone()
    with torch.inference_mode():
        value_rows(model, ffn)[slot] = 0
        slim = token_losses(model, text)
        value_rows(model, ffn)[slot] = before
    plan = Plan({}, {}, Size(0, 0, 0, 0), Size(0, 0, 0, 0), [], [])
    kept = [[i for i in range(each.width) if (each, i) != (ffn, slot)] for each in layout.ffns]
    plan.ffns.extend(FfnPlan(each.name, each.width, some) for each, some in zip(layout.ffns, kept, strict=True))
    gone = removed_slots(plan)
    assert {name: some for name, some in gone.items() if some} == {ffn.name: [slot]}
    told = forgets(model, layout, gone, text, dense, slim, tiny_tokenizer(), worst=6)
    assert json.loads(json.dumps(told)) == told
    assert told["loss"] == {"dense": float(dense.mean()), "slim": float(slim.mean())}
    rises = sorted((slim - dense).flatten().tolist(), reverse=True)
    assert [item["rise"] for item in told["tokens"]] == rises[:6]
    for item in told["tokens"]:
        sequence, position = item["sequence"], item["position"]
        assert item["rise"] == float((slim - dense)[sequence, position - 1])
        assert [(some["ffn"], some["slot"]) for some in item["slots"]] == [(ffn.name, slot)]
        assert item["before"] == tiny_tokenizer().decode(text[sequence, :position].tolist())
    assert len(most_risen(dense, dense)) == 0
    assert forgets(model, layout, gone, text, dense, dense, tiny_tokenizer())["tokens"] == []
