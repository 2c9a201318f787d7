"""Trying out on a narrow random model whether the slots of an FFN are separable, and how its fused keys lie.

One row of a key is changed at a time: only one slot's coefficient may change. So a norm or a top-k among coefficients
is found, and what a class makes of gate and up, without knowing it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.errors import KvpruneError
from kvprune.ffn.experts import Seen, own_in
from kvprune.ffn.fields import Trial, trunk
from kvprune.ffn.layout import Ffn, Field, NotAnFfnError, Param, Spread
from kvprune.ffn.walk import CannotWalkError, Walker, empty_model
from kvprune.ffn.watching import watched
from kvprune.sources.models import one_line

TOKENS = 16
RANDOM_ELEMENTS = 2**22  # larger matrices of other parts are zeros, which take no memory
FACTOR = -1.5  # what a row of a key is multiplied by: a unit that is silent must come to life
TOLERANCE = 1e-4  # of the largest value, for what should be equal but for rounding

Runner = Callable[[], Any]


def probe(
    trial: Trial, thin: Any, layers: tuple[str, ...], ffns: list[Ffn], field: Field, *, trust_remote_code: bool
) -> list[Ffn]:
    """Probe one of each kind of `ffns`, whose width `field` sets, in the narrow model of a `trial`.

    `thin` is a config as empty_model needs it. Returns the FFNs with what was found of how their keys are fused. Raises
    NotAnFfnError where slots are coupled.
    """
    model = empty_model(trial.narrow, thin, torch.float32, trust_remote_code=trust_remote_code)
    spreads: dict[Any, Spread] = {}  # by kind, and then by module
    for ffn in ffns:
        if ffn.module in spreads:  # another of its experts
            continue
        narrow = replace(ffn, width=field.width(ffn, trial.width))
        kind = _kind(model, narrow)
        if kind not in spreads:
            siblings = [replace(other, width=narrow.width) for other in ffns if other.module == ffn.module]
            with _running(model, layers, ffn.layer, ffns) as run:
                spreads[kind] = _probe_one(model, siblings, run)
        spreads[ffn.module] = spreads[kind]
    return [_with_spread(ffn, spreads[ffn.module]) for ffn in ffns]


def _with_spread(ffn: Ffn, spread: Spread) -> Ffn:
    if not any(param.fused for param in (*ffn.keys, *ffn.key_biases)):
        return ffn

    def spread_out(params: tuple[Param, ...]) -> tuple[Param, ...]:
        return tuple(replace(param, spread=spread) if param.fused else param for param in params)

    return replace(ffn, keys=spread_out(ffn.keys), key_biases=spread_out(ffn.key_biases))


def _kind(model: nn.Module, ffn: Ffn) -> Any:
    """What FFNs of one build have in common: the classes around them, and their shapes."""
    module = model.get_submodule(ffn.name if ffn.expert is None else ffn.module)
    layer = model.get_submodule(ffn.layer)
    parts = [(param.name.removeprefix(f"{ffn.layer}."), param.axis, param.fused) for param in ffn.cuts()]
    return type(layer), type(module), tuple(parts), ffn.width, ffn.hidden


@contextmanager
def _running(model: Any, layers: tuple[str, ...], layer: str, ffns: list[Ffn]) -> Iterator[Runner]:
    """A way to run a layer of `model` on random hidden states: alone, or where that cannot be, in the whole model.

    It is filled with random weights for that long.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings()
    states = torch.randn(1, TOKENS, embedding.weight.shape[-1], generator=generator)
    tokens = torch.arange(TOKENS)[None] % embedding.weight.shape[0]
    embedding.forward = lambda *_args, **_kwargs: states.clone()
    wanted = {param.name for ffn in ffns for param in ffn.cuts()}
    before = [(module, {**module._parameters}) for module in model.modules()]
    large = [
        module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "out_features", None), int)
        and module.weight.numel() > RANDOM_ELEMENTS
        and f"{name}.weight" not in wanted
    ]
    try:
        for module in large:
            module.forward = partial(_nothing, module)
        _fill(model, wanted, generator, lambda name: not name.startswith(layers) or name.startswith(f"{layer}."))
        try:
            hidden, calls = Walker(model, layers, _nothing_to_read, _single, "cpu").record(tokens)
            call = calls[layers.index(layer)]
            yield lambda: call.run(model.get_submodule(layer), hidden.clone())
        except (CannotWalkError, ValueError):
            _fill(model, wanted, generator, lambda name: name.startswith(layers) and not name.startswith(f"{layer}."))
            yield lambda: trunk(model)[1](input_ids=tokens, use_cache=False)
    finally:
        for module in [embedding, *large]:
            del module.forward
        for module, parameters in before:
            module._parameters = parameters


def _nothing_to_read(name: str, _: torch.dtype) -> Tensor:
    raise KvpruneError(f"{name}: a probe reads no weights")


def _single(_: str) -> torch.dtype:
    return torch.float32


def _nothing(module: Any, x: Tensor) -> Tensor:
    """What a linear map of zeros makes of `x`, without the products."""
    return x.new_zeros(*x.shape[:-1], module.out_features)


def _fill(model: nn.Module, wanted: set[str], generator: torch.Generator, mine: Callable[[str], bool]) -> None:
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            name = f"{path}.{key}"
            if parameter is not None and mine(name):
                filled = _random(parameter, generator, name in wanted)
                module._parameters[key] = nn.Parameter(filled, requires_grad=False)


def _random(parameter: Tensor, generator: torch.Generator, wanted: bool) -> Tensor:
    if parameter.ndim < 2:
        return 1 + 0.1 * torch.randn(parameter.shape, generator=generator)
    if parameter.numel() > RANDOM_ELEMENTS and not wanted:
        return torch.zeros(()).expand(parameter.shape)
    scale: float = parameter.shape[-1] ** 0.5
    return torch.randn(parameter.shape, generator=generator) / scale


@torch.no_grad()
def _probe_one(model: nn.Module, siblings: list[Ffn], run: Runner) -> Spread:
    """Change each row of the keys of one FFN, or of the busiest of a layer's experts; how a fused key turns out."""
    seen = _coefficients(model, siblings, run)
    if not seen:
        raise NotAnFfnError(f"{siblings[0].name}: its value matrix is not called as one")
    if siblings[0].expert is not None:
        _check_experts(model, siblings, run)
    name = max(seen, key=lambda name: len(seen[name]))
    ffn, base = next(item for item in siblings if item.name == name), seen[name]
    if ffn.expert is None and len(base) != TOKENS:
        raise NotAnFfnError(f"{name}: {len(base)} rows reach its value matrix where there are {TOKENS} tokens")
    if base.shape[-1] != ffn.width:
        raise NotAnFfnError(
            f"{name}: {base.shape[-1]} coefficients reach its value matrix, and its width is {ffn.width}"
        )
    patterns, linear = [], True
    biases = [own_in(model, bias, ffn) for bias in ffn.key_biases]
    for bias in biases:  # what is linear is so without them
        bias.zero_()
    base = _coefficients(model, siblings, run).get(name, base)
    for key in ffn.keys:
        weight, axis = own_in(model, key, ffn), ffn.axis(key)
        moved = []
        for row in range(weight.shape[axis]):
            kept = weight.select(axis, row).clone()
            weight.select(axis, row).mul_(FACTOR)
            after = _coefficients(model, siblings, run)[name]
            weight.select(axis, row).copy_(kept)
            moved.append(_moved(ffn, model, row, base, after))
            linear &= _close(after[:, moved[-1]], FACTOR * base[:, moved[-1]])
        patterns.append(_spread(ffn, key, moved))
    if linear:
        raise NotAnFfnError(f"{name}: nothing is between its matrices: a product of two, and no memory")
    return patterns[0]


def _moved(ffn: Ffn, model: nn.Module, row: int, base: Tensor, after: Tensor) -> int:
    slots = ((after - base).abs().amax(0) > 0).nonzero().flatten().tolist() if after.shape == base.shape else []
    if len(slots) != 1:
        kind = type(model.get_submodule(ffn.name if ffn.expert is None else ffn.module)).__name__
        raise NotAnFfnError(
            f"{ffn.name}: {kind} couples its slots: changing row {row} of a key changes the coefficients of "
            f"{len(slots)} slots; removing slots would change the others"
        )
    return int(slots[0])


def _spread(ffn: Ffn, key: Param, moved: list[int]) -> Spread:
    for spread in ("halves", "interleaved") if key.fused else ("whole",):
        at = replace(key, spread=spread).indices(range(ffn.width), ffn.width)
        slots = [*range(ffn.width)] * 2 if spread == "halves" else [slot for slot in range(ffn.width) for _ in range(2)]
        if all(moved[row] == slot for row, slot in zip(at, slots if key.fused else range(ffn.width), strict=True)):
            return spread
    raise NotAnFfnError(f"{ffn.name}: the rows of {key.name} are those of slots {moved}: an order that is not known")


def _coefficients(model: nn.Module, ffns: list[Ffn], run: Runner) -> dict[str, Tensor]:
    """Coefficients `[tokens, slots]` of each FFN that any tokens reach."""
    seen: dict[str, Tensor] = {}

    def see(ffn: Ffn, shown: Seen) -> None:
        if ffn.name not in seen:  # a module may be called in several layers
            seen[ffn.name] = shown.h.clone()

    try:
        with watched(model, ffns, see):
            run()
    except (TypeError, RuntimeError, ValueError, AttributeError, LookupError, AssertionError, KvpruneError) as error:
        raise NotAnFfnError(f"{ffns[0].name}: cannot be run to be probed: {one_line(error)}") from None
    return seen


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=TOLERANCE * float(other.abs().max()))


def _check_experts(model: nn.Module, ffns: list[Ffn], run: Runner) -> None:
    """Experts that are watched must make what the class itself makes of the same input."""
    module = model.get_submodule(ffns[0].module)
    calls: list[tuple[Any, Any, Tensor]] = []

    def keep(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        calls.append((args, kwargs, output.clone()))

    handle = module.register_forward_hook(keep, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    args, kwargs, expected = calls[0]
    with watched(model, ffns, lambda *_: None):
        got = module(*args, **kwargs)
    if not _close(got, expected):
        raise NotAnFfnError(f"{ffns[0].module}: {type(module).__name__} does more with its experts than can be watched")
