"""What changed is noticed, what did not change is not done again, and a stop at any place loses nothing."""

import fcntl
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import kvprune
from kvprune.artifacts import RunFolder
from kvprune.errors import KvpruneError, StaleError
from kvprune.ffn.checkpoint import open_checkpoint
from kvprune.ffn.forwards import count_batch
from kvprune.recipe import load_recipe, make_recipe
from kvprune.schema import Evaluate
from kvprune.sources import tasks as sources
from kvprune.sources.models import fingerprint
from kvprune.sources.tasks import task_fingerprint
from kvprune.stages import calibrate as calibrating
from kvprune.stages import evaluate as evaluating
from kvprune.staleness import stage_states
from tests.conftest import recipe_data, save_model, tiny_tokenizer, write_task


@pytest.fixture
def recipe(make_folder: Callable[..., Path], text: Path, tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_data(make_folder(), text)), encoding="utf-8")
    return file


def reason(run: Path, stage: str) -> str:
    place = RunFolder(run)
    return stage_states(place, load_recipe(place.recipe))[stage].reason


def test_another_tokenizer_makes_the_counts_stale(recipe: Path, tmp_path: Path) -> None:
    kvprune.calibrate(recipe, tmp_path / "run")
    tiny_tokenizer(adds_bos=False).save_pretrained(tmp_path / "dense")
    with pytest.raises(StaleError, match="the files of model"):
        kvprune.plan(tmp_path / "run")


def test_a_file_of_the_same_size_is_another_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF1")
    before = fingerprint(str(file), None)
    file.write_bytes(b"GGUF2")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert fingerprint(str(file), None) != before


def test_lost_weights_are_exported_again(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = kvprune.run(recipe, run)
    (run / "model" / "model.safetensors").unlink()
    with pytest.raises(StaleError, match=r"model/model\.safetensors is missing or has changed"):
        kvprune.evaluate(run)
    assert kvprune.run(recipe, run)["slim"]["tasks"] == first["slim"]["tasks"]


def test_weights_trained_in_place_are_judged_anew(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = kvprune.run(recipe, run)
    weights = run / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    entry = open_checkpoint(run / "model").tensors["lm_head.weight"]
    data[entry.start + 3 : entry.end : 4] = bytes(b ^ 0x80 for b in data[entry.start + 3 : entry.end : 4])  # signs
    weights.write_bytes(data)
    assert reason(run, "evaluate") == "the files in model/ have changed"
    second = kvprune.evaluate(run)
    assert second["slim"]["tasks"] != first["slim"]["tasks"]


def bits_flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md", "tokenizer.json"])
def test_a_checkpoint_that_was_changed_is_not_replaced(recipe: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    kvprune.run(recipe, run)
    file = run / "model" / name
    changed = bits_flipped(file.read_bytes())
    file.write_bytes(changed)
    with pytest.raises(KvpruneError, match=rf"{re.escape(name)}, which has changed since the export"):
        kvprune.run(recipe, run, overrides=["plan.budget.keep=0.5"])
    assert file.read_bytes() == changed


def test_a_checkpoint_that_was_trained_on_is_not_replaced(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.run(recipe, run)
    weights = run / "model" / "model.safetensors"
    save_file({**load_file(weights), "lora.weight": torch.ones(2)}, weights, metadata={"format": "pt"})
    with pytest.raises(KvpruneError, match=r"model\.safetensors, which has changed since the export"):
        kvprune.run(recipe, run)
    assert "lora.weight" in load_file(weights)


def test_a_format_of_another_version_is_stale(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(recipe, run)
    kvprune.plan(run)
    plan = json.loads((run / "plan.json").read_text())
    plan["provenance"]["version"] = 0
    (run / "plan.json").write_text(json.dumps(plan))
    assert reason(run, "plan") == "plan.json was made by another version of kvprune"


def test_a_run_is_shown_where_its_model_is_not(recipe: Path, tmp_path: Path) -> None:
    kvprune.calibrate(recipe, tmp_path / "run")
    (tmp_path / "dense").rename(tmp_path / "elsewhere")
    about = kvprune.show(tmp_path / "run")
    assert about["stages"][0]["status"] == "stale"
    assert about["firing"]["ffns"]


def test_the_dense_model_is_judged_once_for_all_runs(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = evaluating._lm_eval, list[str]()

    def counted(judge: Any, task: str, model: Any) -> dict[str, Any]:
        calls.append(task)
        return real(judge, task, model)

    monkeypatch.setattr(evaluating, "_lm_eval", counted)
    kvprune.run(recipe, tmp_path / "a")
    assert len(calls) == 2
    kvprune.run(recipe, tmp_path / "b", overrides=["plan.budget.keep=0.5"])
    assert len(calls) == 3
    assert (tmp_path / "a/eval/dense/builtin.json").read_bytes() == (
        tmp_path / "b/eval/dense/builtin.json"
    ).read_bytes()
    kvprune.run(recipe, tmp_path / "b", overrides=["plan.budget.keep=0.5", "evaluate.max_length=32"])
    assert len(calls) == 5


def test_a_changed_task_file_is_judged_anew_and_groups_and_tags_keep_their_own_figures(
    recipe: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()

    def rows(name: str, answers: str) -> None:
        write_task(tasks, name, [{"q": "x", "a": answer} for answer in answers], tag=["pair"])

    rows("one", "abc")
    rows("two", "zyx")
    mean = {"aggregate_metric_list": [{"metric": "perplexity", "weight_by_size": False}]}
    (tasks / "low.yaml").write_text(yaml.safe_dump({"group": "low", "task": ["one"], **mean}))
    (tasks / "top.yaml").write_text(yaml.safe_dump({"group": "top", "task": ["low", "two"], **mean}))
    run = tmp_path / "run"
    overrides = ["evaluate.tasks=[one, two, pair, top]", f"evaluate.include_path={tasks}", "evaluate.limit=null"]
    found = kvprune.run(recipe, run, overrides=overrides)["dense"]["tasks"]
    one, two = found["one"]["perplexity"], found["two"]["perplexity"]
    assert one != two
    assert found["pair"] == {"one perplexity": one, "two perplexity": two}
    assert found["top"]["perplexity"] == pytest.approx((one + two) / 2)
    rows("one", "dddd")
    assert reason(run, "evaluate").startswith("tasks.files was")
    assert kvprune.evaluate(run)["dense"]["tasks"]["one"]["perplexity"] != one


def test_task_files_are_known_by_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, copied = tmp_path / "mine", tmp_path / "copied"
    (mine / "data").mkdir(parents=True)
    (mine / "one.yaml").write_text("task: one")
    (mine / "data" / "rows.jsonl").write_text("{}")

    def files(folder: Path) -> str:
        return str(task_fingerprint(Evaluate(tasks=["one"], include_path=str(folder)))["files"])

    shutil.copytree(mine, copied, copy_function=shutil.copyfile)
    os.utime(copied / "one.yaml", (1, 1))
    found = files(mine)
    assert files(copied) == found
    (copied / "data" / "rows.jsonl").write_text("[]")  # no longer than it was
    assert files(copied) != found
    shutil.copyfile(mine / "data" / "rows.jsonl", copied / "data" / "rows.jsonl")
    assert files(copied) == found
    monkeypatch.setattr(sources, "WHOLE", 1)  # larger files are not read: a time stands for what they hold
    assert files(copied) != files(mine)


@pytest.mark.usefixtures("cannot_walk")
@pytest.mark.parametrize("at", [1, 8])
def test_a_stop_in_the_first_or_last_batch_is_mended_by_the_same_command(
    at: int, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def stopping(*args: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        count_batch(*args)

    monkeypatch.setattr(calibrating, "count_batch", stopping)
    options = kvprune.Options(batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        kvprune.calibrate(recipe, tmp_path / "parts", options=options)
    kvprune.calibrate(recipe, tmp_path / "parts", options=options)
    assert len(calls) == 8
    kvprune.calibrate(recipe, tmp_path / "whole", options=options)
    parts, whole = RunFolder(tmp_path / "parts"), RunFolder(tmp_path / "whole")
    assert parts.stats.read_bytes() == whole.stats.read_bytes()


def test_only_one_kvprune_writes_to_a_run_folder(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    descriptor = os.open(run, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(KvpruneError, match="another kvprune is at work"):
        kvprune.calibrate(recipe, run)
    os.close(descriptor)
    kvprune.calibrate(recipe, run)


def test_a_replaced_export_comes_back_after_a_crash_between_the_moves(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.run(recipe, run)
    weights = (run / "model" / "model.safetensors").read_bytes()
    (run / "model").rename(run / ".model.1.old")
    kvprune.export(run)
    assert (run / "model" / "model.safetensors").read_bytes() == weights
    assert not list(run.glob(".model.*"))


def test_what_the_user_keeps_in_the_export_is_not_lost(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.run(recipe, run)
    (run / "model" / "mine.gguf").write_text("x")
    with pytest.raises(KvpruneError, match=r"holds mine\.gguf"):
        kvprune.run(recipe, run, overrides=["plan.budget.keep=0.5"])
    assert (run / "model" / "mine.gguf").is_file()


def test_incomplete_weights_are_refused_before_the_calibration(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "dense")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvpruneError, match=r"missing keys, lm_head\.weight first"):
        kvprune.calibrate(make_recipe(recipe_data(folder, text)), tmp_path / "run")
    assert not (tmp_path / "run" / "stats.safetensors").exists()


def test_a_tensor_that_transformers_ignores_is_carried_along(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "dense")
    tensors = load_file(folder / "model.safetensors") | {"model.mtp.weight": torch.ones(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kvprune.calibrate(make_recipe(recipe_data(folder, text)), tmp_path / "run")
    kvprune.plan(tmp_path / "run")
    kvprune.export(tmp_path / "run")
    assert torch.equal(load_file(tmp_path / "run/model/model.safetensors")["model.mtp.weight"], torch.ones(3))


@pytest.mark.parametrize("shape", ["gpt2", "gemma3"])
def test_other_shapes_go_the_whole_way(shape: str, tmp_path: Path, text: Path) -> None:
    results = kvprune.run(make_recipe(recipe_data(save_model(tmp_path / "dense", shape), text)), tmp_path / "run")
    assert results["slim"]["params"] < results["dense"]["params"]
    assert results["slim"]["prefill_tokens_per_second"] > 0
