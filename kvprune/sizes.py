"""Sizes as people write them: 110M parameters, 200MiB."""

import math
import re

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
BYTE_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_size(text: str, units: dict[str, int]) -> int:
    """The whole number that `text` stands for, in `units`. Raises ValueError where it is none."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in units:
        example = "110M" if units is UNITS else "200MiB"
        raise ValueError(f"should be a number or a text like {example!r}")
    size = float(found[1]) * units[found[2].upper()]
    if math.isinf(size):
        raise ValueError("should be a size that a model can have")
    return math.floor(size)
