"""The whole verb `kvprune inspect`: its cards tell what models were made to do, its losses are the models' own."""

import contextlib
import io
import json
import random
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvprune
from kvprune.artifacts import RunFolder, cache_folder, read_plan
from kvprune.cli import main
from kvprune.errors import KvpruneError
from kvprune.ffn.find import find_layout
from kvprune.ffn.watching import value_rows
from kvprune.options import Options
from kvprune.results.inspection import render
from tests.browser import Parsed
from tests.conftest import recipe_data, tiny_config, tiny_model, tiny_tokenizer, words
from tests.families import family_config
from tests.test_triggers import plant

LENGTH, BOS = 32, 256
LETTERS = string.ascii_letters + string.digits + string.punctuation
MADE = 48  # slots that look for the tokens 0 to 47, "!" to "P"
TIMES = 10  # that each of them is in the text: as often as a card has triggers
BASE = {"id", "ffn", "slot", "expert", "rate", "removed"}
TRIGGERS, VALUES = {"triggers", "shared"}, {"promoted", "suppressed", "coherence"}
HEAD = ("format", "version", "made_with", "model", "run", "text", "tokens")
SMALL = ["calibrate.text=builtin", "calibrate.tokens=64", "calibrate.sequence_length=32"]


def made_run(folder: Path, kind: str, *, whole: bool) -> Path:
    """A run of a tiny model, up to its results, or to its checkpoint."""
    tiny_model(family_config(kind)).save_pretrained(folder / "dense")
    tiny_tokenizer().save_pretrained(folder / "dense")
    for name, count in (("text.txt", 3000), ("held.txt", 20 * (LENGTH - 1) + 9)):  # 20 sequences, and some that is left
        (folder / name).write_text("".join(random.Random(count).choices(LETTERS, k=count)), encoding="utf-8")
    data = recipe_data(folder / "dense", folder / "text.txt")
    data["calibrate"]["skip_first"] = 2  # tokens in the same context tie
    recipe = kvprune.make_recipe(data)
    if whole:
        kvprune.run(recipe, folder / "run")
    else:
        kvprune.calibrate(recipe, folder / "run")
        kvprune.plan(folder / "run")
        kvprune.export(folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a Llama, beside its model and texts; tests read it."""
    return made_run(tmp_path_factory.mktemp("llama"), "llama", whole=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported run of a Mixtral; tests read it."""
    return made_run(tmp_path_factory.mktemp("mixtral"), "mixtral", whole=False)


@pytest.fixture(params=["run", "mixture"])
def either(request: pytest.FixtureRequest) -> Path:
    """Each of the two."""
    return Path(request.getfixturevalue(request.param))


def assert_alike(one: Any, other: Any) -> None:
    """Plain data are the same but for rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, item in one.items():
            assert_alike(item, other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    else:
        assert one == (pytest.approx(other, rel=1e-3, abs=1e-5) if isinstance(one, float) else other)


def made_model(kind: str, folder: Path) -> Tensor:
    """A model whose first layer answers token i, of 48, with the token that is returned for it."""
    model = tiny_model(tiny_config(kind))
    plant(model, "gpt2" if kind.startswith("gpt2") else kind)
    rows = model.get_output_embeddings().weight
    norm = model.transformer.ln_f if kind.startswith("gpt2") else model.model.norm
    wanted = (torch.arange(MADE) * 5 + 3) % 89  # letters of one byte
    with torch.no_grad():
        values = value_rows(model, find_layout(model.config).ffns[0])
        values[:] = torch.nn.functional.normalize(rows[wanted] / norm.weight)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return wanted


@pytest.mark.parametrize("kind", ["llama", "gpt2-inner"])
def test_cards_tell_what_slots_were_made_for_of_a_run_and_of_a_model(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = made_model(kind, tmp_path / "dense")
    letters = [tiny_tokenizer().decode([token]) for token in range(MADE)] * TIMES
    random.Random(0).shuffle(letters)
    written, file = "".join(letters), tmp_path / "text.txt"
    file.write_text(written, encoding="utf-8")
    section = {"text": str(file), "tokens": 500, "sequence_length": 25, "skip_first": 1}  # BOS, and all of the text
    kvprune.calibrate(kvprune.make_recipe({"model": str(tmp_path / "dense"), "calibrate": section}), tmp_path / "run")
    found = kvprune.inspect(tmp_path / "run", layer=0, top=MADE)
    assert sorted(card["slot"] for card in found["slots"]) == list(range(MADE))
    for card in found["slots"]:
        letter, says = (tiny_tokenizer().decode([token]) for token in (card["slot"], wanted[card["slot"]]))
        places = [at for at, each in enumerate(written) if each == letter]
        assert (card["id"], card["removed"]) == (f"0:{card['slot']}", None)
        assert {trigger["token"] for trigger in card["triggers"]} == {letter}
        assert {trigger["document"] for trigger in card["triggers"]} == {str(file)}
        assert sorted(trigger["offset"] for trigger in card["triggers"]) == places
        assert card["shared"] == {"kind": "token", "text": letter, "share": 1.0, "chance": pytest.approx(1 / MADE)}
        assert card["promoted"][0][1] == wanted[card["slot"]]
        assert card["promoted"][0][0] == says
        assert card["rate"] >= 1 / MADE
        shown = render({**found, "slots": [card]})
        assert f"slot {card['id']}: fires on" in shown
        assert f"100% end with the token {letter!r}" in shown
        assert f"promoted: {says!r}" in shown
    caplog.clear()
    overrides = [f"calibrate.{key}={value}" for key, value in section.items()]
    for _ in range(2):  # made in the cache, then found there
        of_model = kvprune.inspect(tmp_path / "dense", layer=0, top=MADE, overrides=overrides)
        (stats,) = cache_folder().glob("inspect/*/stats.safetensors")
        assert of_model == {**found, "run": None}
        made = stats.stat().st_mtime_ns
    assert stats.stat().st_mtime_ns == made
    assert not [
        record for record in caplog.records if record.levelname == "WARNING"
    ]  # as of a budget, which it has not
    assert found["run"] == str(tmp_path / "run")


def losses_of(folder: Path, text: str) -> Tensor:
    """Cross entropies `[sequences, LENGTH - 1]` of a model on a text of single bytes, BOS before each sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])
    ids = ids[: len(ids) // (LENGTH - 1) * (LENGTH - 1)].view(-1, LENGTH - 1)
    with torch.inference_mode():
        logits = model(input_ids=torch.nn.functional.pad(ids, (1, 0), value=BOS)).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")


def test_what_was_removed_is_missed_where_the_losses_of_both_models_say(either: Path) -> None:
    held = either.parent / "held.txt"
    plan = {ffn.name: set(ffn.removed) for ffn in read_plan(RunFolder(either).plan).ffns}
    first = next(iter(plan))
    label = "0.0" if "experts" in first else "0"
    kept = f"{label}:{min(set(range(16)) - plan[first])}"
    found = kvprune.inspect(either, removed=True, held_out=str(held), slots=[kept])
    dense, slim = (losses_of(folder, held.read_text()) for folder in (either.parent / "dense", either / "model"))
    removed = found["removed"]
    assert removed["text"] == [str(held)]
    assert removed["loss"] == pytest.approx({"dense": float(dense.mean()), "slim": float(slim.mean())}, abs=1e-5)
    highest = (slim - dense).flatten().sort(descending=True).values[: len(removed["tokens"])].tolist()
    assert [token["rise"] for token in removed["tokens"]] == pytest.approx(highest, abs=1e-4)
    for token in removed["tokens"]:
        place = divmod(token["offset"], LENGTH - 1)
        assert (token["document"], token["token"]) == (str(held), held.read_text()[token["offset"]])
        assert token["position"] == place[1] + 1
        assert [token["dense"], token["slim"]] == pytest.approx([float(dense[place]), float(slim[place])], abs=1e-4)
        assert token["slots"]
        for item in token["slots"]:
            assert item["slot"] in plan[item["ffn"]]
    cards = {card["id"]: card for card in found["slots"]}
    blamed = {item["id"]: (item["ffn"], item["slot"]) for token in removed["tokens"] for item in token["slots"]}
    assert list(cards) == [kept, *removed["slots"]]
    assert set(removed["slots"]) <= blamed.keys()
    assert len(removed["slots"]) == min(50, len(blamed))
    assert all((cards[name]["ffn"], cards[name]["slot"]) == blamed[name] for name in removed["slots"])
    assert {name: card["removed"] for name, card in cards.items()} == {name: name != kept for name in cards}
    assert all(card.keys() == BASE | TRIGGERS | VALUES for card in cards.values())
    assert all(("." in name) == ("." in label) for name in cards)
    assert "what pruning forgets" in render(found)


def test_a_calibrated_run_has_removed_nothing_yet(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("plan.json", "model", "eval"))
    some = ["0:0", "1:47"]
    before = kvprune.inspect(tmp_path / "run", slots=some, sections=["firing"])
    after = kvprune.inspect(run, slots=some, sections=["firing"])
    removed = [set(ffn.removed) for ffn in read_plan(RunFolder(run).plan).ffns]
    assert [card["removed"] for card in before["slots"]] == [None, None]
    assert [card["removed"] for card in after["slots"]] == [0 in removed[0], 47 in removed[1]]


def test_all_slots_are_in_a_file_in_order_as_one_by_one(either: Path, tmp_path: Path) -> None:
    file = tmp_path / "slots.jsonl"
    found = kvprune.inspect(either, all_slots=file)
    first = file.read_bytes()
    head, *cards = map(json.loads, first.decode().splitlines())
    assert head == {key: found[key] for key in HEAD}
    assert found["slots"] == []
    layout = find_layout(AutoModelForCausalLM.from_pretrained(either.parent / "dense").config)
    assert [(card["ffn"], card["slot"]) for card in cards] == [
        (ffn.name, index) for ffn in layout.ffns for index in range(ffn.width)
    ]
    some = cards[::5]
    assert_alike(kvprune.inspect(either, slots=[card["id"] for card in some])["slots"], some)
    assert_alike(kvprune.inspect(either, slots=[some[7]["id"]])["slots"], [some[7]])
    assert kvprune.inspect(either, all_slots=file) == found
    assert file.read_bytes() == first


def test_a_page_holds_the_same_data_and_top_slots_of_each_layer(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    found = kvprune.inspect(run, html=file)
    embedded = Parsed(file.read_text(encoding="utf-8")).texts["script"][0]
    assert json.loads(embedded) == found
    assert [card["id"][0] for card in found["slots"]] == ["0"] * 16 + ["1"] * 16


@pytest.mark.parametrize("option", ["html", "all_slots"])
def test_only_files_of_its_own_are_written_over(option: str, run: Path, tmp_path: Path) -> None:
    def write(file: Path, page: bool = option == "html") -> None:
        kvprune.inspect(run, sections=["firing"], html=file if page else None, all_slots=None if page else file)

    file = tmp_path / "file"
    for content in ("<!doctype html>\n<title>my thesis</title>", '{"format": "mine"}\n', ""):
        file.write_text(content)
        with pytest.raises(KvpruneError, match="exists and was not written by kvprune inspect"):
            write(file)
        assert file.read_text() == content
    file.unlink()
    write(file)
    first = file.read_bytes()
    file.write_bytes(first + b"more")
    write(file)
    assert file.read_bytes() == first
    for wrong in (file, tmp_path):
        with pytest.raises(KvpruneError, match="exists and was not written"):
            write(wrong, option != "html")
    with pytest.raises(KvpruneError, match="there is no folder"):
        write(tmp_path / "gone" / "file")
    assert list(tmp_path.iterdir()) == [file]


SECTIONS = {
    ("firing",): ({"firing"}, set()),
    ("triggers",): (set(), TRIGGERS),
    ("values",): ({"coherence"}, VALUES),
    ("layers",): ({"lens"}, set()),
    ("values", "triggers"): ({"coherence"}, TRIGGERS | VALUES),
    ("firing", "triggers", "values", "layers"): ({"firing", "coherence", "lens"}, TRIGGERS | VALUES),
}


@pytest.mark.parametrize("sections", SECTIONS)
def test_only_what_is_asked_for_is_told(sections: tuple[str, ...], run: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, card = SECTIONS[sections]
    with caplog.at_level("INFO", "kvprune"):
        found = kvprune.inspect(run, sections=sections, slots=["1:3"])
    assert bool(caplog.messages) == (sections != ("firing",))  # which needs no pass, so there is no progress
    assert found.keys() == {*HEAD, "slots"} | data
    assert found["slots"][0].keys() == BASE | card
    whole = kvprune.inspect(run, slots=["1:3"])
    assert_alike({key: found[key] for key in data}, {key: whole[key] for key in data})
    assert_alike([{key: found["slots"][0][key] for key in card}], [{key: whole["slots"][0][key] for key in card}])
    assert "fires on" in render(found)


def test_no_batch_size_changes_the_data(either: Path) -> None:
    one, other = (kvprune.inspect(either, removed=True, top=12, options=Options(batch_size=size)) for size in (1, 7))
    assert_alike(one, other)


def test_a_model_that_is_not_walked_has_the_same_cards(either: Path, request: pytest.FixtureRequest) -> None:
    walked = kvprune.inspect(either, removed=True, top=12)
    request.getfixturevalue("cannot_walk")
    assert_alike(kvprune.inspect(either, removed=True, top=12), walked)


def test_json_is_one_object_on_stdout(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", str(run), "--slot", "0:7", "--layer", "1", "--top", "3", "--score", "fluctuation"]
    assert main([*arguments, "--removed", "--html", str(tmp_path / "page.html"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == kvprune.inspect(run, slots=["0:7"], layer=1, top=3, score="fluctuation", removed=True)
    assert [card["id"][:2] for card in told["slots"][:4]] == ["0:", "1:", "1:", "1:"]
    assert told["removed"]["text"] == ["builtin-task"]
    assert main([*arguments, "--only", "firing,values", "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("fires on") == 4
    assert "triggers" not in out


def test_what_is_asked_for_is_checked_before_a_pass(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for slots, layer, score in ((["9:9"], 0, None), ([], 9, None), ([], 0, "greedy")):
        with caplog.at_level("INFO", "kvprune"), pytest.raises(KvpruneError):
            kvprune.inspect(run, removed=True, slots=slots, layer=layer, score=score)
    assert caplog.messages == []


Case = Callable[[Path], list[str]]  # of a folder with a run, its model and its texts: what follows `kvprune inspect`


def of_run(*arguments: str) -> Case:
    return lambda folder: [str(folder / "run"), *arguments]


def without(*names: str) -> Case:
    def prepare(folder: Path) -> list[str]:
        for name in names:
            place = folder / "run" / name
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        return [str(folder / "run"), "--removed"]

    return prepare


def other_text(folder: Path) -> list[str]:
    (folder / "text.txt").write_text(words(400), encoding="utf-8")
    return [str(folder / "run")]


def of_model(*arguments: str) -> Case:
    return lambda folder: [str(folder / "dense"), *(f"--set={each}" for each in SMALL), *arguments]


CASES: dict[str, tuple[Case, str]] = {
    "slot that is not there": (of_run("--slot", "1:48"), "--slot 1:48: the index of a slot of 1 is 0 to 47, got '48'"),
    "slot without an index": (of_run("--slot", "1"), "--slot 1: no such FFN; they are 0:INDEX to 1:INDEX"),
    "layer that is not there": (of_run("--layer", "2"), "--layer 2: the model has layers 0 to 1"),
    "unknown section": (of_run("--only", "firing,magic"), "--only magic: should be of firing, triggers, values"),
    "text for nothing": (of_run("--held-out", "builtin"), "--held-out: says on which text --removed looks"),
    "text that is missing": (of_run("--removed", "--held-out", "gone.txt"), "--held-out: gone.txt: no such file"),
    "own text as another": (of_run("--removed", "--held-out", "self"), "--held-out self: name a text"),
    "unknown score": (of_run("--layer", "0", "--score", "magic"), "--score magic: should be one of wanda, fire_rate"),
    "matrices that were not collected": (of_run("--top", "3", "--score", "greedy"), "calibrate.collect=[counts, gram]"),
    "gradients that were not collected": (of_run("--top", "3", "--score", "taylor"), "statistics have no gradients"),
    "recipe of a run": (of_run("--set", "calibrate.tokens=64"), "own recipe; only dtype, to read it in, can be set"),
    "nothing removed from a model": (of_model("--removed"), "is no run folder (no recipe.yaml)"),
    "plan of a model": (of_model("--set", "plan.score=random"), "changes calibrate.* and dtype of a model only"),
    "score of a model": (of_model("--top", "3", "--score", "reconstruction"), "calibrate.collect=[counts, gram]"),
    "unknown key": (of_model("--set", "calibrate.budget=1"), "calibrate.budget: unknown key"),
    "neither a run nor a model": (lambda folder: [str(folder)], "neither a run folder (no recipe.yaml) nor"),
    "model that is missing": (lambda folder: ["./gone"], "no such file or folder"),
    "little memory": (of_run("--memory", "1KB"), "raise --memory"),
}  # fmt: skip
# These change what is there.
BROKEN: dict[str, tuple[Case, str]] = {
    "run that is not exported": (without("model"), "export is missing; run: kvprune export "),
    "run that is not planned": (without("model", "plan.json"), "plan is missing; run: kvprune plan "),
    "run that is not calibrated": (without("stats.safetensors"), "calibrate is missing; run: kvprune calibrate "),
    "text that has changed": (other_text, "text.txt has changed; run: kvprune calibrate "),
}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_refused(folder: Path, arguments: list[str], fragment: str) -> None:
    """It is one line and status 1, and no file is made or changed."""
    before, said, out = contents(folder), io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        status = main(["inspect", *arguments, "--all", str(folder / "slots.jsonl"), "-q"])
    assert (status, out.getvalue()) == (1, "")
    assert said.getvalue().startswith("error: ")
    assert said.getvalue().count("\n") == 1, said.getvalue()
    assert fragment in said.getvalue()
    assert contents(folder) == before


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_nothing_is_written(name: str, run: Path) -> None:
    case, fragment = CASES[name]
    assert_refused(run.parent, case(run.parent), fragment)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_one_line_with_the_way_out(name: str, tmp_path: Path) -> None:
    case, fragment = BROKEN[name]
    made_run(tmp_path, "llama", whole=False)
    assert_refused(tmp_path, case(tmp_path), fragment)


@pytest.mark.parametrize("top", ["0", "-1", "many"])
def test_a_number_that_is_none_is_wrong_usage(top: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(run), "--top", top])
    assert end.value.code == 2
    assert "argument --top" in capsys.readouterr().err
    with pytest.raises(KvpruneError, match="--top 0: should be 1 or more"):
        kvprune.inspect(run, top=0)
