"""The one way to make a plot: matplotlib draws it as SVG, which takes its colours and its font from the page.

Matplotlib is given colours that stand for the page's own (`KINDS`), no text but numbers and titles of axes, and no
state that outlives the plot. The SVG is put into the page as elements (kvprune.pages.svg), each line with a `<title>`.
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from kvprune.pages.svg import Words, element
from kvprune.pages.words import known, short, short_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, HIGH = 360, 252  # points, and pixels of a phone: text is as large there as it is drawn
TEXT = 11
NEAR = 0.045  # of an axis: marks that are nearer than this have one label
Point = tuple[float, float]


@dataclass(frozen=True)
class Look:
    """How a kind of line is drawn: the colour that stands for one of the page, dashes, and the mark of a point."""

    colour: str
    dashes: tuple[float, ...] = ()
    mark: str = "o"
    width: float = 1.8
    opacity: float = 1.0


# The colours are replaced by the page's variables of the same name (VARIABLES).
VARIABLES = {
    "#0a0001": "one", "#0a0002": "two", "#0a0003": "three", "#0a0004": "four", "#0a0005": "five", "#0a0006": "six",
    "#0a0007": "muted", "#0a0008": "line", "#0a0009": "back",
}  # fmt: skip
KINDS = {
    "one": Look("#0a0001"),
    "two": Look("#0a0002", (5, 2), "s"),
    "three": Look("#0a0003", (1.5, 1.5), "^"),
    "four": Look("#0a0004", (6, 2, 1.5, 2), "D"),
    "five": Look("#0a0005", (3, 3), "v"),
    "six": Look("#0a0006", (8, 3), "P"),
    "faint": Look("#0a0007", width=0.9, opacity=0.4),
    "muted": Look("#0a0007", (2, 2), width=1.2),
}
SERIES = ("one", "two", "three", "four", "five", "six")  # kinds of lines that are told apart
MARKS = {
    "o": "M13 6a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "s": "M13 2h8v8h-8z", "^": "M17 1l4.5 9h-9z", "v": "M17 11l4.5 -9h-9z",
    "D": "M17 1l5 5l-5 5l-5 -5z", "P": "M15 1h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
}  # fmt: skip
GRID, BACK, MUTED = "#0a0008", "#0a0009", "#0a0007"


@dataclass(frozen=True)
class Axis:
    """What an axis measures, and how: `marks` writes the numbers at it."""

    title: str
    marks: Callable[[float], str] = short
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False  # marks at whole numbers only


@dataclass(frozen=True)
class Line:
    """Points that belong together; `id` is unique in its plot, `told` what a reader is told of it."""

    id: str
    told: str
    points: Sequence[Point]
    kind: str = "one"
    joined: bool = True
    dots: bool = False
    hollow: bool = False
    intervals: Sequence[Point | None] = ()  # of each point, the ends of its interval along y
    label: str = ""  # at the last point: a number or a short word of ours

    @property
    def drawn(self) -> list[Point]:
        """The points that are numbers."""
        return [point for point in self.points if known(point[0]) and known(point[1])]


@dataclass(frozen=True)
class Plot:
    """A plot of the page: `name` begins the ids of its elements, `title` and `told` are its text."""

    name: str
    title: str
    told: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = field(default_factory=tuple)

    @property
    def empty(self) -> bool:
        """Whether nothing can be drawn."""
        return not any(line.drawn for line in self.lines)


def svg(plot: Plot) -> Markup:
    """The `<svg>` element of a plot; equal plots give equal bytes. Nothing where there is nothing to draw."""
    if plot.empty:
        return Markup("")
    words = Words(plot.name, plot.title, plot.told, {line.id: line.told for line in plot.lines})
    return element(_drawn(plot), words, VARIABLES)


def sample(kind: str, *, joined: bool = True, dots: bool = False) -> Markup:
    """What lines of a kind look like, for a key."""
    look = KINDS[kind]
    colour, dashes = f"var(--{VARIABLES[look.colour]})", " ".join(map(str, look.dashes))
    line = f'<path d="M0 6H34" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes or "none"}"/>' * joined
    mark = f'<path d="{MARKS[look.mark]}" fill="{colour}"/>' * dots
    return Markup(f'<svg viewBox="0 0 34 12" aria-hidden="true">{line}{mark}</svg>')


def _drawn(plot: Plot) -> str:
    """What matplotlib writes of a plot."""
    from matplotlib.figure import Figure

    with _settings():
        figure = Figure(figsize=(WIDE / 72, HIGH / 72), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        _prepare(axes, plot)
        for line in plot.lines:
            if line.drawn:
                _draw(axes, line)
        _write_labels(axes, plot.lines)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return file.getvalue()


@contextmanager
def _settings() -> Iterator[None]:
    """Matplotlib as it is by itself, whatever the user has set, and such that the same plot gives the same bytes."""
    from matplotlib import rc_context, style

    with (
        style.context("default", after_reset=True),
        rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvprune", "path.simplify": False, "font.size": TEXT}),
    ):
        yield


def _prepare(axes: "Axes", plot: Plot) -> None:
    """Axes without a frame, with a grid behind the lines."""
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    axes.tick_params(which="both", length=0, pad=6, labelcolor=MUTED, labelsize=TEXT)
    points = [point for line in plot.lines for point in _extent(line)]
    for which, axis, at in (("x", plot.x, 0), ("y", plot.y, 1)):
        getattr(axes, f"set_{which}label")(axis.title, color=MUTED, fontsize=TEXT, parse_math=False)
        if axis.log:
            getattr(axes, f"set_{which}scale")("log")
        getattr(axes, f"set_{which}lim")(*_limits(axis, [point[at] for point in points]))
        _mark(getattr(axes, f"{which}axis"), axis)


def _mark(axis: Any, of: Axis) -> None:
    """Where an axis has marks, and what stands there."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    steps = LogLocator(numticks=7) if of.log else MaxNLocator(5, integer=of.whole, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(steps)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: of.marks(value)))


def _extent(line: Line) -> list[Point]:
    """All that must lie within the axes."""
    ends = [(x, end) for x, _, interval in _with_intervals(line) if interval for end in interval if known(end)]
    return [*line.drawn, *ends]


def _with_intervals(line: Line) -> list[tuple[float, float, Point | None]]:
    intervals = [*line.intervals, *([None] * (len(line.points) - len(line.intervals)))]
    pairs = zip(line.points, intervals, strict=True)
    return [(x, y, interval) for (x, y), interval in pairs if known(x) and known(y)]


def _limits(axis: Axis, values: Sequence[float]) -> Point:
    """The ends of an axis: those that are given, else around the values."""
    low, high = min(values), max(values)
    if axis.log:
        bottom, top = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        low, high = 10.0**bottom, 10.0 ** max(top, bottom + 1)
    else:
        room = (high - low) * 0.08 or abs(high) * 0.08 or 0.5
        low, high = low - room, high + room
    return low if axis.low is None else axis.low, high if axis.high is None else axis.high


def _draw(axes: "Axes", line: Line) -> None:
    look = KINDS[line.kind]
    xs, ys = zip(*line.drawn, strict=True)
    marked = line.dots or not line.joined or len(xs) == 1
    axes.plot(
        xs,
        ys,
        color=look.colour,
        linestyle=_style(look) if line.joined else "none",
        linewidth=look.width,
        alpha=look.opacity,
        marker=look.mark if marked else "none",
        markersize=6 if line.joined and len(xs) > 1 else 8,
        markerfacecolor=BACK if line.hollow else look.colour,
        markeredgewidth=1.4,
        clip_on=False,
        gid=line.id,
        zorder=2 + look.opacity,
    )
    for x, _, interval in _with_intervals(line):
        if interval is not None and known(interval[0]) and known(interval[1]):
            axes.plot(
                (x, x), interval, color=look.colour, linewidth=1.4, marker="_", markersize=7, clip_on=False,
                gid=f"{line.id}-interval", zorder=2,
            )  # fmt: skip


def _style(look: Look) -> Any:
    return (0, look.dashes) if look.dashes else "solid"


def _write_labels(axes: "Axes", lines: Sequence[Line]) -> None:
    """Labels beside last points; lines that end in one place share theirs."""
    to_axes = axes.transData + axes.transAxes.inverted()
    groups: list[tuple[Point, Point, list[str]]] = []
    for line in lines:
        if not line.label or not line.drawn:
            continue
        x, y = (float(each) for each in to_axes.transform(line.drawn[-1]))
        for _, (there, up), names in groups:
            if abs(x - there) < NEAR and abs(y - up) < NEAR:
                names.append(line.label)
                break
        else:
            groups.append((line.drawn[-1], (x, y), [line.label]))
    for point, (x, _), names in groups:
        text = ", ".join(names)
        left = x > 0.85 and len(text) > 2  # to the left of the point, so as to stay within the plot
        axes.annotate(
            text, point, xytext=(-6 if left else 6, 5), ha="right" if left else "left", textcoords="offset points",
            color=MUTED, fontsize=TEXT, parse_math=False,
        )  # fmt: skip


def firing_plot(name: str, title: str, curves: Sequence[tuple[str, Sequence[Point]]], marked: dict[int, str]) -> Plot:
    """Firing rates against ranks, both logarithmic: a faint line for each FFN (name, points), ids `layer-0` and so on.

    `marked` are kinds of those that stand out.
    """
    lines = [
        Line(f"layer-{at}", told, [(x, y) for x, y in points if x > 0 and y > 0], marked.get(at, "faint"))
        for at, (told, points) in enumerate(curves)
    ]
    rates = [y for line in lines for _, y in line.drawn]
    last = max((x for line in lines for x, _ in line.drawn), default=0)
    told = f"{len(lines)} lines, one for each feed-forward network"
    if rates:
        told += f"; rates from {short_share(max(rates))} down to {short_share(min(rates))} of the tokens"
    y = Axis("fires on, of tokens", short_share, log=True, high=1)
    return Plot(name, title, told, Axis("rank of the slot", log=True, low=1, high=max(last, 10)), y, lines)
