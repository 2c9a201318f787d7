"""What a run will need and give, told before minutes are spent; and refused where it cannot end well."""

import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from kvprune.artifacts import UNITS, Size, budget_words
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.progress import log
from kvprune.recipe import Recipe
from kvprune.stages.calibrate import count_batch, empty

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATS_BYTES_PER_SLOT = 33 * 8 + 4 * 8 + 3 * 4  # histogram, float64 sums, float32 maximum and norms


def tell_budget(recipe: Recipe, dense: Dense, before: Size, after: Size) -> None:
    """Log the FFNs found, parameters in and out of them, and what the budget means in each unit."""
    layout = dense.layout
    width = after.slots // len(layout.ffns)
    requested = budget_words(recipe.plan.budget.model_dump())
    kind = "gated" if len(layout.ffns[0].keys) == 2 else "plain"
    outside = before.total_params - before.ffn_params
    log.info("%s: %d %s FFNs of width %d", dense.source.title, len(layout.ffns), kind, layout.width)
    log.info("parameters: %s in FFNs, %s outside", f"{before.ffn_params:,}", f"{outside:,}")
    log.info("budget %s, round_to %d: width %d -> %d", requested, recipe.plan.round_to, layout.width, width)
    for key, label in UNITS.items():
        old, new = getattr(before, key), getattr(after, key)
        log.info("  %s %s -> %s (%.1f %%)", label, f"{old:,}", f"{new:,}", 100 * new / old)
    if width == layout.width and recipe.plan.budget.keep != 1:
        log.warning("plan: the budget removes nothing with round_to %d; lower round_to", recipe.plan.round_to)


def check_memory(recipe: Recipe, dense: Dense, device: str, batch_size: int) -> None:
    """Log what the calibration needs of memory. Raises KvpruneError where the weights alone do not fit.

    An estimate: weights, statistics, and for a batch the widest of a layer's tensors.
    """
    section, layout = recipe.calibrate, dense.layout
    size = BYTES[_dtype(recipe, dense)]
    weights = dense.layout.total_params * size
    stats = sum(ffn.width for ffn in layout.ffns) * STATS_BYTES_PER_SLOT
    batch = batch_size * section.sequence_length * (4 * layout.width + 8 * layout.ffns[0].hidden) * size
    free = _free(device)
    parts = f"weights {_gib(weights)}, a batch of {batch_size} {_gib(batch)}"
    log.info("memory on %s: about %s (%s); %s free", device, _gib(weights + stats + batch), parts, _gib(free))
    if weights + stats > free:
        raise KvpruneError(
            f"{dense.source.title}: its weights need {_gib(weights)} of memory on {device} and {_gib(free)} are free; "
            "use dtype: bfloat16, a smaller model, or a device with more memory"
        )
    if weights + stats + batch > free:
        fitting = int(batch_size * (free - weights - stats) / batch)
        knob = f"--batch-size {fitting}" if fitting else "a shorter calibrate.sequence_length"
        raise KvpruneError(
            f"--batch-size {batch_size}: sequences of {section.sequence_length} tokens need about {_gib(batch)} beside "
            f"the weights' {_gib(weights)}, and {_gib(free)} are free on {device}; use {knob}"
        )


def check_disk(run: Path, needed: int) -> None:
    """Log the disk that an export needs. Raises KvpruneError where the run folder's disk has less."""
    place = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    log.info("disk: %s needed, %s free", _gib(needed), _gib(free))
    if free < needed:
        raise KvpruneError(
            f"{run}: {needed:,} bytes are needed and {free:,} are free; make room or choose another disk"
        )


def tell_time(dense: Dense, model: Any, tokens: Tensor, skip_first: int) -> None:
    """Log how long the counting of `tokens` `[sequences, sequence_length]` will take, from one timed sequence."""
    stats = empty(model, dense.layout)
    count_batch(model, dense.layout, stats, tokens[:1, :8], min(skip_first, 7))  # the first call is a slow one
    started = time.perf_counter()
    count_batch(model, dense.layout, stats, tokens[:1], skip_first)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    seconds = (time.perf_counter() - started) * len(tokens)
    log.info("time: counting %s tokens takes about %.0f s", f"{tokens.numel():,}", seconds)


def _dtype(recipe: Recipe, dense: Dense) -> str:
    if recipe.dtype != "auto":
        return recipe.dtype
    stored = str(getattr(dense.config, "dtype", None)).removeprefix("torch.")
    return stored if stored in BYTES else "float32"


def _free(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
