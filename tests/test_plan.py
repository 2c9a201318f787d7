"""Budgets are met in every unit after rounding, and plans are deterministic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvprune
from kvprune.artifacts import read_plan
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import open_checkpoint
from kvprune.recipe import make_recipe
from tests.conftest import HIDDEN, LAYERS, WIDTH, recipe_data, save_model, tiny_config, tiny_model

Planner = Callable[..., kvprune.Plan]


@pytest.fixture
def planner(tmp_path: Path, make_folder: Callable[..., Path], text: Path) -> Planner:
    """Plan one calibrated run in many ways: `planner("plan.budget.keep=0.5")`."""
    folder = make_folder()
    run = tmp_path / "run"
    kvprune.calibrate(make_recipe(recipe_data(folder, text)), run)
    return lambda *overrides, **kwargs: kvprune.plan(run, overrides=list(overrides), **kwargs)


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.5, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("round_to", [1, 4, 16, 48])
def test_keep_is_the_nearest_width(planner: Planner, keep: float, round_to: int) -> None:
    possible = [*range(round_to, WIDTH, round_to), WIDTH]
    if keep * WIDTH < possible[0] / 2:
        with pytest.raises(KvpruneError, match=r"plan\.budget\.keep"):
            planner(f"plan.budget.keep={keep}", f"plan.round_to={round_to}", dry_run=True)
        return
    plan = planner(f"plan.budget.keep={keep}", f"plan.round_to={round_to}", dry_run=True)
    assert {ffn.width for ffn in plan.ffns} == {plan.ffns[0].width}
    assert abs(plan.ffns[0].width - keep * WIDTH) == min(abs(width - keep * WIDTH) for width in possible)


@pytest.mark.parametrize("share", [0.75, 0.85, 0.9, 1.0])
@pytest.mark.parametrize("round_to", [1, 4])
@pytest.mark.parametrize("unit", ["params", "bytes"])
def test_ceilings_hold_and_the_next_width_would_break_them(
    planner: Planner, share: float, round_to: int, unit: str
) -> None:
    key = "total_params" if unit == "params" else "bytes"
    whole = planner("plan.budget.keep=1.0", dry_run=True)
    ceiling = int(getattr(whole.before, key) * share)
    plan = planner(f"plan.budget.{unit}={ceiling}", f"plan.round_to={round_to}", dry_run=True)
    size = getattr(plan.after, key)
    assert size <= ceiling
    step = round_to * LAYERS * 3 * HIDDEN * (1 if unit == "params" else 4)
    assert plan.ffns[0].width == WIDTH or size + step > ceiling


def test_the_achieved_size_is_that_of_the_model(planner: Planner, tmp_path: Path) -> None:
    plan = planner("plan.budget.keep=0.5")
    kvprune.export(tmp_path / "run")
    model = tiny_model(tiny_config("llama", intermediate_size=plan.ffns[0].width))
    parameters = dict(model.named_parameters())
    assert plan.after.total_params == sum(parameter.numel() for parameter in parameters.values())
    assert plan.after.ffn_params == sum(p.numel() for name, p in parameters.items() if ".mlp." in name)
    assert plan.after.slots == LAYERS * plan.ffns[0].width
    written = open_checkpoint(tmp_path / "run" / "model").bytes
    assert plan.after.bytes - 64 <= written <= plan.after.bytes  # a header with shorter numbers


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("plan.budget.params=1000", "cannot be met"),
        ("plan.budget.bytes=1KiB", "cannot be met"),
        ("plan.protect={9: [0]}", "layers 0 to 1"),
        ("plan.protect={0: [48]}", "out of range"),
        (f"plan.protect={{0: {list(range(40))}}}", "more than the width"),
    ],
)
def test_impossible_plans_say_what_is_possible(planner: Planner, override: str, named: str) -> None:
    with pytest.raises(KvpruneError, match=named):
        planner(override)


def test_the_floor_is_kept(planner: Planner) -> None:
    plan = planner("plan.floor=40", "plan.budget.keep=0.83", "plan.round_to=1", dry_run=True)
    assert plan.ffns[0].width == 40
    with pytest.raises(KvpruneError, match="floor 40"):
        planner("plan.floor=40", "plan.budget.keep=0.5", "plan.round_to=1")


def test_protected_slots_stay(planner: Planner) -> None:
    usual = planner("plan.score=wanda", dry_run=True)
    lost = sorted(set(range(WIDTH)) - set(usual.ffns[1].kept))[:5]
    plan = planner(f"plan.protect={{1: {lost}}}", dry_run=True)
    assert set(lost) <= set(plan.ffns[1].kept)
    assert plan.ffns[1].protected == lost
    assert plan.ffns[0].kept == usual.ffns[0].kept
    assert plan.ffns[1].width == usual.ffns[1].width


SCORES = ["wanda", "fire_rate", "contribution", "fluctuation", "activation_norm", "weight_norm", "random"]


@pytest.mark.parametrize("score", SCORES)
def test_plans_are_deterministic_and_well_formed(planner: Planner, score: str) -> None:
    first, second = (planner(f"plan.score={score}", dry_run=True) for _ in range(2))
    assert first == second
    for ffn in first.ffns:
        assert ffn.kept == sorted(set(ffn.kept))
        assert ffn.kept[0] >= 0
        assert ffn.kept[-1] < WIDTH


def test_scores_differ(planner: Planner) -> None:
    kept = {score: str([ffn.kept for ffn in planner(f"plan.score={score}", dry_run=True).ffns]) for score in SCORES}
    assert len(set(kept.values())) == len(SCORES)


def test_a_dry_run_writes_nothing(planner: Planner, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    planner("plan.budget.keep=0.5", dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_same_recipe_same_bytes(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "dense")
    recipe = make_recipe(recipe_data(folder, text))
    for name in ("a", "b"):
        kvprune.calibrate(recipe, tmp_path / name)
        kvprune.plan(tmp_path / name)
    for file in ("stats.safetensors", "plan.json", "recipe.yaml"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_plan_reads_back_as_written(planner: Planner, tmp_path: Path) -> None:
    made: Any = planner("plan.score=fire_rate")
    assert read_plan(tmp_path / "run" / "plan.json") == made
