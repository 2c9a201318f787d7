"""Calibrate: run the model over the calibration tokens and count how its slots fire.

The model is walked layer by layer, so that it may be larger than memory. Where a model cannot be walked, ordinary
forwards of the whole of it give the same counts.
"""

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import RunFolder, provenance, read_tensors, write_tensors
from kvprune.dense import Dense
from kvprune.errors import KvpruneError, naming
from kvprune.ffn.counting import make_counters
from kvprune.ffn.forwards import count_batch, empty, saved_when_stopped
from kvprune.ffn.gram import elimination, empty_gram, mirror, warn_of_few
from kvprune.ffn.state import Shelf, open_shelf
from kvprune.ffn.stats import FfnStats, first_bad_slot, from_tensors, sum_over, to_tensors
from kvprune.ffn.walk import Setup, Walker, open_stream
from kvprune.ffn.watching import counted, empty_for, summed, value_rows
from kvprune.progress import advancing, log
from kvprune.recipe import stage_recipe
from kvprune.schema import Recipe
from kvprune.sources.models import naming_memory
from kvprune.sources.texts import text_fingerprint, token_digest


@torch.inference_mode()
def calibrate(
    recipe: Recipe, dense: Dense, walker: Walker | None, tokens: Tensor, run: RunFolder, setup: Setup
) -> None:
    """Count `tokens` `[sequences, sequence_length]` through the model, and write the statistics to the run folder.

    Without a `walker`, by forwards of the whole model. What is finished is kept, and the same call goes on from there.
    Raises KvpruneError, naming layer and slot, where a coefficient is not finite, and where the model's files change.
    """
    meta = describe(recipe, dense, tokens, setup)
    names = [ffn.name for ffn in dense.layout.ffns]
    if walker is None:
        stats = _forwards(recipe, dense, tokens, run, setup, meta)
        if setup.ranks.first:
            write_tensors(run.stats, to_tensors(stats, names), meta)
            run.partial_stats.unlink(missing_ok=True)
        return
    shelf = open_shelf(run.walk, setup.cache or run.walk, run.path, meta, setup.ranks)
    _walk(recipe, dense, walker, tokens, setup, shelf)
    if setup.ranks.first:
        write_tensors(run.stats, shelf.read(len(names))[0], meta)
    shelf.clear()


def describe(recipe: Recipe, dense: Dense, tokens: Tensor, setup: Setup) -> dict[str, Any]:
    """The provenance of statistics."""
    source, layout = dense.source, dense.layout
    return provenance(
        "stats",
        stage_recipe(recipe, "calibrate"),
        {
            "model": source.fingerprint,
            "text": text_fingerprint(recipe.calibrate.text),
            "tokens": token_digest(tokens),
        },
        model={"title": source.title, "commit": source.commit, "note": source.note},
        run=setup.about(),
        layout={"ffns": [ffn.name for ffn in layout.ffns], "width": layout.width, "width_field": layout.width_field},
    )


def _walk(recipe: Recipe, dense: Dense, walker: Walker, tokens: Tensor, setup: Setup, shelf: Shelf) -> None:
    """Put the statistics of every FFN on the shelf, one layer after the other."""
    section, ffns, ranks = recipe.calibrate, dense.layout.ffns, setup.ranks
    batches = setup.share(tokens)
    if "gram" in section.collect:
        counted_tokens = len(tokens) * (tokens.shape[1] - section.skip_first)
        warn_of_few("calibrate", counted_tokens, dense.layout.width, tokens.shape[1])
    done = shelf.done([setup.name("dense")])
    if done:
        log.info("calibrate: going on after %d of %d layers", done, len(ffns))
    with naming_memory(setup.batch_size):
        stream = open_stream(walker, "dense", batches, setup, shelf, tokens[:1], done)
    total = sum(batch.numel() for batch in batches) * (len(ffns) - done)
    with (
        advancing(total=total, label="calibrate", unit="token-layers") as advance,
        make_counters(dense.layout.width, setup.dtype, torch.device(setup.device)) as counters,
    ):
        for index, ffn in enumerate(ffns[done:], done):
            with walker.filled(index), naming_memory(setup.batch_size):
                probe = stream.before(0)[:1] if batches else walker.record(tokens[:1])[0]
                stats = empty_for(walker.model, [ffn], partial(stream.run, index, probe))[0]
                value = walker.model.get_submodule(ffn.value.name)
                gram = empty_gram(ffn.width, 0, setup.device) if "gram" in section.collect else None
                with counted([value], [stats], section.skip_first, counters), summed(value, gram, section.skip_first):
                    for at, batch in enumerate(batches):
                        started = time.perf_counter()
                        stream.keep(at, stream.run(index, stream.before(at)))
                        advance(batch.numel())
                        if index == done and at == min(1, len(batches) - 1):  # the first batch is a slow one
                            seconds = (time.perf_counter() - started) * len(batches) * (len(ffns) - done)
                            log.info("time: counting %s tokens takes about %.0f s", f"{tokens.numel():,}", seconds)
                sum_over(ranks, stats)
                try:
                    refuse_not_finite(ffn.name, stats)
                except KvpruneError:  # on every rank: there is nothing to go on from
                    shelf.clear()
                    raise
                if gram is not None:
                    ranks.sum(*gram.parts())
                    with naming(ffn.name):
                        stats.removal_cost, stats.removal_turn = elimination(mirror(gram), value_rows(value, ffn))
            dense.check_unchanged()
            shelf.finish(index, [stream.hidden], to_tensors([stats], [ffn.name]), {})


def refuse_not_finite(name: str, stats: FfnStats) -> None:
    """Raise KvpruneError where the FFN `name` has a slot whose coefficients are not all finite."""
    if (slot := first_bad_slot(stats)) is not None:
        raise KvpruneError(
            f"{name}: slot {slot} has NaN or infinite coefficients; check the weights, or try dtype: float32"
        )


def _forwards(
    recipe: Recipe, dense: Dense, tokens: Tensor, run: RunFolder, setup: Setup, meta: dict[str, Any]
) -> list[FfnStats]:
    """Statistics of every FFN by forwards of the whole model."""
    layout, section, alone = dense.layout, recipe.calibrate, setup.ranks.count == 1
    names = [ffn.name for ffn in layout.ffns]
    model = dense.load(setup.dtype_name, setup.device)
    stats, done = (_resume(run, meta, names, setup.device) if alone else None) or (empty(model, layout), 0)
    batches = setup.share(tokens[done:])

    def check() -> None:
        for name, item in zip(names, stats, strict=True):
            refuse_not_finite(name, item)

    def save() -> None:
        check()
        if alone:
            write_tensors(run.partial_stats, to_tensors(stats, names), {**meta, "done": int(stats[0].sequences)})

    with (
        advancing(total=sum(batch.numel() for batch in batches), label="calibrate", unit="tokens") as advance,
        saved_when_stopped(save) as tick,
        make_counters(layout.width, model.dtype, model.device) as counters,
    ):
        for batch in batches:
            with tick(), naming_memory(setup.batch_size):
                count_batch(model, layout, stats, batch, section.skip_first, counters)
                if int(stats[0].sequences) <= setup.batch_size:  # the first batch shows most of what can go wrong
                    check()
            advance(batch.numel())
    for item in stats:
        sum_over(setup.ranks, item)
    check()
    dense.check_unchanged()
    return stats


def _resume(run: RunFolder, meta: dict[str, Any], names: list[str], device: str) -> tuple[list[FfnStats], int] | None:
    """What interrupted forwards of the very same kind have counted, or None."""
    if not run.partial_stats.is_file():
        return None
    tensors, found = read_tensors(run.partial_stats)
    done = found.pop("done")
    if found != meta:
        log.info("calibrate: %s is of another recipe or batch size; counting from the start", run.partial_stats.name)
        return None
    log.info("calibrate: going on after %d sequences", done)
    return from_tensors(tensors, names, device), done
