"""Where models come from: folders, files and a Hub, each error in one line with the way out."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprune.errors import KvpruneError
from kvprune.sources.models import (
    BUILTIN,
    ModelSource,
    fingerprint,
    load_config,
    load_model,
    load_tokenizer,
    one_line,
    open_model,
    pick_device,
)
from tests.conftest import WIDTH, save_model
from tests.hub import SHA, Hub, hub_environment, run_python, serve

OPEN = """
import json, sys
from kvprune.errors import KvpruneError
from kvprune.sources.models import fingerprint, open_model
name, commit, remote_code = sys.argv[1], sys.argv[2] or None, bool(sys.argv[3])
try:
    source = open_model(name, commit=commit, trust_remote_code=remote_code)
    files = sorted(str(file.relative_to(source.folder)) for file in source.folder.rglob("*"))
    same = fingerprint(name, source.commit) == source.fingerprint
    print(json.dumps({"files": files, "folder": str(source.folder), "title": source.title, "commit": source.commit,
                      "fingerprint": source.fingerprint, "same": same}))
except KvpruneError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def open_hub(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`open_model` in a process of its own, since the Hub's address is read at import."""

    def run(hub: Hub, name: str, commit: str = "", *, remote_code: bool = False) -> dict[str, Any]:
        env = hub_environment(tmp_path / "home", HF_ENDPOINT=hub.endpoint)
        result: dict[str, Any] = run_python(OPEN, name, commit, "yes" if remote_code else "", env=env)
        return result

    return run


WEIGHTS = b"weights" * 1000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b'{"version": "1.0"}',
    "README.md": b"A model.",
    "LICENSE": b"A licence.",
    ".gitattributes": b"*.safetensors filter=lfs",
    "pytorch_model.bin": b"pickled",
    "model.gguf": b"GGUF",
    "modeling_name.py": b"print('code')",
    "original/params.json": b'{"dim": 1}',
    "original/consolidated.safetensors": b"twice",
    "onnx/config.json": b'{"onnx": 1}',
}
FETCHED = ["LICENSE", "README.md", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve(Hub({"models/org/name": dict(FILES)})) as served:
        yield served


OpenHub = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("name", ["org/name", "org/name@main", f"org/name@{SHA}"])
def test_a_hub_model_is_pinned_and_only_what_is_needed_is_fetched(hub: Hub, open_hub: OpenHub, name: str) -> None:
    source = open_hub(hub, name)
    assert source["commit"] == SHA
    assert source["title"] == "org/name"
    assert source["fingerprint"] == {"commit": SHA}
    assert source["same"] is True
    assert source["files"] == sorted(hub.downloads) == FETCHED
    assert (Path(source["folder"]) / "model.safetensors").read_bytes() == WEIGHTS


def test_remote_code_is_fetched_where_it_is_trusted(hub: Hub, open_hub: OpenHub) -> None:
    source = open_hub(hub, "org/name", remote_code=True)
    assert source["files"] == sorted([*FETCHED, "modeling_name.py"])


def test_a_model_that_was_fetched_needs_no_network(hub: Hub, open_hub: OpenHub, tmp_path: Path) -> None:
    first = open_hub(hub, "org/name")
    fetched = list(hub.downloads)
    assert open_hub(hub, "org/name") == first
    assert hub.downloads == fetched
    env = hub_environment(tmp_path / "home", HF_HUB_OFFLINE="1")
    assert run_python(OPEN, "org/name", "", "", env=env) == first
    assert run_python(OPEN, "org/name", SHA, "", env=env) == first


def test_a_gated_model_names_the_page_of_its_licence(hub: Hub, open_hub: OpenHub) -> None:
    hub.gated.add("models/org/name")
    expected = "model: org/name is gated: accept its licence at https://huggingface.co/org/name and set HF_TOKEN"
    assert open_hub(hub, "org/name") == {"error": expected}


def test_a_missing_revision_is_named(hub: Hub, open_hub: OpenHub) -> None:
    expected = "model: org/name has no revision v9; see https://huggingface.co/org/name/commits"
    assert open_hub(hub, "org/name@v9") == {"error": expected}


def test_a_pinned_commit_that_is_gone_is_named(hub: Hub, open_hub: OpenHub) -> None:
    gone = "f" * 40
    expected = f"model: org/name has no revision {gone}; see https://huggingface.co/org/name/commits"
    assert open_hub(hub, "org/name", gone) == {"error": expected}


def test_a_missing_repository_is_named(hub: Hub, open_hub: OpenHub) -> None:
    expected = (
        "model: org/other is not on the Hub, or private (see https://huggingface.co/org/other and set HF_TOKEN), "
        "and no folder of that name is here"
    )
    assert open_hub(hub, "org/other") == {"error": expected}


def test_pickled_weights_are_never_fetched(hub: Hub, open_hub: OpenHub) -> None:
    hub.files["models/org/name"].pop("model.safetensors")
    expected = "model: org/name has no safetensors weights; kvprune never reads pickled ones (.bin, .pt)"
    assert open_hub(hub, "org/name") == {"error": expected}
    assert "pytorch_model.bin" not in hub.downloads


def test_a_download_that_breaks_is_one_line(hub: Hub, open_hub: OpenHub) -> None:
    hub.broken.add("model.safetensors")
    error = open_hub(hub, "org/name")["error"]
    assert error.startswith("model: org/name cannot be downloaded: ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("values", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
@pytest.mark.parametrize("name", ["org/name", "name", "org/name@v1"])
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, values: dict[str, str], name: str) -> None:
    repo = name.partition("@")[0]
    expected = (
        f"model: {repo} is not in the local cache and the Hub cannot be reached; "
        "check the name, the network and HF_HUB_OFFLINE"
    )
    assert run_python(OPEN, name, "", "", env=hub_environment(tmp_path, **values)) == {"error": expected}


def test_a_name_that_the_hub_does_not_allow_is_one_line(tmp_path: Path) -> None:
    result = run_python(OPEN, "-org/name", "", "", env=hub_environment(tmp_path, HF_HUB_OFFLINE="1"))
    assert result["error"].startswith("model: -org/name cannot be downloaded: ")
    assert len(result["error"].splitlines()) == 1


def refused(name: str | Path) -> str:
    """The line with which `open_model(name)` refuses."""
    with pytest.raises(KvpruneError) as error:
        open_model(str(name))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_a_local_folder_is_opened_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "dense")
    source = open_model(str(folder))
    assert (source.name, source.folder, source.title) == (str(folder), folder, "dense")
    assert (source.commit, source.note) == (None, "")
    assert source.fingerprint == fingerprint(str(folder), None)
    monkeypatch.chdir(folder)
    assert open_model(".").title == "dense"


def test_the_fingerprint_of_a_folder_changes_with_its_weights_and_config(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "dense")
    first = fingerprint(str(folder), None)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(first)
    (folder / "notes.txt").write_text("a", encoding="utf-8")
    assert fingerprint(str(folder), None) == first
    for name in first:
        stat = (folder / name).stat()
        os.utime(folder / name, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        assert fingerprint(str(folder), None) != first
        os.utime(folder / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert fingerprint(str(folder), None) == first
    (folder / "model.safetensors").write_bytes(b"short")
    assert fingerprint(str(folder), None) != first


@pytest.mark.parametrize(
    "name",
    [
        "./missing",
        "/missing/model",
        "~/missing",
        "../missing",
        "missing.gguf",
        "a/b/c",
        "two words",
        "org/name@",
        "@v1",
    ],
)
def test_what_is_neither_a_path_nor_a_hub_name_is_refused(name: str) -> None:
    assert refused(name) == f"model: {name}: no such file or folder, and not a Hub name like org/name[@revision]"


def test_a_name_longer_than_any_path_is_refused() -> None:
    assert "no such file or folder" in refused("./" + "m" * 300)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").startswith(f"model: {tmp_path / 'empty'}: no config.json in ")


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    for name, content in [("model.gguf", b"PK\x03\x04"), ("model.safetensors", WEIGHTS), ("empty.gguf", b"")]:
        file = tmp_path / name
        file.write_bytes(content)
        assert refused(file).startswith(f"model: {file}: not a GGUF file; name a folder of safetensors")


@pytest.mark.parametrize("rest", [b"", b"\3\0\0\0", b"\3\0\0\0" + b"\0" * 50], ids=["magic", "version", "no tensors"])
def test_a_gguf_file_that_is_cut_off_is_refused(tmp_path: Path, rest: bytes) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + rest)
    assert refused(file).startswith("model: cut.gguf: transformers cannot load this GGUF file: ")
    assert not list(Path(os.environ["KVPRUNE_CACHE"]).rglob("config.json"))


def test_an_unknown_builtin_model_is_refused() -> None:
    assert refused("builtin:other") == f"model: builtin:other: unknown; the builtin model is {BUILTIN}"


def changed_config(folder: Path, **changes: Any) -> ModelSource:
    """A tiny model's folder with values of its config changed."""
    source = open_model(str(save_model(folder)))
    file = source.folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return source


def test_config_tokenizer_and_model_load_as_saved(tmp_path: Path) -> None:
    source = open_model(str(save_model(tmp_path / "dense", dtype=torch.float16)))
    assert load_config(source).intermediate_size == WIDTH
    assert load_tokenizer(source)("ab")["input_ids"][0] == 256
    for dtype, expected in [("auto", torch.float16), ("bfloat16", torch.bfloat16), ("float32", torch.float32)]:
        model, info = load_model(source.folder, dtype=dtype, device="cpu")
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert not model.training
        assert not info["missing_keys"]


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_a_quantised_model_is_refused(tmp_path: Path, method: str) -> None:
    source = changed_config(tmp_path / "dense", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(
        KvpruneError, match=rf"^model: dense: its weights are quantised \({method}\); name the checkpoint"
    ):
        load_config(source)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "unheard-of"},
        {"model_type": "unheard-of", "auto_map": {"AutoConfig": "configuration_name.Config"}},
        {"hidden_size": "large"},
        {"num_attention_heads": 5},
    ],
)
def test_a_config_that_cannot_be_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = changed_config(tmp_path / "dense", **changes)
    with pytest.raises(KvpruneError, match=r"^model: dense: config\.json does not load: ") as error:
        load_config(source)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}"])
def test_a_config_that_is_not_one_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(KvpruneError, match=r"config\.json does not load: ") as error:
        load_config(open_model(str(tmp_path)))
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    source = open_model(str(save_model(tmp_path / "dense")))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source.folder / name).unlink()
    with pytest.raises(KvpruneError, match=r"^model: dense: its tokenizer does not load: ") as error:
        load_tokenizer(source)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("damage", ["cut", "garbage", "missing", "pickled", "other shapes"])
def test_broken_weights_are_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    folder = save_model(tmp_path / "dense")
    weights = folder / "model.safetensors"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "garbage":
            weights.write_bytes(b"garbage")
        case "other shapes":
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": WIDTH + 2}), encoding="utf-8")
        case _:
            weights.unlink()
    if damage == "pickled":
        torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(KvpruneError, match=r"^model: dense: does not load: ") as error:
        load_model(folder, dtype="auto", device="cpu", title="dense")
    assert len(str(error.value).splitlines()) == 1


def test_a_device_is_there_or_refused() -> None:
    count = torch.cuda.device_count()
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(KvpruneError, match=rf"^--device cuda:{count}: this machine has {count} CUDA devices; use "):
        pick_device(f"cuda:{count}")
    for device in ("mps", "CPU", "cuda:", "cuda:x", "cuda:-1", "gpu", ""):
        with pytest.raises(KvpruneError, match=rf"^--device {device}: should be auto, cpu, cuda or cuda:N$"):
            pick_device(device)


def test_an_error_becomes_one_short_line() -> None:
    assert one_line(ValueError("a\n  b\t c")) == "a b c"
    assert one_line(KeyError()) == "KeyError"
    long = one_line(ValueError("word " * 100))
    assert len(long) <= 300
    assert long.endswith("…")
