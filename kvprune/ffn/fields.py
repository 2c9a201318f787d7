"""Fields of a model's config: building models without weights from it, and finding the fields that set FFN widths.

A field is tried out: a clone of the config with another value must build a model in which the parameters of FFNs have
another width, and nothing else has changed.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from kvprune.errors import KvpruneError
from kvprune.ffn.layout import EXCEPTIONS, Ffn, Field, Layout, NotAnFfnError, Shape, assemble

PROBE_WIDTHS = (8, 64)  # the second where the first is the width already, or a class refuses it
MULTIPLES = (Fraction(1, 2), *range(1, 17))  # how wide shared experts and fused keys are, relative to their field


def meta_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of `config` on the meta device. Raises KvpruneError where there is none."""
    try:
        with torch.device("meta"), quiet():
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, ImportError, AttributeError, RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        raise KvpruneError(
            f"model type {config.model_type}: not a causal language model that transformers builds: {text}"
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """What transformers remarks on a config is said when it is loaded, and not again for each model built from it."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def trunk(model: Any) -> tuple[str, Any]:
    """The model without its head, and its path within `model`. Where a class does not name it: its inner model."""
    if model.base_model is not model:
        return model.base_model_prefix, model.base_model
    inner = [(name, child) for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    return inner[0] if inner else ("", model)


def text_config(config: Any) -> Any:
    """The config of the language model: `config` itself, or of a multimodal one, its part."""
    text = config.get_text_config(decoder=True)
    return config if type(text) is type(config) else text  # of an encoder and decoder it is a changed copy


def text_prefix(config: Any) -> str:
    """Where the text model's own config is within `config`: "" or, of a multimodal one, as "text_config."."""
    text = text_config(config)
    if text is config:
        return ""
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is text:
            return f"{name}."
        if inner is not None and hasattr(inner, "sub_configs") and text_config(inner) is text:
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

    Or None, which may stand for a multiple of the hidden size, as in GPT-2.
    """
    sizes = {size for parameter in model.parameters() if parameter.ndim > 1 for size in parameter.shape}
    prefix = text_prefix(config)
    for name, value in _numbers(text_config(config).to_dict()):
        if name in EXCEPTIONS:
            continue
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
        try:
            clone = with_field(config, name, probe)
        except RuntimeError:  # of transformers, for a field that layers have for themselves
            raise NotAnFfnError("its value differs by layer already") from None
        try:
            after = shapes_of(meta_model(clone, trust_remote_code=trust_remote_code)) if probe != value else {}
        except Exception:  # noqa: BLE001  (constructors raise anything for a value that they do not expect)
            continue
        if after:
            return Trial(name, *_changed(before, after, value, probe), clone, probe)
    raise NotAnFfnError("no model can be built with another value")


def ffns_of(trial: Trial, model: nn.Module) -> tuple[list[Ffn], Field]:
    """The FFNs whose width a field sets. Raises NotAnFfnError, with the reason, where it sets something else."""
    try:
        found = assemble(model, trial.changed, trial.value)
    except NotAnFfnError as error:
        raise NotAnFfnError(str(error), trial.changed) from None
    return [ffn for ffn, _ in found], Field(trial.name, trial.value, {ffn.name: multiple for ffn, multiple in found})


def thin_config(config: Any, layout: Layout) -> Any:
    """A config of the same model with FFNs as narrow as can be."""
    for field in layout.fields:
        config = with_field(config, field.name, min(PROBE_WIDTHS[0], field.value))
    return config


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
    names = [name for name in before if before[name] != after[name]]
    changed: dict[str, tuple[int, Fraction]] = {}
    values = {Fraction(value)} if value is not None else set()
    for name in names:
        old, new = before[name], after[name]
        axes = [at for at in range(len(old)) if len(new) == len(old) and old[at] != new[at]]
        if len(axes) != 1:
            raise NotAnFfnError(f"{name} {list(old)} changes along more than one axis with it", names)
        changed[name] = (axes[0], Fraction(new[axes[0]], probe))
        values.add(old[axes[0]] / changed[name][1])
    if not changed:
        raise NotAnFfnError("nothing changes with it")
    if len(values) > 1 or next(iter(values)).denominator > 1:
        found = ", ".join(f"{name} {list(before[name])} -> {list(after[name])}" for name in names[:2])
        raise NotAnFfnError(f"widths do not change in proportion to it: at {probe}, {found}", names)
    return int(values.pop()), changed


def bias_switch(config: Any, model: nn.Module, ffns: tuple[Ffn, ...], *, trust_remote_code: bool) -> str | None:
    """The config field that is off and would give all FFNs biases and nothing else (Llama's mlp_bias)."""
    missing = {name for ffn in ffns for name in ffn.missing_biases(ffn.width)}
    if not missing or any(ffn.expert is not None or ffn.value_bias for ffn in ffns):
        return None
    expected = shapes_of(model).keys() | missing
    prefix = text_prefix(config)
    for name, value in text_config(config).to_dict().items():
        if value is not False or "bias" not in name:
            continue
        try:
            biased = meta_model(with_field(config, prefix + name, True), trust_remote_code=trust_remote_code)
        except KvpruneError:
            continue  # not a switch of this model
        if shapes_of(biased).keys() == expected:
            return f"{prefix}{name}"
    return None
