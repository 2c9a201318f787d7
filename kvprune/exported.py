"""The folder of an exported checkpoint: how it is finished, replaced, and what every check of it rests on."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import RunFolder, digest, file_names, fsync, read_json, write_json, write_text
from kvprune.card import model_card
from kvprune.errors import KvpruneError
from kvprune.schema import Recipe
from kvprune.sources.models import ModelSource

WORDS = {2: torch.int16, 4: torch.int32}  # what float tensors of so many bytes an element are seen as
LOGIT_TOKENS = 64
LOGIT_TOLERANCE = 1e-4  # of the largest logit, in float32


def clean_up(run: RunFolder) -> None:
    """Mend what a killed export left: half a checkpoint goes, a whole one that was being replaced comes back."""
    for left in run.path.glob(".model.*.old"):
        if run.model.exists():
            shutil.rmtree(left)
        else:
            left.rename(run.model)
    for left in run.path.glob(".model.*.tmp"):
        shutil.rmtree(left)


def check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder that is not an export of kvprune, or in which the user keeps or changed something."""
    if not folder.exists():
        return
    about = folder / "kvprune.json"
    way_out = "move it away or choose another run folder"
    if not about.is_file():
        raise KvpruneError(f"{folder}: exists and is not an export of kvprune; {way_out}")
    digests = read_json(about).get("digests", {})
    for name in (name for name in file_names(folder) if name != about.name):
        if name not in digests:
            raise KvpruneError(f"{folder}: holds {name}, which is not of the export; {way_out}")
        if digest(folder / name) != digests[name]:
            raise KvpruneError(f"{folder}: holds {name}, which has changed since the export; {way_out}")


def finish(part: Path, target: Path, about: dict[str, Any]) -> None:
    """Write card and `kvprune.json` (`about`, with sizes and digests) into `part`, and move it to `target`."""
    files = {name: (part / name).stat().st_size for name in file_names(part)}
    write_text(part / "README.md", model_card(about, part))  # it may be edited: only its digest is kept
    digests = {name: digest(part / name) for name in file_names(part)}
    write_json(part / "kvprune.json", {**about, "files": files, "digests": digests})
    _move_into_place(part, target)


def _move_into_place(part: Path, target: Path) -> None:
    for item in part.iterdir():
        if item.is_file():
            fsync(item)
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    part.rename(target)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def public_recipe(recipe: Recipe, source: ModelSource) -> dict[str, Any]:
    """The recipe as it is published: a local path is no use to others and is cut to its last part."""
    data = recipe.model_dump(mode="json")
    if Path(recipe.model).exists():
        data["model"] = source.title
    trained = [text for key in ("text", "held_out") for text in data["recover"][key] or ()]
    for text in [*data["calibrate"]["text"], *trained]:
        if Path(text["source"]).exists():
            text["source"] = Path(text["source"]).name
    if data["evaluate"]["include_path"]:
        data["evaluate"]["include_path"] = Path(data["evaluate"]["include_path"]).name
    return data


def as_words(tensor: Tensor) -> Any:
    """A float tensor's elements as unsigned integers of their size."""
    size = tensor.element_size()
    return tensor.contiguous().view(WORDS[size]).numpy().view(f"<u{size}")


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    """Logits `[1, LOGIT_TOKENS, vocabulary]` on tokens that are the same for every model of this vocabulary."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        0, model.config.get_text_config(decoder=True).vocab_size, (1, LOGIT_TOKENS), generator=generator
    )
    found: Tensor = model(tokens, use_cache=False).logits
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference of logits, relative to the largest expected one."""
    return float((found - expected).abs().max() / expected.abs().max())


def check_keys(info: dict[str, Any], known: set[str], what: str) -> None:
    """Raise KvpruneError where transformers' report on loading `what` names any key.

    It may ignore keys that are `known`: what it was made from holds them too, and they are ignored there.
    """
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = set(info[kind]) - (known if kind == "unexpected_keys" else set())
        if keys:
            raise KvpruneError(f"{what} loads with {kind.replace('_', ' ')}: {sorted(map(str, keys))[:3]}")
