"""Running a model over tokens while its FFNs are seen: layer by layer where it is walked, else as a whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.ffn.experts import Seen
from kvprune.ffn.fields import trunk
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.walk import Walker
from kvprune.ffn.watching import watched
from kvprune.reading.values import Values, all_values, open_values, probe

SeeAt = Callable[[int, Seen, Values], None]  # the number of the batch, and what an FFN shows there
AfterAt = Callable[[int, int, Tensor], None]  # batch, layer, and the residual stream after it [tokens, hidden]
TINY = 1e-12


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


def rows_at(seen: Seen, at: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the places `at` (sorted, in the batch) reach an FFN, as indices of `at`; and their rows in `seen`."""
    if seen.tokens is None:
        return torch.arange(len(at), device=at.device), at
    row = torch.searchsorted(seen.tokens, at).clamp(max=len(seen.tokens) - 1)
    there = seen.tokens[row] == at
    return there.nonzero().flatten(), row[there]


def scale_at(seen: Seen, rows: Tensor, values: Values) -> Tensor:
    """What all that an FFN writes at some of its `rows` is multiplied with, float32 `[rows]`, beside constants.

    The router's weight of an expert, where it has not weighed the inputs; and where a norm follows the FFN, 1 / rms of
    its output: the norm's weight is in the values. A gate of its own on a shared expert is not in it.
    """
    scale = torch.ones(len(rows), device=rows.device) if seen.gates is None else seen.gates[rows].float()
    return scale if values.gain is None else scale * (seen.y[rows].float().square().mean(1) + TINY).rsqrt()


def each_pass(
    source: Any, layout: Layout, batches: Sequence[Tensor], see: SeeAt, after: AfterAt | None = None
) -> Iterator[None]:
    """Run all layers over `batches` `[sequences, length]` of tokens: layer by layer a Walker, else a loaded model.

    Yields `count_passes` times, when no layer is being run.
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
    states, calls = [], {}
    for batch in batches:
        hidden, calls[len(batch)] = walker.record(batch)
        states.append(hidden.cpu())
    hidden, own = walker.record(probe(walker.device))
    for index in range(len(walker.layers)):
        ffns = [layout.ffns[at] for at in layout.in_layer(index)]
        with walker.filled(index) as layer:
            values = open_values(walker.model, ffns, partial(own[index].run, layer, hidden))
            for number, before in enumerate(states):
                with watched(walker.model, ffns, partial(_show, see, number, values)):
                    out = calls[len(before)][index].run(layer, before.to(walker.device))
                after(number, index, out.flatten(0, -2))
                states[number] = out.cpu()
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


def count_passes(source: Any, layout: Layout, batches: Sequence[Tensor]) -> int:
    """How often `each_pass` yields."""
    return len(batches) * (len(layout.layers) if isinstance(source, Walker) else 1)
