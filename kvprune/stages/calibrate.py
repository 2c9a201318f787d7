"""Calibrate: run the model over the calibration tokens and count how its slots fire."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.artifacts import RunFolder, provenance, read_tensors, write_tensors
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.counting import Counters, count, make_counters
from kvprune.ffn.layout import Ffn, Layout
from kvprune.ffn.stats import FfnStats, empty_stats, first_bad_slot, from_tensors, to_tensors
from kvprune.progress import log, progress
from kvprune.recipe import Recipe, stage_recipe
from kvprune.sources.models import is_out_of_memory, out_of_memory
from kvprune.sources.texts import text_fingerprint, token_digest

SECONDS_BETWEEN_SAVES = 60.0


def calibrate(recipe: Recipe, dense: Dense, model: Any, tokens: Tensor, run: RunFolder, *, batch_size: int) -> None:
    """Count `tokens` `[sequences, sequence_length]` through `model`, and write the statistics to the run folder.

    Interrupted, it keeps what is counted in `stats.partial.safetensors`, and the same call goes on from there.
    Raises KvpruneError, naming layer and slot, where a coefficient is not finite.
    """
    source, layout = dense.source, dense.layout
    names = [ffn.name for ffn in layout.ffns]
    meta = provenance(
        "stats",
        stage_recipe(recipe, "calibrate"),
        {
            "model": source.fingerprint,
            "text": text_fingerprint(recipe.calibrate.text),
            "tokens": token_digest(tokens),
        },
        model={"title": source.title, "commit": source.commit, "note": source.note},
        run={"device": model.device.type, "dtype": str(model.dtype).removeprefix("torch."), "batch_size": batch_size},
        layout={"ffns": names, "width": layout.width, "width_field": layout.width_field},
    )
    stats, done = _resume(run, meta, names, str(model.device)) or (empty(model, layout), 0)
    batches = torch.split(tokens[done:], batch_size) if done < len(tokens) else ()

    def save() -> None:
        _refuse_not_finite(layout, stats)
        partial = {**meta, "done": int(stats[0].sequences)}
        write_tensors(run.partial_stats, to_tensors(stats, names), partial)

    length = tokens.shape[1]
    bar = progress(
        batches, total=len(tokens[done:]) * length, label="calibrate", unit="tokens", per_item=batch_size * length
    )
    with (
        _saved_when_stopped(save) as tick,
        make_counters(layout.width, model.dtype, model.device) as counters,
    ):
        for batch in bar:
            with tick():
                try:
                    count_batch(model, layout, stats, batch, recipe.calibrate.skip_first, counters)
                except (RuntimeError, MemoryError) as error:
                    if is_out_of_memory(error):
                        raise out_of_memory(batch_size, "calibrate.sequence_length") from None
                    raise
                if int(stats[0].sequences) <= batch_size:  # the first batch shows most of what can go wrong
                    _refuse_not_finite(layout, stats)
    _refuse_not_finite(layout, stats)
    write_tensors(run.stats, to_tensors(stats, names), meta)
    run.partial_stats.unlink(missing_ok=True)


def _refuse_not_finite(layout: Layout, stats: Sequence[FfnStats]) -> None:
    for ffn, item in zip(layout.ffns, stats, strict=True):
        if (slot := first_bad_slot(item)) is not None:
            raise KvpruneError(
                f"{ffn.name}: slot {slot} has NaN or infinite coefficients; check the weights, or try dtype: float32"
            )


@torch.inference_mode()
def count_batch(
    model: Any,
    layout: Layout,
    stats: Sequence[FfnStats],
    batch: Tensor,
    skip_first: int,
    counters: Counters | None = None,
) -> None:
    """Run `batch` `[sequences, tokens]` through the model without its head; add every FFN's coefficients to `stats`."""

    def hook(item: FfnStats) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: count(item, args[0], skip_first, counters)

    handles = [
        model.get_submodule(ffn.value.name).register_forward_pre_hook(hook(item))
        for ffn, item in zip(layout.ffns, stats, strict=True)
    ]
    try:
        model.base_model(input_ids=batch.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def empty(model: Any, layout: Layout) -> list[FfnStats]:
    """Statistics without a count for every FFN of the model, with the norms of its keys and values."""
    gains = _gains(model, layout)
    return [empty_stats(*_norms(model, ffn, gain)) for ffn, gain in zip(layout.ffns, gains, strict=True)]


@torch.inference_mode()
def _norms(model: Any, ffn: Ffn, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """Length of each slot's value, and product of the lengths of its keys, `[slots]` in float32."""

    def rows(name: str, slot_axis: int) -> Tensor:
        weight: Tensor = model.get_submodule(name).weight
        return weight if slot_axis == 0 else weight.T

    values = rows(ffn.value.name, ffn.value.slot_axis).float()
    value_norm = torch.linalg.vector_norm(values if gain is None else values * gain, dim=1)
    key_norm = torch.ones_like(value_norm)
    for key in ffn.keys:
        key_norm *= torch.linalg.vector_norm(rows(key.name, key.slot_axis).float(), dim=1)
    return value_norm, key_norm


@torch.inference_mode()
def _gains(model: Any, layout: Layout) -> list[Tensor | None]:
    """The weight `[hidden]` of the norm that an FFN's output goes through before the residual stream, if any.

    Found by watching which module is handed the very tensor that the FFN returned; its weight is what it does to
    a vector of mean 0 and mean square 1, so that "weight" and "1 + weight" need no telling apart.
    """
    outputs: dict[int, tuple[int, Tensor]] = {}  # the tensors are held, so that no other one gets their address
    norms: dict[int, nn.Module] = {}
    ffns = {model.get_submodule(ffn.name): index for index, ffn in enumerate(layout.ffns)}

    def after(module: nn.Module, _: Any, output: Any) -> None:
        outputs[output.data_ptr()] = (ffns[module], output)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].data_ptr() in outputs:
            norms[outputs[args[0].data_ptr()][0]] = module

    handles = [module.register_forward_hook(after) for module in ffns]
    handles += [
        module.register_forward_pre_hook(before)
        for module in model.modules()
        if [tuple(weight.shape) for weight in module.parameters()][:1] == [(layout.ffns[0].hidden,)]
        and not list(module.children())
    ]
    try:
        model.base_model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [_gain(norms[index], layout.ffns[index].hidden) if index in norms else None for index in range(len(ffns))]


def _gain(norm: nn.Module, hidden: int) -> Tensor:
    weight = next(norm.parameters())
    x = torch.ones(hidden, dtype=weight.dtype, device=weight.device)
    x[1::2] = -1
    gain: Tensor = (norm(x) - norm(-x)) / 2 * x
    return gain.float()


def _resume(run: RunFolder, meta: dict[str, Any], names: list[str], device: str) -> tuple[list[FfnStats], int] | None:
    """What an interrupted calibration of the very same kind has counted, or None."""
    if not run.partial_stats.is_file():
        return None
    tensors, found = read_tensors(run.partial_stats)
    done = found.pop("done")
    if found != meta:
        log.info("calibrate: %s is of another recipe or batch size; counting from the start", run.partial_stats.name)
        return None
    log.info("calibrate: going on after %d sequences", done)
    return from_tensors(tensors, names, device), done


@contextmanager
def _saved_when_stopped(save: Callable[[], None]) -> Iterator[Callable[[], Any]]:
    """Save now and then, and on Ctrl-C and SIGTERM: a stop waits for the batch in hand, which is counted whole."""
    stopped: list[int] = []
    saved = time.monotonic()

    @contextmanager
    def tick() -> Iterator[None]:
        nonlocal saved
        yield
        if stopped or time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
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
