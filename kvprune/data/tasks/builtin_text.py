"""The builtin evaluation text: `pydoc_data.topics`, paragraphs deduplicated, in documents of about 1,000 tokens."""

from pydoc_data.topics import topics
from typing import Any

from datasets import Dataset

DOCUMENT_CHARACTERS = 4_000
DOCUMENTS = 16  # with SmolLM2's tokenizer at most 16k tokens


def load(**_: Any) -> dict[str, Dataset]:
    """The data set as lm-eval wants it: split name to rows. The text differs between Python versions."""
    return {"test": Dataset.from_list([{"text": text} for text in documents()[:DOCUMENTS]])}


def held_out() -> list[dict[str, str]]:
    """The documents that the task leaves."""
    return [{"text": text} for text in documents()[DOCUMENTS:]]


def documents() -> list[str]:
    """Paragraphs of all topics, each once, joined up to DOCUMENT_CHARACTERS; a longer one is cut there."""
    seen: set[str] = set()
    made: list[str] = []
    current = ""
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = paragraph.strip("\n")
            if not text.strip() or text in seen:
                continue
            seen.add(text)
            if current and len(current) + len(text) + 2 > DOCUMENT_CHARACTERS:
                made.append(current)
                current = ""
            current = f"{current}\n\n{text}"[:DOCUMENT_CHARACTERS] if current else text[:DOCUMENT_CHARACTERS]
    return [*made, current] if current else made
