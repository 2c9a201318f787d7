"""The preflight tells what a run needs before minutes are spent, and refuses what cannot end well."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvprune
from kvprune import preflight
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.walk import Setup
from kvprune.recipe import make_recipe
from kvprune.schema import Recipe
from kvprune.sources.models import is_out_of_memory, out_of_memory
from tests.conftest import recipe_data


@pytest.fixture
def recipe(make_folder: Callable[..., Path], text: Path) -> Recipe:
    return make_recipe(recipe_data(make_folder(), text))


@pytest.fixture
def dense(recipe: Recipe) -> Dense:
    return open_dense(recipe.model)


def test_a_run_tells_what_it_found_and_what_it_needs(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvprune"), "propagate", True)
    with caplog.at_level(logging.INFO, "kvprune"):
        kvprune.calibrate(recipe, tmp_path / "run")
    text = caplog.text
    assert "2 gated FFNs of width 48 (intermediate_size)" in text
    assert "parameters: 9,216 in FFNs, 22,944 outside" in text
    assert "budget keep 0.75, round_to 4: intermediate_size 48 -> 36" in text
    assert re.search(r"  parameters 32,160 -> 29,856 \(92\.8 %\)", text)
    assert re.search(r"memory on cpu: about .* GiB", text)
    assert re.search(r"disk: .* needed, .* free", text)
    assert re.search(r"time: counting 512 tokens takes about \d+ s", text)


def test_a_budget_that_removes_nothing_is_told(
    recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvprune"), "propagate", True)
    plan = recipe.plan.model_copy(update={"round_to": 48})
    kvprune.calibrate(recipe.model_copy(update={"plan": plan}), tmp_path / "run")
    assert "the budget removes nothing of intermediate_size 48 with round_to 48; lower round_to" in caplog.text


def check(recipe: Recipe, dense: Dense, batch_size: int, *, whole: bool = False, limit: int | None = None) -> bool:
    setup = Setup("cpu", torch.float32, batch_size)
    return preflight.check_memory(recipe, dense, setup, stage="calibrate", whole=whole, limit=limit, tell=False)[0]


def test_weights_beyond_memory_are_refused(recipe: Recipe, dense: Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_free", lambda device: 100_000)
    with pytest.raises(KvpruneError, match=r"the model needs about .* and .* are free; use dtype: bfloat16"):
        check(recipe, dense, 8, whole=True)
    with pytest.raises(KvpruneError, match="to sample a text"):
        preflight.check_weights(dense, Setup("cpu", torch.float32, 8), "to sample a text (self)")


def test_an_evaluation_of_more_than_memory_is_refused_before_the_calibration(
    recipe: Recipe, dense: Dense, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slim = 29_856
    both = (dense.layout.total_params + slim) * 4  # float32
    monkeypatch.setattr(preflight, "_free", lambda device: both)
    preflight.check_pair(dense, slim, "cpu", torch.float32)
    monkeypatch.setattr(preflight, "_free", lambda device: both - 1)
    with pytest.raises(KvpruneError, match=r"an evaluation loads it and the slim model: .* up to kvprune export"):
        kvprune.run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_beyond_memory_is_refused_with_one_that_fits(
    recipe: Recipe, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_free", lambda device: 600_000)
    with pytest.raises(KvpruneError) as caught:
        check(recipe, dense, 16)
    found = re.search(r"a batch of 16 .* are free; use --batch-size (\d+)$", str(caught.value))
    assert found is not None
    check(recipe, dense, int(found[1]))


def test_a_limit_sends_hidden_states_to_disk_and_is_refused_where_one_layer_needs_more(
    recipe: Recipe, dense: Dense
) -> None:
    assert check(recipe, dense, 1)
    needed = preflight.need(recipe, dense, Setup("cpu", torch.float32, 1), stage="calibrate", whole=False)
    assert check(recipe, dense, 1, limit=needed.least + needed.hidden)
    assert not check(recipe, dense, 1, limit=needed.least + needed.hidden - 1)
    assert not check(recipe, dense, 1, limit=needed.least)
    with pytest.raises(KvpruneError, match=r"^--memory .*: one layer needs about .* are allowed; raise --memory"):
        check(recipe, dense, 1, limit=needed.least - 1)


def test_out_of_memory_is_recognised_and_names_the_knob() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**46, dtype=torch.float64)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert "try --batch-size 4" in str(out_of_memory(8, "calibrate.sequence_length"))
    assert "lower calibrate.sequence_length" in str(out_of_memory(1, "calibrate.sequence_length"))
