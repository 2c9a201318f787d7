"""The tables of a page: of a comparison and of runs, in plain text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprune.artifacts import UNITS, budget_words
from kvprune.card import mean_errors
from kvprune.pages.words import NONE, figure, share, whole
from kvprune.reading.firing import THRESHOLDS, grouped
from kvprune.results.comparison import TRAINED_APART, ordered, training
from kvprune.results.table import ridge_words

BEST = "★"
DENSE = "dense"
Runs = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; the first cell of a row heads it. `words` are columns of words, which may wrap."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = field(default_factory=tuple)


def side_by_side(data: dict[str, Any]) -> Table:
    """Sizes, metrics and speed of all runs of a comparison; the best are marked."""
    columns = data["columns"]
    rows = [[DENSE, *(number(column["dense"]) for column in columns)]]
    for run in ordered(data):
        cells = [number(column["runs"][run]) + f" {BEST}" * (run in column["best"]) for column in columns]
        rows.append([f"{run}{training(data, run)}", *cells])
    heads = [column["name"].replace(" x ", " × ") for column in columns]
    trained = TRAINED_APART if data["trained"] else ""
    return Table(f"Sizes, metrics and speed ({BEST}: best of the runs{trained})", ["Run", *heads], rows)


def number(value: float) -> str:
    """Whole numbers in full, others to four figures."""
    if isinstance(value, int) or 1000 <= value < 1e6:
        return whole(value)
    return f"{value:.4g}".replace("-", "−")


def verdicts(data: dict[str, Any], against: str) -> Table:
    """How far every run is from another, in each metric, and whether that is more than chance."""
    level = f"{data['level']:.0%}"
    rows = [
        [
            item["run"],
            f"{item['task']}: {item['metric'].replace('_', ' ')}",
            whole(item["documents"]),
            apart(item["value"], item["kind"] == "ratio"),
            interval(item["interval"], item["kind"] == "ratio"),
            interval(item["corrected"], item["kind"] == "ratio"),
            item["verdict"],
        ]
        for item in data["differences"]
        if item["against"] == against
    ]
    heads = ["Run", "Metric", "Documents", "Apart", f"{level} interval", "Corrected interval", "Verdict"]
    return Table(f"Against {against}, paired by document", heads, rows, words=(1, 6))


def apart(value: float, ratio: bool) -> str:
    """A ratio or a difference."""
    text = f"× {value:.4g}" if ratio else f"{value:+.4g}" if value else "0"
    return text.replace("-", "−")


def interval(ends: Sequence[float] | None, ratio: bool) -> str:
    """The two ends of an interval."""
    return f"{apart(ends[0], ratio)} to {apart(ends[1], ratio).removeprefix('× ')}" if ends else NONE


def fronts(data: dict[str, Any]) -> Table:
    """The Pareto fronts of a comparison."""
    pareto = data["pareto"]
    rows = [[cost, ", ".join(names) or NONE] for cost, names in pareto["fronts"].items()]
    title = f"Pareto fronts of {pareto['task']}: {pareto['metric'].replace('_', ' ')}, the cheapest first"
    return Table(title, ["Against", "Runs that no other one beats"], rows, words=(1,))


def results(run: dict[str, Any]) -> Table:
    """Dense against slim: sizes, every metric with an interval where there is one, and speed."""
    found = run["results"]
    dense, slim = found["dense"], found["slim"]
    rows = [
        [label, whole(dense[key]), whole(slim[key]), _ratio(slim[key], dense[key]), NONE]
        for key, label in (("params", "parameters"), ("bytes", "bytes on disk"))
    ]
    rows += [_figure(item) for item in run.get("figures", ())]
    key = "prefill_tokens_per_second"
    rows.append(["prefill tokens/s", whole(dense[key]), whole(slim[key]), _ratio(slim[key], dense[key]), NONE])
    return Table("Dense against slim", ["Measured", "Dense", "Slim", "Slim against dense", "95% interval"], rows)


def _figure(item: dict[str, Any]) -> list[str]:
    name = f"{item['task']}: {item['metric'].replace('_', ' ')}"
    values = [number(item[which]) for which in ("dense", "slim")]
    if item["interval"] is None:
        return [name, *values, _ratio(item["slim"], item["dense"]), NONE]
    value, *ends = item["interval"]
    return [name, *values, apart(value, item["ratio"]), interval(ends, item["ratio"])]


def _ratio(value: float, base: float) -> str:
    return f"× {value / base:.4g}" if base > 0 <= value else NONE


def budgets(runs: Runs) -> Table:
    """What was asked for, and the sizes that came of it, of the runs that have a plan."""
    planned = [run for run in runs if "plan" in run]
    before = planned[0]["plan"]["before"]
    rows = [[DENSE, NONE, *(whole(before[unit]) for unit in UNITS)]]
    for run in planned:
        plan = run["plan"]
        sizes = [f"{whole(plan['after'][unit])} ({share(plan['after'][unit] / before[unit])})" for unit in UNITS]
        rows.append([run["name"], budget_words(plan["budget"]), *sizes])
    return Table("Budgets as requested, and sizes with what is kept", ["Run", "Requested", *UNITS.values()], rows)


def widths(runs: Runs) -> Table:
    """Slots of each FFN, of a layer's experts taken together, in all runs."""
    planned = [run for run in runs if "widths" in run]
    kept = [{item["name"]: item["after"] for item in run["widths"]} for run in planned]
    rows = [
        [item["name"], whole(item["before"]), *(whole(each.get(item["name"])) for each in kept)]
        for item in planned[0]["widths"]
    ]
    return Table("Slots of each feed-forward network", ["FFN", DENSE, *(run["name"] for run in planned)], rows)


def firing(run: dict[str, Any]) -> Table:
    """How the slots of each FFN fire."""
    levels = [f"{threshold:g}" for threshold in THRESHOLDS]
    rows = [
        [
            item["name"],
            share(item["over_peak"]),
            *(share(item["over_rms"][level]) for level in levels),
            share(item["rare_1000"]),
            share(item["rare_10000"]),
            figure(item["gini"]),
            f"{whole(item['effective'])} of {whole(item['width'] * max(1, item['experts'] - item['never_routed']))}",
        ]
        for item in run["curves"]
    ]
    over = [f"Over {level} × rms" for level in levels]
    rare = ["Fire on < 1/1,000", "Fire on < 1/10,000"]
    heads = ["FFN", "Over 1/10 of the peak", *over, *rare, "Gini", "Effective slots"]
    return Table("Shares of the slots: those that a token needs, and those that rarely fire", heads, rows)


def refits(run: dict[str, Any]) -> Table:
    """Errors on held-back tokens before and after the refit of a run."""
    rows = []
    for name, before, after, members in refit_errors(run):
        ridge, remark = ridge_words(members)
        rows.append([name, f"{before:.4f}", f"{after:.4f}", ridge, remark or NONE])
    caption = f"Refit of {run['name']}: error on held-back tokens, as a share of what the dense FFN writes"
    return Table(caption, ["FFN", "Before", "After", "Ridge", "Remark"], rows, words=(4,))


def refit_errors(run: dict[str, Any]) -> list[tuple[str, float, float, list[dict[str, Any]]]]:
    """Of each FFN, or a layer's experts: name, mean errors before and after, and what is known of its members."""
    ffns = run.get("refit") or []
    groups = {name: [ffns[at] for at in places] for name, places in grouped(ffns).items()}
    return [(name, *mean_errors(members), members) for name, members in groups.items()]


def recovery(run: dict[str, Any]) -> Table:
    """The looks at held-out text during the training of a run."""
    rows = [
        [whole(look["step"]), name, f"{seen['loss']:.4f}", *(number(math.exp(seen[key])) for key in ("slim", "dense"))]
        for look in run["recover"]["looks"]
        for name, seen in look["texts"].items()
    ]
    heads = ["Step", "Held-out text", "KL to the dense model", "Perplexity", "Perplexity of the dense model"]
    return Table(f"Training of {run['name']}", heads, rows, words=(1,))


def judged(runs: Runs) -> Table:
    """How each task was evaluated; where runs differ, all values."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        for item in run.get("judged", ()):
            seen = found.setdefault(item["task"], {})
            for key, value in item.items():
                if value not in seen.setdefault(key, []):
                    seen[key].append(value)
    keys = list(dict.fromkeys(key for item in found.values() for key in item if key != "task"))
    rows = [[task, *(" / ".join(item.get(key, [NONE])) for key in keys)] for task, item in found.items()]
    return Table("How each task was evaluated", ["Task", *(_head(key) for key in keys)], rows, words=(7,))


def varied(runs: Runs) -> Table | None:
    """The recipe values in which runs differ."""
    flat = [_flat(run["recipe"]) for run in runs]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    some = [key for key in keys if len({each.get(key, NONE) for each in flat}) > 1]
    if not some:
        return None
    rows = [[run["name"], *(each.get(key, NONE) for key in some)] for run, each in zip(runs, flat, strict=True)]
    return Table("Recipe values in which the runs differ", ["Run", *some], rows)


def _flat(tree: Any, path: str = "") -> dict[str, str]:
    if isinstance(tree, dict) and tree:
        return {key: value for name, item in tree.items() for key, value in _flat(item, f"{path}.{name}").items()}
    return {path[1:]: NONE if tree is None else str(tree)}


def stages(run: dict[str, Any]) -> Table:
    """The state of each stage of a run."""
    rows = [[state["stage"], state["status"], state["reason"] or NONE] for state in run["stages"]]
    return Table(f"Stages of {run['name']}", ["Stage", "Status", "Reason"], rows, words=(1, 2))


def versions(run: dict[str, Any]) -> Table:
    """What a run was made with."""
    return Table(f"Versions that made {run['name']}", ["Library", "Version"], list(run["made_with"].items()))


def digests(run: dict[str, Any]) -> Table:
    """The digests of a run's files."""
    files = run["digests"] | {f"model/{name}": value for name, value in run.get("files", {}).items()}
    return Table(f"Files of {run['name']}", ["File", "SHA-256"], list(files.items()), words=(1,))


def _head(key: str) -> str:
    return key if key == "lm-eval" else key[:1].upper() + key[1:]
