"""The tokens that a run counts, from the recipe's text and from samples that the model itself draws."""

from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import RunFolder, read_json, read_meta
from kvprune.dense import Dense
from kvprune.errors import KvpruneError, StaleError
from kvprune.options import Options
from kvprune.progress import log
from kvprune.schema import Recipe
from kvprune.sources.models import load_tokenizer
from kvprune.sources.samples import self_samples
from kvprune.sources.texts import self_share, sequences, token_digest


def calibration_tokens(recipe: Recipe, place: RunFolder, dense: Dense, options: Options) -> Tensor:
    """The calibration tokens `[sequences, sequence_length]`; the model samples them where the recipe says so."""
    tokenizer = load_tokenizer(dense.source, trust_remote_code=options.trust_remote_code)
    tokens = sequences(recipe.calibrate, tokenizer, own_samples(recipe, place, dense, tokenizer, options))
    check_tokens(tokens, dense.text_config)
    return tokens


def own_samples(recipe: Recipe, place: RunFolder, dense: Dense, tokenizer: Any, options: Options) -> Tensor | None:
    """The model's own samples `[count, sequence_length]` where the recipe asks for any: kept ones, or drawn now."""
    section = recipe.calibrate
    if not (count := self_share(section)):
        return None
    device = options.own_device()
    return self_samples(
        lambda: load_dense(dense, recipe, options),
        tokenizer,
        vocabulary=dense.text_config.vocab_size,
        count=count,
        length=section.sequence_length,
        seed=section.seed,
        about={
            "model": dense.source.fingerprint,
            "dtype": dense.run_dtype(recipe.dtype, device),
            "device": device.partition(":")[0],
        },
        file=place.samples,
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
    return torch.tensor(rows) if len(rows) == count else None


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
