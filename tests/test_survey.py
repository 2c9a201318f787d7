"""The table of architectures in the repository is that of the transformers which is pinned."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families import FAMILIES

SCRIPTS = Path(__file__).parents[1] / "scripts"


def survey() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("survey_architectures", SCRIPTS / "survey_architectures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_architectures_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    module = survey()
    written = (SCRIPTS / "architectures.md").read_text(encoding="utf-8")
    pinned = [
        line for line in (SCRIPTS / "constraints.txt").read_text().splitlines() if line.startswith("transformers")
    ]
    assert pinned == [f"transformers=={transformers.__version__}"]
    assert f"transformers {transformers.__version__}: " in written
    lines = {line.split("|")[1].strip(): line for line in written.splitlines() if line.startswith("| ")}
    lines.pop("model type")
    assert lines.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    # What has no tiny config here depends on what else is installed.
    tiny = {kind for kind, _ in FAMILIES.values()}
    monkeypatch.setattr(module, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", sorted(tiny & lines.keys()))
    for row in module.rows():
        assert lines[row[0]] == f"| {' | '.join(row)} |"
    supported = sum("not supported" not in line for line in lines.values())
    assert f"{supported} of {len(lines)} can be slimmed" in written
    assert supported >= 165


def test_every_shape_is_there() -> None:
    written = (SCRIPTS / "architectures.md").read_text(encoding="utf-8")
    shapes = {
        shape for line in written.splitlines() if line.startswith("| ") for shape in line.split("|")[2].strip(" *")
    }
    assert set("ABCDEFG") <= shapes
