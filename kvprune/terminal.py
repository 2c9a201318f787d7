"""What goes out: text of others that cannot control a terminal, and numbers that JSON knows."""

import logging
import math
from typing import Any


def printable(text: str) -> str:
    """`text` with · for all that does not print, but for ends of lines and tabs."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)


class PrintableFormatter(logging.Formatter):
    """Log lines that cannot control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def finite(data: Any) -> Any:
    """Plain data as JSON can have it: infinities and NaN become null."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data
