"""FFNs are found by their structure, and what cannot be slimmed is refused by name."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import model_names, open_checkpoint
from kvprune.ffn.layout import Ffn, Matrix, _probe_separable, find_layout, meta_model
from tests.conftest import COMMON, HIDDEN, LAYERS, SHAPES, save_model, tiny_config, tiny_model

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_supported_shape_is_found(shape: str) -> None:
    config = tiny_config(shape)
    layout = find_layout(config)
    assert len(layout.ffns) == LAYERS
    assert layout.width_field == ("n_inner" if shape.startswith("gpt2") else "intermediate_size")
    model = tiny_model(config)
    parameters = dict(model.named_parameters())
    assert layout.total_params == sum(parameter.numel() for parameter in parameters.values())
    for ffn in layout.ffns:
        for name, axis in ffn.cuts().items():
            assert parameters[name].shape[axis] == layout.width == ffn.width
        inside = sum(p.numel() for name, p in parameters.items() if name.startswith(f"{ffn.name}."))
        assert inside == ffn.params_per_slot * ffn.width + HIDDEN * ffn.value.bias


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("phi3", {"pad_token_id": 0}, "Phi3MLP"),
        ("gpt_neox", {}, "GPTNeoXMLP"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN}, "fc1"),
        ("mixtral", EXPERTS, "Mixtral"),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}, "Qwen2MoeExperts"),
        ("bitnet", {}, "BitNetMLP"),
        ("mamba", {}, "MambaMixer"),
        ("bert", {}, "Bert"),
        ("gemma3", {}, "nested text model"),
        ("t5", {}, "not a causal language model"),
    ],
)
def test_other_models_are_refused_and_what_was_found_is_named(kind: str, changes: dict[str, Any], named: str) -> None:
    values = {} if kind in ("gemma3", "t5") else COMMON
    config = AutoConfig.for_model(kind, **{**values, **changes})
    with pytest.raises(KvpruneError, match=named):
        find_layout(config)


def test_an_ffn_that_couples_its_slots_is_refused() -> None:
    class Coupled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 8, False), nn.Linear(4, 8, False), nn.Linear(8, 4, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.softmax(self.gate(x), -1) * self.up(x))
            return out

    ffn = Ffn("m", (Matrix("m.gate", 0, False), Matrix("m.up", 0, False)), Matrix("m.down", 1, False), 8, 4)
    with pytest.raises(KvpruneError, match="couples its slots"):
        _probe_separable(Coupled(), ffn)


def test_an_ffn_that_changes_its_output_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 8, False), nn.Linear(4, 8, False), nn.Linear(8, 4, False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.relu(self.gate(x)) * self.up(x)).tanh()
            return out

    ffn = Ffn("m", (Matrix("m.gate", 0, False), Matrix("m.up", 0, False)), Matrix("m.down", 1, False), 8, 4)
    with pytest.raises(KvpruneError, match="changes what its value matrix writes"):
        _probe_separable(Scaled(), ffn)


def test_a_square_ffn_is_refused_since_keys_and_value_look_alike() -> None:
    with pytest.raises(KvpruneError, match="no FFN"):
        find_layout(tiny_config("llama", intermediate_size=HIDDEN))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cut_parameter_has_a_name_on_disk(shape: str, tmp_path: Any) -> None:
    folder = save_model(tmp_path / "model", shape)
    config = AutoConfig.from_pretrained(folder)
    names = model_names(open_checkpoint(folder), meta_model(config))
    for ffn in find_layout(config).ffns:
        assert set(ffn.cuts()) <= set(names)
