"""The tables that people read: dense against slim, and budgets."""

import math
from typing import Any

from kvprune.artifacts import UNITS
from kvprune.card import MOST_WIDTHS, first_and_best, mean_errors


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


def width_lines(ffns: list[dict[str, Any]]) -> list[str]:
    """Of plain FFN plans (name, before, after, tokens): a line for each width, and one for unused experts."""
    changes: dict[int, list[int]] = {}
    for ffn in ffns:
        changes.setdefault(ffn["before"], []).append(ffn["after"])
    lines = []
    for before, afters in changes.items():
        some = sorted(set(afters))
        to = str(some[0]) if len(some) == 1 else f"{some[0]} to {some[-1]}"
        each = "" if len(some) == 1 or len(afters) > MOST_WIDTHS else f": {' '.join(map(str, afters))}"
        lines.append(f"width {before} -> {to} in {len(afters)} FFNs{each}")
    unused = [ffn["name"] for ffn in ffns if not ffn["tokens"]]
    more = f" and {len(unused) - 1} others" if len(unused) > 1 else ""
    return lines + ([f"no token was routed to {unused[0]}{more}: their scores say nothing"] if unused else [])


def refit_table(ffns: list[dict[str, Any]]) -> str:
    """What a refit did: error on held-back tokens before and after, as shares of what the dense FFN writes.

    The experts of a layer are one row, with their means.
    """
    from kvprune.reading.firing import grouped  # it imports torch, and the other tables need none

    rows = [["refit, on held-back tokens", "error before", "after", "ridge", ""]]
    for name, places in grouped(ffns).items():
        members = [ffns[at] for at in places]
        before, after = mean_errors(members)
        rows.append([name, f"{before:.4f}", f"{after:.4f}", *ridge_words(members)])
    return grid(rows)


def recovery_text(report: dict[str, Any]) -> str:
    """What a recovery took and gave, on held-out texts: the distance from the dense model, and perplexities."""
    first, best = first_and_best(report)
    rows = [["recover, on held-out text", "KL before", "after", "perplexity dense", "before", "after"]]
    for name, before in first.items():
        losses = [f"{seen['loss']:.4f}" for seen in (before, best[name])]
        words = (before["dense"], before["slim"], best[name]["slim"])
        rows.append([name, *losses, *(f"{math.exp(loss):.4g}" for loss in words)])
    return f"{grid(rows)}\n{recovered_words(report)}"


def recovered_words(report: dict[str, Any]) -> str:
    """What a recovery took, and what stays of it."""
    took = f"{report['tokens']:,} tokens in {report['seconds'] / 60:.1f} min, {report['learning']:,} parameters learned"
    ended = f"; stopped early: {report['stopped']}" if report["stopped"] else ""
    kept = (
        f"step {report['best']} of {report['steps']} stays"
        if report["improved"]
        else "no point was better than before: the checkpoint stays as it was"
    )
    return f"{took}; {kept}{ended}"


def ridge_words(members: list[dict[str, Any]]) -> tuple[str, str]:
    """The ridge of an FFN's refit, or the ridges of a layer's experts, and what else there is to say."""
    damping = sorted({ffn["damping"] for ffn in members})
    return f"{damping[0]:g}" if len(damping) == 1 else f"{damping[0]:g} to {damping[-1]:g}", _remark(members)


def _remark(members: list[dict[str, Any]]) -> str:
    first = members[0]
    if first["expert"] is not None:
        return f"{sum(ffn['refitted'] for ffn in members)} of {len(members)} experts refitted"
    if not first["refitted"]:
        return "not better: values stay"
    damped = f"needed more than ridge {first['ridge']:g}" if first["damping"] != first["ridge"] else ""
    return "; ".join(part for part in (damped, "with bias" if first["bias"] else "") if part)


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
