"""Which causal language models of the installed transformers can be slimmed, and why others cannot: one row a type.

    python scripts/survey_architectures.py            # print the table
    python scripts/survey_architectures.py --write    # write it to scripts/architectures.md

Tiny configs (tests/families.py) where there are any, else a class's own defaults. The letters of shapes are explained
in the head of the table.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))
from kvprune.errors import KvpruneError
from kvprune.ffn.find import find_layout
from kvprune.ffn.layout import Ffn, Layout
from tests.families import FAMILIES, family_config

FILE = Path(__file__).parent / "architectures.md"
REASON_LETTERS = 180
HEAD = """# Architectures

Every causal language model type of transformers {version}: {supported} of {count} can be slimmed. Written by
`python scripts/survey_architectures.py --write`. What a real checkpoint needs in addition: unquantised weights, stored
as safetensors in a form that can be cut piece by piece.

Shapes: A gated, B gated with gate and up fused, C plain, D plain and inline in the decoder layer, E plain Conv1D,
F key and value in sibling modules, G experts. A star: part of the model, told beside it, stays as it is.

| model type | shapes | width fields | |
|---|---|---|---|
"""


def shape_of(ffn: Ffn) -> str:
    """The letter of an FFN's shape."""
    if ffn.expert is not None:
        return "G"
    if ffn.keys[0].fused:
        return "B"
    if len(ffn.keys) == 2:
        return "A"
    if ffn.keys[0].axis == 1:
        return "E"
    key, value = (name.removesuffix(".weight").rpartition(".")[0] for name in (ffn.keys[0].name, ffn.value.name))
    if key != value:
        return "F"
    return "D" if value == ffn.layer else "C"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Model type, shapes, width fields, and a reason where it is not supported or not in all parts."""
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found = _find(kind)
        if isinstance(found, str):
            yield kind, "–", "–", f"not supported: {_short(found)}"
            continue
        star = "*" if found.left else ""
        shapes = ", ".join(sorted({shape_of(ffn) for ffn in found.ffns}))
        fields = ", ".join(field.name for field in found.fields)
        yield kind, f"{shapes}{star}", fields, _short("; ".join(found.left))


def _find(kind: str) -> Layout | str:
    try:
        return find_layout(_config(kind))
    except KvpruneError as error:
        return str(error).removeprefix(f"model type {kind}: ")
    except Exception as error:  # noqa: BLE001  (configs raise anything where their defaults do not fit each other)
        return f"transformers builds no config or model of it here: {error}"


def _config(kind: str) -> Any:
    name = next((name for name, (other, _) in FAMILIES.items() if other == kind), None)
    return family_config(name) if name is not None else CONFIG_MAPPING[kind]()


def _short(text: str) -> str:
    """One cell of a table."""
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= REASON_LETTERS else text[:REASON_LETTERS].rsplit(" ", 1)[0] + " …"


def table() -> str:
    """The whole file."""
    found = list(rows())
    supported = sum(not reason.startswith("not supported") for *_, reason in found)
    head = HEAD.format(version=transformers.__version__, supported=supported, count=len(found))
    return head + "".join(f"| {' | '.join(row)} |\n" for row in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    text = table()
    if arguments.write:
        FILE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
