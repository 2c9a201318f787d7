"""Fields of a model's config: building models without weights from it, and finding the fields that set FFN widths.

A field is tried out: a clone of the config with another value must build a model in which the parameters of FFNs have
another width, and nothing else has changed.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvprune.errors import KvpruneError
from kvprune.ffn.layout import Ffn, Field, NotAnFfnError, Shape, assemble

PROBE_WIDTHS = (8, 64)  # the second where the first is the width already, or a class refuses it
MULTIPLES = (Fraction(1, 2), *range(1, 17))  # how wide shared experts and fused keys are, relative to their field


def meta_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of `config` on the meta device. Raises KvpruneError where there is none."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, ImportError, AttributeError, RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        raise KvpruneError(
            f"model type {config.model_type}: not a causal language model that transformers builds: {text}"
        ) from None


def text_prefix(config: Any) -> str:
    """Where the text model's own config is within `config`: "" or, of a multimodal one, as "text_config."."""
    text = config.get_text_config(decoder=True)
    if text is config:
        return ""
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is text:
            return f"{name}."
        if inner is not None and hasattr(inner, "sub_configs") and inner.get_text_config(decoder=True) is text:
            return f"{name}.{text_prefix(inner)}"
    raise KvpruneError(f"model type {config.model_type}: the config of its text model is not found within config.json")


def get_field(config: Any, name: str) -> Any:
    """The value of a field with dots in its name."""
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def with_field(config: Any, name: str, value: Any) -> Any:
    """A copy of `config` (an object, or config.json as a dict) with another value of a field."""
    clone = copy.deepcopy(config)
    *parents, last = name.split(".")
    owner = get_field(clone, ".".join(parents)) if parents else clone
    held = owner.get(last) if isinstance(owner, dict) else getattr(owner, last)
    if isinstance(held, list):  # one for each layer, all alike
        value = [value] * len(held)
    if isinstance(owner, dict):
        owner[last] = value
    else:
        setattr(owner, last, value)
    return clone


def candidates(config: Any, model: nn.Module) -> Iterator[tuple[str, int | None]]:
    """Fields of the text model that may set a width: numbers of which a dimension of the model is a small multiple.

    Or None, which may stand for a multiple of the hidden size (GPT-2's n_inner).
    """
    sizes = {size for parameter in model.parameters() if parameter.ndim > 1 for size in parameter.shape}
    prefix = text_prefix(config)
    for name, value in _numbers(config.get_text_config(decoder=True).to_dict()):
        if value is None or any(value * multiple in sizes for multiple in MULTIPLES):
            yield prefix + name, value


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | None]]:
    for name, value in values.items():
        if (type(value) is int and value > 1) or (value is None and ("inner" in name or "ffn" in name)):
            yield prefix + name, value
        elif isinstance(value, list) and len(set(map(str, value))) == 1 and type(value[0]) is int and value[0] > 1:
            yield prefix + name, value[0]
        elif isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}.")


@dataclass(frozen=True)
class Trial:
    """What another value of a field changes: parameters, with the axis and its multiple of the value."""

    name: str
    value: int  # the model's own; of None, what it stands for
    changed: dict[str, tuple[int, Fraction]]
    narrow: Any  # the config with another value
    width: int  # that value


def try_field(config: Any, model: nn.Module, name: str, value: int | None, *, trust_remote_code: bool) -> Trial:
    """Give a field another value. Raises NotAnFfnError where what changes is not in proportion to it."""
    before = shapes_of(model)
    for probe in PROBE_WIDTHS:
        clone = with_field(config, name, probe)
        try:
            after = shapes_of(meta_model(clone, trust_remote_code=trust_remote_code)) if probe != value else {}
        except Exception:  # noqa: BLE001  (constructors raise anything for a value that they do not expect)
            continue
        if after:
            return Trial(name, *_changed(before, after, value, probe), clone, probe)
    raise NotAnFfnError("no model can be built with another value")


def ffns_of(trial: Trial, model: nn.Module) -> tuple[list[Ffn], Field]:
    """The FFNs whose width a field sets. Raises NotAnFfnError, with the reason, where it sets something else."""
    found = assemble(model, trial.changed, trial.value)
    return [ffn for ffn, _ in found], Field(trial.name, trial.value, {ffn.name: multiple for ffn, multiple in found})


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Shapes of all parameters by name; tied ones once."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _changed(
    before: dict[str, Shape], after: dict[str, Shape], value: int | None, probe: int
) -> tuple[int, dict[str, tuple[int, Fraction]]]:
    """The field's value, and what has another shape with the field at `probe`: the axis and its multiple of the field.

    Raises NotAnFfnError where something else than one axis in proportion has changed.
    """
    if before.keys() != after.keys():
        raise NotAnFfnError("other parameters are there with another value")
    changed: dict[str, tuple[int, Fraction]] = {}
    values = {Fraction(value)} if value is not None else set()
    for name, old in before.items():
        new = after[name]
        axes = [at for at in range(len(old)) if len(new) == len(old) and old[at] != new[at]]
        if old == new:
            continue
        if len(axes) != 1:
            raise NotAnFfnError(f"{name} {list(old)} does not change in proportion")
        changed[name] = (axes[0], Fraction(new[axes[0]], probe))
        values.add(old[axes[0]] / changed[name][1])
    if not changed:
        raise NotAnFfnError("nothing changes with it")
    if len(values) > 1 or next(iter(values)).denominator > 1:
        raise NotAnFfnError(f"widths do not change in proportion to it ({', '.join(map(str, sorted(values)))})")
    return int(values.pop()), changed


def bias_switch(config: Any, model: nn.Module, ffns: tuple[Ffn, ...], *, trust_remote_code: bool) -> str | None:
    """The config field that is off and would give all FFNs biases and nothing else (Llama's mlp_bias)."""
    missing = {name for ffn in ffns for name in ffn.missing_biases(ffn.width)}
    if not missing or any(ffn.expert is not None or ffn.value_bias for ffn in ffns):
        return None
    expected = shapes_of(model).keys() | missing
    prefix = text_prefix(config)
    for name, value in config.get_text_config(decoder=True).to_dict().items():
        if value is not False or "bias" not in name:
            continue
        try:
            biased = meta_model(with_field(config, prefix + name, True), trust_remote_code=trust_remote_code)
        except KvpruneError:
            continue  # not a switch of this model
        if shapes_of(biased).keys() == expected:
            return f"{prefix}{name}"
    return None


def merged(fields: list[tuple[list[Ffn], Field]]) -> tuple[list[Ffn], list[Field]]:
    """Each FFN once, under the field in the finest steps: n_shared_experts sets a width too, and only roughly."""
    steps = {field.name: max(field.multiples.values()) for _, field in fields}
    ffns: dict[str, Ffn] = {}
    kept: list[Field] = []
    for found, field in sorted(fields, key=lambda item: steps[item[1].name]):
        if new := {ffn.name: ffn for ffn in found if ffn.name not in ffns}:
            if len(new) < len(found):  # one value cannot be chosen for some of its FFNs alone
                continue
            ffns |= new
            kept.append(replace(field, multiples={name: field.multiples[name] for name in new}))
    return list(ffns.values()), kept
