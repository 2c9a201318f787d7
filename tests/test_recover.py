"""A recovery: what it writes and what it leaves alone, how it stops and goes on, and which point of it stays."""

import hashlib
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvprune
from kvprune.artifacts import RunFolder, file_names
from kvprune.cli import main
from kvprune.dense import open_dense
from kvprune.errors import KvpruneError
from kvprune.options import DEFAULT
from kvprune.recipe import load_recipe, make_recipe
from kvprune.schema import TextSource
from kvprune.sources.packing import pack
from kvprune.sources.texts import documents
from kvprune.staleness import stage_states
from kvprune.teaching import training
from kvprune.tokens import recovery_tokens
from tests.conftest import SHAPES, recipe_data, tiny_config, tiny_model, tiny_tokenizer
from tests.families import family_config

LENGTH, STEPS, HELD = 32, 8, 8
SETTINGS = {"tokens": STEPS * 128, "sequence_length": LENGTH, "batch_tokens": 128, "learning_rate": 3e-3}
HALF: dict[str, Any] = {"budget": {"keep": 0.5}}
BY_LAYER = {**HALF, "score": "contribution", "allocation": "global"}


def prose(count: int) -> str:
    """A text of so many words, of few that come again."""
    draw = random.Random(0)
    known = ["".join(draw.choices(string.ascii_lowercase, k=5)) for _ in range(50)]
    return " ".join(draw.choices(known, k=count))


def export_run(base: Path, shape: str, dtype: torch.dtype, plan: Any) -> None:
    """An exported run of a tiny model: one of SHAPES or FAMILIES.

    `-shards` makes many files; `-base` stores the base model alone; `-as-TYPE` has config.json name another type.
    """
    name, _, named = shape.removesuffix("-shards").removesuffix("-base").partition("-as-")
    text = base / "text.txt"
    config = tiny_config(name) if name in SHAPES else family_config(name.removeprefix("family-"))
    tiny_model(config, dtype).save_pretrained(
        base / "dense", max_shard_size="20KB" if shape.endswith("-shards") else "1GB"
    )
    if shape.endswith("-base"):
        AutoModelForCausalLM.from_pretrained(base / "dense").base_model.save_pretrained(base / "dense")
    if named:
        config_file = base / "dense" / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"dtype": named}))
    tiny_tokenizer().save_pretrained(base / "dense")
    text.write_text(prose(3000), encoding="utf-8")
    data = recipe_data(base / "dense", text, **plan)
    kvprune.calibrate(make_recipe(data | {"recover": {"method": "none", **SETTINGS}}), base / "run")
    kvprune.plan(base / "run")
    kvprune.export(base / "run")


def exported(
    tmp_path: Path, shape: str = "llama", dtype: torch.dtype = torch.float32, plan: Any = HALF, name: str = "run"
) -> RunFolder:
    """A copy of an exported run as `name` in `tmp_path`. Each is made once a session, beside all `tmp_path`."""
    mark = hashlib.sha256(repr((shape, dtype, plan)).encode()).hexdigest()[:12]
    made = tmp_path.parent / f"exported-{mark}"
    if not made.exists():
        export_run(made, shape, dtype, plan)
    shutil.copytree(made / "run", tmp_path / name)
    return RunFolder(tmp_path / name)


def recover(run: RunFolder, **section: Any) -> dict[str, Any]:
    """Recover with SETTINGS, and others where they are given."""
    overrides = [f"recover.{key}={value}" for key, value in ({"method": "distill"} | section).items()]
    return kvprune.recover(run.path, overrides=overrides)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in file_names(folder)}


def weights(run: RunFolder) -> dict[str, Tensor]:
    """What lies in the files of a checkpoint."""
    return {name: tensor for file in run.model.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(folder: Path) -> Any:
    """A checkpoint as stock transformers loads it, in float32, with every key in its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def states(run: RunFolder) -> dict[str, str]:
    return {stage: state.status for stage, state in stage_states(run, load_recipe(run.recipe)).items()}


@torch.no_grad()
def held_out_loss(run: RunFolder) -> float:
    """How far `model/` is from the dense model on the builtin held-out text, worked out from two stock models."""
    folder, text = Path(load_recipe(run.recipe).model), TextSource(source="builtin-held-out")
    tokens = torch.tensor(pack(documents(text, 0), AutoTokenizer.from_pretrained(folder), LENGTH, HELD))
    theirs = loaded(folder)(tokens).logits.log_softmax(2)
    return float((theirs.exp() * (theirs - loaded(run.model)(tokens).logits.log_softmax(2))).sum() / tokens.numel())


def ruin(monkeypatch: pytest.MonkeyPatch, first: int, by: float = 1.0) -> None:
    """Make the student worse after each step from `first` on."""
    real = training.take_step

    def take_step(work: Any, step: int) -> float:
        loss = real(work, step)
        for parameter in work.learning.values() if step >= first else ():
            parameter.data += by
        return loss

    monkeypatch.setattr(training, "take_step", take_step)


LINEAR = r"layers.*_proj\.weight|\bh\.\d.*(c_attn|c_proj|c_fc)\.weight"
FFN = r"\.mlp\.(?!gate\.|router|shared_expert_gate)"  # and not what chooses experts
LEARNING = {"values": r"down_proj|mlp\.c_proj", "ffn": FFN, "all": "", "lora": LINEAR}
CASES = [
    *(("llama", torch.float32, HALF, train) for train in LEARNING),
    *(("gpt2", torch.float32, HALF, train) for train in LEARNING),
    *(("llama-bias-tied", torch.float32, HALF, train) for train in ("ffn", "all")),
    ("llama", torch.bfloat16, HALF, "values"),
    ("llama", torch.float16, HALF, "lora"),
    ("llama-shards", torch.float32, HALF, "ffn"),
    ("llama", torch.float32, BY_LAYER, "values"),
    ("qwen2_moe", torch.float32, HALF, "values"),
    ("gpt_oss", torch.float32, HALF, "ffn"),
    ("family-gemma3", torch.float32, HALF, "all"),  # which sees, too
]


@pytest.mark.parametrize(("shape", "dtype", "plan", "train"), CASES)
def test_what_learns_changes_and_all_else_stays_bit_for_bit(
    shape: str, dtype: torch.dtype, plan: Any, train: str, tmp_path: Path
) -> None:
    run = exported(tmp_path, shape, dtype, plan)
    before, were = weights(run), files(run.model)
    report = recover(run, train=train)
    after = weights(run)
    assert report["improved"]
    assert report["best"] > 0
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in after.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in before.items()
    }
    # There is no image in the text, and what sees learns nothing.
    wanted = {name for name in before if re.search(LEARNING[train], name) and not re.search("vision|projector", name)}
    assert {name for name, tensor in after.items() if not torch.equal(tensor, before[name])} == wanted
    for name, content in files(run.model).items():
        assert content == were[name] or name.endswith((".safetensors", "README.md", "kvprune.json")), name
    assert files(run.model).keys() == were.keys()
    model = loaded(run.model)
    assert model.num_parameters() == json.loads(were["kvprune.json"])["budget"]["after"]["total_params"]
    best = next(look for look in report["looks"] if look["step"] == report["best"])
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert held_out_loss(run) == pytest.approx(best["texts"]["builtin-held-out"]["loss"], rel=tolerance)
    assert states(run)["recover"] == "current"
    assert not run.recovering.exists()


def test_what_a_refit_has_seen_is_held_back_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    run, text = exported(tmp_path), tmp_path / "short.txt"
    text.write_text(prose(3000)[: 127 * (STEPS + HELD)], encoding="utf-8")  # and a BOS for each
    settings = ["recover.method=distill", "recover.sequence_length=128", f"recover.text={text}"]
    recipe = load_recipe(run.recipe, settings)
    dense = open_dense(recipe.model)

    def split(counted: Tensor) -> tuple[list[Any], list[Any]]:
        tokens, held = recovery_tokens(recipe, run, dense, DEFAULT, counted, ())
        return tokens.tolist(), held["held-back"].tolist()

    tokens, held = split(torch.zeros((0, 128), dtype=torch.int64))
    assert (len(tokens), len(held)) == (STEPS, HELD)
    assert split(torch.tensor(held[:3]).reshape(1, -1)) == (tokens[:-3] + held[:3], tokens[-3:] + held[3:])
    assert split(torch.tensor(held)) == (held, tokens)
    assert split(torch.tensor(tokens + held)) == split(torch.tensor(tokens)) == (tokens, held)
    assert split(torch.tensor(tokens[:-1] + held)) == (tokens[:-1] + held[:1], tokens[-1:] + held[1:])


def test_what_a_refit_has_seen_is_trained_on_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    run = exported(tmp_path)
    recipe = load_recipe(run.recipe, ["recover.method=distill", "recover.sequence_length=128"])
    dense = open_dense(recipe.model)
    (source,) = recipe.calibrate.text
    rows = pack(documents(source, recipe.recover.seed), tiny_tokenizer(), 128, 1000)
    assert len(rows) > 4 * (STEPS + HELD)

    def taken(counted: list[list[int]]) -> list[list[int]]:
        tokens, held = recovery_tokens(recipe, run, dense, DEFAULT, torch.tensor(counted), ())
        return [*tokens.tolist(), *held["held-back"].tolist()]

    first = taken(rows[:1])
    assert rows[0] not in first
    second = taken(rows[:1] + first)
    assert len(second) == len(first)
    assert not any(row in second for row in first)
    assert {tuple(row) for row in rows[:3]} <= {tuple(row) for row in taken(rows[3:])}


def test_the_report_tells_the_losses_and_what_learned(tmp_path: Path) -> None:
    run = exported(tmp_path)
    before, report = held_out_loss(run), recover(run)
    assert report == json.loads(run.recovered.read_text())
    assert [look["step"] for look in report["looks"]] == [0, 2, 4, 6, 8]
    assert all(set(look["texts"]) == {"held-back", "builtin-held-out"} for look in report["looks"])
    assert report["looks"][0]["texts"]["builtin-held-out"]["loss"] == pytest.approx(before, rel=1e-4)
    assert report["tokens"] == SETTINGS["tokens"] == len(report["losses"]) * 128
    assert report["learning"] == sum(tensor.numel() for name, tensor in weights(run).items() if ".mlp." in name)
    about = json.loads((run.model / "kvprune.json").read_text())["recover"]
    assert {key: report[key] for key in ("tokens", "best", "steps", "learning", "looks")}.items() <= about.items()
    assert about["made_with"] == report["provenance"]["made_with"]


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = exported(tmp_path, name="one"), exported(tmp_path, name="two")
    for run in (one, two):
        recover(run, train="lora", rank=4)
    assert files(one.model)["model.safetensors"] == files(two.model)["model.safetensors"]


def test_types_may_differ_from_one_recovery_to_the_next(tmp_path: Path) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float32)
    reports = [recover(exported(tmp_path, "llama", kind, name=str(at))) for at, kind in enumerate(kinds)]
    assert [report["provenance"]["run"]["dtype"] for report in reports] == ["float32", "bfloat16", "float32"]
    assert reports[0]["losses"] == reports[2]["losses"]


@pytest.mark.parametrize("train", ["ffn", "lora"])
def test_a_stopped_recovery_goes_on_and_ends_with_the_same_bytes(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = exported(tmp_path, name="whole"), exported(tmp_path, name="parts")
    expected = recover(whole, train=train)
    were, real, steps = files(parts.model), training.take_step, list[int]()
    polite = {2: signal.SIGTERM, 6: signal.SIGINT, 7: signal.SIGINT}  # after the first look, between two, at the end

    def take_step(work: Any, step: int) -> float:
        # A rude stop: what was kept by then, at the look after 4 steps, is all there is.
        if step == 5 and 5 not in steps:
            steps.append(step)
            raise KeyboardInterrupt
        if step in polite:
            os.kill(os.getpid(), polite.pop(step))
        steps.append(step)
        return real(work, step)

    monkeypatch.setattr(training, "take_step", take_step)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            recover(parts, train=train)
        assert files(parts.model) == were
        assert not parts.recovered.exists()
        assert states(parts)["recover"] == "missing"
    report = recover(parts, train=train)
    assert steps == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]  # the second stop lost what came after the look
    assert files(parts.model)["model.safetensors"] == files(whole.model)["model.safetensors"]
    assert {**report, "seconds": 0} == {**expected, "seconds": 0}
    assert not parts.recovering.exists()


def test_a_killed_recovery_goes_on_from_the_last_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, parts = exported(tmp_path, name="whole"), exported(tmp_path, name="parts")
    recover(whole)
    code = (
        "import os, sys, kvprune; from kvprune.teaching import training\n"
        "training.SECONDS_BETWEEN_SAVES, real = 0, training.take_step\n"
        "training.take_step = lambda work, step: os._exit(9) if step == 5 else real(work, step)\n"
        "kvprune.recover(sys.argv[1], overrides=['recover.method=distill'])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # products round differently with it
    done = subprocess.run([sys.executable, "-c", code, str(parts.path)], env=environment, check=False)
    assert done.returncode == 9
    with caplog.at_level(logging.INFO, "kvprune"):
        recover(parts)
    assert "recover: going on after 5 of 8 steps" in caplog.text
    assert files(parts.model)["model.safetensors"] == files(whole.model)["model.safetensors"]


@pytest.mark.parametrize("other", [{"learning_rate": 5e-3}, {"train": "values"}])
def test_a_stopped_recovery_of_other_settings_is_not_gone_on_with(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fresh = exported(tmp_path, name="run"), exported(tmp_path, name="fresh")
    real = training.take_step

    def take_step(work: Any, step: int) -> float:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return real(work, step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "take_step", take_step)
        with pytest.raises(KeyboardInterrupt):
            recover(run)
    assert recover(run, **other)["losses"] == recover(fresh, **other)["losses"]
    assert files(run.model)["model.safetensors"] == files(fresh.model)["model.safetensors"]
    assert not run.recovering.exists()


def test_the_best_point_stays_and_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = exported(tmp_path)
    ruin(monkeypatch, first=6)
    report = recover(run)
    assert 0 < report["best"] <= 6
    losses = {look["step"]: look["texts"]["builtin-held-out"]["loss"] for look in report["looks"]}
    assert held_out_loss(run) == pytest.approx(losses[report["best"]], rel=1e-4)
    assert losses[8] > 2 * losses[0]


@pytest.mark.parametrize(
    ("first", "by", "why"), [(6, 1.0, "the loss diverges: "), (7, math.nan, "the loss of step 9 is not finite")]
)
def test_what_was_gained_before_the_loss_went_wrong_stays(
    first: int, by: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = exported(tmp_path)
    ruin(monkeypatch, first=first, by=by)
    report = recover(run, tokens=16 * 128)
    assert report["improved"]
    assert report["best"] == 4
    assert len(report["losses"]) < 16
    assert report["stopped"].startswith(why)
    assert f"recover: stopped: {report['stopped']}" in caplog.text
    losses = {look["step"]: look["texts"]["builtin-held-out"]["loss"] for look in report["looks"]}
    assert held_out_loss(run) == pytest.approx(losses[4], rel=1e-4)
    assert states(run)["recover"] == "current"
    for file in (run.recovered, run.model / "kvprune.json"):
        assert not re.search("NaN|Infinity", file.read_text())  # which is no JSON


def test_where_nothing_improves_the_model_stays_as_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = exported(tmp_path, plan={"budget": {"keep": 1.0}})  # the dense model itself: nothing can be better
    were = files(run.model)
    assert main(["recover", str(run.path), "--set", "recover.method=distill"]) == 0
    out, err = capsys.readouterr()
    assert "no point was better than before: the checkpoint stays as it was" in out
    assert f"recover: no point of the training was better on held-out text: {run.model} stays as it was" in err
    report = json.loads(run.recovered.read_text())
    assert not report["improved"]
    assert report["best"] == report["looks"][0]["texts"]["builtin-held-out"]["loss"] == 0
    assert files(run.model) == were
    assert states(run)["recover"] == "current"
    assert not run.recovering.exists()
    assert recover(run) == report  # done before


def test_a_loss_that_is_no_number_is_one_line_that_names_the_learning_rate(tmp_path: Path) -> None:
    run = exported(tmp_path)
    recipe, were = load_recipe(run.recipe, ["recover.method=distill"]), files(run.model)
    wild = recipe.model_copy(update={"recover": recipe.recover.model_copy(update={"learning_rate": 1e30})})
    with pytest.raises(KvpruneError, match=r"^recover: the loss of step 2 is not finite, .*recover\.learning_rate"):
        kvprune.run(wild, run.path)
    assert files(run.model) == were
    assert not run.recovered.exists()
    assert not run.recovering.exists()


def test_a_loss_that_diverges_is_one_line_that_names_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(tmp_path)
    were = files(run.model)
    ruin(monkeypatch, first=0, by=0.05)
    changes = ["--set", "recover.method=distill", "--set", "recover.tokens=2048"]
    assert main(["recover", str(run.path), "--quiet", *changes]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: recover: the loss diverges: .* lower recover\.learning_rate \(0\.003\)", lines[-1])
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert files(run.model) == were
    assert states(run)["recover"] == "missing"
    assert not run.recovering.exists()


def test_a_checkpoint_without_the_models_prefix_is_trained_and_keeps_its_names(tmp_path: Path) -> None:
    """The Hub's gpt2 is stored as the base model: `h.0.…` where the causal model says `transformer.h.0.…`."""
    run = exported(tmp_path, "gpt2-base")
    before, report = weights(run), recover(run)
    after = weights(run)
    assert report["improved"]
    assert before.keys() == after.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if re.match(r"h\.\d\.mlp\.", name)}
    loaded(run.model)


@pytest.mark.parametrize(("named", "stored"), [("float32", torch.bfloat16), ("bfloat16", torch.float32)])
def test_weights_of_another_type_than_the_config_names_stay_of_it(
    named: str, stored: torch.dtype, tmp_path: Path
) -> None:
    run = exported(tmp_path, f"llama-as-{named}", stored)
    before, report = weights(run), recover(run, train="all")
    after = weights(run)
    assert report["improved"]
    assert {tensor.dtype for tensor in after.values()} == {stored}
    down = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(after[down], before[down])
    rounded = after[down].bfloat16().to(stored)
    assert torch.equal(after[down], rounded) is (stored == torch.bfloat16)  # what was learned was not rounded between
