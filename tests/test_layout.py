"""FFNs are found by what a field of the config changes, and what cannot be slimmed is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvprune
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import open_checkpoint
from kvprune.ffn.fields import meta_model
from kvprune.ffn.find import find_layout
from kvprune.ffn.stored import stored_pieces, stored_shape
from kvprune.recipe import make_recipe
from tests.conftest import (
    COMMON,
    HIDDEN,
    LAYERS,
    SHAPES,
    WIDTH,
    recipe_data,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from tests.families import FAMILIES, family_config

EXPERTS, EXPERT_WIDTH, SHARED_WIDTH = 4, 16, 24


@pytest.mark.parametrize("shape", SHAPES)
def test_every_supported_shape_is_found(shape: str) -> None:
    config = tiny_config(shape)
    layout = find_layout(config)
    assert len(layout.ffns) == LAYERS
    (field,) = layout.fields
    assert field.name == ("n_inner" if shape.startswith("gpt2") else "intermediate_size")
    assert field.multiples == {ffn.name: 1 for ffn in layout.ffns}
    model = tiny_model(config)
    parameters = dict(model.named_parameters())
    assert layout.total_params == sum(parameter.numel() for parameter in parameters.values())
    for ffn in layout.ffns:
        for param in ffn.cuts():
            assert parameters[param.name].shape[param.axis] == layout.widest == ffn.width == field.value
        inside = sum(p.numel() for name, p in parameters.items() if name.startswith(f"{ffn.name}."))
        assert inside == ffn.params_per_slot * ffn.width + HIDDEN * (ffn.value_bias is not None)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("phi3", {"intermediate_size": [WIDTH, WIDTH]}),
        ("gpt_neox", {"intermediate_size": [WIDTH, WIDTH]}),
        ("opt", {"ffn_dim": [WIDTH, WIDTH]}),
        ("bert", {"intermediate_size": [WIDTH, WIDTH]}),
        ("gemma3", {"text_config.intermediate_size": [WIDTH, WIDTH]}),
        ("mixtral", {"intermediate_size": LAYERS * EXPERTS * [EXPERT_WIDTH]}),
        ("gpt_oss", {"intermediate_size": LAYERS * EXPERTS * [EXPERT_WIDTH]}),
        (
            "qwen2_moe",
            {
                "intermediate_size": [WIDTH],
                "moe_intermediate_size": EXPERTS * [EXPERT_WIDTH],
                "shared_expert_intermediate_size": [SHARED_WIDTH],
            },
        ),
    ],
)
def test_each_ffn_and_each_expert_is_found_once_under_the_field_of_its_width(
    name: str, fields: dict[str, list[int]]
) -> None:
    layout, parameters = find_layout(family_config(name)), dict(tiny_model(family_config(name)).named_parameters())
    widths = {ffn.name: ffn.width for ffn in layout.ffns}
    assert {field.name: [widths[ffn] for ffn in field.multiples] for field in layout.fields} == fields
    assert len(widths) == len(layout.ffns) == sum(map(len, fields.values()))
    assert layout.total_params == sum(parameter.numel() for parameter in parameters.values())
    for ffn in layout.ffns:
        for param in ffn.cuts():
            assert parameters[param.name].shape[param.axis] == ffn.width * (2 if param.fused else 1)
        elements = sum(parameters[param.name].numel() for param in ffn.cuts())
        assert elements == ffn.params_per_slot * ffn.width * (1 if ffn.expert is None else EXPERTS)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("bitnet", "BitNetMLP couples its slots: changing row 0 of a key changes the coefficients of [0-9]+ slots"),
        ("mamba", "of MambaMixer is no linear map"),
        ("bloom", r"no field of config\.json sets the width of an FFN .* mlp: BloomMLP"),
        ("openai-gpt", r"no field of config\.json sets the width of an FFN .* mlp: MLP"),
        ("t5", "not a causal language model"),
        ("deberta-v2", "not a causal language model"),
    ],
)
def test_other_models_are_refused_and_what_was_found_is_named(kind: str, named: str) -> None:
    config = family_config(kind) if kind in FAMILIES else AutoConfig.for_model(kind)
    with pytest.raises(KvpruneError, match=f"^model type {kind}: .*{named}"):
        find_layout(config)


class OddFfn(nn.Module):
    """Gate and up in one matrix, in an order of their own; slots that are not separable; an output that is changed."""

    def __init__(self, hidden: int, width: int, odd: str) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * width, False), nn.Linear(width, hidden, False)
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        rows = self.gate_up(x)
        gate, up = (rows[..., ::2], rows[..., 1::2]) if self.odd == "interleaved" else rows.chunk(2, -1)
        a = torch.relu(gate) * (up.flip(-1) if self.odd == "reversed" else up)
        if self.odd == "normed":
            a = a / (1 + a.square().mean(-1, keepdim=True))
        elif self.odd == "the largest":
            a = a * (a >= a.topk(3).values[..., -1:])
        elif self.odd == "cut off":
            a = a[..., :-1]
            return nn.functional.linear(a, self.down.weight[:, :-1])
        out: Tensor = self.down(a)
        return out.tanh() * 2 if self.odd == "bent" else out


class OddFfnConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "odd-ffn"


class OddFfnForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = OddFfnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OddFfn(config.hidden_size, config.intermediate_size, config.odd)
        self.post_init()


AutoConfig.register("odd-ffn", OddFfnConfig)
AutoModelForCausalLM.register(OddFfnConfig, OddFfnForCausalLM)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ("normed", "OddFfn couples its slots: changing row 0 of a key changes the coefficients of [0-9]+ slots"),
        ("the largest", "OddFfn couples its slots"),
        ("reversed", r"the rows of model\.layers\.0\.mlp\.gate_up\.weight are those of slots .* that is not known"),
        ("cut off", "its value matrix is not called as one"),
    ],
)
def test_an_ffn_whose_slots_cannot_be_removed_alone_is_refused(odd: str, named: str) -> None:
    with pytest.raises(KvpruneError, match=f"^model type odd-ffn: .*{named}"):
        find_layout(OddFfnConfig(**COMMON, odd=odd))


@pytest.mark.parametrize("odd", ["halves", "interleaved", "bent"])
def test_gate_and_up_in_one_matrix_are_cut_in_their_order_and_a_changed_output_does_no_harm(
    odd: str, tmp_path: Path, text: Path
) -> None:
    config = OddFfnConfig(**COMMON, odd=odd)
    spread = "interleaved" if odd == "interleaved" else "halves"
    assert [param.spread for param in find_layout(config).ffns[1].keys] == [spread]
    tiny_model(config).save_pretrained(tmp_path / "dense")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    kvprune.calibrate(make_recipe(recipe_data(tmp_path / "dense", text)), tmp_path / "run")
    plan = kvprune.plan(tmp_path / "run")
    kvprune.export(tmp_path / "run")  # which compares the logits with those of the masked model
    dense, slim = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).model.layers[1].mlp for name in ("dense", "run/model")
    )
    kept = plan.ffns[1].kept
    rows = {
        "halves": [*kept, *(WIDTH + slot for slot in kept)],
        "interleaved": [2 * s + at for s in kept for at in (0, 1)],
    }
    assert torch.equal(slim.gate_up.weight, dense.gate_up.weight[rows[spread]])
    assert torch.equal(slim.down.weight, dense.down.weight[:, kept])


def any_config(name: str, **changes: Any) -> Any:
    """The config of one of SHAPES or FAMILIES."""
    if name in SHAPES:
        return tiny_config(name, **changes)
    kind, values = FAMILIES[name]
    return AutoConfig.for_model(kind, **{**values, **changes})


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gpt_neox"])
def test_in_a_square_ffn_keys_and_value_are_told_apart(name: str) -> None:
    field = "n_inner" if name == "gpt2" else "intermediate_size"
    usual, square = (find_layout(any_config(name, **changes)) for changes in ({}, {field: HIDDEN}))
    assert square.widest == HIDDEN
    assert [ffn.cuts() for ffn in square.ffns] == [ffn.cuts() for ffn in usual.ffns]


@pytest.mark.parametrize("name", [*SHAPES, "phi3", "opt", "mixtral", "gpt_oss", "qwen2_moe"])
def test_every_cut_parameter_is_held_on_disk(name: str, tmp_path: Path) -> None:
    config, model = any_config(name), tiny_model(any_config(name))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    pieces = stored_pieces(checkpoint, meta_model(config))
    for ffn in find_layout(config).ffns:
        for param in ffn.cuts():
            assert stored_shape(checkpoint, pieces[param.name]) == tuple(model.get_parameter(param.name).shape)
