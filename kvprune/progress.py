"""Progress of long work: a bar with rate and time left on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from tqdm import tqdm

log = logging.getLogger("kvprune")

T = TypeVar("T")


class Advance(Protocol):
    """Tell that an amount of work is done, and what else is known of it by now."""

    def __call__(self, amount: int, note: str = "", /) -> None: ...


SECONDS_BETWEEN_LINES = 10.0


def progress(items: Iterable[T], *, total: int, label: str, unit: str, per_item: int = 1) -> Iterator[T]:
    """Yield `items` and show how far the work is.

    `total` and `per_item` count in `unit`, so that the rate reads "tokens/s" and not "batches/s".
    """
    with advancing(total=total, label=label, unit=unit) as advance:
        for item in items:
            yield item
            advance(per_item)


@contextmanager
def only_errors() -> Iterator[None]:
    """Tell nothing else for as long as that: for checks that are made, and tell, once more."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def advancing(*, total: int, label: str, unit: str) -> Iterator[Advance]:
    """Give a function to call with each amount of `unit` that is done; never shows more than `total`."""
    if not log.isEnabledFor(logging.INFO):
        yield lambda _amount, _note="": None
    elif sys.stderr.isatty():
        with tqdm(total=total, desc=label, unit=f" {unit}", unit_scale=True, file=sys.stderr) as bar:

            def advance(amount: int, note: str = "", /) -> None:
                bar.set_postfix_str(note, refresh=False)
                bar.update(min(amount, total - int(bar.n)))

            yield advance
    else:
        yield _lines(total, label, unit)


def _lines(total: int, label: str, unit: str) -> Advance:
    started = printed = time.monotonic()
    done = 0

    def advance(amount: int, note: str = "", /) -> None:
        nonlocal printed, done
        done = min(done + amount, total)
        now = time.monotonic()
        if now - printed >= SECONDS_BETWEEN_LINES or done >= total:
            printed = now
            rate = done / max(now - started, 1e-9)
            left = (total - done) / max(rate, 1e-9)
            log.info(
                "%s: %s of %s %s, %s %s/s, %.0f s left%s",
                label,
                f"{done:,}",
                f"{total:,}",
                unit,
                f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}",
                unit,
                left,
                f", {note}" if note else "",
            )

    return advance
