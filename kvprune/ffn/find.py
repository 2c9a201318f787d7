"""Finding a model's FFNs from its config, without its weights."""

from dataclasses import replace
from typing import Any

from torch import nn

from kvprune.errors import KvpruneError
from kvprune.ffn.fields import bias_switch, candidates, ffns_of, merged, meta_model, try_field
from kvprune.ffn.layout import Ffn, Field, Layout, NotAnFfnError, describe
from kvprune.ffn.probe import probe


def find_layout(config: Any, *, trust_remote_code: bool = False) -> Layout:
    """Find the FFNs of the model that `config` describes: whatever has a width that a field of the config sets.

    Raises KvpruneError, with what was found and why it is none, where there is no FFN whose slots can be removed.
    """
    model = meta_model(config, trust_remote_code=trust_remote_code)
    layers = _decoder_layers(model, config)
    found: list[tuple[list[Ffn], Field]] = []
    refused: list[tuple[int, str]] = []
    for name, value in candidates(config, model):
        try:
            trial = try_field(config, model, name, value, trust_remote_code=trust_remote_code)
        except NotAnFfnError:
            continue  # a number of heads, of layers, or the size of something else
        try:
            ffns, field = ffns_of(trial, model)
            ffns = [replace(ffn, layer=_layer_of(ffn, layers)) for ffn in ffns]
            ffns = probe(trial.narrow, layers, ffns, field, trial.width, trust_remote_code=trust_remote_code)
        except NotAnFfnError as error:
            if all(name.startswith(layers) for name in trial.changed):
                refused.append((sum(model.get_parameter(name).numel() for name in trial.changed), str(error)))
            continue
        found.append((ffns, field))
    ffns, fields = merged(found)
    if not ffns:
        raise KvpruneError(_refusal(model, config, layers, refused))
    order = {name: at for at, (name, _) in enumerate(model.named_parameters())}
    ffns.sort(key=lambda ffn: (layers.index(ffn.layer), order[ffn.value.name], ffn.expert or 0))
    switch = bias_switch(config, model, tuple(ffns), trust_remote_code=trust_remote_code)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Layout(tuple(ffns), layers, tuple(fields), switch, total)


def _refusal(model: nn.Module, config: Any, layers: tuple[str, ...], refused: list[tuple[int, str]]) -> str:
    """Why there is no FFN to be slimmed: what is wrong with the largest part that a field sets the width of."""
    has = f"{layers[0]} has: {describe(model.get_submodule(layers[0]))}"
    if refused:
        return f"model type {config.model_type}: {max(refused)[1]}. {has}"
    return (
        f"model type {config.model_type}: no field of config.json sets the width of an FFN and of nothing else, so no "
        f"slim checkpoint would load. {has}"
    )


def _decoder_layers(model: nn.Module, config: Any) -> tuple[str, ...]:
    """Paths of the decoder layers: the module list of `num_hidden_layers` items with the most parameters, or of any."""
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    every = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = {name: module for name, module in every.items() if len(module) == count} or every
    if not lists:
        raise KvpruneError(f"model type {config.model_type}: no list of decoder layers found")
    path = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return tuple(f"{path}.{index}" for index in range(len(lists[path])))


def _layer_of(ffn: Ffn, layers: tuple[str, ...]) -> str:
    for layer in layers:
        if f"{ffn.value.name}.".startswith(f"{layer}."):
            return layer
    raise NotAnFfnError(f"{ffn.name}: an FFN outside of the decoder layers")
