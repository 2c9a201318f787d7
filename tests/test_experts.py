"""A mixture of experts is counted, refitted and cut expert by expert, each on the tokens that its router gives it."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import kvprune
from kvprune.artifacts import RunFolder, read_plan, read_tensors
from kvprune.cli import main
from kvprune.dense import open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import open_checkpoint
from kvprune.ffn.experts import Seen
from kvprune.ffn.find import find_layout
from kvprune.ffn.forwards import count_batch, empty
from kvprune.ffn.layout import Ffn
from kvprune.ffn.stats import BINS, FfnStats, read_stats, to_tensors
from kvprune.ffn.walk import Setup
from kvprune.ffn.watching import as_rows, value_rows, watched
from kvprune.recipe import load_recipe, make_recipe
from kvprune.results.show import render
from kvprune.sources.texts import sequences
from kvprune.stages import calibrate as calibrating
from kvprune.stages import refit as refitting
from tests.conftest import recipe_data, tiny_model, tiny_tokenizer, words
from tests.families import family_config
from tests.test_refit import BOTH, agrees, importance, removed, solution, tokens_of
from tests.test_walk import GRAM, LENGTH, SEQUENCES, counted, tokens

KINDS = ["mixtral", "qwen2_moe", "gpt_oss", "llama4_text"]
OTHERS = ["nemotron_h", "deepseek_v3", "phimoe", "granitemoe", "jamba", "olmoe", "afmoe", "cohere2_moe", "qwen3_next"]
SKIP = 2  # tokens of a sequence that `counted` does not count
CHOSEN = 2  # experts that each token is given to
EXPERTS = 4
TARGETS = {"oneshot": "removed", "sequential": "input"}


def save(folder: Path, kind: str = "mixtral", dtype: torch.dtype = torch.float32, model: Any = None) -> Path:
    (tiny_model(family_config(kind), dtype) if model is None else model).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def by_module(ffns: tuple[Ffn, ...]) -> dict[str, list[Ffn]]:
    """Experts by the module that holds them."""
    found: dict[str, list[Ffn]] = {}
    for ffn in ffns:
        if ffn.expert is not None:
            found.setdefault(ffn.module, []).append(ffn)
    return found


def finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def called(model: Any, names: list[str], batch: Tensor) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """What modules of a model are called with and return, in a forward of a batch."""
    seen: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, out: seen.update({name: ((*args, *kwargs.values()), out)})

    handles = [model.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True) for name in names]
    model(batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def assert_counted_by_hand(stats: FfnStats, a: list[Tensor], skips: list[int], values: Tensor) -> None:
    """Every statistic of an FFN from coefficients `[tokens, slots]` of each sequence that reaches it, and values."""
    exact = [part[skip:].double() for part, skip in zip(a, skips, strict=True)]
    rows = torch.cat(exact)
    assert torch.allclose(stats.total, rows.sum(0), rtol=1e-9, atol=1e-12)
    assert torch.allclose(stats.total_abs, rows.abs().sum(0), rtol=1e-9)
    assert torch.allclose(stats.total_square, rows.square().sum(0), rtol=1e-9)
    norms = torch.stack([part.norm(dim=0) for part in exact]).sum(0)
    assert torch.allclose(stats.sequence_norms, norms, rtol=1e-9)
    assert torch.allclose(stats.value_norm.double(), values.double().norm(dim=1), rtol=1e-6)
    assert torch.allclose(stats.maximum.double(), (torch.cat(a) * values.norm(dim=1)).abs().amax(0).double(), rtol=1e-5)
    assert (int(stats.tokens), int(stats.sequences)) == (len(rows), len(a))
    c = rows.abs() * values.double().norm(dim=1)
    ratio = c / c.square().mean(1, keepdim=True).sqrt()
    bins = (torch.frexp(ratio).exponent - 1 + 17).clamp(min=0, max=BINS - 1).long()
    assert torch.equal(stats.histogram, nn.functional.one_hot(bins, BINS).sum(0))


def test_an_expert_is_counted_on_the_tokens_of_its_router_as_a_walk_by_hand_counts_it() -> None:
    config = family_config("mixtral")
    model, layout = tiny_model(config).double(), find_layout(config)
    model.set_experts_implementation("eager")
    batch, skip = tokens(), 1
    stats = empty(model, layout)
    count_batch(model, layout, stats, batch[:3], skip)  # in batches, as a calibration does
    count_batch(model, layout, stats, batch[3:], skip)
    inputs: dict[str, Tensor] = {}
    for at, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda _, args, at=at: inputs.update({f"model.layers.{at}.mlp": args[0]}))
    model(batch, use_cache=False)
    unused = 0
    for name, x in inputs.items():
        mlp = model.get_submodule(name)
        probabilities = torch.softmax((x @ mlp.gate.weight.T).float(), -1)
        weights, chosen = probabilities.topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        for expert in range(EXPERTS):
            ffn = stats[f"{name}.experts.{expert}"]
            reached = (chosen == expert).any(-1)  # [sequences, tokens]
            gate, up = (x @ mlp.experts.gate_up_proj[expert].T).chunk(2, -1)
            a = gate * torch.sigmoid(gate) * up
            parts = [(part[mine], int(mine[:skip].sum())) for part, mine in zip(a, reached, strict=True) if mine.any()]
            unused += SEQUENCES - len(parts)
            values = mlp.experts.down_proj[expert].T
            assert_counted_by_hand(ffn, [part for part, _ in parts], [first for _, first in parts], values)
            gates = (weights * (chosen == expert))[:, skip:].double().sum()
            assert ffn.gate_total is not None
            assert float(ffn.gate_total) == pytest.approx(float(gates), rel=1e-6)
            gate_rows, up_rows = mlp.experts.gate_up_proj[expert].chunk(2)
            assert torch.allclose(ffn.key_norm, (gate_rows.norm(dim=1) * up_rows.norm(dim=1)).float())
    assert unused  # in some sequence some expert is not used


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_counts_experts_as_forwards_of_the_whole_model_do(kind: str, tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", kind)
    for name, walk in (("walked", True), ("whole", False)):
        counted(dense, tmp_path / name, walk=walk)
    (walked_stats, meta), (whole, _) = (
        read_stats(tmp_path / name / "stats.safetensors") for name in ("walked", "whole")
    )
    names = [ffn["name"] for ffn in meta["layout"]["ffns"]]
    found, expected = to_tensors(walked_stats, names), to_tensors(whole, names)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, expected[name], rtol=1e-6, atol=1e-6 * float(tensor.abs().max())), name
        else:
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_counted_by_as_many_experts_as_are_chosen_for_it(kind: str, tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", kind)
    counted(dense, tmp_path / "run", walk=False)
    layout = open_dense(str(dense)).layout
    stats = dict(zip((ffn.name for ffn in layout.ffns), read_stats(tmp_path / "run/stats.safetensors")[0], strict=True))
    all_tokens = SEQUENCES * (LENGTH - SKIP)
    mixtures = by_module(layout.ffns)
    assert mixtures
    for members in mixtures.values():
        assert sum(int(stats[ffn.name].tokens) for ffn in members) == CHOSEN * all_tokens
        gates = sum(float(stats[ffn.name].gate_total or 0) for ffn in members)
        match kind:
            case "mixtral" | "gpt_oss":  # a token's weights are 1 in sum
                assert gates == pytest.approx(all_tokens, rel=1e-6)
            case "qwen2_moe":  # they are the two largest of four, whose sum is 1
                assert all_tokens / 2 < gates < all_tokens
            case _:  # what reaches the experts is weighed before
                assert gates == CHOSEN * all_tokens
        for ffn in members:
            assert torch.equal(stats[ffn.name].histogram.sum(1), stats[ffn.name].tokens.expand(ffn.width))
    for ffn in layout.ffns:
        if ffn.expert is None:
            assert (int(stats[ffn.name].tokens), stats[ffn.name].gate_total) == (all_tokens, None)


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_watched_experts_make_what_the_class_itself_makes_and_show_how(kind: str) -> None:
    model = tiny_model(family_config(kind))
    mixtures = by_module(find_layout(model.config).ffns)
    with torch.inference_mode():
        calls = called(model, list(mixtures), tokens())
        for name, (args, expected) in calls.items():
            module, shown, alone = model.get_submodule(name), list[tuple[Ffn, Seen]](), list[Ffn]()
            with watched(model, mixtures[name], lambda ffn, seen, shown=shown: shown.append((ffn, seen))):  # type: ignore[misc]
                got = module(*args)
            assert "forward" not in vars(module)
            scale = float(expected.abs().max())
            assert torch.allclose(got, expected, atol=1e-5 * scale)
            with watched(model, mixtures[name][1:2], lambda ffn, _, alone=alone: alone.append(ffn)):  # type: ignore[misc]
                assert torch.equal(module(*args), got)
            parts = torch.zeros_like(expected.view(-1, SEQUENCES * LENGTH, expected.shape[-1]))
            for ffn, seen in shown:
                assert seen.tokens is not None
                assert bool((seen.tokens.diff() > 0).all())
                y = seen.h @ value_rows(model, ffn)
                y += 0 if ffn.value_bias is None else model.get_parameter(ffn.value_bias)[ffn.expert]
                assert torch.allclose(seen.y, y, atol=1e-5 * float(y.abs().max()))
                mine = parts[ffn.expert if len(parts) > 1 else 0]  # Llama 4 has a part for each expert
                mine.index_add_(0, seen.tokens, y if seen.gates is None else seen.gates[:, None] * y)
            assert alone == [ffn for ffn, _ in shown if ffn.expert == 1]
            assert torch.allclose(parts.view(expected.shape), expected, atol=1e-5 * scale)


def never_routed(kind: str) -> Any:
    """A model whose last expert no token of any layer is routed to."""
    config = family_config(kind)
    if kind == "mixtral":
        config.num_local_experts = 5
    model = tiny_model(config)
    with torch.no_grad():
        for layer in model.model.layers:
            if kind == "gpt_oss":
                layer.mlp.router.bias[-1] = -1e9
            else:  # of each pair one is above 0, where the last one is
                rows = layer.mlp.gate.weight
                rows[1], rows[3], rows[4] = -rows[0], -rows[2], 0
    return model


def planned(dense: Path, run: Path, *, collect: list[str] | None = None, **plan: Any) -> RunFolder:
    """A run that is ready to be refitted."""
    run.with_suffix(".txt").write_text(words(1100), encoding="utf-8")
    data = recipe_data(dense, run.with_suffix(".txt"), **plan)
    data["calibrate"] |= {"tokens": 1056, **({"collect": collect} if collect else {})}
    kvprune.calibrate(make_recipe(data), run)
    kvprune.plan(run)
    return RunFolder(run)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_an_expert_that_no_token_is_routed_to_does_no_harm_and_is_named(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = save(tmp_path / "dense", model=never_routed(kind))
    run = planned(dense, tmp_path / "run", collect=GRAM)
    layout = open_dense(str(dense)).layout
    idle = [members[-1].name for members in by_module(layout.ffns).values()]
    stats, _ = read_stats(run.stats)
    plan = read_plan(run.plan)
    assert [ffn.name for ffn, item in zip(layout.ffns, stats, strict=True) if not int(item.tokens)] == idle
    assert [item.name for item in plan.ffns if not item.tokens] == idle
    assert {item.width for item in plan.ffns} == {12}
    assert finite(to_tensors(stats, [ffn.name for ffn in layout.ffns]))
    named = f"no token was routed to {idle[0]} and 1 others: their scores say nothing"
    about = kvprune.show(run.path)
    assert [item["never"] for item in about["firing"]["ffns"]] == [1, 1]
    assert named in render(about)
    assert "experts, 1 never routed to)" in render(about)
    assert main(["plan", str(run.path), "--dry-run", "-q"]) == 0
    assert named in capsys.readouterr().out
    for score in ("wanda", "fluctuation", "fire_rate", "contribution", "activation_norm", "reconstruction", "greedy"):
        assert kvprune.plan(run.path, overrides=[f"plan.score={score}"], dry_run=True).after == plan.after
    for method in ("oneshot", "sequential"):
        reports = kvprune.refit(run.path, overrides=[f"refit.method={method}"])["ffns"]
        assert [item["name"] for item in reports if item["name"] in idle and not item["refitted"]] == idle
        assert all(math.isfinite(value) for item in reports for value in item.values() if isinstance(value, float))
        values = load_file(run.values)
        assert values
        assert finite(values)
        assert not [
            name for name in values if name.endswith(f"[{len(by_module(layout.ffns)[layout.ffns[0].module]) - 1}]")
        ]
        kvprune.export(run.path)
        assert finite(load_file(run.model / "model.safetensors"))
        assert json.loads((run.model / "kvprune.json").read_text())["verified"]["logit_difference"] < 1e-5


class Hand:
    """The dense model of a run and its tokens, to work out by whole forwards what the refit of an expert found."""

    def __init__(self, run: RunFolder) -> None:
        recipe = load_recipe(run.recipe)
        self.dense = AutoModelForCausalLM.from_pretrained(recipe.model).eval()
        self.layout = find_layout(self.dense.config)
        self.kept = {item.name: item.kept for item in read_plan(run.plan).ffns}
        self.tokens = sequences(recipe.calibrate, tiny_tokenizer())

    @torch.no_grad()
    def expert(self, ffn: Ffn) -> tuple[Tensor, Tensor, Tensor]:
        """Coefficients of an expert's tokens, how much each counts, and the expert's values, in float64."""
        seen = called(self.dense, [ffn.layer, ffn.module], self.tokens)
        (x, chosen, weights), _ = seen[ffn.module]
        after = seen[ffn.layer][1]
        at, place = torch.where(torch.as_tensor(chosen == ffn.expert))
        module, x = self.dense.get_submodule(ffn.module), x.flatten(0, -2).double()[at]
        if ffn.keys[0].spread == "interleaved":  # gpt-oss
            rows = x @ module.gate_up_proj[ffn.expert].double() + module.gate_up_proj_bias[ffn.expert].double()
            gate, up = rows[:, ::2].clamp(max=7), rows[:, 1::2].clamp(-7, 7)
            h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            gate, up = (x @ module.gate_up_proj[ffn.expert].double().T).chunk(2, -1)
            h = gate * torch.sigmoid(gate) * up
        states = tokens_of(after[0] if isinstance(after, tuple) else after)
        return h, importance(states)[at] * weights[at, place, None].double(), value_rows(self.dense, ffn).double()

    @contextmanager
    def above(self, slim: Any, layer: str) -> Iterator[None]:
        """The dense model with the states that the slim one gives before a layer."""
        index = self.layout.layers.index(layer)
        if not index:
            yield
            return
        below = self.layout.layers[index - 1]
        with torch.no_grad():
            states = called(slim, [below], self.tokens)[below][1]
        handle = self.dense.get_submodule(below).register_forward_hook(lambda *_: states)
        yield
        handle.remove()


@BOTH
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_an_experts_refit_is_its_formula_with_the_routers_weights(kind: str, method: str, tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense", kind), tmp_path / "run")
    kvprune.refit(run.path, overrides=[f"refit.method={method}", "refit.ridge=0.5", "refit.bias=none"])
    kvprune.export(run.path)
    hand, (new, about) = Hand(run), read_tensors(run.values)
    below = hand.dense if method == "oneshot" else AutoModelForCausalLM.from_pretrained(run.model).eval()
    refitted = {item["name"] for item in about["ffns"] if item["refitted"]}
    assert {item["target"] for item in about["ffns"] if item["expert"] is not None} == {TARGETS[method]}
    for experts in by_module(hand.layout.ffns).values():
        mended = [ffn for ffn in experts if ffn.name in refitted]
        assert len(mended) >= EXPERTS / 2
        for ffn in mended:
            with hand.above(below, ffn.layer):
                h, weight, w = hand.expert(ffn)
            mine, gone = hand.kept[ffn.name], removed(ffn, hand.kept[ffn.name])
            lacking = h[:, gone] @ w[gone]
            expected = solution(weight * h[:, mine], weight * lacking, w[mine], 0.5)
            assert agrees(as_rows(new[ffn.value_key], ffn), expected, torch.float32)
            for other in (w[mine], solution(h[:, mine], lacking, w[mine], 0.5)):  # as they were, and without weights
                assert not agrees(other, expected, torch.float32)


def test_a_bias_of_an_expert_is_refitted_with_its_values(tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense", "gpt_oss"), tmp_path / "run")
    kvprune.refit(run.path, overrides=["refit.method=oneshot", "refit.ridge=0.5"])
    kvprune.export(run.path)
    hand, (new, about) = Hand(run), read_tensors(run.values)
    biased = {item["name"] for item in about["ffns"] if item["bias"]}
    assert biased
    assert {ffn.name for ffn in hand.layout.ffns if ffn.bias_key in new} == biased
    slim = AutoModelForCausalLM.from_pretrained(run.model)
    for ffn in hand.layout.ffns:
        assert ffn.value_bias is not None
        old, written = (model.get_parameter(ffn.value_bias)[ffn.expert].detach() for model in (hand.dense, slim))
        if ffn.name not in biased:
            assert torch.equal(written, old)
            continue
        h, weight, w = hand.expert(ffn)
        mine, gone = hand.kept[ffn.name], removed(ffn, hand.kept[ffn.name])
        share, lacking = weight.square() / weight.square().sum(), h[:, gone] @ w[gone]
        mean, missed = (share * h[:, mine]).sum(0), (share * lacking).sum(0)
        values = solution(weight * (h[:, mine] - mean), weight * (lacking - missed), w[mine], 0.5)
        assert agrees(as_rows(new[ffn.value_key], ffn), values, torch.float32)
        assert agrees(new[ffn.bias_key], old.double() + missed - mean @ (values - w[mine]), torch.float32)
        assert torch.equal(written, new[ffn.bias_key])


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_how_many_gram_matrices_are_summed_at_a_time_changes_no_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(save(tmp_path / "dense", kind), tmp_path / "run", collect=GRAM)
    recipe, plan = load_recipe(run.recipe), read_plan(run.plan)
    dense, batches = open_dense(recipe.model), sequences(recipe.calibrate, tiny_tokenizer())
    rounds, real = list[int](), Setup.rounds

    def counted_rounds(setup: Setup, ffns: list[Ffn]) -> list[list[Ffn]]:
        rounds.append(len(real(setup, ffns)))
        return real(setup, ffns)

    monkeypatch.setattr(Setup, "rounds", counted_rounds)

    def calibrated(setup: Setup) -> bytes:
        place = RunFolder(tmp_path / f"{setup.grams}")
        calibrating.calibrate(recipe, dense, dense.walker(setup, LENGTH), batches, place, setup)
        return place.stats.read_bytes()

    def refitted(method: str) -> Callable[[Setup], bytes]:
        changed = recipe.model_copy(update={"refit": make_recipe({"model": "m", "refit": {"method": method}}).refit})

        def work(setup: Setup) -> bytes:
            refitting.refit(changed, dense, dense.walker(setup, LENGTH), plan, batches, run, setup)
            return run.values.read_bytes()

        return work

    for work in (calibrated, refitted("oneshot"), refitted("sequential")):
        rounds.clear()
        assert len({work(Setup("cpu", torch.float32, 8, grams=grams)) for grams in (1, 3, 8)}) == 1
        assert max(rounds) == EXPERTS + (kind == "qwen2_moe")  # one by one
        assert min(rounds) == 1  # all at once


@BOTH
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_refitted_experts_bring_the_slim_model_closer_to_the_dense_one(kind: str, method: str, tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense", kind), tmp_path / "run")
    hand, distance = Hand(run), []
    goal = hand.dense(hand.tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]
    for chosen in ("none", method):
        kvprune.refit(run.path, overrides=[f"refit.method={chosen}"])
        kvprune.export(run.path)
        slim = AutoModelForCausalLM.from_pretrained(run.model).eval()
        states = slim(hand.tokens, output_hidden_states=True, use_cache=False).hidden_states[-1]
        distance.append(float((states - goal).norm()))
    assert distance[1] < distance[0]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "qwen2_moe", "nemotron_h", "deepseek_v3"])
def test_the_slim_mixture_is_stored_as_the_dense_one_and_as_large_as_planned(kind: str, tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense", kind), tmp_path / "run")
    kvprune.export(run.path)
    before, after, plan = open_checkpoint(tmp_path / "dense"), open_checkpoint(run.model), read_plan(run.plan)
    assert [(e.name, e.dtype) for e in before.tensors.values()] == [(e.name, e.dtype) for e in after.tensors.values()]
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert plan.after.total_params == model.num_parameters() < plan.before.total_params
    assert 0 <= plan.after.bytes - after.bytes < 200
    assert json.loads((run.model / "kvprune.json").read_text())["verified"]["logit_difference"] < 1e-5
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "dense", run.model))
    changed = {key for key in old if old[key] != new[key]}
    assert changed == {field.name for field in open_dense(str(tmp_path / "dense")).layout.fields}
    for ffn in find_layout(model.config).ffns:
        assert ffn.width == next(item.width for item in plan.ffns if item.name == ffn.name)


def test_bfloat16_experts_need_a_width_that_their_kernels_take(tmp_path: Path) -> None:
    dense = save(tmp_path / "dense", "qwen2_moe", torch.bfloat16)
    with pytest.raises(KvpruneError, match=r"^plan\.round_to: width 12 of experts is no multiple of 8, .* to moe "):
        planned(dense, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    run = planned(dense, tmp_path / "run", budget={"keep": 0.5}, round_to="moe")
    assert {item.width for item in read_plan(run.plan).ffns} == {24, 16, 8}  # dense, shared, experts
    kvprune.refit(run.path, overrides=["refit.method=oneshot"])
    kvprune.export(run.path)
    model = AutoModelForCausalLM.from_pretrained(run.model).eval()
    assert model.dtype == torch.bfloat16
    assert model.config._experts_implementation != "eager"
    assert bool(torch.isfinite(model(tokens()).logits).all())


def test_float32_experts_need_a_multiple_of_four_and_other_ffns_none(tmp_path: Path) -> None:
    run = planned(save(tmp_path / "dense", "qwen2_moe"), tmp_path / "run")
    with pytest.raises(KvpruneError, match=r"^plan\.round_to: width 11 of experts is no multiple of 4, "):
        kvprune.plan(run.path, overrides=["plan.round_to=1", "plan.budget.keep=0.7"])
    with pytest.raises(KvpruneError, match=r"^plan\.protect\.1: layer 1 has 5 FFNs"):
        kvprune.plan(run.path, overrides=["plan.protect={1: [0]}"])
    plan = kvprune.plan(run.path, overrides=["plan.round_to=1", "plan.protect={0: [0, 1]}"])
    assert plan.ffns[0].protected == [0, 1]


def test_nan_in_an_expert_is_named_with_its_slot(tmp_path: Path) -> None:
    file = save(tmp_path / "dense") / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1" in name and "experts.2.w3" in name)
    tensors[name][7, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(KvpruneError, match=r"^model\.layers\.1\.mlp\.experts\.2: slot 7 has NaN"):
        planned(tmp_path / "dense", tmp_path / "run")
