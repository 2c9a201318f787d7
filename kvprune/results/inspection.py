"""What `kvprune inspect` found, as text."""

from typing import Any

from kvprune.results.table import grid
from kvprune.terminal import printable

MOST_SLOTS = 24  # that are told of
MOST_TOKENS = 12
TRIGGERS = 5  # of a slot
TOKENS = 8  # that a value promotes or suppresses
AROUND = 48  # characters on each side of a trigger
MORE = "single slots: --slot LAYER:INDEX, --layer L --top N, --all FILE; all of it on a page: --html FILE"


def render(data: dict[str, Any]) -> str:
    """The sections that there are, one after the other."""
    model = data["model"]
    commit = f" at commit {model['commit']}" if model["commit"] else ""
    parts = [f"{model['title']}{commit}{', ' + model['note'] if model['note'] else ''}"]
    parts.append(f"{data['tokens']:,} tokens of {', '.join(data['text'])}")
    if data.get("firing"):
        parts += ["", _firing(data["firing"])]
    if data.get("coherence"):
        parts += ["", _coherence(data["coherence"])]
    if data.get("lens"):
        parts += ["", _layers(data["lens"])]
    if data.get("removed"):
        parts += ["", _removed(data["removed"])]
    for card in data["slots"][:MOST_SLOTS]:
        parts += ["", slot_card(card)]
    if (more := len(data["slots"]) - MOST_SLOTS) > 0:
        parts += ["", f"{more} slots more are in --json, --html and --all"]
    if not data["slots"]:
        parts += ["", MORE]
    return "\n".join(parts)


def _firing(ffns: list[dict[str, Any]]) -> str:
    levels = list(ffns[0]["over_rms"])
    rows = [
        [
            "firing",
            "over 1/10 of peak",
            *(f"over {level} x rms" for level in levels),
            "fire < 1/1,000",
            "< 1/10,000",
            "Gini",
            "effective slots",
        ]
    ]
    rows += [
        [
            _ffn(item),
            f"{item['over_peak']:.1%}",
            *(f"{item['over_rms'][level]:.1%}" for level in levels),
            f"{item['rare_1000']:.1%}",
            f"{item['rare_10000']:.1%}",
            f"{item['gini']:.2f}",
            f"{item['effective']:,.0f} of {item['width'] * max(1, item['experts'] - item['never_routed']):,}",
        ]
        for item in ffns
    ]
    return grid(rows) + "\nshares of slots; a slot fires where it writes at least 2 x the rms of its layer"


def _ffn(item: dict[str, Any]) -> str:
    if not item["experts"]:
        return str(item["name"])
    never = f", {item['never_routed']} never routed to" if item["never_routed"] else ""
    return f"{item['name']} ({item['experts']} experts{never})"


def _coherence(rows: list[dict[str, Any]]) -> str:
    table = [["values", "coherence", "of random ones", "their 95th percentile", "values above it"]]
    table += [
        [
            row["name"],
            f"{row['mean']:.3f}",
            f"{row['null_mean']:.3f}",
            f"{row['null_p95']:.3f}",
            f"{row['above_p95']:.1%}",
        ]
        for row in rows
    ]
    return (
        grid(table)
        + "\ncoherence: mean cosine of the ten tokens that a value promotes most, their embeddings less the mean of all"
    )


def _layers(rows: list[dict[str, Any]]) -> str:
    table = [["names the final prediction", "top slot", "FFN", "residual", "KL (nats)", "value = next", "by chance"]]
    table += [
        [
            row["name"],
            *(_share(row[key]) for key in ("slot_top", "ffn_top", "residual_top")),
            f"{row['kl']:.3f}",
            _share(row["key_next"]),
            _share(row["chance"], 3),
        ]
        for row in rows
    ]
    return grid(table) + (
        "\nvalue = next: slots whose value names the very token that followed their strongest trigger"
    )


def _share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _removed(removed: dict[str, Any]) -> str:
    loss = removed["loss"]
    lines = [
        f"what pruning forgets: loss on {', '.join(removed['text'])} {loss['dense']:.4f} -> {loss['slim']:.4f} nats a "
        "token; it rose most at"
    ]
    for token in removed["tokens"][:MOST_TOKENS]:
        slots = ", ".join(item["id"] for item in token["slots"])
        lines.append(f"  {token['dense']:6.2f} -> {token['slim']:5.2f}  {_context(token)}")
        lines.append(f"{'':18}missing there: {slots or 'no removed slot spoke'}")
    return "\n".join(lines)


def slot_card(card: dict[str, Any]) -> str:
    """What is known of one slot."""
    removed = {None: "", True: ", removed", False: ", kept"}[card["removed"]]
    which = "tokens" if card["expert"] is None else "the tokens routed to it"
    lines = [f"slot {card['id']}: fires on {card['rate']:.3%} of {which}{removed}"]
    if "triggers" in card:
        shared = card["shared"]
        if shared is not None:
            lines.append(
                f"  triggers: {shared['share']:.0%} end with the {shared['kind']} {shared['text']!r} "
                f"(by chance {shared['chance']:.2%})"
            )
        for item in card["triggers"][:TRIGGERS]:
            where = item["document"] + (f" at {item['offset']:,}" if item["offset"] is not None else "")
            lines.append(f"  {item['coefficient']:+9.3f}  {_context(item)}  ({where})")
        if not card["triggers"]:
            lines.append("  no token triggers it")
    lines += [
        f"  {kind}: {' '.join(repr(text) for text, *_ in card[kind][:TOKENS])}"
        for kind in ("promoted", "suppressed")
        if kind in card
    ]
    if "coherence" in card:
        lines.append(f"  coherence: {card['coherence']:.3f}")
    return "\n".join(lines)


def _context(item: dict[str, Any]) -> str:
    before, token, after = (_one_line(item[key]) for key in ("before", "token", "after"))
    return f"{before[-AROUND:]}[{token}]{after[:AROUND]}"


def _one_line(text: str) -> str:
    """Text that a terminal shows on one line, and that cannot control it."""
    return printable(text.replace("\n", "⏎").replace("\t", " "))
