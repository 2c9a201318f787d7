"""Counting by ordinary forwards of the whole model: for models whose layers cannot be called one by one."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn.counting import Counters, count_seen, counted_rows
from kvprune.ffn.experts import Seen
from kvprune.ffn.fields import trunk
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.stats import FfnStats
from kvprune.ffn.watching import empty_for, watched
from kvprune.sources.models import is_out_of_memory, one_line

SECONDS_BETWEEN_SAVES = 60.0


@torch.inference_mode()
def count_batch(
    model: Any,
    layout: Layout,
    stats: Mapping[str, FfnStats],
    batch: Tensor,
    skip_first: int,
    counters: Counters | None = None,
) -> None:
    """Run `batch` `[sequences, tokens]` through the model without its head; add every FFN's coefficients to `stats`."""

    def see(ffn: Ffn, seen: Seen) -> None:
        count_seen(stats[ffn.name], seen, len(batch), batch.shape[1], skip_first, counters)

    with watched(model, layout.ffns, see):
        trunk(model)[1](input_ids=batch.to(model.device), use_cache=False)


@torch.inference_mode(mode=False)
@torch.enable_grad()
def add_gradients(model: Any, layout: Layout, stats: Mapping[str, FfnStats], batch: Tensor, skip_first: int) -> None:
    """Add (a dL/da)^2 of the counted tokens of `batch` `[sequences, tokens]` to every FFN's `gradient`.

    L is the loss of a sequence, summed over its tokens; sequences run one by one, so that no batch size matters.
    Weights have no gradients: they start at the embeddings.
    """

    def see(ffn: Ffn, seen: Seen) -> None:
        # Of what has a graph nothing may be held here: a tensor whose hook holds it is never freed.
        source, tokens, rows = seen.source.detach(), seen.tokens, len(seen.h)

        def add(gradient: Tensor) -> None:
            effect = (source.double() * gradient.double()).flatten(0, -2)
            if len(effect) != rows and tokens is not None:  # every expert has seen all tokens
                effect = effect[tokens]
            total = stats[ffn.name].gradient
            assert total is not None
            shown = Seen(effect, effect, effect, tokens)
            stats[ffn.name].gradient = total + counted_rows(shown, batch.shape[1], skip_first).square().sum(0)

        if seen.source.requires_grad:
            seen.source.register_hook(add)  # type: ignore[no-untyped-call]

    handle = model.get_input_embeddings().register_forward_hook(
        lambda _module, _args, output: output.requires_grad_().clone()  # a model may change it in place
    )
    try:
        with watched(model, layout.ffns, see):
            for sequence in batch.to(model.device):
                logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
                torch.nn.functional.cross_entropy(logits.float(), sequence[1:], reduction="sum").backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:  # of a class that has no backward
        if is_out_of_memory(error):
            raise
        raise KvpruneError(
            f"calibrate.collect: no gradients can be taken through {type(model).__name__}: {one_line(error)}"
        ) from None
    finally:
        handle.remove()


def empty(model: Any, layout: Layout) -> dict[str, FfnStats]:
    """Statistics without a count for every FFN of the model, with the norms of its keys and values."""

    @torch.inference_mode()
    def run() -> None:
        trunk(model)[1](input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)

    return empty_for(model, layout.ffns, run)


@contextmanager
def saved_when_stopped(save: Callable[[], None], seconds: float = SECONDS_BETWEEN_SAVES) -> Iterator[Callable[[], Any]]:
    """Save now and then, and on Ctrl-C and SIGTERM: a stop waits for the batch in hand, which is counted whole."""
    stopped: list[int] = []
    saved = time.monotonic()

    @contextmanager
    def tick() -> Iterator[None]:
        nonlocal saved
        yield
        if stopped or time.monotonic() - saved > seconds:
            save()
            saved = time.monotonic()
        if stopped:
            raise KeyboardInterrupt

    def stop(number: int, _: Any) -> None:
        if stopped:  # a second one does not wait
            raise KeyboardInterrupt
        stopped.append(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        former = {number: signal.signal(number, stop) for number in signals}
    except ValueError:  # not in the main thread: signals are not ours to take
        former = {}
    try:
        yield tick
        if stopped:
            save()
            raise KeyboardInterrupt
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
