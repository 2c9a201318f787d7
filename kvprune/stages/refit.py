"""Refit: change the kept values so that they make up for the removed slots, by ridge regression layer by layer.

`oneshot` walks the dense model once: each layer's kept slots learn to write what its removed ones wrote. `sequential`
walks the slim model with the layers below already slimmed, so that each layer also mends what those left wrong. What it
aims at is its `target`:

* input: what the dense FFN writes on the slim model's input
* output: what the dense FFN writes in a run of the dense model beside it
* residual: the hidden states that the dense run has after the layer

Experts, and FFNs that share a layer, cannot tell their parts of what is lacking after it: each aims at `input`.
Errors count relative to the size of the hidden state that they are in. All tokens count, first ones too: a fit that
does not see the few tokens with massive activations is free to ruin them.

A share of the sequences is held back from the sums: it chooses the ridge, and says what the refit is worth.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.artifacts import Plan, RunFolder, digest, provenance, write_tensors
from kvprune.dense import Dense
from kvprune.errors import naming
from kvprune.ffn.experts import Seen
from kvprune.ffn.fitting import Gathered, Sums, add_seen, choose, empty_sums, token_weights
from kvprune.ffn.gram import Fit, Gram, as_problem, mirror, removal_problem, warn_of_few
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.state import Shelf, open_shelf
from kvprune.ffn.walk import Read, Setup, Stream, Walker, open_stream, reader
from kvprune.ffn.watching import as_rows, residual_slope, value_rows, watched
from kvprune.progress import advancing, log
from kvprune.recipe import stage_recipe
from kvprune.schema import Recipe, Refit
from kvprune.sources.models import naming_memory
from kvprune.sources.texts import token_digest

HELD_ONE_IN = 8  # sequences; the second, the tenth, …
BYTES_OF_HEADER = 160  # what a tensor may take of a safetensors header


@torch.inference_mode()
def refit(
    recipe: Recipe, dense: Dense, walker: Walker, plan: Plan, tokens: Tensor, run: RunFolder, setup: Setup
) -> None:
    """Fit the kept values of `plan` on `tokens` `[sequences, sequence_length]`, and write them to the run folder.

    What is finished is kept, and the same call goes on from there. Raises KvpruneError where sums are not finite.
    """
    meta = provenance(
        "values",
        stage_recipe(recipe, "refit"),
        {"plan": digest(run.plan), "tokens": token_digest(tokens)},
        run=setup.about(),
    )
    with naming_memory(setup.batch_size):
        work = _open(recipe, dense, walker, plan, tokens, run, setup, meta)
    _warn_of_few(tokens, max(item.width for item in plan.ffns))
    layers = len(dense.layout.layers)
    total = sum(batch.numel() for batch in work.batches) * (layers - work.done)
    with advancing(total=total, label="refit", unit="token-layers") as advance:
        for index in range(work.done, layers):
            with naming_memory(setup.batch_size):
                values, reports = _refit_layer(work, index)
            advance(sum(batch.numel() for batch in work.batches))
            dense.check_unchanged()
            work.shelf.finish(index, [stream.hidden for stream in work.streams], values, {"ffns": reports})
    if setup.ranks.first:
        values, said = work.shelf.read(layers)
        write_tensors(run.values, values, {**meta, "ffns": [item for layer in said for item in layer["ffns"]]})
    work.shelf.clear()


@dataclass(frozen=True)
class Work:
    """All that the layers of a refit share. `dense` and `slim` are runs of the two models, as the method needs them."""

    section: Refit
    layout: Layout
    kept: dict[str, list[int]]  # slots by FFN names
    stored: torch.dtype  # of values in the checkpoint: what runs in a lower one must not lose digits on disk
    read: Read
    bias: bool  # whether there may be value biases
    walker: Walker
    slim_walker: Walker | None
    dense: Stream | None
    slim: Stream | None
    batches: list[Tensor]
    held: list[Tensor]  # bool [sequences] of each batch: held back from fitting
    setup: Setup
    shelf: Shelf
    done: int

    @property
    def streams(self) -> list[Stream]:
        return [stream for stream in (self.dense, self.slim) if stream is not None]


def _open(
    recipe: Recipe,
    dense: Dense,
    walker: Walker,
    plan: Plan,
    tokens: Tensor,
    run: RunFolder,
    setup: Setup,
    meta: dict[str, Any],
) -> Work:
    section = recipe.refit
    sequential = section.method == "sequential"
    walkers = {"dense": walker}
    if sequential:
        walkers["slim"] = dense.slim_walker(setup, [item.kept for item in plan.ffns])
    wanted = [name for name in walkers if not (name == "dense" and section.target == "input")]
    shelf = open_shelf(run.walk, setup.cache or run.walk, run.path, meta, setup.ranks)
    done = shelf.done([setup.name(name) for name in wanted])
    if done:
        log.info("refit: going on after %d of %d layers", done, len(dense.layout.layers))
    batches = setup.share(tokens)
    streams = {name: open_stream(walkers[name], name, batches, setup, shelf, tokens[:1], done) for name in wanted}
    return Work(
        section=section,
        layout=dense.layout,
        kept={item.name: item.kept for item in plan.ffns},
        stored=dense.stored_dtype(),
        read=reader(dense.checkpoint, dense.pieces, setup.device),
        bias=_may_have_biases(dense, plan, section),
        walker=walker,
        slim_walker=walkers.get("slim"),
        dense=streams.get("dense"),
        slim=streams.get("slim"),
        batches=batches,
        held=setup.share(torch.arange(len(tokens)) % HELD_ONE_IN == 1),
        setup=setup,
        shelf=shelf,
        done=done,
    )


def _may_have_biases(dense: Dense, plan: Plan, section: Refit) -> bool:
    """Whether values can have a bias: they do already, or config.json has a switch for it and the budget the room."""
    ffns, field = dense.layout.ffns, dense.layout.bias_field
    if section.bias == "none" or all(ffn.value_bias for ffn in ffns):
        return section.bias != "none"
    if field is None or not dense.one_ffn_dtype():  # what is added is of the type of what is there
        return False
    tensors = [
        size for ffn, item in zip(ffns, plan.ffns, strict=True) for size in ffn.missing_biases(item.width).values()
    ]
    elements = sum(tensors)
    reached = {
        "params": plan.after.total_params + elements,
        "bytes": plan.after.bytes + elements * dense.stored_dtype().itemsize + len(tensors) * BYTES_OF_HEADER,
    }
    over = [unit for unit, amount in reached.items() if amount > plan.budget.get(unit, amount)]
    if over:
        log.info("refit: no biases: with %s they would be over the budget of %s", field, over[0])
    return not over


def _warn_of_few(tokens: Tensor, slots: int) -> None:
    fitted = int((torch.arange(len(tokens)) % HELD_ONE_IN != 1).sum()) * tokens.shape[1]
    warn_of_few("refit", fitted, slots, tokens.shape[1])


def _refit_layer(work: Work, index: int) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The new values of one layer by parameter names, and what is to be said of each FFN. Hidden states are kept."""
    ffns = [work.layout.ffns[at] for at in work.layout.in_layer(index)]
    new: dict[str, Tensor] = {}
    reports = []
    with ExitStack() as stack:
        stack.enter_context(work.walker.filled(index))
        if work.slim_walker is not None:
            stack.enter_context(work.slim_walker.filled(index))
        stored = {name: work.read(name, work.stored) for name in dict.fromkeys(ffn.value.name for ffn in ffns)}
        distance = _is_distance(work, ffns)
        rounds = work.setup.rounds(ffns)
        for some in rounds:
            last = some is rounds[-1]
            found = (
                iter([_gather_distance(work, index, ffns[0])]) if distance else _gather_removed(work, index, some, last)
            )
            for ffn, gathered in zip(some, found, strict=True):
                whole = stored[ffn.value.name] if ffn.expert is None else stored[ffn.value.name][ffn.expert]
                values, report = _decide(work, ffn, gathered, as_rows(whole, ffn)[work.kept[ffn.name]])
                new |= values
                reports.append({"name": ffn.name, "expert": ffn.expert, "target": gathered.target, **report})
        if work.slim_walker is not None:
            for ffn in ffns:
                _put(work.slim_walker, ffn, new, work.setup)
        kept = work.dense if distance or (ffns and work.slim is None) else None  # while it was gathered
        for stream in work.streams:
            if stream is not kept:
                for at in range(len(work.batches)):
                    stream.keep(at, stream.run(index, stream.before(at)))
    return new, reports


def _is_distance(work: Work, ffns: list[Ffn]) -> bool:
    """Whether a layer's FFN aims at what the dense run makes of it: where it is the only one."""
    return work.slim is not None and work.section.target != "input" and [ffn.expert for ffn in ffns] == [None]


def _gather_removed(work: Work, index: int, ffns: list[Ffn], last: bool) -> Iterator[Gathered]:
    """What the removed slots write, on the dense model's input or, sequentially, on the slim one's.

    In the `last` round the hidden states after the layer are kept, where it is the dense run that is watched.
    """
    stream = work.slim or work.dense
    assert stream is not None
    layer, model = work.walker.layer(index), work.walker.model
    sums = {ffn.name: empty_sums(ffn.width, 0, work.setup.device) for ffn in ffns}
    for at in range(len(work.batches)):
        shown: list[tuple[Ffn, Seen]] = []
        with watched(model, ffns, lambda ffn, seen, shown=shown: shown.append((ffn, seen))):  # type: ignore[misc]
            after = stream.run(index, stream.before(at), layer)
        if last and stream is work.dense:
            stream.keep(at, after)
        weights = token_weights(after)
        for ffn, seen in shown:
            add_seen(sums[ffn.name], seen, seen.y, None, weights, work.held[at])
    target = "removed" if stream is work.dense else "input"
    for ffn in ffns:  # one after the other: problems are larger than the sums that they come from
        mine = sums.pop(ffn.name)
        grams = _summed(work, mine)
        fitted, held = (removal_problem(part, value_rows(model, ffn), work.kept[ffn.name]) for part in grams)
        yield Gathered(fitted, held, float(mine.energy), target)


def _gather_distance(work: Work, index: int, ffn: Ffn) -> Gathered:
    """What the slim run lacks, at the FFN's output or after the layer, against the dense run beside it."""
    dense, slim = work.dense, work.slim
    assert dense is not None and slim is not None and work.slim_walker is not None
    slope = _slope(work, index, ffn) if work.section.target == "residual" else None
    sums = empty_sums(len(work.kept[ffn.name]), ffn.hidden, work.setup.device)
    for at in range(len(work.batches)):
        with _last(work.walker, ffn) as full, _last(work.slim_walker, ffn) as less:
            after = dense.run(index, dense.before(at))
            mine = slim.run(index, slim.before(at))
        dense.keep(at, after)
        lacking = full[-1].y.float() - less[-1].y.float()
        rest = lacking if slope is None else (after.float() - mine.float()).flatten(0, 1) / slope
        add_seen(sums, less[-1], full[-1].y, rest, token_weights(after, mine), work.held[at])
    fitted, held = map(as_problem, _summed(work, sums))
    return Gathered(fitted, held, float(sums.energy), "output" if slope is None else "residual")


@contextmanager
def _last(walker: Walker, ffn: Ffn) -> Iterator[list[Seen]]:
    """What an FFN shows, call by call."""
    shown: list[Seen] = []
    with watched(walker.model, [ffn], lambda _, seen: shown.append(seen)):
        yield shown


def _slope(work: Work, index: int, ffn: Ffn) -> float | None:
    """How the layer's output grows with its FFN's: 1 where it is added to the stream, None where a norm is between."""
    stream, slope = work.dense, None
    assert stream is not None
    if work.setup.ranks.first:  # the one that always has a batch
        module = work.walker.model.get_submodule(ffn.module)
        slope = residual_slope(module, partial(stream.run, index, stream.before(0)[:1]))
    agreed: float | None = work.setup.ranks.data_of_first(slope)
    return agreed


def _summed(work: Work, sums: Sums) -> list[Gram]:
    """The sums over all ranks."""
    for part in (sums.fitted, sums.held):
        work.setup.ranks.sum(*part.parts())
    work.setup.ranks.sum(sums.energy)
    return [mirror(part) for part in (sums.fitted, sums.held)]


def _decide(work: Work, ffn: Ffn, gathered: Gathered, values: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The new parameters of one FFN, and what is to be said of it. Rank 0 solves: others might round otherwise."""
    ranks, new, report = work.setup.ranks, dict[str, Tensor](), None
    if ranks.first:
        with naming(ffn.name):
            found, report = choose(gathered, values, work.section, bias=work.bias)
        new = {} if found is None else _new_values(work, ffn, values, found)
    names, report = ranks.data_of_first([list(new), report])
    return {name: ranks.tensor_of_first(new.get(name)) for name in names}, report


def _new_values(work: Work, ffn: Ffn, values: Tensor, found: Fit) -> dict[str, Tensor]:
    """The value matrix, as it is stored, and its bias where that changed."""
    rows = (values.to(found.change) + found.change).to(work.stored).cpu()
    new = {ffn.value_key: as_rows(rows, ffn).contiguous()}
    if found.bias is not None:
        bias = found.bias
        if ffn.value_bias is not None:
            old = work.read(ffn.value_bias, work.stored)
            bias = (old if ffn.expert is None else old[ffn.expert]).to(found.bias) + found.bias
        new[ffn.bias_key] = bias.to(work.stored).cpu()
    return new


def _put(walker: Walker, ffn: Ffn, new: dict[str, Tensor], setup: Setup) -> None:
    """Give the filled layer of `walker` the `new` parameters of its FFN."""
    for key, name in ((ffn.value_key, ffn.value.name), (ffn.bias_key, ffn.value_bias)):
        if key not in new:
            continue
        tensor = new[key].to(setup.device, setup.dtype)
        if ffn.expert is not None and name is not None:
            walker.model.get_parameter(name)[ffn.expert].copy_(tensor)
        else:
            path, _, last = key.rpartition(".")
            walker.model.get_submodule(path)._parameters[last] = nn.Parameter(tensor, requires_grad=False)
