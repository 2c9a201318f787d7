"""Bad input: exit status 1, one line with the way out, no traceback, nothing written and nothing lost.

`python -m tests.test_bad_input` prints every case with the message as the user sees it.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import kvprune
from kvprune.artifacts import RunFolder
from kvprune.cli import main
from kvprune.recipe import load_recipe
from kvprune.staleness import stage_states
from tests.conftest import COMMON, recipe_data, save_model, tiny_config, tiny_model, words
from tests.families import family_config

Case = Callable[[Path], dict[str, Any]]  # prepares a folder; returns what to change in the recipe


def weights(folder: Path) -> Path:
    return folder / "dense" / "model.safetensors"


def edit_config(folder: Path, **values: Any) -> dict[str, Any]:
    file = folder / "dense" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return {}


def broken_config(folder: Path) -> dict[str, Any]:
    (folder / "dense" / "config.json").write_text("{")
    return {}


def quantised(**values: Any) -> Case:
    return lambda folder: edit_config(folder, quantization_config=values)


def no_weights(folder: Path) -> dict[str, Any]:
    weights(folder).unlink()
    return {}


def only_pickled(folder: Path) -> dict[str, Any]:
    weights(folder).rename(folder / "dense" / "pytorch_model.bin")
    return {}


def cut_shard(folder: Path) -> dict[str, Any]:
    weights(folder).write_bytes(weights(folder).read_bytes()[:-100])
    return {}


def broken_header(folder: Path) -> dict[str, Any]:
    weights(folder).write_bytes(b"\xff" * 300)
    return {}


def index_to(shard: str) -> Case:
    def prepare(folder: Path) -> dict[str, Any]:
        names = list(load_file(weights(folder)))
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
        (folder / "dense" / "model.safetensors.index.json").write_text(json.dumps(index))
        return {}

    return prepare


def of_type(kind: str, **values: Any) -> Case:
    def prepare(folder: Path) -> dict[str, Any]:
        AutoConfig.for_model(kind, **{**COMMON, **values}).save_pretrained(folder / "dense")
        return {}

    return prepare


def mixture(folder: Path) -> dict[str, Any]:
    """Experts that keep 12 of 16 slots, and in two-byte types a multiple of 8 is needed."""
    tiny_model(family_config("mixtral"), torch.bfloat16).save_pretrained(folder / "dense")
    return {}


def no_tokenizer(folder: Path) -> dict[str, Any]:
    for file in (folder / "dense").glob("tokenizer*"):
        file.unlink()
    return {}


def small_vocabulary(folder: Path) -> dict[str, Any]:
    tiny_model(tiny_config("llama", vocab_size=100, bos_token_id=0, eos_token_id=1, pad_token_id=2)).save_pretrained(
        folder / "dense"
    )
    return {}


def nan_in_weights(folder: Path) -> dict[str, Any]:
    tensors = load_file(weights(folder))
    tensors["model.layers.1.mlp.up_proj.weight"][7] = torch.nan
    save_file(tensors, weights(folder), metadata={"format": "pt"})
    return {}


def text(name: str, content: bytes, **section: Any) -> Case:
    def prepare(folder: Path) -> dict[str, Any]:
        (folder / name).write_bytes(content)
        return {"calibrate.text": {"source": str(folder / name), **section}}

    return prepare


def setting(key: str, value: Any) -> Case:
    return lambda folder: {key: value}


def recipe_text(content: str) -> Case:
    return lambda folder: {"": content}


def foreign_output(folder: Path) -> dict[str, Any]:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.txt").write_text("mine")
    return {}


def output_is_a_file(folder: Path) -> dict[str, Any]:
    (folder / "run").write_text("mine")
    return {}


def run_of_another(folder: Path) -> dict[str, Any]:
    (folder / "run").mkdir()
    (folder / "run" / "recipe.yaml").write_text("model: org/other\n")
    return {}


ROWS = b'{"text": "a b c"}\n' * 3
EXPLODING = "a: &a [x, x]\nb: &b [*a, *a]\nmodel: m\n"
CASES: dict[str, tuple[Case, str]] = {
    "model missing": (setting("model", "./gone"), "no such file or folder"),
    "model misspelt while offline": (setting("model", "HuggingFaceTB/SmolLM2-135M-Instrct"), "cannot be reached"),
    "model name is no name": (setting("model", "what is this?"), "not a Hub name"),
    "unknown builtin": (setting("model", "builtin:llama"), "the builtin model is builtin:smollm2-135m"),
    "folder without safetensors": (no_weights, "neither model.safetensors nor"),
    "pickle-only checkpoint": (only_pickled, "never pickled weights"),
    "truncated shard": (cut_shard, "truncated or corrupt"),
    "corrupt header": (broken_header, "download it again"),
    "index names a missing shard": (index_to("model-00001.safetensors"), "a shard that is not there"),
    "index leaves its folder": (index_to("../model.safetensors"), "outside of its folder"),
    "quantised: bitsandbytes": (quantised(quant_method="bitsandbytes", load_in_4bit=True), "quantised (bitsandbytes)"),
    "quantised: GPTQ": (quantised(quant_method="gptq", bits=4), "quantised (gptq)"),
    "quantised: AWQ": (quantised(quant_method="awq", bits=4), "quantised (awq)"),
    "quantised: fp8": (quantised(quant_method="fp8"), "quantised (fp8)"),
    "quantised: mxfp4": (quantised(quant_method="mxfp4"), "quantised (mxfp4)"),
    "config is not JSON": (
        broken_config, "config.json does not load",
    ),
    "unknown model type": (lambda folder: edit_config(folder, model_type="llamma"), "config.json does not load"),
    "model without FFN": (of_type("mamba"), "of MambaMixer is no linear map"),
    "encoder-only model": (of_type("deberta-v2"), "not a causal language model"),
    "encoder-decoder model": (of_type("t5"), "not a causal language model"),
    "FFN of a fixed width": (of_type("bloom"), "no field of config.json sets the width of an FFN"),
    "coupled slots": (of_type("bitnet"), "BitNetMLP couples its slots"),
    "experts of a width without kernels": (mixture, "plan.round_to: width 12 of experts is no multiple of 8"),
    "weights of another model": (of_type("phi3"), "no weight file holds model.layers.0.mlp.gate_up_proj.weight"),
    "multimodal model": (lambda folder: edit_config(folder, model_type="llava"), "not a causal language model"),
    "tokenizer missing": (no_tokenizer, "its tokenizer does not load"),
    "tokenizer of another vocabulary": (small_vocabulary, "do not belong together"),
    "NaN in weights": (nan_in_weights, "model.layers.1.mlp: slot 7 has NaN"),
    "empty text": (text("empty.txt", b""), "holds 0 tokens"),
    "text shorter than one sequence": (text("short.txt", b"ten bytes."), "holds 0 tokens"),
    "more tokens than the text holds": (setting("calibrate.tokens", 32_000), "lower calibrate.tokens"),
    "field missing in a row": (text("a.jsonl", ROWS + b'{"body": "x"}\n'), "row 4: no text or chat in field 'text'"),
    "broken JSON row": (text("a.jsonl", ROWS + b'{"text": "x\n'), "row 4: not valid JSON"),
    "binary file as text": (text("a.txt", bytes(range(256))), "not UTF-8 text"),
    "zero bytes as text": (text("a.txt", b"a\0b"), "a binary file"),
    "broken Parquet": (text("a.parquet", b"PAR1 no"), "not a readable Parquet file"),
    "text missing": (setting("calibrate.text", "gone.txt"), "no such file or folder"),
    "unknown kind of text": (text("a.pdf", b"%PDF"), "should be builtin, self"),
    "split of a local file": (text("a.jsonl", ROWS, split="train"), "config and split are for a data set"),
    "keep 0": (setting("plan.budget", {"keep": 0}), "plan.budget.keep: should be greater than 0"),
    "keep above 1": (setting("plan.budget", {"keep": 1.2}), "plan.budget.keep: should be less than or equal to 1"),
    "two budgets": (setting("plan.budget", {"keep": 0.5, "params": 9}), "exactly one of keep, params, bytes"),
    "budget below round_to": (setting("plan", {"budget": {"keep": 0.1}, "round_to": 24}), "the smallest width"),
    "budget cannot be met": (setting("plan.budget", {"bytes": "1KiB"}), "plan.budget.bytes: 1,024 cannot be met"),
    "floor above the budget": (setting("plan", {"budget": {"keep": 0.2}, "round_to": 1, "floor": 40}), "floor 40"),
    "unknown score": (setting("plan.score", "magic"), "plan.score: should be 'wanda'"),
    "unknown task": (setting("evaluate.tasks", ["hellaswagg"]), "evaluate.tasks: unknown: hellaswagg"),
    "unknown key": (setting("plan.budjet", 1), "plan.budjet: unknown key. Did you mean budget?"),
    "wrong type": (setting("calibrate.tokens", "many"), "calibrate.tokens: should be a valid integer"),
    "sequence beyond the model": (
        setting("calibrate", {"text": "builtin", "tokens": 256, "sequence_length": 256}), "max_position_embeddings 128",
    ),
    "recipe is not YAML": (recipe_text("model: [unclosed\n"), "not valid YAML"),
    "recipe with duplicate keys": (recipe_text("model: a\nmodel: b\n"), "duplicate key 'model'"),
    "recipe with exploding anchors": (recipe_text(EXPLODING), "aliases (*name) are not allowed"),
    "recipe is a list": (recipe_text("- model\n"), "a recipe is a YAML mapping"),
    "output folder not empty": (foreign_output, "exists and is not a run folder"),
    "output is a file": (output_is_a_file, "exists and is not a run folder"),
    "run folder of another model": (run_of_another, "is a run of model org/other"),
}  # fmt: skip


def prepare(folder: Path, case: Case) -> list[str]:
    """A good model, text and recipe in `folder`, made bad by the case; the command line that meets it."""
    dense = save_model(folder / "dense")
    (folder / "text.txt").write_text(words(400), encoding="utf-8")
    data: dict[str, Any] = recipe_data(dense, folder / "text.txt")
    changes = case(folder)
    for path, value in changes.items():
        section = data
        *parents, last = path.split(".")
        for parent in parents:
            section = section[parent]
        section[last] = value
    recipe = changes.get("", None) or yaml.safe_dump(data)
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return ["run", str(folder / "recipe.yaml"), "-o", str(folder / "run")]


def meet(arguments: list[str]) -> tuple[int, list[str]]:
    """Run kvprune on it: exit status, and what it says as errors."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main([*arguments, "-q"])
    return status, [line for line in said.getvalue().splitlines() if line.startswith("error:")]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but what a run may keep: its recipe."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / "run" / "recipe.yaml"
    }


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_and_nothing_is_written_or_lost(name: str, tmp_path: Path) -> None:
    case, fragment = CASES[name]
    arguments = prepare(tmp_path, case)
    before = contents(tmp_path)
    status, lines = meet(arguments)
    assert status == 1
    assert len(lines) == 1, lines
    assert fragment in lines[0]
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    arguments = prepare(tmp_path, lambda folder: {})
    arguments[-1] = "/proc/kvprune/run"  # where not even root can write
    status, lines = meet(arguments)
    assert status == 1
    assert len(lines) == 1
    assert "/proc/kvprune" in lines[0]


def test_a_disk_that_is_too_small_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = prepare(tmp_path, lambda folder: {})
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    status, lines = meet(arguments)
    assert status == 1
    assert re.search(r"[\d,]+ bytes are needed and 1,000 are free", lines[0])
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_loses_nothing(tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: writing fails in the middle of the export, for real."""
    arguments = prepare(tmp_path, lambda folder: {})
    recipe = load_recipe(arguments[1])
    kvprune.calibrate(recipe, tmp_path / "run")
    kvprune.plan(tmp_path / "run")
    code = (
        "import resource, signal, sys; from kvprune.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))\n"
        "sys.exit(main(['export', sys.argv[1], '-q']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "File too large" in done.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "plan.json",
        "recipe.yaml",
        "stats.safetensors",
    ]
    kvprune.export(tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_judging_keeps_what_was_finished(number: signal.Signals, tmp_path: Path) -> None:
    arguments = prepare(tmp_path, lambda folder: {"evaluate": {"tasks": ["builtin"], "max_length": 64}})
    with subprocess.Popen(
        [sys.executable, "-m", "kvprune", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("evaluate:"):
                time.sleep(0.2)
                process.send_signal(number)
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "interrupted: what was finished is kept" in rest
    assert "Traceback" not in rest
    place = RunFolder(tmp_path / "run")
    states = stage_states(place, load_recipe(place.recipe))
    assert [state.status for state in states.values()] == ["current"] * 5 + ["missing"]
    assert not list((tmp_path / "run").glob(".*"))


def show_all() -> None:
    """Print the table of cases."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("| bad input | exit | message |\n|---|---|---|")
    for name, (case, _) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            status, lines = meet(prepare(Path(folder), case))
            print(
                f"| {name} | {status} | {'; '.join(lines).removeprefix('error: ').replace(folder, '…')} |", flush=True
            )


if __name__ == "__main__":
    show_all()
