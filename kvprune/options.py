"""Where and how a run runs, and what follows from it for a stage: device, type, batches, and if the model is walked."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.walk import CannotWalkError, Setup, Walker
from kvprune.preflight import check_memory, check_training, check_weights
from kvprune.progress import log
from kvprune.ranks import Ranks, launched, own_device
from kvprune.schema import Recipe
from kvprune.sources.models import pick_device
from kvprune.sources.texts import check_text, self_share
from kvprune.teaching.students import check_adaptable
from kvprune.teaching.training import Course


@dataclass(frozen=True)
class Options:
    """Where and how a run runs. What changes the result is in the recipe."""

    device: str = "auto"
    batch_size: int = 8
    trust_remote_code: bool = False
    memory: int | None = None  # bytes; beyond it hidden states go to disk. None: what is free
    hidden_cache: str | Path | None = None  # the folder for them; None: the run folder
    checkpointing: bool = False  # a recovery keeps less of a forward, and runs it again backwards

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise KvpruneError(f"batch_size should be 1 or more, got {self.batch_size}")
        if self.memory is not None and self.memory < 1:
            raise KvpruneError(f"memory should be 1 byte or more, got {self.memory}")
        if self.hidden_cache is not None and Path(self.hidden_cache).exists() and not Path(self.hidden_cache).is_dir():
            raise KvpruneError(f"--hidden-cache {self.hidden_cache}: is not a folder; name one, or one to be made")

    def own_device(self) -> str:
        """The device of this process. Raises KvpruneError where it is not there."""
        return pick_device(own_device(pick_device(self.device)))


DEFAULT = Options()


def prepare(
    recipe: Recipe, dense: Dense, options: Options, ranks: Ranks, stage: str, *, tell: bool = False
) -> tuple[Setup, Walker | None]:
    """How `stage` runs the model: the setup, and the walker, None where only whole forwards are possible.

    Checks memory and disk, and whether the stage can be done at all.
    """
    device = options.own_device()
    dtype = dense.run_dtype(recipe.dtype, device)
    cache = Path(options.hidden_cache) if options.hidden_cache is not None else None
    setup = Setup(device, getattr(torch, dtype), options.batch_size, ranks, cache)
    walker = None if stage == "plan" else _walker(recipe, dense, setup, stage, tell)  # losses are at a model's end
    if tell and dtype != (asked := dense.asked_dtype(recipe.dtype)):
        log.info("%s on this CPU: computed in %s, which is faster; weights lose nothing by that", asked, dtype)
    if tell and self_share(recipe.calibrate):
        check_weights(dense, setup, "to sample a text (self)")
    whole = walker is None
    in_memory, grams = check_memory(recipe, dense, setup, stage=stage, whole=whole, limit=options.memory, tell=tell)
    return replace(setup, in_memory=in_memory, grams=grams), walker


def _walker(recipe: Recipe, dense: Dense, setup: Setup, stage: str, tell: bool) -> Walker | None:
    """The walker of a stage, None where only whole forwards are possible. Raises KvpruneError where those do not do."""
    collect = recipe.calibrate.collect
    try:
        if stage == "calibrate" and "gradient" in collect:
            raise CannotWalkError("gradients pass through all of it")
        return dense.walker(setup, recipe.calibrate.sequence_length)
    except CannotWalkError as error:
        if stage == "refit":
            raise KvpruneError(f"refit.method: values are refitted layer by layer, and {error}; use none") from None
        if "gram" in collect:
            raise KvpruneError(f"calibrate.collect: gram is summed layer by layer, and {error}") from None
        if tell:
            log.info("calibrate: by forwards of the whole model, since %s", error)
        return None


def make_course(
    recipe: Recipe, dense: Dense, options: Options, ranks: Ranks, tokens: Tensor, held: dict[str, Tensor]
) -> Course:
    """What a recovery teaches `[sequences, tokens]`, and how it runs."""
    device = options.own_device()
    return Course(
        section=recipe.recover,
        tokens=tokens,
        held=held,
        dtype=_training_dtype(recipe, dense, device),
        batch_size=options.batch_size,
        device=device,
        ranks=ranks,
        checkpointing=options.checkpointing,
        split=os.environ.get("ACCELERATE_USE_FSDP", "false") == "true",  # as its launcher says
    )


def check_teachable(recipe: Recipe, dense: Dense) -> None:
    """Refuse a recovery that cannot be done anywhere, before anything is."""
    section = recipe.recover
    taught, held = section.text or [], section.held_out or []
    for key, sources in (("recover.text", taught), ("recover.held_out", held)):
        for source in sources:
            check_text(source, key)
    seen = [source.model_dump(exclude={"weight"}) for source in taught]
    if twice := next((source for source in held if source.model_dump(exclude={"weight"}) in seen), None):
        raise KvpruneError(
            f"recover.held_out: {twice.source} is trained on; name another text (some of recover.text is held back "
            "anyway)"
        )
    if section.train == "lora":
        check_adaptable(dense.layout)


def check_recovery(recipe: Recipe, dense: Dense, options: Options) -> None:
    """Refuse a recovery that cannot be done here, before anything is."""
    section, device = recipe.recover, options.own_device()
    course = make_course(recipe, dense, options, launched(), torch.empty(0), {})
    course.check()
    if course.split and os.environ.get("FSDP_VERSION") != "2":
        raise KvpruneError("recover: models are split by FSDP 2 only; add --fsdp_version 2 to accelerate launch")
    if not course.split:  # else each process holds a part, and accelerate knows which
        kind = getattr(torch, course.dtype)
        check_training(dense, section, device, kind, course.micro, whole=not course.checkpointing)


def _training_dtype(recipe: Recipe, dense: Dense, device: str) -> str:
    dtype = dense.run_dtype(recipe.dtype, device)
    return "bfloat16" if dtype == "float16" else dtype  # whose gradients would vanish
