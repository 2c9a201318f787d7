"""Widths by layer: budgets are met, one cut is one cut, measured curves decide, and the checkpoints load."""

import gc
import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvprune
from kvprune.artifacts import Plan, RunFolder
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.allocate import Limit, Unit, allocate, curve_worth, score_worth, units_of
from kvprune.ffn.experts import Seen
from kvprune.ffn.find import find_layout
from kvprune.ffn.forwards import add_gradients, empty
from kvprune.ffn.layout import Ffn, Field, Layout
from kvprune.ffn.watching import value_rows, watched
from kvprune.recipe import make_recipe
from kvprune.stages.export import export, mask_slots
from tests.conftest import HIDDEN, WIDTH, random_plan, recipe_data, save_model, tiny_model, tiny_tokenizer
from tests.families import family_config

LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
out = {}
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
    tokens = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        logits = model.eval()(tokens, use_cache=False).logits
        length = model.generate(tokens, max_new_tokens=1, do_sample=False).shape[1]
    out[folder] = {"logits": logits.double().tolist(), "length": length, "class": type(model).__name__,
        **{kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}}
assert "kvprune" not in sys.modules
print(json.dumps(out))
"""
BY_LAYER = (
    "llama-bias", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "qwen2_moe", "gpt_oss", "granitemoe",
    "deepseek_v3", "olmoe", "starcoder2",
)  # fmt: skip


def plan_by_layer(dense: Dense, step: int) -> Plan:
    """Another width in every layer, and random slots."""
    layout, widths = dense.layout, []
    for ffn in layout.ffns:
        field, at = layout.field_of(ffn), layout.layers.index(ffn.layer)
        widths.append(field.width(ffn, max(step, field.value - step * (1 + at % 2))))
    return random_plan(dense, widths, seed=1)


def test_widths_by_layer_load_in_a_fresh_process(tmp_path: Path) -> None:
    expected, folders = {}, []
    for name in BY_LAYER:
        folder = tmp_path / name
        config = family_config(name)
        config.num_hidden_layers = max(3, config.num_hidden_layers)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = (config.layer_types * 3)[: config.num_hidden_layers]
        tiny_model(config).save_pretrained(folder / "dense", max_shard_size="40KB")
        tiny_tokenizer().save_pretrained(folder / "dense")
        dense = open_dense(str(folder / "dense"))
        plan = plan_by_layer(dense, 4)
        assert plan.differing(), name
        run = RunFolder(folder / "run")
        run.path.mkdir()
        run.plan.write_text("{}")
        export(make_recipe({"model": str(folder / "dense")}), dense, plan, None, run)
        masked = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32).eval()
        mask_slots(masked, dense.layout, plan)
        tokens = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            expected[str(run.model)] = masked(tokens, use_cache=False).logits.double()
        folders.append(str(run.model))
        with pytest.raises(Exception, match="per-layer attribute"):
            AutoModelForCausalLM.from_pretrained(run.model, trust_remote_code=False)
    done = subprocess.run([sys.executable, "-c", LOAD, *folders], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for place, logits in expected.items():
        assert found[place]["class"].startswith("Kvprune")
        assert found[place]["length"] == 21
        assert not any(found[place][kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        got = torch.tensor(found[place]["logits"], dtype=torch.float64)
        assert float((got - logits).abs().max()) <= 1e-6 * max(1.0, float(logits.abs().max())), place


def unit(layer: int, width: int, steps: list[int], multiple: Fraction = Fraction(1)) -> Unit:
    ffn = Ffn(f"l.{layer}", "", (), (), None, None, width, 4, 12, f"l.{layer}")  # type: ignore[arg-type]
    return Unit(ffn.layer, Field("f", int(width / multiple), {ffn.name: multiple}), (ffn,), tuple(steps))


@pytest.mark.parametrize("amount", [4, 9, 10, 17, 24])
def test_global_is_one_cut_through_all_scores(amount: int) -> None:
    generator = torch.Generator().manual_seed(amount)
    scores = {f"l.{at}": torch.rand(8, dtype=torch.float64, generator=generator) for at in range(3)}
    units = [unit(at, 8, [*range(1, 9)]) for at in range(3)]
    found = allocate(units, [score_worth(item, scores) for item in units], Limit(amount, lambda _: 1, nearest=True))
    assert found is not None
    assert sum(found) == amount
    order = torch.cat([*scores.values()]).sort(descending=True).values
    cut = [sum(int(v >= order[amount - 1]) for v in scores[f"l.{at}"]) for at in range(3)]
    assert found == cut or 0 in cut


def test_a_ceiling_is_never_exceeded_and_small_steps_fill_it() -> None:
    units = [unit(0, 8, [4, 8]), unit(1, 8, [1, 2, 3, 4, 5, 6, 7, 8])]
    worth = [[100.0], [1.0] * 7]
    assert allocate(units, worth, Limit(8, lambda _: 1, nearest=False)) == [4, 4]
    assert allocate(units, worth, Limit(9, lambda _: 1, nearest=False)) == [8, 1]
    assert allocate(units, worth, Limit(4, lambda _: 1, nearest=False)) is None


def test_a_curve_is_read_along_its_lower_hull() -> None:
    item = unit(0, 8, [2, 4, 6, 8])
    # The point at 6 is above the line from 4 to 8: both steps are worth the line's slope.
    worth = curve_worth(item, {8: 1.0, 6: 1.9, 4: 2.0, 2: 5.0})
    assert worth == pytest.approx([3.0, 0.5, 0.5])
    # What was measured to be better with fewer slots is worth nothing, and steps below the smallest go on as it begins.
    assert curve_worth(unit(0, 8, [2, 4, 8]), {8: 1.0, 4: 1.0}) == pytest.approx([0.0, 0.0])


def test_units_share_a_width_among_a_layers_experts() -> None:
    layout: Layout = find_layout(family_config("qwen2_moe"))
    steps = {field.name: [4, 8, field.value] for field in layout.fields}
    units = units_of(layout, steps, {layout.ffns[-1].name: 5})
    assert sorted(ffn.name for item in units for ffn in item.ffns) == sorted(ffn.name for ffn in layout.ffns)
    for item in units:
        assert len({ffn.width for ffn in item.ffns}) == 1
        assert all(ffn.layer == item.layer for ffn in item.ffns)
    last = next(item for item in units if layout.ffns[-1] in item.ffns)
    assert last.steps[0] == 8  # five slots of it are needed


@pytest.mark.parametrize("allocation", ["global", "sensitivity"])
@pytest.mark.parametrize("budget", ["keep=0.6", "params=27000", "bytes=112000"])
def test_budgets_are_met(allocation: str, budget: str, tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    data = recipe_data(save_model(tmp_path / "dense"), text, score="taylor")
    kvprune.calibrate(make_recipe(data), run)
    changes = [f"plan.allocation={allocation}", f"plan.budget.{budget}", "plan.round_to=1"]
    plan = kvprune.plan(run, overrides=changes)
    unit_name, _, amount = budget.partition("=")
    if unit_name == "keep":
        assert plan.after.slots == round(0.6 * 2 * WIDTH)
    else:
        size = plan.after.total_params if unit_name == "params" else plan.after.bytes
        assert size <= float(amount) < size + 3 * HIDDEN * 4 + 1
    assert kvprune.plan(run, overrides=changes) == plan
    assert (run / "sensitivity.json").is_file() == (allocation == "sensitivity")
    assert bool(plan.validated) == (allocation == "sensitivity")
    if allocation == "sensitivity":
        assert min(plan.validated.values()) == plan.validated["chosen" if plan.differing() else "uniform"] or not (
            plan.differing()
        )


def test_measured_curves_are_kept_and_measured_anew_for_another_score(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    kvprune.calibrate(make_recipe(recipe_data(save_model(tmp_path / "dense"), text)), run)
    kvprune.plan(run, overrides=["plan.allocation=sensitivity"])
    file = run / "sensitivity.json"
    first = json.loads(file.read_text())
    marked = json.loads(file.read_text())
    name, curve = next(iter(marked["curves"].items()))
    curve[max(curve, key=int)] += 1.0  # the whole width is dear now: this layer keeps all that it can
    file.write_text(json.dumps(marked))
    plan = kvprune.plan(run, overrides=["plan.allocation=sensitivity", "plan.budget.keep=0.7"])
    assert json.loads(file.read_text())["curves"] == marked["curves"]
    assert plan.validated
    kvprune.plan(run, overrides=["plan.allocation=sensitivity", "plan.score=fluctuation"])
    other = json.loads(file.read_text())
    assert other["provenance"] != first["provenance"]
    assert other["curves"][name].keys() == first["curves"][name].keys()
    whole = max(curve, key=int)
    assert other["curves"][name][whole] == pytest.approx(first["curves"][name][whole])  # nothing masked: the same loss


def test_scores_that_differ_in_scale_are_not_cut_globally() -> None:
    with pytest.raises(KvpruneError, match="mean the same in every layer"):
        make_recipe({"model": "m", "plan": {"score": "wanda", "allocation": "global"}})
    recipe = make_recipe({"model": "m", "plan": {"score": "taylor", "allocation": "global"}})
    assert recipe.calibrate.collect == ["counts", "gradient"]
    with pytest.raises(KvpruneError, match="reads gradients"):
        make_recipe({"model": "m", "calibrate": {"collect": ["counts", "gram"]}, "plan": {"score": "taylor"}})


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "llama4_text", "gpt_oss"])
def test_gradients_are_those_of_the_loss(name: str) -> None:
    """Against a small push of one slot's coefficient on one token, in float64."""
    model = tiny_model(family_config(name)).double().requires_grad_(requires_grad=False)
    model.set_experts_implementation("eager")
    layout = find_layout(model.config)
    tokens = torch.randint(0, 250, (2, 8), generator=torch.Generator().manual_seed(1))
    stats = empty(model, layout)
    for item in stats.values():
        item.gradient = torch.zeros_like(item.total)
    add_gradients(model, layout, stats, tokens, 1)
    gradients = {name: item.gradient for name, item in stats.items() if item.gradient is not None}
    ffn = max(layout.ffns, key=lambda ffn: float(gradients[ffn.name].max()))
    slot = int(gradients[ffn.name].argmax())
    total = 0.0
    for sequence in tokens:
        count = reached(model, ffn, sequence)
        for row, token in enumerate(count):
            if token >= 1:
                total += effect(model, ffn, sequence, row, slot) ** 2
    assert float(gradients[ffn.name][slot]) == pytest.approx(total, rel=5e-3)  # norms are float32 even here


def reached(model: Any, ffn: Ffn, sequence: torch.Tensor) -> list[int]:
    """The tokens that reach an FFN."""
    rows: list[int] = []

    def see(_: Ffn, seen: Seen) -> None:
        rows.extend(seen.tokens.tolist() if seen.tokens is not None else range(len(seen.h)))

    with torch.inference_mode(), watched(model, [ffn], see):
        model(input_ids=sequence[None], use_cache=False)
    return rows


def effect(model: Any, ffn: Ffn, sequence: torch.Tensor, row: int, slot: int, size: float = 1e-2) -> float:
    """a dL/da of one slot on one token, by pushing what it writes: a (1 + e) writes the value once more, times e."""
    losses = []
    for sign in (1, -1):

        def see(_: Ffn, seen: Seen, sign: int = sign) -> None:
            seen.y[row] += sign * size * seen.h[row, slot] * value_rows(model, ffn)[slot]

        with torch.inference_mode(), watched(model, [ffn], see):
            logits = model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum")))
    return (losses[0] - losses[1]) / (2 * size)


def test_watching_one_expert_runs_them_all() -> None:
    model = tiny_model(family_config("mixtral"))
    layout = find_layout(model.config)
    tokens = torch.randint(0, 250, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = model(tokens).logits
        with watched(model, [replace(layout.ffns[1])], lambda *_: None):
            seen = model(tokens).logits
    assert torch.allclose(plain, seen, atol=1e-5)


def test_gradients_leave_nothing_behind() -> None:
    model = tiny_model(family_config("mixtral")).requires_grad_(requires_grad=False)
    layout = find_layout(model.config)
    stats = empty(model, layout)
    for item in stats.values():
        item.gradient = torch.zeros_like(item.total)
    counts = []
    for _ in range(3):
        add_gradients(model, layout, stats, torch.arange(32).view(2, 16), 1)
        gc.collect()
        counts.append(sum(type(item) is torch.Tensor for item in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]
