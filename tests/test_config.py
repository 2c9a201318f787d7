"""The config and code of a checkpoint whose widths differ by layer: tried early, run unasked only if ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvprune
from kvprune.artifacts import RunFolder
from kvprune.cli import main
from kvprune.config import check_by_layer, is_own_code
from kvprune.dense import open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.perlayer import CODE_FILE, decoded
from kvprune.recipe import make_recipe
from tests.conftest import recipe_data, save_model, tiny_model, tiny_tokenizer
from tests.families import family_config


def by_layer(tmp_path: Path, text: Path, **plan: Any) -> RunFolder:
    """An exported run whose widths differ by layer."""
    run = tmp_path / "run"
    data = recipe_data(save_model(tmp_path / "dense"), text, score="taylor", allocation="global", **plan)
    kvprune.calibrate(make_recipe(data), run)
    assert kvprune.plan(run).differing() == ["intermediate_size"]
    kvprune.export(run)
    return RunFolder(run)


def test_it_is_judged_without_trust_and_other_code_is_not_run(tmp_path: Path, text: Path) -> None:
    run = by_layer(tmp_path, text)
    dense = open_dense(str(tmp_path / "dense"))
    assert is_own_code(run, dense)
    assert kvprune.evaluate(run.path)["slim"]["params"] < dense.layout.total_params
    config = run.model / "config.json"
    ours = config.read_text(encoding="utf-8")
    for name, place in (
        ("AutoModelForCausalLM", "elsewhere--modeling_other.Model"),
        ("AutoConfig", "modeling_kvprune.KvpruneLlamaForCausalLM"),
    ):
        data = json.loads(ours)
        data["auto_map"][name] = place
        config.write_text(json.dumps(data), encoding="utf-8")
        assert not is_own_code(run, dense)
    config.write_text(ours, encoding="utf-8")
    assert is_own_code(run, dense)
    (run.model / "more.py").write_text("", encoding="utf-8")
    assert not is_own_code(run, dense)
    (run.model / "more.py").unlink()
    code = run.model / CODE_FILE
    code.write_text(code.read_text(encoding="utf-8") + "\nprint('more')\n", encoding="utf-8")
    assert not is_own_code(run, dense)


def test_how_to_load_it_is_said_where_it_is_printed(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = by_layer(tmp_path, text)
    assert main(["evaluate", str(run.path), "-q"]) == 0
    assert "trust_remote_code=True" in capsys.readouterr().out
    assert main(["plan", str(run.path), "--dry-run", "-q"]) == 0
    assert "intermediate_size differs by layer: loads with transformers 5.15 or newer" in capsys.readouterr().out
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert "It needs its own code" in card
    assert "48 → " in card


def test_what_was_slimmed_by_layer_is_no_model_to_start_from(tmp_path: Path, text: Path) -> None:
    run = by_layer(tmp_path, text)
    with pytest.raises(KvpruneError, match=r"made its widths differ by layer .*; start from the dense model"):
        open_dense(str(run.model))


def test_a_dry_run_with_measured_losses_writes_nothing(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(make_recipe(recipe_data(save_model(tmp_path / "dense"), text)), run)
    kvprune.plan(run)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    kvprune.plan(run, overrides=["plan.allocation=sensitivity"], dry_run=True)
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_losses_can_be_measured_where_gram_matrices_were_collected(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    data = recipe_data(save_model(tmp_path / "dense"), text, score="greedy", allocation="sensitivity")
    kvprune.calibrate(make_recipe(data), run)
    assert kvprune.plan(run).validated


def test_slots_can_be_protected_where_widths_differ_by_layer(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    data = recipe_data(save_model(tmp_path / "dense"), text, score="taylor", allocation="global")
    kvprune.calibrate(make_recipe(data), run)
    plan = kvprune.plan(run, overrides=[f"plan.protect={{0: {list(range(40))}}}"])
    assert set(range(40)) <= set(plan.ffns[0].kept)
    assert plan.after.slots == 72


@pytest.mark.parametrize("name", ["moshi", "gemma4_text", "llama4_text", "gemma3n_text"])
def test_a_class_that_builds_all_layers_alike_is_refused_before_the_calibration(
    name: str, tmp_path: Path, text: Path
) -> None:
    tiny_model(family_config(name)).save_pretrained(tmp_path / "dense")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    recipe = make_recipe(recipe_data(tmp_path / "dense", text, allocation="sensitivity"))
    try:
        check_by_layer(open_dense(str(tmp_path / "dense")), recipe.plan)
    except KvpruneError as error:
        assert "plan.allocation: sensitivity cannot be had" in str(error)
        assert str(error).endswith("use uniform")
        assert "\n" not in str(error)
        with pytest.raises(KvpruneError, match="cannot be had"):
            kvprune.calibrate(recipe, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    else:
        assert name == "llama4_text"


def test_numbers_that_json_does_not_have_are_read() -> None:
    assert decoded({"a": [{"__float__": "Infinity"}, 1], "b": {"c": None}}) == {
        "a": [float("inf"), 1],
        "b": {"c": None},
    }


def test_a_product_of_two_matrices_with_a_bias_is_no_ffn(tmp_path: Path) -> None:
    config = family_config("mimo_v2_flash")
    config.attention_bias = True
    layout = open_dense(str(saved(config, tmp_path))).layout
    assert "v_head_dim" not in [field.name for field in layout.fields]


def saved(config: Any, folder: Path) -> Path:
    tiny_model(config, torch.float32).save_pretrained(folder)
    return folder
