"""What a walk keeps, and what stages say of each other: lost states, disk space, more collected than wanted."""

from pathlib import Path

import pytest
import torch

import kvprune
from kvprune.artifacts import RunFolder, read_json
from kvprune.cli import main
from kvprune.errors import KvpruneError
from kvprune.ffn.state import kept_bytes, make_hidden, open_shelf
from kvprune.ranks import ALONE
from kvprune.recipe import load_recipe, make_recipe
from kvprune.staleness import stage_states
from tests.conftest import recipe_data, save_model, words


@pytest.fixture
def planned(tmp_path: Path) -> RunFolder:
    """A run with Gram scores, planned, whose recipe asks for a refit."""
    text = tmp_path / "text.txt"
    text.write_text(words(500), encoding="utf-8")
    data = recipe_data(save_model(tmp_path / "dense"), text, score="greedy")
    kvprune.calibrate(make_recipe({**data, "refit": {"method": "sequential"}}), tmp_path / "run")
    kvprune.plan(tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_layers_without_their_states_are_forgotten_so_that_the_next_stop_loses_nothing(tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path / "walk", tmp_path / "states", tmp_path, {"a": 1}, ALONE)
    shelf.folder.mkdir(parents=True)
    hidden = make_hidden(shelf.states, "dense.0", (2, 3, 4), torch.float32, in_memory=True)
    for index in range(3):
        shelf.finish(index, [hidden], {"x": torch.ones(1)}, {})
    assert shelf.done(["dense.0"]) == 3
    hidden.forget(3)
    assert shelf.done(["dense.0"]) == 0
    hidden.commit(0)
    shelf.finish(0, [hidden], {"x": torch.ones(1)}, {})
    assert shelf.done(["dense.0"]) == 1


@pytest.mark.parametrize("in_memory", [True, False])
def test_states_on_disk_take_their_space_at_once_and_are_counted(in_memory: bool, tmp_path: Path) -> None:
    shelf = open_shelf(tmp_path / "walk", tmp_path / "states", tmp_path, {}, ALONE)
    hidden = make_hidden(shelf.states, "dense.0", (64, 64, 64), torch.float32, in_memory=in_memory)
    assert in_memory or next(shelf.states.iterdir()).stat().st_blocks * 512 >= 2**20
    hidden.after.fill_(1)
    hidden.commit(0)
    assert kept_bytes(tmp_path / "states", tmp_path) == 2**20
    assert kept_bytes(tmp_path / "states", tmp_path / "other") == 0


def test_gram_statistics_serve_a_recipe_that_wants_only_counts(planned: RunFolder) -> None:
    recipe = load_recipe(planned.recipe, ["plan.score=wanda", "calibrate.collect=[counts]"])
    assert stage_states(planned, recipe)["calibrate"].status == "current"
    fewer = load_recipe(planned.recipe, ["calibrate.tokens=256"])
    assert stage_states(planned, fewer)["calibrate"].status == "stale"


def test_plan_names_the_stage_that_the_recipe_wants_next(
    planned: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(planned.path), "-q"]) == 0
    assert capsys.readouterr().out.endswith(f"next: kvprune refit {planned.path}\n")
    kvprune.refit(planned.path, overrides=["refit.method=none"])
    assert main(["plan", str(planned.path), "-q"]) == 0
    assert capsys.readouterr().out.endswith(f"next: kvprune export {planned.path}\n")


def test_a_card_tells_what_the_refit_did_and_not_what_it_tried(planned: RunFolder) -> None:
    kvprune.refit(planned.path, overrides=["refit.ridge=1e-9"])
    kvprune.export(planned.path)
    layers = read_json(planned.model / "kvprune.json")["refit"]
    done = [layer for layer in layers if layer["refitted"]]
    assert all(layer["error_after"] <= layer["error_before"] for layer in layers)
    before, after = (sum(layer[key] for layer in layers) / len(layers) for key in ("error_before", "error_after"))
    card = (planned.model / "README.md").read_text(encoding="utf-8")
    assert f"refitted (sequential) in {len(done)} of 2 FFNs on" in card
    assert f"{before:.3f} before and {after:.3f} after" in card


def test_a_hidden_cache_that_is_a_file_is_refused_before_anything(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KvpruneError, match=r"^--hidden-cache .*file: is not a folder; name one"):
        kvprune.Options(hidden_cache=tmp_path / "file")
