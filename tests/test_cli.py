"""The command line: exit codes, one JSON object on stdout, one line an error."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvprune import __version__, cli
from kvprune.arguments import EXAMPLES, parser
from kvprune.cli import main
from kvprune.terminal import printable
from tests.conftest import recipe_data


@pytest.fixture
def recipe(make_folder: Callable[..., Path], text: Path, tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_data(make_folder(), text)), encoding="utf-8")
    return file


def kvprune(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvprune", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_verbs_one_after_the_other(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["calibrate", str(recipe), "-o", run]) == 0
    assert main(["plan", run, "--dry-run", "--set", "plan.budget.keep=0.5"]) == 0
    assert "width 48 -> 24" in capsys.readouterr().out
    assert not (tmp_path / "run" / "plan.json").exists()
    assert main(["plan", run]) == 0
    assert main(["export", run]) == 0
    assert main(["evaluate", run]) == 0
    out = capsys.readouterr().out
    for part in ("parameters", "bytes on disk", "token perplexity", "prefill tokens/s", "from_pretrained"):
        assert part in out
    assert main(["show", run]) == 0
    assert "evaluate   current" in capsys.readouterr().out


def test_json_is_one_object_on_stdout_and_progress_goes_to_stderr(recipe: Path, tmp_path: Path) -> None:
    done = kvprune("run", recipe, "-o", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["slim"]["params"] > 0
    assert "calibrate: 1,024 of 1,024 token-layers" in done.stderr
    shown = kvprune("show", tmp_path / "run", "--json", "-q")
    assert json.loads(shown.stdout)["stages"][0] == {"stage": "calibrate", "status": "current", "reason": ""}
    assert shown.stderr == ""


def test_names_of_others_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b]0;mine\x07\u202eb\r"
    assert printable(f"{evil}\n\ta → 1") == "·]0;mine··b·\n\ta → 1"
    assert main(["show", str(tmp_path / evil)]) == 1

    def command(arguments: object) -> tuple[dict[str, str], str]:
        logging.getLogger("kvprune").warning("%s is another", evil)
        return {"name": evil}, f"{evil}: done"

    monkeypatch.setattr(cli, "_command", command)
    assert main(["show", "run"]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err.splitlines()[-1]) == ("·]0;mine··b·: done\n", "·]0;mine··b· is another")
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(told.err)
    assert main(["show", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": evil}


def test_quiet_says_nothing_but_the_result(recipe: Path, tmp_path: Path) -> None:
    done = kvprune("calibrate", recipe, "-o", tmp_path / "run", "-q")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = kvprune("show", tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    assert "Traceback" in kvprune("show", tmp_path / "nothing", "--debug").stderr


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run"], ["plan"], ["run", "x", "-o", "y", "--batch-size", "0"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: kvprune" in capsys.readouterr().err


def test_all_problems_of_a_recipe_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("model: builtin:smollm2-135m\nplan: {score: magic, budget: {keep: 2}, color: red}\n")
    assert main(["run", str(file), "-o", str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"error: {file}: plan.") for line in lines)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there(
    device: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(recipe), "-o", str(tmp_path / "run"), "--device", device]) == 1
    assert f"--device {device}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", EXAMPLES)
def test_every_verb_has_help_with_a_working_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert "example: kvprune" in capsys.readouterr().out
    words = EXAMPLES[verb].replace("'", "").replace(", ", ",").split()
    assert words[0] == "kvprune"
    assert parser().parse_args(words[1:]).verb == verb


def test_version() -> None:
    assert kvprune("--version").stdout == f"kvprune {__version__}\n"
