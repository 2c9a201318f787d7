"""All values of a model, read as tokens: how coherent they are beside random directions, and what some of them say."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprune.ffn.layout import Layout
from kvprune.progress import advancing
from kvprune.reading.firing import grouped
from kvprune.reading.slots import Slot, spaced
from kvprune.reading.values import (
    Readings,
    Unembedding,
    coherence,
    each_values,
    folded,
    in_words,
    null_coherence,
    read_values,
)


@dataclass(frozen=True)
class Words:
    """What values say: their readings as tensors, put in words one by one."""

    tokenizer: Any
    readings: dict[str, Readings] = field(default_factory=dict)  # by names of FFNs
    rows: dict[str, dict[int, int]] = field(default_factory=dict)  # where a slot is in those
    texts: dict[int, str] = field(default_factory=dict)  # of tokens that were asked for

    def of(self, slot: Slot) -> dict[str, Any]:
        """What the value of a slot promotes and suppresses, and its coherence; nothing of one that was not read."""
        name, index = slot
        row = self.rows.get(name, {}).get(index)
        return {} if row is None else in_words(self.readings[name], row, self.tokenizer, self.texts)


@torch.inference_mode()
def read_all(
    source: Any, layout: Layout, unembedding: Unembedding, tokenizer: Any, slots: Iterable[Slot] | None
) -> tuple[list[dict[str, Any]], Words]:
    """How coherent values are, a row for each FFN or stack of experts; and the words of `slots`, None for all.

    `source` is a loaded model or a Walker. FFNs that write elsewhere than to the residual stream are left out.
    """
    groups = {name: [layout.ffns[at].name for at in members] for name, members in grouped(layout.as_data()).items()}
    group_of = {ffn: name for name, members in groups.items() for ffn in members}
    wanted: dict[str, set[int]] = {}
    for ffn_name, slot in slots or ():
        wanted.setdefault(ffn_name, set()).add(slot)
    words = Words(tokenizer)
    found: dict[str, list[Tensor]] = {}
    nulls: dict[str, Tensor] = {}
    null_of: dict[str, str] = {}
    with advancing(total=sum(ffn.width for ffn in layout.ffns), label="values", unit="slots") as advance:
        for values in each_values(source, layout):
            ffn = values.ffn
            advance(ffn.width)
            if ffn.hidden != unembedding.hidden:
                continue
            group = group_of[ffn.name]
            some = spaced(ffn.width, len(groups[group]))
            told = range(ffn.width) if slots is None else sorted(wanted.get(ffn.name, ()))
            read = sorted({*some, *told})
            readings = read_values(folded(values.rows[read], values.gain), unembedding)
            row = {slot: at for at, slot in enumerate(read)}
            found.setdefault(group, []).append(readings.coherence[[row[slot] for slot in some]])
            if told:
                words.readings[ffn.name] = readings.of([row[slot] for slot in told])
                words.rows[ffn.name] = {slot: at for at, slot in enumerate(told)}
            null_of[group] = group if values.gain is not None else ""  # those that no norm follows share one
            if null_of[group] not in nulls:
                nulls[null_of[group]] = null_coherence(unembedding, values.gain)
    return [coherence(name, torch.cat(some), nulls[null_of[name]]) for name, some in found.items()], words
