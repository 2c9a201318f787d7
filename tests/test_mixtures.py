"""Several texts by weight, chats through the chat template, Parquet, and the model's own samples."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet
import pytest
import torch

import kvprune
from kvprune.artifacts import RunFolder, read_json, write_json
from kvprune.errors import KvpruneError
from kvprune.recipe import make_recipe
from kvprune.results.show import render
from kvprune.schema import Calibrate, TextSource
from kvprune.sources import samples
from kvprune.sources.packing import pack
from kvprune.sources.samples import BATCH, sample, self_samples
from kvprune.sources.texts import documents, self_share, sequences, shares
from tests.conftest import VOCABULARY, recipe_data, save_model, tiny_config, tiny_model, tiny_tokenizer, words

BOS, EOS = 256, 257
PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
ENDS = {
    "no-eos": PLAIN,
    "eos": PLAIN + "{{ eos_token }}",
    "eos-and-line-end": PLAIN + "{{ eos_token }}{{ '\\n' }}",
    "bos": "{{ bos_token }}" + PLAIN,
    "bos-and-eos": "{{ bos_token }}" + PLAIN + "{{ eos_token }}",
}
CHATS = [
    [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hé."}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": words(9)}],
    [{"role": "user", "content": "a"}],
]


def chat_tokenizer(template: str | None, *, adds_bos: bool = True) -> Any:
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer: Any, chat: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    return ids


def jsonl(file: Path, *rows: Any) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def parquet(file: Path, **columns: list[Any]) -> Path:
    arrow.parquet.write_table(arrow.table(columns), file)
    return file


def read(source: Path, **text: Any) -> list[Any]:
    return list(documents(TextSource(source=str(source), **text), 0))


def refused(source: Path, **text: Any) -> str:
    with pytest.raises(KvpruneError) as error:
        read(source, **text)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def calibrate(text: Any, **values: Any) -> Calibrate:
    return make_recipe({"model": "m", "calibrate": {"text": text, "sequence_length": 16, **values}}).calibrate


def refused_recipe(text: Any) -> list[str]:
    with pytest.raises(KvpruneError) as error:
        calibrate(text)
    return str(error.value).splitlines()


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("length", [5, 16])
@pytest.mark.parametrize("end", ENDS)
def test_a_chat_is_what_the_chat_template_makes_of_it(end: str, length: int, adds_bos: bool) -> None:
    tokenizer = chat_tokenizer(ENDS[end], adds_bos=adds_bos)
    expected: list[int] = []
    for chat in CHATS:
        ids = rendered(tokenizer, chat)
        expected += ids if EOS in ids[-2:] else [*ids, EOS]
    assert expected.count(EOS) == len(CHATS)
    stream: list[int] = []
    for sequence in pack(CHATS, tokenizer, length, 1000):
        assert len(sequence) == length
        assert (sequence[0] == BOS) >= adds_bos
        own = expected[len(stream) : len(stream) + 1] == [BOS]
        stream += sequence[adds_bos and not own :]
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) <= length


@pytest.mark.parametrize("adds_bos", [True, False])
def test_no_sequence_starts_with_two_bos(adds_bos: bool) -> None:
    tokenizer = chat_tokenizer(ENDS["bos-and-eos"], adds_bos=adds_bos)
    chat = [{"role": "user", "content": "abc"}]
    ids = rendered(tokenizer, chat)
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert pack([chat] * 4, tokenizer, len(ids), 9) == [ids] * 4
    mixed = pack(["a text", chat, chat, "b"], tokenizer, 4, 99)
    assert all(first != BOS or second != BOS for first, second, *_ in mixed)


def test_texts_and_chats_are_joined_by_one_eos() -> None:
    tokenizer = chat_tokenizer(ENDS["eos"], adds_bos=False)
    (packed,) = pack(["ab", CHATS[2], "cd", ""], tokenizer, 13, 9)
    assert packed == [*plain_ids("ab"), EOS, *plain_ids("[user]a"), EOS, *plain_ids("cd")]


def plain_ids(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("field", [None, "messages", "conversation"])
def test_a_row_of_messages_is_a_chat(tmp_path: Path, field: str | None) -> None:
    name = field or "messages"
    file = jsonl(tmp_path / "a.jsonl", *({name: chat, "id": at} for at, chat in enumerate(CHATS)))
    found = read(file) if field is None else read(file, field=field)
    assert sorted(found, key=json.dumps) == sorted(CHATS, key=json.dumps)


def test_texts_and_chats_may_be_in_one_file(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "a", "messages": CHATS[0]}, {"messages": CHATS[1]}, {"text": CHATS[2]})
    assert sorted(read(file), key=json.dumps) == sorted(["a", CHATS[1], CHATS[2]], key=json.dumps)


def test_calibration_tokens_of_chats_are_cut_from_the_rendered_chats(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(ENDS["bos-and-eos"])
    file = jsonl(tmp_path / "a.jsonl", *({"messages": chat} for chat in CHATS * 9))
    section = calibrate(str(file), tokens=64)
    pool = pack(documents(section.text[0], 0), tokenizer, 16, 99)
    tokens = sequences(section, tokenizer)
    assert tokens.shape == (4, 16)
    assert all(row in pool for row in tokens.tolist())


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "tokenizer.chat_template is not set"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].tools.name }}", "has no attribute 'tools'"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_one_line(tmp_path: Path, template: str | None, named: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"messages": CHATS[0]})
    with pytest.raises(KvpruneError) as error:
        sequences(calibrate(str(file), tokens=16), chat_tokenizer(template))
    line = str(error.value)
    assert line.startswith("calibrate.text: the tokenizer cannot render a chat: ")
    assert named in line
    assert len(line.splitlines()) == 1


def test_a_parquet_file_of_texts_is_read(tmp_path: Path) -> None:
    texts = [f"row {at}" for at in range(2500)]  # more than a batch
    file = parquet(tmp_path / "a.parquet", text=texts, body=texts[::-1], id=list(range(2500)))
    found = read(file)
    assert sorted(found) == sorted(texts)
    assert found != texts
    assert read(file) == found
    assert list(documents(TextSource(source=str(file)), 1)) != found
    assert read(file, field="body") == [texts[2499 - int(text.split()[1])] for text in found]


@pytest.mark.parametrize("field", ["messages", "conversation"])
def test_a_parquet_file_of_chats_is_read(tmp_path: Path, field: str) -> None:
    file = parquet(tmp_path / "a.parquet", **{field: CHATS})
    found = read(file) if field == "messages" else read(file, field=field)
    assert sorted(found, key=json.dumps) == sorted(CHATS, key=json.dumps)
    tokenizer = chat_tokenizer(PLAIN)
    assert [rendered(tokenizer, chat) for chat in found] == [
        rendered(tokenizer, CHATS[CHATS.index(chat)]) for chat in found
    ]


def test_a_parquet_chat_may_hold_what_json_cannot(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    time = arrow.scalar(0, arrow.timestamp("s")).as_py()
    parquet(file, messages=[[{"role": "user", "content": "a", "time": time}]])
    assert read(file) == [[{"role": "user", "content": "a", "time": time}]]


def test_a_parquet_row_without_the_field_is_named(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", text=["a", None], id=[1, 2])
    assert refused(file) == f"calibrate.text.field: {file} row 2: no text or chat in field 'text'; it has: id, text"
    line = f"calibrate.text.field: {file} row 1: no text or chat in field 'id'; it has: id, text"
    assert refused(file, field="id") == line


def test_a_broken_parquet_file_is_one_line(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "a.parquet", text=[words(200)]).read_bytes()
    middle = len(whole) // 3
    for broken in (b"", b"PAR1", whole[:middle], b"\n".join([whole] * 2)[: len(whole) + 9], b"\x55" * len(whole)):
        (tmp_path / "b.parquet").write_bytes(broken)
        line = refused(tmp_path / "b.parquet")
        assert line.startswith(f"calibrate.text: {tmp_path / 'b.parquet'}: not a readable Parquet file: ")
    (tmp_path / "b.parquet").write_bytes(whole[:4] + b"\x55" * 40 + whole[44:])
    assert "not a readable Parquet file: " in refused(tmp_path / "b.parquet")


def test_a_parquet_text_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    buffers = [None, arrow.py_buffer(b"\0\0\0\0\2\0\0\0"), arrow.py_buffer(b"\xff\xfe")]
    table = arrow.table({"text": arrow.Array.from_buffers(arrow.string(), 1, buffers)})
    arrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "not a readable Parquet file: 'utf-8' codec" in refused(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1], [10]),
        ([1, 1], [5, 5]),
        ([0.25, 0.75], [3, 7]),  # 2.5 and 7.5: the first of equal remainders is rounded up
        ([1, 1, 1], [4, 3, 3]),
        ([5, 3, 1], [6, 3, 1]),  # 5.56, 3.33 and 1.11
        ([1, 99], [0, 10]),
        ([1e-9, 1e9], [0, 10]),
        ([3, 3, 3, 1], [3, 3, 3, 1]),
    ],
)
def test_shares_follow_the_weights_by_largest_remainders(weights: list[float], counts: list[int]) -> None:
    texts = [{"source": f"org/{at}", "weight": weight} for at, weight in enumerate(weights)]
    found = shares(calibrate(texts, tokens=160))
    assert [count for _, count in found] == counts
    assert [source.source for source, _ in found] == [text["source"] for text in texts]


@pytest.mark.parametrize("total", range(1, 30))
def test_shares_sum_to_the_total(total: int) -> None:
    weights = [0.1, 0.2, 0.3, 1 / 3, 1e-3]
    texts = [{"source": f"org/{at}", "weight": weight} for at, weight in enumerate(weights)]
    counts = [count for _, count in shares(calibrate(texts, tokens=16 * total))]
    assert sum(counts) == total
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Texts that share no letter: a .txt, a .jsonl and a .parquet of chats, whose template adds none."""
    (tmp_path / "a.txt").write_text("ab" * 2000, encoding="utf-8")
    jsonl(tmp_path / "b.jsonl", *({"text": "c" * (at + 1) + "d"} for at in range(90)))
    chats = [[{"role": "user", "content": "e" * (at + 1) + "f"}] for at in range(90)]
    return [tmp_path / "a.txt", tmp_path / "b.jsonl", parquet(tmp_path / "c.parquet", messages=chats)]


def letters(row: list[int]) -> str:
    return "".join(sorted({chr(token + 33) for token in row if token < 256}))


def test_each_source_gives_its_share_of_the_sequences(three: list[Path]) -> None:
    texts = [{"source": str(file), "weight": weight} for file, weight in zip(three, (2, 1, 0.5), strict=True)]
    tokenizer = chat_tokenizer("{{ messages[0].content }}")
    drawn = [sequences(calibrate(texts, tokens=16 * 28, seed=seed), tokenizer) for seed in (0, 0, 1)]
    for tokens in drawn:
        found = [letters(row) for row in tokens.tolist()]
        assert set(found) <= {"ab", "c", "cd", "e", "ef"}  # none of two sources
        assert Counter(item[0] for item in found) == {"a": 16, "c": 8, "e": 4}
        assert tokens.shape == (28, 16)
    assert torch.equal(drawn[0], drawn[1])
    order = [[letters(row)[0] for row in tokens.tolist()] for tokens in drawn]
    assert order[0] != order[2]
    assert sorted(order[0]) != order[0]  # mixed, not one source after the other


def test_one_source_in_a_list_is_that_source(three: list[Path]) -> None:
    tokenizer = tiny_tokenizer()
    alone = sequences(calibrate(str(three[1]), tokens=64), tokenizer)
    assert torch.equal(sequences(calibrate([{"source": str(three[1]), "weight": 7}], tokens=64), tokenizer), alone)


def test_a_source_with_too_few_tokens_is_named(three: list[Path], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a" * 31, encoding="utf-8")
    with pytest.raises(KvpruneError) as error:
        sequences(calibrate([str(three[0]), str(tmp_path / "short.txt")], tokens=96), tiny_tokenizer())
    assert str(error.value) == (
        f"calibrate.tokens: {tmp_path / 'short.txt'} holds 32 tokens in full sequences of 16, "
        "and 48 of it are asked for; lower calibrate.tokens, or name a longer calibrate.text"
    )


def test_a_list_of_texts_holds_names_and_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "self"):
        Path(name).write_text("a", encoding="utf-8")
    section = calibrate(["a.txt", "self", {"source": "org/text", "field": "body", "weight": 3}])
    assert [(text.source, text.field, text.weight) for text in section.text] == [
        (str(tmp_path / "a.txt"), None, 1.0),
        ("self", None, 1.0),
        ("org/text", "body", 3.0),
    ]
    assert (
        calibrate("a.txt") == calibrate(["a.txt"]) == calibrate({"source": "a.txt"}) == calibrate([{"source": "a.txt"}])
    )


@pytest.mark.parametrize("weight", [0, -1, -0.5, float("nan"), float("inf"), 1e300, "2", True])
def test_a_weight_that_is_no_share_is_refused(weight: Any) -> None:
    (line,) = refused_recipe({"source": "a", "weight": weight})
    assert line.startswith("recipe: calibrate.text.weight: should be ")
    (line,) = refused_recipe(["b", {"source": "a", "weight": weight}])
    assert line.startswith("recipe: calibrate.text.1.weight: should be ")


def test_a_wrong_item_is_named_by_its_place() -> None:
    assert refused_recipe(["builtin", {"source": "a", "wieght": 2}]) == [
        "recipe: calibrate.text.1.wieght: unknown key. Did you mean weight? "
        "Allowed: source, config, split, field, weight"
    ]
    assert refused_recipe([{"weight": 2}, 3]) == [
        "recipe: calibrate.text.0.source: missing, and it has no default",
        "recipe: calibrate.text.1: should be a valid dictionary, got 3",
    ]
    (line,) = refused_recipe([])
    assert line.startswith("recipe: calibrate.text: ")


@pytest.mark.parametrize("value", [3, [1], "text"])
def test_a_calibrate_section_that_is_none_is_one_line(value: Any) -> None:
    with pytest.raises(KvpruneError, match=r"^recipe: calibrate: should be a valid dictionary, got "):
        make_recipe({"model": "m", "calibrate": value})


def test_own_samples_have_no_keys_of_a_data_set() -> None:
    self = Path("self")
    expected = "calibrate.text: config and split are for a data set of the Hub, and self is not one"
    assert refused(self, config="a") == refused(self, split="a") == expected
    assert refused(self, field="a") == "calibrate.text.field: self has no fields; remove it"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(tiny_config("llama"))


def draw(model: Any, file: Path, count: int = 20, seed: int = 0, **values: Any) -> torch.Tensor:
    tokenizer = values.pop("tokenizer", None) or tiny_tokenizer()
    about = values.pop("about", {"model": "tiny"})
    return self_samples(
        lambda: model,
        tokenizer,
        file,
        vocabulary=model.config.vocab_size,
        count=count,
        length=12,
        seed=seed,
        about=about,
    )


def test_own_samples_have_the_shape_and_start_with_bos(model: Any, tmp_path: Path) -> None:
    tokens = draw(model, tmp_path / "a.json")
    assert tokens.shape == (20, 12)
    assert tokens.dtype == torch.int64
    assert tokens[:, 0].tolist() == [BOS] * 20
    assert len(set(map(tuple, tokens.tolist()))) == 20
    assert int(tokens.max()) < VOCABULARY


def test_without_bos_samples_start_with_seeded_tokens(model: Any, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    drawn = [draw(model, tmp_path / f"{at}.json", 40, seed, tokenizer=tokenizer) for at, seed in enumerate((0, 0, 1))]
    assert torch.equal(drawn[0], drawn[1])
    assert len(set(drawn[0][:, 0].tolist())) > 20
    assert not torch.equal(drawn[0][:, 0], drawn[2][:, 0])


def test_own_samples_are_seeded(model: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    first = draw(model, tmp_path / "a.json")
    after = torch.rand(1)
    assert torch.equal(draw(model, tmp_path / "b.json"), first)
    assert not torch.equal(draw(model, tmp_path / "c.json", seed=1), first)
    assert not torch.equal(first[:4], first[BATCH : BATCH + 4])  # batches do not repeat each other
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)  # the caller's generator is left as it was


def test_own_samples_are_used_again_where_nothing_changed(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.json"
    first = draw(model, file)
    calls = counted(monkeypatch)
    assert torch.equal(draw(model, file), first)
    assert calls == []
    about = read_json(file)
    assert about["tokens"][:20] == first.tolist()
    assert len(about["tokens"]) == 2 * BATCH  # whole batches, so that more samples are the same and some
    assert about["texts"] == tiny_tokenizer().batch_decode(about["tokens"])
    assert torch.equal(draw(model, file, count=2 * BATCH)[:20], first)
    assert calls == []
    assert torch.equal(draw(model, file, count=2 * BATCH + 1)[:20], first)
    assert calls == [BATCH]
    assert torch.equal(draw(model, file, count=3), first[:3])
    assert calls == [BATCH]
    changes: list[dict[str, Any]] = [{"seed": 1}, {"about": {"model": "other"}}]
    for at, change in enumerate(changes, 1):
        draw(model, file, **change)
        assert len(calls) == 1 + 2 * at  # batches


def counted(monkeypatch: pytest.MonkeyPatch, stop_at: int = 0) -> list[int]:
    """The number of sequences of every batch that is sampled from now on; the batch `stop_at` is interrupted."""
    calls: list[int] = []

    def counting(model: Any, first: torch.Tensor, length: int, seed: int) -> torch.Tensor:
        calls.append(len(first))
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return sample(model, first, length, seed)

    monkeypatch.setattr(samples, "sample", counting)
    return calls


def test_a_generation_config_of_the_model_changes_no_sample() -> None:
    """Penalties, cuts and lengths that a model ships with are not its distribution."""
    model, first = tiny_model(tiny_config("llama")), torch.full((32,), BOS)
    tokens = sample(model, first, 32, 0)
    assert EOS in tokens[:, :-1]  # and it did not end a sequence
    own = model.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size, own.min_p, own.temperature = 5.0, 1, 0.9, 0.1
    own.suppress_tokens, own.max_length = [1, 2, 3], 20
    assert torch.equal(sample(model, first, 32, 0), tokens)
    assert model.generation_config is own


def test_own_samples_follow_the_distribution_of_the_model(model: Any) -> None:
    """Pearson's chi-square of 4,000 first tokens: below five standard deviations over its mean."""
    with torch.inference_mode():
        chances = model(torch.tensor([[BOS]])).logits[0, -1].double().softmax(-1)
    drawn = sample(model, torch.full((4000,), BOS), 2, 0)
    assert drawn.shape == (4000, 2)
    counts = torch.bincount(drawn[:, 1], minlength=VOCABULARY).double()
    expected = 4000 * chances
    rare = expected < 5
    assert not rare.all()
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    hoped = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = float(((seen - hoped) ** 2 / hoped.clamp(min=1e-9)).sum())
    freedom = len(seen) - 1
    assert freedom > 20
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_model(tmp_path / "dense")


def of_itself(dense: Path, text: Any, **values: Any) -> Any:
    data = recipe_data(dense, dense)
    data["calibrate"] = {"text": text, "tokens": 32 * 40, "sequence_length": 32, **values}
    return make_recipe(data)


def kept(run: Path) -> Any:
    return read_json(RunFolder(run).samples)["tokens"]


def test_own_samples_do_not_depend_on_the_batch_size(dense: Path, tmp_path: Path) -> None:
    for size in (1, 7, 64):
        kvprune.calibrate(of_itself(dense, "self"), tmp_path / str(size), options=kvprune.Options(batch_size=size))
    assert kept(tmp_path / "1") == kept(tmp_path / "7") == kept(tmp_path / "64")
    assert len(kept(tmp_path / "1")) == 48  # whole batches
    assert {len(row) for row in kept(tmp_path / "1")} == {32}


def test_sampling_that_was_interrupted_is_resumed(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = of_itself(dense, "self"), tmp_path / "run"
    calls = counted(monkeypatch, stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        kvprune.calibrate(recipe, run)
    assert len(kept(run)) == BATCH
    kvprune.calibrate(recipe, run)
    assert calls == [BATCH, BATCH, BATCH, BATCH]
    kvprune.calibrate(recipe, tmp_path / "whole")
    assert kept(run) == kept(tmp_path / "whole")
    assert RunFolder(run).stats.read_bytes() == RunFolder(tmp_path / "whole").stats.read_bytes()


def test_counting_that_starts_anew_samples_no_more(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(of_itself(dense, "self"), run)
    calls = counted(monkeypatch)
    kvprune.calibrate(of_itself(dense, "self", skip_first=2), run)
    assert calls == []
    kvprune.calibrate(of_itself(dense, "self", seed=1), run)
    assert sum(calls) == 48  # whole batches


def test_a_mixture_of_a_text_and_own_samples_is_calibrated_and_shown(dense: Path, tmp_path: Path, text: Path) -> None:
    mixture = [{"source": str(text), "weight": 0.5}, {"source": "self", "weight": 0.5}]
    recipe, run = of_itself(dense, mixture), tmp_path / "run"
    kvprune.calibrate(recipe, run)
    assert len(kept(run)) == 32  # whole batches
    about = kvprune.show(run)
    assert about["stages"][0] == {"stage": "calibrate", "status": "current", "reason": ""}
    assert about["counted"]["tokens"] == 40 * 31
    assert [item["source"] for item in about["recipe"]["calibrate"]["text"]] == [str(text), "self"]
    shown = render(about)
    assert f"source: {text}" in shown
    assert shown.count("weight: 0.5") == 2
    text.write_text(words(501), encoding="utf-8")
    assert kvprune.show(run)["stages"][0]["reason"] == f"the text {text} has changed"


def test_the_samples_are_mixed_among_the_other_texts(three: list[Path]) -> None:
    own = torch.full((10, 16), 255)
    mixed = sequences(calibrate([str(three[0]), "self"], tokens=320), tiny_tokenizer(), own)
    at = [index for index, row in enumerate(mixed.tolist()) if row == [255] * 16]
    assert len(at) == 10
    assert at not in (list(range(10)), list(range(10, 20)))


def test_own_samples_that_are_named_twice_are_not_counted_twice() -> None:
    section = calibrate(["self", {"source": "self", "weight": 3}], tokens=128)
    own = torch.arange(8 * 16).reshape(8, 16)
    assert self_share(section) == 8
    assert sorted(sequences(section, tiny_tokenizer(), own).tolist()) == own.tolist()


def test_a_share_of_nothing_needs_no_samples(three: list[Path]) -> None:
    section = calibrate([{"source": str(three[0]), "weight": 99}, "self"], tokens=64)
    assert self_share(section) == 0
    assert sequences(section, tiny_tokenizer()).shape == (4, 16)


def test_a_tokenizer_of_another_model_is_refused_before_sampling(dense: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.add_special_tokens({"bos_token": "<other>"})
    tokenizer.save_pretrained(dense)
    with pytest.raises(KvpruneError, match="BOS has id 260 and the model has 260 embeddings") as error:
        kvprune.calibrate(of_itself(dense, "self"), tmp_path / "run")
    assert len(str(error.value).splitlines()) == 1


def test_samples_that_were_counted_are_never_drawn_again(dense: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    kvprune.calibrate(of_itself(dense, "self"), run.path)
    before = kvprune.inspect(run.path, slots=["1:3"], sections=["triggers"])
    kept = read_json(run.samples)
    kept["key"]["device"] = "cuda"  # as if it had been calibrated there: here, they would come out otherwise
    write_json(run.samples, kept)
    content = run.samples.read_bytes()
    assert kvprune.inspect(run.path, slots=["1:3"], sections=["triggers"]) == before
    kvprune.plan(run.path)
    kvprune.refit(run.path, overrides=["refit.method=oneshot"])
    assert run.samples.read_bytes() == content
