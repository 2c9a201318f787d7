"""Calibration tokens: packed end to end, drawn in a seeded order, and refused with the file and row at fault."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprune.artifacts import digest
from kvprune.errors import KvpruneError
from kvprune.recipe import make_recipe
from kvprune.schema import Calibrate, TextSource
from kvprune.sources import packing
from kvprune.sources.packing import pack
from kvprune.sources.texts import (
    BUILTIN_TEXT,
    POOL,
    check_text,
    documents,
    sequences,
    text_fingerprint,
    token_digest,
)
from tests.conftest import tiny_tokenizer, words
from tests.hub import Hub, hub_environment, run_python, serve

BOS, EOS = 256, 257
READ = """
import json, sys
from kvprune.errors import KvpruneError
from kvprune.schema import TextSource
from kvprune.sources.texts import documents
found = []
for text, seed in json.loads(sys.argv[1]):
    try:
        found.append(list(documents(TextSource(**text), seed)))
    except KvpruneError as error:
        found.append(str(error))
print(json.dumps(found))
"""
DOCUMENTS = ["one", "the second document", "", "drei\nZeilen é\n", "x" * 40]


def jsonl(file: Path, *rows: Any) -> Path:
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def section(source: Path | str, tokens: int = 64, length: int = 16, seed: int = 0, **text: Any) -> Calibrate:
    values = {"tokens": tokens, "sequence_length": length, "seed": seed, "text": {"source": str(source), **text}}
    return make_recipe({"model": "m", "calibrate": values}).calibrate


def read(source: Path | str, seed: int = 0, **text: Any) -> list[Any]:
    return list(documents(TextSource(source=str(source), **text), seed))


def refused(source: Path | str, **text: Any) -> str:
    """The line with which reading a text is refused."""
    with pytest.raises(KvpruneError) as error:
        read(source, 0, **text)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def stream(tokenizer: Any, parts: list[str]) -> list[int]:
    """Documents as the tokenizer has them, joined by EOS; empty ones are none."""
    ids: list[int] = []
    for at, part in enumerate(part for part in parts if part.strip()):
        ids += [EOS] * (at > 0) + tokenizer(part, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("length", [2, 7, 16, 64])
def test_sequences_are_the_stream_cut_into_full_lengths(adds_bos: bool, length: int) -> None:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    packed = pack(DOCUMENTS, tokenizer, length, 1000)
    ids = stream(tokenizer, DOCUMENTS)
    body = length - adds_bos
    assert all(len(sequence) == length for sequence in packed)
    assert all((sequence[0] == BOS) == adds_bos for sequence in packed)
    assert [token for sequence in packed for token in sequence[adds_bos:]] == ids[: len(ids) // body * body]
    assert len(packed) == len(ids) // body > 0


def test_a_text_of_exactly_one_sequence_is_one_and_a_token_less_is_none() -> None:
    tokenizer = tiny_tokenizer()
    assert len(pack(["a" * 15], tokenizer, 16, 9)) == 1
    assert pack(["a" * 14], tokenizer, 16, 9) == []
    assert pack([], tokenizer, 16, 9) == []


def test_packing_stops_at_the_most_that_is_wanted() -> None:
    taken: list[int] = []

    def endless() -> Any:
        while True:
            taken.append(len(taken))
            yield "a" * 100

    assert len(pack(endless(), tiny_tokenizer(), 16, 20)) == 20
    assert len(taken) == 3  # 20 sequences of 15 tokens: what is not needed is not read


def test_a_tokenizer_without_eos_joins_documents_directly() -> None:
    tokenizer = tiny_tokenizer(adds_bos=False)
    tokenizer.eos_token = None
    assert pack(["ab", "cd"], tokenizer, 4, 9) == [tokenizer("abcd")["input_ids"]]


def test_a_long_document_is_tokenised_in_pieces_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    long = "".join(f"{'word ' * (at % 9)}é{at}\n" for at in range(60)) + "y" * 150
    whole = pack([long], tokenizer, 8, 10_000)
    monkeypatch.setattr(packing, "PIECE", 40)
    pieces = list(packing._pieces(long))
    assert "".join(pieces) == long
    assert len(pieces) > 10
    assert all(len(piece) <= 40 for piece in pieces)
    assert sum(piece.endswith("\n") for piece in pieces) > 10
    assert pack([long], tokenizer, 8, 10_000) == whole


def test_calibration_tokens_have_the_shape_that_is_asked_for(text: Path) -> None:
    tokens = sequences(section(text, 64, 16), tiny_tokenizer())
    assert tokens.shape == (4, 16)
    assert tokens.dtype == torch.int64
    assert tokens[:, 0].tolist() == [BOS] * 4


def test_the_order_is_seeded(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"text": f"document {at} {words(at)}"} for at in range(60)))
    drawn = [sequences(section(file, 128, 16, seed), tiny_tokenizer()) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    digests = [token_digest(tokens) for tokens in drawn]
    assert digests[0] == digests[1] != digests[2]


def test_one_document_is_drawn_from_in_a_seeded_order_too(text: Path) -> None:
    first, second = (sequences(section(text, 64, 16, seed), tiny_tokenizer()) for seed in (0, 1))
    assert not torch.equal(first, second)


def test_sequences_are_drawn_from_the_first_of_the_text_without_repeats(text: Path) -> None:
    tokenizer = tiny_tokenizer()
    first = {tuple(row) for row in pack(read(text), tokenizer, 16, 4 * POOL)}
    for seed in range(5):
        drawn = Counter(tuple(row) for row in sequences(section(text, 64, 16, seed), tokenizer).tolist())
        assert max(drawn.values()) == 1
        assert set(drawn) <= first


def test_a_digest_tells_shapes_apart() -> None:
    tokens = torch.arange(24).reshape(4, 6)
    assert token_digest(tokens) == token_digest(tokens.clone())
    assert token_digest(tokens) != token_digest(tokens.reshape(6, 4))
    assert token_digest(tokens) != token_digest(tokens + 1)


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo é\n", encoding="utf-8")
    assert read(file) == ["one\n\ntwo é\n"]


def test_every_txt_file_below_a_folder_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"):
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    (tmp_path / "other.md").write_text("not read", encoding="utf-8")
    found = read(tmp_path)
    assert sorted(found) == ["text of a.txt", "text of b.txt", "text of sub/c.txt", "text of sub/deep/d.txt"]
    assert read(tmp_path) == found
    assert len({tuple(read(tmp_path, seed)) for seed in range(6)}) > 1


def test_every_row_of_a_jsonl_file_is_a_document(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "a\u2028b"}, {"text": "b", "body": "c"}, "", {"text": ""})
    assert sorted(read(file)) == ["", "a\u2028b", "b"]
    assert len({tuple(read(file, seed)) for seed in range(6)}) > 1
    assert read(jsonl(tmp_path / "b.jsonl", {"text": 1, "body": "c"}), field="body") == ["c"]
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\r\n\r\n{"text": "b"}')
    assert sorted(read(tmp_path / "c.jsonl")) == ["a", "b"]


def test_the_builtin_text_can_be_read() -> None:
    found = read("builtin")
    assert all(found)
    assert len(set(found)) > 10
    assert sequences(section("builtin", 512, 64), tiny_tokenizer()).shape == (8, 64)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"body": "a", "id": 3}, "body, id"),
        ({"text": 3}, "text"),
        ({"text": None}, "text"),
        ({"text": None, "messages": [{"role": "user", "content": "a"}]}, "messages, text"),
        ({"text": []}, "text"),
        ({"text": ["a"]}, "text"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages"),
    ],
)
def test_a_row_without_the_field_is_named(tmp_path: Path, row: Any, named: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "a"}, "", row)
    field = "text" if "text" in row or "messages" not in row else "messages"
    expected = f"calibrate.text.field: {file} row 3: no text or chat in field {field!r}; it has: {named}"
    assert refused(file) == expected


@pytest.mark.parametrize(("row", "kind"), [("[1]", "list"), ("3", "int"), ('"text"', "str"), ("null", "NoneType")])
def test_a_row_that_is_no_object_is_named(tmp_path: Path, row: str, kind: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "a"}, "", row)
    assert refused(file) == f"calibrate.text: {file} row 3: should be an object, got {kind}"


def test_a_row_without_the_chosen_field_is_named(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "a"})
    expected = f"calibrate.text.field: {file} row 1: no text or chat in field 'body'; it has: text"
    assert refused(file, field="body") == expected


@pytest.mark.parametrize("row", ['{"text": "a"', "text", "{'text': 'a'}", "[" * 100_000], ids=range(4))
def test_a_row_that_is_not_json_is_named(tmp_path: Path, row: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "a"}, row)
    assert refused(file).startswith(f"calibrate.text: {file} row 2: not valid JSON: ")


def test_a_row_that_no_tokenizer_can_read_is_named(tmp_path: Path) -> None:
    """Half of a surrogate pair is valid JSON and no text."""
    file = jsonl(tmp_path / "a.jsonl", {"text": "a" * 400}, r'{"text": "b\ud800"}')
    with pytest.raises(KvpruneError, match="row 2") as error:
        sequences(section(file), tiny_tokenizer())
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_not_text_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"PK\0\0\1")
    assert refused(file) == f"calibrate.text: {file}: a binary file, not text"
    file.write_bytes("naïve".encode("latin-1"))
    assert refused(file) == f"calibrate.text: {file}: not UTF-8 text (byte 2)"


def test_a_binary_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("a", encoding="utf-8")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    assert refused(tmp_path) == f"calibrate.text: {tmp_path / 'bad.txt'}: not UTF-8 text (byte 0)"


@pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl", "missing/", "missing.parquet"])
def test_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    assert str(tmp_path / name) in refused(tmp_path / name)
    assert "no such file or folder" in refused(tmp_path / "missing.txt")


def test_another_kind_of_file_is_refused_with_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text", encoding="utf-8")
    assert refused(tmp_path / "a.csv") == (
        f"calibrate.text: {tmp_path / 'a.csv'}: should be builtin, self, a .txt, .jsonl or .parquet file, "
        "a folder of .txt files, or a datasets id"
    )
    (tmp_path / "a.jsonl").mkdir()
    assert refused(tmp_path / "a.jsonl") == f"calibrate.text: {tmp_path / 'a.jsonl'}: no such file or folder"


@pytest.mark.parametrize("key", ["config", "split"])
@pytest.mark.parametrize("name", ["builtin", "a.txt", "a.jsonl", "folder"])
def test_keys_of_a_data_set_are_refused_for_a_local_text(tmp_path: Path, key: str, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("a.txt", "a.jsonl"):
        (tmp_path / file).write_text('{"text": "a"}', encoding="utf-8")
    source = name if name == "builtin" else str(tmp_path / name)
    expected = f"calibrate.text: config and split are for a data set of the Hub, and {source} is not one"
    assert refused(source, **{key: "train"}) == expected
    with pytest.raises(KvpruneError, match="config and split"):
        check_text(TextSource.model_validate({"source": source, key: "train"}))


def test_a_field_is_refused_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    for source in ("builtin", str(tmp_path / "a.txt"), str(tmp_path)):
        assert refused(source, field="text") == f"calibrate.text.field: {source} has no fields; remove it"


def test_a_name_longer_than_any_path_is_refused() -> None:
    refused("./" + "m" * 300 + ".txt")


@pytest.mark.parametrize("content", ["", "a" * 63])
def test_too_few_tokens_are_refused_with_how_many_there_are(tmp_path: Path, content: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text(content, encoding="utf-8")
    held = len(content) // 15 * 16
    expected = (
        f"calibrate.tokens: {file} holds {held} tokens in full sequences of 16, and 1600 of it are asked for; "
        "lower calibrate.tokens, or name a longer calibrate.text"
    )
    with pytest.raises(KvpruneError) as error:
        sequences(section(file, 1600, 16), tiny_tokenizer())
    assert str(error.value) == expected.replace("1600", "1,600")
    if held:
        assert sequences(section(file, held, 16), tiny_tokenizer()).numel() == held


def test_a_data_set_is_streamed_in_a_seeded_order(tmp_path: Path) -> None:
    rows = [f"row {at}" for at in range(10)]
    train = "".join(json.dumps({"text": row, "body": row.upper()}) + "\n" for row in rows).encode()
    hub = Hub({"datasets/org/text": {"train.jsonl": train, "test.jsonl": b'{"text": "test"}\n'}})
    asked: list[tuple[dict[str, str], int]] = [
        ({}, 0),
        ({}, 0),
        ({}, 1),
        ({"field": "body"}, 0),
        ({"split": "test", "config": "default"}, 0),
    ]
    arguments = json.dumps([({"source": "org/text", **text}, seed) for text, seed in asked])
    with serve(hub):
        env = hub_environment(tmp_path, HF_ENDPOINT=hub.endpoint)
        first, again, other, body, test = run_python(READ, arguments, env=env)
    assert sorted(first) == rows
    assert again == first != rows
    assert sorted(other) == rows
    assert other != first
    assert body == [row.upper() for row in first]
    assert test == ["test"]


def test_a_data_set_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    good, bad = b'{"text": "a"}\n', b'{"text": \n'
    repositories = {"text": good, "gated": good, "broken": bad}
    hub = Hub({f"datasets/org/{name}": {"train.jsonl": content} for name, content in repositories.items()})
    hub.gated.add("datasets/org/gated")
    asked = {
        "calibrate.text.field: org/text row 1: no text or chat in field 'body'; it has: text": {"field": "body"},
        "calibrate.text: data set org/text does not load: Bad split: other": {"split": "other"},
        "calibrate.text: data set org/text does not load: BuilderConfig 'other' not found": {"config": "other"},
        "calibrate.text: data set org/missing does not load: ": {"source": "org/missing"},
        "calibrate.text: data set org/gated does not load: ": {"source": "org/gated"},
        "calibrate.text: data set org/broken does not load: ": {"source": "org/broken"},
    }
    arguments = json.dumps([({"source": "org/text", **text}, 0) for text in asked.values()])
    with serve(hub):
        found = run_python(READ, arguments, env=hub_environment(tmp_path, HF_ENDPOINT=hub.endpoint))
    for line, expected in zip(found, asked, strict=True):
        assert line.startswith(expected)
        assert len(line.splitlines()) == 1


def test_a_data_set_without_a_network_is_one_line(tmp_path: Path) -> None:
    arguments = json.dumps([({"source": "org/text"}, 0), ({"source": "org/text", "split": "test"}, 1)])
    for line in run_python(READ, arguments, env=hub_environment(tmp_path, HF_HUB_OFFLINE="1")):
        assert line.startswith("calibrate.text: data set org/text does not load: ")
        assert len(line.splitlines()) == 1


def test_a_fingerprint_changes_with_a_file_and_names_every_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "b.txt", "sub/a.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    sources = [TextSource(source=str(tmp_path)), TextSource(source="self")]
    first = text_fingerprint(sources)
    for name in ("a.txt", "b.txt", "sub/a.txt"):
        (tmp_path / name).write_text(f"more of {name}", encoding="utf-8")
        second = text_fingerprint(sources)
        assert second != first, name
        first = second
    assert set(first) == {str(tmp_path), "self"}
    assert set(first[str(tmp_path)]) == {"a.txt", "b.txt", "sub/a.txt"}
    assert text_fingerprint([TextSource(source="builtin")]) == {"builtin": digest(BUILTIN_TEXT)}
    assert text_fingerprint([TextSource(source="org/text")]) == {"org/text": None}
    assert first["self"] is None
