"""Where evaluation tasks come from: the builtin one, lm-eval's own, and the user's task files."""

import hashlib
import platform
from pathlib import Path
from typing import Any

from kvprune.artifacts import digest, library_versions
from kvprune.errors import KvpruneError
from kvprune.schema import Evaluate

WHOLE = 2**24  # bytes: of a larger file beside task files, size and time stand for what it holds
BUILTIN_FOLDER = Path(__file__).parents[1] / "data" / "tasks"
SEEN_BY_LM_EVAL = ("kvprune", "torch", "transformers", "datasets", "lm_eval")


def task_fingerprint(section: Evaluate) -> dict[str, Any]:
    """What the tasks' results depend on beside the model and the recipe's values: task files and libraries."""
    versions = library_versions()
    builtin = "builtin" in section.tasks
    return {
        "files": _folder_digest(Path(section.include_path)) if section.include_path else None,
        "builtin": _builtin_digest() if builtin else None,
        "python": platform.python_version() if builtin else None,  # the builtin text is Python's own
        "versions": {name: versions[name] for name in SEEN_BY_LM_EVAL},
    }


def _builtin_digest() -> str:
    files = sorted(path for path in BUILTIN_FOLDER.iterdir() if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _folder_digest(folder: Path) -> str:
    """SHA-256 of a folder's files, task files and the data beside them, by name and by what they hold."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    text = "\n".join(f"{path.relative_to(folder).as_posix()} {_mark(path)}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()


def _mark(path: Path) -> str:
    """What a file holds, so that a copy elsewhere is the same; its size and time where reading it would take long."""
    try:
        stat = path.stat()
        return digest(path) if stat.st_size <= WHOLE else f"{stat.st_size} {stat.st_mtime_ns}"
    except OSError as error:
        raise KvpruneError(f"evaluate.include_path: {path}: cannot read: {error.strerror}") from None
