"""Where calibration tokens come from: documents of a text, joined by EOS and packed into full sequences.

A `.txt` file is one document; of a folder, every `.txt` file below it is one. A row of a `.jsonl` file or of a
`datasets` data set is one. Documents come in a seeded order and are cut, end to end, into sequences that each
start with BOS where the tokenizer adds one. Sequences are drawn, in a seeded order, from the first POOL times as many.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import digest
from kvprune.errors import KvpruneError
from kvprune.recipe import Calibrate, TextSource
from kvprune.sources.models import one_line

POOL = 8
SHUFFLE_ROWS = 10_000  # of a streamed data set: rows held at once to draw from
PIECE = 2**20  # characters tokenised at once, so that a huge document is not tokenised whole
BUILTIN_TEXT = Path(__file__).parents[1] / "data" / "self_samples.jsonl"


def sequences(section: Calibrate, tokenizer: Any) -> Tensor:
    """The calibration tokens, int64 `[sequences, sequence_length]`. Raises KvpruneError where the text has too few."""
    wanted = section.tokens // section.sequence_length
    packed = pack(documents(section.text, section.seed), tokenizer, section.sequence_length, wanted * POOL)
    if len(packed) < wanted:
        raise KvpruneError(
            f"calibrate.tokens: {section.text.source} holds {len(packed) * section.sequence_length:,} tokens in full "
            f"sequences of {section.sequence_length}, and {section.tokens:,} are asked for; lower calibrate.tokens"
        )
    random.Random(section.seed).shuffle(packed)
    return torch.tensor(packed[:wanted], dtype=torch.int64)


def token_digest(tokens: Tensor) -> str:
    """SHA-256 of token ids `[sequences, sequence_length]`: two texts are the same where this is the same."""
    return hashlib.sha256(f"{tuple(tokens.shape)}".encode() + tokens.numpy().tobytes()).hexdigest()


def text_fingerprint(source: TextSource) -> dict[str, Any]:
    """Size and time of a local text's files, or the builtin one's digest: tells that a text has changed.

    Empty for a data set of the Hub.
    """
    kind, path = _kind(source), Path(source.source)
    if kind in ("builtin", "datasets"):
        return {"builtin": digest(BUILTIN_TEXT)} if kind == "builtin" else {}
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    base = path if path.is_dir() else path.parent
    found = [file for file in files if file.is_file()]
    return {str(file.relative_to(base)): [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in found}


def pack(texts: Iterable[str], tokenizer: Any, length: int, most: int) -> list[list[int]]:
    """Token ids of `texts` joined by EOS, cut into at most `most` full sequences of `length`, BOS first where used.

    The rest that fills no sequence is dropped.
    """
    bos = _added_bos(tokenizer)
    body = length - len(bos)
    eos = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    stream: list[int] = []
    packed: list[list[int]] = []
    for text in texts:
        if not text.strip():
            continue  # an empty row of a data set is no document
        for piece in _pieces(text):
            stream += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            full = min(len(stream) // body, most - len(packed))
            packed += [bos + stream[start : start + body] for start in range(0, full * body, body)]
            stream = stream[full * body :]
            if len(packed) == most:
                return packed
        stream += eos
    return packed


def _added_bos(tokenizer: Any) -> list[int]:
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


def check_text(source: TextSource) -> None:
    """Refuse a text whose name, kind or keys cannot work, before anything is loaded."""
    path = Path(source.source)
    kind = _kind(source)
    if kind != "datasets" and (source.config is not None or source.split is not None):
        raise KvpruneError(
            f"calibrate.text: config and split are for a data set of the Hub, and {source.source} is not one"
        )
    if kind in ("builtin", "txt") and source.field is not None:
        raise KvpruneError(f"calibrate.text.field: {source.source} has no fields; remove it")
    there = os.path.isfile(path) if kind == "jsonl" else os.path.exists(path)  # noqa: PTH110, PTH113
    if kind in ("jsonl", "txt") and not there:
        raise KvpruneError(f"calibrate.text: {path}: no such file or folder")


def documents(source: TextSource, seed: int) -> Iterator[str]:
    """Yield the documents of a text in the order of `seed`. Raises KvpruneError where it cannot be read."""
    check_text(source)
    path, field = Path(source.source), source.field or "text"
    match _kind(source):
        case "builtin":
            yield from _shuffled(list(_jsonl(BUILTIN_TEXT, "text")), seed)
        case "jsonl":
            yield from _shuffled(list(_jsonl(path, field)), seed)
        case "txt":
            files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
            for file in _shuffled(files, seed):
                yield _read(file)
        case _:
            yield from _streamed(source, field, seed)


def _kind(source: TextSource) -> str:
    path = Path(source.source)
    if source.source == "builtin":
        return "builtin"
    if path.suffix in (".jsonl", ".txt"):
        return path.suffix[1:]
    if os.path.exists(path) or source.source.startswith((".", "/", "~")):  # noqa: PTH110
        if not path.is_dir():
            raise KvpruneError(
                f"calibrate.text: {path}: should be builtin, a .txt or .jsonl file, a folder of .txt files, "
                "or a datasets id"
            )
        return "txt"
    return "datasets"


def _shuffled(items: list[Any], seed: int) -> list[Any]:
    random.Random(seed).shuffle(items)
    return items


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KvpruneError(f"calibrate.text: {path}: cannot read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise KvpruneError(f"calibrate.text: {path}: not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise KvpruneError(f"calibrate.text: {path}: a binary file, not text")
    return text


def _jsonl(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise KvpruneError(f"calibrate.text: {path} row {number}: not valid JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            has = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
            raise KvpruneError(f"calibrate.text.field: {path} row {number}: no text in field {field!r}; it has: {has}")
        try:
            row[field].encode("utf-8")
        except UnicodeEncodeError:
            raise KvpruneError(f"calibrate.text: {path} row {number}: half of a surrogate pair, not text") from None
        yield row[field]


def _streamed(source: TextSource, field: str, seed: int) -> Iterator[str]:
    """Rows of a Hub data set, streamed: a corpus like C4 is never downloaded whole."""
    from datasets import load_dataset

    try:
        rows = load_dataset(source.source, source.config, split=source.split or "train", streaming=True)
        for number, row in enumerate(rows.shuffle(seed=seed, buffer_size=SHUFFLE_ROWS), 1):
            if not isinstance(row.get(field), str):
                raise KvpruneError(
                    f"calibrate.text.field: {source.source} row {number}: no text in field {field!r}; "
                    f"it has: {', '.join(row)}"
                )
            yield row[field]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise KvpruneError(f"calibrate.text: data set {source.source} does not load: {one_line(error)}") from None
