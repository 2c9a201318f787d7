"""The one error type of kvprune: a single line that says what, where, and what to do next."""


class KvpruneError(Exception):
    """Something that the user can mend. The message is one line (or one line a problem) and needs no traceback."""


class StaleError(KvpruneError):
    """A stage would read an artifact that no longer fits the recipe or its own inputs."""
