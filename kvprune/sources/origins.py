"""Where each calibration token comes from: which document, and at which of its characters.

The texts are read, cut and drawn once more, by the code that made the calibration tokens, with a place beside each id.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.schema import Calibrate, TextSource
from kvprune.sources.packing import Document, added_bos, closing, cut, encoded, joined
from kvprune.sources.texts import draw, named_documents

WINDOW = 8  # own tokens that are decoded at once to see what one of them adds: more than a character is ever cut into


@dataclass(frozen=True)
class Origins:
    """Of tokens `[sequences, length]`: the documents that they are cut from, and where in those they start.

    A document is a text, a chat as the chat template renders it, or one of the model's own samples as the tokenizer
    decodes it. EOS between two documents is at the end of the first, BOS of a sequence where its next token is.
    """

    names: tuple[str, ...]  # of all documents that were read
    document: Tensor  # int64 [sequences, length], an index of `names`
    offset: Tensor  # int64 [sequences, length], in characters, as the tokenizer tells; -1 where it does not


class Placed(NamedTuple):
    """A token and its place: characters `start` to `end` of a document."""

    token: int
    document: int
    start: int
    end: int


def origins(section: Calibrate, tokenizer: Any, tokens: Tensor, samples: Tensor | None = None) -> Origins:
    """The origins of `tokens` `[sequences, length]`, which `sequences` made of the same section and `samples`.

    Raises KvpruneError where the texts do not give these tokens any more.
    """
    names: list[str] = []
    own = [] if samples is None else [_own(row, tokenizer, names) for row in samples.tolist()]
    bos = added_bos(tokenizer)

    def head(first: Placed) -> list[Placed]:
        return [] if [first.token] == bos else [first._replace(token=token) for token in bos]

    def closed(last: list[Placed]) -> list[Placed]:
        end = last[-1]._replace(start=last[-1].end)
        return [end._replace(token=token) for token in closing([item.token for item in last], tokenizer)]

    def packed(source: TextSource, most: int) -> list[list[Placed]]:
        texts = (_placed(text, tokenizer, name, names) for name, text in named_documents(source, section.seed))
        return cut(joined(texts, closed), section.sequence_length, most, head)

    rows = draw(section, own, packed)
    ids, document, offset = (
        torch.tensor([[item[field] for item in row] for row in rows], dtype=torch.int64) for field in range(3)
    )
    if not torch.equal(ids, tokens):
        raise KvpruneError("calibrate.text: its files changed while they were read; run the same command again")
    return Origins(tuple(names), document, offset)


def _placed(text: Document, tokenizer: Any, name: str, names: list[str]) -> Iterator[list[Placed]]:
    """The tokens of the next document, in pieces."""
    names.append(name)
    number = len(names) - 1
    asked = {"return_offsets_mapping": True} if getattr(tokenizer, "is_fast", False) else {}
    for start, encoding in encoded(text, tokenizer, **asked):
        ids = encoding["input_ids"]
        if asked:
            spans = [(start + first, start + last) for first, last in encoding["offset_mapping"]]
        else:
            spans = [(-1, -1)] * len(ids)
        yield [Placed(token, number, *span) for token, span in zip(ids, spans, strict=True)]


def _own(row: list[int], tokenizer: Any, names: list[str]) -> list[Placed]:
    """The tokens of the next own sample, whose text is what they decode to."""
    names.append(f"self sample {len(names) + 1}")

    def characters(first: int, last: int) -> int:
        return len(tokenizer.decode(row[max(0, first) : last], clean_up_tokenization_spaces=False))

    added = [characters(at - WINDOW, at + 1) - characters(at - WINDOW, at) for at in range(len(row))]
    ends = list(accumulate(added, initial=0))
    number = len(names) - 1
    return [Placed(token, number, *span) for token, span in zip(row, pairwise(ends), strict=True)]
