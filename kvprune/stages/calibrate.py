"""Calibrate: run the model over the calibration tokens and count how its slots fire.

The model is walked layer by layer, so that it may be larger than memory. Where a model cannot be walked, ordinary
forwards of the whole of it give the same counts.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import RunFolder, provenance, read_tensors, write_tensors
from kvprune.dense import Dense
from kvprune.errors import KvpruneError, naming
from kvprune.ffn.counting import Counters, count_seen, counted_rows, make_counters
from kvprune.ffn.experts import See, Seen
from kvprune.ffn.forwards import add_gradients, count_batch, empty, saved_when_stopped
from kvprune.ffn.gram import Gram, add_tokens, elimination, empty_gram, mirror, warn_of_few
from kvprune.ffn.layout import Ffn
from kvprune.ffn.state import Shelf, open_shelf
from kvprune.ffn.stats import FfnStats, first_bad_slot, from_tensors, sum_over, to_tensors
from kvprune.ffn.walk import Setup, Stream, Walker, open_stream
from kvprune.ffn.watching import empty_for, value_rows, watched
from kvprune.progress import Advance, advancing, log
from kvprune.recipe import stage_recipe
from kvprune.schema import Calibrate, Recipe
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
        write_tensors(run.stats, shelf.read(len(dense.layout.layers))[0], meta)
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
        counted=len(tokens) * (tokens.shape[1] - recipe.calibrate.skip_first),
        layout={
            "ffns": layout.as_data(),
            "fields": {field.name: field.value for field in layout.fields},
        },
    )


def _walk(recipe: Recipe, dense: Dense, walker: Walker, tokens: Tensor, setup: Setup, shelf: Shelf) -> None:
    """Put the statistics of every FFN on the shelf, one layer after the other."""
    section, layers = recipe.calibrate, len(dense.layout.layers)
    batches = setup.share(tokens)
    if "gram" in section.collect:
        counted_tokens = len(tokens) * (tokens.shape[1] - section.skip_first)
        warn_of_few("calibrate", counted_tokens, dense.layout.widest, tokens.shape[1])
    done = shelf.done([setup.name("dense")])
    if done:
        log.info("calibrate: going on after %d of %d layers", done, layers)
    with naming_memory(setup.batch_size):
        stream = open_stream(walker, "dense", batches, setup, shelf, tokens[:1], done)
    total = sum(batch.numel() for batch in batches) * (layers - done)
    with (
        advancing(total=total, label="calibrate", unit="token-layers") as advance,
        make_counters(torch.device(setup.device)) as counters,
    ):
        work = Work(section, walker, stream, batches, setup, counters, tokens)
        for index in range(done, layers):
            ffns = [dense.layout.ffns[at] for at in dense.layout.in_layer(index)]
            started = time.perf_counter()
            with walker.filled(index), naming_memory(setup.batch_size):
                try:
                    stats = _count_layer(work, index, ffns, advance)
                except KvpruneError:  # on every rank: there is nothing to go on from
                    shelf.clear()
                    raise
            if index == done:
                seconds = (time.perf_counter() - started) * (layers - done)
                log.info("time: counting %s tokens takes about %.0f s", f"{tokens.numel():,}", seconds)
            dense.check_unchanged()
            found = to_tensors([stats[ffn.name] for ffn in ffns], [ffn.name for ffn in ffns])
            shelf.finish(index, [stream.hidden], found, {})


@dataclass(frozen=True)
class Work:
    """What the layers of a walk share."""

    section: Calibrate
    walker: Walker
    stream: Stream
    batches: list[Tensor]
    setup: Setup
    counters: Counters
    tokens: Tensor


def _count_layer(work: Work, index: int, ffns: list[Ffn], advance: Advance) -> dict[str, FfnStats]:
    """Statistics of all FFNs of a filled layer, over all ranks; hidden states after it are kept.

    Gram matrices are summed for as many FFNs at a time as memory allows, and the layer runs again for the next.
    """
    section, model, stream, ranks = work.section, work.walker.model, work.stream, work.setup.ranks
    probe = stream.before(0)[:1] if work.batches else work.walker.record(work.tokens[:1])[0]
    stats = empty_for(model, ffns, partial(stream.run, index, probe)) if ffns else {}
    rounds = work.setup.rounds(ffns) if "gram" in section.collect and ffns else [[]]
    for turn, some in enumerate(rounds):
        grams = {ffn.name: empty_gram(ffn.width, 0, work.setup.device) for ffn in some}
        for at, batch in enumerate(work.batches):
            see = _counting({} if turn else stats, grams, batch, section.skip_first, work.counters)
            with watched(model, some if turn else ffns, see):
                after = stream.run(index, stream.before(at))
            if turn == len(rounds) - 1:
                stream.keep(at, after)
                advance(batch.numel())
        for ffn in [] if turn else ffns:
            sum_over(ranks, stats[ffn.name])
            refuse_not_finite(ffn.name, stats[ffn.name])
        for ffn in some:
            ranks.sum(*grams[ffn.name].parts())
            item = stats[ffn.name]
            with naming(ffn.name):
                item.removal_cost, item.removal_turn = elimination(mirror(grams[ffn.name]), value_rows(model, ffn))
    return stats


def _counting(
    stats: Mapping[str, FfnStats], grams: Mapping[str, Gram], batch: Tensor, skip_first: int, counters: Counters
) -> See:
    """What adds a batch's coefficients to the statistics and Gram matrices that are there for an FFN."""
    sequences, length = batch.shape

    def see(ffn: Ffn, seen: Seen) -> None:
        if ffn.name in stats:
            count_seen(stats[ffn.name], seen, sequences, length, skip_first, counters)
        if ffn.name in grams:
            add_tokens(grams[ffn.name], counted_rows(seen, length, skip_first))

    return see


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
    gradient = "gradient" in section.collect
    with torch.inference_mode(mode=False):  # weights that gradients may pass through
        model = dense.load(setup.dtype_name, setup.device).requires_grad_(requires_grad=False)
    stats, done = (_resume(run, meta, names, setup.device) if alone else None) or (empty(model, layout), 0)
    for item in stats.values() if gradient else ():
        if item.gradient is None:
            item.gradient = torch.zeros_like(item.total)
    batches = setup.share(tokens[done:])

    def check() -> None:
        for name in names:
            refuse_not_finite(name, stats[name])

    def save() -> None:
        check()
        if alone:
            write_tensors(run.partial_stats, to_tensors([stats[name] for name in names], names), {**meta, "done": done})

    with (
        advancing(total=sum(batch.numel() for batch in batches), label="calibrate", unit="tokens") as advance,
        saved_when_stopped(save) as tick,
        make_counters(model.device) as counters,
    ):
        for batch in batches:
            with tick(), naming_memory(setup.batch_size):
                count_batch(model, layout, stats, batch, section.skip_first, counters)
                if gradient:
                    add_gradients(model, layout, stats, batch, section.skip_first)
                done += len(batch)
                if done <= setup.batch_size:  # the first batch shows most of what can go wrong
                    check()
            advance(batch.numel())
    for name in names:
        sum_over(setup.ranks, stats[name])
    check()
    dense.check_unchanged()
    return [stats[name] for name in names]


def _resume(
    run: RunFolder, meta: dict[str, Any], names: list[str], device: str
) -> tuple[dict[str, FfnStats], int] | None:
    """What interrupted forwards of the very same kind have counted, or None."""
    if not run.partial_stats.is_file():
        return None
    tensors, found = read_tensors(run.partial_stats)
    done = found.pop("done")
    if found != meta:
        log.info("calibrate: %s is of another recipe or batch size; counting from the start", run.partial_stats.name)
        return None
    log.info("calibrate: going on after %d sequences", done)
    return dict(zip(names, from_tensors(tensors, names, device), strict=True)), done
