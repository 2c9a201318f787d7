"""The one error type of kvprune: a single line that says what, where, and what to do next."""

from collections.abc import Iterator
from contextlib import contextmanager


class KvpruneError(Exception):
    """Something that the user can mend. The message is one line (or one line a problem) and needs no traceback."""


class StaleError(KvpruneError):
    """A stage would read an artifact that no longer fits the recipe or its own inputs."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say of what an error is that comes from within."""
    try:
        yield
    except KvpruneError as error:
        raise KvpruneError(f"{what}: {error}") from None
