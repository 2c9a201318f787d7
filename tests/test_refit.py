"""Refitted values are the solutions that they should be, worked out by hand from whole forwards, and they help."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import kvprune
from kvprune.artifacts import RunFolder, read_plan, read_tensors
from kvprune.ffn import fitting
from kvprune.ffn.find import find_layout
from kvprune.ffn.fitting import token_weights
from kvprune.ffn.layout import Ffn
from kvprune.recipe import load_recipe, make_recipe
from kvprune.results.table import refit_table
from kvprune.sources.texts import sequences
from tests.conftest import COMMON, SHAPES, recipe_data, tiny_config, tiny_model, tiny_tokenizer, words

SKIP = 2  # tokens of a sequence that are not counted by calibrate; a refit reads them all
LENGTH = 32
BOTH = pytest.mark.parametrize("method", ["oneshot", "sequential"])
GRANITE = {**{key: value for key, value in COMMON.items() if key != "head_dim"}, "residual_multiplier": 0.3}


def save(
    folder: Path,
    shape: str = "llama",
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    loud: int = 1,
    **saving: Any,
) -> Path:
    """A tiny model of SHAPES, or a granite, of so many layers, whose FFNs are so many times louder."""
    if shape == "granite":
        config = AutoConfig.for_model("granite", **{**GRANITE, "num_hidden_layers": layers})
    else:
        config = tiny_config(shape, **{"n_layer" if SHAPES[shape][0] == "gpt2" else "num_hidden_layers": layers})
    model = tiny_model(config, dtype)
    for ffn in find_layout(config).ffns:
        model.get_parameter(ffn.value.name).data *= loud
    model.save_pretrained(folder, **saving)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def planned(
    dense: Path, run: Path, *, tokens: int = 1056, dtype: str = "auto", plan: Any = None, **refit: Any
) -> RunFolder:
    """A run folder that is ready to be refitted."""
    text = run.with_name(f"{run.name}.txt")
    text.write_text(words(tokens), encoding="utf-8")
    data = recipe_data(dense, text, **(plan or {}))
    data["calibrate"] |= {"tokens": tokens, "sequence_length": LENGTH, "skip_first": SKIP}
    data |= {"refit": refit, "dtype": dtype}
    kvprune.calibrate(make_recipe(data), run)
    kvprune.plan(run)
    return RunFolder(run)


def refitted(dense: Path, run: Path, **refit: Any) -> RunFolder:
    place = planned(dense, run, **refit)
    kvprune.refit(place.path)
    return place


def found(run: RunFolder) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """What a refit wrote: tensors by name, and what it says of each FFN."""
    tensors, about = read_tensors(run.values)
    return tensors, about["ffns"]


class Hand:
    """The dense model, plan and tokens of a run, to work out by whole forwards what the refit found layer by layer."""

    def __init__(self, run: RunFolder) -> None:
        recipe = load_recipe(run.recipe)
        self.folder, self.plan = Path(recipe.model), read_plan(run.plan)
        self.dense = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        self.tokens = sequences(recipe.calibrate, AutoTokenizer.from_pretrained(self.folder))
        self.layout = find_layout(self.dense.config)

    def slim(self, values: dict[str, Tensor] | None = None) -> Any:
        """The slim model, made of slices of the dense one and the `values`."""
        config = AutoConfig.from_pretrained(self.folder)
        (field,) = self.layout.fields
        setattr(config, field.name, self.plan.ffns[0].width)
        model = AutoModelForCausalLM.from_config(config, dtype=self.dense.dtype).eval()
        weights = dict(self.dense.state_dict())
        for ffn, item in zip(self.layout.ffns, self.plan.ffns, strict=True):
            for param in ffn.cuts():
                weights[param.name] = weights[param.name].index_select(param.axis, torch.tensor(item.kept))
        model.load_state_dict(weights | (values or {}))
        return model

    @torch.no_grad()
    def watch(self, model: Any, name: str) -> tuple[Tensor, Tensor]:
        """Input and output of a module over all tokens, batch by batch as the refit had them."""
        seen: list[tuple[Tensor, Tensor]] = []

        def hook(_: Any, args: tuple[Tensor, ...], output: Any) -> None:
            seen.append((args[0], output[0] if isinstance(output, tuple) else output))

        handle = model.get_submodule(name).register_forward_hook(hook)
        for batch in torch.split(self.tokens, 8):
            model(batch, use_cache=False)
        handle.remove()
        return torch.cat([before for before, _ in seen]), torch.cat([after for _, after in seen])

    def states(self, model: Any, index: int = -1) -> Tensor:
        """Hidden states after a decoder layer, tokens as rows."""
        return tokens_of(self.watch(model, self.layout.layers[index])[1])

    def values(self, index: int) -> Tensor:
        """All values of a layer, float64 `[slots, hidden]`."""
        return as_rows(self.layout.ffns[index], self.dense.get_parameter(self.layout.ffns[index].value.name))


def as_rows(ffn: Ffn, weight: Tensor) -> Tensor:
    return (weight if ffn.value.axis == 0 else weight.T).detach().double()


def tokens_of(states: Tensor) -> Tensor:
    """Tokens as rows, in float64."""
    return states.flatten(0, 1).double()


def removed(ffn: Ffn, kept: list[int]) -> list[int]:
    return [slot for slot in range(ffn.width) if slot not in kept]


def solution(h: Tensor, r: Tensor, w: Tensor, ridge: float) -> Tensor:
    """w + (HᵀH + λD)⁻¹ HᵀR."""
    gram, length = h.T @ h, w.norm(dim=1)
    damping = ridge * (gram.diagonal() * length.square()).mean() / length.square()
    change: Tensor = torch.linalg.solve(gram + torch.diag(damping), h.T @ r)
    return w + change


def importance(after: Tensor, slim: Tensor | None = None) -> Tensor:
    """What a token's error is multiplied with, `[tokens, 1]`: the less, the louder the states after the layer.

    Nothing where those of the slim run are farther from them than 0 is.
    """
    distance = 0 * after if slim is None else slim - after
    near = distance.norm(dim=1, keepdim=True) <= after.norm(dim=1, keepdim=True)
    weight: Tensor = after.square().mean(1, keepdim=True).rsqrt() * near
    return weight


def agrees(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to the rounding of what is stored, and of float32 sums."""
    near = torch.finfo(dtype).eps * expected.abs() + 1e-4 * expected.abs().max()
    return got.shape == expected.shape and bool(((got.double() - expected).abs() <= near).all())


@BOTH
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_with_every_slot_kept_nothing_changes(shape: str, method: str, tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", shape)
    run = refitted(dense, tmp_path / "run", plan={"budget": {"keep": 1.0}}, method=method)
    tensors, layers = found(run)
    assert tensors == {}
    assert [layer["refitted"] for layer in layers] == [False, False]
    kvprune.export(run.path)
    old, new = load_file(dense / "model.safetensors"), load_file(run.model / "model.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("gpt2", torch.float32),
        ("gemma3", torch.bfloat16),
        ("llama-bias-tied", torch.float32),
    ],
)
def test_oneshot_is_its_formula_on_the_dense_model(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run = refitted(save(tmp_path / "dense", shape, dtype), tmp_path / "run", method="oneshot", ridge=0.5, bias="none")
    hand, (tensors, layers) = Hand(run), found(run)
    assert [(layer["refitted"], layer["target"]) for layer in layers] == [(True, "removed")] * 2
    for at, (ffn, item) in enumerate(zip(hand.layout.ffns, hand.plan.ffns, strict=True)):
        h, w, gone = tokens_of(hand.watch(hand.dense, ffn.module)[0]), hand.values(at), removed(ffn, item.kept)
        h = h * importance(hand.states(hand.dense, at))
        new = tensors.pop(ffn.value.name)
        assert new.dtype == dtype
        expected = solution(h[:, item.kept], h[:, gone] @ w[gone], w[item.kept], 0.5)
        assert agrees(as_rows(ffn, new), expected, dtype)
        assert not agrees(w[item.kept], expected, dtype)
    assert tensors == {}


@pytest.mark.parametrize(
    ("shape", "target", "loud"),
    [
        ("llama", "input", 1),
        ("llama", "output", 1),
        ("llama", "residual", 1),
        ("llama", "residual", 30),  # the slim run is lost on some tokens
        ("gpt2", "input", 1),
        ("gpt2", "residual", 1),
        ("granite", "output", 1),
        ("granite", "residual", 1),
    ],
)
def test_sequential_is_solved_on_what_the_slim_layers_below_give(
    shape: str, target: str, loud: int, tmp_path: Path
) -> None:
    dense = save(tmp_path / "dense", shape, loud=loud)
    plan = {"budget": {"keep": 0.75 if loud == 1 else 0.25}}
    run = refitted(dense, tmp_path / "run", plan=plan, method="sequential", target=target, ridge=0.5, bias="none")
    hand, (tensors, layers) = Hand(run), found(run)
    assert [(layer["refitted"], layer["target"]) for layer in layers] == [(True, target)] * 2
    below, lost = dict[str, Tensor](), 0
    for at, (ffn, item) in enumerate(zip(hand.layout.ffns, hand.plan.ffns, strict=True)):
        slim, scale = hand.slim(below), 0.3 if shape == "granite" else 1
        h, written = map(tokens_of, hand.watch(slim, ffn.module))
        after = hand.states(hand.dense, at)
        if target == "input":
            goal = tokens_of(hand.dense.get_submodule(ffn.name)(hand.watch(slim, ffn.name)[0]).detach())
            lacking, after = goal - written, hand.states(slim, at) + scale * (goal - written)
        elif target == "output":
            lacking = tokens_of(hand.watch(hand.dense, ffn.module)[1]) - written
        else:
            lacking = (after - hand.states(slim, at)) / scale
        weight = importance(after, None if target == "input" else hand.states(slim, at))
        lost += int(weight.eq(0).sum())
        expected = solution(h * weight, lacking * weight, hand.values(at)[item.kept], 0.5)
        assert agrees(as_rows(ffn, tensors[ffn.value.name]), expected, torch.float32)
        below[ffn.value.name] = tensors[ffn.value.name]
    assert set(below) == set(tensors)
    assert (lost > 0) == (loud > 1)


@BOTH
def test_what_runs_in_a_lower_type_loses_no_digits_of_what_is_stored(method: str, tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense", "gpt2"), tmp_path / "run", dtype="bfloat16", method=method, ridge=1e6)
    kvprune.refit(run.path, overrides=["refit.bias=none"])
    tensors, hand = found(run)[0], Hand(run)
    assert tensors
    for at, (ffn, item) in enumerate(zip(hand.layout.ffns, hand.plan.ffns, strict=True)):
        new, old = tensors.get(ffn.value.name), hand.values(at)[item.kept]
        assert new is None or float((new - old).abs().max()) < 1e-4 * float(old.abs().max())
        assert float((old.bfloat16() - old).abs().max()) > 1e-3 * float(old.abs().max())


def test_a_bias_that_is_there_is_refitted_with_the_values(tmp_path: Path) -> None:
    run = refitted(save(tmp_path / "dense", "gpt2"), tmp_path / "run", method="oneshot", ridge=0.5)
    (tensors, layers), hand = found(run), Hand(run)
    assert [layer["bias"] for layer in layers] == [True, True]
    for at, (ffn, item) in enumerate(zip(hand.layout.ffns, hand.plan.ffns, strict=True)):
        h, w, gone = tokens_of(hand.watch(hand.dense, ffn.module)[0]), hand.values(at), removed(ffn, item.kept)
        weight = importance(hand.states(hand.dense, at))
        share = weight.square() / weight.square().sum()
        mine, lacking = h[:, item.kept], h[:, gone] @ w[gone]
        mean, missed = (share * mine).sum(0), (share * lacking).sum(0)
        new = solution(weight * (mine - mean), weight * (lacking - missed), w[item.kept], 0.5)
        old = hand.dense.get_parameter(ffn.value_bias).detach().double()
        assert agrees(as_rows(ffn, tensors[ffn.value.name]), new, torch.float32)
        expected = old + missed - mean @ (new - w[item.kept])
        assert agrees(tensors[ffn.bias_key], expected, torch.float32)
        assert not agrees(old, expected, torch.float32)


def test_a_token_counts_by_the_size_of_its_state_unless_the_slim_run_lost_it() -> None:
    after = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    slim = after.clone()
    slim[0, 1] *= -0.1
    slim[1, 3] *= 0.1  # far, and yet on its way
    expected = importance(after.flatten(0, 1), slim.flatten(0, 1)).view(2, 5)
    assert expected.eq(0).nonzero().tolist() == [[0, 1]]
    assert torch.allclose(token_weights(after, slim), expected)
    assert bool(token_weights(after).gt(0).all())
    assert bool(token_weights(0 * after).isfinite().all())


@BOTH
def test_the_errors_told_are_those_on_held_back_tokens(method: str, tmp_path: Path) -> None:
    run = refitted(save(tmp_path / "dense"), tmp_path / "run", method=method, ridge=0.5, bias="none")
    hand, layer = Hand(run), found(run)[1][0]
    ffn, kept = hand.layout.ffns[0], hand.plan.ffns[0].kept
    w, gone = hand.values(0), removed(ffn, kept)
    held = (torch.arange(len(hand.tokens)) % 8 == 1).repeat_interleave(LENGTH)
    weight = importance(hand.states(hand.dense, 0), hand.states(hand.slim(), 0) if method == "sequential" else None)
    coefficients, written = (weight * tokens_of(part) for part in hand.watch(hand.dense, ffn.module))
    h, others = coefficients[held], coefficients[~held]
    new = solution(others[:, kept], others[:, gone] @ w[gone], w[kept], 0.5)
    energy = float(written[held].square().sum())
    before = float((h[:, gone] @ w[gone]).square().sum()) / energy
    after = float((h @ w - h[:, kept] @ new).square().sum()) / energy
    assert layer["error_before"] == pytest.approx(before, rel=1e-4)
    assert layer["error_after"] == pytest.approx(after, rel=1e-4)
    assert after < before


@pytest.mark.parametrize("shape", ["gemma2", "gemma3", "olmo2"])
def test_where_a_norm_follows_the_ffn_its_output_is_the_target_and_that_is_said(shape: str, tmp_path: Path) -> None:
    run = refitted(save(tmp_path / "dense", shape), tmp_path / "run", method="sequential", target="residual")
    asked = found(run)
    assert [layer["target"] for layer in asked[1]] == ["output", "output"]
    kvprune.refit(run.path, overrides=["refit.target=output"])
    meant = found(run)
    assert asked[1] == meant[1]
    assert asked[0].keys() == meant[0].keys()
    assert asked[0]
    assert all(torch.equal(tensor, meant[0][name]) for name, tensor in asked[0].items())


@pytest.mark.parametrize("shape", ["llama", "gpt2", "granite"])
def test_refitted_the_slim_model_is_closer_to_the_dense_one(shape: str, tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense", shape, layers=3), tmp_path / "run", tokens=2048, bias="none")
    hand = Hand(run)
    goal = hand.states(hand.dense)
    plain = float((hand.states(hand.slim()) - goal).norm())
    for method in ("oneshot", "sequential"):
        kvprune.refit(run.path, overrides=[f"refit.method={method}"])
        assert float((hand.states(hand.slim(found(run)[0])) - goal).norm()) < plain, method


@BOTH
def test_a_layer_that_fares_worse_on_held_back_tokens_keeps_its_values_and_is_named(
    method: str, tmp_path: Path
) -> None:
    dense = save(tmp_path / "dense")
    run = refitted(dense, tmp_path / "run", tokens=2 * LENGTH, method=method, ridge=1e-9)
    tensors, layers = found(run)
    worse = [layer for layer in layers if not layer["refitted"]]
    assert worse
    kvprune.export(run.path)
    old, new = load_file(dense / "model.safetensors"), load_file(run.model / "model.safetensors")
    for layer in worse:
        assert layer["error_tried"] > layer["error_before"]
        assert layer["error_after"] == layer["error_before"]
        line = next(line for line in refit_table(layers).splitlines() if line.startswith(f"{layer['name']} "))
        assert "values stay" in line
        name = f"{layer['name']}.down_proj.weight"
        assert name not in tensors
        kept = next(item.kept for item in read_plan(run.plan).ffns if item.name == layer["name"])
        assert torch.equal(new[name], old[name][:, kept])


@BOTH
def test_auto_takes_the_ridge_with_the_least_error_on_held_back_tokens(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = (0.0001, 0.0003, 0.001, 0.003, 5.0, 10000.0)  # the search begins in the middle
    monkeypatch.setattr(fitting, "RIDGES", tried)
    run = planned(save(tmp_path / "dense", layers=1), tmp_path / "run", tokens=256, bias="none")
    by_ridge = {}
    for ridge in ("auto", *tried):
        kvprune.refit(run.path, overrides=[f"refit.method={method}", f"refit.ridge={ridge}"])
        by_ridge[ridge] = found(run)
    best = min(tried, key=lambda ridge: by_ridge[ridge][1][0]["error_after"])
    assert best in tried[1:-1]
    assert by_ridge["auto"][1][0] == by_ridge[best][1][0]
    assert by_ridge["auto"][1][0]["ridge"] == best
    assert by_ridge["auto"][0]
    assert all(torch.equal(tensor, by_ridge[best][0][name]) for name, tensor in by_ridge["auto"][0].items())
