"""Where calibration tokens come from: local files, data sets of the Hub, what ships with the package.

A `.txt` file is one document; of a folder, every `.txt` file below it is one. A row of a `.jsonl` or `.parquet` file or
of a `datasets` data set is one: a text, or the messages of a chat, which the tokenizer's chat template renders.
Documents come in a seeded order. Sequences are drawn, in a seeded order, from the first POOL times as many.
"""

import hashlib
import importlib
import json
import os
import platform
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import filterfalse, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvprune.artifacts import digest
from kvprune.errors import KvpruneError
from kvprune.schema import Calibrate, TextSource
from kvprune.sources.models import one_line
from kvprune.sources.packing import Document, pack

if TYPE_CHECKING:
    from torch import Tensor

POOL = 8
SHUFFLE_ROWS = 10_000  # of a streamed data set: rows held at once to draw from
T = TypeVar("T")  # a token: its id, or the id with more of it
TASK_TEXT = "builtin-task"  # what the builtin task judges on: not for calibration, if the judgement is to mean much
HELD_TEXT = "builtin-held-out"  # more of the same, which no task judges on
BUILTINS = ("builtin", TASK_TEXT, HELD_TEXT, "self")
BUILTIN_TEXT = Path(__file__).parents[1] / "data" / "self_samples.jsonl"


def sequences(
    section: Calibrate,
    tokenizer: Any,
    samples: "Tensor | None" = None,
    known: Callable[[list[int]], bool] = lambda _: False,
) -> "Tensor":
    """The calibration tokens, int64 `[sequences, sequence_length]`, of all sources by their weights.

    `samples` are the model's own, where a source is `self`; of a text, sequences that are `known` are taken only where
    the others do not suffice. Raises KvpruneError where a text has too few tokens.
    """
    import torch

    length, seed = section.sequence_length, section.seed

    def packed(source: TextSource, most: int) -> list[list[int]]:
        return pack(documents(source, seed), tokenizer, length, most)

    rows = draw(section, [] if samples is None else samples.tolist(), packed, known)
    return torch.tensor(rows, dtype=torch.int64)


def draw(
    section: Calibrate,
    own: list[list[T]],
    packed: Callable[[TextSource, int], list[list[T]]],
    known: Callable[[list[T]], bool] = lambda _: False,
) -> list[list[T]]:
    """Sequences of all sources by their weights, in the order of the section's seed.

    `own` are the model's samples, as many as `self_share` says; `packed(source, most)` gives the first of a text, of
    which those that are `known` come last.
    """
    length = section.sequence_length
    rows: list[list[T]] = []
    for source, wanted in shares(section):
        if source.source == "self":
            rows += own[:wanted]
            own = own[wanted:]
            continue
        found = packed(source, wanted * POOL)
        _check_enough(source, len(found), wanted, length)
        random.Random(section.seed).shuffle(found)
        rows += _unknown_first(found, wanted, known)
    if len(section.text) > 1:
        random.Random(section.seed).shuffle(rows)
    return rows


def _unknown_first(rows: list[T], wanted: int, known: Callable[[T], bool]) -> list[T]:
    """The first `wanted` of the rows that are not `known`, and of the others where those are too few."""
    new = list(islice(filterfalse(known, rows), wanted))
    return new + list(islice(filter(known, rows), wanted - len(new)))


def check_lengths(section: Calibrate, tokenizer: Any) -> None:
    """Raise KvpruneError where a local text has too few tokens, before anything else is done.

    Data sets of the Hub are not asked, and the model samples as many as are wanted.
    """
    length = section.sequence_length
    for source, wanted in shares(section):
        if _kind(source) not in ("self", "datasets"):
            found = pack(documents(source, section.seed), tokenizer, length, wanted)
            _check_enough(source, len(found), wanted, length)


def _check_enough(source: TextSource, found: int, wanted: int, length: int) -> None:
    if found < wanted:
        raise KvpruneError(
            f"calibrate.tokens: {source.source} holds {found * length:,} tokens in full sequences of {length}, and "
            f"{wanted * length:,} of it are asked for; lower calibrate.tokens, or name a longer calibrate.text"
        )


def shares(section: Calibrate) -> list[tuple[TextSource, int]]:
    """How many sequences each source gives: its weight's share, the largest remainders rounded up."""
    total = section.tokens // section.sequence_length
    weight = sum(source.weight for source in section.text)
    exact = [total * source.weight / weight for source in section.text]
    counts = [int(share) for share in exact]
    for at in sorted(range(len(exact)), key=lambda at: counts[at] - exact[at])[: total - sum(counts)]:
        counts[at] += 1
    return list(zip(section.text, counts, strict=True))


def self_share(section: Calibrate) -> int:
    """How many sequences are the model's own samples."""
    return sum(count for source, count in shares(section) if source.source == "self")


def token_digest(tokens: "Tensor") -> str:
    """SHA-256 of token ids `[sequences, sequence_length]`: two texts are the same where this is the same."""
    return hashlib.sha256(f"{tuple(tokens.shape)}".encode() + tokens.numpy().tobytes()).hexdigest()


def text_fingerprint(sources: list[TextSource]) -> dict[str, Any]:
    """Size and time of local texts' files, the builtin one's digest: tells that a text has changed.

    Nothing of a data set of the Hub, nor of the model's own samples.
    """
    return {source.source: _fingerprint(source) for source in sources}


def hub_texts(marks: dict[str, Any]) -> list[str]:
    """The data sets of the Hub among the texts of a `text_fingerprint`: nothing is known of those."""
    return [name for name, mark in marks.items() if mark is None and name != "self"]


def _fingerprint(source: TextSource) -> Any:
    kind, path = _kind(source), Path(source.source)
    if kind in (*BUILTINS, "datasets"):
        python = platform.python_version()
        return {"builtin": digest(BUILTIN_TEXT), TASK_TEXT: python, HELD_TEXT: python}.get(kind)
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    base = path if path.is_dir() else path.parent
    found = [file for file in files if file.is_file()]
    return {str(file.relative_to(base)): [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in found}


def check_text(source: TextSource, key: str = "calibrate.text") -> None:
    """Refuse a text, of this `key` of a recipe, whose name, kind or keys cannot work, before anything is loaded."""
    with of_key(key):
        _check_text(source)


@contextmanager
def of_key(key: str) -> Iterator[None]:
    """Have errors of a text name the recipe's `key` that it is of, and not calibrate.text."""
    try:
        yield
    except KvpruneError as error:
        text = re.sub(r"(^|longer )calibrate\.text", lambda found: found[1] + key, str(error))
        section = key.partition(".")[0]
        text = re.sub(r"(^|lower )calibrate\.", lambda found: f"{found[1]}{section}.", text)
        raise KvpruneError(text) from None


def _check_text(source: TextSource) -> None:
    path = Path(source.source)
    kind = _kind(source)
    if kind != "datasets" and (source.config is not None or source.split is not None):
        raise KvpruneError(
            f"calibrate.text: config and split are for a data set of the Hub, and {source.source} is not one"
        )
    if kind in (*BUILTINS, "txt") and source.field is not None:
        raise KvpruneError(f"calibrate.text.field: {source.source} has no fields; remove it")
    there = os.path.exists(path) if kind == "txt" else os.path.isfile(path)  # noqa: PTH110, PTH113
    if kind in ("jsonl", "parquet", "txt") and not there:
        raise KvpruneError(f"calibrate.text: {path}: no such file or folder")


def documents(source: TextSource, seed: int) -> Iterator[Document]:
    """Yield the documents of a text in the order of `seed`. Raises KvpruneError where it cannot be read."""
    for _, document in named_documents(source, seed):
        yield document


def named_documents(source: TextSource, seed: int) -> Iterator[tuple[str, Document]]:
    """Yield `documents` with their names: a file, or a source and its row (of a data set, in the order of `seed`)."""
    check_text(source)
    path = Path(source.source)
    match _kind(source):
        case "builtin":
            yield from _shuffled(list(_rows(_jsonl(BUILTIN_TEXT), "builtin", "text")), seed)
        case "builtin-task" | "builtin-held-out" as name:
            text = importlib.import_module("kvprune.data.tasks.builtin_text")
            some = text.load()["test"] if name == TASK_TEXT else text.held_out()
            yield from _shuffled(list(_rows(enumerate(some, 1), name, "text")), seed)
        case "jsonl":
            yield from _shuffled(list(_rows(_jsonl(path), str(path), source.field)), seed)
        case "parquet":
            yield from _shuffled(list(_rows(_parquet(path), str(path), source.field)), seed)
        case "txt":
            files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
            for file in _shuffled(files, seed):
                yield str(file), _read(file)
        case _:
            yield from _rows(_streamed(source, seed), source.source, source.field)


def _kind(source: TextSource) -> str:
    path = Path(source.source)
    if source.source in BUILTINS:
        return source.source
    if path.suffix in (".jsonl", ".txt", ".parquet"):
        return path.suffix[1:]
    if os.path.exists(path) or source.source.startswith((".", "/", "~")):  # noqa: PTH110
        if not path.is_dir():
            raise KvpruneError(
                f"calibrate.text: {path}: should be builtin, self, a .txt, .jsonl or .parquet file, a folder of .txt "
                "files, or a datasets id"
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


def _rows(rows: Iterable[tuple[int, Any]], where: str, field: str | None) -> Iterator[tuple[str, Document]]:
    """The documents in numbered rows: the text or the chat in `field`, else in `text`, else in `messages`."""
    for number, row in rows:
        if not isinstance(row, dict):
            raise KvpruneError(f"calibrate.text: {where} row {number}: should be an object, got {type(row).__name__}")
        name = field or ("messages" if "messages" in row and "text" not in row else "text")
        value: Any = row.get(name)
        if not isinstance(value, str) and not _is_chat(value):
            has = ", ".join(sorted(map(str, row)))
            raise KvpruneError(
                f"calibrate.text.field: {where} row {number}: no text or chat in field {name!r}; it has: {has}"
            )
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
        except UnicodeEncodeError:
            raise KvpruneError(f"calibrate.text: {where} row {number}: half of a surrogate pair, not text") from None
        yield f"{where} row {number}", value


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item for item in value)
    )


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise KvpruneError(f"calibrate.text: {path} row {number}: not valid JSON: {error}") from None
            yield number, row


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as arrow
    import pyarrow.parquet

    number = 0
    try:
        with arrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, UnicodeDecodeError, arrow.ArrowException) as error:
        raise KvpruneError(f"calibrate.text: {path}: not a readable Parquet file: {one_line(error)}") from None


def _streamed(source: TextSource, seed: int) -> Iterator[tuple[int, Any]]:
    """Rows of a Hub data set, streamed: a corpus like C4 is never downloaded whole."""
    from datasets import load_dataset

    try:
        rows = load_dataset(source.source, source.config, split=source.split or "train", streaming=True)
        yield from enumerate(rows.shuffle(seed=seed, buffer_size=SHUFFLE_ROWS), 1)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise KvpruneError(f"calibrate.text: data set {source.source} does not load: {one_line(error)}") from None
