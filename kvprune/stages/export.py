"""Export: write the slim checkpoint, and prove that it is what the plan says and that stock transformers loads it."""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from kvprune.artifacts import (
    Plan,
    RunFolder,
    Size,
    digest,
    fsync,
    provenance,
    read_meta,
    write_text,
)
from kvprune.config import needs_code, write_config
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.exported import (
    LOGIT_TOKENS,
    LOGIT_TOLERANCE,
    apart,
    as_words,
    check_keys,
    check_replaceable,
    clean_up,
    finish,
    logits,
    public_recipe,
)
from kvprune.ffn.checkpoint import (
    INDEX,
    Added,
    Change,
    Checkpoint,
    Cut,
    Patched,
    Replaced,
    changed_entries,
    find_difference,
    open_checkpoint,
    write_cut_file,
)
from kvprune.ffn.fields import meta_model
from kvprune.ffn.layout import Layout
from kvprune.ffn.stored import Kept, make_cuts, stored_pieces, stored_shape
from kvprune.ffn.watching import as_rows, value_rows
from kvprune.progress import log, progress
from kvprune.schema import Recipe
from kvprune.sources.models import load_config, load_model, load_tokenizer
from kvprune.sources.texts import hub_texts

# What goes along with the weights. Everything else stays: above all, other copies of the dense weights.
CARRIED = (
    "tokenizer*", "*.model", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "*.tiktoken", "chat_template.*", "additional_chat_templates", "generation_config.json",
    "*processor_config.json", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


@dataclass(frozen=True)
class Verified:
    """What the export proved before it moved the checkpoint into place."""

    tensors: int  # compared bit for bit with the expected slice
    loads: str  # how stock transformers loaded it
    logit_difference: float | None  # largest, relative to the largest logit; None where the model was too large
    note: str


Refitted = tuple[dict[str, Tensor], dict[str, Any]]  # values by parameter names, and their provenance


def make_changes(dense: Dense, plan: Plan, values: dict[str, Tensor]) -> dict[str, Change]:
    """What to cut, and the refitted `values` (by parameter names) to put in place of a cut; by name on disk."""
    kept = [Kept(ffn, item.kept) for ffn, item in zip(dense.layout.ffns, plan.ffns, strict=True)]
    changes: dict[str, Change] = {**make_cuts(dense.pieces, kept, dense.shapes())}
    for ffn in dense.layout.ffns:
        for key, name in ((ffn.value_key, ffn.value.name), (ffn.bias_key, ffn.value_bias)):
            if key in values and name is not None:
                _put_change(changes, dense, name, ffn.expert, as_words(values[key]))
    for name, tensor in added_biases(dense, plan, values).items():
        weight = dense.entries(f"{name.removesuffix('.bias')}.weight")[0]
        changes[f"{weight.name.removesuffix('.weight')}.bias"] = Added(as_words(tensor), weight.dtype, weight.file)
    return changes


def _put_change(changes: dict[str, Change], dense: Dense, name: str, expert: int | None, words: Any) -> None:
    """Replace a parameter, or one expert's part of it, where it lies on disk."""
    pieces = dense.pieces[name]
    if pieces[0].parts > 1 or pieces[0].shares > 1:
        raise KvpruneError(f"{dense.source.title}: {name} is stored in parts, and refitted values cannot be written")
    own = next((piece for piece in pieces if piece.expert == expert), None)
    if own is not None:
        changes[own.disk] = Replaced(words)
        return
    disk, at = pieces[0].disk, expert or 0
    change = changes.get(disk)
    if isinstance(change, Patched):
        change.items[at] = words
    elif isinstance(change, Cut):
        changes[disk] = Patched(change, {at: words})
    else:  # a bias, which has no slots: all of it stays
        size = dense.checkpoint.tensors[disk].shape[1]
        changes[disk] = Patched(Cut(1, np.arange(size)), {at: words})


def added_biases(dense: Dense, plan: Plan, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All biases of FFNs that had none, by parameter names, where `values` hold one: a config has them all or none."""
    ffns = dense.layout.ffns
    if not any(ffn.bias_key in values for ffn in ffns) or all(ffn.value_bias for ffn in ffns):
        return {}
    kind = dense.stored_dtype()
    return {
        name: values.get(name, torch.zeros(size, dtype=kind))
        for ffn, item in zip(ffns, plan.ffns, strict=True)
        for name, size in ffn.missing_biases(item.width).items()
    }


def write_weights(checkpoint: Checkpoint, changes: dict[str, Change], target: Path) -> None:
    """Write every weight file of `checkpoint`, changed, into the folder `target`, shard by shard, and the index."""
    sizes = {file: (checkpoint.folder / file).stat().st_size for file in checkpoint.files}
    total = sum(sizes.values())
    for file in progress(checkpoint.files, total=total, label="export", unit="bytes", per_item=total // len(sizes)):
        entries = changed_entries(checkpoint, changes, file)
        write_cut_file(checkpoint.folder / file, entries, changes, target / file)
        fsync(target / file)
    if checkpoint.index is not None:
        write_text(target / INDEX, json.dumps(_cut_index(checkpoint, changes), indent=2) + "\n")


def with_biases(size: Size, added: dict[str, Tensor], folder: Path) -> Size:
    """The planned size with biases that were `added`, and the bytes that are in `folder` now."""
    elements = sum(tensor.numel() for tensor in added.values())
    return Size(size.slots, size.ffn_params + elements, size.total_params + elements, open_checkpoint(folder).bytes)


def _cut_index(checkpoint: Checkpoint, changes: dict[str, Change]) -> dict[str, Any]:
    """The index of shards, with the sizes that it may tell of made those of the cut tensors."""
    entries = [(entry, changes[name].shape(entry)) for name, entry in checkpoint.tensors.items() if name in changes]
    elements = {entry.name: math.prod(entry.shape) - math.prod(shape) for entry, shape in entries}
    removed = {
        "total_parameters": sum(elements.values()),
        "total_size": sum(elements[entry.name] * entry.itemsize for entry, _ in entries),
    }
    index = {**(checkpoint.index or {})}
    added = {name: change for name, change in changes.items() if isinstance(change, Added)}
    removed["total_parameters"] -= sum(change.elements.size for change in added.values())
    removed["total_size"] -= sum(change.elements.nbytes for change in added.values())
    index["weight_map"] = {**index["weight_map"], **{name: change.file for name, change in added.items()}}
    index["metadata"] = {
        key: value - removed.get(key, 0) if key in removed else value
        for key, value in (index.get("metadata") or {}).items()
    }
    return index


def export(recipe: Recipe, dense: Dense, plan: Plan, refitted: Refitted | None, run: RunFolder) -> Verified:
    """Write `model/` of the run folder: weights, config, tokenizer, card and `kvprune.json`.

    All is written and verified under a temporary name and moved into place at the end. Raises KvpruneError where
    `model/` is not kvprune's own, where the disk is full, or where the result is not exactly what it should be.
    """
    clean_up(run)
    check_replaceable(run.model)
    source, values = dense.source, refitted[0] if refitted else {}
    changes = make_changes(dense, plan, values)
    part = run.path / f".model.{os.getpid()}.tmp"
    try:
        part.mkdir(parents=True)
        write_weights(dense.checkpoint, changes, part)
        added = added_biases(dense, plan, values)
        write_config(dense, plan, part, biased=bool(added))
        carry_over(dense, part)
        verified = verify(dense, plan, values, part)
        about = provenance(
            "checkpoint",
            public_recipe(recipe, source),
            {
                "plan": digest(run.plan),
                "values": digest(run.values) if refitted else None,
                "model": source.fingerprint,
            },
            model={"title": source.title, "commit": source.commit, "note": source.note},
            budget={
                "requested": plan.budget,
                "before": asdict(plan.before),
                "after": asdict(with_biases(plan.after, added, part)),
            },
            ffns=[asdict(item) for item in plan.ffns],
            refit=refitted[1]["ffns"] if refitted else [],
            verified=asdict(verified),
            calibration=calibration(run),
            trust_remote_code=needs_code(plan, dense),
            loads=plan.loads,
        )
        finish(part, run.model, about)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return verified


def calibration(run: RunFolder) -> dict[str, Any] | None:
    """What the counts rest on beside the recipe: tokens, Hub data sets, and how the model was run."""
    if not run.stats.is_file():
        return None
    meta = read_meta(run.stats)
    return {
        "tokens": meta["inputs"]["tokens"],
        "counted": meta["counted"],
        "datasets": hub_texts(meta["inputs"]["text"]),
        "run": meta["run"],
    }


def carry_over(dense: Dense, target: Path) -> None:
    """Copy what goes along with the weights into `target`, and the card as BASE_README.md."""
    folder = dense.source.folder
    patterns = CARRIED + (("*.py",) if dense.trust_remote_code else ())
    for item in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        if item.is_dir():
            shutil.copytree(item, target / item.name)
        elif item.suffix not in (".bin", ".pt", ".safetensors", ".gguf"):
            shutil.copyfile(item, target / item.name)
    if (folder / "README.md").is_file():
        shutil.copyfile(folder / "README.md", target / "BASE_README.md")


def verify(dense: Dense, plan: Plan, values: dict[str, Tensor], folder: Path) -> Verified:
    """Prove that `folder` holds the planned model. Raises KvpruneError, and nothing is kept, where it does not."""
    slim = open_checkpoint(folder)
    if (difference := find_difference(dense.checkpoint, make_changes(dense, plan, values), slim)) is not None:
        raise KvpruneError(f"export: the written checkpoint is wrong: {difference}")
    load_tokenizer(replace(dense.source, folder=folder), trust_remote_code=dense.trust_remote_code)
    trust = needs_code(plan, dense)  # of what was just written, and of what the user trusts
    _check_shapes(dense, slim, folder, set(added_biases(dense, plan, values)), trust)
    needed = 4 * plan.before.total_params + (LOGIT_TOKENS * 2**20)
    if needed > psutil.virtual_memory().available:
        note = f"not run: float32 weights need {needed:,} bytes of memory"
        log.warning("export: every tensor and shape was compared, but the result was %s", note)
        return Verified(len(slim.tensors), f"names and shapes of {dense.config.model_type}", None, note)
    expected, known = _masked_logits(dense, plan, values)
    model, info = load_model(folder, dtype="float32", device="cpu", trust_remote_code=trust)
    check_keys(info, known, "export: the slim checkpoint")
    distance = apart(logits(model), expected)
    if not distance <= LOGIT_TOLERANCE:
        raise KvpruneError(
            f"export: the slim model's logits differ from the masked dense model's by {distance:.1e} of the largest, "
            f"and {LOGIT_TOLERANCE:.0e} is allowed; its slots may not be separable"
        )
    return Verified(len(slim.tensors), f"AutoModelForCausalLM as {type(model).__name__}", distance, "")


def _check_shapes(dense: Dense, slim: Checkpoint, folder: Path, added: set[str], trust: bool) -> None:
    """The slim config builds a model whose parameters have the names and shapes of the slim weight files."""
    config = load_config(replace(dense.source, folder=folder), trust_remote_code=trust)
    model = meta_model(config, trust_remote_code=trust)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    pieces = stored_pieces(slim, model)
    found = {name: stored_shape(slim, mine) for name, mine in pieces.items()}
    wrong = [name for name, shape in found.items() if shapes.get(name, shape) != shape]
    if wrong or {name: mine for name, mine in pieces.items() if name not in added} != dense.pieces:
        raise KvpruneError(f"export: the slim config and weights do not fit each other: {(wrong or ['names'])[0]}")


def _masked_logits(dense: Dense, plan: Plan, values: dict[str, Tensor]) -> tuple[Tensor, set[str]]:
    """The dense model's float32 logits with the coefficients of removed slots set to zero, and keys that it ignores."""
    model, info = dense.load_with_report("float32", "cpu")
    mask_slots(model, dense.layout, plan)
    put_values(model, dense.layout, plan, values)
    return logits(model), set(info["unexpected_keys"])


@torch.no_grad()
def mask_slots(model: Any, layout: Layout, plan: Plan) -> None:
    """Make the model compute as if the plan's removed slots were not there: they write nothing."""
    for ffn, item in zip(layout.ffns, plan.ffns, strict=True):
        value_rows(model, ffn)[item.removed] = 0


@torch.no_grad()
def put_values(model: Any, layout: Layout, plan: Plan, values: dict[str, Tensor]) -> None:
    """Give the dense model the refitted `values` of its kept slots, in place."""
    for ffn, item in zip(layout.ffns, plan.ffns, strict=True):
        rows = value_rows(model, ffn)
        if (new := values.get(ffn.value_key)) is not None:
            rows[torch.tensor(item.kept, device=rows.device)] = as_rows(new, ffn).to(rows)
        if (bias := values.get(ffn.bias_key)) is not None:
            if ffn.value_bias is not None and ffn.expert is not None:
                model.get_parameter(ffn.value_bias)[ffn.expert] = bias.to(rows)
            else:
                owner = model.get_submodule(ffn.bias_key.rpartition(".")[0])
                owner.bias = nn.Parameter(bias.to(rows), requires_grad=False)
