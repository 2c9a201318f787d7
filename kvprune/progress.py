"""Progress of long work: a bar with rate and time left on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

log = logging.getLogger("kvprune")

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 10.0


def progress(items: Iterable[T], *, total: int, label: str, unit: str, per_item: int = 1) -> Iterator[T]:
    """Yield `items` and show how far the work is.

    `total` and `per_item` count in `unit`, so that the rate reads "tokens/s" and not "batches/s".
    """
    if not log.isEnabledFor(logging.INFO):
        yield from items
    elif sys.stderr.isatty():
        with tqdm(total=total, desc=label, unit=f" {unit}", unit_scale=True, file=sys.stderr) as bar:
            for item in items:
                yield item
                bar.update(min(per_item, total - int(bar.n)))
    else:
        yield from _lines(items, total, label, unit, per_item)


def _lines(items: Iterable[T], total: int, label: str, unit: str, per_item: int) -> Iterator[T]:
    started = printed = time.monotonic()
    done = 0
    for item in items:
        yield item
        done = min(done + per_item, total)
        now = time.monotonic()
        if now - printed >= SECONDS_BETWEEN_LINES or done >= total:
            printed = now
            rate = done / max(now - started, 1e-9)
            left = (total - done) / max(rate, 1e-9)
            log.info(
                "%s: %s of %s %s, %s %s/s, %.0f s left",
                label,
                f"{done:,}",
                f"{total:,}",
                unit,
                f"{rate:,.0f}",
                unit,
                left,
            )
