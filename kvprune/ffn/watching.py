"""Watching the FFNs of a running model: hooks that see coefficients, and what else a layer says of its FFN."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.ffn.counting import Counters, count
from kvprune.ffn.gram import Gram, add_tokens
from kvprune.ffn.layout import Ffn
from kvprune.ffn.stats import FfnStats, empty_stats

SLOPE_TOLERANCE = 1e-3  # of the change's energy: rounding, in low precision


@contextmanager
def watched(value: nn.Module) -> Iterator[list[Tensor]]:
    """A list that holds the last input (coefficients) and output of a value matrix."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen[:] = [args[0], output]

    handle = value.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def summed(value: nn.Module, gram: Gram | None, skip_first: int) -> Iterator[None]:
    """Add the counted tokens' coefficients that reach a value matrix to `gram`, if there is one."""
    if gram is None:
        yield
        return

    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        add_tokens(gram, args[0][:, skip_first:].flatten(0, 1))

    handle = value.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def counted(
    values: Sequence[nn.Module], stats: Sequence[FfnStats], skip_first: int, counters: Counters | None
) -> Iterator[None]:
    """Count the coefficients that reach each of the value matrices into its statistics."""

    def hook(item: FfnStats) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: count(item, args[0], skip_first, counters)

    handles = [value.register_forward_pre_hook(hook(item)) for value, item in zip(values, stats, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def empty_for(root: nn.Module, ffns: Sequence[Ffn], run: Callable[[], Any]) -> list[FfnStats]:
    """Statistics without a count for `ffns`, with the norms of their keys and values. `run` runs them within `root`."""
    gains = find_gains(root, ffns, run)
    return [empty_stats(*_norms(root, ffn, gain)) for ffn, gain in zip(ffns, gains, strict=True)]


def value_rows(value: nn.Module, ffn: Ffn) -> Tensor:
    """The values of an FFN as rows, `[slots, hidden]`: a view of its value matrix."""
    weight: Tensor = value.weight  # type: ignore[assignment]
    return weight if ffn.value.slot_axis == 0 else weight.T


@torch.inference_mode()
def _norms(root: nn.Module, ffn: Ffn, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """Length of each slot's value, and product of the lengths of its keys, `[slots]` in float32."""
    values = value_rows(root.get_submodule(ffn.value.name), ffn).float()
    value_norm = torch.linalg.vector_norm(values if gain is None else values * gain, dim=1)
    key_norm = torch.ones_like(value_norm)
    for key in ffn.keys:
        weight: Tensor = root.get_submodule(key.name).weight  # type: ignore[assignment]
        key_norm *= torch.linalg.vector_norm(weight.float(), dim=1 - key.slot_axis)
    return value_norm, key_norm


@torch.inference_mode()
def find_gains(root: nn.Module, ffns: Sequence[Ffn], run: Callable[[], Any]) -> list[Tensor | None]:
    """The weight `[hidden]` of the norm that each FFN's output goes through before the residual stream, if any.

    Found by watching which module within `root` is handed the very tensor that the FFN returned; its weight is what it
    does to a vector of mean 0 and mean square 1, so that "weight" and "1 + weight" need no telling apart.
    """
    outputs: dict[int, tuple[int, Tensor]] = {}  # the tensors are held, so that no other one gets their address
    norms: dict[int, nn.Module] = {}
    modules = {root.get_submodule(ffn.name): index for index, ffn in enumerate(ffns)}

    def after(module: nn.Module, _: Any, output: Any) -> None:
        outputs[output.data_ptr()] = (modules[module], output)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].data_ptr() in outputs:
            norms[outputs[args[0].data_ptr()][0]] = module

    handles = [module.register_forward_hook(after) for module in modules]
    handles += [
        module.register_forward_pre_hook(before)
        for module in root.modules()
        if [tuple(weight.shape) for weight in module.parameters()][:1] == [(ffns[0].hidden,)]
        and not list(module.children())
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return [_gain(norms[index], ffn.hidden) if index in norms else None for index, ffn in enumerate(ffns)]


def _gain(norm: nn.Module, hidden: int) -> Tensor:
    weight = next(norm.parameters())
    x = torch.ones(hidden, dtype=weight.dtype, device=weight.device)
    x[1::2] = -1
    gain: Tensor = (norm(x) - norm(-x)) / 2 * x
    return gain.float()


def residual_slope(ffn: nn.Module, run: Callable[[], Tensor]) -> float | None:
    """How much a layer's output grows with its FFN's: 1 where that is added, None where it is not in proportion.

    `run` runs the layer. Measured by adding noise, as large as the output, to what the FFN returns.
    """
    plain = run().float()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(plain.shape, generator=generator).to(plain) * plain.square().mean().sqrt()
    handle = ffn.register_forward_hook(lambda _module, _args, output: output + noise.to(output))
    try:
        change = run().float() - plain
    finally:
        handle.remove()
    slope = float((change * noise).sum() / noise.square().sum())
    left = float((change - slope * noise).square().sum() / change.square().sum().clamp(min=1e-30))
    return slope if left < SLOPE_TOLERANCE else None
