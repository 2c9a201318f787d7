"""When does a model know what it will say? Each layer's residual stream and FFN, read as tokens.

The logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens") puts the residual stream after every layer
through the final norm and the head. Beside it stand what the layer's FFNs add, and what their single loudest slot
writes (Geva et al. 2021, arXiv:2012.14913, sections 4 and 5), and how often a slot's value names the very token that
followed its key's strongest trigger.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.ffn.experts import Seen
from kvprune.ffn.fields import trunk
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.walk import Walker
from kvprune.ffn.watching import watched
from kvprune.progress import progress
from kvprune.reading.values import Unembedding, Values, all_values, each_values, folded, open_values, probe

POSITIONS = 512
NOTHING = -1  # in place of a token where no slot wrote anything

SeeAt = Callable[[int, Seen, Values], None]  # the number of the batch, and what an FFN shows there
AfterAt = Callable[[int, int, Tensor], None]  # batch, layer, and the residual stream after it [tokens, hidden]


@dataclass(frozen=True)
class View:
    """What one layer shows at sampled positions."""

    residual: Tensor  # [positions, hidden] after the layer, as the model computes it
    slot: Tensor  # int64 [positions], the token that the loudest slot of the layer promotes by what it writes
    ffn: Tensor  # int64 [positions], the token that all FFNs of the layer together promote


@torch.inference_mode()
def lens(
    source: Any,
    layout: Layout,
    tokens: Tensor,
    unembedding: Unembedding,
    *,
    tops: Mapping[str, Tensor] | None = None,
    signs: Mapping[str, Tensor] | None = None,
    positions: int = POSITIONS,
    skip_first: int = 1,
    batch_size: int = 8,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Shares of sampled positions of `tokens` `[sequences, length]` at which each layer names the final prediction.

    `source` is a loaded model or a Walker. Of every layer: "slot_top", "ffn_top" and "residual_top" are shares, "kl" is
    the mean of KL(final ‖ the residual stream after the layer) in nats, "key_next" and "chance" see `key_next`; None
    where a layer has no such thing. `tops`, by FFN names, are the places int64 `[slots]` of each slot's strongest
    trigger among the flattened tokens, -1 where there is none, and `signs` those of the coefficients there, if not all
    are positive.
    """
    places = sample(tokens, positions, skip_first, seed)
    views = view_layers(source, layout, tokens, places, unembedding, batch_size)
    shares = compare(views, unembedding)
    pairs = next_pairs(source, layout, tokens, unembedding, tops or {}, signs or {})
    return [{"name": layer, **row, **key_next(*pairs[layer])} for layer, row in zip(layout.layers, shares, strict=True)]


def sample(tokens: Tensor, count: int, skip_first: int, seed: int) -> Tensor:
    """Up to `count` places, int64 and sorted, among flattened tokens `[sequences, length]` that are not skipped."""
    every = torch.arange(tokens.numel())
    every = every[every % tokens.shape[1] >= skip_first]
    drawn = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[:count]
    return every[drawn].sort().values


@torch.inference_mode()
def view_layers(
    source: Any, layout: Layout, tokens: Tensor, places: Tensor, unembedding: Unembedding, batch_size: int = 8
) -> list[View]:
    """What every layer shows at `places`, sorted and among the flattened `tokens` `[sequences, length]`.

    Only sequences with such a place are run.
    """
    batches, local = batches_with(tokens, places, batch_size)
    index_of = {layer: index for index, layer in enumerate(layout.layers)}
    listeners: dict[tuple[int, int], _Listener] = {}
    views: list[list[View]] = [[] for _ in layout.layers]

    def listener(index: int, batch: int) -> _Listener:
        if (index, batch) not in listeners:
            listeners[index, batch] = _Listener(local[batch].to(unembedding.rows.device), unembedding.hidden)
        return listeners[index, batch]

    def see(batch: int, seen: Seen, values: Values) -> None:
        if values.ffn.hidden == unembedding.hidden:  # or it writes to a space of its own, not to the residual stream
            listener(index_of[values.ffn.layer], batch).hear(seen, values)

    def after(batch: int, index: int, states: Tensor) -> None:
        mine = listener(index, batch)
        mine.residual = states[mine.at]

    passes = each_pass(source, layout, batches, see, after)
    rounds = len(batches) * (len(layout.layers) if isinstance(source, Walker) else 1)
    for _ in progress(passes, total=rounds, label="layers", unit="batches"):
        for index, batch in sorted(listeners):
            views[index].append(listeners.pop((index, batch)).view(unembedding))
    return [
        View(*(torch.cat([getattr(view, field.name) for view in some]) for field in fields(View))) for some in views
    ]


def batches_with(tokens: Tensor, places: Tensor, batch_size: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The sequences of `tokens` `[sequences, length]` that hold any of `places` (sorted, among flattened tokens).

    In batches, each with its places among its own flattened tokens.
    """
    length = tokens.shape[1]
    used, sequence = (places // length).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    at = sequence * length + places % length
    batches = torch.split(tokens[used], batch_size)
    size = batch_size * length
    return batches, [at[at // size == number] % size for number in range(len(batches))]


class _Listener:
    """Hears what the FFNs of one layer write at the places `at` of one batch."""

    def __init__(self, at: Tensor, hidden: int) -> None:
        self.at = at  # int64 [positions], sorted
        self.residual = torch.empty(0)  # [positions, hidden]
        self.written = torch.zeros(len(at), hidden, device=at.device)  # by all FFNs, experts weighed
        self.loudest = torch.zeros(len(at), device=at.device)  # contribution of the loudest slot
        self.said = torch.zeros(len(at), hidden, device=at.device)  # the direction that it writes in

    def hear(self, seen: Seen, values: Values) -> None:
        """Add what an FFN, or an expert, writes."""
        mine, rows = rows_at(seen, self.at)
        coefficients, gates = seen.h[rows].float(), gates_at(seen, rows)
        c, slot = (coefficients.abs() * values.length * gates[:, None]).max(1)
        louder = c > self.loudest[mine]
        which, slot, signs = mine[louder], slot[louder], coefficients.gather(1, slot[:, None])[louder].sign()
        self.loudest[which] = c[louder]
        self.said[which] = folded(values.rows[slot], values.gain) * signs
        self.written[mine] += folded(seen.y[rows], values.gain) * gates[:, None]

    def view(self, unembedding: Unembedding) -> View:
        """What was heard, read as tokens."""
        tops = [
            unembedding.top(directions).masked_fill(~directions.any(1), NOTHING)
            for directions in (self.said, self.written)
        ]
        return View(self.residual, *tops)


def rows_at(seen: Seen, at: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the places `at` (sorted, in the batch) reach an FFN, as indices of `at`; and their rows in `seen`."""
    if seen.tokens is None:
        return torch.arange(len(at), device=at.device), at
    row = torch.searchsorted(seen.tokens, at).clamp(max=len(seen.tokens) - 1)
    there = seen.tokens[row] == at
    return there.nonzero().flatten(), row[there]


def gates_at(seen: Seen, rows: Tensor) -> Tensor:
    """The router's weights `[rows]` in float32; 1 where there is no router, or it has weighed the inputs."""
    return torch.ones(len(rows), device=rows.device) if seen.gates is None else seen.gates[rows].float()


def each_pass(
    source: Any, layout: Layout, batches: Sequence[Tensor], see: SeeAt, after: AfterAt | None = None
) -> Iterator[None]:
    """Run all layers over `batches` `[sequences, length]` of tokens: layer by layer a Walker, else a loaded model.

    Yields now and then, when no layer is being run.
    """
    return (_walk if isinstance(source, Walker) else _forwards)(source, layout, batches, see, after or _ignore)


def _ignore(_batch: int, _index: int, _states: Tensor) -> None:
    pass


def _forwards(model: Any, layout: Layout, batches: Sequence[Tensor], see: SeeAt, after: AfterAt) -> Iterator[None]:
    values = all_values(model, layout)
    for number, batch in enumerate(batches):
        with (
            watched(model, layout.ffns, partial(_show, see, number, values)),
            _outputs(model, layout.layers, partial(after, number)),
        ):
            trunk(model)[1](input_ids=batch.to(model.device), use_cache=False)
        yield


def _walk(walker: Walker, layout: Layout, batches: Sequence[Tensor], see: SeeAt, after: AfterAt) -> Iterator[None]:
    states = [walker.record(batch)[0] for batch in batches]
    calls = {len(batch): walker.record(batch)[1] for batch in batches}
    hidden, own = walker.record(probe(walker.device))
    for index in range(len(walker.layers)):
        ffns = [layout.ffns[at] for at in layout.in_layer(index)]
        with walker.filled(index) as layer:
            values = open_values(walker.model, ffns, partial(own[index].run, layer, hidden))
            for number, before in enumerate(states):
                with watched(walker.model, ffns, partial(_show, see, number, values)):
                    states[number] = calls[len(before)][index].run(layer, before)
                after(number, index, states[number].flatten(0, -2))
                yield


def _show(see: SeeAt, batch: int, values: Mapping[str, Values], ffn: Ffn, seen: Seen) -> None:
    see(batch, seen, values[ffn.name])


@contextmanager
def _outputs(model: Any, layers: Sequence[str], after: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand each layer's output `[tokens, hidden]` to `after`."""

    def hook(index: int, _module: nn.Module, _args: Any, out: Any) -> None:
        after(index, (out[0] if isinstance(out, tuple) else out).flatten(0, -2))

    handles = [
        model.get_submodule(layer).register_forward_hook(partial(hook, index)) for index, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def compare(views: Sequence[View], unembedding: Unembedding) -> list[dict[str, float | None]]:
    """How often each layer's `View` names the final prediction, and how far its residual stream is from it."""
    count = len(views[-1].residual)
    shares = torch.zeros(len(views), 3, dtype=torch.float64)
    kl = torch.zeros(len(views), dtype=torch.float64)
    for part in unembedding.chunks(torch.arange(count)):
        final = unembedding.logits(views[-1].residual[part]).log_softmax(1)
        share, said = final.exp(), final.argmax(1)
        for index, view in enumerate(views):
            here = unembedding.logits(view.residual[part]).log_softmax(1)
            named = (view.slot[part], view.ffn[part], here.argmax(1))
            shares[index] += torch.stack([(one == said).sum() for one in named]).cpu().double() / count
            kl[index] += (share * (final - here)).sum(1).double().sum().cpu() / count
    return [
        {
            "slot_top": None if (view.slot == NOTHING).all() else slot,
            "ffn_top": None if (view.ffn == NOTHING).all() else ffn,
            "residual_top": residual,
            "kl": distance,
        }
        for view, (slot, ffn, residual), distance in zip(views, shares.tolist(), kl.tolist(), strict=True)
    ]


@torch.inference_mode()
def next_pairs(
    source: Any,
    layout: Layout,
    tokens: Tensor,
    unembedding: Unembedding,
    tops: Mapping[str, Tensor],
    signs: Mapping[str, Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """By layers: of the slots whose top trigger is not a sequence's last token, what they promote there, and what came.

    Both are tokens, int64 `[slots]`; `tops` and `signs` as of `lens`. A negative coefficient writes the value reversed.
    """
    flat, length = tokens.flatten(), tokens.shape[1]
    found: dict[str, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layout.layers}
    every = each_values(source, layout) if tops else ()
    for values in progress(every, total=len(layout.ffns), label="keys and values", unit="FFNs"):
        ffn = values.ffn
        if ffn.name not in tops or ffn.hidden != unembedding.hidden:
            continue
        place = tops[ffn.name].cpu()
        slots = ((place >= 0) & (place % length != length - 1)).nonzero().flatten()
        if len(slots):
            directions = folded(values.rows[slots.to(values.rows.device)], values.gain)
            if ffn.name in signs:
                directions = directions * signs[ffn.name][slots].to(directions).sign()[:, None]
            found[ffn.layer].append((unembedding.top(directions).cpu(), flat[place[slots] + 1]))
    none = (torch.zeros(0, dtype=torch.int64),) * 2
    return {
        layer: (torch.cat([one for one, _ in [none, *pairs]]), torch.cat([other for _, other in [none, *pairs]]))
        for layer, pairs in found.items()
    }


def key_next(named: Tensor, followed: Tensor) -> dict[str, float | None]:
    """How often two lists of tokens, int64 `[slots]`, agree; and by chance: the mean over all ways to shuffle one."""
    count = len(named)
    if not count:
        return {"key_next": None, "chance": None}
    size = int(torch.cat([named, followed]).max()) + 1
    pairs = torch.bincount(named, minlength=size).double() @ torch.bincount(followed, minlength=size).double()
    return {"key_next": float((named == followed).double().mean()), "chance": float(pairs) / count**2}
