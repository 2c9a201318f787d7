"""What slots are called, and which of them are looked at.

A slot is LAYER:INDEX; one of an expert LAYER.EXPERT:INDEX. Where a layer has several FFNs, those that are no experts
have their name too: LAYER/NAME:INDEX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn.layout import Layout

Slot = tuple[str, int]  # the name of an FFN and an index
READ_SLOTS = 4096  # of all FFNs of a layer, where reading every one would take too long


@dataclass(frozen=True)
class Choice:
    """Slots that are told of one by one: those named, and the first `top` by a score."""

    slots: Sequence[str] = ()
    layer: int | None = None  # whose top slots; None: of every layer
    top: int = 0


@dataclass(frozen=True)
class Names:
    """How the FFNs of a layout are called, in ids of slots."""

    layout: Layout
    labels: Mapping[str, str]  # by names of FFNs
    experts: Mapping[str, int]  # their numbers

    def id_of(self, slot: Slot) -> str:
        name, index = slot
        return f"{self.labels[name]}:{index}"

    def find(self, text: str) -> Slot:
        """The slot of this id. Raises KvpruneError, with what there is, where there is none."""
        label, _, index = text.rpartition(":")
        widths = {self.labels[ffn.name]: (ffn.name, ffn.width) for ffn in self.layout.ffns}
        if label not in widths:
            some = list(widths)
            raise KvpruneError(
                f"--slot {text}: no such FFN; they are {some[0]}:INDEX to {some[-1]}:INDEX"
                + (f", as {some[len(some) // 2]}:0" if len(some) > 2 else "")
            )
        name, width = widths[label]
        if not index.isdecimal() or int(index) >= width:
            raise KvpruneError(f"--slot {text}: the index of a slot of {label} is 0 to {width - 1}, got {index!r}")
        return name, int(index)


def names_of(layout: Layout) -> Names:
    """A label for every FFN of a layout, each its own."""
    labels: dict[str, str] = {}
    for number in range(len(layout.layers)):
        ffns = [layout.ffns[at] for at in layout.in_layer(number)]
        stacks = {ffn.name.rpartition(".")[0] for ffn in ffns if ffn.expert is not None}
        alone = len(ffns) == 1
        for ffn in ffns:
            within = ffn.name.removeprefix(f"{layout.layers[number]}.")
            if ffn.expert is None:
                labels[ffn.name] = str(number) if alone else f"{number}/{within}"
            else:
                stack = "" if len(stacks) == 1 else f"/{within.rpartition('.')[0]}"
                labels[ffn.name] = f"{number}{stack}.{ffn.expert}"
    experts = {ffn.name: ffn.expert for ffn in layout.ffns if ffn.expert is not None}
    return Names(layout, labels, experts)


def chosen(choice: Choice, names: Names, scores: Mapping[str, Tensor]) -> list[Slot]:
    """The slots of a choice, each once: those named first, then the highest of `scores` `[slots]` in each layer.

    `scores` are by names of FFNs. Raises KvpruneError for a slot or a layer that is not there.
    """
    layout = names.layout
    if choice.layer is not None and not 0 <= choice.layer < len(layout.layers):
        raise KvpruneError(f"--layer {choice.layer}: the model has layers 0 to {len(layout.layers) - 1}")
    layers = range(len(layout.layers)) if choice.layer is None else [choice.layer]
    found = [names.find(text) for text in choice.slots]
    for layer in layers if choice.top else ():
        ffns = [layout.ffns[at] for at in layout.in_layer(layer)]
        found += highest({ffn.name: scores[ffn.name] for ffn in ffns}, choice.top)
    return list(dict.fromkeys(found))


def highest(scores: Mapping[str, Tensor], count: int) -> list[Slot]:
    """The `count` slots of these FFNs with the highest scores; at a tie the earlier one."""
    if not scores:
        return []
    owners = [(name, slot) for name, score in scores.items() for slot in range(len(score))]
    order = torch.cat(list(scores.values())).argsort(descending=True, stable=True)
    return [owners[at] for at in order[:count].tolist()]


def spaced(width: int, ffns: int) -> list[int]:
    """Those of an FFN's `width` slots that are read where all of READ_SLOTS are shared among `ffns`: evenly spaced."""
    count = max(1, READ_SLOTS // ffns)
    return [at * width // count for at in range(count)] if count < width else list(range(width))
