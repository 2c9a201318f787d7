"""Walk a model decoder layer by decoder layer, with the weights of one layer in memory at a time.

The model's own code runs: it is built without weights, and a dry forward in which every decoder layer hands its input
on records what each layer is called with (masks, positions). Then each layer is filled from the checkpoint's memory
map, run on the hidden states of all sequences, and emptied again. The head never runs.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import build_glob_alternation

from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import Checkpoint
from kvprune.ffn.fields import quiet, trunk
from kvprune.ffn.layout import Ffn
from kvprune.ffn.state import Hidden, Shelf, make_hidden
from kvprune.ffn.stored import Pieces, read_parameter
from kvprune.ranks import ALONE, Ranks

Read = Callable[[str, torch.dtype], Tensor]  # a parameter by its name in the model, in that type if it is a float


class CannotWalkError(KvpruneError):
    """This model cannot be run layer by layer; the message is the reason."""


@dataclass(frozen=True)
class Call:
    """What one layer is called with beside the hidden states, which are its first argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Hidden states `[sequences, tokens, hidden]` after `layer`."""
        out = layer(hidden, *self.args, **self.kwargs)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


@dataclass(frozen=True)
class Walker:
    """A model whose decoder `layers` are empty, where its weights are read from, and what each layer is called with."""

    model: Any
    layers: tuple[str, ...]
    read: Read
    dtype_of: Callable[[str], torch.dtype]  # what a parameter is run in
    device: str

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, filled or not."""
        module: nn.Module = self.model.get_submodule(self.layers[index])
        return module

    @contextmanager
    def filled(self, index: int) -> Iterator[nn.Module]:
        """Decoder layer `index` with its weights, which it has for this long only."""
        layer = self.layer(index)
        before = [(module, {**module._parameters}, {**module._buffers}) for module in layer.modules()]
        names = {name: f"{self.layers[index]}.{name}" for name in layer.state_dict()}
        weights = {name: self.read(full, self.dtype_of(full)) for name, full in names.items()}
        try:
            layer.load_state_dict(weights, assign=True)
            yield layer
        finally:
            for module, parameters, buffers in before:
                module._parameters = parameters
                module._buffers = buffers

    @torch.inference_mode()
    def record(self, tokens: Tensor) -> tuple[Tensor, list[Call]]:
        """Embed `tokens` `[sequences, tokens]`: the first layer's input, and the call of every layer at this shape."""
        calls: list[Call] = []
        embedded: list[Tensor] = []
        layers = [self.layer(index) for index in range(len(self.layers))]

        beside = object()  # what a layer returns beside hidden states; no later one may want to have it

        def recorder(last: bool, extras: int | None) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                embedded.append(hidden)
                calls.append(Call(args, kwargs))
                if last:
                    raise _Recorded
                return hidden if extras is None else (hidden, *[beside] * extras)

            return forward

        reason, between = "", "something happens between its layers"
        for extras in (None, 0, 1, 2):  # a model takes a layer's output as it is, or the first of a tuple
            calls.clear()
            embedded.clear()
            for layer in layers:
                layer.forward = recorder(layer is layers[-1], extras)
            try:
                trunk(self.model)[1](input_ids=tokens.to(self.device), use_cache=False)
            except _Recorded:
                carried = any(item is beside for call in calls for item in (*call.args, *call.kwargs.values()))
                if len(calls) == len(layers) and embedded[-1] is embedded[0] and not carried:
                    return embedded[0], calls
                reason = between
            except (TypeError, RuntimeError, AttributeError, LookupError, ValueError, AssertionError) as error:
                reason = reason or f"its layers cannot be called one by one: {' '.join(str(error).split())[:200]}"
            finally:
                for layer in layers:
                    del layer.forward
        raise CannotWalkError(reason or between)


class _Recorded(Exception):  # noqa: N818  (no error: the last layer is reached)
    pass


def reader(checkpoint: Checkpoint, pieces: Pieces, device: str) -> Read:
    """Read a parameter by its name in the model: a view of the mapped file where it has that dtype and device."""
    return lambda name, dtype: read_parameter(checkpoint, pieces[name], device, dtype)


def running_types(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """What each parameter is run in where the model is run in `dtype`: transformers keeps some in float32."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda _: dtype
    kept = build_glob_alternation(list(plan))[0]
    return lambda name: torch.float32 if kept.search(name) else dtype


def empty_model(config: Any, thin: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
    """The model of `config` without weights, with the buffers of that of `thin`, a config with narrower FFNs.

    Buffers are real only where the weights beside them are real for a moment, too, and experts would not fit in memory.
    """

    def build(from_config: Any) -> Any:
        return AutoModelForCausalLM.from_config(
            copy.deepcopy(from_config),
            dtype=dtype,
            experts_implementation="eager",  # others want widths to be a multiple of something
            trust_remote_code=trust_remote_code,
        )

    with torch.device("meta"), quiet():
        model = build(config)
    with init_empty_weights(include_buffers=False), quiet():
        source = dict(build(thin).named_buffers())
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            found = source[f"{path}.{name}" if path else name]
            module._buffers[name] = found if found.shape == buffer.shape else torch.zeros(buffer.shape)
    return model.eval()


def open_walker(
    config: Any,
    thin: Any,
    layers: tuple[str, ...],
    read: Read,
    known: set[str],
    setup: "Setup",
    *,
    trust_remote_code: bool,
) -> Walker:
    """Build the model of `config` with its own buffers and embeddings, and nothing in its `layers`; `empty_model`.

    `known` are the parameters that `read` can give. Raises CannotWalkError, with the reason, where that cannot be.
    """
    model = empty_model(config, thin, setup.dtype, trust_remote_code=trust_remote_code)
    dtype_of = running_types(model, setup.dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(setup.device)
    within = tuple(f"{layer}." for layer in layers)
    path = trunk(model)[0]
    within_trunk = f"{path}." if path else ""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in model.state_dict():
        stored = [other for other in (name, *_tied_to(name, tied)) if other in known]
        if not stored or (name.startswith(within) and name not in known):  # of the head, too, which export needs
            raise CannotWalkError(f"its weight files do not hold {name} as one tensor")
        if name.startswith(within_trunk) and not name.startswith(within):
            owner, _, last = name.rpartition(".")
            _set(model.get_submodule(owner), last, read(stored[0], dtype_of(name)))
    return Walker(model, layers, read, dtype_of, setup.device)


def _tied_to(name: str, tied: dict[str, str]) -> list[str]:
    """Other names of a parameter: a file may hold the embeddings under the head's name."""
    return [one if other == name else other for one, other in tied.items() if name in (one, other)]


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def check_calls(walker: Walker, tokens: Tensor) -> None:
    """Raise CannotWalkError where a layer's arguments depend on which `tokens` `[1, tokens]` are read."""
    first = walker.record(tokens)[1]
    second = walker.record(tokens.flip(1))[1]
    for one, other in zip(first, second, strict=True):
        if not _same((one.args, one.kwargs), (other.args, other.kwargs)):
            raise CannotWalkError("what its layers are called with depends on the tokens")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one is other or one == other)


@dataclass(frozen=True)
class Setup:
    """Where and how the layers of a model are run; of all this only `dtype` is meant to matter for the result."""

    device: str
    dtype: torch.dtype
    batch_size: int
    ranks: Ranks = ALONE
    cache: Path | None = None  # for hidden states; None: the run folder
    in_memory: bool = True  # hidden states; after each layer they are kept on disk in any case
    grams: int = 1  # Gram matrices of FFNs of one layer that are summed at a time

    def share(self, items: Tensor) -> list[Tensor]:
        """This rank's batches of `items` `[sequences, …]`: whole ones, each computed as it would be alone."""
        batches = torch.split(items, self.batch_size) if len(items) else ()
        return list(batches[self.ranks.rank :: self.ranks.count])

    def agreed(self) -> "Setup":
        """The same on every rank: all take part in each sum."""
        return replace(self, grams=self.ranks.data_of_first(self.grams))

    def rounds(self, ffns: list[Ffn]) -> list[list[Ffn]]:
        """FFNs of one layer in groups whose Gram matrices are summed at a time."""
        return [ffns[at : at + self.grams] for at in range(0, len(ffns), self.grams)]

    @property
    def dtype_name(self) -> str:
        """The type as a recipe writes it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_kind(self) -> str:
        """cpu or cuda."""
        return self.device.partition(":")[0]

    def about(self) -> dict[str, Any]:
        """What an artifact says of it."""
        return {
            "device": self.device_kind,
            "dtype": self.dtype_name,
            "batch_size": self.batch_size,
            "processes": self.ranks.count,
        }

    def name(self, stream: str) -> str:
        """What this rank calls the hidden states of a run of the model."""
        return f"{stream}.{self.ranks.rank}"


@dataclass(frozen=True)
class Stream:
    """One run of a model over this rank's batches of tokens: its hidden states, and what its layers are called with."""

    walker: Walker
    hidden: Hidden
    calls: dict[int, list[Call]]  # by sequences in a batch
    spans: tuple[slice, ...]  # of each batch among the hidden states

    def before(self, batch: int) -> Tensor:
        """Hidden states `[sequences, tokens, hidden]` of a batch that the layer at hand reads."""
        return self.hidden.states[self.spans[batch]].to(self.walker.device)

    def run(self, index: int, states: Tensor, layer: nn.Module | None = None) -> Tensor:
        """What decoder layer `index`, which must be filled (or `layer` in its place), makes of a batch's `states`."""
        return self.calls[len(states)][index].run(layer or self.walker.layer(index), states)

    def keep(self, batch: int, states: Tensor) -> None:
        """Write the hidden states that the layer at hand made of a batch."""
        self.hidden.after[self.spans[batch]] = states.to(self.hidden.after.device)


def open_stream(
    walker: Walker, name: str, batches: list[Tensor], setup: Setup, shelf: Shelf, probe: Tensor, done: int
) -> Stream:
    """Start a run over `batches` of tokens, or go on after `done` layers from what is on the shelf.

    `probe` `[1, tokens]` is any sequence: batches of one can be run on every rank.
    """
    ends = list(accumulate(map(len, batches), initial=0))
    shape = (ends[-1], *walker.record(probe)[0].shape[1:])
    hidden = make_hidden(
        shelf.states, setup.name(name), shape, setup.dtype, in_memory=setup.in_memory, layer=done or None
    )
    samples = {len(batch): batch for batch in [*batches, probe]}
    calls = {size: walker.record(batch)[1] for size, batch in samples.items()}
    stream = Stream(walker, hidden, calls, tuple(map(slice, ends, ends[1:])))
    if not done:
        for at, batch in enumerate(batches):
            stream.keep(at, walker.record(batch)[0])
        hidden.commit(0)
    return stream
