"""Refitted values in a run: they reach the checkpoint, alone; a stop loses nothing, and what is stale is named."""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvprune
from kvprune.artifacts import RunFolder, read_plan, write_tensors
from kvprune.dense import open_dense
from kvprune.errors import KvpruneError, StaleError
from kvprune.ffn.checkpoint import INDEX, open_checkpoint
from kvprune.ffn.state import Shelf
from kvprune.ffn.walk import Setup
from kvprune.preflight import need
from kvprune.recipe import load_recipe, make_recipe
from kvprune.results.show import render
from kvprune.staleness import stage_states
from tests.conftest import WIDTH
from tests.test_refit import BOTH, LENGTH, Hand, found, planned, refitted, save


def loaded(folder: Path) -> Any:
    """A checkpoint as stock transformers loads it, with every key in its place."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize(("method", "shard"), [("oneshot", "20KB"), ("sequential", "20KB"), ("sequential", "1GB")])
def test_biases_are_switched_on_where_they_help(method: str, shard: str, tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", "llama", torch.bfloat16, max_shard_size=shard)
    run = refitted(dense, tmp_path / "run", method=method, ridge=0.5)
    (values, layers), plan = found(run), read_plan(run.plan)
    assert True in [layer["bias"] and layer["refitted"] for layer in layers]
    kvprune.export(run.path)
    model, config = loaded(run.model), json.loads((run.model / "config.json").read_text())
    assert config == json.loads((dense / "config.json").read_text()) | {"mlp_bias": True, "intermediate_size": 36}
    tensors = model.state_dict()
    for layer, item in zip(layers, plan.ffns, strict=True):
        for key in ("gate_proj", "up_proj"):
            assert torch.equal(tensors[f"{item.name}.{key}.bias"], torch.zeros(item.width, dtype=torch.bfloat16))
        name = f"{item.name}.down_proj.bias"
        assert (name in values) == (layer["bias"] and layer["refitted"]) == bool(tensors[name].any())
    size = json.loads((run.model / "kvprune.json").read_text())["budget"]["after"]
    added = sum(tensor.numel() for name, tensor in tensors.items() if "mlp" in name and name.endswith("bias"))
    assert size["total_params"] == model.num_parameters() == plan.after.total_params + added
    assert size["ffn_params"] == sum(tensor.numel() for name, tensor in tensors.items() if ".mlp." in name)
    assert size["bytes"] == sum(file.stat().st_size for file in run.model.glob("*.safetensors"))
    assert (run.model / INDEX).is_file() == (shard == "20KB")
    if shard == "20KB":
        index, entries = json.loads((run.model / INDEX).read_text()), open_checkpoint(run.model).tensors
        assert index["weight_map"] == {name: entry.file for name, entry in entries.items()}
        assert len(set(index["weight_map"].values())) > 1
        assert index["metadata"]["total_size"] == sum(entry.end - entry.start for entry in entries.values())
        assert index["metadata"]["total_parameters"] == model.num_parameters()


def test_biases_are_not_switched_on_where_they_are_not_wanted(tmp_path: Path) -> None:
    run = refitted(save(tmp_path / "dense"), tmp_path / "run", method="oneshot", ridge=0.5, bias="none")
    assert sorted(found(run)[0]) == [f"model.layers.{at}.mlp.down_proj.weight" for at in range(2)]
    kvprune.export(run.path)
    assert loaded(run.model).config.mlp_bias is False
    assert not [name for name in open_checkpoint(run.model).tensors if name.endswith("bias")]


BIASES = 2 * (32 + 2 * 36)  # of two layers: one of the value matrix, two of keys


@pytest.mark.parametrize(("unit", "room"), [("params", BIASES), ("bytes", 4 * BIASES + 6 * 160)])
def test_a_ceiling_is_met_with_biases_too(unit: str, room: int, tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense"), tmp_path / "run", method="oneshot")
    size = read_plan(run.plan).after
    base = {"params": size.total_params, "bytes": size.bytes}[unit]
    for ceiling, biased in ((base, False), (base + room - 1, False), (base + room, True)):
        kvprune.plan(run.path, overrides=[f"plan.budget.{unit}={ceiling}"])
        assert read_plan(run.plan).after == size
        assert (True in [layer["bias"] for layer in kvprune.refit(run.path)["ffns"]]) == biased
        kvprune.export(run.path)
        model = loaded(run.model)
        assert model.config.mlp_bias == biased
        assert {"params": model.num_parameters(), "bytes": open_checkpoint(run.model).bytes}[unit] <= ceiling


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [("llama", torch.bfloat16), ("llama", torch.float16), ("gpt2", torch.float32), ("gpt2", torch.float16)],
)
def test_the_values_are_exported_bit_for_bit(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run = refitted(save(tmp_path / "dense", shape, dtype), tmp_path / "run", method="sequential")
    kvprune.export(run.path)
    values, model = found(run)[0], loaded(run.model)
    assert len(values) >= 2
    for name, tensor in values.items():
        assert tensor.dtype == weights(run)[name].dtype == dtype
        assert torch.equal(weights(run)[name], tensor)
    assert model.dtype == dtype
    about = json.loads((run.model / "kvprune.json").read_text())
    assert about["budget"]["after"]["total_params"] == model.num_parameters()
    assert about["refit"] == found(run)[1]
    assert about["verified"]["logit_difference"] < 1e-5


def test_a_run_refits_once_judges_what_was_refitted_and_shows_it(tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense"), tmp_path / "run", method="sequential", ridge=0.5)
    results = kvprune.run(load_recipe(run.recipe), run.path)
    assert results["slim"]["params"] == loaded(run.model).num_parameters() > read_plan(run.plan).after.total_params
    text, former = render(kvprune.show(run.path)), run.values.stat().st_mtime_ns
    assert all(
        f"{layer['error_before']:.4f}" in text and f"{layer['error_after']:.4f}" in text for layer in found(run)[1]
    )
    assert kvprune.run(load_recipe(run.recipe), run.path) == results
    assert run.values.stat().st_mtime_ns == former


@BOTH
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_killed_refit_goes_on_and_ends_with_the_same_bytes(
    in_memory: bool, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(save(tmp_path / "dense", layers=5), tmp_path / "run", tokens=512, method=method)
    kvprune.refit(run.path)
    whole = run.values.read_bytes()
    run.values.unlink()
    recipe, setup = load_recipe(run.recipe), Setup("cpu", torch.float32, 8)
    needed = need(recipe, open_dense(recipe.model), setup, stage="refit", whole=False)
    options = kvprune.Options(memory=None if in_memory else needed.least + needed.hidden // 2)
    real, reached, stop = Shelf.finish, list[int](), (-1, "")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    def finish(shelf: Shelf, index: int, runs: list[Any], *found: Any) -> None:
        reached.append(index)
        assert [hidden.in_memory for hidden in runs] == [in_memory] * len(runs)
        if stop == (index, "before"):
            die()
        monkeypatch.setattr("kvprune.ffn.state.write_tensors", die if stop == (index, "within") else write_tensors)
        real(shelf, index, runs, *found)
        if stop == (index, "after"):
            die()

    monkeypatch.setattr(Shelf, "finish", finish)
    stops = [((0, "within"), 0), ((2, "before"), 0), ((2, "after"), 2), ((4, "within"), 3), ((4, "after"), 4)]
    for stop, first in stops:
        reached.clear()
        with pytest.raises(KeyboardInterrupt):
            kvprune.refit(run.path, options=options)
        assert reached == list(range(first, stop[0] + 1))
        assert not run.values.exists()
    reached.clear()
    kvprune.refit(run.path, options=options)
    assert reached == []
    assert run.values.read_bytes() == whole
    assert not run.walk.exists()


@pytest.fixture
def done(tmp_path: Path) -> RunFolder:
    """A run that is refitted and exported."""
    run = refitted(save(tmp_path / "dense"), tmp_path / "run", tokens=256, method="sequential", ridge=0.5)
    assert found(run)[0]
    kvprune.export(run.path)
    return run


def edit(run: RunFolder, section: str, **values: Any) -> None:
    """Change the recipe of a run by hand."""
    data = yaml.safe_load(run.recipe.read_text(encoding="utf-8"))
    data[section] |= values
    run.recipe.write_text(yaml.safe_dump(data), encoding="utf-8")


def reasons(run: RunFolder) -> dict[str, str]:
    """What is stale or missing before the evaluation, and why."""
    states = stage_states(run, load_recipe(run.recipe)).values()
    return {item.stage: item.reason for item in states if item.status != "current" and item.stage != "evaluate"}


def weights(run: RunFolder) -> dict[str, Tensor]:
    return load_file(run.model / "model.safetensors")


def test_another_ridge_makes_refit_and_export_stale_by_name(done: RunFolder) -> None:
    assert reasons(done) == {}
    edit(done, "refit", ridge=1.0)
    assert reasons(done) == {"refit": "refit.ridge was 0.5 and is now 1.0", "export": "refit is stale"}
    with pytest.raises(StaleError, match=rf"refit is stale: refit\.ridge was 0\.5 .*run: kvprune refit {done.path}$"):
        kvprune.export(done.path)
    kvprune.refit(done.path)
    assert reasons(done) == {"export": "the refitted values are others than it was made from"}
    kvprune.export(done.path)
    assert reasons(done) == {}


def test_without_a_refit_the_export_has_plain_slices_and_with_one_again_its_values(done: RunFolder) -> None:
    values, before, plain = found(done)[0], weights(done), Hand(done).slim().state_dict()
    assert kvprune.refit(done.path, overrides=["refit.method=none"])["ffns"] == []
    assert reasons(done) == {"export": "the refitted values are others than it was made from"}
    kvprune.export(done.path)
    assert weights(done).keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in weights(done).items())
    kvprune.refit(done.path, overrides=["refit.method=sequential"])  # whose values are still there
    kvprune.export(done.path)
    assert all(torch.equal(weights(done)[name], tensor) for name, tensor in {**before, **values}.items())


def test_another_plan_makes_the_values_stale(done: RunFolder) -> None:
    edit(done, "plan", budget={"keep": 0.5})
    with pytest.raises(StaleError, match=rf"plan is stale: plan\.budget\.keep was 0\.75 .* kvprune plan {done.path}$"):
        kvprune.refit(done.path)
    kvprune.plan(done.path, overrides=["plan.budget.keep=0.75"])  # and back
    assert reasons(done) == {}
    kvprune.plan(done.path, overrides=["plan.budget.keep=0.5"])
    assert reasons(done)["refit"] == "plan.json is another than it was made from"
    with pytest.raises(StaleError, match="refit is stale"):
        kvprune.export(done.path)
    kvprune.refit(done.path)
    kvprune.export(done.path)
    assert weights(done)["model.layers.0.mlp.down_proj.weight"].shape == (32, 24)


def test_lost_values_are_missed(done: RunFolder) -> None:
    done.values.unlink()
    with pytest.raises(StaleError, match="refit is missing; run: kvprune refit"):
        kvprune.export(done.path)


def test_a_text_that_gives_other_tokens_now_is_refused(done: RunFolder) -> None:
    text, former = done.path.with_name("run.txt"), done.values.read_bytes()
    edit(done, "refit", ridge=1.0)
    stat = text.stat()
    text.write_text(text.read_text(encoding="utf-8").replace("a", "e"), encoding="utf-8")
    with pytest.raises(StaleError, match=r"calibrate is stale: the text .* has changed"):
        kvprune.refit(done.path)
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as with a data set of the Hub, which is not watched
    with pytest.raises(StaleError, match="gives other tokens now than were counted; run: kvprune calibrate"):
        kvprune.refit(done.path)
    assert done.values.read_bytes() == former


def test_one_sequence_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(KvpruneError, match=r"^recipe: refit: one sequence cannot be both .*; raise calibrate\.tokens$"):
        planned(save(tmp_path / "dense"), tmp_path / "run", tokens=LENGTH, method="oneshot")
    assert not (tmp_path / "run").exists()


def test_too_few_tokens_for_the_slots_are_warned_of_with_a_number_that_is_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = save(tmp_path / "dense")
    refitted(dense, tmp_path / "few", tokens=2 * LENGTH, method="oneshot")
    (line,) = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert "32 tokens are fewer than a layer's 36 slots" in line
    caplog.clear()
    refitted(dense, tmp_path / "enough", tokens=int(re.findall(r"calibrate\.tokens=(\d+)", line)[0]), method="oneshot")
    assert not [line for line in caplog.records if line.levelno == logging.WARNING]


@BOTH
@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
def test_nan_is_refused_and_the_ffn_is_named(name: str, method: str, tmp_path: Path) -> None:
    dense = save(tmp_path / "dense")
    run, file = planned(dense, tmp_path / "run", tokens=256, method=method), dense / "model.safetensors"
    entry, stat = open_checkpoint(dense).tensors[f"model.layers.1.mlp.{name}.weight"], file.stat()
    gone = next(slot for slot in range(WIDTH) if slot not in read_plan(run.plan).ffns[1].kept)
    at = entry.start + 4 * (gone * entry.shape[1] if name == "gate_proj" else gone)
    data = bytearray(file.read_bytes())
    data[at : at + 4] = b"\xff" * 4
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a disk that rots: the counts were finite
    with pytest.raises(KvpruneError, match=r"^model\.layers\.1\.mlp: a Gram matrix is not finite; [^\n]*$"):
        kvprune.refit(run.path)
    assert not run.values.exists()


@pytest.mark.usefixtures("cannot_walk")
def test_a_model_that_cannot_be_walked_is_refused_in_one_line_before_it_is_counted(tmp_path: Path) -> None:
    with pytest.raises(KvpruneError, match=r"^refit\.method: [^\n]*, and its layers are shy; use none$"):
        planned(save(tmp_path / "dense"), tmp_path / "run", method="sequential")
    assert not (tmp_path / "run" / "stats.safetensors").exists()


def test_a_target_is_of_a_sequential_refit_only() -> None:
    data = {"model": "m", "refit": {"method": "oneshot", "target": "output"}}
    with pytest.raises(KvpruneError, match=r"^recipe: refit\.target: .*sequential only, and the method is oneshot"):
        make_recipe(data)
    assert make_recipe({"model": "m", "refit": {"method": "sequential"}}).refit.target == "residual"
