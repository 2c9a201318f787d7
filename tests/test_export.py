"""The slim checkpoint: equal to the dense model with masked slots, loadable by stock transformers, and nothing more."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import kvprune
from kvprune.artifacts import RunFolder
from kvprune.card import BASE_CARD, base_fields
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import INDEX, Change, Cut, find_difference, open_checkpoint, write_cut_file
from kvprune.ffn.find import find_layout
from kvprune.recipe import make_recipe
from kvprune.stages.export import mask_slots
from tests.conftest import SHAPES, recipe_data, save_model, tiny_config, tiny_model, words

RELOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
AutoTokenizer.from_pretrained(sys.argv[1])
tokens = torch.arange(20)[None]
print(json.dumps({"logits": model.eval()(tokens).logits.double().tolist(), "dtype": str(model.dtype),
    **{key: sorted(map(str, value)) for key, value in info.items()}}))
"""


def exported(tmp_path: Path, dense: Path, **plan: Any) -> RunFolder:
    text = tmp_path / "text.txt"
    text.write_text(words(400), encoding="utf-8")
    run = tmp_path / "run"
    kvprune.calibrate(make_recipe(recipe_data(dense, text, **plan)), run)
    kvprune.plan(run)
    kvprune.export(run)
    return RunFolder(run)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slim_is_the_dense_model_with_masked_slots(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense", shape, dtype)
    run = exported(tmp_path, dense)
    plan = kvprune.plan(run.path)
    assert plan.ffns[0].width < plan.ffns[0].width_before
    config = AutoConfig.from_pretrained(dense)
    masked = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    mask_slots(masked, find_layout(config), plan)
    slim = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = masked(tokens).logits
    assert torch.allclose(slim(tokens).logits, expected, atol=1e-4 * float(expected.abs().max()))
    assert AutoModelForCausalLM.from_pretrained(run.model).dtype == dtype


def test_masking_other_slots_gives_another_model(tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense")
    run = exported(tmp_path, dense)
    plan = kvprune.plan(run.path)
    wrong = [*plan.ffns]
    wrong[0] = wrong[0].__class__(wrong[0].name, wrong[0].width_before, list(range(wrong[0].width)))
    masked = AutoModelForCausalLM.from_pretrained(dense).eval()
    mask_slots(masked, find_layout(AutoConfig.from_pretrained(dense)), plan.__class__(**{**vars(plan), "ffns": wrong}))
    slim = AutoModelForCausalLM.from_pretrained(run.model).eval()
    tokens = torch.arange(40)[None]
    assert not torch.allclose(slim(tokens).logits, masked(tokens).logits, atol=1e-3)


@pytest.mark.parametrize("shape", ["llama-bias-tied", "gpt2", "gemma3"])
def test_a_fresh_process_loads_it_strictly(shape: str, tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense", shape, torch.bfloat16, max_shard_size="20KB")
    run = exported(tmp_path, dense)
    out = subprocess.run([sys.executable, "-c", RELOAD, str(run.model)], capture_output=True, text=True, check=True)
    report = json.loads(out.stdout.splitlines()[-1])
    assert report["dtype"] == "torch.bfloat16"
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    slim = AutoModelForCausalLM.from_pretrained(run.model).eval()
    assert torch.equal(
        slim(torch.arange(20)[None]).logits.double(), torch.tensor(report["logits"], dtype=torch.float64)
    )


@pytest.mark.parametrize("shape", ["llama", "gpt2-inner"])
@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_keep_all_exports_identical_tensors_and_layout(shape: str, shard: str, tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense", shape, torch.bfloat16, max_shard_size=shard)
    run = exported(tmp_path, dense, budget={"keep": 1.0})
    before, after = open_checkpoint(dense), open_checkpoint(run.model)
    assert before.files == after.files
    assert (len(before.files) > 1) == (shard == "20KB")
    assert [(e.name, e.file, e.dtype, e.shape) for e in before.tensors.values()] == [
        (e.name, e.file, e.dtype, e.shape) for e in after.tensors.values()
    ]
    for file in before.files:
        old, new = load_file(dense / file), load_file(run.model / file)
        assert all(torch.equal(old[name], new[name]) for name in old)
    if before.index:
        assert json.loads((run.model / INDEX).read_text()) == before.index


def test_sharded_index_is_recomputed(tmp_path: Path) -> None:
    run = exported(tmp_path, save_model(tmp_path / "dense", max_shard_size="20KB"))
    index = json.loads((run.model / INDEX).read_text())
    shapes: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        with safe_open(run.model / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            shapes |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert set(shapes) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in shapes.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in shapes.values())


def test_only_what_belongs_to_the_model_goes_along(tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense")
    for name in (
        "LICENSE",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "weights.gguf",
        "modeling_x.py",
        "notes.md",
    ):
        (dense / name).write_text("x")
    (dense / "README.md").write_text("---\nlicense: mit\nlanguage: [en]\n---\n# Base\n")
    (dense / "original").mkdir()
    (dense / "original" / "params.json").write_text("{}")
    (dense / "chat_template.jinja").write_text("{{ messages }}")
    run = exported(tmp_path, dense)
    names = {path.name for path in run.model.iterdir()}
    expected = {"LICENSE", "BASE_README.md", "README.md", "chat_template.jinja", "config.json", "kvprune.json"}
    expected |= {"generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == expected
    card = (run.model / "README.md").read_text()
    assert "license: mit" in card
    assert "from_pretrained" in card
    about = json.loads((run.model / "kvprune.json").read_text())
    assert about["budget"]["after"]["total_params"] < about["budget"]["before"]["total_params"]
    assert str(tmp_path) not in (run.model / "kvprune.json").read_text() + card


@pytest.mark.parametrize(
    "header",
    [
        "date: 2024-02-30",
        "a: " + "[" * 5000,
        "a: [",
        "? [a, {b: c}]\n: d",
        "a: !!timestamp x",
        "a: !!bool x",
        "a: !!int ''",
    ],
)
def test_a_card_whose_header_cannot_be_read_tells_nothing(header: str, tmp_path: Path) -> None:
    (tmp_path / BASE_CARD).write_text(f"---\nlicense: mit\n{header}\n---\n# Base\n", encoding="utf-8")
    assert base_fields(tmp_path) in ({}, {"license": "mit"})


def test_config_changes_in_the_width_alone(tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense", "gpt2")
    run = exported(tmp_path, dense)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (dense, run.model))
    assert after.pop("n_inner") == 96
    assert before.pop("n_inner", None) is None
    assert before == after


def test_a_foreign_model_folder_is_not_touched(tmp_path: Path, make_folder: Callable[..., Path], text: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(make_recipe(recipe_data(make_folder(), text)), run)
    kvprune.plan(run)
    (run / "model").mkdir()
    (run / "model" / "precious.txt").write_text("mine")
    with pytest.raises(KvpruneError, match="not an export of kvprune"):
        kvprune.export(run)
    assert (run / "model" / "precious.txt").read_text() == "mine"
    assert sorted(path.name for path in run.iterdir()) == ["model", "plan.json", "recipe.yaml", "stats.safetensors"]


def test_a_wrong_byte_is_found(tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense")
    run = exported(tmp_path, dense)
    checkpoint, slim = open_checkpoint(dense), open_checkpoint(run.model)
    plan = kvprune.plan(run.path)
    layout = find_layout(tiny_config("llama"))
    cuts: dict[str, Change] = {
        param.name: Cut(param.axis, np.array(item.kept))
        for ffn, item in zip(layout.ffns, plan.ffns, strict=True)
        for param in ffn.cuts()
    }
    assert find_difference(checkpoint, cuts, slim) is None
    entry = slim.tensors["model.layers.1.mlp.down_proj.weight"]
    with (run.model / entry.file).open("r+b") as file:
        file.seek(entry.start + 11)
        byte = file.read(1)
        file.seek(entry.start + 11)
        file.write(bytes([byte[0] ^ 1]))
    assert find_difference(checkpoint, cuts, slim) == f"{entry.name} is not what it should be"


def test_every_dtype_is_cut_bit_for_bit(tmp_path: Path) -> None:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]
    tensors = {str(kind): (torch.randn(6, 10) * 9).abs().to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "note": "é"})
    checkpoint = open_checkpoint(tmp_path)
    slots = np.array([0, 3, 9])
    cuts: dict[str, Change] = {name: Cut(1, slots) for name in tensors}
    write_cut_file(
        tmp_path / "model.safetensors", list(checkpoint.tensors.values()), cuts, tmp_path / "out.safetensors"
    )
    for name, got in load_file(tmp_path / "out.safetensors").items():
        assert torch.equal(got.view(torch.uint8), tensors[name][:, slots].contiguous().view(torch.uint8))
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "é"}


@pytest.mark.parametrize("damage", ["cut", "header", "index", "outside", "none"])
def test_a_damaged_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    dense = save_model(tmp_path / "dense", max_shard_size="20KB" if damage in ("index", "outside") else "1GB")
    weights = dense / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "header":
        weights.write_bytes(b"\x40" + b"\0" * 7 + b"no json" + b"\0" * 100)
    elif damage == "none":
        weights.unlink()
    else:
        index = json.loads((dense / INDEX).read_text())
        first = next(iter(index["weight_map"]))
        index["weight_map"][first] = "../x.safetensors" if damage == "outside" else "gone.safetensors"
        (dense / INDEX).write_text(json.dumps(index))
    with pytest.raises(KvpruneError) as caught:
        open_checkpoint(dense)
    assert "\n" not in str(caught.value)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    run = exported(tmp_path, save_model(tmp_path / "dense", "llama-bias-tied"))
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in open_checkpoint(run.model).tensors
    assert tiny_model(tiny_config("llama-bias-tied")).lm_head.weight.shape == model.lm_head.weight.shape


def test_names_without_the_models_prefix_are_found(tmp_path: Path) -> None:
    """The Hub's gpt2 is stored as the base model: `h.0.…` where the causal model says `transformer.h.0.…`."""
    dense = tmp_path / "dense"
    save_model(dense, "gpt2")
    AutoModelForCausalLM.from_pretrained(dense).transformer.save_pretrained(dense)
    assert "h.0.mlp.c_fc.weight" in open_checkpoint(dense).tensors
    run = exported(tmp_path, dense)
    assert open_checkpoint(run.model).tensors["h.0.mlp.c_fc.weight"].shape == (32, 96)
    about = json.loads((run.model / "kvprune.json").read_text())
    assert about["verified"]["logit_difference"] < 1e-4
