"""Reproducing: the same recipe gives the same bytes, and where it does not, what differs is named."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import kvprune
from kvprune import pipeline, reproducing
from kvprune.artifacts import RunFolder, file_names, read_json, read_meta
from kvprune.cli import main
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import open_checkpoint
from kvprune.options import DEFAULT
from kvprune.recipe import make_recipe
from kvprune.reproducing import differing
from tests.conftest import recipe_data, save_model, words
from tests.hub import SHA, Hub, served_here
from tests.hub_uploads import TOKEN

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "refit": {"refit": {"method": "sequential"}},
    "by layer": {"plan": {"budget": {"keep": 0.75}, "round_to": 4, "score": "taylor", "allocation": "global"}},
    "own samples": {"calibrate": {"text": "self", "tokens": 256, "sequence_length": 32}},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model `dense` and a text `text.txt`: local ones are found by their names."""
    monkeypatch.chdir(tmp_path)
    save_model(Path("dense"))
    Path("text.txt").write_text(words(500), encoding="utf-8")


def exported(kind: str = "plain", model: str = "dense") -> RunFolder:
    """An exported run."""
    kvprune.calibrate(make_recipe(recipe_data(Path(model), Path("text.txt")) | KINDS[kind]), "run")
    kvprune.plan("run")
    kvprune.refit("run")
    kvprune.export("run")
    return RunFolder(Path("run"))


@pytest.fixture
def run() -> RunFolder:
    return exported()


def refused(model: str | Path = "run/model", *arguments: Any, **values: Any) -> str:
    """The line with which `reproduce` refuses."""
    with pytest.raises(KvpruneError) as error:
        kvprune.reproduce(model, *arguments, **values)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def change(run: RunFolder, **values: Any) -> None:
    """Write other values into the kvprune.json."""
    file = run.model / "kvprune.json"
    file.write_text(json.dumps(read_json(file) | values), encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_recipe_gives_the_same_bytes(kind: str) -> None:
    run = exported(kind)
    found = kvprune.reproduce("run/model")
    assert found == {
        "model": "run/model",
        "commit": None,
        "run": None,
        "identical": True,
        "tensors": len(open_checkpoint(run.model).tensors),
        "differing": [],
        "reasons": [],
    }
    assert not list((Path(os.environ["KVPRUNE_CACHE"]) / "reproduce").iterdir())
    assert kvprune.reproduce("run")["identical"] is True


@pytest.mark.parametrize("kind", ["plain", "refit"])
def test_one_weight_that_was_changed_is_named(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = exported(kind)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(run.model / "model.safetensors")
    tensors[name][3, 5] += 1e-6
    save_file(tensors, run.model / "model.safetensors", metadata={"format": "pt"})
    found = kvprune.reproduce("run/model")
    assert (found["identical"], found["differing"]) == (False, [name])
    assert main(["reproduce", "run/model", "-q"]) == 1
    assert capsys.readouterr().out == f"run/model: not identical: 1 of 21 tensors differ, {name} first\n"


def test_tensors_of_another_shape_type_or_name_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducing, "WRITE_BLOCK", 16)
    ours = {name: torch.arange(40.0).reshape(8, 5) for name in ("same", "shape", "type", "last", "ours")}
    theirs = {name: tensor.clone() for name, tensor in ours.items() if name != "ours"} | {"theirs": torch.ones(3)}
    theirs["shape"] = theirs["shape"].reshape(5, 8)
    theirs["type"] = theirs["type"].view(torch.int32)
    theirs["last"][-1, -1] += 1
    for folder, tensors in (("one", ours), ("two", theirs)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
    found = differing(open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "two"))
    assert set(found) == {"shape", "type", "last", "ours", "theirs"}
    assert found[-1] == "theirs"


def test_the_new_run_stays_where_a_folder_is_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "run/model", "-o", "again", "-q"]) == 0
    assert capsys.readouterr().out == "run/model: identical: all 21 tensors, byte for byte\nthe new run is again\n"
    same = [name for name in file_names(run.model) if name != "kvprune.json"]
    assert all((run.model / name).read_bytes() == Path("again/model", name).read_bytes() for name in same)
    assert refused("run/model", "again") == "again: was reproduced already; use another -o"


def test_no_folder_of_the_users_is_touched(run: RunFolder) -> None:
    Path("mine").mkdir()
    Path("mine/precious.txt").write_text("mine", encoding="utf-8")
    Path("file").touch()
    before = {name: (run.path / name).read_bytes() for name in file_names(run.path)}
    for folder in ("mine", "file", "run"):
        said = f"{folder}: exists and is not a run of kvprune reproduce of this model; use another -o"
        assert refused("run/model", folder) == said
    assert os.listdir("mine") == ["precious.txt"]  # noqa: PTH208
    assert {name: (run.path / name).read_bytes() for name in file_names(run.path)} == before


def test_what_was_interrupted_goes_on(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "export", stop)
        kvprune.reproduce("run/model", "again")
    times = Path("again/stats.safetensors").stat().st_mtime_ns
    assert kvprune.reproduce("run/model", "again")["identical"] is True
    assert Path("again/stats.safetensors").stat().st_mtime_ns == times


def test_what_is_not_as_it_was_is_told(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    about = read_json(run.model / "kvprune.json")
    versions = about["made_with"] | {"torch": "0.1"}
    how = about["calibration"] | {"run": about["calibration"]["run"] | {"device": "cuda", "batch_size": 3}}
    model = about["inputs"] | {"model": about["inputs"]["model"] | {"model.safetensors": [7, 7]}}
    change(run, made_with=versions, calibration=how, inputs=model)
    assert main(["reproduce", "run/model"]) == 0
    told = capsys.readouterr().err
    assert f"reproduce: torch was 0.1 and is {about['made_with']['torch']}\n" in told
    assert "reproduce: device was cuda and is cpu (--device cuda)\n" in told
    assert "reproduce: batch_size was 3 and is 8 (--batch-size 3)\n" in told
    assert main(["reproduce", "run/model", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["reasons"][-1] == "the base model's model.safetensors is another"


def test_the_versions_that_trained_are_compared_too(run: RunFolder) -> None:
    about = read_json(run.model / "kvprune.json")
    now = about["made_with"]["torch"]
    trained = {"made_with": about["made_with"] | {"torch": "0.1"}}
    assert reproducing._differences(about, DEFAULT) == []
    assert reproducing._differences(about | {"recover": trained}, DEFAULT) == [f"torch was 0.1 and is {now}"]


def test_another_base_model_gives_other_tensors_and_is_told(run: RunFolder) -> None:
    tensors = load_file("dense/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] += 0.01
    save_file(tensors, "dense/model.safetensors", metadata={"format": "pt", "note": "changed"})
    found = kvprune.reproduce("run/model")
    assert found["differing"][0] == "model.layers.0.mlp.up_proj.weight"
    assert found["reasons"] == ["the base model's model.safetensors is another"]


def test_what_is_elsewhere_can_be_named(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    shutil.move("dense", "there/base")
    shutil.move("text.txt", "there/words.txt")
    said = "run/model: was made from dense, which is not published and not here; say where it is: --set model=PATH"
    assert refused() == said
    model = "model=there/base"
    assert "was made from text.txt, which is not published and not here; " in refused(overrides=[model])
    overrides = [model, "calibrate.text=there/words.txt"]
    assert kvprune.reproduce("run/model", overrides=overrides)["identical"] is True
    for other in ("plan.budget.keep=0.5", "calibrate.tokens=256"):
        assert refused(overrides=[other]).startswith(f"--set {other}: kvprune reproduce runs the recipe as it is; ")


def test_only_where_local_texts_are_changes(tmp_path: Path) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"words": "{words(60)}"}}\n' for _ in range(9)), encoding="utf-8")
    text = [{"source": "text.txt", "weight": 2.0}, {"source": "builtin"}, {"source": "rows.jsonl", "field": "words"}]
    data = recipe_data(Path("dense"), Path("text.txt"))
    data["calibrate"] |= {"text": text}
    kvprune.calibrate(make_recipe(data), "run")
    kvprune.plan("run")
    kvprune.export("run")
    Path("there").mkdir()
    for name in ("text.txt", "rows.jsonl"):
        Path(name).rename(Path("there", name))
    said = refused()
    assert said.endswith("say where it is: --set 'calibrate.text=[PATH of text.txt, PATH of rows.jsonl]'")
    assert "a path for each of these texts, in their order: text.txt, rows.jsonl" in refused(
        overrides=["calibrate.text=there/text.txt"]
    )
    both = "calibrate.text=[there/text.txt, there/rows.jsonl]"
    assert kvprune.reproduce("run/model", overrides=[both])["identical"] is True


def test_own_samples_are_compared_before_they_are_counted() -> None:
    run = exported("own samples")
    change(run, calibration=read_json(run.model / "kvprune.json")["calibration"] | {"tokens": "0" * 64})
    assert "calibrate.text gives other tokens here than were counted" in refused("run/model", "again")
    assert Path("again/self_samples.json").is_file()
    assert not Path("again/stats.safetensors").exists()


def test_another_text_is_told_before_anything_is_counted(run: RunFolder) -> None:
    Path("text.txt").write_text(words(400)[::-1], encoding="utf-8")
    assert "run/model: calibrate.text gives other tokens here than were counted" in refused("run/model", "again")
    assert not Path("again").exists()


def test_what_does_not_say_how_it_was_made_is_refused(run: RunFolder) -> None:
    assert refused("dense").startswith("dense: holds no kvprune.json: kvprune did not make it; ")
    about = read_json(run.model / "kvprune.json")
    for key in ("recipe", "calibration"):
        change(run, **{key: None})
        assert refused() == f"run/model: its kvprune.json has no {key}: it does not say how to make it again"
        change(run, **about)
    change(run, version=1)
    assert "is of another version of kvprune" in refused()
    change(run, version=about["version"], recipe=about["recipe"] | {"dtype": "float8"})
    assert refused().startswith("run/model: kvprune.json: recipe: dtype: ")
    (run.model / "kvprune.json").write_text("{", encoding="utf-8")
    assert "kvprune.json: not valid JSON" in refused()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with the model org/base, that this process talks to."""
    files = {name: Path("dense", name).read_bytes() for name in file_names(Path("dense"))}
    files["README.md"] = b"---\nlicense: apache-2.0\npipeline_tag: text-generation\n---\n"
    with served_here(Hub({"models/org/base": files}), monkeypatch, tmp_path / "hub") as served:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def test_a_published_model_is_made_again_from_the_very_commit_of_its_base(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(model="org/base")
    kvprune.publish("run", "org/slim")
    card = ModelCard.load("org/slim").data
    assert (card.base_model, card.base_model_relation, card.license) == ("org/base", "finetune", "apache-2.0")
    tensors = load_file("dense/model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, "dense/model.safetensors", metadata={"format": "pt"})
    changed = Path("dense/model.safetensors").read_bytes()
    hub.commit("models/org/base", hub.files["models/org/base"] | {"model.safetensors": changed})
    shutil.rmtree("run")
    found = kvprune.reproduce("org/slim", "again")
    assert (found["identical"], found["commit"]) == (True, hub.head("models/org/slim"))
    assert read_meta(Path("again/stats.safetensors"))["model"]["commit"] == SHA
    assert main(["reproduce", "org/slim", "-q"]) == 0
    assert capsys.readouterr().out == "org/slim: identical: all 21 tensors, byte for byte\n"
    found = kvprune.reproduce("org/slim", overrides=["model=org/base"])
    head = hub.head("models/org/base")
    assert found["differing"] == ["model.norm.weight"]
    assert found["reasons"] == [f"the base model was of commit {SHA} and is of {head}"]


def test_what_is_not_on_the_hub_is_one_line(hub: Hub) -> None:
    assert refused("org/other").startswith("model: org/other is not on the Hub, or private")
    assert refused("org/base").startswith("org/base: holds no kvprune.json: ")
    assert hub.downloads == []
    assert refused("./nothing").startswith("model: ./nothing: no such file or folder, and not a Hub name")
