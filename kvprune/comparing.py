"""`kvprune compare`: finished runs of one model side by side, and whether they differ by more than chance."""

import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from kvprune.artifacts import UNITS, RunFolder, read_json, result_file, samples_file
from kvprune.errors import KvpruneError, StaleError
from kvprune.pages.frame import check_target
from kvprune.progress import log
from kvprune.recipe import load_recipe
from kvprune.results.intervals import LEVEL
from kvprune.results.pairs import FEWEST, Scored, apart, first_other, front, read_samples, scored, told
from kvprune.schema import Recipe
from kvprune.staleness import first_lacking

FORMAT = "kvprune.compare"
VERSION = 1
PREFILL = "prefill_tokens_per_second"
# Values of a result's key that change what it means, and the recipe's key where there is one.
CONDITIONS = {
    "limit": "evaluate.limit",
    "num_fewshot": "evaluate.num_fewshot",
    "max_length": "evaluate.max_length",
    "apply_chat_template": "evaluate.apply_chat_template",
    "system_instruction": "evaluate.system_instruction",
    "dtype": "",
    "device": "",
}


@dataclass(frozen=True)
class _Run:
    """A run that is compared: its folder, recipe, results, checkpoint (kvprune.json) and full results by task."""

    name: str
    place: RunFolder
    recipe: Recipe
    results: dict[str, Any]
    about: dict[str, Any]
    tasks: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Metric:
    """A metric that all runs have."""

    task: str
    name: str
    higher: bool | None  # if higher is better; None where lm-eval does not say

    def of(self, run: _Run, which: str) -> float:
        """Its value in a run's results, of dense or slim."""
        return float(run.results[which]["tasks"][self.task][self.name])


def compare(
    runs: Sequence[str | Path], against: str | Path | None = None, *, html: str | Path | None = None
) -> dict[str, Any]:
    """Finished runs of one model side by side: sizes, metrics, speed, paired differences and Pareto fronts.

    Differences are those to `against`, by default the first run, and to the dense model, document by document. `html`
    is a file for a page that shows all of it.
    Returns plain data. Raises KvpruneError where the runs cannot be compared, saying in what they differ.
    """
    if html is not None:
        check_target(Path(html))
    paths, reference = _chosen(runs, against)
    found = [_open(path, name) for path, name in zip(paths, _names(paths), strict=True)]
    base = found[reference]
    for run in found:
        _check_alike(run, base)
    for run in found:
        if (state := first_lacking(run.place, run.recipe)) is not None:
            raise _unfinished(run.place, str(state))
    tasks = [task for task in base.tasks if all(task in run.tasks for run in found)]
    if not tasks:
        raise KvpruneError(f"{base.place.path}: has no evaluate.tasks in common with the others; evaluate them alike")
    metrics = [metric for task in tasks for metric in _metrics(base, task)]
    differences, comparisons = _differences(found, base, metrics)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "model": base.results["model"],
        "runs": {run.name: str(run.place.path) for run in found},
        "trained": {run.name: trained for run in found if (trained := _trained(run))},
        "against": base.name,
        "left_out": sorted({task for run in found for task in run.tasks} - set(tasks)),
        "columns": list(_columns(found, base, metrics)),
        "differences": differences,
        "level": LEVEL,
        "correction": {"method": "Bonferroni", "comparisons": comparisons},
        "pareto": _pareto(found, next((metric for metric in metrics if metric.higher is not None), metrics[0])),
    }
    if html is not None:
        from kvprune.results.report import write_report  # it imports torch, and comparing needs none

        write_report(Path(html), [(run.name, run.place, run.recipe) for run in found], data)
        log.info("compare: %s", html)
    return data


def _chosen(runs: Sequence[str | Path], against: str | Path | None) -> tuple[list[Path], int]:
    """The folders of all runs, and which of them is the one that the others are compared with."""
    paths = [Path(run) for run in runs]
    resolved = [path.resolve() for path in paths]
    for at, path in enumerate(resolved):
        if path in resolved[:at]:
            raise KvpruneError(f"{paths[at]}: is named twice; name each run once")
    if against is not None and Path(against).resolve() not in resolved:
        paths, resolved = [Path(against), *paths], [Path(against).resolve(), *resolved]
    if len(paths) < 2:
        only = paths[0] if paths else "no run"
        raise KvpruneError(f"{only}: is all there is to compare; name two runs or more (kvprune show tells of one)")
    return paths, 0 if against is None else resolved.index(Path(against).resolve())


def _names(paths: Sequence[Path]) -> list[str]:
    """What the runs are called: their folders' names, or whole paths where two have one name or one the dense one's."""
    names = [path.resolve().name for path in paths]
    plain = len(set(names)) == len(names) and "dense" not in names
    return names if plain else ["./dense" if str(path) == "dense" else str(path) for path in paths]


def _open(path: Path, name: str) -> _Run:
    """A run that has results. Raises KvpruneError where the folder is no run, or an unfinished one."""
    place = RunFolder(path)
    if not place.recipe.is_file():
        raise KvpruneError(f"{path}: not a run folder (no recipe.yaml); name folders that kvprune run or sweep made")
    recipe = load_recipe(place.recipe)
    card = place.model / "kvprune.json"
    if not place.results.is_file() or not card.is_file():
        raise _unfinished(place, str(first_lacking(place, recipe)))
    results = read_json(place.results)
    try:
        files = {task: result_file(place.eval / "slim", task) for task in results["slim"]["tasks"]}
        return _Run(name, place, recipe, results, read_json(card), {task: read_json(files[task]) for task in files})
    except (KeyError, TypeError):
        raise KvpruneError(f"{place.results}: not results of kvprune; run: kvprune evaluate {path}") from None


def _unfinished(place: RunFolder, state: str) -> StaleError:
    return StaleError(f"{place.path}: unfinished: {state}; run: kvprune run {place.recipe} -o {place.path}")


def _check_alike(run: _Run, base: _Run) -> None:
    """Refuse two runs whose figures do not mean the same. Raises KvpruneError with both values."""
    mine, theirs = (each.about["inputs"]["model"] for each in (run, base))
    if mine != theirs:
        titles = [_title(each) for each in (run, base)]
        what = "other files of it" if titles[0] == titles[1] else titles[1]
        raise KvpruneError(
            f"{run.place.path}: is of the base model {titles[0]}, and {base.place.path} of {what}; "
            "compare runs of one model"
        )
    for task in run.tasks:
        if task in base.tasks:
            there = _conditions(base.tasks[task])
            for name, value in _conditions(run.tasks[task]).items():
                if value != there[name]:
                    _refuse(run, base, task, name, (value, there[name]))


def _title(run: _Run) -> str:
    model = run.about["model"]
    return f"{model['title']}{' at commit ' + model['commit'] if model['commit'] else ''}"


def _conditions(result: dict[str, Any]) -> dict[str, Any]:
    """What the figures of a task rest on beside the slim model, by what people call it."""
    key, found = result["key"], result["lm_eval"]
    tasks = key["tasks"]
    return {
        **{name: key[name] for name in CONDITIONS},
        "few-shot examples": found.get("n-shot"),
        "task version": found.get("versions"),
        "lm-eval": tasks["versions"]["lm_eval"],
        "Python, whose documentation is the builtin text,": tasks["python"],
        "digest of evaluate.include_path": tasks["files"],
        "digest of the builtin task": tasks["builtin"],
    }


def _refuse(run: _Run, base: _Run, task: str, name: str, values: tuple[Any, Any]) -> NoReturn:
    mine, theirs = (repr(value[:12] if name.startswith("digest") and value else value) for value in values)
    command = f"kvprune evaluate {run.place.path}"
    if key := CONDITIONS.get(name):
        mend = f"run: {command} --set {shlex.quote(f'{key}={json.dumps(values[1])}')}"
    elif name == "dtype":
        mend = "compare runs of one dtype"
    elif name == "device":  # which makes no evaluation stale
        mend = f"remove {run.place.results} and run: {command} --device {values[1]}"
    else:
        mend = f"evaluate both alike, with: {command}"
    raise KvpruneError(f"{run.place.path}: {task}: {name} is {mine}, and {theirs} in {base.place.path}; {mend}")


def _metrics(run: _Run, task: str) -> Iterator[_Metric]:
    """The metrics of a task that tell something of their own, and what is better in each."""
    directions = run.tasks[task]["lm_eval"].get("higher_is_better") or {}
    known = {name: higher for some in directions.values() for name, higher in some.items()}
    for name in told(run.results["slim"]["tasks"][task]):
        bare = name.rpartition(" ")[2].partition(",")[0]
        yield _Metric(task, name, False if bare == "token_perplexity" else known.get(bare))


def _trained(run: _Run) -> dict[str, Any] | None:
    """What a run's model was trained on after the export, and for how long; None where nothing was."""
    found = run.about.get("recover")
    return {key: found[key] for key in ("tokens", "seconds", "learning")} if found else None


def _columns(runs: Sequence[_Run], base: _Run, metrics: Sequence[_Metric]) -> Iterator[dict[str, Any]]:
    """The columns of the table: the dense model's value, each run's, and which runs are best.

    Of the trained ones and of the others apart: what learned from text is no match for what did not.
    """
    groups = [{run.name for run in runs if bool(_trained(run)) is trained} for trained in (False, True)]
    for unit, label in UNITS.items():
        after = {run.name: run.about["budget"]["after"][unit] for run in runs}
        yield _column(label, base.about["budget"]["before"][unit], after, False, groups) | {"unit": unit}
    for metric in metrics:
        values = {run.name: metric.of(run, "slim") for run in runs}
        about = {"task": metric.task, "metric": metric.name}
        label = f"{metric.task}: {metric.name.replace('_', ' ')}"
        yield _column(label, metric.of(base, "dense"), values, metric.higher, groups) | about
    speeds = {run.name: run.results["slim"][PREFILL] for run in runs}
    yield _column("prefill tokens/s", base.results["dense"][PREFILL], speeds, True, groups)
    yield _column("prefill x dense", 1.0, {run.name: _speed_up(run) for run in runs}, True, groups)


def _column(
    name: str, dense: float, values: dict[str, float], higher: bool | None, groups: Sequence[set[str]]
) -> dict[str, Any]:
    best = [run for group in groups for run in _best({run: values[run] for run in values if run in group}, higher)]
    return {"name": name, "higher_is_better": higher, "dense": dense, "runs": values, "best": best}


def _best(values: dict[str, float], higher: bool | None) -> list[str]:
    """The runs with the best value, where they differ in it and it is known what is better."""
    finite = [value for value in values.values() if math.isfinite(value)]
    if higher is None or len(set(finite)) < 2:
        return []
    best = max(finite) if higher else min(finite)
    return [run for run, value in values.items() if value == best]


def _speed_up(run: _Run) -> float:
    """The slim model's prefill over the dense one's, which was measured in turn with it."""
    return float(run.results["slim"][PREFILL] / run.results["dense"][PREFILL])


def _differences(runs: Sequence[_Run], base: _Run, metrics: Sequence[_Metric]) -> tuple[list[dict[str, Any]], int]:
    """Every run against `base` and the dense model, in every metric that can be paired; and the number of verdicts."""
    samples = {(run.name, which): _scores(run, which, metrics) for run in runs for which in ("slim", "dense")}
    pairs = []
    for metric in metrics:
        against_base = [(run, samples[base.name, "slim"], base.name) for run in runs if run is not base]
        against_dense = [(run, samples[run.name, "dense"], "dense") for run in runs]
        for run, there, name in chain(against_base, against_dense):
            one, other = samples[run.name, "slim"][metric], there[metric]
            if one is not None and other is not None and one.ratio == other.ratio:
                _check_documents(run, name, metric, one, other)
                pairs.append((run, name, metric, one, other))
    comparisons = sum(len(one.sums) >= FEWEST for *_, one, _ in pairs)
    told_apart = apart([(one, other, metric.higher) for _, _, metric, one, other in pairs], comparisons)
    return [
        {
            "run": run.name,
            "against": name,
            "task": metric.task,
            "metric": metric.name,
            "documents": len(one.sums),
            "kind": "ratio" if one.ratio else "difference",
            **asdict(found),
        }
        for (run, name, metric, one, _), found in zip(pairs, told_apart, strict=True)
    ], comparisons


def _scores(run: _Run, which: str, metrics: Sequence[_Metric]) -> dict[_Metric, Scored | None]:
    """What the dense or slim model of a run got, document by document, in each metric that allows it."""
    rows = {task: read_samples(samples_file(run.place.eval / which, task)) for task in {each.task for each in metrics}}
    return {metric: scored(rows[metric.task], metric.name, metric.of(run, which)) for metric in metrics}


def _check_documents(run: _Run, against: str, metric: _Metric, one: Scored, other: Scored) -> None:
    if (found := first_other(one, other)) is not None:
        at, mine, theirs = found
        raise KvpruneError(
            f"{run.place.path}: {metric.task}: from document {at} on others were judged than in {against} "
            f"({mine} and {theirs}); evaluate both alike"
        )


def _pareto(runs: Sequence[_Run], quality: _Metric) -> dict[str, Any]:
    """The runs that no other one beats in the quality and at the same time in size or speed.

    None where it is not known what is better.
    """
    if quality.higher is None:
        return {"task": quality.task, "metric": quality.name, "fronts": {}}
    sign = 1 if quality.higher else -1
    costs: dict[str, Callable[[_Run], float]] = {
        "parameters": lambda run: run.about["budget"]["after"]["total_params"],
        "bytes": lambda run: run.about["budget"]["after"]["bytes"],
        "prefill speed": lambda run: -_speed_up(run),
    }
    fronts = {
        name: front({run.name: (cost(run), sign * quality.of(run, "slim")) for run in runs})
        for name, cost in costs.items()
    }
    return {"task": quality.task, "metric": quality.name, "fronts": fronts}
