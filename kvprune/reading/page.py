"""One HTML file that shows what `kvprune inspect` found: searchable, and complete without a network.

The page is `page.html` within the frame of all pages (kvprune.pages), with the data put in as JSON and the plots drawn.
The script puts all text of the data in as text, never as markup.

Every part of the data may be missing or empty: its section is then left out. What pruning removed is read as

    "removed": {"text": [names], "loss": {"dense": nats, "slim": nats},
                "slots": [id of one of the "slots", or a slot as there],
                "tokens": [{"before", "token", "after", "document", "offset", "dense": nats, "slim": nats,
                            "slots": [{"id", or "ffn" and "slot", "contribution"}]}]}
"""

from collections.abc import Sequence
from typing import Any

from kvprune.pages.frame import Kind, embedded, render
from kvprune.pages.plots import Axis, Line, Plot, firing_plot, sample, svg
from kvprune.pages.words import known, share, short_share

KIND = Kind("kvprune.reading", "page.html", "page.css", ("page_parts.js", "page.js"))
# What a layer is read from: a field of its row, a name, and the kind of its line.
LENS = (("slot_top", "Loudest slot", "one"), ("ffn_top", "FFN", "two"), ("residual_top", "Residual stream", "three"))


def page(data: dict[str, Any]) -> str:
    """The whole HTML file for the data of an inspection; equal data give equal bytes."""
    title = (data.get("model") or {}).get("title") or "model"
    return render(
        KIND,
        title=f"{title} · kvprune inspect",
        data=embedded(data),
        plots={"firing": svg(_firing(data.get("firing") or ())), "lens": svg(_lens(data.get("lens") or ()))},
        lens=[{"name": name, "sample": sample(kind)} for _, name, kind in LENS],
    )


def _firing(ffns: Sequence[dict[str, Any]]) -> Plot:
    """Firing rate against rank, a line for each FFN; the script marks the chosen one."""
    curves = [(str(ffn.get("name")), ffn.get("ranked") or ()) for ffn in ffns]
    return firing_plot("ranks", "Firing rate against rank", curves, {})


def _lens(rows: Sequence[dict[str, Any]]) -> Plot:
    """How often the final prediction can be read in each layer."""
    lines = []
    for key, name, kind in LENS:
        points = [(layer, row[key]) for layer, row in enumerate(rows) if known(row.get(key))]
        ends = f" from {share(points[0][1])} to {share(points[-1][1])}" if points else ""
        lines.append(Line(key, f"{name}{ends}", points, kind))
    told = ", ".join(line.told for line in lines if line.points)
    x = Axis("layer", whole=True)
    return Plot(
        "agreement", "Agreement with the final prediction", told, x, Axis("agrees", short_share, low=0, high=1), lines
    )
