"""The lines that the code is built along: imports run one way, files stay small, help is fast."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kvprune"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "data" not in path.parts)
# A module may import from its own room only where that room allows it, and from rooms to its left.
ROOMS = [
    ["errors", "terminal"],
    ["progress", "ranks", "sizes"],
    ["pages"],
    ["schema", "arguments"],
    ["recipe", "artifacts", "card"],
    ["sources", "ffn"],
    ["dense", "staleness"],
    ["config", "exported", "reading", "teaching"],
    ["stages"],
    ["results"],
    ["preflight"],
    ["options"],
    ["opening", "tokens"],
    ["pipeline"],
    ["inspecting", "sweeping", "comparing", "publishing", "reproducing"],
    ["cli"],
]
INSIDE = {"sources", "ffn", "pages", "reading", "teaching", "results"}


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else "kvprune"


def rank(room: str) -> int:
    return next(at for at, rooms in enumerate(ROOMS) if room in rooms)


def imports(path: Path) -> set[str]:
    """Modules of kvprune that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvprune":
            found |= {f"{node.module}.{item.name}" if node.module == "kvprune" else node.module for item in node.names}
        elif isinstance(node, ast.Import):
            found |= {item.name for item in node.names if item.name.split(".")[0] == "kvprune"}
    return found - {"kvprune.__version__"}


@pytest.mark.parametrize("path", [file for file in FILES if file.stem not in ("__init__", "__main__")], ids=str)
def test_imports_run_one_way(path: Path) -> None:
    me = ".".join(("kvprune", *path.relative_to(PACKAGE).with_suffix("").parts))
    for other in imports(path):
        mine, theirs = room_of(me), room_of(other)
        allowed = (
            rank(theirs) < rank(mine) or (mine == theirs and mine in INSIDE) or {mine, theirs} == {"sources", "ffn"}
        )
        assert allowed or (mine, theirs) in {("card", "artifacts")}, f"{me} imports {other}"


def test_stages_do_not_import_each_other() -> None:
    for path in (PACKAGE / "stages").glob("*.py"):
        assert not [other for other in imports(path) if other.startswith("kvprune.stages")], path


def test_architectures_are_known_in_one_place() -> None:
    names = ("gate_proj", "down_proj", "c_fc", "intermediate_size", "n_inner", "Conv1D")
    for path in FILES:
        code = path.read_text(encoding="utf-8")
        assert path.name == "layout.py" or not [name for name in names if name in code], path


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["plan", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from kvprune.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'lm_eval', 'pydantic', 'jinja2', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_importing_the_package_imports_no_torch_and_all_names_are_there() -> None:
    code = "import sys, kvprune; assert 'torch' not in sys.modules\nfor name in kvprune.__all__: getattr(kvprune, name)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        code = path.read_text(encoding="utf-8")
        assert "pickle" not in code.replace("pickled", "").replace("unpickl", ""), path
        assert "torch.load" not in code, path
