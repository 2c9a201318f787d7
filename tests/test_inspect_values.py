"""Values are read as the tokens that they were made of, in every shape, and random ones are as coherent as chance."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprune.dense import open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.find import find_layout
from kvprune.ffn.layout import Layout
from kvprune.ffn.walk import Setup
from kvprune.reading.values import (
    Unembedding,
    coherence,
    coherences,
    each_values,
    folded,
    in_words,
    null_coherence,
    open_unembedding,
    read_values,
    token_text,
    walked_unembedding,
)
from tests.conftest import tiny_model, tiny_tokenizer
from tests.families import family_config

FAMILIES = ["llama", "gemma2", "gpt2", "opt", "gpt_neox", "mixtral", "qwen2_moe", "bert"]
NORMS = {
    "llama": "model.norm",
    "gemma2": "model.norm",
    "gpt2": "transformer.ln_f",
    "opt": "model.decoder.final_layer_norm",
}
NORMS |= {"gpt_neox": "gpt_neox.final_layer_norm", "mixtral": "model.norm", "qwen2_moe": "model.norm"}


def opened(name: str) -> tuple[Any, Layout, Unembedding]:
    config = family_config(name)
    model, layout = tiny_model(config), find_layout(config)
    return model, layout, open_unembedding(model, layout.layers)


def tokens(count: int = 12) -> Tensor:
    return torch.randint(0, 250, (2, count), generator=torch.Generator().manual_seed(3))


def scale_of(norm: Any) -> Tensor:
    """What a norm multiplies by: its weight, or one more where it is Gemma's."""
    weight: Tensor = norm.weight.detach()
    return 1 + weight if "Gemma" in type(norm).__name__ else weight


@pytest.mark.parametrize("name", NORMS)
def test_a_value_made_of_a_tokens_unembedding_promotes_that_token(name: str) -> None:
    model, layout, unembedding = opened(name)
    scale, rows = scale_of(model.get_submodule(NORMS[name])), unembedding.rows
    for values in each_values(model, layout):
        wanted = (torch.arange(len(values.rows)) * 5 + 3) % 250
        made = rows[wanted] / scale / (1 if values.gain is None else values.gain)
        signs = torch.arange(len(made)) % 2 * 2 - 1  # every other slot holds the negative
        values.rows[:] = made / made.norm(dim=1, keepdim=True) * signs[:, None] * 1e-3  # a length has no say
    for values in each_values(model, layout):
        wanted = (torch.arange(len(values.rows)) * 5 + 3) % 250
        found = read_values(folded(values.rows, values.gain), unembedding)
        assert torch.equal(found.promoted[1::2, 0], wanted[1::2])
        assert torch.equal(found.suppressed[::2, 0], wanted[::2])
        assert (values.gain is not None) == (name == "gemma2")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_unembedding_is_what_the_model_does_after_its_last_layer(name: str) -> None:
    model, layout, unembedding = opened(name)
    states: list[Any] = []
    model.get_submodule(layout.layers[-1]).register_forward_hook(lambda _, __, out: states.append(out))
    with torch.inference_mode():
        logits = model(input_ids=tokens(), use_cache=False).logits
    last = states[-1][0] if isinstance(states[-1], tuple) else states[-1]
    assert torch.allclose(unembedding.logits(last.flatten(0, 1)), logits.flatten(0, 1), atol=1e-5)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=tokens(), use_cache=False).logits, logits)  # and nothing is left changed


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "bert"])
def test_a_walked_model_has_the_same_values_and_unembedding(name: str, tmp_path: Path) -> None:
    tiny_model(family_config(name)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    dense = open_dense(str(tmp_path))
    walker = dense.walker(Setup("cpu", torch.float32, 1), 8)
    model, layout = dense.load("float32", "cpu"), dense.layout
    walked, whole = walked_unembedding(walker), open_unembedding(model, layout.layers)
    for one, other in zip(each_values(walker, layout), each_values(model, layout), strict=True):
        assert one.ffn == other.ffn and torch.equal(folded(one.rows, one.gain), folded(other.rows, other.gain))
        assert torch.equal(one.length, other.length)
        logits = walked.of_directions(folded(one.rows, one.gain)), whole.of_directions(folded(other.rows, other.gain))
        assert torch.allclose(*logits, atol=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, unembedding = opened("gpt2")
    directions = torch.randn(50, unembedding.hidden, generator=torch.Generator().manual_seed(0))
    whole = read_values(directions, unembedding)
    monkeypatch.setattr("kvprune.reading.values.CHUNK_ELEMENTS", 7 * len(unembedding.rows))
    assert [len(chunk) for chunk in unembedding.chunks(directions)] == [7] * 7 + [1]
    assert torch.equal(read_values(directions, unembedding).promoted, whole.promoted)


def test_coherence_is_the_mean_cosine_over_pairs() -> None:
    rows = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    for found, some in zip(coherences(rows), rows, strict=True):
        pairs = [torch.cosine_similarity(some[i], some[j], 0) for i in range(5) for j in range(5) if i != j]
        assert float(found) == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-6)
    assert float(coherences(rows[:1, :1].expand(1, 4, 8))) == pytest.approx(1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_value_of_a_cluster_is_coherent_and_random_ones_are_as_chance(name: str) -> None:
    model, layout, unembedding = opened(name)
    generator = torch.Generator().manual_seed(0)
    cluster, size = range(40, 52), unembedding.rows.shape[1]
    # Shorter than the other tokens, or random directions would promote the cluster, too.
    centre = torch.nn.functional.normalize(torch.randn(size, generator=generator), dim=0)
    centre *= 0.6 * unembedding.rows.norm(dim=1).mean()
    unembedding.rows[40:52] = centre + 0.003 * torch.randn(len(cluster), size, generator=generator)
    values = next(each_values(model, layout))
    values.rows[:] = torch.randn(values.rows.shape, generator=generator)
    scale = scale_of(model.get_submodule(NORMS[name]))
    values.rows[7] = centre / scale / (1 if values.gain is None else values.gain)
    null = null_coherence(unembedding, values.gain, count=2000)
    found = read_values(folded(values.rows, values.gain), unembedding)
    assert set(found.promoted[7].tolist()) <= set(cluster)
    bar = coherence("ffn", found.coherence, null)["null_p95"]
    assert float(found.coherence[7]) > 0.9 > bar
    random = torch.randn(2000, unembedding.hidden, generator=generator)
    random = random if values.gain is None else random * values.gain
    told = coherence("ffn", read_values(random, unembedding).coherence, null)
    assert told["above_p95"] == pytest.approx(0.05, abs=0.02)  # about three standard errors
    assert told["mean"] == pytest.approx(told["null_mean"], abs=0.02)


def test_words_are_plain_data() -> None:
    model, layout, unembedding = opened("llama")
    values = next(each_values(model, layout))
    tokenizer = tiny_tokenizer()
    found = read_values(folded(values.rows, values.gain)[:3], unembedding, top=4)
    texts: dict[int, str] = {}
    told = [in_words(found, row, tokenizer, texts) for row in range(3)]
    assert texts.keys() == {*found.promoted.flatten().tolist(), *found.suppressed.flatten().tolist()}
    assert json.loads(json.dumps(told)) == told
    for slot, item in enumerate(told):
        assert [token for _, token, _ in item["promoted"]] == found.promoted[slot].tolist()
        logits = [logit for _, _, logit in item["promoted"]]
        assert logits == sorted(logits, reverse=True)
        assert item["coherence"] == float(found.coherence[slot])
    assert token_text(tokenizer, tokenizer.convert_tokens_to_ids("a")) == "a"
    assert token_text(tokenizer, tokenizer.convert_tokens_to_ids("Ġ")) == " "
    assert token_text(tokenizer, 100_000) == "<100000>"


def test_a_model_whose_logits_are_made_of_more_is_refused() -> None:
    config = family_config("longcat_flash")
    with pytest.raises(KvpruneError, match="not made of its last layer's output alone"):
        open_unembedding(tiny_model(config), find_layout(config).layers)
    _, _, unembedding = opened("llama")
    with pytest.raises(KvpruneError, match="cannot be read as tokens"):
        unembedding.logits(torch.zeros(1, unembedding.hidden + 1))
