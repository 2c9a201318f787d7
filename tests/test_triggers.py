"""Triggers: the largest of all coefficients, exactly, and the tokens that slots were made to respond to."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvprune.dense import open_dense
from kvprune.ffn.experts import Seen
from kvprune.ffn.layout import Ffn
from kvprune.ffn.walk import Setup
from kvprune.ffn.watching import value_rows, watched
from kvprune.reading.triggers import Top, add_seen, collect_tops, contexts, empty_top, make_text, shared, split_text
from kvprune.sources.origins import Origins
from tests.conftest import HIDDEN, tiny_config, tiny_model, tiny_tokenizer
from tests.families import family_config

LENGTH, SEQUENCES, SKIP, K = 24, 7, 2, 5
KINDS = ["llama", "gpt2", "opt", "mixtral", "qwen2_moe"]
DTYPES = [torch.float32, torch.bfloat16]


def naive(h: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and places `[slots, k]` of the largest of coefficients `[places, slots]`, by sorting all of them."""
    tops = []
    for slot in h.T.tolist():
        order = sorted((at for at, a in enumerate(slot) if a), key=lambda at: (-abs(slot[at]), at))[:k]
        tops.append([(slot[at], at) for at in order] + [(0.0, -1)] * (k - len(order)))
    pairs = torch.tensor(tops, dtype=torch.float64)
    return pairs[..., 0].float(), pairs[..., 1].long()


def assert_is(top: Top, value: Tensor, place: Tensor) -> None:
    assert torch.equal(top.value, value)
    assert torch.equal(top.place, place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 7, 64, 200])
@pytest.mark.parametrize("levels", [3, 50, 10**6])  # few levels: ties everywhere, and silent slots
def test_tops_are_the_largest_of_all_in_batches_of_any_size(levels: int, batch: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(levels)
    h = (torch.randint(-levels, levels + 1, (200, 30), generator=generator) * 2.0**-10).to(dtype)
    h[:, :3] *= torch.arange(200)[:, None] >= 197  # slots that wake up late, on fewer tokens than are wanted
    eligible = torch.rand(200, generator=generator) > 0.2
    top = empty_top(torch.ones(30), K)
    for places in torch.split(torch.arange(200), batch):
        add_seen(top, h[places], places, eligible[places])
    assert_is(top, *naive(h * eligible[:, None], K))


def tokens() -> Tensor:
    return torch.randint(0, 256, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(3))


def collected(folder: Path, ids: Tensor, batch: int = 3, *, walk: bool = True, k: int = K) -> dict[str, Top]:
    dense = open_dense(str(folder))
    setup = Setup("cpu", getattr(torch, dense.run_dtype("auto", "cpu")), batch)
    source = dense.walker(setup, ids.shape[1]) if walk else dense.load("auto", "cpu")
    return collect_tops(source, dense.layout, ids, skip_first=SKIP, batch_size=batch, k=k)


def all_coefficients(model: Any, ffns: Sequence[Ffn], batch: int) -> dict[str, Tensor]:
    """Coefficients `[places, slots]` by names of FFNs, those of `skip_first` and of tokens not routed there zero."""
    seen = {ffn.name: torch.zeros(SEQUENCES * LENGTH, ffn.width) for ffn in ffns}
    first = torch.arange(SEQUENCES * LENGTH) % LENGTH < SKIP
    for places in torch.split(torch.arange(SEQUENCES * LENGTH), batch * LENGTH):

        def see(ffn: Ffn, some: Seen, places: Tensor = places) -> None:
            seen[ffn.name][places if some.tokens is None else places[some.tokens]] = some.h.float()

        with torch.inference_mode(), watched(model, ffns, see):
            model(input_ids=tokens().flatten()[places].view(-1, LENGTH))
    return {name: h.masked_fill(first[:, None], 0) for name, h in seen.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tops_are_those_of_all_coefficients(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny_model(family_config(kind), dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    ffns = open_dense(str(tmp_path)).layout.ffns
    whole = collected(tmp_path, tokens(), SEQUENCES)
    for batch in (1, 3, 100):
        exact = all_coefficients(model, ffns, batch)
        walked, forwards = (collected(tmp_path, tokens(), batch, walk=walk) for walk in (True, False))
        assert list(walked) == list(forwards) == [ffn.name for ffn in ffns]
        for ffn in ffns:
            for top in (walked[ffn.name], forwards[ffn.name]):
                assert_is(top, *naive(exact[ffn.name], K))
                assert torch.allclose(top.value_norm, value_rows(model, ffn).float().norm(dim=1))
            if dtype == torch.float32:  # products of fewer rows may be rounded differently
                assert torch.equal(walked[ffn.name].place, whole[ffn.name].place)


def plant(model: Any, kind: str) -> None:
    """Make slot i of the first layer look for the embedding of token i, as the norm leaves it, and stop attention."""
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings.copy_(torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0)))
        if kind == "gpt2":
            layer = model.transformer.h[0]
            layer.attn.c_proj.weight.zero_()
            layer.attn.c_proj.bias.zero_()
            model.transformer.wpe.weight.zero_()
            layer.mlp.c_fc.bias.zero_()
            norm, keys = layer.ln_2, [layer.mlp.c_fc.weight.T]
        else:
            layer = model.model.layers[0]
            layer.self_attn.o_proj.weight.zero_()
            norm, keys = layer.post_attention_layernorm, [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
        for parameter in norm.parameters():  # all tokens as long as each other: a token is the most like itself
            parameter.fill_(parameter.ndim and float(parameter is norm.weight))
        for key in keys:
            key.copy_(norm(embeddings[: len(key)]))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_slot_made_for_a_token_is_triggered_by_that_token(kind: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(kind))
    plant(model, kind)
    model.save_pretrained(tmp_path)
    ids = tokens() % 48
    top = next(iter(collected(tmp_path, ids, k=12).values()))
    text = make_text(ids, unknown(ids), tiny_tokenizer(), skip_first=SKIP)
    for slot in range(48):
        here = [place for place in (ids.flatten() == slot).nonzero().flatten().tolist() if place % LENGTH >= SKIP]
        assert 0 < len(here) < 12
        assert sorted(top.place[slot, : len(here)].tolist()) == here
        made = float(top.value[slot, 0])
        assert made == pytest.approx(HIDDEN if kind == "gpt2" else HIDDEN**2, rel=1e-3)  # f(k.k), or f(g.g)(u.u)
        assert torch.allclose(top.value[slot, : len(here)], torch.tensor(made))
        assert all(abs(value) < made * 0.99 for value in top.value[slot, len(here) :].tolist())
        own = Top(top.value[:, : len(here)], top.place[:, : len(here)], top.value_norm)
        quoted = contexts(own, slot, text)
        assert {item["token"] for item in quoted} == {tiny_tokenizer().decode([slot])}
        assert {item["contribution"] for item in quoted} == {
            abs(item["coefficient"]) * float(top.value_norm[slot]) for item in quoted
        }
        found = shared(own, slot, text)
        assert found is not None
        assert found["share"] == 1


def unknown(ids: Tensor) -> Origins:
    """Origins of tokens that are in no document."""
    return Origins(("nowhere",), torch.zeros_like(ids), torch.full_like(ids, -1))


def test_a_context_is_the_text_around_its_place() -> None:
    tokenizer = tiny_tokenizer(adds_bos=False)
    written = ["one two three four", "été 🙂 dix euros €"]
    length = min(len(written[0]), len(written[1].encode()))
    ids = torch.tensor([tokenizer(text)["input_ids"][:length] for text in written])
    places = torch.arange(length).expand(2, length)
    origins = Origins(("first", "second"), torch.tensor([[0], [1]]).expand(2, length), places)
    text = make_text(ids, origins, tokenizer, skip_first=0, around=5)
    top = Top(torch.tensor([[-3.0, 2.0, 0.0]]), torch.tensor([[4, length + 1, -1]]), torch.tensor([0.5]))
    assert contexts(top, 0, text) == [
        {
            **{"coefficient": -3.0, "contribution": 1.5, "document": "first", "offset": 4},
            **{"before": "one ", "token": "t", "after": "wo th", "sequence": 0, "position": 4},
        },
        {
            **{"coefficient": 2.0, "contribution": 1.0, "document": "second", "offset": 1},
            **{"before": "", "token": "é", "after": "té \ufffd", "sequence": 1, "position": 1},
        },
    ]


def test_a_character_is_shown_whole_with_each_of_its_tokens() -> None:
    tokenizer, text = tiny_tokenizer(adds_bos=False), "a été €🙂 z"
    ids = tokenizer(text)["input_ids"]
    of_bytes = [character for character in text for _ in character.encode()]
    parts = [split_text(ids, at, at + 1, tokenizer) for at in range(len(ids))]
    assert [token for _, token, _ in parts] == of_bytes
    assert {"".join(part) for part in parts} == {text}


def ids_of(text: str) -> list[int]:
    found: list[int] = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize(("pattern", "kind"), [("q", "token"), ("xq", "bigram"), ("yxq", "trigram")])
def test_a_planted_pattern_is_what_triggers_share(pattern: str, kind: str) -> None:
    """Six of eight triggers end with it; its parts are elsewhere, too."""
    draw = random.Random(0)
    rows = ["_q_q_x_y_yx_xq_yxq__"] + ["".join(draw.choices("abcdefgh", k=20)) for _ in range(8)]
    ends = {row: draw.randrange(4, 20) for row in range(1, 7)}
    for row, end in ends.items():
        rows[row] = f"{rows[row][: end + 1 - len(pattern)]}{pattern}{rows[row][end + 1 :]}"
    ids = torch.tensor([ids_of(row) for row in rows])
    places = [[20 * row + end for row, end in ends.items()] + [7 * 20 + 9, 8 * 20 + 3]]
    text = make_text(ids, unknown(ids), tiny_tokenizer(), skip_first=2)
    chance = sum(row[3 - len(pattern) :].count(pattern) for row in rows) / (9 * 18)
    found = shared(Top(torch.ones(1, 8), torch.tensor(places), torch.ones(1)), 0, text)
    assert found == {"kind": kind, "text": pattern, "share": 0.75, "chance": chance}


def test_tokens_after_the_same_token_share_it() -> None:
    ids = torch.tensor([ids_of("_zaazbbzcczddzeezffz")])
    text = make_text(ids, unknown(ids), tiny_tokenizer(), skip_first=1, around=0)
    top = Top(torch.ones(1, 6), torch.tensor([[2, 5, 8, 11, 14, 17]]), torch.ones(1))
    assert shared(top, 0, text) == {"kind": "previous token", "text": "z", "share": 1.0, "chance": 6 / 19}


def test_a_silent_slot_has_nothing_to_share() -> None:
    ids = torch.tensor([ids_of("ab")])
    text = make_text(ids, unknown(ids), tiny_tokenizer(), skip_first=0)
    silent = empty_top(torch.ones(1))
    assert contexts(silent, 0, text) == []
    assert shared(silent, 0, text) is None
