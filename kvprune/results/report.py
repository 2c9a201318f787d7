"""One HTML file for a run or a comparison of runs: quality against size, widths, firing, refits, and what made them.

The page is `report.html` within the frame of all pages (kvprune.pages). All of it is text and drawings; the script only
adds buttons that copy. The data are those of `gather`, one for each run, and of `kvprune compare`.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvprune.artifacts import RunFolder, write_text
from kvprune.pages.frame import Kind, render
from kvprune.pages.plots import SERIES, Axis, Line, Plot, firing_plot, sample, svg
from kvprune.pages.words import share, short_share, whole
from kvprune.results import quality, tables
from kvprune.results.comparison import remarks
from kvprune.results.gather import gather
from kvprune.results.pairs import FEWEST
from kvprune.results.quality import SIZES, Quality
from kvprune.results.table import recovered_words
from kvprune.results.tables import Table
from kvprune.schema import Recipe
from kvprune.staleness import stage_states

KIND = Kind("kvprune.results", "report.html", "report.css", ("report.js",))
MOST_CHARTS = 12  # of metrics; the tables have all
Runs = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A plot with its title, its key (samples and names), and what else there is to say."""

    title: str
    svg: Markup
    key: Sequence[tuple[Markup, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page; `folded` tables are shown on request."""

    id: str
    title: str
    about: str
    charts: Sequence[Chart] = ()
    key: Sequence[tuple[Markup, str]] = ()  # of all charts
    tables: Sequence[Table] = ()
    folded: Sequence[tuple[str, Table]] = field(default_factory=tuple)
    notes: Sequence[str] = ()


def write_report(
    file: Path, runs: Sequence[tuple[str, RunFolder, Recipe]], comparison: dict[str, Any] | None = None
) -> None:
    """Write the page of named runs, or of their comparison, to a file that `check_target` allows."""
    found = [
        gather(name, place, recipe, stage_states(place, recipe), alone=comparison is None)
        for name, place, recipe in runs
    ]
    write_text(file, page(found, comparison))


def page(runs: Runs, comparison: dict[str, Any] | None = None) -> str:
    """The whole HTML file; equal data give equal bytes."""
    made = [_quality(runs, comparison), _results(runs, comparison), _budgets(runs), _widths(runs), _firing(runs)]
    made += [_refits(runs), _recoveries(runs), _judged(runs, comparison)]
    title = runs[0]["name"] if comparison is None else f"{len(runs)} runs compared"
    model = next((run["model"] for run in runs if "model" in run), None)
    return render(
        KIND,
        title=f"{title} · kvprune",
        heading=title,
        facts=_facts(runs, comparison, model),
        sections=[section for section in made if section],
        runs=[_made(run) for run in runs],
        several=comparison is not None,
        commands=_compare_commands(runs, comparison),
    )


def _facts(runs: Runs, comparison: dict[str, Any] | None, model: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What stands under the title."""
    found = [("Model", model["title"]), ("Commit", model["commit"]), ("Note", model["note"])] if model else []
    if comparison is None:
        found += [("Run", runs[0]["run"])]
    else:
        found += [("Compared with", comparison["against"]), ("Left out", ", ".join(comparison["left_out"]))]
    counted = next((run["counted"]["tokens"] for run in runs if "counted" in run), None)
    found.append(("Counted", f"{whole(counted)} tokens" if counted else ""))
    return [(name, value) for name, value in found if value]


def _key(runs: Runs, *, joined: bool = False) -> list[tuple[Markup, str]]:
    """The runs with their numbers and looks."""
    return [
        (sample(SERIES[at % len(SERIES)], joined=joined, dots=True), f"{at + 1} {run['name']}")
        for at, run in enumerate(runs)
    ]


def _quality(runs: Runs, comparison: dict[str, Any] | None) -> Section | None:
    found = quality.of_run(runs[0]) if comparison is None else quality.of_comparison(comparison)
    if not found:
        return None
    before = runs[0]["plan"]["before"]
    main = next((each for each in found if each.fronts), found[0])
    charts = [
        _quality_chart(f"quality-{at}-{unit}", each, unit, before[unit])
        for at, each in enumerate(found[:MOST_CHARTS])
        for unit in (SIZES if each is main else list(SIZES)[:1])
    ]
    about = "Every run against the dense model: the point is what was measured, the bar its 95% interval."
    if main.fronts:
        about += f" Runs on the Pareto front of {main.title} are filled and joined; hollow ones are beaten."
    notes = [f"More metrics are in the tables: {len(found) - MOST_CHARTS}."] if len(found) > MOST_CHARTS else []
    drawn = [chart for chart in charts if chart.svg]
    key = _key(runs) if len(runs) > 1 else ()
    return Section("quality", "Quality against size", about, drawn, key, notes=notes)


def _quality_chart(name: str, of: Quality, unit: str, before: int) -> Chart:
    notes = [of.better] if of.better else []
    if missing := quality.left_out(of):
        notes.append(f"not finite, and not drawn: {', '.join(missing)}")
    if any(point.interval is None for point in of.points):
        notes.append(f"no interval: fewer than {FEWEST} documents, or no mean over them")
    drawn = quality.plot(name, of, unit, before)
    return Chart(drawn.title, svg(drawn), note="; ".join(notes))


def _results(runs: Runs, comparison: dict[str, Any] | None) -> Section | None:
    if comparison is None:
        run = runs[0]
        made = [tables.results(run)] if "results" in run else []
        about = "What the slim model is worth beside the dense one. Documents are paired and resampled (bootstrap)."
        return Section("results", "Results", about, tables=made) if made else None
    against = dict.fromkeys((comparison["against"], "dense"))
    differences = [made for made in (tables.verdicts(comparison, name) for name in against) if made.rows]
    made = [tables.side_by_side(comparison), *differences]
    made += [tables.fronts(comparison)] if comparison["pareto"]["fronts"] else []
    notes = [f"{text[:1].upper()}{text[1:]}." for text in remarks(comparison)]
    about = "What was measured, and whether runs differ by more than chance."
    return Section("results", "Results and verdicts", about, tables=made, notes=notes)


def _budgets(runs: Runs) -> Section | None:
    planned = [run for run in runs if "plan" in run]
    if not planned:
        return None
    made = [tables.budgets(planned)]
    if len(runs) > 1 and (varied := tables.varied(runs)):
        made.insert(0, varied)
    loads: dict[str, list[str]] = {}
    for run in planned:
        loads.setdefault(run["plan"]["loads"], []).append(run["name"])
    notes = [f"{', '.join(names)}: {text}." for text, names in loads.items()]
    return Section("budgets", "Budgets", "How small the models were to be, and are.", tables=made, notes=notes)


def _widths(runs: Runs) -> Section | None:
    planned = [(at, run) for at, run in enumerate(runs) if "widths" in run]
    if not planned:
        return None
    lines = [
        Line(
            f"run-{at + 1}",
            run["name"],
            [(layer, item["after"] / item["before"]) for layer, item in enumerate(run["widths"])],
            SERIES[at % len(SERIES)],
            dots=True,
            label=str(at + 1) if len(runs) > 1 else "",
        )
        for at, run in planned
    ]
    ends = [f"{line.told} keeps {_range([y for _, y in line.points])}" for line in lines]
    drawn = Plot(
        "widths", "Slots that stay, by layer", "; ".join(ends), Axis("FFN", whole=True),
        Axis("slots that stay", short_share, low=0, high=1), lines,
    )  # fmt: skip
    key = _key(runs, joined=True) if len(runs) > 1 else ()
    chart = Chart("Slots that stay in each feed-forward network", svg(drawn), key)
    about = "How many of its slots each feed-forward network keeps; the experts of a layer are taken together."
    folded = [("Widths as a table", tables.widths(runs))]
    return Section("widths", "Widths", about, [chart], folded=folded)


def _range(values: Sequence[float]) -> str:
    low, high = short_share(min(values)), short_share(max(values))
    return low if low == high else f"{low} to {high}"


def _firing(runs: Runs) -> Section | None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if "curves" in run:
            groups.setdefault(run["digests"]["stats.safetensors"], []).append(run)
    if not groups:
        return None
    charts, folded = [], []
    for at, members in enumerate(groups.values()):
        names = ", ".join(run["name"] for run in members)
        of = f" ({names})" if len(groups) > 1 else ""
        charts.append(_firing_chart(f"firing-{at}", members[0]["curves"], of))
        folded.append((f"Firing as a table{of}", tables.firing(members[0])))
    about = (
        "How often slots fire, the most active first, both axes logarithmic. A slot fires on a token when what it "
        "writes is at least twice the rms over its layer's slots."
    )
    return Section("firing", "Firing", about, charts, folded=folded)


def _firing_chart(name: str, curves: Sequence[dict[str, Any]], of: str) -> Chart:
    """All FFNs faintly; the first, the middle and the last stand out."""
    marked = dict(zip(dict.fromkeys((0, len(curves) // 2, len(curves) - 1)), SERIES, strict=False))
    title = f"Firing rate against rank{of}"
    drawn = firing_plot(name, title, [(item["name"], item["ranked"]) for item in curves], marked)
    key = [(sample(kind), curves[at]["name"]) for at, kind in marked.items()]
    return Chart(title, svg(drawn), key, "The others are drawn faintly.")


def _refits(runs: Runs) -> Section | None:
    refitted = [run for run in runs if run.get("refit")]
    if not refitted:
        return None
    errors = [tables.refit_errors(run) for run in refitted]
    most = max(before for each in errors for _, before, *_ in each)
    charts = [
        _refit_chart(f"refit-{at}", run["name"], each, max(most * 1.05, 1e-9))
        for at, (run, each) in enumerate(zip(refitted, errors, strict=True))
    ]
    about = (
        "The error that removed slots leave on held-back tokens, as a share of what the dense network writes there: "
        "before the kept values are refitted, and after."
    ) + (" All plots have the same scale." if len(refitted) > 1 else "")
    folded = [(f"Errors of {run['name']} as a table", tables.refits(run)) for run in refitted]
    return Section("refit", "Error before and after the refit", about, charts, folded=folded)


def _refit_chart(name: str, run: str, errors: Sequence[tuple[Any, ...]], most: float) -> Chart:
    lines = [
        Line("before", "before", [(at, item[1]) for at, item in enumerate(errors)], "two", dots=True),
        Line("after", "after", [(at, item[2]) for at, item in enumerate(errors)], "one", dots=True),
    ]
    means = [sum(y for _, y in line.points) / len(errors) for line in lines]
    told = f"mean {share(means[0])} before and {share(means[1])} after"
    y = Axis("error", short_share, low=0, high=most)
    drawn = Plot(name, f"Refit of {run}", told, Axis("FFN", whole=True), y, lines)
    key = [(sample(line.kind, dots=True), line.told) for line in lines]
    return Chart(drawn.title, svg(drawn), key, f"{told[:1].upper()}{told[1:]}.")


def _recoveries(runs: Runs) -> Section | None:
    trained = [run for run in runs if run.get("recover")]
    if not trained:
        return None
    charts = [_recovery_chart(f"recover-{at}", run) for at, run in enumerate(trained)]
    about = (
        "The dense model taught the slim one on text: how far their distributions of the next token are apart, step by "
        "step, and on held-out text. The point with the lowest mean on held-out text stays."
    )
    notes = [f"{run['name']}: {recovered_words(run['recover'])}." for run in trained]
    folded = [(f"Training of {run['name']} as a table", tables.recovery(run)) for run in trained]
    return Section("recover", "Training after the export", about, charts, folded=folded, notes=notes)


def _recovery_chart(name: str, run: dict[str, Any]) -> Chart:
    found = run["recover"]
    looks = found["looks"]
    lines = [Line("steps", "training text", [(at + 1, loss) for at, loss in enumerate(found["losses"])], "faint")]
    for kind, text in zip(SERIES, looks[0]["texts"], strict=False):
        points = [(look["step"], look["texts"][text]["loss"]) for look in looks]
        lines.append(Line(f"held-{kind}", f"held out: {text}", points, kind, dots=True))
    told = f"step {found['best']} of {found['steps']} stays"
    y = Axis("loss, nats a token", low=0)
    drawn = Plot(name, f"Loss of {run['name']}", told, Axis("step", whole=True), y, lines)
    key = [(sample(line.kind, dots=line.dots), line.told) for line in lines]
    return Chart(drawn.title, svg(drawn), key, f"{told[:1].upper()}{told[1:]}.")


def _judged(runs: Runs, comparison: dict[str, Any] | None) -> Section | None:
    if not any(run.get("judged") for run in runs):
        return None
    left = comparison["left_out"] if comparison else []
    notes = [f"Not in all runs, and left out: {', '.join(left)}."] if left else []
    about = "By lm-eval, dense and slim alike, on the same documents."
    return Section("evaluation", "Evaluation", about, tables=[tables.judged(runs)], notes=notes)


def _made(run: dict[str, Any]) -> dict[str, Any]:
    """Recipe, provenance and commands of a run."""
    facts = []
    if model := run.get("model"):
        facts += [("Model", model["title"]), ("Commit", model["commit"]), ("Note", model["note"])]
    if counted := run.get("counted"):
        where = f"{counted['device']} in {counted['dtype']}, {counted['batch_size']} sequences at once"
        facts.append(("Counted on", where))
    facts.append(("Calibration tokens, SHA-256", run.get("tokens")))
    if verified := run.get("verified"):
        facts.append(("Verified", _verified(verified, trained=bool((run.get("recover") or {}).get("improved")))))
    folded = [("Stages", tables.stages(run)), ("Digests of files", tables.digests(run))]
    if "made_with" in run:
        folded.insert(1, ("Versions", tables.versions(run)))
    folder = shlex.quote(run["run"])
    commands = [
        ("Bring it up to date", f"kvprune run {shlex.quote(run['run'] + '/recipe.yaml')} -o {folder}"),
        ("Look into its memory", f"kvprune inspect {folder} --html memory.html"),
    ]
    if "load" in run:
        commands.append(("Load the slim model", run["load"]))
    facts = [(name, value) for name, value in facts if value]
    return {"name": run["name"], "facts": facts, "recipe": run["written"], "tables": folded, "commands": commands}


def _verified(verified: dict[str, Any], *, trained: bool) -> str:
    apart, whose = verified["logit_difference"], "trained model's" if trained else "masked dense model's"
    logits = f"logits within {apart:.1e} of the {whose}" if apart is not None else verified["note"]
    return f"{verified['tensors']} tensors bit for bit; {logits}"


def _compare_commands(runs: Runs, comparison: dict[str, Any] | None) -> list[tuple[str, str]]:
    if comparison is None:
        return []
    folders = " ".join(shlex.quote(run["run"]) for run in runs)
    against = shlex.quote(comparison["runs"][comparison["against"]])
    return [("Compare again", f"kvprune compare {folders} --against {against} --html report.html")]
