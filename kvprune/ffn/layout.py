"""What an FFN is made of: which parameters hold its keys and values, and how slots lie in them.

With experts.py the only file that knows how architectures build FFNs. It knows shapes, not names of models:

* a linear map with slots on its output is a key, one with slots on its input a value (nn.Linear, or Conv1D, whose
  weight is transposed); keys and value may be children of one module, siblings, or inline in the decoder layer
* gate and up are two keys, or one fused matrix, whose halves they are, or whose rows they take in turn
* experts are the same, stacked along axis 0 of three-dimensional parameters; every expert is an FFN of its own
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

Spread = Literal["whole", "halves", "interleaved"]
Shape = tuple[int, ...]


# Fields that set a width of what looks like an FFN and is none.
EXCEPTIONS = {"gated_norm_rank": "a norm's own gate: it scales what the norm lets through, and writes nothing"}


class NotAnFfnError(Exception):
    """What changes with a width is no set of FFNs; the message is the reason, `names` the parameters that change."""

    def __init__(self, reason: str, names: Iterable[str] = ()) -> None:
        super().__init__(reason)
        self.names = tuple(names)


@dataclass(frozen=True)
class Param:
    """A parameter, as the model holds it, and the axis of it that slots lie on."""

    name: str
    axis: int
    spread: Spread = "whole"  # of fused keys: how the two of a slot lie along the axis

    def indices(self, slots: Sequence[int], width: int) -> list[int]:
        """Where `slots` of an FFN of `width` lie along the axis, in its order."""
        match self.spread:
            case "halves":
                return [*slots, *(width + slot for slot in slots)]
            case "interleaved":
                return [at for slot in slots for at in (2 * slot, 2 * slot + 1)]
            case _:
                return list(slots)

    @property
    def fused(self) -> bool:
        return self.spread != "whole"


@dataclass(frozen=True)
class Ffn:
    """One FFN, or one expert: `coefficient i = f(keys i)`, written to the residual stream by slot i of `value`."""

    name: str
    module: str  # what is watched: the value's linear map, or the module of all experts
    keys: tuple[Param, ...]
    key_biases: tuple[Param, ...]
    value: Param
    value_bias: str | None
    width: int
    hidden: int  # what it writes to
    params_per_slot: int
    layer: str = ""  # the decoder layer that it is in
    expert: int | None = None  # its index on axis 0 of each parameter

    def cuts(self) -> tuple[Param, ...]:
        """All that shrinks with the width."""
        return (*self.keys, *self.key_biases, self.value)

    @property
    def gated(self) -> bool:
        return len(self.keys) == 2 or self.keys[0].fused

    @property
    def value_key(self) -> str:
        """What its own value matrix is called where experts are told apart."""
        return self.value.name if self.expert is None else f"{self.value.name}[{self.expert}]"

    @property
    def bias_key(self) -> str:
        """What the bias of its value is called where experts are told apart, whether there is one or not."""
        if self.expert is None:
            return self.value_bias or f"{self.value.name.removesuffix('.weight')}.bias"
        return f"{self.value_bias}[{self.expert}]"

    def axis(self, param: Param) -> int:
        """The axis that slots lie on in its own part of a parameter: of a stack of experts, one item."""
        return param.axis - (self.expert is not None)

    def missing_biases(self, width: int) -> dict[str, int]:
        """Names of the biases that its matrices could have and do not, with their elements at this width."""
        if self.expert is not None:
            return {}
        sizes = {key.name: width * (2 if key.fused else 1) for key in self.keys} | {self.value.name: self.hidden}
        there = {bias.name for bias in self.key_biases} | {self.value_bias}
        names = {f"{weight.removesuffix('.weight')}.bias": size for weight, size in sizes.items()}
        return {bias: size for bias, size in names.items() if bias not in there}


@dataclass(frozen=True)
class Field:
    """A field of config.json that sets the width of FFNs: of each, a fixed multiple of the field's value."""

    name: str  # with dots where it is nested
    value: int
    multiples: dict[str, Fraction]  # by FFN names

    @property
    def words(self) -> str:
        return f"{self.name} {self.value:,}"

    def width(self, ffn: Ffn, value: int) -> int:
        """Slots of `ffn` with the field at `value`. Raises ValueError where it cannot be that."""
        width = value * self.multiples[ffn.name]
        if width.denominator != 1:
            raise ValueError(f"{self.name} {value} gives {ffn.name} no whole number of slots")
        return width.numerator


@dataclass(frozen=True)
class Layout:
    """All FFNs of a model, in layer order, what sets their widths, and its parameter count (tied ones once)."""

    ffns: tuple[Ffn, ...]
    layers: tuple[str, ...]  # all decoder layers; a layer may hold any number of FFNs
    fields: tuple[Field, ...]
    left: tuple[str, ...]  # why other stacks of experts stay as they are
    bias_field: str | None  # a switch that gives every matrix of every FFN a bias, and nothing else, where there is one
    total_params: int

    @property
    def widest(self) -> int:
        return max(ffn.width for ffn in self.ffns)

    def in_layer(self, index: int) -> list[int]:
        """Indices of the FFNs in decoder layer `index`."""
        return [at for at, ffn in enumerate(self.ffns) if ffn.layer == self.layers[index]]

    def as_data(self) -> list[dict[str, Any]]:
        """The FFNs, as artifacts list them."""
        return [{"name": ffn.name, "width": ffn.width, "layer": ffn.layer, "expert": ffn.expert} for ffn in self.ffns]

    def field_of(self, ffn: Ffn) -> Field:
        """What sets the width of `ffn`."""
        return next(field for field in self.fields if ffn.name in field.multiples)


@dataclass(frozen=True)
class _Role:
    """Of one parameter that changes with a width: what it is, where its slots lie, and how many rows a slot has."""

    name: str
    kind: Literal["key", "value", "bias"]
    axis: int
    multiple: Fraction
    shape: Shape

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]


def assemble(model: nn.Module, changed: Mapping[str, tuple[int, Fraction]], value: int) -> list[tuple[Ffn, Fraction]]:
    """The FFNs that the parameters `changed` (name to axis and multiple of the field's `value`) are of, with multiples.

    Fused keys are taken for halves until a probe knows better. Raises NotAnFfnError where they are not those of FFNs.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    roles = [_role(model, name, axis, multiple, shapes[name]) for name, (axis, multiple) in changed.items()]
    keys = {role.name: role for role in roles if role.kind == "key"}
    biases = [role for role in roles if role.kind == "bias"]
    values = [role for role in roles if role.kind == "value"]
    found: list[tuple[Ffn, Fraction]] = []
    used: set[str] = set()
    for role in values:
        mine = _keys_of(role, keys)
        scope = _scope(role, mine)
        own = [item for item in biases if item.name.startswith(f"{scope}.")]  # or what scales slots one by one
        ffn = _one(role, mine, own, _value_bias(model, role), value, scope)
        found += [(each, role.multiple) for each in _experts(ffn, role)]
        if taken := used & {key.name for key in mine}:
            raise NotAnFfnError(f"{sorted(taken)[0]} belongs to more than one value matrix")
        used |= {key.name for key in mine} | {item.name for item in own}
    if lost := [role.name for role in roles if role.kind != "value" and role.name not in used]:
        raise NotAnFfnError(f"{lost[0]} changes with it, and is no key of an FFN")
    if not found:
        raise NotAnFfnError("no value matrix changes with it")
    return found


def _role(model: nn.Module, name: str, axis: int, multiple: Fraction, shape: Shape) -> _Role:
    owner = model.get_submodule(name.rpartition(".")[0])
    experts = [item for item in owner.parameters(recurse=False) if item.ndim == 3]
    if len(shape) == 1 or (len(shape) == 2 and experts):
        if len(shape) == 2 and axis == 0:
            raise NotAnFfnError(f"{name} has it as its number of experts")
        return _Role(name, "bias", axis, multiple, shape)
    if len(shape) == 2:
        if not isinstance(owner, nn.Linear | Conv1D):
            raise NotAnFfnError(f"{name} of {type(owner).__name__} is no linear map")
        out = 1 if isinstance(owner, Conv1D) else 0
        return _Role(name, "key" if axis == out else "value", axis, multiple, shape)
    if len(shape) == 3 and axis > 0 and "Conv" not in type(owner).__name__:
        return _Role(name, "key" if axis == _key_axis(owner, experts) else "value", axis, multiple, shape)
    raise NotAnFfnError(f"{name} {list(shape)} of {type(owner).__name__} is no linear map")


def _key_axis(owner: nn.Module, stacked: Sequence[Any]) -> int:
    """Which axis of a stack of experts' keys their slots lie on."""
    transposed = getattr(owner, "is_transposed", None)
    if transposed is None and len(stacked) == 2:  # the fused keys are as wide as two; of two alike, keys come first
        first, second = (tuple(item.shape) for item in stacked)
        return 2 if first[2] == 2 * second[1] and first[1] == second[2] else 1
    return 2 if transposed else 1


def _keys_of(value: _Role, keys: Mapping[str, _Role]) -> list[_Role]:
    """The keys in the smallest module around a value matrix that has any."""
    scope = value.owner
    while scope:
        mine = [key for key in keys.values() if key.name.startswith(f"{scope}.")]
        if mine:
            break
        scope = scope.rpartition(".")[0]
    else:
        raise NotAnFfnError(f"{value.name} has no keys")
    rows = sum(key.multiple for key in mine)
    stacks = {role.shape[0] if len(role.shape) == 3 else 0 for role in (*mine, value)}
    if rows not in (value.multiple, 2 * value.multiple) or len(stacks) > 1:
        names = ", ".join(f"{role.name} {list(role.shape)}" for role in (*mine, value))
        raise NotAnFfnError(f"{names} do not make one FFN")
    return mine


def _scope(value: _Role, keys: list[_Role]) -> str:
    """The path of the smallest module around a value matrix and its keys."""
    scope = value.owner
    while not all(key.name.startswith(f"{scope}.") for key in keys):
        scope = scope.rpartition(".")[0]
    return scope


def _value_bias(model: nn.Module, value: _Role) -> str | None:
    """The bias beside a value matrix: `bias` of a linear map, `NAME_bias` of a stack of experts."""
    known = dict(model.named_parameters())
    return next((name for name in (f"{value.owner}.bias", f"{value.name}_bias") if name in known), None)


def _one(value: _Role, keys: list[_Role], biases: list[_Role], bias: str | None, size: int, scope: str) -> Ffn:
    """The FFN, or the stack of experts, of these parameters."""
    width, stacked = int(size * value.multiple), len(value.shape) == 3

    def param(role: _Role) -> Param:
        return Param(role.name, role.axis, "halves" if role.multiple == 2 * value.multiple else "whole")

    rows = [_elements(role) * int(role.multiple / value.multiple) for role in (*keys, *biases, value)]
    return Ffn(
        name=scope,
        module=value.owner,
        keys=tuple(map(param, keys)),
        key_biases=tuple(map(param, biases)),
        value=param(value),
        value_bias=bias,
        width=width,
        hidden=value.shape[3 - value.axis] if stacked else value.shape[1 - value.axis],
        params_per_slot=sum(rows),
    )


def _elements(role: _Role) -> int:
    """Elements of one row along the slots' axis, of one expert."""
    stacked = len(role.shape) == 3 or (role.kind == "bias" and role.axis == 1)
    return math.prod(size for at, size in enumerate(role.shape) if at != role.axis and not (stacked and at == 0))


def _experts(ffn: Ffn, value: _Role) -> Iterator[Ffn]:
    if len(value.shape) < 3:
        yield ffn
        return
    for expert in range(value.shape[0]):
        yield replace(ffn, name=f"{ffn.name}.{expert}", expert=expert)


def resize(model: nn.Module, ffn: Ffn, width: int) -> None:
    """Give an FFN of a model without weights another width, in place: whole stacks of experts at once."""
    for param in ffn.cuts():
        path, _, name = param.name.rpartition(".")
        owner = model.get_submodule(path)
        shape = list(owner._parameters[name].shape)  # type: ignore[union-attr]
        shape[param.axis] = width * (2 if param.fused else 1)
        owner._parameters[name] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        if isinstance(owner, Conv1D) and param.axis == len(shape) - 1:
            owner.nf = shape[-1]  # it shapes its output by it


def linear_maps(model: nn.Module, layout: Layout) -> dict[str, bool]:
    """Names of the linear maps of all decoder layers, and whether each keeps its weight as [in, out]."""
    return {
        name: isinstance(module, Conv1D)
        for layer in layout.layers
        for name, module in model.get_submodule(layer).named_modules(prefix=layer)
        if isinstance(module, nn.Linear | Conv1D)
    }


def describe(layer: nn.Module) -> str:
    """A layer's modules that hold matrices, with shapes: what the user can look up."""
    parts = []
    for name, module in layer.named_children():
        shapes = [f"{key} {list(value.shape)}" for key, value in module.named_parameters() if value.ndim > 1]
        if shapes:
            parts.append(f"{name}: {type(module).__name__}({', '.join(shapes)})")
    return "; ".join(parts)
