"""Documents as tokens: joined by EOS and cut, end to end, into full sequences, each with BOS first where it is used."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from jinja2 import TemplateError

from kvprune.errors import KvpruneError
from kvprune.sources.models import one_line

PIECE = 2**20  # characters tokenised at once, so that a huge document is not tokenised whole
Document = str | list[dict[str, str]]  # a text, or the messages of a chat
T = TypeVar("T")  # a token: its id, or the id with more of it


def pack(texts: Iterable[Document], tokenizer: Any, length: int, most: int) -> list[list[int]]:
    """Token ids of `texts` joined by EOS, cut into at most `most` full sequences of `length`, BOS first where used.

    The rest that fills no sequence is dropped.
    """
    ids = ((encoding["input_ids"] for _, encoding in encoded(text, tokenizer)) for text in texts)
    stream = joined(ids, lambda last: closing(last, tokenizer))
    bos = added_bos(tokenizer)
    return cut(stream, length, most, lambda first: [] if [first] == bos else bos)  # a chat template may have put it


def cut(pieces: Iterable[list[T]], length: int, most: int, head: Callable[[T], list[T]]) -> list[list[T]]:
    """A stream of tokens in `pieces`, cut into at most `most` full sequences of `length`.

    `head` says what a sequence has before its first token of the stream. No more pieces are taken than it needs.
    """
    stream: list[T] = []
    packed: list[list[T]] = []
    for piece in pieces:
        stream += piece
        start = 0
        while len(packed) < most and start < len(stream):
            before = head(stream[start])
            end = start + length - len(before)
            if end > len(stream):
                break
            packed.append(before + stream[start:end])
            start = end
        stream = stream[start:]
        if len(packed) == most:
            break
    return packed


def joined(documents: Iterable[Iterable[list[T]]], closed: Callable[[list[T]], list[T]]) -> Iterator[list[T]]:
    """The pieces of all documents, with what `closed` makes of the last two tokens of one before the next."""
    between: list[T] = []
    for pieces in documents:
        last: list[T] = []
        for piece in pieces:
            yield between + piece
            between, last = [], piece[-2:]
        between = closed(last) if last else between


def closing(last: list[int], tokenizer: Any) -> list[int]:
    """What follows a document that ends with the ids `last`: [EOS], unless there is none, or a chat template put it."""
    eos = tokenizer.eos_token_id
    return [] if eos is None or eos in last else [eos]


def encoded(text: Document, tokenizer: Any, **asked: Any) -> Iterator[tuple[int, Any]]:
    """What the tokenizer makes of a document, in pieces: at which character a piece starts, and its encoding.

    Of a chat, what the tokenizer's chat template renders is one piece. `asked` goes to the tokenizer.
    """
    if not isinstance(text, str):
        more = {"tokenizer_kwargs": asked} if asked else {}  # which not every tokenizer knows
        try:
            yield 0, tokenizer.apply_chat_template(text, tokenize=True, return_dict=True, **more)
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            raise KvpruneError(f"calibrate.text: the tokenizer cannot render a chat: {one_line(error)}") from None
    elif text.strip():  # an empty row of a data set is no document
        start = 0
        for piece in _pieces(text):
            yield start, tokenizer(piece, add_special_tokens=False, verbose=False, **asked)
            start += len(piece)


def added_bos(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text by itself: [BOS], or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a", verbose=False)["input_ids"][:1] == [bos] else []


def _pieces(text: str) -> Iterator[str]:
    """A long text cut at line ends, where a cut moves a token boundary least."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = max(end, start + 1)
