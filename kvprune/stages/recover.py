"""Recover: the dense model teaches the slim one, and what it has learned replaces its weights in `model/`.

The point of training with the lowest loss on held-out texts stays; where none is lower than before, `model/` stays.
"""

import gc
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open

from kvprune.artifacts import RunFolder, digest, fsync, provenance, read_json, write_json
from kvprune.dense import STORED, Dense
from kvprune.errors import KvpruneError
from kvprune.exported import (
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
    Change,
    Checkpoint,
    Replaced,
    changed_entries,
    find_difference,
    open_checkpoint,
    write_cut_file,
)
from kvprune.ffn.fields import meta_model
from kvprune.ffn.stored import Pieces, read_parameter, stored_pieces
from kvprune.progress import log
from kvprune.recipe import stage_recipe
from kvprune.schema import Evaluate, Recipe
from kvprune.sources.models import load_model
from kvprune.sources.tasks import task_fingerprint
from kvprune.sources.texts import hub_texts, text_fingerprint, token_digest
from kvprune.teaching.kept import Kept
from kvprune.teaching.students import Student, changed_weights, make_student, merged, put, with_adapters
from kvprune.teaching.training import Course, Curve, best_name, mean_loss, teach

TOLD = ("tokens", "seconds", "best", "steps", "learning", "looks")  # of the report, in kvprune.json
FLOAT32_PAIR = 2 * 4  # bytes a parameter, of two models
ANEW = ("README.md", "kvprune.json")


@dataclass(frozen=True)
class Work:
    """What is taught in which run; `trust` lets the slim model's own code run."""

    recipe: Recipe
    dense: Dense
    course: Course
    run: RunFolder
    trust: bool
    kept: Kept


def recover(recipe: Recipe, dense: Dense, course: Course, run: RunFolder, trust: bool) -> dict[str, Any]:
    """Train the exported model of a run by `course`, write what came of it, and return what is to be said of that.

    `trust` lets the slim model's own code run. Where a training like this was stopped, it goes on. Raises KvpruneError
    where the loss is not finite or diverges before anything was gained, and `model/` stays as it is.
    """
    if course.ranks.first:
        check_replaceable(run.model)
    about = describe(recipe, course, run)
    work = Work(recipe, dense, course, run, trust, Kept(run.recovering, about))
    curve, learned = _learn(work)
    gc.collect()  # what wraps a forward holds its model in a circle
    report = {
        "provenance": about,
        "improved": curve.best > 0,
        "best": curve.best,
        "steps": course.steps,
        "tokens": len(curve.losses) * course.section.batch_tokens,
        "seconds": round(curve.seconds),
        "learning": learned.elements,
        "stopped": curve.stopped,
        "judged": judged(recipe.evaluate),  # and so was not trained on
        "looks": [look for look in curve.looks if math.isfinite(mean_loss(look))],  # JSON has no other numbers
        "losses": [loss for loss in curve.losses if math.isfinite(loss)],
    }
    if course.ranks.first:
        _settle(work, report, learned.names)
    return report


def judged(section: Evaluate) -> dict[str, Any]:
    """Which documents the tasks judge on."""
    named = section.model_dump(mode="json", include={"tasks", "limit"})
    return {**named, "files": task_fingerprint(section)["files"]}


@dataclass(frozen=True)
class Learned:
    """Which parameters were trained, adapters themselves, and how many elements they have."""

    names: tuple[str, ...]
    elements: int


def _learn(work: Work) -> tuple[Curve, Learned]:
    """Train. Both models are gone when it is done."""
    dense, course, folder = work.dense, work.course, work.run.model
    teacher = dense.load(course.dtype, course.loaded_on).requires_grad_(requires_grad=False)
    model, _ = load_model(folder, dtype=course.dtype, device=course.loaded_on, trust_remote_code=work.trust)
    if (mine := model.config.get_text_config(decoder=True).vocab_size) != dense.text_config.vocab_size:
        raise KvpruneError(
            f"{folder}: has {mine} words in its vocabulary and its teacher {dense.source.title} "
            f"{dense.text_config.vocab_size}: nothing can be taught between them"
        )
    student = make_student(model, dense.layout, course.section, None if course.split else teacher)
    _start_exactly(work, student, model.config)
    there = dict(student.model.named_parameters())
    learned = Learned(student.trained, sum(there[name].numel() for name in student.trained))
    log.info(
        "recover: %s parameters learn; %s bytes are held once for both models",
        f"{learned.elements:,}",
        f"{student.shared:,}",
    )
    return teach(student, teacher, course, work.kept), learned


def _start_exactly(work: Work, student: Student, config: Any) -> None:
    """Let what learns start from what is stored, which a model in another type has rounded.

    Raises KvpruneError where what has been learned could not be written back.
    """
    before = open_checkpoint(work.run.model)
    pieces = _writable(before, config, changed_weights(student.trained), work.trust)
    there = dict(student.model.named_parameters())
    for name in student.trained:
        if name in pieces and STORED[before.tensors[pieces[name][0].disk].dtype] != work.course.dtype:
            there[name].data.copy_(read_parameter(before, pieces[name], "cpu", torch.float32))


def _writable(before: Checkpoint, config: Any, names: list[str], trust: bool) -> Pieces:
    """How all parameters are stored. Raises KvpruneError where those of `names` cannot be written."""
    pieces = stored_pieces(before, meta_model(config, trust_remote_code=trust))
    kinds = {name: {before.tensors[piece.disk].dtype for piece in mine} for name, mine in pieces.items()}
    if lost := [name for name in names if name not in kinds or not kinds[name] <= STORED.keys()]:
        raise KvpruneError(f"recover: {lost[0]} is stored in a form that cannot be written back; train other parts")
    return pieces


def describe(recipe: Recipe, course: Course, run: RunFolder) -> dict[str, Any]:
    """The provenance of a recovery."""
    return provenance(
        "recovery",
        stage_recipe(recipe, "recover"),
        {
            "exported": read_json(run.model / "kvprune.json")["inputs"],
            "text": text_fingerprint(recipe.recover.texts),
            "tokens": token_digest(course.tokens),
        },
        run={
            "device": course.device.partition(":")[0],
            "dtype": course.dtype,
            "batch_size": course.batch_size,
            "processes": course.ranks.count,
        },
    )


def _settle(work: Work, report: dict[str, Any], names: tuple[str, ...]) -> None:
    """Write the best point of the parameters `names` into `model/`, or leave that as it is, and the report."""
    folder = work.run.model
    if report["stopped"]:
        log.warning("recover: stopped: %s", report["stopped"])
    if report["improved"]:
        _write_model(work, report, names)
    elif report["stopped"]:
        work.kept.clear()
        raise KvpruneError(
            f"recover: {report['stopped']}, and nothing was gained before: {folder} stays as it was; lower "
            f"recover.learning_rate ({work.recipe.recover.learning_rate:g})"
        )
    else:
        log.warning("recover: no point of the training was better on held-out text: %s stays as it was", folder)
        write_json(work.run.recovered, report)
    work.kept.clear()


def _write_model(work: Work, report: dict[str, Any], names: tuple[str, ...]) -> None:
    """Put the trained weights in place of those in `model/`, all else as it is; verified before it is moved there."""
    run, trust, section = work.run, work.trust, work.recipe.recover
    found = work.kept.read(best_name(report["best"]))
    if found is None:
        work.kept.clear()
        raise KvpruneError(f"{work.kept.folder}: the best point is gone; run: kvprune recover {run.path}")
    clean_up(run)
    check_replaceable(run.model)
    before = open_checkpoint(run.model)
    part = run.path / f".model.{os.getpid()}.tmp"
    try:
        part.mkdir()
        model, info = load_model(run.model, dtype="auto", device="cpu", trust_remote_code=trust)
        changed = changed_weights(names)
        pieces = _writable(before, model.config, changed, trust)
        _held_as(model, {name: _kind(before, pieces[name][0].disk) for name in changed})
        if section.train == "lora":
            model = with_adapters(model, work.dense.layout, section)
        put(model, found[0])
        model = merged(model)
        changes = _changes(before, model, pieces, changed, part / ".saved")
        for file in before.files:
            write_cut_file(before.folder / file, changed_entries(before, changes, file), changes, part / file)
            fsync(part / file)
        _carry(run.model, part, before)
        verified = _verify(before, changes, model, part, set(info["unexpected_keys"]), trust)
        write_json(run.recovered, report)
        finish(part, run.model, _about(work, report, verified))
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _about(work: Work, report: dict[str, Any], verified: dict[str, Any]) -> dict[str, Any]:
    """What kvprune.json says of the trained checkpoint: what it said of the exported one, and the training."""
    exported = read_json(work.run.model / "kvprune.json")
    made = report["provenance"]
    return {key: value for key, value in exported.items() if key not in ("files", "digests")} | {
        "recipe": public_recipe(work.recipe, work.dense.source),
        "verified": verified,
        "recover": {
            "report": digest(work.run.recovered),
            **{key: report[key] for key in TOLD},
            "made_with": made["made_with"],
            "run": made["run"],
            "datasets": hub_texts(made["inputs"]["text"]),
            "token_digest": made["inputs"]["tokens"],
        },
    }


def _kind(before: Checkpoint, disk: str) -> torch.dtype:
    """The type in which a tensor is stored."""
    found: torch.dtype = getattr(torch, STORED[before.tensors[disk].dtype])
    return found


def _held_as(model: Any, kinds: dict[str, torch.dtype]) -> None:
    """Hold the parameters named in these types: config.json may name another than their tensors on disk have."""
    there = dict(model.named_parameters())
    for name, kind in kinds.items():
        there[name].data = there[name].data.to(kind)


def _changes(before: Checkpoint, model: Any, pieces: Pieces, names: list[str], scratch: Path) -> dict[str, Change]:
    """What `names` of the model, stored in `pieces`, are on disk now; transformers itself says how it stores them.

    It may be under another name than before: the Hub's gpt2 is stored without the prefix that it writes.
    """
    model.save_pretrained(scratch)
    saved = open_checkpoint(scratch)
    again = stored_pieces(saved, model)
    pairs = (pair for name in names for pair in zip(pieces[name], again.get(name, ()), strict=False))
    disks = {mine.disk: new.disk for mine, new in pairs}
    changes: dict[str, Change] = {}
    try:
        for file in saved.files:
            with safe_open(scratch / file, framework="pt") as tensors:
                for disk, new in disks.items():
                    if saved.tensors[new].file == file:
                        changes[disk] = Replaced(as_words(tensors.get_tensor(new).to(_kind(before, disk))))
    finally:
        shutil.rmtree(scratch)
    wrong = [
        disk
        for disk in (piece.disk for name in names for piece in pieces[name])
        if disk not in changes or changes[disk].shape(before.tensors[disk]) != before.tensors[disk].shape
    ]
    if wrong:
        raise KvpruneError(f"recover: transformers stores {wrong[0]} in another form than it was; train other parts")
    there = dict(model.named_parameters(remove_duplicate=False))
    for name in names:  # what is tied may be stored twice: transformers writes it once, and unties what differs
        for other, parameter in there.items():
            if parameter is there[name] and other != name and other in pieces:
                changes[pieces[other][0].disk] = changes[pieces[name][0].disk]
    return changes


def _carry(source: Path, target: Path, weights: Checkpoint) -> None:
    """Copy all but the weights, and what is written anew. The index stays: names and sizes do."""
    for item in source.iterdir():
        if item.is_dir():
            shutil.copytree(item, target / item.name)
        elif item.name not in weights.files and item.name not in ANEW:
            shutil.copyfile(item, target / item.name)


def _verify(
    before: Checkpoint, changes: dict[str, Change], model: Any, part: Path, known: set[str], trust: bool
) -> dict[str, Any]:
    """Prove that `part` holds the trained model and that stock transformers loads it, and say how.

    It may ignore the keys that are `known`: those that it ignored before.
    """
    after = open_checkpoint(part)
    if (difference := find_difference(before, changes, after)) is not None:
        raise KvpruneError(f"recover: the written checkpoint is wrong: {difference}")
    loaded, info = load_model(part, dtype="auto", device="cpu", trust_remote_code=trust)
    check_keys(info, known, "recover: the trained checkpoint")
    needed = sum(parameter.numel() for parameter in loaded.parameters()) * FLOAT32_PAIR
    about = {"tensors": len(after.tensors), "loads": f"AutoModelForCausalLM as {type(loaded).__name__}"}
    if needed > psutil.virtual_memory().available:
        return about | {"logit_difference": None, "note": f"not run: float32 weights need {needed:,} bytes of memory"}
    kinds = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    _held_as(model, {name: kinds[name] for name, _ in model.named_parameters() if name in kinds})
    expected = logits(model.float())
    distance = apart(logits(loaded.float()), expected)
    if not distance <= LOGIT_TOLERANCE:
        raise KvpruneError(
            f"recover: the written model's logits differ from the trained one's by {distance:.1e} of the largest, and "
            f"{LOGIT_TOLERANCE:.0e} is allowed"
        )
    return about | {"logit_difference": distance, "note": ""}
