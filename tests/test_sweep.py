"""Sweeps: every combination a run of its own, one calibration for all, and a failed run does not stop the rest."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvprune
from kvprune import pipeline, sweeping
from kvprune.artifacts import RunFolder
from kvprune.cli import main
from kvprune.errors import KvpruneError
from kvprune.recipe import load_recipe
from kvprune.results.sweeps import render
from kvprune.staleness import stage_states
from kvprune.sweeping import combinations, split
from tests.conftest import recipe_data, save_model

KEEP, SCORE = "plan.budget.keep=0.75,0.5", "plan.score=wanda,random"


@pytest.fixture
def recipe(make_folder: Callable[..., Path], text: Path, tmp_path: Path) -> Path:
    """A recipe file of a tiny model."""
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_data(make_folder(), text)), encoding="utf-8")
    return file


def changed(recipe: Path, **calibrate: Any) -> Path:
    data = yaml.safe_load(recipe.read_text())
    data["calibrate"].update(calibrate)
    recipe.write_text(yaml.safe_dump(data))
    return recipe


def states(run: Path) -> list[str]:
    place = RunFolder(run)
    return [state.status for state in stage_states(place, load_recipe(place.recipe)).values()]


def inodes(folder: Path, file: str) -> set[int]:
    return {path.stat().st_ino for path in folder.glob(f"*/{file}")}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.9", ["0.9"]),
        ("0.9,0.8", ["0.9", "0.8"]),
        ("0.9, 0.8 ,0.7", ["0.9", "0.8", "0.7"]),
        ("[builtin, piqa],[builtin]", ["[builtin, piqa]", "[builtin]"]),
        ("{0: [1, 2]},{1: [3]}", ["{0: [1, 2]}", "{1: [3]}"]),
        ("'a, b',c", ["'a, b'", "c"]),
        ('[{source: "x,]y"}],self', ['[{source: "x,]y"}]', "self"]),
        ("it's.txt,that's.txt", ["it's.txt", "that's.txt"]),
        ("", [""]),
    ],
)
def test_values_are_between_commas_that_no_bracket_holds(text: str, values: list[str]) -> None:
    assert split(text) == values


def test_every_combination_has_a_name_of_what_varies() -> None:
    made = combinations([KEEP, "plan.round_to=4", SCORE])
    assert [each.name for each in made] == [
        f"keep={keep},score={score}" for keep in (0.75, 0.5) for score in ("wanda", "random")
    ]
    assert made[1].varied == {"plan.budget.keep": "0.75", "plan.score": "random"}
    assert made[1].overrides == ["plan.budget.keep=0.75", "plan.round_to=4", "plan.score=random"]


def test_names_are_safe_short_unique_and_always_the_same() -> None:
    texts = ["/data/../a b.txt", "/data/a-b.txt", "[/data/a b.txt, self]", "..", "x" * 300, "x" * 301]
    names = [each.name for each in combinations([f"calibrate.text={','.join(texts)}"])]
    assert len(set(names)) == len(texts)
    assert all(len(name) < 60 and set("/\\ []'\"") & set(name) == set() for name in names)
    assert names[0].startswith("text=a-b.txt-")
    assert [each.name for each in combinations([f"calibrate.text=new.txt,{texts[0]}"])][1] == names[0]
    both = combinations(["calibrate.seed=1,2", "plan.seed=3,4"])
    assert both[0].name == "calibrate.seed=1,plan.seed=3"
    many = combinations([f"plan.a{at}={'y' * 30}{at},z" for at in range(8)])
    assert len({each.name for each in many}) == 2**8
    assert all(len(each.name) < 140 for each in many)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "nothing varies"),
        (["plan.score=wanda"], "nothing varies.*use: kvprune run"),
        (["plan.score"], r"--set plan\.score: should be key=value,value"),
        (["plan.score=wanda,"], "should be key=value,value"),
        (["plan.score=wanda,random", "plan.score=taylor"], r"plan\.score is set twice"),
        (["plan.floor=1,2,1"], "1 is there twice"),
    ],
)
def test_settings_that_make_no_combinations(settings: list[str], message: str) -> None:
    with pytest.raises(KvpruneError, match=message):
        combinations(settings)


def test_one_calibration_serves_all_runs(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changed(recipe, text="self")
    runs = tmp_path / "runs"
    with caplog.at_level("INFO", "kvprune"):
        found = kvprune.sweep(recipe, runs, [KEEP, SCORE])
    assert [run["status"] for run in found["runs"]] == ["done"] * 4
    assert sorted(path.name for path in runs.iterdir()) == sorted(run["name"] for run in found["runs"])
    for file in ("stats.safetensors", "self_samples.json"):
        assert len(inodes(runs, file)) == 1
    assert sum("token-layers" in line for line in caplog.messages) == 1  # the progress of a calibration
    assert sum(line.startswith("self:") and "tokens/s" in line for line in caplog.messages) == 1
    assert "sweep: 4 of 4 runs" in caplog.text
    for run in found["runs"]:
        assert states(Path(run["run"])) == ["current"] * 6
        plan = load_recipe(Path(run["run"]) / "recipe.yaml").plan
        assert run["varied"] == {"plan.budget.keep": str(plan.budget.keep), "plan.score": plan.score}
    alone = kvprune.run(recipe, tmp_path / "alone", overrides=["plan.budget.keep=0.5", "plan.score=random"])
    assert found["runs"][3]["slim"]["tasks"] == alone["slim"]["tasks"]


def test_a_sweep_goes_on_where_it_was_and_grows(recipe: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = kvprune.sweep(recipe, runs, [KEEP])
    before = {
        path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file() and path.name != "recipe.yaml"
    }
    assert kvprune.sweep(recipe, runs, [KEEP]) == first
    (runs / "keep=0.5" / "eval" / "results.json").unlink()
    again = kvprune.sweep(recipe, runs, ["plan.budget.keep=0.75,0.5,0.25"])
    assert again["runs"][:2] == first["runs"]
    assert len(inodes(runs, "stats.safetensors")) == 1
    for path, time in before.items():
        redone = path.is_relative_to(runs / "keep=0.5" / "eval") and "slim" not in path.parts
        assert path.stat().st_mtime_ns == time or redone, path


def test_what_was_collected_for_one_score_serves_the_others(recipe: Path, tmp_path: Path) -> None:
    changed(recipe, text="self")
    found = kvprune.sweep(recipe, tmp_path / "runs", ["plan.score=wanda,greedy,taylor"])
    assert [run["status"] for run in found["runs"]] == ["done"] * 3
    wanda, greedy, taylor = (RunFolder(Path(run["run"])) for run in found["runs"])
    assert wanda.stats.samefile(greedy.stats)
    assert not taylor.stats.samefile(greedy.stats)  # gradients are another pass, on the same samples
    assert taylor.samples.samefile(greedy.samples)


def test_measured_losses_are_shared_where_they_fit(recipe: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    found = kvprune.sweep(recipe, runs, ["plan.allocation=sensitivity", KEEP, "plan.floor=1,4"])
    assert [run["error"] for run in found["runs"]] == [None] * 4
    assert len(inodes(runs, "sensitivity.json")) == 2  # one for each floor, which they depend on
    for floor in (1, 4):
        one, other = (runs / f"keep={keep},floor={floor}" / "sensitivity.json" for keep in (0.75, 0.5))
        assert one.samefile(other)


def test_other_calibrations_are_not_mixed_up(recipe: Path, tmp_path: Path) -> None:
    found = kvprune.sweep(recipe, tmp_path / "runs", ["calibrate.skip_first=1,2"])
    assert [states(Path(run["run"])) for run in found["runs"]] == [["current"] * 6] * 2
    assert len(inodes(tmp_path / "runs", "stats.safetensors")) == 2


def test_a_disk_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "one").write_bytes(b"counts")
    sweeping._put(tmp_path / "one", tmp_path / "two" / "stats")
    assert (tmp_path / "two" / "stats").read_bytes() == b"counts"
    assert not (tmp_path / "two" / "stats").samefile(tmp_path / "one")


def test_what_a_killed_process_left_is_no_way_into_another_runs_file(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"counts")
    (tmp_path / "other").write_bytes(b"other counts")
    os.link(tmp_path / "one", tmp_path / f".two.{os.getpid()}.tmp")
    sweeping._put(tmp_path / "other", tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == b"counts"
    assert (tmp_path / "two").samefile(tmp_path / "other")


def test_looking_for_a_calibration_reads_no_statistics(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvprune.run(recipe, tmp_path / "run")
    monkeypatch.setattr("kvprune.staleness.digest", lambda path: pytest.fail(f"reads {path}"))
    place = RunFolder(tmp_path / "run")
    assert sweeping._calibrated(place, load_recipe(place.recipe))
    assert not sweeping._calibrated(place, load_recipe(recipe, ["calibrate.skip_first=2"]))


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (KvpruneError("plan: cannot\nbe"), "plan: cannot; be"),
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        (OSError(28, "No space left"), "OSError: [Errno 28] No space left"),
    ],
)
def test_a_failed_run_is_told_and_the_rest_goes_on(
    failure: Exception,
    told: str,
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, runs = pipeline.run, str(tmp_path / "runs")

    def failing(recipe: Any, *args: Any, **kwargs: Any) -> Any:
        if recipe.plan.budget.params == 29_000:
            raise failure
        return real(recipe, *args, **kwargs)

    monkeypatch.setattr(pipeline, "run", failing)
    assert main(["sweep", str(recipe), "-o", runs, "--set", "plan.budget.params=29K,30K,28K"]) == 1
    out, err = capsys.readouterr()
    failed = next(line for line in err.splitlines() if "failed" in line)
    assert failed == f"sweep: params=29K failed: {told}"
    rows = [line.split() for line in out.splitlines()]
    assert [row[-1] for row in rows[1:4]] == ["failed", "done", "done"]
    assert rows[1][2:-1] == ["-"] * 3
    assert out.splitlines()[4] == f"params=29K: {told}"
    assert out.splitlines()[-1] == f"next: kvprune compare '{runs}/params=30K' '{runs}/params=28K'".replace("'", "")
    assert "Traceback" not in err


def test_all_recipes_are_checked_before_anything_is_run(recipe: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(KvpruneError) as caught:
        kvprune.sweep(recipe, runs, ["plan.budget.keep=0.5,2", "plan.threshold=2.0,3.0", "plan.score=fire_rate,wanda"])
    lines = str(caught.value).splitlines()
    assert f"keep=2,threshold=2.0,score=fire_rate and 3 more: {recipe}: plan.budget.keep: " in "\n".join(lines)
    assert any(line.startswith("keep=0.5,threshold=2.0,score=wanda and") and "fire_rate only" in line for line in lines)
    assert any("keep=0.5,threshold=3.0,score=fire_rate" in line and "power of two" in line for line in lines)
    with pytest.raises(KvpruneError, match=rf"^{recipe}: plan\.colour: unknown key"):
        kvprune.sweep(recipe, runs, [KEEP, "plan.colour=red"])
    with pytest.raises(KvpruneError, match=r"^include_path=nowhere: evaluate\.include_path: nowhere: no such folder"):
        kvprune.sweep(recipe, runs, ["evaluate.include_path=null,nowhere"])
    with pytest.raises(KvpruneError, match=r"keep=0\.50: is the same recipe as keep=0\.5"):
        kvprune.sweep(recipe, runs, ["plan.budget.keep=0.5,0.50"])
    with pytest.raises(KvpruneError, match=r"text=nothing\.txt: calibrate\.text"):
        kvprune.sweep(recipe, runs, ["calibrate.text=builtin,nothing.txt"])
    with pytest.raises(KvpruneError, match=r"^params=1,score=wanda and 1 more: plan\.budget\.params: .*$"):
        kvprune.sweep(recipe, runs, ["plan.budget.params=1,30K", "plan.score=wanda,random"])
    with pytest.raises(KvpruneError, match=r"^model: \./nowhere/nothing"):
        kvprune.sweep(recipe, runs, ["model=./nowhere/nothing", KEEP], dry_run=True)
    assert not runs.exists()


def test_folders_that_are_no_place_for_a_sweep(recipe: Path, tmp_path: Path) -> None:
    kvprune.calibrate(recipe, tmp_path / "run")
    with pytest.raises(KvpruneError, match="is a run folder; name a folder for the runs"):
        kvprune.sweep(recipe, tmp_path / "run", [KEEP])
    mine = tmp_path / "runs" / "keep=0.5" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(KvpruneError, match=r"^keep=0\.5: .*exists and is not a run folder"):
        kvprune.sweep(recipe, tmp_path / "runs", [KEEP])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["keep=0.5"]
    mine.unlink()
    kvprune.calibrate(recipe, mine.parent)
    other = save_model(tmp_path / "other", "gpt2")
    with pytest.raises(KvpruneError, match=r"^keep=0\.5: .*is a run of model"):
        kvprune.sweep(recipe, tmp_path / "runs", [KEEP, f"model={other}"])


def test_a_dry_run_lists_and_does_nothing(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", str(recipe), "-o", str(tmp_path / "runs"), "--set", KEEP, "--set", SCORE, "--dry-run"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["run", "plan.budget.keep", "plan.score", "status"]
    assert "keep=0.5,score=random" in out
    assert out.splitlines()[-1] == "dry run: 4 combinations, nothing was run"
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["version"]) == ("kvprune.sweep", 1)
    assert {run["status"] for run in found["runs"]} == {"not run"}
    assert not (tmp_path / "runs").exists()


def test_the_table_tells_runs_sizes_metrics_and_what_is_next(recipe: Path, tmp_path: Path) -> None:
    found = kvprune.sweep(recipe, tmp_path / "runs", [KEEP])
    head, *rows, last = render(found).splitlines()
    for part in ("run", "plan.budget.keep", "parameters kept", "bytes", "builtin: token perplexity", "status"):
        assert part in head
    slim, dense = found["runs"][1]["slim"], found["runs"][1]["dense"]
    values = [f"{slim['params'] / dense['params']:.2%}", f"{slim['bytes']:,}"]
    assert rows[1].split() == [
        "keep=0.5",
        "0.5",
        *values,
        f"{slim['tasks']['builtin']['token_perplexity']:.4g}",
        "done",
    ]
    assert last == f"next: kvprune compare {tmp_path / 'runs'}/*"


def test_an_interrupted_sweep_goes_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = pipeline.run, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    command = ["sweep", str(recipe), "-o", str(tmp_path / "runs"), "--set", KEEP]
    monkeypatch.setattr(pipeline, "run", interrupted)
    assert main(command) == 130
    assert "the same command goes on" in capsys.readouterr().err
    done = tmp_path / "runs" / "keep=0.75" / "eval" / "results.json"
    before = done.stat().st_mtime_ns
    assert main(command) == 0
    assert done.stat().st_mtime_ns == before
    assert states(tmp_path / "runs" / "keep=0.5") == ["current"] * 6
