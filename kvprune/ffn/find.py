"""Finding a model's FFNs from its config, without its weights."""

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kvprune.errors import KvpruneError
from kvprune.ffn.fields import Trial, bias_switch, candidates, ffns_of, meta_model, try_field, with_field
from kvprune.ffn.layout import Ffn, Field, Layout, NotAnFfnError, describe
from kvprune.ffn.probe import probe


@dataclass(frozen=True)
class Refused:
    """A field that comes close to setting widths of FFNs, the parameters that change with it, and why it does not."""

    field: str
    names: frozenset[str]
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"

    def elements(self, model: nn.Module) -> int:
        """How large a part of the model it is about."""
        return sum(model.get_parameter(name).numel() for name in self.names)

    def of_experts(self, model: nn.Module) -> bool:
        """Whether it is about stacks of experts."""
        owners = {name.rpartition(".")[0] for name in self.names if model.get_parameter(name).ndim == 3}
        return any("expert" in type(model.get_submodule(owner)).__name__.lower() for owner in owners)


def find_layout(config: Any, *, trust_remote_code: bool = False) -> Layout:
    """Find the FFNs of the model that `config` describes: whatever has a width that a field of the config sets.

    Raises KvpruneError, with what was found and why it is none, where there is no FFN whose slots can be removed.
    """
    model = meta_model(config, trust_remote_code=trust_remote_code)
    layers = _decoder_layers(model, config)
    found: list[tuple[list[Ffn], Field]] = []
    refused: list[Refused] = []
    trials = _trials(config, model, layers, refused, trust_remote_code)
    experts = {trial.name: trial.width for trial, ffns, _ in trials if ffns[0].expert is not None}
    covered: set[str] = set()
    for trial, ffns, field in trials:
        if covered & trial.changed.keys():
            continue  # set in finer steps by another field: n_shared_experts sets a width too, and only roughly
        thin = trial.narrow
        for name, width in experts.items():  # others than those at hand may be too large to be built at all
            thin = with_field(thin, name, width)
        try:
            found.append((probe(trial, thin, layers, ffns, field, trust_remote_code=trust_remote_code), field))
            covered |= trial.changed.keys()
        except NotAnFfnError as error:
            refused.append(Refused(trial.name, frozenset(trial.changed), str(error)))
    ffns = [ffn for some, _ in found for ffn in some]
    if not ffns:
        raise KvpruneError(_refusal(model, config, layers, refused))
    left = tuple(str(item) for item in refused if item.of_experts(model) and not item.names & covered)
    order = {name: at for at, (name, _) in enumerate(model.named_parameters())}
    ffns.sort(key=lambda ffn: (layers.index(ffn.layer), order[ffn.value.name], ffn.expert or 0))
    switch = bias_switch(config, model, tuple(ffns), trust_remote_code=trust_remote_code)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Layout(tuple(ffns), layers, tuple(field for _, field in found), left, switch, total)


def _trials(
    config: Any, model: nn.Module, layers: tuple[str, ...], refused: list[Refused], trust_remote_code: bool
) -> list[tuple[Trial, list[Ffn], Field]]:
    """Fields that set what look like widths of FFNs, in finest steps first. Others that come close are `refused`."""
    found = []
    for name, value in candidates(config, model):
        try:
            trial = try_field(config, model, name, value, trust_remote_code=trust_remote_code)
            ffns, field = ffns_of(trial, model)
            found.append((trial, _in_layers(ffns, layers), field))
        except NotAnFfnError as error:
            if error.names and all(re.search(r"\.\d+\.", name) for name in error.names):  # within some list of layers
                refused.append(Refused(name, frozenset(error.names), str(error)))
    return sorted(found, key=lambda item: max(item[2].multiples.values()))


def _refusal(model: nn.Module, config: Any, layers: tuple[str, ...], refused: list[Refused]) -> str:
    """Why there is no FFN to be slimmed: what is wrong with the largest part that a field sets the width of."""
    has = f"{layers[0]} has: {describe(model.get_submodule(layers[0]))}"
    if refused:
        largest = max(refused, key=lambda item: (item.elements(model), item.field))
        return f"model type {config.model_type}: {largest}. {has}"
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


def _in_layers(ffns: list[Ffn], layers: tuple[str, ...]) -> list[Ffn]:
    """The FFNs with the decoder layers that they are in."""
    known = {f"{layer}." for layer in layers}
    length = len(layers[0].split("."))
    found = []
    for ffn in ffns:
        layer = ".".join(ffn.value.name.split(".")[:length])
        if f"{layer}." not in known:
            names = [param.name for other in ffns for param in other.cuts()]
            raise NotAnFfnError(f"{ffn.name}: an FFN outside of the decoder layers {layers[0]} …", names)
        found.append(replace(ffn, layer=layer))
    return found
