"""Running the experts of a layer so that their coefficients can be seen.

transformers runs stacks of experts through functions that can be exchanged, all with the same arguments; this is one
more of them, expert by expert. A probe holds its result equal to the class's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.ffn.layout import Ffn, Param


@dataclass(frozen=True)
class Seen:
    """What one call of an FFN, or of one expert, shows: of the tokens that reach it, in their order."""

    h: Tensor  # [tokens, slots], coefficients
    y: Tensor  # [tokens, hidden], what it writes, before the router weighs it
    source: Tensor  # what `h` is a view of, or itself: gradients pass through it
    tokens: Tensor | None = None  # int64 [tokens], their places in the batch; None: all are there
    gates: Tensor | None = None  # [tokens], the router's weights


See = Callable[[Ffn, Seen], None]


def run_experts(module: nn.Module, ffns: Sequence[Ffn], see: See, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `module` makes of its arguments, the tokens of those of its experts that are `ffns` shown to `see`.

    Arguments are hidden states `[tokens, hidden]`, and the experts `[tokens, k]` of each token with their weights; or,
    where a class lets every expert run on all tokens, only their inputs, one expert after the other.
    """
    hidden, *routed = (*args, *kwargs.values())
    shown = {ffn.expert: ffn for ffn in ffns}
    count = len(getattr(module, ffns[0].value.name.rpartition(".")[2]))
    every = [shown.get(expert) or replace(ffns[0], expert=expert) for expert in range(count)]
    if not routed:
        return _run_on_all(module, every, lambda ffn, seen: see(ffn, seen) if ffn.expert in shown else None, hidden)
    index, weights = routed
    out = torch.zeros_like(hidden)
    for ffn in every:
        tokens, place = torch.where(index == ffn.expert)
        if not len(tokens):
            continue
        gates = weights[tokens, place]
        h, y = _run_one(module, ffn, hidden[tokens])
        if ffn.expert in shown:
            see(ffn, Seen(h, y, h, tokens, gates))
        out.index_add_(0, tokens, (y * gates[:, None]).to(out.dtype))
    return out


def _run_on_all(module: nn.Module, ffns: Sequence[Ffn], see: See, hidden: Tensor) -> Tensor:
    """Llama 4 gives each expert zeros for tokens that it is not chosen for, and has weighed the others."""
    inputs = hidden.view(len(ffns), -1, hidden.shape[-1])
    outputs = []
    for ffn, x in zip(ffns, inputs, strict=True):
        h, y = _run_one(module, ffn, x)
        tokens = x.any(dim=1).nonzero().flatten()
        if len(tokens):
            see(ffn, Seen(h[tokens], y[tokens], h, tokens))
        outputs.append(y)
    return torch.cat(outputs)


def _run_one(module: nn.Module, ffn: Ffn, x: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients `[tokens, slots]` and output `[tokens, hidden]` of one expert on `x` `[tokens, hidden]`."""
    bias = ffn.key_biases[0] if ffn.key_biases else None
    loudness = _linear(module, ffn.keys[0], ffn, x, own(module, bias, ffn) if bias else None)
    gate: Any = getattr(module, "_apply_gate", None)
    act: Any = getattr(module, "act_fn", None)
    if not ffn.gated:
        h = act(loudness)
    elif gate is not None:
        h = gate(loudness)
    else:
        one, other = loudness.chunk(2, dim=-1)
        h = act(one) * other
    value_bias = getattr(module, ffn.value_bias.rpartition(".")[2])[ffn.expert] if ffn.value_bias else None
    y = _linear(module, ffn.value, ffn, h, value_bias)
    if getattr(module, "has_post_expert_norm", False):
        norm: Any = module.post_expert_norm
        y = norm(y)
    return h, y


def own(module: nn.Module, param: Param, ffn: Ffn) -> Tensor:
    """An expert's part of one of its module's stacked parameters: a view."""
    stack: Tensor = getattr(module, param.name.rpartition(".")[2])
    return stack[ffn.expert] if ffn.expert is not None else stack


def own_in(root: nn.Module, param: Param, ffn: Ffn) -> Tensor:
    """The same, with the parameter's name taken from `root`."""
    return own(root.get_submodule(param.name.rpartition(".")[0]), param, ffn)


def _linear(module: nn.Module, param: Param, ffn: Ffn, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = own(module, param, ffn)
    # Keys have slots on their output, values on their input.
    out_first = (param.axis == 1) == (param is not ffn.value)
    return nn.functional.linear(x, weight if out_first else weight.T, bias)
