"""What `kvprune sweep` did, as text."""

import shlex
from pathlib import Path
from typing import Any

from kvprune.results.table import grid


def render(data: dict[str, Any]) -> str:
    """A line a run: what varies, size, the main metric of each task, how it ended; then errors, and what is next."""
    runs = data["runs"]
    parts = [grid(_rows(runs))]
    parts += [f"{run['name']}: {run['error']}" for run in runs if run["error"]]
    if all(run["status"] == "not run" for run in runs):
        parts.append(f"dry run: {len(runs)} combinations, nothing was run")
    done = [run["run"] for run in runs if run["status"] == "done"]
    if len(done) > 1:
        every = f"{shlex.quote(data['folder'])}/*"
        these = every if len(done) == len(runs) else " ".join(map(shlex.quote, done))
        parts.append(f"next: kvprune compare {these}")
    return "\n".join(parts)


def _rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    keys, tasks = list(runs[0]["varied"]), _tasks(runs)
    head = ["run", *keys]
    if any(run["slim"] for run in runs):
        head += ["parameters kept", "bytes", *(f"{task}: {metric.replace('_', ' ')}" for task, metric in tasks)]
    rows = [[*head, "status"]]
    for run in runs:
        row = [Path(run["run"]).name, *(run["varied"][key] for key in keys)]
        if len(head) > len(row):
            row += _figures(run, tasks)
        rows.append([*row, run["status"]])
    return rows


def _figures(run: dict[str, Any], tasks: list[tuple[str, str]]) -> list[str]:
    dense, slim = run["dense"], run["slim"]
    if slim is None:
        return ["-"] * (2 + len(tasks))
    values = [slim["tasks"].get(task, {}).get(metric) for task, metric in tasks]
    shown = ["-" if value is None else f"{value:.4g}" for value in values]
    return [f"{slim['params'] / dense['params']:.2%}", f"{slim['bytes']:,}", *shown]


def _tasks(runs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every task of any run, with its first metric."""
    found: dict[str, str] = {}
    for run in runs:
        for task, metrics in (run["slim"] or {"tasks": {}})["tasks"].items():
            found.setdefault(task, next(iter(metrics), ""))
    return list(found.items())
