"""Recoveries in runs: what makes them stale, what comes after them, own samples, and bad input in one line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

import kvprune
from kvprune.artifacts import RunFolder, digest, file_names
from kvprune.cli import main
from kvprune.errors import KvpruneError, StaleError
from kvprune.recipe import load_recipe
from kvprune.sources import samples
from kvprune.staleness import stage_states
from tests.conftest import tiny_config, tiny_model
from tests.test_recover import HELD, LENGTH, SETTINGS, STEPS, exported, files, prose, recover, states


def reason(run: RunFolder, stage: str = "recover") -> str:
    return stage_states(run, load_recipe(run.recipe))[stage].reason


def edit(run: RunFolder, **section: Any) -> None:
    """Change the recover section of a run's recipe by hand."""
    data = yaml.safe_load(run.recipe.read_text())
    run.recipe.write_text(yaml.safe_dump(data | {"recover": data["recover"] | section}))


def test_a_run_without_a_recovery_lacks_none(tmp_path: Path) -> None:
    run = exported(tmp_path)
    assert states(run)["recover"] == "current"
    assert reason(run) == "method none: nothing is trained"
    assert kvprune.run(load_recipe(run.recipe), run.path)["slim"]["params"]
    assert set(states(run).values()) == {"current"}
    assert not run.recovered.exists()


def test_what_was_recovered_is_judged_anew(tmp_path: Path) -> None:
    run = exported(tmp_path)
    before = kvprune.evaluate(run.path)["slim"]["tasks"]
    recover(run)
    assert (states(run)["export"], states(run)["recover"], states(run)["evaluate"]) == ("current", "current", "stale")
    assert reason(run, "evaluate") == "kvprune.json is another than it was made from"
    results = kvprune.run(load_recipe(run.recipe), run.path)
    assert results["slim"]["tasks"] != before
    assert set(states(run).values()) == {"current"}
    former = {path: path.stat().st_mtime_ns for path in (run.recovered, run.results, run.model / "kvprune.json")}
    assert kvprune.run(load_recipe(run.recipe), run.path) == results
    assert {path: path.stat().st_mtime_ns for path in former} == former


def test_other_settings_are_named_and_start_from_the_pruned_weights(tmp_path: Path) -> None:
    run, fresh = exported(tmp_path, name="run"), exported(tmp_path, name="fresh")
    recover(run)
    edit(run, train="values")
    assert states(run)["recover"] == "stale"
    assert reason(run) == "recover.train was 'ffn' and is now 'values'"
    with pytest.raises(StaleError, match=rf"recover is stale: .*; run: kvprune recover {run.path}$"):
        kvprune.evaluate(run.path)
    again, expected = kvprune.recover(run.path), recover(fresh, train="values")
    assert again["losses"] == expected["losses"]
    assert files(run.model)["model.safetensors"] == files(fresh.model)["model.safetensors"]
    assert states(run)["recover"] == "current"


def test_without_a_recovery_the_export_comes_back(tmp_path: Path) -> None:
    run = exported(tmp_path)
    recipe, were = load_recipe(run.recipe), files(run.model)
    recover(run)
    edit(run, method="none", text=None, held_out=None)
    assert states(run)["export"] == "stale"
    assert reason(run, "export") == "model/ was trained, and recover.method is none"
    with pytest.raises(StaleError, match="export is stale: model/ was trained"):
        kvprune.evaluate(run.path)
    assert kvprune.export(run.path) == run.model
    assert files(run.model) == were
    assert load_recipe(run.recipe) == recipe
    assert states(run)["recover"] == "current"


def test_what_a_recovery_rests_on_makes_it_stale(tmp_path: Path) -> None:
    run, text = exported(tmp_path), tmp_path / "more.txt"
    text.write_text(prose(2000), encoding="utf-8")
    recover(run, held_out=text)
    were = files(run.model)
    text.write_text(prose(2001), encoding="utf-8")
    assert reason(run) == f"the text {text} has changed"
    recover(run)
    assert states(run)["recover"] == "current"
    run.recovered.unlink()
    assert states(run)["recover"] == "missing"
    recover(run)
    assert files(run.model)["model.safetensors"] == were["model.safetensors"]  # the held-out text changed behind its 8
    report = json.loads(run.recovered.read_text())
    run.recovered.write_text(json.dumps(report | {"seconds": -1}))
    assert reason(run) == "model/ is not what it left"
    kvprune.plan(run.path, overrides=["plan.budget.keep=0.75"])
    kvprune.export(run.path)
    assert re.match(r"export's inputs\.plan was '\w+' and is now '\w+'", reason(run))
    recover(run)
    assert states(run)["recover"] == "current"
    assert not list(run.path.glob(".*"))


def test_own_samples_are_kept_and_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = exported(tmp_path)
    first = recover(run, text="self")
    rows = json.loads(run.recover_samples.read_text())["tokens"]
    assert len(rows) >= STEPS * SETTINGS["batch_tokens"] / LENGTH + HELD
    assert {len(row) for row in rows} == {LENGTH}
    content, real, drawn = run.recover_samples.read_bytes(), samples.sample, list[int]()

    def sample(model: Any, first: Tensor, *how: Any) -> Tensor:
        drawn.append(len(first))
        return real(model, first, *how)

    monkeypatch.setattr(samples, "sample", sample)
    second = recover(run, learning_rate=1e-3)
    assert run.recover_samples.read_bytes() == content
    assert not drawn
    assert second["losses"][0] == first["losses"][0]
    assert second["losses"] != first["losses"]
    recover(run, tokens=2 * SETTINGS["tokens"])
    more = json.loads(run.recover_samples.read_text())["tokens"]
    assert more[: len(rows)] == rows
    assert sum(drawn) == len(more) - len(rows) > 0
    assert not run.samples.exists()  # those of a calibration are kept apart


def test_samples_of_the_calibration_are_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = exported(tmp_path)
    recover(run, text="self")
    losses = json.loads(run.recovered.read_text())["losses"]
    run.recover_samples.rename(run.samples)
    monkeypatch.setattr(samples, "sample", None)  # cannot be called
    assert recover(run, text="self", learning_rate=1e-3)["losses"][0] == losses[0]
    assert not run.recover_samples.exists()


def test_a_run_refuses_a_text_too_short_to_recover_on_before_it_counts(tmp_path: Path) -> None:
    recipe = load_recipe(exported(tmp_path).recipe, ["recover.method=distill", "recover.tokens=1M"])
    fresh = RunFolder(tmp_path / "fresh")
    wanted = r"^recover\.tokens: .* are asked for; lower recover\.tokens, or name a longer recover\.text$"
    with pytest.raises(KvpruneError, match=wanted):
        kvprune.run(recipe, fresh.path)
    assert not fresh.path.exists()


TEACHING = ("recover.method=distill",)
BAD = {
    "tokens=1M": r"recover\.tokens: \S+text\.txt holds [\d,]+ tokens in full sequences of 32, and 1,000,\d+ of it are "
    r"asked for; lower recover\.tokens, or name a longer recover\.text",
    "text=SHORT": r"recover\.tokens: \S+short\.txt holds 0 tokens in full sequences of 32, and .*",
    "text=/no/where.txt": r"recover\.text: /no/where\.txt: no such file or folder",
    "held_out=SHORT": r"recover\.held_out: \S+short\.txt holds less than one sequence of 32 tokens",
    "held_out=self": r".*recover\.held_out: should be a text that is there, not the model's own samples, got 'self'",
    "batch_tokens=100": r".*recover\.batch_tokens: should be a multiple of sequence_length \(32\), as 96 or 128, .*",
    "sequence_length=512": r".*recover\.batch_tokens: should be a multiple of sequence_length \(512\), as 512, got 128",
    "rank=4": r".*recover\.rank: is read by train lora only, and train is ffn: remove it, got 4",
    "method=none": r"\S+: recover\.method is none; run: kvprune recover \S+ --set recover\.method=distill "
    r"--set recover\.text=FILE",
    "method=rl": r".*recover\.method: should be 'none' or 'distill', got 'rl'",
    "learning_rat=1": r".*recover\.learning_rat: unknown key\. Did you mean learning_rate\? Allowed: method, text, .*",
    "learning_rate=0": r".*recover\.learning_rate: should be greater than 0, got 0",
}


def refused(run: RunFolder, capsys: pytest.CaptureFixture[str], *changes: str) -> str:
    """The one line that the command line gives where it refuses to recover; the model is as it was."""
    were = files(run.model)
    given = [word for change in changes for word in ("--set", change)]
    capsys.readouterr()  # what libraries printed before
    assert main(["recover", str(run.path), "--quiet", *given]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert files(run.model) == were
    return err.removeprefix("error: ").removesuffix("\n")


def test_bad_settings_are_one_line_and_a_trained_model_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, short = exported(tmp_path), tmp_path / "short.txt"
    short.write_text("so short", encoding="utf-8")
    recover(run, tokens=256)
    capsys.readouterr()
    for change, line in BAD.items():
        found = refused(run, capsys, f"recover.{change.replace('SHORT', str(short))}")
        assert re.fullmatch(line, found), change
        assert states(run)["recover"] == "current"


def test_a_sequence_over_the_models_positions_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(exported(tmp_path), capsys, *TEACHING, "recover.sequence_length=256", "recover.batch_tokens=256")
    assert line == "recover.sequence_length: 256 is over the model's max_position_embeddings 128"


def test_adapters_beside_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = exported(tmp_path, "qwen2_moe")
    line = refused(run, capsys, *TEACHING, "recover.train=lora")
    stack = "model.layers.1.mlp.experts.down_proj is a stack of experts"
    assert line == f"recover.train: lora adapts linear maps, and {stack}; use train: ffn or values"


def test_a_run_without_an_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = exported(tmp_path)
    shutil.rmtree(run.model)
    assert refused(run, capsys, *TEACHING) == f"{run.path}: export is missing; run: kvprune export {run.path}"
    (tmp_path / "empty").mkdir()
    line = refused(RunFolder(tmp_path / "empty"), capsys, *TEACHING)
    assert line.startswith(f"{tmp_path / 'empty'}: not a run folder (no recipe.yaml)")


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = exported(tmp_path)
    tiny_model(tiny_config("llama", vocab_size=300)).save_pretrained(run.model)
    about = run.model / "kvprune.json"
    named = [name for name in file_names(run.model) if name != about.name]
    sizes = {name: (run.model / name).stat().st_size for name in named}
    digests = {name: digest(run.model / name) for name in named}
    about.write_text(json.dumps(json.loads(about.read_text()) | {"files": sizes, "digests": digests}))
    line = refused(run, capsys, *TEACHING)
    assert line == (
        f"{run.model}: has 300 words in its vocabulary and its teacher dense 260: nothing can be taught between them"
    )


def test_what_the_user_keeps_in_the_model_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(tmp_path)
    notes = run.model / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    assert refused(run, capsys, *TEACHING).startswith(f"{run.model}: holds notes.txt, which is not of the export; ")
    assert not run.recovering.exists()
    notes.unlink()
    assert recover(run)["improved"]
