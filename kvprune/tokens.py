"""The tokens that a run counts, from the recipe's text and from samples that the model itself draws."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import RunFolder, read_json, read_meta
from kvprune.dense import Dense
from kvprune.errors import KvpruneError, StaleError
from kvprune.options import Options
from kvprune.progress import log
from kvprune.schema import Calibrate, Recipe, Recover
from kvprune.sources.models import load_tokenizer
from kvprune.sources.overlap import PASSAGE, holds_any, passages
from kvprune.sources.packing import pack
from kvprune.sources.samples import self_samples
from kvprune.sources.texts import check_lengths, documents, of_key, self_share, sequences, token_digest

HELD_SEQUENCES = 8  # of each text that a recovery looks at
HELD_BACK = "held-back"  # what those of the training text are called


def calibration_tokens(recipe: Recipe, place: RunFolder, dense: Dense, options: Options) -> Tensor:
    """The calibration tokens `[sequences, sequence_length]`; the model samples them where the recipe says so."""
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    tokens = sequences(recipe.calibrate, tokenizer, own_samples(recipe, place, dense, tokenizer, options))
    check_tokens(tokens, dense.text_config)
    return tokens


def recovery_tokens(
    recipe: Recipe, place: RunFolder, dense: Dense, options: Options, counted: Tensor, judged: Iterable[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What a recovery trains on `[sequences, sequence_length]`, and held-out tokens by names of texts.

    Of a text, what was not `counted` is taken first: a refit has fitted the rest, from which less is learned. A few
    sequences are held back, such that were not counted where there are any, and are the first of the held-out texts.
    Those that share a passage with what is `judged` on are left out.
    """
    section, tokenizer = recipe.recover, load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    length = section.sequence_length
    wanted = recovery_section(section)
    known = passages(_texts(counted, tokenizer))
    with of_key("recover.text"):
        samples = _samples(wanted, (place.recover_samples, place.samples), recipe, dense, tokenizer, options)
        tokens = sequences(wanted, tokenizer, samples, lambda row: holds_any(_texts([row], tokenizer)[0], known))
    tokens, held_back = _hold_back(tokens, tokenizer, known)
    held = {HELD_BACK: held_back}
    for source in section.held_out or ():
        with of_key("recover.held_out"):
            rows = pack(documents(source, section.seed), tokenizer, length, HELD_SEQUENCES)
        if not rows:
            raise KvpruneError(f"recover.held_out: {source.source} holds less than one sequence of {length} tokens")
        named = (source.source, source.config, source.split, source.field)
        held[" ".join(part for part in named if part)] = torch.tensor(rows)
    for some in (tokens, *held.values()):
        check_tokens(some, dense.text_config)
    return _apart(tokens, tokenizer, judged, section.batch_tokens // length), held


def check_recovery_text(recipe: Recipe, dense: Dense, options: Options) -> None:
    """Raise KvpruneError where a local text is too short for the recovery, which comes after all else."""
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    with of_key("recover.text"):
        check_lengths(recovery_section(recipe.recover), tokenizer)


def _hold_back(tokens: Tensor, tokenizer: Any, known: set[int]) -> tuple[Tensor, Tensor]:
    """The sequences to train on, and the last of those that share no passage with what was counted, `known`.

    A refit has fitted what was counted, so that it says little of how a training does on other text. Where too few are
    new, the last of the others are held back with them.
    """
    new = ~_sharing(tokens, tokenizer, known)
    held = torch.zeros(len(tokens), dtype=torch.bool)
    held[new.int().argsort(stable=True)[-HELD_SEQUENCES:]] = True
    return tokens[~held], tokens[held]


def _sharing(tokens: Tensor, tokenizer: Any, known: set[int]) -> Tensor:
    """Which sequences hold passages that are `known`, bool `[sequences]`."""
    return torch.tensor([holds_any(text, known) for text in _texts(tokens, tokenizer)], dtype=torch.bool)


def _texts(tokens: Tensor | list[list[int]], tokenizer: Any) -> list[str]:
    """Sequences as texts. Special tokens would hide the words beside them: a space stands for each."""
    special = re.compile("|".join(map(re.escape, tokenizer.all_special_tokens)) or "(?!)")
    return [special.sub(" ", text) for text in tokenizer.batch_decode(tokens)]


def _apart(tokens: Tensor, tokenizer: Any, judged: Iterable[str], per_step: int) -> Tensor:
    """The sequences that share no passage with what is judged on, as many as fill whole steps."""
    clean = ~_sharing(tokens, tokenizer, passages(judged))
    if bool(clean.all()):
        return tokens
    left = tokens[clean][: int(clean.sum()) // per_step * per_step]
    found = f"{int((~clean).sum())} of {len(tokens)} sequences share {PASSAGE} words in a row with a task's documents"
    if not len(left):
        raise KvpruneError(f"recover.text: {found}, and too few are left: name a text that no task judges on")
    log.warning("recover: %s and are left out: %s tokens are left", found, f"{left.numel():,}")
    return left


def recovery_section(section: Recover) -> Calibrate:
    """The sequences that a recovery asks for, as a calibration would: to train on, and to hold back."""
    assert section.text is not None  # of a complete recipe
    count = section.steps * (section.batch_tokens // section.sequence_length) + HELD_SEQUENCES
    return Calibrate(
        text=section.text,
        tokens=count * section.sequence_length,
        sequence_length=section.sequence_length,
        seed=section.seed,
    )


def own_samples(recipe: Recipe, place: RunFolder, dense: Dense, tokenizer: Any, options: Options) -> Tensor | None:
    """The model's own samples `[count, sequence_length]` where the recipe asks for any: kept ones, or drawn now."""
    return _samples(recipe.calibrate, (place.samples,), recipe, dense, tokenizer, options)


def _samples(
    section: Calibrate, files: tuple[Path, ...], recipe: Recipe, dense: Dense, tokenizer: Any, options: Options
) -> Tensor | None:
    """Those kept in one of the files, and the missing ones, drawn into the first."""
    if not (count := self_share(section)):
        return None
    device = options.own_device()
    return self_samples(
        lambda: load_dense(dense, recipe, options),
        tokenizer,
        *files,
        vocabulary=dense.text_config.vocab_size,
        count=count,
        length=section.sequence_length,
        seed=section.seed,
        about={
            "model": dense.source.fingerprint,
            "dtype": dense.run_dtype(recipe.dtype, device),
            "device": device.partition(":")[0],
        },
    )


def counted_tokens(recipe: Recipe, place: RunFolder, dense: Dense, options: Options) -> tuple[Tensor, Tensor | None]:
    """The tokens that were counted, and the samples among them; refuses a text that gives others by now.

    Samples that are kept are taken as they are: on another device they would be others.
    """
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    samples = _kept_samples(recipe, place)
    if samples is None:
        samples = own_samples(recipe, place, dense, tokenizer, options)
    tokens = sequences(recipe.calibrate, tokenizer, samples)
    if token_digest(tokens) != read_meta(place.stats)["inputs"]["tokens"]:
        raise StaleError(
            f"{place.path}: calibrate.text gives other tokens now than were counted; "
            f"run: kvprune calibrate {place.recipe} -o {place.path}"
        )
    return tokens, samples


def _kept_samples(recipe: Recipe, place: RunFolder) -> Tensor | None:
    """The samples of a run that was calibrated, where all of them are kept."""
    count = self_share(recipe.calibrate)
    if not count or not place.samples.is_file():
        return None
    rows = read_json(place.samples)["tokens"]
    return torch.tensor(rows[:count]) if len(rows) >= count else None


def check_tokens(tokens: Tensor, config: Any) -> None:
    """The tokenizer must belong to the model. Raises KvpruneError where it makes ids beyond the embeddings."""
    largest = int(tokens.max())
    if largest >= config.vocab_size:
        raise KvpruneError(
            f"the tokenizer makes id {largest} and the model has {config.vocab_size} embeddings: "
            "they do not belong together"
        )


def load_dense(dense: Dense, recipe: Recipe, options: Options) -> Any:
    """Load the dense model, as the recipe and the options say."""
    device = options.own_device()
    log.info("loading %s on %s", dense.source.title, device)
    return dense.load(recipe.dtype, device)
