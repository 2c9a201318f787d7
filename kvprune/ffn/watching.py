"""Watching the FFNs of a running model: hooks that see coefficients, and what else a layer says of its FFN."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.ffn.experts import See, Seen, own_in, run_experts
from kvprune.ffn.layout import Ffn
from kvprune.ffn.stats import FfnStats, empty_stats

SLOPE_TOLERANCE = 1e-3  # of the change's energy: rounding, in low precision


@contextmanager
def watched(root: nn.Module, ffns: Sequence[Ffn], see: See) -> Iterator[None]:
    """Show `see` what reaches and leaves each of `ffns`, which are modules within `root`, at each of their calls."""
    modules: dict[str, list[Ffn]] = {}
    for ffn in ffns:
        modules.setdefault(ffn.module, []).append(ffn)
    handles, replaced = [], []
    try:
        for name, members in modules.items():
            module = root.get_submodule(name)
            if members[0].expert is None:
                handles.append(module.register_forward_hook(_hook(members[0], see)))
            else:
                module.forward = partial(_experts, module, members, see)
                replaced.append(module)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in replaced:
            del module.forward


def _hook(ffn: Ffn, see: See) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    return lambda _, args, output: see(ffn, Seen(args[0].flatten(0, -2), output.flatten(0, -2), args[0]))


def _experts(module: nn.Module, ffns: Sequence[Ffn], see: See, *args: Any, **kwargs: Any) -> Any:
    return run_experts(module, ffns, see, args, kwargs)


def empty_for(root: nn.Module, ffns: Sequence[Ffn], run: Callable[[], Any]) -> dict[str, FfnStats]:
    """Statistics by name without a count for `ffns`, with the norms of keys and values. `run` runs them in `root`."""
    gains = find_gains(root, ffns, run)
    return {
        ffn.name: empty_stats(*_norms(root, ffn, gain), routed=ffn.expert is not None)
        for ffn, gain in zip(ffns, gains, strict=True)
    }


def value_rows(root: nn.Module, ffn: Ffn) -> Tensor:
    """The values of an FFN as rows, `[slots, hidden]`: a view of its value matrix."""
    return as_rows(own_in(root, ffn.value, ffn), ffn)


def as_rows(weight: Tensor, ffn: Ffn) -> Tensor:
    """A value matrix with slots first; and back."""
    return weight if ffn.axis(ffn.value) == 0 else weight.T


@torch.inference_mode()
def _norms(root: nn.Module, ffn: Ffn, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """Length of each slot's value, and product of the lengths of its keys, `[slots]` in float32."""
    values = value_rows(root, ffn).float()
    value_norm = torch.linalg.vector_norm(values if gain is None else values * gain, dim=1)
    key_norm = torch.ones_like(value_norm)
    for key in ffn.keys:
        weight = own_in(root, key, ffn)
        norms = torch.linalg.vector_norm(weight.float(), dim=1 - ffn.axis(key))
        rows = norms[key.indices(range(ffn.width), ffn.width)]
        if key.fused:
            rows = rows.view(2, -1) if key.spread == "halves" else rows.view(-1, 2).T
            rows = rows.prod(0)
        key_norm *= rows
    return value_norm, key_norm


@torch.inference_mode()
def find_gains(root: nn.Module, ffns: Sequence[Ffn], run: Callable[[], Any]) -> list[Tensor | None]:
    """The weight `[hidden]` of the norm that each FFN's output goes through before the residual stream, if any.

    Found by watching which module within `root` is handed the very tensor that the FFN returned; its weight is what it
    does to a vector of mean 0 and mean square 1, so that "weight" and "1 + weight" need no telling apart.
    """
    alone = [ffn for ffn in ffns if ffn.expert is None]
    outputs: dict[int, tuple[str, Tensor]] = {}  # the tensors are held, so that no other one gets their address
    norms: dict[str, nn.Module] = {}
    modules = {root.get_submodule(ffn.module): ffn.name for ffn in alone}

    def after(module: nn.Module, _: Any, output: Any) -> None:
        outputs[output.data_ptr()] = (modules[module], output)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].data_ptr() in outputs:
            norms[outputs[args[0].data_ptr()][0]] = module

    handles = [module.register_forward_hook(after) for module in modules]
    handles += [
        module.register_forward_pre_hook(before)
        for module in root.modules()
        if [tuple(weight.shape) for weight in module.parameters()][:1] in [[(ffn.hidden,)] for ffn in alone]
        and not list(module.children())
    ]
    try:
        if alone:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [_gain(norms[ffn.name], ffn.hidden) if ffn.name in norms else None for ffn in ffns]


def _gain(norm: nn.Module, hidden: int) -> Tensor:
    weight = next(norm.parameters())
    x = torch.ones(hidden, dtype=weight.dtype, device=weight.device)
    x[1::2] = -1
    gain: Tensor = (norm(x) - norm(-x)) / 2 * x
    return gain.float()


def residual_slope(ffn: nn.Module, run: Callable[[], Tensor]) -> float | None:
    """How much a layer's output grows with its FFN's: 1 where it is added, None where it is not in proportion.

    `run` runs the layer. Measured by adding noise, as large as the output, to what the FFN returns.
    """
    plain = run().float()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(plain.shape, generator=generator).to(plain) * plain.square().mean().sqrt()
    handle = ffn.register_forward_hook(lambda _module, _args, output: output + noise.view(output.shape).to(output))
    try:
        change = run().float() - plain
    finally:
        handle.remove()
    slope = float((change * noise).sum() / noise.square().sum())
    left = float((change - slope * noise).square().sum() / change.square().sum().clamp(min=1e-30))
    return slope if left < SLOPE_TOLERANCE else None
