"""`kvprune sweep`: a recipe with several values of its keys, every combination a run folder, on one calibration."""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kvprune import pipeline
from kvprune.artifacts import RunFolder, digest, locked, read_json, read_meta, write_atomic, write_text
from kvprune.errors import KvpruneError
from kvprune.opening import begin, open_checked
from kvprune.options import DEFAULT, Options
from kvprune.progress import log, only_errors, progress
from kvprune.ranks import launched
from kvprune.recipe import dump_recipe, load_recipe, stage_recipe
from kvprune.schema import Recipe
from kvprune.sources.texts import check_text
from kvprune.stages.evaluate import task_manager
from kvprune.stages.sensitivity import describe
from kvprune.staleness import STAGES, first_lacking

FORMAT = "kvprune.sweep"
VERSION = 1
LONGEST = 40  # letters of a value, and
LONGEST_NAME = 120  # of a name, that are written out
CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Combination:
    """One value of every key: what varies and all that is set, as `--set` takes it."""

    name: str
    varied: dict[str, str]
    overrides: list[str]


@dataclass(frozen=True)
class _Planned:
    """A combination with its recipe and run folder."""

    combination: Combination
    recipe: Recipe
    place: RunFolder


@dataclass(frozen=True)
class _Outcome:
    """How a run ended: its results, or why there are none."""

    status: str  # done, failed, not run
    results: dict[str, Any] | None = None
    error: str | None = None


def sweep(
    recipe: str | Path,
    folder: str | Path,
    settings: Sequence[str],
    *,
    dry_run: bool = False,
    options: Options = DEFAULT,
) -> dict[str, Any]:
    """Bring a run folder below `folder` up to date for every combination of `settings` of a recipe file.

    A setting is a key and its values, "plan.budget.keep=0.9,0.8"; a comma in brackets or quotes is part of a value.
    Runs with the same calibration share its files. A run that fails is told, and the others go on.
    With `dry_run` all is checked and nothing is run. Returns plain data. Raises KvpruneError where a combination is
    not valid, before anything is run.
    """
    if launched().count > 1:
        raise KvpruneError("kvprune sweep is the work of one process; torchrun is for calibrate, refit and recover")
    root = Path(folder)
    if RunFolder(root).recipe.is_file():
        raise KvpruneError(f"{folder}: is a run folder; name a folder for the runs, with another -o")
    planned = _plan_all(recipe, root, combinations(settings))
    _check_all(planned, options)
    outcomes = {each.combination.name: _Outcome("not run") for each in planned}
    if not dry_run:
        # Those that collect most come first, since their statistics serve the others too.
        order = sorted(planned, key=lambda each: -len(each.recipe.calibrate.collect))
        for at, each in enumerate(progress(order, total=len(order), label="sweep", unit="runs"), 1):
            log.info("sweep: %s (%d of %d)", each.combination.name, at, len(order))
            outcomes[each.combination.name] = _run(each, root, options)
    return {
        "format": FORMAT,
        "version": VERSION,
        "recipe": str(recipe),
        "folder": str(folder),
        "runs": [_told(each, outcomes[each.combination.name]) for each in planned],
    }


def combinations(settings: Sequence[str]) -> list[Combination]:
    """All combinations of `settings`, the last one's values changing fastest.

    Raises KvpruneError where a setting is no "key=value,value", names a key again, or where nothing varies.
    """
    values: dict[str, list[str]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        found = split(text)
        if not equals or not key or (len(found) > 1 and not all(found)):
            raise KvpruneError(f"--set {setting}: should be key=value,value, as in --set plan.budget.keep=0.9,0.8")
        if key in values:
            raise KvpruneError(f"--set {setting}: {key} is set twice; give all its values at once, with commas between")
        if twice := [value for at, value in enumerate(found) if value in found[:at]]:
            raise KvpruneError(f"--set {setting}: {twice[0]} is there twice; give each value once")
        values[key] = found
    varied = [key for key, some in values.items() if len(some) > 1]
    if not varied:
        raise KvpruneError(
            "nothing varies: give a key several values, as in --set plan.budget.keep=0.9,0.8; "
            "for a single run use: kvprune run"
        )
    labels = _labels(varied)
    made = []
    for chosen in product(*values.values()):
        of = dict(zip(values, chosen, strict=True))
        changing = {key: of[key] for key in varied}
        name = _short(",".join(f"{labels[key]}={_safe(value)}" for key, value in changing.items()), LONGEST_NAME)
        made.append(Combination(name, changing, [f"{key}={value}" for key, value in of.items()]))
    return made


def split(text: str) -> list[str]:
    """The values of `text` between commas, but for commas within brackets or quotes, which stay."""
    values, quote = [""], ""
    closing: list[str] = []
    for letter in text:
        if letter == "," and not closing and not quote:
            values.append("")
            continue
        before = values[-1].rstrip()[-1:]
        values[-1] += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and before in ("", *"[{(,:"):  # elsewhere it is an apostrophe
            quote = letter
        elif letter in CLOSING:
            closing.append(CLOSING[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
    return [value.strip() for value in values]


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """The last word of each key, and as many before it as tell it from the others."""
    labels = {}
    for key in keys:
        parts = key.split(".")
        tails = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        tail = next((tail for tail in tails if not any(other.endswith(f".{tail}") for other in others)), key)
        labels[key] = _safe(tail)
    return labels


def _safe(value: str) -> str:
    """A value as part of a file's name: itself, or like it and with a digest that tells it from others like it."""
    made = re.sub(r"[^\w.+-]+", "-", value.rpartition("/")[2] or value, flags=re.ASCII).strip("-")
    return value if made == value and len(value) <= LONGEST else f"{made[:LONGEST]}-{_mark(value)}".lstrip("-")


def _short(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[:longest]}-{_mark(name)}"


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _plan_all(recipe: str | Path, root: Path, made: Sequence[Combination]) -> list[_Planned]:
    """The recipe and run folder of every combination. Raises KvpruneError with every problem and whose it is."""
    planned: list[_Planned] = []
    problems: dict[str, list[str]] = {}
    for combination in made:
        try:
            whole = load_recipe(recipe, combination.overrides)
            planned.append(_Planned(combination, *begin(whole, root / combination.name, None)))
            if (same := next((each for each in planned[:-1] if each.recipe == whole), None)) is not None:
                raise KvpruneError(f"is the same recipe as {same.combination.name}; give each value once")
            for source in whole.calibrate.text:
                check_text(source)
        except KvpruneError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(combination.name)
    _refuse(problems, len(made))
    for at, each in enumerate(planned):
        if each.recipe.evaluate not in [other.recipe.evaluate for other in planned[:at]]:
            try:
                task_manager(each.recipe.evaluate)  # a misspelt task shows now
            except KvpruneError as error:
                raise KvpruneError(f"{each.combination.name}: {error}") from None
    return planned


def _check_all(planned: Sequence[_Planned], options: Options) -> None:
    """Check every combination as its run does. Raises KvpruneError with every problem and whose it is."""
    problems: dict[str, list[str]] = {}
    for each in progress(planned, total=len(planned), label="check", unit="recipes"):
        try:
            with only_errors():  # its run tells
                open_checked(each.recipe, each.place, options, stages=("calibrate", "refit", "recover"))
        except KvpruneError as error:
            problems.setdefault("; ".join(str(error).splitlines()), []).append(each.combination.name)
    _refuse(problems, len(planned))


def _refuse(problems: Mapping[str, Sequence[str]], total: int) -> None:
    if problems:
        raise KvpruneError("\n".join(_problem(line, names, total) for line, names in problems.items()))


def _problem(line: str, names: Sequence[str], total: int) -> str:
    if len(names) == total:
        return line
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}: {line}"


def _run(each: _Planned, root: Path, options: Options) -> _Outcome:
    """One run, on a calibration that is there where one is. An error is its outcome."""
    try:
        _share(each, root)
        return _Outcome("done", results=pipeline.run(each.recipe, each.place.path, options=options))
    except Exception as error:  # noqa: BLE001  (it is told, and the others go on)
        kind = "" if isinstance(error, KvpruneError) else f"{type(error).__name__}: "
        what = kind + "; ".join(str(error).splitlines())
        log.error("sweep: %s failed: %s", each.combination.name, what)
        log.debug("sweep: where it failed:", exc_info=True)
        return _Outcome("failed", error=what)


def _share(each: _Planned, root: Path) -> None:
    """Put statistics, own samples and measured losses of other runs below `root` into a run folder, where they fit."""
    place, recipe = each.place, each.recipe
    others = [RunFolder(path.parent) for path in sorted(root.glob("*/stats.safetensors")) if path.parent != place.path]
    with locked(place):
        if not _calibrated(place, recipe):
            source = next((other for other in others if _calibrated(other, recipe)), None)
            alike = source or next((other for other in others if _same_text(other, recipe)), None)
            if alike is None:
                return
            write_text(place.recipe, dump_recipe(recipe))
            if alike.samples.is_file():
                _put(alike.samples, place.samples)
            if source is None:
                return
            _put(source.stats, place.stats)
            log.info("sweep: the calibration is that of %s", source.path.name)
        if recipe.plan.allocation == "sensitivity":
            wanted = describe(recipe, digest(place.stats))
            if not _measured(place, wanted):
                source = next((other for other in others if _measured(other, wanted)), None)
                if source is not None:
                    _put(source.sensitivity, place.sensitivity)


def _calibrated(place: RunFolder, recipe: Recipe) -> bool:
    """Whether the statistics of a run folder are what `recipe` would count."""
    try:
        return first_lacking(place, recipe, STAGES[:1]) is None
    except KvpruneError:  # a broken file: the run that it is of says so
        return False


def _same_text(place: RunFolder, recipe: Recipe) -> bool:
    """Whether a run folder was calibrated on the same tokens, whatever was collected of them."""
    try:
        then, now = read_meta(place.stats)["recipe"], stage_recipe(recipe, "calibrate")
    except KvpruneError:
        return False
    for values in (then, now):
        values["calibrate"].pop("collect", None)
    return bool(then == now)


def _measured(place: RunFolder, about: Mapping[str, Any]) -> bool:
    return place.sensitivity.is_file() and read_json(place.sensitivity).get("provenance") == about


def _put(source: Path, target: Path) -> None:
    """One file in two places: a hard link, or a copy where the disk has none. Neither is ever written to again."""
    write_atomic(target, partial(_link, source))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _told(each: _Planned, outcome: _Outcome) -> dict[str, Any]:
    """What is told of one run: where it is, what varies, and sizes and metrics where it is done."""
    found = outcome.results
    return {
        "name": each.combination.name,
        "run": str(each.place.path),
        "varied": each.combination.varied,
        "status": outcome.status,
        "error": outcome.error,
        "dense": {key: found["dense"][key] for key in ("params", "bytes", "tasks")} if found else None,
        "slim": {key: found["slim"][key] for key in ("params", "bytes", "tasks")} if found else None,
    }
