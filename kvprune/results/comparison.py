"""What `kvprune compare` found, as text."""

from typing import Any

from kvprune.results.table import grid

TRAINED_APART = ", trained ones and others apart"


def render(data: dict[str, Any]) -> str:
    """The table of runs, their differences, and the Pareto fronts."""
    note = f" (dense is {data['model']['note']})" if data["model"]["note"] else ""
    parts = [
        f"{data['model']['title']}{note}",
        "",
        _table(data),
        f"* best of the runs{TRAINED_APART if data['trained'] else ''}",
        "",
    ]
    if data["left_out"]:
        parts += [f"not in all runs, and left out: {', '.join(data['left_out'])}", ""]
    for against in (data["against"], "dense"):
        rows = [item for item in data["differences"] if item["against"] == against]
        if rows:
            parts += [_differences(against, rows, data["level"]), ""]
    parts += [*remarks(data), "", _fronts(data["pareto"])]
    return "\n".join(parts)


def _table(data: dict[str, Any]) -> str:
    columns = data["columns"]
    heads = [_head(column) for column in columns]
    rows = [["", *(head[0] for head in heads)], ["", *(head[1] for head in heads)]]
    rows.append(["dense", *(f"{_number(column['dense'])} " for column in columns)])
    for run in ordered(data):
        cells = [f"{_number(column['runs'][run])}{'*' if run in column['best'] else ' '}" for column in columns]
        rows.append([f"{run}{training(data, run)}", *cells])
    return grid(rows)


def ordered(data: dict[str, Any]) -> list[str]:
    """The runs, those that were trained last."""
    return sorted(data["runs"], key=lambda run: run in data["trained"])


def training(data: dict[str, Any], run: str) -> str:
    """What a run was trained on, in brackets; nothing where it was not."""
    found = data["trained"].get(run)
    return f" (trained: {found['tokens']:,} tokens, {found['seconds'] / 60:.0f} min)" if found else ""


def _head(column: dict[str, Any]) -> tuple[str, str]:
    """The two lines over a column."""
    if "metric" in column:
        return f"{column['task']} ", f"{column['metric'].replace('_', ' ')} "
    first, _, rest = column["name"].partition(" ")
    return (f"{first} ", f"{rest} ") if rest else (" ", f"{first} ")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _differences(against: str, rows: list[dict[str, Any]], level: float) -> str:
    table = [[f"against {against}", "metric", "documents", "apart", f"{level:.0%} interval", "verdict"]]
    for item in rows:
        ratio = item["kind"] == "ratio"
        form = "{:.4g}" if ratio else "{:+.4g}"
        apart = ("x " if ratio else "") + form.format(item["value"])
        interval = " to ".join(form.format(end) for end in item["interval"]) if item["interval"] else "-"
        metric = f"{item['task']}: {item['metric'].replace('_', ' ')}"
        table.append([item["run"], metric, str(item["documents"]), apart, interval, item["verdict"]])
    return grid(table)


def remarks(data: dict[str, Any]) -> list[str]:
    """How the verdicts were found, and what has none."""
    comparisons, method = data["correction"]["comparisons"], data["correction"]["method"]
    lines = []
    if comparisons:
        level = 1 - (1 - data["level"]) / comparisons
        lines.append(
            f"paired by document; a verdict needs the interval at level {level:.2%} to be clear of no difference: "
            f"{data['level']:.0%}, {method}'s correction for {comparisons} comparisons"
        )
        if by_t := sum(item["by"] == "Student's t" for item in data["differences"]):
            lines.append(f"for {by_t} of them that interval is Student's t, since resamples do not reach its level")
    paired = {(item["task"], item["metric"]) for item in data["differences"]}
    without = [c["name"] for c in data["columns"] if "metric" in c and (c["task"], c["metric"]) not in paired]
    if without:
        lines.append(f"no mean over documents, and not paired: {', '.join(without)}")
    return lines


def _fronts(pareto: dict[str, Any]) -> str:
    quality = f"{pareto['task']}: {pareto['metric'].replace('_', ' ')}"
    if not pareto["fronts"]:
        return f"no Pareto fronts: lm-eval does not say what is better in {quality}"
    lines = [f"Pareto fronts of {quality}"]
    lines += [f"  and {cost}: {'; '.join(names) or '-'}" for cost, names in pareto["fronts"].items()]
    return "\n".join(lines)
