"""Which modules of a model are FFNs that slots can be cut from. The only file that knows architectures.

It knows them as shapes, found in the module tree of a model on the meta device, never as a table of names:

* gated Linear: two keys H→F and a value F→H, `value(f(gate(x)) * up(x))` (Llama, Mistral, Qwen, Gemma, OLMo2)
* plain Conv1D: one key H→F and a value F→H stored as `[in, out]` (GPT-2)

A candidate counts only where a numerical probe shows that its slots are separable: changing the key of one slot
changes the coefficient of that slot and of no other, and the module's output is the value matrix's output.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from kvprune.errors import KvpruneError

PROBE_WIDTH = 8
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of an FFN: its module's path, the axis of the weight that slots lie on, and if it has a bias."""

    name: str
    slot_axis: int
    bias: bool


@dataclass(frozen=True)
class Ffn:
    """One FFN: `coefficient i = f(keys i)`, written to the residual stream by column i of `value`."""

    name: str
    keys: tuple[Matrix, ...]
    value: Matrix
    width: int
    hidden: int

    @property
    def params_per_slot(self) -> int:
        return (len(self.keys) + 1) * self.hidden + sum(key.bias for key in self.keys)

    def cuts(self) -> dict[str, int]:
        """Parameter names to the axis that slots lie on, for all that shrinks with the width."""
        weights = {f"{matrix.name}.weight": matrix.slot_axis for matrix in (*self.keys, self.value)}
        return weights | {f"{key.name}.bias": 0 for key in self.keys if key.bias}

    def missing_biases(self) -> dict[str, str]:
        """Names of the biases that its matrices could have and do not, each with the name of its weight."""
        bare = (matrix.name for matrix in (*self.keys, self.value) if not matrix.bias)
        return {f"{name}.bias": f"{name}.weight" for name in bare}


@dataclass(frozen=True)
class Layout:
    """All FFNs of a model, the config field that sets their width, and the model's parameter count (tied ones once)."""

    ffns: tuple[Ffn, ...]
    layers: tuple[str, ...]  # the decoder layers that they are in, one each
    width_field: str
    bias_field: str | None  # a switch that gives every matrix of every FFN a bias, and nothing else, where there is one
    total_params: int

    @property
    def width(self) -> int:
        return self.ffns[0].width


def find_layout(config: Any, *, trust_remote_code: bool = False) -> Layout:
    """Find the FFNs of the model that `config` describes, without its weights.

    Raises KvpruneError naming what was found where the model has anything else than one FFN of a known shape a layer.
    """
    if config.get_text_config() is not config:
        raise KvpruneError(
            f"model type {config.model_type}: a multimodal checkpoint with a nested text model; "
            "kvprune slims checkpoints of text models only"
        )
    model = meta_model(config, trust_remote_code=trust_remote_code)
    path, layers = _decoder_layers(model, config)
    ffns = tuple(_ffn_of_layer(f"{path}.{index}", layer) for index, layer in enumerate(layers))
    _refuse_leftovers(model, path, ffns)
    widths = {ffn.width for ffn in ffns}
    if len(widths) > 1:
        raise KvpruneError(f"model type {config.model_type}: its layers have FFN widths {sorted(widths)}; expected one")
    field, narrow = _width_field(model, config, ffns, trust_remote_code)
    for ffn in ffns:
        _probe_separable(narrow.get_submodule(ffn.name), ffn)
    names = tuple(f"{path}.{index}" for index in range(len(layers)))
    bias_field = _bias_field(model, config, ffns, trust_remote_code)
    return Layout(ffns, names, field, bias_field, sum(parameter.numel() for parameter in model.parameters()))


def meta_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of `config` on the meta device. Raises KvpruneError where there is none."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, ImportError) as error:
        text = " ".join(str(error).split())[:200]
        raise KvpruneError(
            f"model type {config.model_type}: not a causal language model that transformers builds: {text}"
        ) from None


def _decoder_layers(model: Any, config: Any) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers: the module list of `num_hidden_layers` items with the most parameters."""
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise KvpruneError(f"model type {config.model_type}: no list of {count} decoder layers found")
    return max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))


def _linears(module: nn.Module) -> dict[str, tuple[int, int, nn.Module]]:
    """Direct children that are linear maps: name to (inputs, outputs, module)."""
    found: dict[str, tuple[int, int, nn.Module]] = {}
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            found[name] = (child.in_features, child.out_features, child)
        elif isinstance(child, Conv1D):
            found[name] = (child.weight.shape[0], child.weight.shape[1], child)
    return found


def _match(path: str, module: nn.Module) -> Ffn | None:
    """The FFN that `module` is, or None: its parameters are those of keys H→F and one value F→H and nothing more."""
    linears = _linears(module)
    conv = [isinstance(child, Conv1D) for *_, child in linears.values()]
    if len(linears) != (2 if conv and all(conv) else 3) or (any(conv) and not all(conv)):
        return None
    if sum(1 for _ in module.parameters()) != sum(1 for *_, child in linears.values() for _ in child.parameters()):
        return None
    shapes = [shape[:2] for shape in linears.values()]
    hidden, width = max(shapes, key=shapes.count)  # two keys outnumber the value; of a plain pair the key comes first
    keys = [name for name, shape in linears.items() if shape[:2] == (hidden, width)]
    values = [name for name, shape in linears.items() if shape[:2] == (width, hidden)]
    if hidden == width or len(values) != 1 or len(keys) + 1 != len(linears):
        return None  # a square one cannot tell keys from value
    key_axis = 1 if conv[0] else 0

    def matrix(name: str, axis: int) -> Matrix:
        return Matrix(f"{path}.{name}", axis, linears[name][2].bias is not None)

    return Ffn(path, tuple(matrix(key, key_axis) for key in keys), matrix(values[0], 1 - key_axis), width, hidden)


def _ffn_of_layer(path: str, layer: nn.Module) -> Ffn:
    found = [
        ffn for name, module in layer.named_modules() if name and (ffn := _match(f"{path}.{name}", module)) is not None
    ]
    if len(found) == 1:
        return found[0]
    what = "no FFN" if not found else f"{len(found)} FFNs ({', '.join(ffn.name for ffn in found)})"
    parts = "; ".join(_describe(path, layer))
    raise KvpruneError(
        f"{path}: {what} of a supported shape (gated Linear, or plain Conv1D as in GPT-2), one a layer. Found: {parts}"
    )


def _describe(path: str, layer: nn.Module) -> Iterator[str]:
    """The layer's modules that hold matrices, with shapes: what the user can look up."""
    for name, module in layer.named_children():
        shapes = [f"{key} {list(value.shape)}" for key, value in module.named_parameters() if value.ndim > 1]
        if shapes:
            yield f"{name}: {type(module).__name__}({', '.join(shapes)})"


def _refuse_leftovers(model: nn.Module, path: str, ffns: tuple[Ffn, ...]) -> None:
    """Experts beside an FFN, and FFNs outside the decoder layers, would be left dense: refuse rather than do half."""
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and "Conv" not in type(module).__name__:
                raise KvpruneError(
                    f"{name}: {type(module).__name__} holds 3-D experts ({key} {list(parameter.shape)}); "
                    "mixtures of experts are not supported"
                )
    known = {ffn.name for ffn in ffns}
    for name, module in model.named_modules():
        if name not in known and not name.startswith(f"{path}.") and _match(name, module) is not None:
            raise KvpruneError(f"{name}: an FFN outside of the decoder layers {path}; not supported")


def _width_field(model: Any, config: Any, ffns: tuple[Ffn, ...], trust_remote_code: bool) -> tuple[str, Any]:
    """The config field that sets the width of every FFN and nothing else, found by trying; and a narrow meta model."""
    values = config.to_dict()
    width = ffns[0].width
    # A field may be None and mean "4 x hidden" (GPT-2's n_inner).
    candidates = [key for key, value in values.items() if value == width and type(value) is int]
    candidates += [key for key, value in values.items() if value is None and ("inner" in key or "ffn" in key)]
    before = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cuts = {name: axis for ffn in ffns for name, axis in ffn.cuts().items()}
    expected = {name: _narrowed(shape, cuts.get(name)) for name, shape in before.items()}
    for key in candidates:
        clone = copy.deepcopy(config)
        setattr(clone, key, PROBE_WIDTH)
        try:
            narrow = meta_model(clone, trust_remote_code=trust_remote_code)
        except KvpruneError:
            continue  # not a field that can take this value, so not the width
        if {name: tuple(parameter.shape) for name, parameter in narrow.named_parameters()} == expected:
            return key, narrow
    raise KvpruneError(
        f"model type {config.model_type}: FFN width {width} cannot be set by one field of config.json "
        f"(tried {', '.join(candidates) or 'none'}), so no slim checkpoint would load"
    )


def _bias_field(model: Any, config: Any, ffns: tuple[Ffn, ...], trust_remote_code: bool) -> str | None:
    """The config field that is off and would give all FFNs biases and nothing else (Llama's mlp_bias)."""
    expected = {name for name, _ in model.named_parameters()} | {name for ffn in ffns for name in ffn.missing_biases()}
    if all(ffn.value.bias for ffn in ffns):
        return None
    for key in [key for key, value in config.to_dict().items() if value is False and "bias" in key]:
        clone = copy.deepcopy(config)
        setattr(clone, key, True)
        try:
            biased = meta_model(clone, trust_remote_code=trust_remote_code)
        except KvpruneError:
            continue  # not a switch of this model
        if {name for name, _ in biased.named_parameters()} == expected:
            return str(key)
    return None


def _narrowed(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], PROBE_WIDTH, *shape[axis + 1 :])


@torch.no_grad()
def _probe_separable(module: nn.Module, ffn: Ffn) -> None:
    """Change one slot's key at a time in a narrow clone: only that slot's coefficient may change."""
    module = copy.deepcopy(module).to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / ffn.hidden**0.5)
    x = torch.randn(1, PROBE_TOKENS, ffn.hidden, generator=generator)
    value = module.get_submodule(ffn.value.name.removeprefix(f"{ffn.name}."))
    base, out, written = _coefficients(module, value, x, ffn)
    if not torch.equal(out, written):
        raise KvpruneError(f"{ffn.name}: {type(module).__name__} changes what its value matrix writes; not supported")
    for slot in range(PROBE_WIDTH):
        changed = copy.deepcopy(module)
        for key in ffn.keys:
            weight = changed.get_submodule(key.name.removeprefix(f"{ffn.name}.")).weight
            weight.select(key.slot_axis, slot).mul_(1.5)  # type: ignore[operator]
        value = changed.get_submodule(ffn.value.name.removeprefix(f"{ffn.name}."))
        moved = (_coefficients(changed, value, x, ffn)[0] - base).abs().amax(dim=(0, 1)) > 0
        if moved.nonzero().flatten().tolist() != [slot]:
            raise KvpruneError(
                f"{ffn.name}: {type(module).__name__} couples its slots: changing the key of slot {slot} changes the "
                f"coefficients of slots {moved.nonzero().flatten().tolist()}; removing slots would change the others"
            )


def _coefficients(module: nn.Module, value: nn.Module, x: Tensor, ffn: Ffn) -> tuple[Tensor, Tensor, Tensor]:
    """Run an FFN on x `[1, tokens, hidden]`: coefficients `[1, tokens, slots]`, its output, the value matrix's."""
    seen: list[Tensor] = []
    handle = value.register_forward_hook(lambda _, args, output: seen.extend((args[0], output)))
    try:
        out = module(x)
    except (TypeError, RuntimeError, ValueError) as error:
        raise KvpruneError(f"{ffn.name}: {type(module).__name__} cannot be called on its own: {error}") from None
    finally:
        handle.remove()
    if len(seen) != 2 or not isinstance(out, Tensor):
        raise KvpruneError(f"{ffn.name}: {type(module).__name__} does not call its value matrix once; not supported")
    return seen[0], out, seen[1]
