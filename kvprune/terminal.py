"""What a terminal may be shown: names and texts of others cannot control it."""

import logging


def printable(text: str) -> str:
    """`text` with · for all that does not print, but for ends of lines and tabs."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)


class PrintableFormatter(logging.Formatter):
    """Log lines that cannot control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
