"""What a run will need and give, told before minutes are spent; and refused where it cannot end well."""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvprune.artifacts import UNITS, RunFolder, Size, budget_words
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.gram import solving_type
from kvprune.ffn.layout import Field, Layout
from kvprune.ffn.state import kept_bytes
from kvprune.ffn.walk import Setup
from kvprune.progress import log
from kvprune.schema import Recipe, Recover
from kvprune.teaching.students import lighter

SPARE_SHARE = 0.5  # of the memory that is left, for Gram matrices of more than one FFN at a time
STATS_BYTES_PER_SLOT = 33 * 8 + 4 * 8 + 3 * 4  # histogram, float64 sums, float32 maximum and norms

FLOAT32_AND_ADAM = 4 * 4  # bytes a parameter that learns: itself, its gradient, two moments
TOP_BYTES_PER_SLOT = 10 * (4 + 8) + 4  # ten triggers: a coefficient and a place each; a norm


def tell_budget(recipe: Recipe, dense: Dense, before: Size, after: Size, widths: dict[str, int]) -> None:
    """Log the FFNs found, parameters in and out of them, and what the budget means in each unit."""
    layout = dense.layout
    requested = budget_words(recipe.plan.budget.model_dump())
    outside = before.total_params - before.ffn_params
    for field in layout.fields:
        log.info("%s: %s", dense.source.title, field_words(layout, field))
    for reason in layout.left:
        log.warning("%s: experts stay as they are: %s", dense.source.title, reason)
    if bare := [index for index in range(len(layout.layers)) if not layout.in_layer(index)]:
        log.info("%d of %d layers have no FFN that can be slimmed", len(bare), len(layout.layers))
    log.info("parameters: %s in FFNs, %s outside", f"{before.ffn_params:,}", f"{outside:,}")
    changes = ", ".join(f"{field.name} {field.value} -> {widths[field.name]}" for field in layout.fields)
    log.info("budget %s, round_to %s: %s", requested, recipe.plan.round_to, changes)
    for key, label in UNITS.items():
        old, new = getattr(before, key), getattr(after, key)
        log.info("  %s %s -> %s (%.1f %%)", label, f"{old:,}", f"{new:,}", 100 * new / old)
    for field in layout.fields:
        if widths[field.name] == field.value and recipe.plan.budget.keep != 1:
            log.warning(
                "plan: the budget removes nothing of %s with round_to %s; lower round_to",
                field.words,
                recipe.plan.round_to,
            )


def field_words(layout: Layout, field: Field) -> str:
    """The FFNs whose width a field sets: how many, of which kind."""
    ffns = [ffn for ffn in layout.ffns if ffn.name in field.multiples]
    experts = [ffn for ffn in ffns if ffn.expert is not None]
    others = [ffn for ffn in ffns if ffn.expert is None]
    parts = [
        f"{len(some)} {'gated' if some[0].gated else 'plain'} {what} of width {some[0].width}"
        for some, what in ((experts, "experts"), (others, "FFNs"))
        if some
    ]
    return f"{' and '.join(parts)} ({field.name})"


@dataclass(frozen=True)
class Need:
    """Bytes of memory that a stage takes, by part."""

    weights: int  # of one layer of each model that is walked, or of the whole model
    batch: int  # the widest of a layer's tensors
    sums: int  # statistics of one layer, and the Gram matrices of one FFN
    grams: int  # what the Gram matrices of one more FFN of a layer take
    hidden: int  # hidden states of all sequences of this process, which may also be on disk

    @property
    def least(self) -> int:
        return self.weights + self.batch + self.sums


def need(recipe: Recipe, dense: Dense, setup: Setup, *, stage: str, whole: bool) -> Need:
    """What `stage` (calibrate, refit, inspect) takes, an estimate; with `whole`, by forwards of the whole model."""
    section, layout = recipe.calibrate, dense.layout
    size, width, hidden = setup.dtype.itemsize, layout.widest, max(ffn.hidden for ffn in layout.ffns)
    weights = layout.total_params if whole else max(_layer_elements(dense, layer) for layer in layout.layers)
    if stage == "inspect" and not whole:
        weights += dense.text_config.vocab_size * hidden  # the head
    reached = max(sum(ffn.width for ffn in layout.ffns if ffn.layer == layer) for layer in layout.layers)
    runs = 2 if stage == "refit" and recipe.refit.method == "sequential" else 1
    gram = stage == "refit" or (stage == "calibrate" and "gram" in section.collect)
    solving = solving_type(width).itemsize
    # A refit holds two sums, two problems, and for a solution a scaled copy and its factor; an elimination an inverse.
    matrices = width**2 * (8 + 5 * solving if stage == "refit" else 4 + 3 * solving) + 2 * width * hidden * solving
    counted = STATS_BYTES_PER_SLOT * (sum(ffn.width for ffn in layout.ffns) if whole else reached)
    tops = TOP_BYTES_PER_SLOT * sum(ffn.width for ffn in layout.ffns)
    sequences = -(-section.tokens // section.sequence_length // setup.ranks.count)
    length = section.sequence_length
    graph = length * (len(layout.layers) * (4 * width + 16 * hidden) * size + 12 * dense.text_config.vocab_size)
    gradients = graph if whole and "gradient" in section.collect else 0  # of one sequence, with its logits
    return Need(
        weights=weights * size * (1 if whole else runs),
        batch=max(gradients, min(setup.batch_size, sequences) * length * (4 * width + 8 * hidden) * size),
        sums=counted * (stage == "calibrate") + tops * (stage == "inspect") + gram * matrices,
        grams=gram * (8 if stage == "refit" else 4) * width**2,
        hidden=0 if whole else runs * sequences * section.sequence_length * hidden * size,
    )


def _layer_elements(dense: Dense, layer: str) -> int:
    names = [name for name in dense.pieces if name.startswith(f"{layer}.")]
    return sum(math.prod(entry.shape) for name in names for entry in dense.entries(name))


def check_memory(
    recipe: Recipe, dense: Dense, setup: Setup, *, stage: str, whole: bool, limit: int | None, tell: bool
) -> tuple[bool, int]:
    """Whether hidden states fit in memory, beside the rest, and for how many FFNs at a time Gram matrices do.

    With `tell`, logs what is needed.

    `limit` is the user's, in bytes. Raises KvpruneError where not even one layer fits.
    """
    needed = need(recipe, dense, setup, stage=stage, whole=whole)
    free = _free(setup.device)
    allowed = min(limit or free, free)
    if setup.device.startswith("cuda"):  # hidden states are on the host
        in_memory, allowed = needed.hidden <= min(limit or _free("cpu"), _free("cpu")), free
    else:
        in_memory = needed.least + needed.hidden <= allowed
    model = "weights" if whole else "weights of a layer"
    parts = (
        f"{model} {_gib(needed.weights)}, a batch of {setup.batch_size} {_gib(needed.batch)}, sums {_gib(needed.sums)}"
    )
    where = "" if whole else f"; hidden states {_gib(needed.hidden)} {'in memory' if in_memory else 'on disk'}"
    if tell:
        log.info("memory on %s: about %s (%s)%s; %s free", setup.device, _gib(needed.least), parts, where, _gib(free))
    if needed.least <= allowed:
        on_host = setup.device.startswith("cuda")  # where hidden states are, in that case
        spare = allowed - needed.least - (needed.hidden if in_memory and not on_host else 0)
        most = len(dense.layout.ffns)
        return in_memory, min(most, 1 + int(SPARE_SHARE * max(spare, 0)) // needed.grams) if needed.grams else most
    limited = limit == allowed
    what = f"--memory {_gib(allowed)}" if limited else f"{dense.source.title}: memory on {setup.device}"
    ways = ["raise --memory"] if limited else []
    left = allowed - needed.weights - needed.sums
    sequences = -(-recipe.calibrate.tokens // recipe.calibrate.sequence_length // setup.ranks.count)
    fitting = int(min(setup.batch_size, sequences) * left / needed.batch) if left > 0 else 0
    if fitting:
        ways.append(f"use --batch-size {fitting}")
    elif left > 0:
        ways.append("use a shorter calibrate.sequence_length")
    ways += [] if fitting or left > 0 else ["use dtype: bfloat16, a smaller model, or a device with more memory"]
    raise KvpruneError(
        f"{what}: {'the model' if whole else 'one layer'} needs about {_gib(needed.least)} ({parts}), and "
        f"{_gib(allowed)} are {'allowed' if limited else 'free'}; {', or '.join(ways)}"
    )


def check_training(dense: Dense, section: Recover, device: str, dtype: torch.dtype, micro: int, *, whole: bool) -> None:
    """Log the memory that a recovery takes, an estimate. Raises KvpruneError, with the knobs, where less is free.

    `micro` sequences run at once; with `whole`, all that a forward makes is kept, else a layer's only.
    """
    layout, size = dense.layout, dtype.itemsize
    hidden, width = max(ffn.hidden for ffn in layout.ffns), layout.widest
    models = 2 * layout.total_params * size + _learning(layout, section) * FLOAT32_AND_ADAM
    inside = (len(layout.layers) if whole else 1) * (16 * hidden + 8 * width)
    token = (inside + len(layout.layers) * hidden) * size + 16 * dense.text_config.vocab_size
    batch = micro * section.sequence_length * token
    free = _free(device)
    parts = f"two models and what learns {_gib(models)}, a batch of {micro} {_gib(batch)}"
    log.info("memory on %s: about %s to recover (%s); %s free", device, _gib(models + batch), parts, _gib(free))
    if models + batch > free:
        raise KvpruneError(
            f"{dense.source.title}: a recovery needs about {_gib(models + batch)} on {device} ({parts}), and "
            f"{_gib(free)} are free; use {lighter(section, micro, whole=whole)}, or a device with more memory"
        )


def training_disk(dense: Dense, section: Recover) -> int:
    """Bytes that a recovery takes on disk: its last step with two moments, its best point, the new checkpoint twice.

    Before that, both of these points a second time: new ones are written before the former ones go.
    """
    point = 4 * _learning(dense.layout, section)
    return 4 * point + max(4 * point, 2 * dense.checkpoint.bytes)


def _learning(layout: Layout, section: Recover) -> int:
    """How many parameters learn, at most."""
    slots = sum(ffn.width * ffn.params_per_slot for ffn in layout.ffns)
    values = sum(ffn.width * ffn.hidden for ffn in layout.ffns)
    total = layout.total_params
    return {"values": values, "ffn": slots, "all": total, "lora": total // 50}[section.train]


def check_weights(dense: Dense, setup: Setup, purpose: str) -> None:
    """Raise KvpruneError where the whole model, which is loaded for a `purpose`, does not fit in memory."""
    _check_fits(
        dense.layout.total_params * setup.dtype.itemsize,
        setup.device,
        f"{dense.source.title}: {purpose} all of it is loaded",
        "use dtype: bfloat16, a device with more memory, or go without",
    )


def check_pair(dense: Dense, slim_params: int, device: str, dtype: torch.dtype) -> None:
    """Raise KvpruneError where dense and slim, both loaded at the end of an evaluation, do not fit in memory."""
    _check_fits(
        (dense.layout.total_params + slim_params) * dtype.itemsize,
        device,
        f"{dense.source.title}: an evaluation loads it and the slim model",
        "use dtype: bfloat16 or a device with more memory, or go stage by stage up to kvprune export, and evaluate "
        "elsewhere",
    )


def _check_fits(weights: int, device: str, what: str, ways: str) -> None:
    if weights > (free := _free(device)):
        raise KvpruneError(f"{what}: {_gib(weights)} on {device}, and {_gib(free)} are free; {ways}")


def check_states(recipe: Recipe, dense: Dense, setup: Setup, run: Path, *, stage: str) -> None:
    """Raise KvpruneError where the disk for hidden states has less than two or three times their size."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    states = (setup.cache or RunFolder(run).walk).absolute()
    hidden = need(recipe, dense, setup, stage=stage, whole=False).hidden * here
    wanted = hidden * (2 if setup.in_memory else 3) - kept_bytes(states, run)
    place = next(folder for folder in (states, *states.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if wanted > free:
        raise KvpruneError(
            f"{place}: hidden states need {wanted:,} bytes on disk and {free:,} are free; make room, name another disk "
            "with --hidden-cache, or lower calibrate.tokens"
        )


def check_disk(run: Path, needed: int, purpose: str = "") -> None:
    """Log the disk that an export, or a `purpose`, needs. Raises KvpruneError where the run folder's disk has less."""
    place = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    log.info("disk: %s needed%s, %s free", _gib(needed), purpose, _gib(free))
    if free < needed:
        raise KvpruneError(
            f"{run}: {needed:,} bytes are needed{purpose} and {free:,} are free; make room or choose another disk"
        )


def _free(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available) // int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )  # shared with the others


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
