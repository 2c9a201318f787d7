"""What pruning made a model forget: the tokens that it predicts worse, and the removed slots that spoke there.

Losses are in nats, `[sequences, length - 1]`: column j is that of token j + 1, read off what the model has at token j.
So a removed slot is asked for its contribution at token j, where it would have helped to predict token j + 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import Plan
from kvprune.ffn.experts import Seen
from kvprune.ffn.layout import Layout
from kvprune.progress import progress
from kvprune.reading.passes import batches_with, each_pass, rows_at, scale_at
from kvprune.reading.triggers import AROUND, split_text
from kvprune.reading.values import Values

WORST = 50  # tokens that are told of
SLOTS = 5  # removed slots that are told of at each


def forgets(
    source: Any,
    layout: Layout,
    gone: Mapping[str, Sequence[int]],
    tokens: Tensor,
    dense: Tensor,
    slim: Tensor,
    tokenizer: Any,
    *,
    worst: int = WORST,
    slots: int = SLOTS,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Of `tokens` `[sequences, length]`: mean losses, and those tokens whose loss rose most from `dense` to `slim`.

    `source` is the dense model, loaded or a Walker, and `gone` its removed slots by FFN names. Plain data: of each
    token its text with what stands around it, sequence and position, both losses, their difference, and the removed
    `slots` that contributed most to its prediction, as `blame` tells them.
    """
    risen = most_risen(dense, slim, worst)
    blamed = blame(source, layout, gone, tokens, risen, slots, batch_size)
    return {
        "loss": {"dense": float(dense.double().mean()), "slim": float(slim.double().mean())},
        "tokens": [
            {
                **in_context(tokens[sequence], column + 1, tokenizer),
                "sequence": sequence,
                "position": column + 1,
                "dense": float(dense[sequence, column]),
                "slim": float(slim[sequence, column]),
                "rise": float(slim[sequence, column].double() - dense[sequence, column].double()),
                "slots": some,
            }
            for (sequence, column), some in zip(risen.tolist(), blamed, strict=True)
        ],
    }


def removed_slots(plan: Plan) -> dict[str, list[int]]:
    """The slots that a plan removes, by FFN names."""
    return {ffn.name: ffn.removed for ffn in plan.ffns}


@torch.inference_mode()
def token_losses(model: Any, tokens: Tensor) -> Tensor:
    """Loss in nats of every token but the first of each sequence of `tokens` `[sequences, length]`, float64.

    Sequence by sequence: logits of one are in memory, and no batch size matters.
    """
    each = progress(
        tokens.to(model.device), total=tokens.numel(), label="losses", unit="tokens", per_item=tokens.shape[1]
    )
    return torch.stack([_losses(model, sequence) for sequence in each]).cpu()


def _losses(model: Any, sequence: Tensor) -> Tensor:
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits.float(), sequence[1:], reduction="none").double()


def most_risen(dense: Tensor, slim: Tensor, count: int = WORST) -> Tensor:
    """Up to `count` indices, int64 `[count, 2]`, of the losses that rose, the greatest rise first, ties in order."""
    rise = (slim.double() - dense.double()).flatten()
    order = rise.argsort(descending=True, stable=True)[:count]
    order = order[rise[order] > 0]
    return torch.stack([order // dense.shape[1], order % dense.shape[1]], dim=1)


@torch.inference_mode()
def blame(
    source: Any,
    layout: Layout,
    gone: Mapping[str, Sequence[int]],
    tokens: Tensor,
    at: Tensor,
    count: int = SLOTS,
    batch_size: int = 8,
) -> list[list[dict[str, Any]]]:
    """Of each place in `at`, int64 `[places, 2]` of sequence and token: the removed slots that contributed most there.

    They are those of all FFNs whose |a| · ‖v‖ is largest, times the router's weight for an expert, loudest first;
    silent ones are left out. One pass over the sequences at hand.
    """
    flat, order = (at[:, 0] * tokens.shape[1] + at[:, 1]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    batches, local = batches_with(tokens, flat, batch_size)
    starts = torch.tensor([0, *map(len, local)]).cumsum(0).tolist()
    found: list[list[tuple[float, float, str, int]]] = [[] for _ in flat]

    def see(batch: int, seen: Seen, values: Values) -> None:
        slots = torch.tensor(gone.get(values.ffn.name, ()), dtype=torch.int64, device=seen.h.device)
        mine, rows = rows_at(seen, local[batch].to(seen.h.device))
        if not len(slots) or not len(rows):
            return
        a = seen.h[rows][:, slots].float()
        c = a.abs() * values.length[slots] * scale_at(seen, rows, values)[:, None]
        loudest, which = c.topk(min(count, len(slots)), dim=1)
        some = zip(loudest.tolist(), a.gather(1, which).tolist(), slots[which].tolist(), strict=True)
        for place, (contributions, coefficients, ids) in zip(mine.tolist(), some, strict=True):
            own = found[starts[batch] + place]
            own += zip(contributions, coefficients, [values.ffn.name] * len(ids), ids, strict=True)
            own.sort(key=lambda item: -item[0])
            del own[count:]

    for _ in each_pass(source, layout, batches, see) if len(flat) else ():
        pass
    told = [
        [
            {"ffn": ffn, "slot": slot, "coefficient": coefficient, "contribution": contribution}
            for contribution, coefficient, ffn, slot in some
            if contribution
        ]
        for some in found
    ]
    return [told[place] for place in order.tolist()]


def in_context(sequence: Tensor, position: int, tokenizer: Any) -> dict[str, str]:
    """The token at `position` of a sequence `[length]`, and the text on both sides of it."""
    start = max(0, position - AROUND)
    ids = sequence[start : position + 1 + AROUND].tolist()
    before, token, after = split_text(ids, position - start, position - start + 1, tokenizer)
    return {"before": before, "token": token, "after": after}
