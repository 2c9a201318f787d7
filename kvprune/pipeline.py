"""The order of the stages, and what each verb does to a run folder. The command line calls nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kvprune import config as configuring
from kvprune import preflight
from kvprune.artifacts import (
    Plan,
    RunFolder,
    digest,
    locked,
    read_json,
    read_meta,
    read_plan,
    read_tensors,
    write_json,
    write_plan,
    write_text,
)
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError, StaleError
from kvprune.ffn.allocate import units_of
from kvprune.ffn.state import find_shelf
from kvprune.ffn.stats import read_stats
from kvprune.ffn.walk import Setup
from kvprune.options import DEFAULT, Options, prepare
from kvprune.progress import log
from kvprune.ranks import ALONE, Ranks, joined, launched
from kvprune.recipe import dump_recipe, load_recipe
from kvprune.results.show import describe
from kvprune.results.table import refit_table
from kvprune.schema import Recipe
from kvprune.sources.models import load_tokenizer
from kvprune.sources.samples import self_samples
from kvprune.sources.texts import check_text, self_share, sequences, token_digest
from kvprune.stages import calibrate as calibrating
from kvprune.stages import evaluate as evaluating
from kvprune.stages import export as exporting
from kvprune.stages import plan as planning
from kvprune.stages import refit as refitting
from kvprune.stages import sensitivity as sensing
from kvprune.staleness import STAGES, stage_states


def run(
    recipe: str | Path | Recipe, folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT
) -> dict[str, Any]:
    """Bring a run folder up to date with a recipe: every stage that is missing or stale, in order.

    Returns the results, dense against slim. Raises KvpruneError.
    """
    _alone("run")
    recipe, place = _begin(recipe, folder, overrides)
    evaluating.task_manager(recipe.evaluate)  # a misspelt task shows now, not after the calibration
    dense = _open(recipe, place, options, walks=("calibrate", "refit"))
    with locked(place):
        _calibrate(recipe, place, dense, options, ALONE)
        _plan(recipe, place, dense, options)
        if reports := _refit(recipe, place, dense, options, ALONE)["ffns"]:
            log.info("%s", refit_table(reports))
        _export(recipe, place, dense)
        return _evaluate(recipe, place, dense, options)


def calibrate(
    recipe: str | Path | Recipe, folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT
) -> Path:
    """Count how the slots of a recipe's model fire, into a run folder. Returns the path of the statistics.

    Under torchrun every process counts its share.
    """
    recipe, place = _begin(recipe, folder, overrides)
    dense = _open(recipe, place, options, walks=("calibrate", "refit"))
    with joined(options.own_device()) as ranks, _writing(place, ranks):
        _calibrate(recipe, place, dense, options, ranks)
    return place.stats


def plan(
    folder: str | Path, *, overrides: list[str] | None = None, dry_run: bool = False, options: Options = DEFAULT
) -> Plan:
    """Decide which slots of a calibrated run stay. With `dry_run` nothing is written."""
    _alone("plan")
    recipe, place = _continue(folder, overrides, "plan")
    _need(place, recipe, "plan")
    dense = _open(recipe, place, options)
    if dry_run:
        return _make_plan(recipe, place, dense, options, keep=False)
    with locked(place):
        return _plan(recipe, place, dense, options)


def refit(folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT) -> dict[str, Any]:
    """Make the kept values of a planned run up for the removed slots. Returns what is known of each layer.

    Under torchrun every process sums its share.
    """
    recipe, place = _continue(folder, overrides, "refit")
    _need(place, recipe, "refit")
    dense = _open(recipe, place, options, walks=("refit",))
    with joined(options.own_device()) as ranks, _writing(place, ranks):
        return _refit(recipe, place, dense, options, ranks)


def export(folder: str | Path, *, options: Options = DEFAULT) -> Path:
    """Write and verify the slim checkpoint of a planned run. Returns its folder."""
    _alone("export")
    recipe, place = _continue(folder, None, "export")
    _need(place, recipe, "export")
    dense = _open(recipe, place, options)
    with locked(place):
        _export(recipe, place, dense)
    return place.model


def evaluate(folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT) -> dict[str, Any]:
    """Judge dense and slim of an exported run. Returns the results."""
    _alone("evaluate")
    recipe, place = _continue(folder, overrides, "evaluate")
    _need(place, recipe, "evaluate")
    dense = _open(recipe, place, options)
    with locked(place):
        return _evaluate(recipe, place, dense, options)


def show(folder: str | Path) -> dict[str, Any]:
    """What a run folder holds, as plain data; `kvprune.results.show.render` makes text of it."""
    recipe, place = _continue(folder, None, "show")
    return describe(place, recipe, stage_states(place, recipe))


def _alone(verb: str) -> None:
    if launched().count > 1:
        raise KvpruneError(f"kvprune {verb} is the work of one process; torchrun is for kvprune calibrate and refit")


@contextmanager
def _writing(place: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Lock the run folder, to which rank 0 alone writes, once every rank has read what it needs of it."""
    ranks.all_true(True)
    with locked(place) if ranks.first else nullcontext():
        yield


def _begin(recipe: str | Path | Recipe, folder: str | Path, overrides: list[str] | None) -> tuple[Recipe, RunFolder]:
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


def _continue(folder: str | Path, overrides: list[str] | None, stage: str) -> tuple[Recipe, RunFolder]:
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


def _need(place: RunFolder, recipe: Recipe, stage: str) -> None:
    """Refuse where a stage before `stage` is missing or stale, naming what changed and the command."""
    states = stage_states(place, recipe)
    for name in STAGES[: STAGES.index(stage)]:
        state = states[name]
        if state.status != "current":
            command = (
                f"kvprune calibrate {place.recipe} -o {place.path}"
                if name == "calibrate"
                else f"kvprune {name} {place.path}"
            )
            why = f": {state.reason}" if state.reason else ""
            raise StaleError(f"{place.path}: {name} is {state.status}{why}; run: {command}")


def _current(place: RunFolder, recipe: Recipe, stage: str) -> bool:
    current = stage_states(place, recipe)[stage].status == "current"
    if current:
        _save_recipe(place, recipe)  # another one may have come and gone in between
        log.info("%s: done before, current", stage)
    return current


def _open(recipe: Recipe, place: RunFolder, options: Options, walks: tuple[str, ...] = ()) -> Dense:
    """Open the model, and check all that can be checked before minutes are spent on the stages `walks`."""
    for source in recipe.calibrate.text:
        check_text(source)
    commit = read_meta(place.stats)["model"]["commit"] if place.stats.is_file() else None  # all stages use the same
    dense = open_dense(recipe.model, commit=commit, trust_remote_code=options.trust_remote_code)
    most, length = getattr(dense.text_config, "max_position_embeddings", None), recipe.calibrate.sequence_length
    if most is not None and 0 < most < length:
        raise KvpruneError(f"calibrate.sequence_length: {length} is over the model's max_position_embeddings {most}")
    if recipe.plan.allocation != "uniform":
        configuring.check_by_layer(dense, recipe.plan)
    widths = planning.choose_widths(recipe.plan, dense)  # of another allocation about the size, in all
    slots = planning.ffn_widths(dense.layout, widths)
    if recipe.plan.allocation == "uniform":
        planning.check_protected(recipe.plan, dense.layout, slots)
    before, after = (planning.model_size(dense, each) for each in ([ffn.width for ffn in dense.layout.ffns], slots))
    states = stage_states(place, recipe)
    if states["plan"].status != "current":
        preflight.tell_budget(recipe, dense, before, after, widths)
    if states["export"].status != "current":
        preflight.check_disk(place.path, after.bytes)
    if recipe.refit.method != "none":
        dense.stored_dtype()  # what refitted values must be written in
        dense.check_values()
    if recipe.plan.allocation == "sensitivity" and states["plan"].status != "current":
        prepare(recipe, dense, options, launched(), "plan")
    for stage in walks:
        if states[stage].status != "current":
            prepare(recipe, dense, options, launched(), stage, tell=stage == "calibrate")
    return dense


def _save_recipe(place: RunFolder, recipe: Recipe) -> None:
    write_text(place.recipe, dump_recipe(recipe))


def _calibrate(recipe: Recipe, place: RunFolder, dense: Dense, options: Options, ranks: Ranks) -> None:
    if ranks.data_of_first(_current(place, recipe, "calibrate") if ranks.first else None):
        if ranks.first:
            _sweep(place, place.stats, options)
        return
    setup, walker = prepare(recipe, dense, options, ranks, "calibrate")
    if walker is not None:
        preflight.check_states(recipe, dense, setup, place.path, stage="calibrate")
    if ranks.first:
        _save_recipe(place, recipe)
    tokens = ranks.tensor_of_first(_tokens(recipe, place, dense, setup, options) if ranks.first else None)
    calibrating.calibrate(recipe, dense, walker, tokens, place, setup.agreed())


def _sweep(place: RunFolder, finished: Path, options: Options) -> None:
    """Remove what a stop after the walk to `finished` may have left of it."""
    about = {key: value for key, value in read_meta(finished).items() if key != "ffns"}
    find_shelf(place.walk, Path(options.hidden_cache or place.walk), place.path, about, ALONE).clear()


def _tokens(recipe: Recipe, place: RunFolder, dense: Dense, setup: Setup, options: Options) -> Tensor:
    """The calibration tokens `[sequences, sequence_length]`; the model samples them where the recipe says so."""
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    section, samples = recipe.calibrate, None
    if count := self_share(section):
        samples = self_samples(
            lambda: _load(dense, recipe, options),
            tokenizer,
            vocabulary=dense.text_config.vocab_size,
            count=count,
            length=section.sequence_length,
            seed=section.seed,
            about={"model": dense.source.fingerprint, "dtype": setup.dtype_name, "device": setup.device_kind},
            file=place.samples,
        )
    tokens = sequences(section, tokenizer, samples)
    _check_tokens(tokens, dense.text_config)
    return tokens


def _check_tokens(tokens: Any, config: Any) -> None:
    """The tokenizer must belong to the model."""
    largest = int(tokens.max())
    if largest >= config.vocab_size:
        raise KvpruneError(
            f"the tokenizer makes id {largest} and the model has {config.vocab_size} embeddings: "
            "they do not belong together"
        )


def _load(dense: Dense, recipe: Recipe, options: Options) -> Any:
    device = options.own_device()
    log.info("loading %s on %s", dense.source.title, device)
    return dense.load(recipe.dtype, device)


def _make_plan(recipe: Recipe, place: RunFolder, dense: Dense, options: Options, *, keep: bool) -> Plan:
    """Decide; for allocation sensitivity with the model. `keep` what is measured, for the next plan."""
    stats, _ = read_stats(place.stats)
    stats_digest = digest(place.stats)
    if recipe.plan.allocation != "sensitivity":
        return planning.make_plan(recipe, dense, stats, stats_digest)
    section, layout = recipe.plan, dense.layout
    setup, _ = prepare(recipe, dense, options, ALONE, "plan")
    tokens = _same_tokens(recipe, place, dense, setup, options)
    model = _load(dense, recipe, options)
    units = units_of(layout, planning.field_steps(section, layout), {})
    scores = planning.slot_scores(section, layout, stats)
    about = sensing.describe(recipe, stats_digest)
    curves = sensing.measure(model, units, scores, tokens, place.sensitivity if keep else None, about)
    chosen = planning.make_plan(recipe, dense, stats, stats_digest, curves)
    other = recipe.model_copy(update={"plan": section.model_copy(update={"allocation": "uniform"})})
    uniform = planning.make_plan(other, dense, stats, stats_digest)
    uniform = replace(uniform, provenance=chosen.provenance)
    return sensing.better(model, chosen, uniform, tokens, layout.ffns)


def _plan(recipe: Recipe, place: RunFolder, dense: Dense, options: Options) -> Plan:
    if _current(place, recipe, "plan"):
        return read_plan(place.plan)
    made = _make_plan(recipe, place, dense, options, keep=True)
    _save_recipe(place, recipe)
    write_plan(place.plan, made)
    return made


def _refit(recipe: Recipe, place: RunFolder, dense: Dense, options: Options, ranks: Ranks) -> dict[str, Any]:
    if recipe.refit.method == "none":
        if ranks.first:
            _save_recipe(place, recipe)
        return {"ffns": []}
    if not ranks.data_of_first(_current(place, recipe, "refit") if ranks.first else None):
        setup, walker = prepare(recipe, dense, options, ranks, "refit")
        assert walker is not None
        preflight.check_states(recipe, dense, setup, place.path, stage="refit")
        tokens = ranks.tensor_of_first(_same_tokens(recipe, place, dense, setup, options) if ranks.first else None)
        if ranks.first:
            _save_recipe(place, recipe)
        refitting.refit(recipe, dense, walker, read_plan(place.plan), tokens, place, setup.agreed())
    elif ranks.first:
        _sweep(place, place.values, options)
    found: dict[str, Any] = ranks.data_of_first(read_meta(place.values) if ranks.first else None)
    return found


def _same_tokens(recipe: Recipe, place: RunFolder, dense: Dense, setup: Setup, options: Options) -> Tensor:
    """The tokens that were counted; refuses a text that gives others by now."""
    tokens = _tokens(recipe, place, dense, setup, options)
    if token_digest(tokens) != read_meta(place.stats)["inputs"]["tokens"]:
        raise StaleError(
            f"{place.path}: calibrate.text gives other tokens now than were counted; "
            f"run: kvprune calibrate {place.recipe} -o {place.path}"
        )
    return tokens


def _export(recipe: Recipe, place: RunFolder, dense: Dense) -> None:
    if _current(place, recipe, "export"):
        return
    values = read_tensors(place.values) if recipe.refit.method != "none" else None
    verified = exporting.export(recipe, dense, read_plan(place.plan), values, place)
    log.info("export: %s: %d tensors verified; %s", place.model, verified.tensors, verified.loads)


def _evaluate(recipe: Recipe, place: RunFolder, dense: Dense, options: Options) -> dict[str, Any]:
    if _current(place, recipe, "evaluate"):
        return dict(read_json(place.results))
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    manager = evaluating.task_manager(recipe.evaluate)
    judge = evaluating.Judge(recipe.evaluate, tokenizer, manager, options.batch_size)
    trust = options.trust_remote_code or configuring.is_own_code(place, dense)
    results = evaluating.evaluate(recipe, dense, judge, place, options.own_device(), trust_remote_code=trust)
    _save_recipe(place, recipe)
    write_json(place.results, results)
    return results
