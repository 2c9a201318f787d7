"""Run folders: stages in order, what is current is not redone, what is stale is refused by name, nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kvprune
from kvprune.artifacts import RunFolder, read_meta
from kvprune.errors import KvpruneError, StaleError
from kvprune.ffn.forwards import count_batch
from kvprune.recipe import load_recipe, make_recipe
from kvprune.results.show import render
from kvprune.schema import Recipe
from kvprune.stages import calibrate as calibrating
from kvprune.staleness import artifact, first_change, stage_states
from tests.conftest import recipe_data, save_model, tiny_tokenizer


@pytest.fixture
def recipe(make_folder: Callable[..., Path], text: Path, tmp_path: Path) -> Path:
    """A recipe file of a tiny model."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_data(make_folder(), text)), encoding="utf-8")
    return file


def statuses(run: Path) -> list[str]:
    place = RunFolder(run)
    return [state.status for state in stage_states(place, load_recipe(place.recipe)).values()]


def times(run: Path) -> dict[str, int]:
    return {
        stage: artifact(RunFolder(run), stage).stat().st_mtime_ns
        for stage in ("calibrate", "plan", "export", "evaluate")
    }


def test_a_run_does_all_stages_and_then_nothing(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = kvprune.run(recipe, run)
    assert results["slim"]["params"] < results["dense"]["params"]
    assert results["slim"]["bytes"] < results["dense"]["bytes"]
    for name in ("dense", "slim"):
        assert results[name]["tasks"]["builtin"]["token_perplexity"] > 1
        assert (run / "eval" / name / "builtin.json").is_file()
        rows = (run / "eval" / name / "builtin.samples.jsonl").read_text().splitlines()
        assert len(rows) == 1  # the limit
        assert json.loads(rows[0])["doc"]["text"]
    assert statuses(run) == ["current"] * 6
    assert load_recipe(run / "recipe.yaml") == load_recipe(recipe)
    before = times(run)
    assert kvprune.run(recipe, run) == results
    assert times(run) == before


def test_a_changed_plan_redoes_the_plan_and_what_follows(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, before = kvprune.run(recipe, run), times(run)
    second = kvprune.run(recipe, run, overrides=["plan.budget.keep=0.5"])
    after = times(run)
    assert after["calibrate"] == before["calibrate"]
    assert all(after[stage] > before[stage] for stage in ("plan", "export", "evaluate"))
    assert second["slim"]["params"] < first["slim"]["params"]
    assert second["dense"]["tasks"] == first["dense"]["tasks"]


def test_stage_by_stage_equals_a_run(recipe: Path, tmp_path: Path) -> None:
    whole = kvprune.run(recipe, tmp_path / "whole")
    run = tmp_path / "steps"
    kvprune.calibrate(recipe, run)
    kvprune.plan(run)
    kvprune.export(run)
    parts = kvprune.evaluate(run)
    for name in ("dense", "slim"):
        assert parts[name]["tasks"] == whole[name]["tasks"]
    for file in ("stats.safetensors", "plan.json", "model/model.safetensors", "model/kvprune.json", "model/README.md"):
        assert (run / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_missing_stage_is_named_with_its_command(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(recipe, run)
    with pytest.raises(StaleError, match=rf"plan is missing; run: kvprune plan {run}"):
        kvprune.export(run)


def test_a_stale_stage_is_refused_and_the_change_is_named(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(recipe, run)
    kvprune.plan(run)
    kvprune.export(run)
    kvprune.plan(run, overrides=["plan.budget.keep=0.5"])
    assert statuses(run) == ["current", "current", "current", "stale", "current", "missing"]
    with pytest.raises(StaleError, match=r"export is stale: plan\.json is another"):
        kvprune.evaluate(run)
    edited = yaml.safe_load((run / "recipe.yaml").read_text())
    edited["calibrate"]["skip_first"] = 2
    (run / "recipe.yaml").write_text(yaml.safe_dump(edited))
    with pytest.raises(StaleError, match=r"calibrate is stale: calibrate\.skip_first was 1 and is now 2"):
        kvprune.plan(run)


def test_changed_weights_and_text_make_the_counts_stale(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(recipe, run)
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() + "more")
    with pytest.raises(StaleError, match=r"the text .* has changed"):
        kvprune.plan(run)
    kvprune.calibrate(recipe, run)
    kvprune.plan(run)
    config = tmp_path / "dense" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(StaleError, match="the files of model"):
        kvprune.plan(run)


def test_a_run_folder_of_another_model_or_of_something_else_is_refused(
    recipe: Path, tmp_path: Path, text: Path
) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(recipe, run)
    other = make_recipe(recipe_data(save_model(tmp_path / "other"), text))
    with pytest.raises(KvpruneError, match="is a run of model"):
        kvprune.calibrate(other, run)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    with pytest.raises(KvpruneError, match="not a run folder"):
        kvprune.run(recipe, tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    with pytest.raises(KvpruneError, match="not a run folder"):
        kvprune.show(tmp_path / "photos")


def test_overrides_of_another_section_are_refused(recipe: Path, tmp_path: Path) -> None:
    kvprune.calibrate(recipe, tmp_path / "run")
    with pytest.raises(KvpruneError, match=r"changes plan\.\* only"):
        kvprune.plan(tmp_path / "run", overrides=["calibrate.tokens=64"])


def test_an_unknown_task_is_refused_before_the_calibration(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(KvpruneError, match="unknown: no_such_task"):
        kvprune.run(recipe, tmp_path / "run", overrides=["evaluate.tasks=[builtin, no_such_task]"])
    assert not (tmp_path / "run").exists()


def test_nothing_half_is_left_where_a_budget_is_impossible(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(KvpruneError, match="cannot be met"):
        kvprune.run(recipe, tmp_path / "run", overrides=["plan.budget.params=10"])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("cannot_walk")
def test_interrupted_forwards_go_on_and_end_in_the_same_bytes(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = kvprune.Options(batch_size=2)
    kvprune.calibrate(recipe, whole, options=options)
    calls = list[int]()

    def stop_at_the_third(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        count_batch(*args)

    monkeypatch.setattr(calibrating, "count_batch", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        kvprune.calibrate(recipe, parts, options=options)
    assert read_meta(RunFolder(parts).partial_stats)["done"] == 6
    assert not RunFolder(parts).stats.exists()
    kvprune.calibrate(recipe, parts, options=options)
    assert len(calls) == 3 + 5  # of 8 batches three were counted before
    assert RunFolder(parts).stats.read_bytes() == RunFolder(whole).stats.read_bytes()
    assert not RunFolder(parts).partial_stats.exists()


def test_nan_in_the_weights_is_named_with_layer_and_slot(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "dense")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[17, 3] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(KvpruneError, match=r"model\.layers\.1\.mlp: slot 17 has NaN"):
        kvprune.calibrate(make_recipe(recipe_data(folder, text)), tmp_path / "run")
    assert not (tmp_path / "run" / "stats.safetensors").exists()


def test_show_tells_what_a_run_is(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(recipe, run)
    about = kvprune.show(run)
    found = [stage["status"] for stage in about["stages"]]
    assert found == ["current", "missing", "current", "missing", "current", "missing"]
    assert [ffn["name"] for ffn in about["firing"]["ffns"]] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all(0 <= ffn["rare"] <= 1 and not ffn["experts"] for ffn in about["firing"]["ffns"])
    kvprune.run(recipe, run)
    page = render(kvprune.show(run))
    for part in ("calibrate  current", "width 48 -> 36", "FFN slots", "75.00%", "prefill tokens/s", "median", "p99"):
        assert part in page
    json.dumps(kvprune.show(run))


def test_the_recipe_may_be_an_object(recipe: Path, tmp_path: Path) -> None:
    loaded: Recipe = kvprune.load_recipe(recipe)
    kvprune.calibrate(loaded, tmp_path / "run")
    assert statuses(tmp_path / "run")[0] == "current"


def test_a_local_lm_eval_task_is_evaluated(recipe: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("\n".join(json.dumps({"q": f"{i}+1=", "a": str(i + 1)}) for i in range(4)))
    (tasks / "sums.yaml").write_text(
        yaml.safe_dump(
            {
                "task": "sums",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(tasks / "rows.jsonl")}},
                "output_type": "loglikelihood",
                "test_split": "test",
                "doc_to_text": "{{q}}",
                "doc_to_target": "{{a}}",
                "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
            }
        )
    )
    overrides = ["evaluate.tasks=[sums]", f"evaluate.include_path={tasks}", "evaluate.limit=3"]
    results = kvprune.run(recipe, tmp_path / "run", overrides=overrides)
    assert set(results["slim"]["tasks"]["sums"]) == {"acc", "perplexity"}
    samples = (tmp_path / "run/eval/slim/sums.samples.jsonl").read_text()
    assert len(samples.splitlines()) == 3
    assert "<user>" not in samples
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    tokenizer.save_pretrained(tmp_path / "dense")
    chat = ["evaluate.apply_chat_template=true", "evaluate.system_instruction=Add up."]
    kvprune.run(recipe, tmp_path / "chat", overrides=[*overrides, *chat])
    row = json.loads((tmp_path / "chat/eval/slim/sums.samples.jsonl").read_text().splitlines()[0])
    assert "<system>Add up.\n<user>0+1=" in json.dumps(row["arguments"]).replace("\\n", "\n")


def test_first_change_names_the_path() -> None:
    then = {"plan": {"budget": {"keep": 0.8}, "score": "wanda"}}
    assert first_change(then, then) == ""
    assert (
        first_change(then, {"plan": {"budget": {"keep": 0.7}, "score": "wanda"}})
        == "plan.budget.keep was 0.8 and is now 0.7"
    )
    assert first_change({"a": 1, "b": 2}, {"a": 1}) == "b was 2 and is now None"


def test_a_killed_run_leaves_no_half_artifact(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = (
        "import os, sys, kvprune; from kvprune.stages import export\n"
        "export.verify = lambda *a: os._exit(9)\n"
        "kvprune.run(sys.argv[1], sys.argv[2])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(recipe), str(run)], capture_output=True, check=False)
    assert done.returncode == 9
    assert not (run / "model").exists()
    assert statuses(run) == ["current", "current", "current", "missing", "current", "missing"]
    kvprune.run(recipe, run)
    assert statuses(run) == ["current"] * 6
