"""What makes a slot respond: the tokens of a text on which its coefficient is largest, and what they have in common."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvprune.ffn.experts import Seen
from kvprune.ffn.layout import Layout
from kvprune.progress import progress
from kvprune.reading.passes import count_passes, each_pass
from kvprune.reading.values import Values
from kvprune.sources.origins import Origins

TOP = 10  # triggers of a slot
AROUND = 24  # tokens shown on each side of a trigger
# What contexts may have in common: tokens from so many before the trigger to so many before it.
PATTERNS = {"token": (0, 0), "bigram": (1, 0), "trigram": (2, 0), "previous token": (1, 1)}
MANY = 4  # times the tops of all slots: more candidates than this in one batch are thinned before they are sorted


@dataclass
class Top:
    """The `k` tokens on which each slot of an FFN has its largest coefficients, largest first; earlier ones at a tie.

    A slot that is silent on a token is not triggered by it: where fewer than k are left, values are 0 and places -1.
    """

    value: Tensor  # float32 [slots, k], the coefficients, signed
    place: Tensor  # int64 [slots, k], among the flattened tokens [sequences x length]
    value_norm: Tensor  # float32 [slots], |v|, with the weight of a norm that follows the FFN folded in


def empty_top(value_norm: Tensor, k: int = TOP) -> Top:
    """No token seen yet, for an FFN whose slots' values have these norms `[slots]`."""
    shape, device = (len(value_norm), k), value_norm.device
    return Top(torch.zeros(shape, device=device), torch.full(shape, -1, device=device), value_norm)


def add_seen(top: Top, h: Tensor, places: Tensor, eligible: Tensor) -> None:
    """Add coefficients `[tokens, slots]` of the tokens at `places` `[tokens]`, later than all before, in place.

    Of the tokens that are `eligible` `[tokens]` only. Few pass the least of a slot's top; those are sorted with it.
    """
    loudness = h.abs()
    loudness[~eligible] = 0
    slots, k = top.value.shape
    passed = loudness > top.value[:, -1].abs().to(h.dtype)  # which is exact, of coefficients of this type
    if int(passed.count_nonzero()) > MANY * slots * k:  # so it is at the start: the batch's own tops are enough
        passed &= loudness >= loudness.topk(min(k, len(h)), dim=0).values[-1]
    row, slot = passed.nonzero(as_tuple=True)
    if not len(row):
        return
    slot = torch.cat((torch.arange(slots, device=h.device).repeat_interleave(k), slot))
    value = torch.cat((top.value.flatten(), h[row, slot[slots * k :]].float()))
    place = torch.cat((top.place.flatten(), places[row]))
    order = value.abs().argsort(descending=True, stable=True)  # earlier ones first at a tie, as they come
    order = order[slot[order].argsort(stable=True)]
    ends = torch.bincount(slot, minlength=slots).cumsum(0)
    first = order[(ends - ends.diff(prepend=ends.new_zeros(1)))[:, None] + torch.arange(k, device=h.device)]
    top.value, top.place = value[first], place[first]


@torch.inference_mode()
def collect_tops(
    source: Any, layout: Layout, tokens: Tensor, *, skip_first: int, batch_size: int = 8, k: int = TOP
) -> dict[str, Top]:
    """The tops of all slots over `tokens` `[sequences, length]`, by names of FFNs, in one run of the model.

    `source` is a loaded model or a Walker. The first `skip_first` tokens of a sequence are no triggers. An expert that
    no token reached has no top. In memory are the hidden states of all sequences, and of the slots their tops.
    """
    batches, length = torch.split(tokens, batch_size), tokens.shape[1]
    tops: dict[str, Top] = {}

    def see(batch: int, seen: Seen, values: Values) -> None:
        within = torch.arange(len(seen.h), device=seen.h.device) if seen.tokens is None else seen.tokens
        if values.ffn.name not in tops:
            tops[values.ffn.name] = empty_top(values.length, k)
        add_seen(tops[values.ffn.name], seen.h, batch * batch_size * length + within, within % length >= skip_first)

    passes = each_pass(source, layout, batches, see)
    for _ in progress(passes, total=count_passes(source, layout, batches), label="triggers", unit="batches"):
        pass
    return {
        ffn.name: Top(top.value.cpu(), top.place.cpu(), top.value_norm.cpu())
        for ffn in layout.ffns
        if (top := tops.get(ffn.name)) is not None
    }


@dataclass(frozen=True)
class Groups:
    """Tokens by a pattern: those in one group have the same tokens at the same distances before them."""

    number: list[int]  # of each token [sequences x length]; -1 where there are none before it, or it is not counted
    times: list[int]  # counted tokens in each group


@dataclass(frozen=True)
class Text:
    """The text that triggers are places in, made ready to be quoted from, and its patterns counted."""

    tokens: Tensor  # int64 [sequences, length]
    origins: Origins
    tokenizer: Any
    around: int  # tokens shown on each side of a trigger
    counted: int
    groups: dict[str, Groups]  # by the names of PATTERNS
    quotes: dict[tuple[int, int, int], tuple[str, str, str]] = field(default_factory=dict)  # slots share many

    def at(self, place: int) -> tuple[int, int]:
        """Sequence and position."""
        return divmod(place, self.tokens.shape[1])

    def quote(self, place: int, back: int = 0, until: int = 0) -> tuple[str, str, str]:
        """What is before the token at `place`, the token, and what is after it; or of tokens that far before it."""
        key = (place, back, until)
        if key not in self.quotes:
            sequence, position = self.at(place)
            start = max(0, position - max(self.around, back))
            ids = self.tokens[sequence, start : position + self.around + 1].tolist()
            first, end = position - back - start, position - until + 1 - start
            self.quotes[key] = split_text(ids, first, end, self.tokenizer)
        return self.quotes[key]


def make_text(tokens: Tensor, origins: Origins, tokenizer: Any, *, skip_first: int, around: int = AROUND) -> Text:
    """Count the patterns of `tokens` `[sequences, length]`, the first `skip_first` of each sequence left out."""
    groups = {kind: _grouped(tokens, *reach, skip_first) for kind, reach in PATTERNS.items()}
    return Text(tokens, origins, tokenizer, around, tokens[:, skip_first:].numel(), groups)


def _grouped(tokens: Tensor, back: int, until: int, skip_first: int) -> Groups:
    first = max(back, skip_first)
    number = torch.full(tokens.shape, -1)
    if first >= tokens.shape[1]:
        return Groups(number.flatten().tolist(), [])
    windows = tokens.unfold(1, back + 1, 1)[:, first - back :, : back + 1 - until]  # [sequences, places, tokens]
    digits = (int(tokens.max()) + 1) ** torch.arange(windows.shape[2])
    number[:, first:], times = torch.unique((windows * digits).sum(2), return_inverse=True, return_counts=True)[1:]
    return Groups(number.flatten().tolist(), times.tolist())


def contexts(top: Top, slot: int, text: Text) -> list[dict[str, Any]]:
    """The triggers of a slot, the loudest first: how it responds, to which token, where, and what is around it.

    `offset` is in characters, and None where the tokenizer does not tell.
    """
    norm, found = float(top.value_norm[slot]), []
    for value, place in zip(top.value[slot].tolist(), top.place[slot].tolist(), strict=True):
        if place < 0:
            break
        sequence, position = text.at(place)
        before, token, after = text.quote(place)
        offset = int(text.origins.offset[sequence, position])
        found.append(
            {
                "coefficient": value,
                "contribution": abs(value) * norm,
                "document": text.origins.names[int(text.origins.document[sequence, position])],
                "offset": None if offset < 0 else offset,
                "before": before,
                "token": token,
                "after": after,
                "sequence": sequence,
                "position": position,
            }
        )
    return found


def shared(top: Top, slot: int, text: Text) -> dict[str, Any] | None:
    """What most triggers of a slot have in common: of the patterns, the one that most end with; at a tie the rarest.

    `share` is that among the triggers, `chance` that among all counted tokens. None of a slot without triggers.
    """
    places = [place for place in top.place[slot].tolist() if place >= 0]
    best: tuple[int, int, str, int] | None = None
    for kind, groups in text.groups.items():
        numbers = [groups.number[place] for place in places]
        for number, count in Counter(number for number in numbers if number >= 0).items():
            found = (count, -groups.times[number], kind, places[numbers.index(number)])
            if best is None or found[:2] > best[:2]:  # the shortest where even these are alike
                best = found
    if best is None:
        return None
    count, times, kind, place = best
    share, chance = count / len(places), -times / text.counted
    return {"kind": kind, "text": text.quote(place, *PATTERNS[kind])[1], "share": share, "chance": chance}


def split_text(ids: list[int], start: int, end: int, tokenizer: Any) -> tuple[str, str, str]:
    """The text of `ids`, split before the tokens `start` to `end` and after them.

    Tokens are decoded together, since some say only with their neighbours where a space is. A character that is cut
    into several tokens is shown whole with each of them.
    """

    def decoded(last: int) -> str:
        return str(tokenizer.decode(ids[:last], clean_up_tokenization_spaces=False))

    whole = decoded(len(ids))
    left, right = (_alike(decoded(last), whole) for last in (start, end))
    if right < len(whole) and decoded(end) != whole[:right]:  # the last character goes on
        right += 1
    return whole[:left], whole[left:right], whole[right:]


def _alike(start: str, whole: str) -> int:
    """How many characters `start` and `whole` begin with alike."""
    while not whole.startswith(start):
        start = start[:-1]
    return len(start)
