"""How a verb begins: the recipe, the run folder, the model, and all that can be checked before minutes are spent."""

from pathlib import Path

import torch

from kvprune import config as configuring
from kvprune import preflight
from kvprune.artifacts import RunFolder, read_meta
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError, StaleError
from kvprune.options import Options, check_recovery, check_teachable, prepare
from kvprune.ranks import launched
from kvprune.recipe import load_recipe
from kvprune.schema import Recipe
from kvprune.sources.texts import check_text
from kvprune.stages import plan as planning
from kvprune.staleness import STAGES, StageState, first_lacking, stage_states


def begin(recipe: str | Path | Recipe, folder: str | Path, overrides: list[str] | None) -> tuple[Recipe, RunFolder]:
    """A recipe and the run folder that is its own: a new one, or one of the same model."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise KvpruneError("overrides are for a recipe file; change the Recipe with model_copy instead")
    place = RunFolder(Path(folder))
    if place.recipe.is_file():
        former = load_recipe(place.recipe)
        if former.model != recipe.model:
            raise KvpruneError(
                f"{folder}: is a run of model {former.model}, and the recipe is of {recipe.model}; use another -o"
            )
    elif place.path.exists() and (not place.path.is_dir() or any(place.path.iterdir())):
        raise KvpruneError(f"{folder}: exists and is not a run folder (no recipe.yaml); use another -o")
    return recipe, place


def resume(folder: str | Path, overrides: list[str] | None, stage: str) -> tuple[Recipe, RunFolder]:
    """A run folder and its recipe; `overrides` may change the stage's own section only."""
    place = RunFolder(Path(folder))
    if not place.recipe.is_file():
        raise KvpruneError(
            f"{folder}: not a run folder (no recipe.yaml); start one with: kvprune run RECIPE -o {folder}"
        )
    for override in overrides or []:
        if not override.startswith(f"{stage}."):
            raise KvpruneError(
                f"--set {override}: kvprune {stage} changes {stage}.* only; use kvprune run with --set for others"
            )
    return load_recipe(place.recipe, overrides), place


def need(place: RunFolder, recipe: Recipe, stage: str) -> None:
    """Refuse where a stage before `stage` is missing or stale, naming what changed and the command."""
    if (state := first_lacking(place, recipe, STAGES[: STAGES.index(stage)])) is not None:
        first = state.stage == "calibrate"
        command = f"calibrate {place.recipe} -o {place.path}" if first else f"{state.stage} {place.path}"
        raise StaleError(f"{place.path}: {state}; run: kvprune {command}")


def open_checked(
    recipe: Recipe, place: RunFolder, options: Options, stages: tuple[str, ...] = (), *, budget: bool = True
) -> Dense:
    """Open the model, and check all that can be checked before minutes are spent on `stages`.

    Unless the `budget` is no matter, it is told and checked, and so is what an export needs.
    """
    for source in recipe.calibrate.text:
        check_text(source)
    commit = read_meta(place.stats)["model"]["commit"] if place.stats.is_file() else None  # all stages use the same
    dense = open_dense(recipe.model, commit=commit, trust_remote_code=options.trust_remote_code)
    states = stage_states(place, recipe)
    _check_length("calibrate", recipe.calibrate.sequence_length, dense)
    if recipe.recover.method != "none" and states["recover"].status != "current":
        _check_length("recover", recipe.recover.sequence_length, dense)
        check_teachable(recipe, dense)
        if "recover" in stages:  # else it may be done by other processes, on another machine
            check_recovery(recipe, dense, options)
            preflight.check_disk(place.path, preflight.training_disk(dense, recipe.recover), " to recover")
    if budget:
        _check_budget(recipe, place, dense, states)
    if recipe.refit.method != "none":
        dense.stored_dtype()  # what refitted values must be written in
        dense.check_values()
    if recipe.plan.allocation == "sensitivity" and states["plan"].status != "current":
        prepare(recipe, dense, options, launched(), "plan")
    if "evaluate" in stages and states["evaluate"].status != "current":
        _check_evaluation(recipe, dense, options)
    for stage in ("calibrate", "refit"):
        if stage in stages and states[stage].status != "current":
            prepare(recipe, dense, options, launched(), stage, tell=stage == "calibrate")
    return dense


def _check_evaluation(recipe: Recipe, dense: Dense, options: Options) -> None:
    """Dense and slim are loaded whole, and both at once for their speeds."""
    slots = planning.ffn_widths(dense.layout, planning.choose_widths(recipe.plan, dense))
    device = options.own_device()
    kind = getattr(torch, dense.run_dtype(recipe.dtype, device))
    preflight.check_pair(dense, planning.model_size(dense, slots).total_params, device, kind)


def _check_length(section: str, length: int, dense: Dense) -> None:
    most = getattr(dense.text_config, "max_position_embeddings", None)
    if most is not None and 0 < most < length:
        raise KvpruneError(f"{section}.sequence_length: {length} is over the model's max_position_embeddings {most}")


def _check_budget(recipe: Recipe, place: RunFolder, dense: Dense, states: dict[str, StageState]) -> None:
    """Tell what the budget means, and check that it can be met and that the disk has room for what it leaves."""
    if recipe.plan.allocation != "uniform":
        configuring.check_by_layer(dense, recipe.plan)
    widths = planning.choose_widths(recipe.plan, dense)  # of another allocation about the size, in all
    slots = planning.ffn_widths(dense.layout, widths)
    if recipe.plan.allocation == "uniform":
        planning.check_protected(recipe.plan, dense.layout, slots)
    before, after = (planning.model_size(dense, each) for each in ([ffn.width for ffn in dense.layout.ffns], slots))
    if states["plan"].status != "current":
        preflight.tell_budget(recipe, dense, before, after, widths)
    if states["export"].status != "current":
        preflight.check_disk(place.path, after.bytes)
