"""The tables that people read: dense against slim, and budgets."""

from typing import Any

from kvprune.artifacts import UNITS


def grid(rows: list[list[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def budget_table(before: dict[str, int], after: dict[str, int]) -> str:
    """A model's size before and after, in every unit that a budget can have."""
    rows = [["", "dense", "slim", "kept"]]
    rows += [
        [label, f"{before[key]:,}", f"{after[key]:,}", f"{after[key] / before[key]:.2%}"]
        for key, label in UNITS.items()
    ]
    return grid(rows)


def refit_table(layers: list[dict[str, Any]]) -> str:
    """What a refit did: error on held-back tokens before and after, as shares of what the dense FFN writes."""
    rows = [["refit, on held-back tokens", "error before", "after", "ridge", ""]]
    rows += [
        [
            layer["name"],
            f"{layer['error_before']:.4f}",
            f"{layer['error_after']:.4f}",
            f"{layer['damping']:g}",
            _remark(layer),
        ]
        for layer in layers
    ]
    return grid(rows)


def _remark(layer: dict[str, Any]) -> str:
    if not layer["refitted"]:
        return "not better: values stay"
    damped = f"needed more than ridge {layer['ridge']:g}" if layer["damping"] != layer["ridge"] else ""
    return "; ".join(part for part in (damped, "with bias" if layer["bias"] else "") if part)


def results_table(results: dict[str, Any]) -> str:
    """Dense against slim: size, every metric of every task, speed."""
    dense, slim = results["dense"], results["slim"]
    rows = [["", "dense", "slim", "slim/dense"]]
    for key, label in (("params", "parameters"), ("bytes", "bytes on disk")):
        rows.append([label, f"{dense[key]:,}", f"{slim[key]:,}", _ratio(slim[key], dense[key])])
    for task, metrics in dense["tasks"].items():
        for name, value in metrics.items():
            other = slim["tasks"][task][name]
            rows.append([f"{task}: {name.replace('_', ' ')}", f"{value:.4g}", f"{other:.4g}", _ratio(other, value)])
    key = "prefill_tokens_per_second"
    rows.append(["prefill tokens/s", f"{dense[key]:,.0f}", f"{slim[key]:,.0f}", _ratio(slim[key], dense[key])])
    return grid(rows)


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.3f}" if base else "-"
