"""Origins: every calibration token is found again at its place in the document that is named."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvprune.errors import KvpruneError
from kvprune.recipe import make_recipe
from kvprune.schema import Calibrate
from kvprune.sources import packing, texts
from kvprune.sources.origins import Origins, origins
from kvprune.sources.texts import self_share, sequences
from tests.conftest import tiny_tokenizer, words

LENGTH = 16
TURN = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
TEMPLATE = f"{{{{ bos_token }}}}{TURN}{{{{ eos_token }}}}"
TEXTS = [f"né€🙂 {at} {words(40 + at)}\n\n{words(at)}" for at in range(30)]
CHATS = [
    [{"role": "user", "content": f"été {at}?"}, {"role": "assistant", "content": words(at + 9)}] for at in range(9)
]


def bpe_tokenizer() -> Any:
    """Byte-level BPE with merges, BOS only where a chat template puts it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: Any) -> Any:
    made = tiny_tokenizer() if request.param == "bytes" else bpe_tokenizer()
    made.chat_template = TEMPLATE
    return made


def write_sources(folder: Path) -> dict[str, str]:
    """A source of every kind that is a file, by its kind."""
    (folder / "texts" / "below").mkdir(parents=True)
    (folder / "one.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    for at, text in enumerate(TEXTS):
        (folder / "texts" / ("below" * (at % 2)) / f"{at}.txt").write_text(text, encoding="utf-8")
    for name, key, rows in (("rows", "text", [*TEXTS, "", " "]), ("chats", "messages", CHATS)):
        lines = (json.dumps({key: row}) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {"txt": "one.txt", "folder": "texts", "jsonl": "rows.jsonl", "chats": "chats.jsonl", "self": "self"}


def calibrate(folder: Path, *sources: str, tokens: int = 16 * LENGTH, seed: int = 0) -> Calibrate:
    text = [name if name in ("self", "builtin") else str(folder / name) for name in sources]
    values = {"text": text, "tokens": tokens, "sequence_length": LENGTH, "seed": seed}
    return make_recipe({"model": "m", "calibrate": values}).calibrate


def own_samples(section: Calibrate, tokenizer: Any) -> Tensor:
    """BOS and a piece of a text that may start and end within a character, as a model that speaks would draw them."""
    ids = tokenizer("".join(TEXTS), add_special_tokens=False)["input_ids"][2:]
    samples = torch.tensor(ids[: self_share(section) * LENGTH]).view(-1, LENGTH)
    samples[:, :1] = tokenizer.bos_token_id
    return samples


def text_of(name: str, tokenizer: Any, samples: Tensor) -> str:
    """The document of this name."""
    file, _, row = name.rpartition(" row ")
    if name.startswith("self sample "):
        return str(tokenizer.decode(samples[int(name.rpartition(" ")[2]) - 1], clean_up_tokenization_spaces=False))
    if not file:
        return Path(name).read_text(encoding="utf-8")
    file = str(texts.BUILTIN_TEXT) if file == "builtin" else file
    found = json.loads(Path(file).read_text(encoding="utf-8").split("\n")[int(row) - 1])
    return str(found["text"] if "text" in found else tokenizer.apply_chat_template(found["messages"], tokenize=False))


def traced(section: Calibrate, tokenizer: Any) -> Origins:
    """The origins of a section's tokens, each of which is looked up in its document."""
    samples = own_samples(section, tokenizer)
    tokens = sequences(section, tokenizer, samples)
    found = origins(section, tokenizer, tokens, samples)
    whole = {name: text_of(name, tokenizer, samples) for name in found.names}
    looked_up = 0
    for row, (ids, documents, offsets) in enumerate(zip(tokens, found.document, found.offset, strict=True)):
        for token, document, offset in zip(ids.tolist(), documents.tolist(), offsets.tolist(), strict=True):
            text, piece = whole[found.names[document]], tokenizer.decode([token])
            if text.startswith(piece, offset):
                looked_up += "\ufffd" not in piece
            elif token == tokenizer.eos_token_id:
                assert offset == len(text)
            elif token == tokenizer.bos_token_id:  # where the next token is
                assert (document, offset) == (found.document[row, 1], found.offset[row, 1])
            else:  # a part of a character
                assert "\ufffd" in piece
                assert not text[max(0, offset - 1) : offset + 1].isascii()
    assert looked_up > 0.8 * tokens.numel()
    return found


@pytest.mark.parametrize("kind", ["txt", "folder", "jsonl", "chats", "self"])
def test_every_token_is_at_its_place_in_the_named_document(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    source = write_sources(tmp_path)[kind]
    found = traced(calibrate(tmp_path, source, tokens=8 * LENGTH), tokenizer)
    assert len(set(found.names)) == len(found.names)
    assert (len(found.names) == 1) == (kind == "txt")


def test_the_builtin_text_is_traced(tokenizer: Any, tmp_path: Path) -> None:
    assert traced(calibrate(tmp_path, "builtin"), tokenizer).names[0].startswith("builtin row ")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_mixture_is_traced_to_all_its_sources(seed: int, tokenizer: Any, tmp_path: Path) -> None:
    sources = write_sources(tmp_path).values()
    found = traced(calibrate(tmp_path, *sources, tokens=20 * LENGTH, seed=seed), tokenizer)
    named = [found.names[document] for document in found.document[:, 1].tolist()]
    counts = Counter(
        next(source for source in sources if f"{tmp_path / source}" in name or source in name) for name in named
    )
    assert counts == dict.fromkeys(sources, 4)


def test_places_go_on_where_a_long_document_is_cut_into_pieces(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PIECE", 50)
    found = traced(calibrate(tmp_path, write_sources(tmp_path)["txt"]), tokenizer)
    assert int(found.offset.max()) > 500


def test_tokens_of_a_text_that_has_changed_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    section = calibrate(tmp_path, write_sources(tmp_path)["txt"])
    tokens = sequences(section, tokenizer)
    (tmp_path / "one.txt").write_text("another " * 2000, encoding="utf-8")
    with pytest.raises(KvpruneError, match="changed while they were read"):
        origins(section, tokenizer, tokens)


def test_a_tokenizer_that_tells_no_offsets_still_names_documents(tmp_path: Path) -> None:
    class Slow(PreTrainedTokenizerFast):  # type: ignore[misc]
        is_fast = False

    slow = Slow(tokenizer_object=tiny_tokenizer().backend_tokenizer, bos_token="<bos>", eos_token="<eos>")
    section = calibrate(tmp_path, write_sources(tmp_path)["folder"])
    tokens = sequences(section, slow)
    found, told = (origins(section, each, tokens) for each in (slow, tiny_tokenizer()))
    assert torch.equal(found.document, told.document)
    assert found.names == told.names
    assert set(found.offset.flatten().tolist()) == {-1}
