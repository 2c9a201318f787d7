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
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.allocate import units_of
from kvprune.ffn.state import find_shelf
from kvprune.ffn.stats import read_stats
from kvprune.opening import begin, need, open_checked, resume
from kvprune.options import DEFAULT, Options, make_course, prepare
from kvprune.pages.frame import check_target
from kvprune.progress import log
from kvprune.ranks import ALONE, Ranks, joined, launched
from kvprune.recipe import dump_recipe
from kvprune.results.show import describe
from kvprune.results.table import refit_table
from kvprune.schema import Recipe
from kvprune.sources.models import load_tokenizer
from kvprune.stages import calibrate as calibrating
from kvprune.stages import evaluate as evaluating
from kvprune.stages import export as exporting
from kvprune.stages import plan as planning
from kvprune.stages import recover as recovering
from kvprune.stages import refit as refitting
from kvprune.stages import sensitivity as sensing
from kvprune.staleness import stage_states
from kvprune.teaching.kept import Kept
from kvprune.tokens import calibration_tokens, check_recovery_text, counted_tokens, load_dense, recovery_tokens


def run(
    recipe: str | Path | Recipe, folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT
) -> dict[str, Any]:
    """Bring a run folder up to date with a recipe: every stage that is missing or stale, in order.

    Returns the results, dense against slim. Raises KvpruneError.
    """
    _alone("run")
    recipe, place = begin(recipe, folder, overrides)
    evaluating.task_manager(recipe.evaluate)  # a misspelt task shows now, not after the calibration
    dense = open_checked(recipe, place, options, stages=("calibrate", "refit", "recover", "evaluate"))
    if recipe.recover.method != "none" and stage_states(place, recipe)["recover"].status != "current":
        check_recovery_text(recipe, dense, options)  # which shows too little text now, not after the export
    with locked(place):
        _calibrate(recipe, place, dense, options, ALONE)
        _plan(recipe, place, dense, options)
        if reports := _refit(recipe, place, dense, options, ALONE)["ffns"]:
            log.info("%s", refit_table(reports))
        _export(recipe, place, dense)
        _recover(recipe, place, dense, options, ALONE)
        return _evaluate(recipe, place, dense, options)


def calibrate(
    recipe: str | Path | Recipe,
    folder: str | Path,
    *,
    overrides: list[str] | None = None,
    budget: bool = True,
    options: Options = DEFAULT,
) -> Path:
    """Count how the slots of a recipe's model fire, into a run folder. Returns the path of the statistics.

    Unless the `budget` is no matter, what it means is told, and refused where it cannot be met. Under torchrun every
    process counts its share.
    """
    recipe, place = begin(recipe, folder, overrides)
    dense = open_checked(recipe, place, options, stages=("calibrate", "refit"), budget=budget)
    with joined(options.own_device()) as ranks, _writing(place, ranks):
        _calibrate(recipe, place, dense, options, ranks)
    return place.stats


def plan(
    folder: str | Path, *, overrides: list[str] | None = None, dry_run: bool = False, options: Options = DEFAULT
) -> Plan:
    """Decide which slots of a calibrated run stay. With `dry_run` nothing is written."""
    _alone("plan")
    recipe, place = resume(folder, overrides, "plan")
    need(place, recipe, "plan")
    dense = open_checked(recipe, place, options)
    if dry_run:
        return _make_plan(recipe, place, dense, options, keep=False)
    with locked(place):
        return _plan(recipe, place, dense, options)


def refit(folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT) -> dict[str, Any]:
    """Make the kept values of a planned run up for the removed slots. Returns what is known of each layer.

    Under torchrun every process sums its share.
    """
    recipe, place = resume(folder, overrides, "refit")
    need(place, recipe, "refit")
    dense = open_checked(recipe, place, options, stages=("refit",))
    with joined(options.own_device()) as ranks, _writing(place, ranks):
        return _refit(recipe, place, dense, options, ranks)


def export(folder: str | Path, *, options: Options = DEFAULT) -> Path:
    """Write and verify the slim checkpoint of a planned run. Returns its folder."""
    _alone("export")
    recipe, place = resume(folder, None, "export")
    need(place, recipe, "export")
    dense = open_checked(recipe, place, options)
    with locked(place):
        _export(recipe, place, dense)
    return place.model


def recover(folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT) -> dict[str, Any]:
    """Let the dense model teach the exported one of a run. Returns the report: losses, tokens, time, what came of it.

    Under `accelerate launch` or torchrun every process trains on its share.
    """
    recipe, place = resume(folder, overrides, "recover")
    if recipe.recover.method == "none":
        raise KvpruneError(
            f"{folder}: recover.method is none; run: kvprune recover {folder} --set recover.method=distill "
            "--set recover.text=FILE"
        )
    need(place, recipe, "recover")
    dense = open_checked(recipe, place, options, stages=("recover",))
    with joined(options.own_device()) as ranks, _writing(place, ranks):
        return _recover(recipe, place, dense, options, ranks)


def evaluate(folder: str | Path, *, overrides: list[str] | None = None, options: Options = DEFAULT) -> dict[str, Any]:
    """Judge dense and slim of an exported run. Returns the results."""
    _alone("evaluate")
    recipe, place = resume(folder, overrides, "evaluate")
    need(place, recipe, "evaluate")
    dense = open_checked(recipe, place, options, stages=("evaluate",))
    with locked(place):
        return _evaluate(recipe, place, dense, options)


def show(folder: str | Path, *, html: str | Path | None = None) -> dict[str, Any]:
    """What a run folder holds, as plain data; `kvprune.results.show.render` makes text of it.

    `html` is a file for a page that tells all of it.
    """
    recipe, place = resume(folder, None, "show")
    if html is not None:
        check_target(Path(html))
    about = describe(place, recipe, stage_states(place, recipe))
    if html is not None:
        from kvprune.results.report import write_report

        write_report(Path(html), [(place.path.resolve().name, place, recipe)])
        log.info("show: %s", html)
    return about


def _alone(verb: str) -> None:
    if launched().count > 1:
        raise KvpruneError(f"kvprune {verb} is the work of one process; torchrun is for calibrate, refit and recover")


@contextmanager
def _writing(place: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Lock the run folder, to which rank 0 alone writes, once every rank has read what it needs of it."""
    ranks.all_true(True)
    with locked(place) if ranks.first else nullcontext():
        yield


def _current(place: RunFolder, recipe: Recipe, stage: str) -> bool:
    current = stage_states(place, recipe)[stage].status == "current"
    if current:
        _save_recipe(place, recipe)  # another one may have come and gone in between
        log.info("%s: done before, current", stage)
    return current


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
    tokens = ranks.tensor_of_first(calibration_tokens(recipe, place, dense, options) if ranks.first else None)
    calibrating.calibrate(recipe, dense, walker, tokens, place, setup.agreed())


def _sweep(place: RunFolder, finished: Path, options: Options) -> None:
    """Remove what a stop after the walk to `finished` may have left of it."""
    about = {key: value for key, value in read_meta(finished).items() if key != "ffns"}
    find_shelf(place.walk, Path(options.hidden_cache or place.walk), place.path, about, ALONE).clear()


def _make_plan(recipe: Recipe, place: RunFolder, dense: Dense, options: Options, *, keep: bool) -> Plan:
    """Decide; for allocation sensitivity with the model. `keep` what is measured, for the next plan."""
    stats, _ = read_stats(place.stats)
    stats_digest = digest(place.stats)
    if recipe.plan.allocation != "sensitivity":
        return planning.make_plan(recipe, dense, stats, stats_digest)
    section, layout = recipe.plan, dense.layout
    prepare(recipe, dense, options, ALONE, "plan")  # for its checks
    tokens, _ = counted_tokens(recipe, place, dense, options)
    model = load_dense(dense, recipe, options)
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
        tokens = ranks.tensor_of_first(counted_tokens(recipe, place, dense, options)[0] if ranks.first else None)
        if ranks.first:
            _save_recipe(place, recipe)
        refitting.refit(recipe, dense, walker, read_plan(place.plan), tokens, place, setup.agreed())
    elif ranks.first:
        _sweep(place, place.values, options)
    found: dict[str, Any] = ranks.data_of_first(read_meta(place.values) if ranks.first else None)
    return found


def _export(recipe: Recipe, place: RunFolder, dense: Dense, *, again: bool = False) -> None:
    if not again and _current(place, recipe, "export"):
        return
    values = read_tensors(place.values) if recipe.refit.method != "none" else None
    verified = exporting.export(recipe, dense, read_plan(place.plan), values, place)
    log.info("export: %s: %d tensors verified; %s", place.model, verified.tensors, verified.loads)


def _recover(recipe: Recipe, place: RunFolder, dense: Dense, options: Options, ranks: Ranks) -> dict[str, Any]:
    if recipe.recover.method == "none":
        if ranks.first:
            Kept(place.recovering, {}).clear()  # what a training that was stopped may have left
        return {}
    if not ranks.data_of_first(_current(place, recipe, "recover") if ranks.first else None):
        tokens, held = None, dict[str, Tensor]()
        if ranks.first:
            judged = evaluating.judged_texts(recipe.evaluate, evaluating.task_manager(recipe.evaluate))
            counted, _ = counted_tokens(recipe, place, dense, options)
            tokens, held = recovery_tokens(recipe, place, dense, options, counted, judged)
            if read_json(place.model / "kvprune.json").get("recover"):
                log.info("recover: model/ was trained by other settings, which is given up; exporting it anew first")
                _export(recipe, place, dense, again=True)
            _save_recipe(place, recipe)
        names = ranks.data_of_first(list(held))
        course = make_course(
            recipe,
            dense,
            options,
            ranks,
            ranks.tensor_of_first(tokens),
            {name: ranks.tensor_of_first(held.get(name)) for name in names},
        )
        trust = options.trust_remote_code or configuring.is_own_code(place, dense)
        recovering.recover(recipe, dense, course, place, trust)
        ranks.all_true(True)
    return dict(read_json(place.recovered))


def _evaluate(recipe: Recipe, place: RunFolder, dense: Dense, options: Options) -> dict[str, Any]:
    if _current(place, recipe, "evaluate"):
        return dict(read_json(place.results))
    if recipe.recover.method != "none":
        _tell_unsearched(place, recipe)
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    manager = evaluating.task_manager(recipe.evaluate)
    judge = evaluating.Judge(recipe.evaluate, tokenizer, manager, options.batch_size)
    trust = options.trust_remote_code or configuring.is_own_code(place, dense)
    results = evaluating.evaluate(recipe, dense, judge, place, options.own_device(), trust_remote_code=trust)
    _save_recipe(place, recipe)
    write_json(place.results, results)
    return results


def _tell_unsearched(place: RunFolder, recipe: Recipe) -> None:
    """Warn of tasks whose documents may have been trained on: a recovery leaves out those of the tasks of its time."""
    seen = read_json(place.recovered).get("judged", {"tasks": [], "limit": None})
    now = recovering.judged(recipe.evaluate)
    fewer = seen["limit"] is not None and (now["limit"] is None or now["limit"] > seen["limit"])
    if fewer or not set(now["tasks"]) <= set(seen["tasks"]) or seen.get("files") != now["files"]:
        some = f"the first {seen['limit']} documents" if seen["limit"] else "documents"
        log.warning(
            "evaluate: the text of the recovery was searched for %s of %s only: it may hold others that are judged on",
            some,
            ", ".join(seen["tasks"]) or "no task",
        )
