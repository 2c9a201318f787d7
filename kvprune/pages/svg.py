"""What matplotlib writes, as an element of a page: no style attributes, which the page's policy forbids; unique ids."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from markupsafe import Markup

from kvprune.pages.words import NONE, seen

KEPT = ("fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset", "stroke-opacity", "fill-opacity",
        "opacity", "text-anchor")  # fmt: skip
POINTS = re.compile(r"-?\d+\.\d+")
USELESS = ("metadata", "style")


@dataclass(frozen=True)
class Words:
    """The text of a plot: its title and description, and what is told of its lines by their ids."""

    name: str
    title: str
    told: str
    lines: Mapping[str, str] = field(default_factory=dict)


def element(text: str, words: Words, variables: Mapping[str, str]) -> Markup:
    """An SVG file as an element of a page: named, described, and with the page's variables in place of its colours."""
    root = ElementTree.fromstring(text)
    for each in root.iter():
        _plain(each, variables)
        _drop(each)
    _number(root, words)
    wide, high = root.attrib["viewBox"].split()[2:]
    root.attrib = {
        "viewBox": f"0 0 {wide} {high}",
        "role": "img",
        "aria-labelledby": f"{words.name}-title {words.name}-desc",
    }
    root.insert(0, _word("desc", words.told, f"{words.name}-desc"))
    root.insert(0, _word("title", words.title, f"{words.name}-title"))
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _plain(each: ElementTree.Element, variables: Mapping[str, str]) -> None:
    """Names without name spaces, and attributes in place of styles."""
    each.tag = each.tag.rpartition("}")[2]
    found = {key.rpartition("}")[2]: value for key, value in each.attrib.items()}
    for rule in found.pop("style", "").split(";"):
        key, _, value = (part.strip() for part in rule.partition(":"))
        if key in KEPT:
            found[key] = f"var(--{variables[value]})" if value in variables else value
    for key in ("d", "x", "y", "transform"):
        if key in found:
            found[key] = POINTS.sub(lambda number: f"{float(number[0]):.2f}", " ".join(found[key].split()))
    each.attrib = found
    each.text, each.tail = (part if part and part.strip() else None for part in (each.text, each.tail))


def _drop(each: ElementTree.Element) -> None:
    for child in list(each):
        if child.tag.rpartition("}")[2] in USELESS:
            each.remove(child)


def _number(root: ElementTree.Element, words: Words) -> None:
    """Ids that begin with the plot's name; those that nothing needs are taken away."""
    used = {each.attrib["href"] for each in root.iter() if "href" in each.attrib}
    for each in root.iter():
        name = each.attrib.pop("id", "")
        if f"#{name}" in used or name in words.lines:
            each.attrib["id"] = f"{words.name}-{name}"
        if name in words.lines:
            each.insert(0, _word("title", words.lines[name]))
        if name.endswith("-interval"):
            each.attrib["class"] = "interval"
        if "href" in each.attrib:
            each.attrib["href"] = f"#{words.name}-{each.attrib['href'][1:]}"


def _word(tag: str, text: str, name: str = "") -> ElementTree.Element:
    made = ElementTree.Element(tag, {"id": name} if name else {})
    made.text = seen(text) or NONE
    return made
