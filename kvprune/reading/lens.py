"""When does a model know what it will say? Each layer's residual stream and FFN, read as tokens.

The logit lens (nostalgebraist 2020, "interpreting GPT: the logit lens") puts the residual stream after every layer
through the final norm and the head. Beside it stand what the layer's FFNs add, and what their single loudest slot
writes (Geva et al. 2021, arXiv:2012.14913, sections 4 and 5), and how often a slot's value names the very token that
followed its key's strongest trigger.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvprune.ffn.experts import Seen
from kvprune.ffn.layout import Layout
from kvprune.progress import progress
from kvprune.reading.passes import batches_with, count_passes, each_pass, rows_at, scale_at
from kvprune.reading.slots import spaced
from kvprune.reading.values import Unembedding, Values, each_values, folded

POSITIONS = 512
NOTHING = -1  # in place of a token where no slot wrote anything


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
    for _ in progress(passes, total=count_passes(source, layout, batches), label="layers", unit="batches"):
        for index, batch in sorted(listeners):
            views[index].append(listeners.pop((index, batch)).view(unembedding))
    return [
        View(*(torch.cat([getattr(view, field.name) for view in some]) for field in fields(View))) for some in views
    ]


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
        coefficients, scale = seen.h[rows].float(), scale_at(seen, rows, values)
        c, slot = (coefficients.abs() * values.length * scale[:, None]).max(1)
        louder = c > self.loudest[mine]
        which, slot, signs = mine[louder], slot[louder], coefficients.gather(1, slot[:, None])[louder].sign()
        self.loudest[which] = c[louder]
        self.said[which] = folded(values.rows[slot], values.gain) * signs
        self.written[mine] += folded(seen.y[rows], values.gain) * scale[:, None]

    def view(self, unembedding: Unembedding) -> View:
        """What was heard, read as tokens."""
        tops = [
            unembedding.top(directions).masked_fill(~directions.any(1), NOTHING)
            for directions in (self.said, self.written)
        ]
        return View(self.residual, *tops)


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
    counts = Counter(ffn.layer for ffn in layout.ffns)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layout.layers}
    every = each_values(source, layout) if tops else ()
    for values in progress(every, total=len(layout.ffns), label="keys and values", unit="FFNs"):
        ffn = values.ffn
        if ffn.name not in tops or ffn.hidden != unembedding.hidden:
            continue
        place = tops[ffn.name].cpu()
        some = torch.tensor(spaced(ffn.width, counts[ffn.layer]))
        slots = some[(place[some] >= 0) & (place[some] % length != length - 1)]
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
