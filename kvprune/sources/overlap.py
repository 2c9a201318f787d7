"""Whether a text holds passages of another: what a model is judged on must not be what it was trained on."""

from collections.abc import Iterable, Iterator

PASSAGE = 13  # words in a row, as Brown et al. 2020 (arXiv:2005.14165, appendix C) look for them


def passages(texts: Iterable[str]) -> set[int]:
    """Marks of all passages of `texts`."""
    return {mark for text in texts for mark in _marks(text)}


def holds_any(text: str, known: set[int]) -> bool:
    """Whether any passage of `text` is among those of the marks `known`."""
    return any(mark in known for mark in _marks(text))


def _marks(text: str) -> Iterator[int]:
    words = text.lower().split()
    return (hash(tuple(words[at : at + PASSAGE])) for at in range(len(words) - PASSAGE + 1))
