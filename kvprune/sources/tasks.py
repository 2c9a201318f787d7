"""Where evaluation tasks come from: the builtin one, lm-eval's own, and the user's task files."""

import hashlib
import platform
from pathlib import Path
from typing import Any

from kvprune.artifacts import library_versions
from kvprune.schema import Evaluate

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
    """Names, sizes and times of a folder's files: task files and the data beside them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    text = "\n".join(f"{path.relative_to(folder)} {(s := path.stat()).st_size} {s.st_mtime_ns}" for path in files)
    return hashlib.sha256(text.encode()).hexdigest()
