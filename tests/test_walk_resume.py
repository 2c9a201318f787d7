"""What a walk keeps on disk: a stop anywhere loses one layer at most, another recipe starts anew, nothing is left."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import kvprune
from kvprune import preflight
from kvprune.dense import open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.state import Shelf
from kvprune.ffn.walk import Setup, Walker
from kvprune.options import prepare
from kvprune.ranks import ALONE
from kvprune.recipe import dump_recipe, make_recipe
from kvprune.schema import Recipe
from tests.conftest import recipe_data, tiny_config, tiny_model, tiny_tokenizer
from tests.test_bad_input import meet

LAYERS = 5
BATCH = 3  # does not divide the 16 sequences
OPTIONS = kvprune.Options(batch_size=BATCH)
HIDDEN_BYTES = 512 * 32 * 4


def recipe_of(folder: Path, text: Path, **calibrate: Any) -> Recipe:
    data = recipe_data(folder, text)
    return make_recipe({**data, "calibrate": {**data["calibrate"], **calibrate}})


def save(folder: Path, shape: str = "llama", *, seed: int = 0, layers: int = LAYERS) -> Path:
    kind = "n_layer" if shape == "gpt2" else "num_hidden_layers"
    tiny_model(tiny_config(shape, **{kind: layers}), seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, text: Path) -> Recipe:
    """Of a model of five layers whose attention has windows."""
    return recipe_of(save(tmp_path / "dense", "gemma3"), text)


@pytest.fixture
def whole(recipe: Recipe, tmp_path: Path) -> bytes:
    """The statistics of an uninterrupted run."""
    return calibrate(recipe, tmp_path / "whole")


def calibrate(recipe: Recipe, run: Path, options: kvprune.Options = OPTIONS) -> bytes:
    """The statistics as they are written; nothing else may be left."""
    kvprune.calibrate(recipe, run, options=options)
    assert sorted(file.name for file in run.iterdir()) == ["recipe.yaml", "stats.safetensors"]
    return (run / "stats.safetensors").read_bytes()


def on_disk(recipe: Recipe) -> kvprune.Options:
    """As much memory as a calibration takes without its hidden states."""
    dense, setup = open_dense(recipe.model), Setup("cpu", torch.float32, BATCH)
    memory = preflight.need(recipe, dense, setup, stage="calibrate", whole=False).least
    options = replace(OPTIONS, memory=memory)
    assert prepare(recipe, dense, OPTIONS, ALONE, "calibrate")[0].in_memory
    assert not prepare(recipe, dense, options, ALONE, "calibrate")[0].in_memory
    return options


class Filled(list[int]):
    """The layers that were filled; called at each one is `then`."""

    then: Callable[[int], Any] = staticmethod(lambda index: None)


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Filled:
    seen, real = Filled(), Walker.filled

    @contextmanager
    def watched(walker: Walker, index: int) -> Iterator[nn.Module]:
        with real(walker, index) as layer:
            seen.append(index)
            seen.then(index)
            yield layer

    monkeypatch.setattr(Walker, "filled", watched)
    return seen


def stop_at(stop: int, how: signal.Signals = signal.SIGINT) -> Callable[[int], Any]:
    return lambda index: os.kill(os.getpid(), how) if index == stop else None


@pytest.mark.parametrize(("first", "second"), [("memory", "memory"), ("disk", "disk"), ("disk", "memory")])
@pytest.mark.parametrize("stop", [0, 2, LAYERS - 1])
def test_ctrl_c_loses_the_layer_at_hand_only(
    stop: int, first: str, second: str, recipe: Recipe, whole: bytes, tmp_path: Path, filled: Filled
) -> None:
    options = {"memory": OPTIONS, "disk": on_disk(recipe)}
    filled.then = stop_at(stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, tmp_path / "run", options[first])
    assert not (tmp_path / "run/stats.safetensors").exists()
    assert filled == list(range(stop + 1))
    filled.clear()
    filled.then = stop_at(LAYERS)
    assert calibrate(recipe, tmp_path / "run", options[second]) == whole
    assert filled == list(range(stop, LAYERS))


class Stopped(BaseException):
    """The process ends here, as far as files are concerned."""


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_stop_after_any_file_is_mended_by_the_same_command(
    where: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(save(tmp_path / "dense", layers=2), text)
    whole, options = calibrate(recipe, tmp_path / "whole"), {"memory": OPTIONS, "disk": on_disk(recipe)}[where]
    real, stops = os.replace, 0
    for at in range(100):
        left = at

        def move(source: Path, target: Path) -> None:
            nonlocal left
            left -= 1
            real(source, target)
            if left < 0:
                raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", move)
            try:
                calibrate(recipe, tmp_path / str(at), options)
                break
            except Stopped:
                stops += 1
        assert calibrate(recipe, tmp_path / str(at), options) == whole
    assert stops == 1 + 1 + 2 * 2 + 1  # recipe, embeddings, states and findings of two layers, statistics


def test_a_killed_process_is_followed_by_one_that_goes_on(
    recipe: Recipe, whole: bytes, tmp_path: Path, filled: Filled
) -> None:
    options = on_disk(recipe)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    code = (
        "import os, signal, sys; from kvprune.cli import main; from kvprune.ffn import state\n"
        "real = state.Hidden.commit\n"
        "def commit(self, layer):\n"
        "    real(self, layer)\n"
        "    if layer == 4: os.kill(os.getpid(), signal.SIGKILL)\n"  # the findings of that layer are not kept yet
        "state.Hidden.commit = commit\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["calibrate", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "run"), "--batch-size", str(BATCH)]
    command = [sys.executable, "-c", code, *arguments, "--memory", str(options.memory)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert calibrate(recipe, tmp_path / "run", options) == whole
    assert filled == [3, 4]


@pytest.mark.parametrize("cached", [False, True])
def test_another_recipe_or_batch_size_starts_anew_and_removes_what_was_left(
    cached: bool, recipe: Recipe, text: Path, tmp_path: Path, filled: Filled
) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    options = replace(OPTIONS, hidden_cache=cache) if cached else OPTIONS
    cases = [
        (recipe_of(tmp_path / "dense", text, skip_first=2), options),
        (recipe_of(tmp_path / "dense", text, seed=1), options),
        (recipe.model_copy(update={"dtype": "bfloat16"}), options),
        (recipe, replace(options, batch_size=4)),
    ]
    for other, how in cases:
        filled.then = stop_at(2)
        with pytest.raises(KeyboardInterrupt):
            calibrate(recipe, run, options)
        assert len(list((run / ".walk").iterdir())) == 1
        filled.clear()
        filled.then = stop_at(LAYERS)
        assert calibrate(other, run, how) == calibrate(other, tmp_path / "fresh", replace(how, hidden_cache=None))
        assert filled == 2 * list(range(LAYERS))
        assert not cached or list(cache.iterdir()) == []
        shutil.rmtree(run)
        shutil.rmtree(tmp_path / "fresh")


def test_runs_that_share_a_folder_for_hidden_states_do_not_meet(
    recipe: Recipe, whole: bytes, tmp_path: Path, filled: Filled
) -> None:
    options = replace(on_disk(recipe), hidden_cache=tmp_path / "cache")
    filled.then = stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, tmp_path / "a", options)
    filled.then = stop_at(LAYERS)
    assert calibrate(recipe, tmp_path / "b", options) == whole
    filled.clear()
    assert calibrate(recipe, tmp_path / "a", options) == whole
    assert filled == [3, 4]
    assert list((tmp_path / "cache").iterdir()) == []


def test_lost_hidden_states_start_the_walk_anew(recipe: Recipe, whole: bytes, tmp_path: Path, filled: Filled) -> None:
    filled.then = stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        calibrate(recipe, tmp_path / "run", replace(OPTIONS, hidden_cache=tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")
    filled.clear()
    filled.then = stop_at(LAYERS)
    assert calibrate(recipe, tmp_path / "run") == whole
    assert filled == list(range(LAYERS))


@pytest.mark.parametrize("shape", ["gemma3", "gpt2"])
def test_hidden_states_on_disk_change_no_bit_and_leave_nothing(
    shape: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(save(tmp_path / "dense", shape), text)
    expected = calibrate(recipe, tmp_path / "memory")
    places: set[Path] = set()
    real = Shelf.finish

    def finish(shelf: Shelf, index: int, *rest: Any) -> None:
        real(shelf, index, *rest)
        files = list(tmp_path.rglob("dense.*.hidden"))
        assert [file.name for file in files] == [f"dense.0.{index + 1}.hidden"]  # the state before is gone
        assert files[0].stat().st_size == HIDDEN_BYTES
        places.add(files[0].parent.parent)

    monkeypatch.setattr(Shelf, "finish", finish)
    small, cache = on_disk(recipe), tmp_path / "cache"
    cache.mkdir()
    cases = {
        "disk": (small, tmp_path / "disk/.walk"),
        "cached": (replace(small, hidden_cache=cache), cache),
        "roomy": (replace(OPTIONS, hidden_cache=str(cache)), cache),
        "made": (replace(small, hidden_cache=tmp_path / "new/cache"), tmp_path / "new/cache"),
    }
    for name, (options, place) in cases.items():
        places.clear()
        assert calibrate(recipe, tmp_path / name, options) == expected
        assert places == {place}
    assert list(cache.iterdir()) == []


def test_a_full_disk_for_hidden_states_is_one_line(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "small").mkdir()
    real, full = shutil.disk_usage, type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: full if Path(path).name == "small" else real(path))
    arguments = ["calibrate", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "run")]
    status, lines = meet([*arguments, "--hidden-cache", str(tmp_path / "small/new/folder")])
    assert (status, len(lines)) == (1, 1)
    needed = f"hidden states need {2 * HIDDEN_BYTES:,} bytes on disk and 1,000 are free"
    assert f"small: {needed}; make room, name another disk with --hidden-cache, or lower calibrate.tokens" in lines[0]
    assert list((tmp_path / "run").iterdir()) == []
    assert meet(arguments)[0] == 0


def test_files_that_change_while_they_are_read_are_an_error(recipe: Recipe, tmp_path: Path, filled: Filled) -> None:
    other = load_file(save(tmp_path / "other", "gemma3", seed=1) / "model.safetensors")

    def replaced(index: int) -> None:
        if index == 2:
            save_file(other, tmp_path / "dense/model.safetensors", metadata={"format": "pt"})

    filled.then = replaced
    with pytest.raises(KvpruneError, match="its files have changed while they were read; run the same command again"):
        calibrate(recipe, tmp_path / "run")
    assert filled == [0, 1, 2]
    assert not (tmp_path / "run/stats.safetensors").exists()
    filled.clear()
    filled.then = stop_at(LAYERS)
    calibrate(recipe, tmp_path / "run")
    assert filled == list(range(LAYERS))  # the first ones were of other weights
    kvprune.calibrate(recipe.model_copy(update={"model": str(tmp_path / "other")}), tmp_path / "fresh", options=OPTIONS)
    found, expected = (load_file(tmp_path / name / "stats.safetensors") for name in ("run", "fresh"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("collect", [["counts"], ["counts", "gram"]])
def test_nan_is_named_and_nothing_is_left_of_the_walk(collect: list[str], tmp_path: Path, text: Path) -> None:
    weights = save(tmp_path / "dense") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.2.mlp.down_proj.weight"][3, 11] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    recipe = recipe_of(tmp_path / "dense", text, collect=collect)
    options = replace(OPTIONS, hidden_cache=tmp_path / "cache")
    with pytest.raises(KvpruneError, match=r"^model\.layers\.2\.mlp: slot 11 has NaN or infinite coefficients"):
        kvprune.calibrate(recipe, tmp_path / "run", options=options)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["recipe.yaml"]
    assert list((tmp_path / "cache").iterdir()) == []
