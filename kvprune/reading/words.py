"""All values of a model, read as tokens: how coherent they are beside random directions, and what some of them say."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvprune.ffn.layout import Layout
from kvprune.progress import advancing
from kvprune.reading.firing import grouped
from kvprune.reading.slots import Slot
from kvprune.reading.values import Unembedding, Values, coherence, each_values, in_words, null_coherence, read_values

READ_SLOTS = 4096  # of one FFN, or of all experts of a layer, whose coherence is read; evenly spaced where it has more


@torch.inference_mode()
def read_all(
    source: Any, layout: Layout, unembedding: Unembedding, tokenizer: Any, slots: Sequence[Slot] | None
) -> tuple[list[dict[str, Any]], dict[Slot, dict[str, Any]]]:
    """How coherent values are, a row for each FFN or stack of experts; and in words those of `slots`, None for all.

    `source` is a loaded model or a Walker. FFNs that write elsewhere than to the residual stream are left out.
    """
    groups = {name: [layout.ffns[at].name for at in members] for name, members in grouped(layout.as_data()).items()}
    group_of = {ffn: name for name, members in groups.items() for ffn in members}
    wanted: dict[str, set[int]] = {}
    for ffn_name, slot in slots or ():
        wanted.setdefault(ffn_name, set()).add(slot)
    found: dict[str, list[Tensor]] = {}
    nulls: dict[str, Tensor] = {}
    null_of: dict[str, str] = {}
    words: dict[Slot, dict[str, Any]] = {}
    with advancing(total=sum(ffn.width for ffn in layout.ffns), label="values", unit="slots") as advance:
        for values in each_values(source, layout):
            ffn = values.ffn
            advance(ffn.width)
            if ffn.hidden != unembedding.hidden:
                continue
            group = group_of[ffn.name]
            spaced = _spaced(ffn.width, max(1, READ_SLOTS // len(groups[group])))
            told = range(ffn.width) if slots is None else sorted(wanted.get(ffn.name, ()))
            alike, more = _read(values, unembedding, tokenizer, spaced, told)
            found.setdefault(group, []).append(alike)
            words |= more
            null_of[group] = group if values.gain is not None else ""  # those that no norm follows share one
            if null_of[group] not in nulls:
                nulls[null_of[group]] = null_coherence(unembedding, values.gain)
    return [coherence(name, torch.cat(some), nulls[null_of[name]]) for name, some in found.items()], words


def _spaced(width: int, count: int) -> list[int]:
    """Up to `count` of `width` slots, evenly spaced."""
    return [at * width // count for at in range(count)] if count < width else list(range(width))


def _read(
    values: Values, unembedding: Unembedding, tokenizer: Any, spaced: Sequence[int], told: Sequence[int]
) -> tuple[Tensor, dict[Slot, dict[str, Any]]]:
    """The coherence of the slots `spaced`, float32 `[slots]`, and what those `told` say in words."""
    slots = sorted({*spaced, *told})
    row = {slot: at for at, slot in enumerate(slots)}
    readings = read_values(values.directions()[slots], unembedding)
    words = in_words(readings.of([row[slot] for slot in told]), tokenizer)
    return readings.coherence[[row[slot] for slot in spaced]], {
        (values.ffn.name, slot): found for slot, found in zip(told, words, strict=True)
    }
