"""Dense against slim, metric by metric, with standard errors and paired intervals from the stored samples."""

import math
import os
from pathlib import Path
from typing import Any

from kvprune.artifacts import RunFolder, read_json, result_file, samples_file
from kvprune.card import Figure
from kvprune.results.pairs import Scored, apart, first_other, read_samples, scored
from kvprune.sources.models import HUB_NAME
from kvprune.stages.evaluate import lm_eval_name

FORMATS = ("json", "csv", "parquet", "text", "arrow")  # loaders of local files, which are no data sets of the Hub
Interval = tuple[float, float, float]


def make_figures(run: RunFolder, results: dict[str, Any]) -> list[Figure]:
    """The results of an evaluated run, with what is known of chance. Raises KvpruneError where a file is broken."""
    return [
        figure
        for task, metrics in results["slim"]["tasks"].items()
        for figure in _task_figures(run, task, results["dense"]["tasks"][task], metrics)
    ]


def _task_figures(run: RunFolder, task: str, dense: dict[str, float], slim: dict[str, float]) -> list[Figure]:
    folders = run.eval / "dense", run.eval / "slim"
    outputs = [_lm_eval(folder, task) for folder in folders]
    intervals = _intervals([samples_file(folder, task) for folder in folders], dense, slim)
    return [
        Figure(
            task,
            metric,
            dense[metric],
            value,
            errors=_errors(outputs, task, metric),
            interval=intervals.get(metric, (None, True))[0],
            ratio=intervals.get(metric, (None, True))[1],
            **_dataset(outputs[1], task, metric),
        )
        for metric, value in slim.items()
    ]


def _intervals(
    files: list[Path], dense: dict[str, float], slim: dict[str, float]
) -> dict[str, tuple[Interval | None, bool]]:
    """By metrics: slim against dense with an interval of enough documents, and whether that is a ratio."""
    if not all(file.is_file() for file in files):
        return {}
    rows = [read_samples(file) for file in files]
    pairs: dict[str, tuple[Scored, Scored, bool | None]] = {}
    for metric, value in slim.items():
        before, after = scored(rows[0], metric, dense[metric]), scored(rows[1], metric, value)
        if before and after and before.ratio == after.ratio and first_other(after, before) is None:
            pairs[metric] = after, before, None
    found = zip(pairs.items(), apart(list(pairs.values()), 1), strict=True)
    return {
        metric: ((item.value, item.interval[0], item.interval[1]) if item.interval else None, after.ratio)
        for (metric, (after, _, _)), item in found
    }


def _lm_eval(folder: Path, task: str) -> dict[str, Any]:
    """What lm-eval said of a task; nothing where the file is gone."""
    file = result_file(folder, task)
    return dict(read_json(file)["lm_eval"]) if file.is_file() else {}


def _parts(task: str, metric: str) -> tuple[str, str, str]:
    """A metric's task as lm-eval calls it (of a tag, one of its own), its name and its filter."""
    own, _, plain = metric.rpartition(" ")
    name, _, kind = plain.partition(",")
    return own or lm_eval_name(task), name, kind or "none"


def _errors(outputs: list[dict[str, Any]], task: str, metric: str) -> tuple[float, float] | None:
    """lm-eval's standard errors, where it has both."""
    own, name, kind = _parts(task, metric)
    found = [
        {**output.get("results", {}), **output.get("groups", {})}.get(own, {}).get(f"{name}_stderr,{kind}")
        for output in outputs
    ]
    known = [value for value in found if isinstance(value, float) and math.isfinite(value)]
    return (known[0], known[1]) if len(known) == 2 else None


def _dataset(output: dict[str, Any], task: str, metric: str) -> dict[str, Any]:
    """The data set of the Hub that a task is made from."""
    config = output.get("configs", {}).get(_parts(task, metric)[0], {})
    path = config.get("dataset_path")
    if not isinstance(path, str) or path in FORMATS or path.startswith(".") or HUB_NAME.fullmatch(path) is None:
        return {}
    if os.path.exists(path):  # noqa: PTH110  (no error for a long name)
        return {}
    split = config.get("test_split") or config.get("validation_split")
    return {"dataset": path, "config": config.get("dataset_name"), "split": split}
