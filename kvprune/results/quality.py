"""Quality against size: how far each run is from the dense model in each metric, with intervals; one form for plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvprune.pages.plots import SERIES, Axis, Line, Plot
from kvprune.pages.words import figure, known, whole
from kvprune.results.pairs import told as told_apart

SIZES = {"total_params": "parameters", "bytes": "bytes of weights"}
FRONTS = {"total_params": "parameters", "bytes": "bytes"}  # what compare calls them
WIDE_RANGE = 8  # of ratios: beyond it the axis is logarithmic
Interval = tuple[float, float]


@dataclass(frozen=True)
class Point:
    """A run in a plot: its name and sizes by unit, the value and its 95 % interval."""

    name: str
    sizes: dict[str, int]
    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Quality:
    """A metric of all runs against the dense model: a "ratio", a "difference", or a "value" where nothing is paired."""

    task: str
    metric: str
    kind: str
    better: str  # "higher is better", or what else is known
    dense: float
    points: Sequence[Point]
    fronts: dict[str, list[str]]  # names on the Pareto front by unit, where there is one

    @property
    def title(self) -> str:
        """What people call the metric."""
        return f"{self.task}: {self.metric.replace('_', ' ')}"


def of_comparison(data: dict[str, Any]) -> list[Quality]:
    """The metrics of a comparison."""
    sizes = {column["unit"]: column for column in data["columns"] if "unit" in column}
    return [_of_column(column, sizes, data) for column in data["columns"] if "metric" in column]


def _of_column(column: dict[str, Any], sizes: dict[str, Any], data: dict[str, Any]) -> Quality:
    task, metric, pareto = column["task"], column["metric"], data["pareto"]
    paired = {
        item["run"]: item
        for item in data["differences"]
        if (item["task"], item["metric"], item["against"]) == (task, metric, "dense")
    }
    kind = next((item["kind"] for item in paired.values()), "value")
    points = []
    for name, value in column["runs"].items():
        size = {unit: sizes[unit]["runs"][name] for unit in SIZES}
        item = paired.get(name, {"value": value, "interval": None})
        points.append(Point(name, size, item["value"], tuple(item["interval"]) if item["interval"] else None))
    first = (task, metric) == (pareto["task"], pareto["metric"])
    fronts = {unit: pareto["fronts"][name] for unit, name in FRONTS.items() if first and name in pareto["fronts"]}
    better, dense = _better(column["higher_is_better"]), _level(kind, column["dense"])
    return Quality(task, metric, kind, better, dense, points, fronts)


def of_run(run: dict[str, Any]) -> list[Quality]:
    """The metrics of one run."""
    if "figures" not in run or "plan" not in run:
        return []
    sizes = {unit: run["plan"]["after"][unit] for unit in SIZES}
    made = []
    metrics = run["results"]["slim"]["tasks"]
    for item in run["figures"]:
        if item["metric"] not in told_apart(metrics[item["task"]]):
            continue
        value, *ends = item["interval"] or (item["slim"],)
        kind = "value" if not ends else "ratio" if item["ratio"] else "difference"
        point = Point(run["name"], sizes, value, (ends[0], ends[1]) if ends else None)
        made.append(Quality(item["task"], item["metric"], kind, "", _level(kind, item["dense"]), [point], {}))
    return made


def _better(higher: bool | None) -> str:
    return "" if higher is None else "higher is better" if higher else "lower is better"


def _level(kind: str, dense: float) -> float:
    return {"ratio": 1.0, "difference": 0.0}.get(kind, dense)


def plot(name: str, quality: Quality, unit: str, before: int) -> Plot:
    """A metric against a size, with the dense model at `before`; runs have the numbers of their order."""
    dense, words = [(before, quality.dense)], f"dense: {whole(before)} {SIZES[unit]}"
    lines = [Line("dense", words, dense, "muted", joined=False, hollow=True, label="dense")]
    front = quality.fronts.get(unit, [])
    places = {point.name: (point.sizes[unit], point.value) for point in quality.points}
    if len(front) > 1:
        lines.append(Line("front", "Pareto front", [places[each] for each in front], "faint"))
    lines += [
        Line(
            f"run-{at + 1}",
            told(point, quality, unit),
            [(point.sizes[unit], point.value)],
            SERIES[at % len(SERIES)],
            joined=False,
            hollow=bool(front) and point.name not in front,
            intervals=[point.interval],
            label=str(at + 1) if len(quality.points) > 1 else "slim",
        )
        for at, point in enumerate(quality.points)
    ]
    values = [y for line in lines for _, y in line.drawn]
    log = quality.kind == "ratio" and max(values) / min(values) > WIDE_RANGE
    title = {"ratio": "× dense", "difference": "less dense", "value": "value"}[quality.kind]
    what = "; ".join(f"{at + 1}: {line.told}" for at, line in enumerate(lines[-len(quality.points) :]))
    return Plot(name, f"{quality.title} against {SIZES[unit]}", what, Axis(SIZES[unit]), _axis(title, log), lines)


def _axis(title: str, log: bool) -> Axis:
    return Axis(title, lambda value: f"{value:.4g}".replace("-", "−"), log=log)


def told(point: Point, quality: Quality, unit: str) -> str:
    """A run in words: its size, and the value with its interval."""
    ends = f" [{', '.join(figure(end) for end in point.interval)}]" if point.interval else ""
    sign = {"ratio": "× ", "difference": "+" if point.value > 0 else ""}.get(quality.kind, "")
    front = ", on the Pareto front" if point.name in quality.fronts.get(unit, ()) else ""
    return f"{point.name}: {whole(point.sizes[unit])} {SIZES[unit]}, {sign}{figure(point.value)}{ends}{front}"


def left_out(quality: Quality) -> list[str]:
    """Runs whose value cannot be drawn."""
    return [point.name for point in quality.points if not known(point.value)]
