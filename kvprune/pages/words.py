"""Numbers and names as people read them on a page."""

import math
import unicodedata
from typing import Any

NONE = "–"
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # categories of characters that are not seen
STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def seen(text: str) -> str:
    """Text in which every character is seen, or breaks lines: others as ‹U+…›."""
    return "".join(_sign(char) if unicodedata.category(char) in UNSEEN else char for char in text)


def _sign(char: str) -> str:
    return char if char in "\n\t" else f"‹U+{ord(char):04X}›"


def known(value: Any) -> bool:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(value: Any) -> str:
    """A whole number, in groups of three digits."""
    return f"{round(value):,}".replace("-", "−") if known(value) else NONE


def figure(value: Any) -> str:
    """A number to about three figures."""
    if not known(value):
        return "∞" if value == math.inf else NONE
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e5 or size < 1e-3:
        return f"{value:.1e}".replace("-", "−")
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:.{decimals}f}".replace("-", "−")


def share(value: Any) -> str:
    """A share as a percentage, to two figures where it is small."""
    if not known(value):
        return NONE
    percent = value * 100
    if percent == 0:
        return "0%"
    if percent < 1e-3:
        return f"{percent:.0e}%".replace("-", "−")
    return f"{percent:.1f}%" if percent >= 10 else f"{percent:.{max(0, 1 - math.floor(math.log10(percent)))}f}%"


def short_share(value: float) -> str:
    """A share as short as it can be: for axes, whose marks are round."""
    text = share(value)
    return f"{text[:-1].rstrip('0').rstrip('.')}%" if "." in text else text


def short(value: float) -> str:
    """A size as short as it can be, as 113M: for axes, whose marks are round."""
    for step, letter in STEPS:
        if abs(value) >= step:
            return f"{value / step:g}{letter}".replace("-", "−")
    return f"{value:g}".replace("-", "−")
