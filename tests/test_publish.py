"""Publishing: what goes up is what was exported, with a card that the Hub reads; nothing else ever goes up."""

import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import kvprune
from kvprune import publishing
from kvprune.artifacts import RunFolder, digest, file_names, read_json, write_tensors
from kvprune.card import model_card, unpublished
from kvprune.cli import main
from kvprune.errors import KvpruneError, StaleError
from kvprune.publishing import render
from kvprune.recipe import make_recipe
from kvprune.results.figures import _dataset
from kvprune.stages.export import calibration
from tests.conftest import recipe_data, save_model, words
from tests.hub import Hub, served_here
from tests.hub_uploads import TOKEN

NAME = "org/slim"
REPO = f"models/{NAME}"
BASE_CARD = "---\nlicense: mit\nlanguage: [en]\n---\n# Base\n"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated run of a tiny model, not to be changed."""
    place = tmp_path_factory.mktemp("evaluated")
    (place / "text.txt").write_text(words(500), encoding="utf-8")
    dense = save_model(place / "dense", max_shard_size="40KB")
    (dense / "README.md").write_text(BASE_CARD, encoding="utf-8")
    (dense / "LICENSE").write_text("Do as you like.", encoding="utf-8")
    (dense / "additional_chat_templates").mkdir()
    (dense / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}", encoding="utf-8")
    (place / "tasks").mkdir()
    sums = [{"q": f"{at}+1=", "a": str(at + 1)} for at in range(12)]
    (place / "tasks" / "rows.jsonl").write_text("\n".join(map(json.dumps, sums)), encoding="utf-8")
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place / "tasks" / "rows.jsonl")}},
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }
    (place / "tasks" / "sums.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    data = recipe_data(dense, place / "text.txt")
    data["evaluate"] |= {"limit": 12, "tasks": ["builtin", "sums"], "include_path": str(place / "tasks")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPRUNE_CACHE", str(place / "cache"))
        kvprune.run(make_recipe(data), place / "run")
    return place / "run"


@pytest.fixture
def run(evaluated: Path, tmp_path: Path) -> RunFolder:
    """A copy of the evaluated run."""
    return RunFolder(Path(shutil.copytree(evaluated, tmp_path / "run")))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty Hub that this process talks to, with a token that may write to org."""
    with served_here(Hub({}), monkeypatch, tmp_path / "hub") as served:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def refused(run: RunFolder, name: str = NAME, **values: Any) -> str:
    """The line with which `publish` refuses."""
    with pytest.raises(KvpruneError) as error:
        kvprune.publish(run.path, name, **values)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_what_goes_up_is_what_was_exported_and_the_folder_stays_as_it_is(run: RunFolder, hub: Hub) -> None:
    before = {name: digest(run.model / name) for name in file_names(run.model)}
    found = kvprune.publish(run.path, NAME)
    there = dict(hub.files[REPO])
    assert there.pop("README.md").decode() == found["card"]
    there.pop(".gitattributes")
    assert there == {name: (run.model / name).read_bytes() for name in before if name != "README.md"}
    assert {"LICENSE", "BASE_README.md", "additional_chat_templates/tool.jinja"} <= set(there)
    assert found["files"] == {name: len(hub.files[REPO][name]) for name in before}
    assert (found["url"], found["commit"]) == (f"{hub.endpoint}/{NAME}", hub.head(REPO))
    assert {name: digest(run.model / name) for name in file_names(run.model)} == before
    assert REPO not in hub.writing.private


def test_the_card_says_what_the_hub_reads(run: RunFolder, hub: Hub) -> None:
    kvprune.publish(run.path, NAME)
    data = ModelCard.load(NAME).data
    assert (data.license, data.language, data.library_name) == ("mit", ["en"], "transformers")
    assert (data.pipeline_tag, data.tags) == ("text-generation", ["kvprune", "pruned"])
    assert data.base_model is None  # a folder is no model of the Hub
    tasks = read_json(run.results)["slim"]["tasks"]
    assert [(result.dataset_type, result.metric_value) for result in data.eval_results] == [
        (task, round(value, 6)) for task, metrics in tasks.items() for value in metrics.values()
    ]
    dense = read_json(run.results)["dense"]["tasks"]["builtin"]["token_perplexity"]
    first = data.eval_results[0]
    assert (first.metric_type, first.metric_name) == ("perplexity", f"token perplexity (dense model: {dense:.4g})")
    ModelCard.load(NAME).validate()
    assert hub.writing.calls.count("/api/validate-yaml") == 2


def test_the_card_says_what_people_read(run: RunFolder, hub: Hub) -> None:
    for name in ("dense", "slim"):  # as lm-eval has it with bootstrap_iters
        file = run.eval / name / "sums.json"
        output = read_json(file)
        output["lm_eval"]["results"]["sums"]["acc_stderr,none"] = 0.125
        file.write_text(json.dumps(output), encoding="utf-8")
    card = kvprune.publish(run.path, NAME)["card"]
    about = read_json(run.model / "kvprune.json")
    assert f'from_pretrained("{NAME}")' in card
    assert f"kvprune reproduce {NAME}\n" in card
    assert yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0]) == about["recipe"]
    assert about["calibration"]["tokens"] in card
    for key in ("FFN slots", "FFN parameters", "parameters", "bytes of weights"):
        assert f"| {key} | " in card
    row = next(line for line in card.splitlines() if "builtin: token perplexity" in line)
    assert row.count("× ") == row.count("[") == 1
    row = next(line for line in card.splitlines() if "sums: acc" in line)
    assert (row.count(" ± 0.12 "), row.count("["), row.count("× ")) == (2, 1, 0)
    assert "±: standard error" in card
    assert "95 % interval" in card
    assert "Not published are `dense` and `text.txt`" in card
    assert str(run.path.parent) not in card


def test_the_card_follows_the_evaluation_and_not_the_export(run: RunFolder) -> None:
    kvprune.evaluate(run.path, overrides=["evaluate.tasks=[builtin]", "evaluate.limit=11"])
    assert read_json(run.model / "kvprune.json")["recipe"]["evaluate"]["limit"] == 12
    card = kvprune.publish(run.path, NAME, dry_run=True)["card"]
    assert "the first 11 documents" in card
    assert yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])["evaluate"]["limit"] == 11


def test_texts_from_the_hub_are_told_as_data_sets(run: RunFolder, tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "counted")
    text = {"org/texts": None, "self": None, "builtin": "digest", "/a/text.txt": {"text.txt": [1, 2]}}
    run_about = read_json(run.model / "kvprune.json")["calibration"]["run"]
    meta = {"inputs": {"tokens": "digest", "text": text}, "counted": 4, "run": run_about}
    write_tensors(place.stats, {}, meta)
    about = read_json(run.model / "kvprune.json")
    about["calibration"] |= calibration(place) or {}
    about["recipe"]["calibrate"]["text"] = [{"source": name, "weight": 1.0} for name in ("org/texts", "self")]
    assert ModelCard(model_card(about, run.model)).data.datasets == ["org/texts"]
    assert unpublished(about) == {"model": ["dense"]}


def test_a_run_that_was_not_evaluated_is_published_and_the_card_says_so(
    run: RunFolder, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run.eval)
    with caplog.at_level(logging.WARNING, "kvprune"):
        found = kvprune.publish(run.path, NAME)
    assert "the evaluation is missing" in caplog.text
    assert found["evaluated"] is False
    assert "It was not evaluated" in hub.files[REPO]["README.md"].decode()
    assert ModelCard(found["card"]).data.eval_results is None


def test_an_evaluation_of_something_else_is_not_told(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    data = read_json(run.results)
    data["provenance"]["recipe"]["evaluate"]["limit"] = 11
    run.results.write_text(json.dumps(data), encoding="utf-8")
    with caplog.at_level(logging.WARNING, "kvprune"):
        assert kvprune.publish(run.path, NAME, dry_run=True)["evaluated"] is False
    assert "the evaluation is stale (evaluate.limit was 11 and is now 12)" in caplog.text


def test_results_without_their_samples_are_told_without_intervals(run: RunFolder) -> None:
    for file in run.eval.rglob("*.samples.jsonl"):
        file.unlink()
    card = kvprune.publish(run.path, NAME, dry_run=True)["card"]
    assert "builtin: token perplexity" in card
    assert "interval" not in card


def test_a_dry_run_asks_the_hub_nothing(run: RunFolder, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    found = kvprune.publish(run.path, NAME, dry_run=True)
    assert found["commit"] is None
    assert found["files"]["model.safetensors.index.json"] > 0
    assert (hub.files, hub.writing.calls, hub.downloads) == ({}, [], [])


def test_private_is_private_and_stays_so(run: RunFolder, hub: Hub) -> None:
    assert kvprune.publish(run.path, NAME, private=True)["private"] is True
    assert hub.writing.private == {REPO}
    assert kvprune.publish(run.path, NAME)["private"] is True


def test_a_public_repository_is_not_taken_for_a_private_one(run: RunFolder, hub: Hub) -> None:
    kvprune.publish(run.path, NAME)
    head = hub.head(REPO)
    assert "exists and is public: make it private in its settings first" in refused(run, private=True)
    assert hub.head(REPO) == head


def test_the_same_again_makes_no_commit(run: RunFolder, hub: Hub) -> None:
    first = kvprune.publish(run.path, NAME)
    assert kvprune.publish(run.path, NAME) == first


def test_another_export_of_the_model_replaces_the_files_of_the_first(run: RunFolder, hub: Hub) -> None:
    kvprune.publish(run.path, NAME)
    about = json.loads(hub.files[REPO]["kvprune.json"])
    about["files"]["model-00009-of-00009.safetensors"] = 3
    hub.commit(
        REPO,
        hub.files[REPO]
        | {
            "kvprune.json": json.dumps(about).encode(),
            "model-00009-of-00009.safetensors": b"old",
            "notes.md": b"the user's own",
        },
    )
    found = kvprune.publish(run.path, NAME)
    assert found["removed"] == ["model-00009-of-00009.safetensors"]
    assert set(hub.files[REPO]) == {*found["files"], ".gitattributes", "notes.md"}


def test_a_card_of_the_users_own_is_told_before_it_is_replaced(run: RunFolder, hub: Hub) -> None:
    kvprune.publish(run.path, NAME)
    hub.commit(REPO, hub.files[REPO] | {"README.md": b"the user's own"})
    drafts = []

    def agreed(draft: dict[str, Any]) -> bool:
        drafts.append(draft)
        return False

    assert refused(run, confirm=agreed).endswith("nothing was uploaded")
    assert drafts[0]["replaced"] == ["README.md"]
    assert "README.md (replaced) " in render(drafts[0])
    assert hub.files[REPO]["README.md"] == b"the user's own"


@pytest.mark.parametrize(
    ("path", "told"),
    [("org/set", True), ("squad", True), ("json", False), ("/home/me/data", False), ("./mine", False), ("here", False)],
)
def test_only_data_sets_of_the_hub_are_told(
    path: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    output = {"configs": {"sums": {"dataset_path": path, "dataset_name": None, "test_split": "test"}}}
    found = _dataset(output, "sums", "acc")
    assert found == ({"dataset": path, "config": None, "split": "test"} if told else {})


@pytest.mark.parametrize("files", [{}, {".gitattributes": b""}])
def test_an_empty_repository_is_filled(run: RunFolder, hub: Hub, files: dict[str, bytes]) -> None:
    hub.files[REPO] = files
    kvprune.publish(run.path, NAME)
    assert "kvprune.json" in hub.files[REPO]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": b"{}", "a.bin": b""}, "holds other files (a.bin first) and no kvprune.json; use another name"),
        ({"kvprune.json": b'{"model": {"title": "gpt2"}}'}, "holds a slim gpt2, and this is a slim dense; use another"),
        ({"kvprune.json": b"[]"}, "holds a slim None, and this is a slim dense; use another name"),
        ({"kvprune.json": b'{"model": {"title": "dense"}}'}, "a slim dense made from other files or another commit of"),
    ],
)
def test_a_repository_of_something_else_is_left_alone(
    run: RunFolder, hub: Hub, files: dict[str, bytes], said: str
) -> None:
    hub.files[REPO] = dict(files)
    assert said in refused(run)
    assert hub.files[REPO] == files


def test_without_a_token_the_way_to_one_is_told(run: RunFolder, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "_check_digests", lambda draft: pytest.fail("reads every byte"))
        assert refused(run) == "publish: no token of the Hub: set HF_TOKEN, or log in with: hf auth login"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the Hub does not know the token: " in refused(run)
    assert hub.files == {}


def test_without_rights_it_is_told(run: RunFolder, hub: Hub) -> None:
    said = refused(run, "other/slim")
    assert said.startswith("publish: other/slim: the token gives no right to write there: ")
    hub.files["models/other/slim"] = {}
    assert "the token gives no right to write there: " in refused(run, "other/slim")
    assert hub.files == {"models/other/slim": {}}


def test_a_connection_that_breaks_is_one_line_and_the_same_call_goes_on(run: RunFolder, hub: Hub) -> None:
    hub.writing.broken = ["/commit/"]
    said = refused(run)
    assert said.startswith(f"publish: {NAME}: the connection to the Hub broke: ")
    assert said.endswith("; run the same command again, and it goes on")
    assert set(hub.files[REPO]) == {".gitattributes"}
    found = kvprune.publish(run.path, NAME)
    assert set(hub.files[REPO]) == {*found["files"], ".gitattributes"}
    sent = [call for call in hub.writing.calls if call.startswith("/blobs/")]
    assert len(sent) == len(set(sent)) == len(hub.writing.blobs) > 1  # nothing twice


@pytest.mark.parametrize("call", ["/repos/create", "/commit/"])
def test_an_answer_that_is_lost_does_no_harm(run: RunFolder, hub: Hub, call: str) -> None:
    hub.writing.lost = [call]
    assert "the connection to the Hub broke: " in refused(run)
    head = hub.head(REPO)
    found = kvprune.publish(run.path, NAME)
    assert set(hub.files[REPO]) == {*found["files"], ".gitattributes"}
    assert (found["commit"] == head) == (call == "/commit/")


def test_a_hub_that_cannot_be_reached_is_one_line(run: RunFolder, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "the connection to the Hub broke: " in refused(run)


@pytest.mark.parametrize(
    "name", ["config.json", "BASE_README.md", "model-00001-of-00004.safetensors", "tokenizer.json"]
)
def test_a_file_that_was_edited_after_the_export_is_named(run: RunFolder, hub: Hub, name: str) -> None:
    file = run.model / name
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    assert refused(run).startswith(f"{file}: was edited after the export (its SHA-256 is another); move ")
    file.unlink()
    with pytest.raises(StaleError, match=rf"export is stale: model/{name} is missing or has changed"):
        kvprune.publish(run.path, NAME)
    assert hub.files == {}


def test_a_file_that_was_added_is_named(run: RunFolder, hub: Hub) -> None:
    (run.model / "secret.txt").write_text("mine", encoding="utf-8")
    assert refused(run) == f"{run.model / 'secret.txt'}: is not of the export; move it away"
    assert hub.files == {}


def test_a_card_that_was_edited_is_told_and_made_anew(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    (run.model / "README.md").write_text("mine", encoding="utf-8")
    with caplog.at_level(logging.WARNING, "kvprune"):
        assert "kvprune reproduce" in kvprune.publish(run.path, NAME, dry_run=True)["card"]
    assert "README.md was edited: the card is made anew, without it" in caplog.text
    assert (run.model / "README.md").read_text(encoding="utf-8") == "mine"


def test_what_is_not_exported_or_stale_is_not_published(run: RunFolder, hub: Hub) -> None:
    kvprune.plan(run.path, overrides=["plan.budget.keep=0.5"])
    with pytest.raises(StaleError, match=r"export is stale: plan\.json is another"):
        kvprune.publish(run.path, NAME)
    shutil.rmtree(run.model)
    with pytest.raises(StaleError, match=r"export is missing; run: kvprune export"):
        kvprune.publish(run.path, NAME)
    assert "not a run folder" in refused(RunFolder(run.path / "nothing"))
    assert hub.files == {}


@pytest.fixture
def unlicensed(make_folder: Callable[..., Path], text: Path, tmp_path: Path) -> RunFolder:
    """An exported run of a model that has no card."""
    run = tmp_path / "run"
    kvprune.calibrate(make_recipe(recipe_data(make_folder(), text)), run)
    kvprune.plan(run)
    kvprune.export(run)
    return RunFolder(run)


def test_a_licence_is_needed(unlicensed: RunFolder, hub: Hub) -> None:
    said = "publish: the card of the base model dense is not there: look its licence up and name it, as --licence mit"
    assert refused(unlicensed) == said
    assert "the Hub does not take it: " in refused(unlicensed, licence="my-own")
    assert hub.files.get(REPO, {}).keys() <= {".gitattributes"}
    kvprune.publish(unlicensed.path, NAME, licence="apache-2.0")
    assert ModelCard(hub.files[REPO]["README.md"].decode()).data.license == "apache-2.0"


def test_the_base_models_licence_stays(run: RunFolder) -> None:
    said = "publish: --licence apache-2.0: the base model dense is under mit; leave it out"
    assert refused(run, dry_run=True, licence="apache-2.0") == said
    assert kvprune.publish(run.path, NAME, dry_run=True, licence="mit")["commit"] is None


@pytest.mark.parametrize("name", ["slim", "a/b/c", "org/-slim", "org/", "/slim", "org/sl im", "org/slim.git", ""])
def test_a_name_that_the_hub_does_not_allow_is_refused(run: RunFolder, hub: Hub, name: str) -> None:
    assert refused(run, name).startswith(f"publish: {name}: ")
    assert hub.files == {}


def test_the_command_shows_asks_and_uploads(
    run: RunFolder, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["publish", str(run.path), NAME]) == 1
    assert "there is no terminal to ask on: add --yes, or --dry-run" in capsys.readouterr().err
    assert main(["publish", str(run.path), NAME, "--dry-run", "--private"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{NAME} (private)\n\nfile ")
    assert "# slim\n" in shown
    assert hub.files == {}

    def answer(text: str) -> int:
        keyboard = io.StringIO(f"{text}\n")
        keyboard.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", keyboard)
        return main(["publish", str(run.path), NAME])

    assert answer("n") == 1
    told = capsys.readouterr()
    assert f"Upload this to {NAME}? [y/N]" in told.err
    assert told.err.endswith(f"error: publish: {NAME}: not agreed to; nothing was uploaded\n")
    assert (hub.files, told.out) == ({}, "")
    assert answer("y") == 0
    assert capsys.readouterr().out.endswith(f"make it again with: kvprune reproduce {NAME}\n")
    assert main(["publish", str(run.path), NAME, "--yes", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["commit"] == hub.head(REPO)
