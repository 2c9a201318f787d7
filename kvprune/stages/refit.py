"""Refit: change the kept values so that they make up for the removed slots, by ridge regression layer by layer.

`oneshot` walks the dense model once: each layer's kept slots learn to write what its removed ones wrote. `sequential`
walks the slim model with the layers below already slimmed, so that each layer also mends what those left wrong. What it
aims at is its `target`:

* input: what the dense FFN writes on the slim model's input
* output: what the dense FFN writes in a run of the dense model beside it
* residual: the hidden states that the dense run has after the layer

Errors count relative to the size of the hidden state that they are in. All tokens count, first ones too: a fit that
does not see the few tokens with massive activations is free to ruin them.

A share of the sequences is held back from the sums: it chooses the ridge, and says what the refit is worth.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.artifacts import Plan, RunFolder, digest, provenance, write_tensors
from kvprune.dense import Dense
from kvprune.errors import naming
from kvprune.ffn.gram import (
    Fit,
    Gram,
    Problem,
    add_tokens,
    as_problem,
    constant_error,
    empty_gram,
    fit,
    joined,
    mirror,
    removal_problem,
    square_error,
    warn_of_few,
)
from kvprune.ffn.layout import Ffn
from kvprune.ffn.state import Shelf, open_shelf
from kvprune.ffn.walk import Read, Setup, Stream, Walker, open_stream, reader
from kvprune.ffn.watching import residual_slope, value_rows, watched
from kvprune.progress import Advance, advancing, log
from kvprune.recipe import stage_recipe
from kvprune.schema import Recipe, Refit
from kvprune.sources.models import naming_memory
from kvprune.sources.texts import token_digest

HELD_ONE_IN = 8  # sequences; the second, the tenth, …
BYTES_OF_HEADER = 160  # what a tensor may take of a safetensors header
BIAS_GAIN = 0.99  # a bias must bring the held-back error below so much of that without
SMALLEST_SQUARE = 1e-20  # of a hidden state, in the mean
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # what `auto` tries


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
    _warn_of_few(tokens, plan.ffns[0].width)
    passes = 2 if work.slim is not None else 1
    total = passes * sum(batch.numel() for batch in work.batches) * (len(plan.ffns) - work.done)
    with advancing(total=total, label="refit", unit="token-layers") as advance:
        for index in range(work.done, len(plan.ffns)):
            with naming_memory(setup.batch_size):
                values, said = _refit_layer(work, index, advance)
            dense.check_unchanged()
            work.shelf.finish(index, [stream.hidden for stream in work.streams], values, said)
    if setup.ranks.first:
        values, layers = work.shelf.read(len(plan.ffns))
        write_tensors(run.values, values, {**meta, "layers": layers})
    work.shelf.clear()


@dataclass(frozen=True)
class Work:
    """All that the layers of a refit share. `dense` and `slim` are runs of the two models, as the method needs them."""

    section: Refit
    ffns: tuple[Ffn, ...]
    kept: list[list[int]]
    stored: torch.dtype  # of values in the checkpoint
    read: Read  # parameters in that type: what runs in a lower one must not lose digits on disk
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
    section, kept = recipe.refit, [item.kept for item in plan.ffns]
    sequential = section.method == "sequential"
    walkers = {"dense": walker}
    if sequential:
        walkers["slim"] = dense.slim_walker(setup, kept)
    wanted = [name for name in walkers if not (name == "dense" and section.target == "input")]
    shelf = open_shelf(run.walk, setup.cache or run.walk, run.path, meta, setup.ranks)
    done = shelf.done([setup.name(name) for name in wanted])
    if done:
        log.info("refit: going on after %d of %d layers", done, len(kept))
    batches = setup.share(tokens)
    streams = {name: open_stream(walkers[name], name, batches, setup, shelf, tokens[:1], done) for name in wanted}
    return Work(
        section=section,
        ffns=dense.layout.ffns,
        kept=kept,
        stored=dense.stored_dtype(),
        read=reader(dense.checkpoint, dense.names, dense.stored_dtype(), setup.device),
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
    if section.bias == "none" or all(ffn.value.bias for ffn in ffns):
        return section.bias != "none"
    if field is None or not dense.one_ffn_dtype():  # what is added is of the type of what is there
        return False
    tensors = [name for ffn in ffns for name in ffn.missing_biases()]
    elements = sum(ffn.hidden + len(ffn.keys) * item.width for ffn, item in zip(ffns, plan.ffns, strict=True))
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


@dataclass(frozen=True)
class Gathered:
    """Of one layer: the problems over fitted and over held-back tokens, and what the dense FFN writes on the latter."""

    fitted: Problem
    held: Problem
    energy: float  # sum of squares
    target: str


def _refit_layer(work: Work, index: int, advance: Advance) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The new values of one layer by parameter names, and what is to be said of it. Hidden states after it are kept."""
    ffn, kept = work.ffns[index], work.kept[index]
    with ExitStack() as stack:
        stack.enter_context(work.walker.filled(index))
        if work.slim_walker is not None:
            stack.enter_context(work.slim_walker.filled(index))
        weight = work.read(f"{ffn.value.name}.weight")
        values = (weight if ffn.value.slot_axis == 0 else weight.T)[kept]
        distance = work.slim_walker is not None and work.section.target != "input"
        gathered = (_gather_distance if distance else _gather_removed)(work, index, advance)
        new, report = _decide(work, ffn, gathered, values)
        if work.slim is not None and work.slim_walker is not None:
            _put(work.slim_walker, ffn, new, work.setup)
            for at, batch in enumerate(work.batches):
                work.slim.keep(at, work.slim.run(index, work.slim.before(at)))
                advance(batch.numel())
    return new, {"name": ffn.name, "target": gathered.target, **report}


def _gather_removed(work: Work, index: int, advance: Advance) -> Gathered:
    """What the removed slots write, on the dense model's input or, sequentially, on the slim one's."""
    ffn, stream = work.ffns[index], work.dense or work.slim
    assert stream is not None
    layer, value = work.walker.layer(index), work.walker.model.get_submodule(ffn.value.name)

    def observe(at: int) -> Observed:
        with watched(value) as seen:
            after = stream.run(index, stream.before(at), layer)
        if stream is work.dense:
            stream.keep(at, after)
        return Observed(token_weights(after), seen[0], seen[1], None)

    sums, energy = _sum_batches(work, ffn.width, 0, observe, advance)
    fitted, held = (removal_problem(part, value_rows(value, ffn), work.kept[index]) for part in sums)
    return Gathered(fitted, held, energy, "input" if stream is work.slim else "removed")


def _gather_distance(work: Work, index: int, advance: Advance) -> Gathered:
    """What the slim run lacks, at the FFN's output or after the layer, against the dense run beside it."""
    ffn, dense, slim = work.ffns[index], work.dense, work.slim
    assert dense is not None and slim is not None and work.slim_walker is not None
    whole, thin = (walker.model.get_submodule(ffn.value.name) for walker in (work.walker, work.slim_walker))
    slope = _slope(work, index) if work.section.target == "residual" else None

    def observe(at: int) -> Observed:
        with watched(whole) as full, watched(thin) as less:
            after = dense.run(index, dense.before(at))
            dense.keep(at, after)
            mine = slim.run(index, slim.before(at))
        rest = full[1].float() - less[1].float() if slope is None else (after.float() - mine.float()) / slope
        return Observed(token_weights(after, mine), less[0], full[1], rest)

    sums, energy = _sum_batches(work, len(work.kept[index]), ffn.hidden, observe, advance)
    fitted, held = map(as_problem, sums)
    return Gathered(fitted, held, energy, "output" if slope is None else "residual")


def _slope(work: Work, index: int) -> float | None:
    """How the layer's output grows with its FFN's: 1 where it is added to the stream, None where a norm is between."""
    stream, slope = work.dense, None
    assert stream is not None
    if work.setup.ranks.first:  # the one that always has a batch
        module = work.walker.model.get_submodule(work.ffns[index].name)
        slope = residual_slope(module, partial(stream.run, index, stream.before(0)[:1]))
    agreed: float | None = work.setup.ranks.data_of_first(slope)
    return agreed


def token_weights(after: Tensor, slim: Tensor | None = None) -> Tensor:
    """How much errors on each token count, `[sequences, tokens]`, from hidden states after the layer.

    The next layer sees them normed, so an error is one relative to their rms. Where the slim run is lost, farther from
    the dense one than nothing at all, there is nothing to learn: a massive activation that came up in one of the two
    alone would have the slots that write it silenced, and those make the attention sinks.
    """
    states = after.float()
    size = states.square().mean(2)
    weights = size.rsqrt().masked_fill(size < SMALLEST_SQUARE, 0)  # a state of zeros says nothing
    if slim is not None:
        lost = (slim.float() - states).square().sum(2) > states.square().sum(2)
        weights = weights.masked_fill(lost, 0)
    return weights


@dataclass(frozen=True)
class Observed:
    """What a batch shows of an FFN, `[sequences, tokens, …]`."""

    weights: Tensor  # of tokens
    h: Tensor  # coefficients
    y: Tensor  # what the dense FFN writes
    rest: Tensor | None  # what is lacking, where the removed slots' coefficients do not tell


def _sum_batches(
    work: Work, slots: int, hidden: int, observe: Callable[[int], Observed], advance: Advance
) -> tuple[list[Gram], float]:
    """Sums over fitted and over held-back tokens of all ranks, and what the dense FFN writes on the latter, squared."""
    sums = [empty_gram(slots, hidden, work.setup.device) for _ in range(2)]
    energy = torch.zeros((), dtype=torch.float64, device=work.setup.device)
    for at, batch in enumerate(work.batches):
        seen, held = observe(at), work.held[at]
        for part, mine in zip(sums, (~held, held), strict=True):
            if mine.any():
                rest = None if seen.rest is None else seen.rest[mine].flatten(0, 1)
                add_tokens(part, seen.h[mine].flatten(0, 1), rest, seen.weights[mine].flatten())
        energy += (seen.y.float() * seen.weights[..., None])[held].square().sum(dtype=torch.float64)
        advance(batch.numel())
    for part in sums:
        work.setup.ranks.sum(*part.parts())
    work.setup.ranks.sum(energy)
    return [mirror(part) for part in sums], float(energy)


def choose(gathered: Gathered, values: Tensor, section: Refit, *, bias: bool) -> tuple[Fit | None, dict[str, Any]]:
    """The fit that is best on held-back tokens, made again with them; None where none is better than no change.

    `values` `[slots, hidden]` are the kept ones. The report's errors are of the fit without the held-back tokens, as
    shares of what the dense FFN writes there.
    """
    length = torch.linalg.vector_norm(values.double(), dim=1)
    before = square_error(gathered.held, None)

    def attempt(ridge: float, with_bias: bool = False) -> tuple[float, Fit]:
        found = fit(gathered.fitted, length, ridge, bias=with_bias)
        return square_error(gathered.held, found), found

    after, best = _lowest(attempt, RIDGES) if section.ridge == "auto" else attempt(section.ridge)
    if bias and constant_error(gathered.held, best) > (1 - BIAS_GAIN) * after:
        with_bias = attempt(best.ridge, True)
        after, best = with_bias if with_bias[0] < BIAS_GAIN * after else (after, best)
    energy = max(gathered.energy, torch.finfo(torch.float64).tiny)
    report = {
        "error_before": max(before, 0.0) / energy,
        "error_after": max(min(after, before), 0.0) / energy,
        "error_tried": max(after, 0.0) / energy,
        "ridge": best.ridge,
        "damping": best.damping,
        "bias": after < before and best.bias is not None,
        "refitted": after < before,
    }
    if not after < before:
        return None, report
    return fit(joined(gathered.fitted, gathered.held), length, best.ridge, bias=best.bias is not None), report


def _lowest(attempt: Callable[[float], tuple[float, Fit]], ridges: tuple[float, ...]) -> tuple[float, Fit]:
    """The attempt of the lowest error, found downhill from the middle: errors fall and then rise with the ridge."""
    at = len(ridges) // 2
    best, errors = attempt(ridges[at]), {}
    while True:
        for near in (at - 1, at + 1):
            if 0 <= near < len(ridges) and near not in errors:
                found = attempt(ridges[near])
                errors[near] = found[0]
                if found[0] < best[0]:
                    errors[at], best, at = best[0], found, near
                    break
        else:
            return best


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
    new = {f"{ffn.value.name}.weight": (rows if ffn.value.slot_axis == 0 else rows.T).contiguous()}
    if found.bias is not None:
        old = f"{ffn.value.name}.bias"
        bias = work.read(old).to(found.bias) + found.bias if ffn.value.bias else found.bias
        new[f"{ffn.value.name}.bias"] = bias.to(work.stored).cpu()
    return new


def _put(walker: Walker, ffn: Ffn, new: dict[str, Tensor], setup: Setup) -> None:
    """Give the filled layer of `walker` the `new` parameters of its FFN."""
    value = walker.model.get_submodule(ffn.value.name)
    for name, tensor in new.items():
        value._parameters[name.rpartition(".")[2]] = nn.Parameter(tensor.to(setup.device, setup.dtype), False)
