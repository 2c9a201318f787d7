"""Every family of models: found, cut to random slots of every FFN and expert, loaded by stock classes, and equal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvprune.artifacts import Plan, RunFolder
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.find import find_layout
from kvprune.recipe import make_recipe
from kvprune.stages.export import export, mask_slots
from kvprune.stages.plan import ffn_widths
from tests.conftest import random_plan, tiny_model, tiny_tokenizer
from tests.families import FAMILIES, family_config

# What cannot be slimmed, and a part of the reason that is told.
REFUSED = {
    "bitnet": "couples its slots",
    "bloom": "no field of config.json",
    "cpmant": "cannot be run to be probed",
    "dbrx": "DbrxExpertGLU is no linear map",
    "dory": "couples its slots",
    "gemma3n-sparse": "couples its slots",
    "gpt_neox_japanese": "no field of config.json",
    "hrm_text": "model type hrm_text",
    "jetmoe": "JetMoeParallelExperts is no linear map",
    "lfm2-adjusted": "do not change in proportion",
    "mpt": "no field of config.json",
    "openai-gpt": "no field of config.json",
    "prophetnet": "model type prophetnet",  # its FFN reads more rows than there are tokens
    "xlm": "no field of config.json",
    "xlstm": "do not change in proportion",
    "zamba2": "model type zamba2",
    "zamba2-two": "model type zamba2",
}
# What is found, and stored in a way that cannot be cut.
UNCUT = ("inkling2_text", "inkling2_loop_text")


def slimmed(tmp_path: Path, name: str, dtype: torch.dtype, step: int) -> tuple[Dense, Plan, Path]:
    """A tiny model of a family, saved in shards, and its slim checkpoint."""
    folder = tmp_path / "dense"
    tiny_model(family_config(name), dtype).save_pretrained(folder, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(folder)
    dense = open_dense(str(folder))
    values = {field.name: max(step, round(field.value * 0.6 / step) * step) for field in dense.layout.fields}
    plan = random_plan(dense, ffn_widths(dense.layout, values), seed=0)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.plan.write_text("{}")
    export(make_recipe({"model": str(folder)}), dense, plan, None, run)
    return dense, plan, run.model


def tokens_of(model: Any) -> torch.Tensor:
    return torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in (*REFUSED, *UNCUT)])
def test_slim_equals_masked(name: str, tmp_path: Path) -> None:
    dense, plan, folder = slimmed(tmp_path, name, torch.float32, 4)
    masked = AutoModelForCausalLM.from_pretrained(dense.source.folder, dtype=torch.float32).eval()
    mask_slots(masked, dense.layout, plan)
    slim, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "error_msgs"))
    assert sum(p.numel() for p in slim.parameters()) == plan.after.total_params < plan.before.total_params
    tokens = tokens_of(slim)
    with torch.inference_mode():
        expected, got = masked(tokens, use_cache=False).logits, slim.eval()(tokens, use_cache=False).logits
        assert float((got - expected).abs().max()) <= 1e-6 * max(1.0, float(expected.abs().max()))
        assert slim.generate(tokens[:1], max_new_tokens=1, do_sample=False).shape[1] == 25
    for kept in {tuple(item.kept) for item in plan.ffns}:
        assert len(kept) < max(item.width_before for item in plan.ffns)


# Of nemotron_h-latent not even the dense model runs in bfloat16, and of inkling_text the experts stay dense.
NOT_BF16 = (*REFUSED, *UNCUT, "nemotron_h-latent", "inkling_text")
EXPERTS = [name for name in FAMILIES if name not in NOT_BF16 and "moe_intermediate_size" in str(FAMILIES[name][1])]


@pytest.mark.parametrize("name", [*EXPERTS, "mixtral", "gpt_oss", "granitemoe", "phimoe", "llama4_text", "olmoe"])
def test_experts_in_bfloat16_load_and_run(name: str, tmp_path: Path) -> None:
    _, plan, folder = slimmed(tmp_path, name, torch.bfloat16, 8)
    slim = AutoModelForCausalLM.from_pretrained(folder)
    assert slim.dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.isfinite(slim.eval()(tokens_of(slim), use_cache=False).logits).all()
    assert len({tuple(item.kept) for item in plan.ffns}) > 1


@pytest.mark.parametrize("name", REFUSED)
def test_the_rest_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(KvpruneError, match=REFUSED[name]):
        find_layout(family_config(name))


@pytest.mark.parametrize("name", UNCUT)
def test_what_is_stored_in_another_order_is_refused(name: str, tmp_path: Path) -> None:
    tiny_model(family_config(name)).save_pretrained(tmp_path)
    with pytest.raises(KvpruneError, match="in a form that can be cut"):
        open_dense(str(tmp_path))
