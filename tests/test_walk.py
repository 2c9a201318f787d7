"""The walk is the whole model: layer by layer, it finds the same bits as forwards of all of it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

import kvprune
from kvprune.artifacts import RunFolder
from kvprune.dense import Dense, open_dense
from kvprune.errors import KvpruneError
from kvprune.ffn.gram import add_tokens, elimination, empty_gram, mirror
from kvprune.ffn.state import Shelf
from kvprune.ffn.stats import read_stats
from kvprune.ffn.walk import CannotWalkError, Setup, Walker, open_stream
from kvprune.ffn.watching import value_rows
from kvprune.ranks import ALONE
from kvprune.recipe import make_recipe
from kvprune.schema import Recipe
from kvprune.stages import calibrate as calibrating
from tests.conftest import COMMON, SHAPES, recipe_data, save_model, tiny_config, tiny_model, tiny_tokenizer

LENGTH = 24
SEQUENCES = 7
BATCH = 3  # does not divide them
COUNTS, GRAM = ["counts"], ["counts", "gram"]
DTYPES = [torch.float32, torch.bfloat16]


def tokens() -> Tensor:
    return torch.randint(0, 256, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(3))


def counted(
    folder: Path,
    run: Path,
    *,
    walk: bool,
    dtype: str = "auto",
    batch_size: int = BATCH,
    collect: Sequence[str] = COUNTS,
) -> bytes:
    """The statistics of a checkpoint as they are written, by a walk or by forwards of the whole model."""
    data = {"tokens": SEQUENCES * LENGTH, "sequence_length": LENGTH, "skip_first": 2, "collect": collect}
    recipe, dense = make_recipe({"model": str(folder), "dtype": dtype, "calibrate": data}), open_dense(str(folder))
    setup = Setup("cpu", getattr(torch, dense.run_dtype(dtype, "cpu")), batch_size)
    walker = dense.walker(setup, LENGTH) if walk else None
    calibrating.calibrate(recipe, dense, walker, tokens(), RunFolder(run), setup)
    return RunFolder(run).stats.read_bytes()


def assert_walk_is_forwards(folder: Path, tmp_path: Path, **how: Any) -> None:
    assert counted(folder, tmp_path / "walked", walk=True, **how) == counted(
        folder, tmp_path / "whole", walk=False, **how
    )
    assert not (tmp_path / "walked" / ".walk").exists()


def save(folder: Path, config: Any, **changes: Any) -> Path:
    tiny_model(config, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_walk_counts_what_forwards_count_bit_for_bit(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_walk_is_forwards(save_model(tmp_path / "dense", shape, dtype), tmp_path)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_a_walk_is_forwards_at_any_batch_size(batch_size: int, tmp_path: Path) -> None:
    assert_walk_is_forwards(save_model(tmp_path / "dense"), tmp_path, batch_size=batch_size)


@pytest.mark.parametrize("shape", ["llama-bias-tied", "gemma3", "gpt2"])
def test_shards_and_another_dtype_than_the_stored_one_are_walked(shape: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "dense", shape, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_walk_is_forwards(folder, tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("shape", ["llama-bias-tied", "gemma3"])
def test_embeddings_under_the_heads_name_are_found(shape: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "dense", shape)
    assert_walk_is_forwards(folder, tmp_path / "before")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_walk_is_forwards(folder, tmp_path / "after")
    before, after = (load_file(tmp_path / name / "walked/stats.safetensors") for name in ("before", "after"))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["mistral", "gemma2", "gemma3"])
def test_a_window_shorter_than_the_sequence_is_walked(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(shape, sliding_window=5), dtype)
    model.save_pretrained(tmp_path / "dense")
    assert_walk_is_forwards(tmp_path / "dense", tmp_path)
    model.config.sliding_window = LENGTH
    model.save_pretrained(tmp_path / "wide")
    assert_walk_is_forwards(tmp_path / "wide", tmp_path / "w")
    narrow, wide = (load_file(path / "walked/stats.safetensors") for path in (tmp_path, tmp_path / "w"))
    assert not torch.equal(narrow["model.layers.0.mlp:total"], wide["model.layers.0.mlp:total"])  # it does matter


@contextmanager
def walked(dense: Dense, folder: Path, *, in_memory: bool) -> Iterator[Tensor]:
    """The hidden states of all sequences after the last layer."""
    dtype = getattr(torch, dense.run_dtype("auto", "cpu"))
    setup = Setup("cpu", dtype, BATCH, in_memory=in_memory)
    walker, batches = dense.walker(setup, LENGTH), setup.share(tokens())
    shelf = Shelf(folder, folder, ALONE)
    with torch.inference_mode():
        stream = open_stream(walker, "dense", batches, setup, shelf, tokens()[:1], 0)
        for index in range(len(walker.layers)):
            with walker.filled(index):
                for at in range(len(batches)):
                    stream.keep(at, stream.run(index, stream.before(at)))
            shelf.finish(index, [stream.hidden], {}, {})
        yield stream.hidden.states


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_last_hidden_states_are_the_models(shape: str, dtype: torch.dtype, in_memory: bool, tmp_path: Path) -> None:
    dense = open_dense(str(save_model(tmp_path / "dense", shape, dtype)))
    base = dense.load("auto", "cpu").base_model
    norm: nn.Module = base.ln_f if shape.startswith("gpt2") else base.norm
    seen: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with walked(dense, tmp_path / "walk", in_memory=in_memory) as states:
        for batch in torch.split(tokens(), BATCH):
            base(input_ids=batch, use_cache=False)
        assert states.dtype == dtype
        assert torch.equal(states, torch.cat(seen))


def test_only_the_layer_that_runs_has_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[list[int]] = []
    real = Walker.filled

    @contextmanager
    def watched(walker: Walker, index: int) -> Iterator[nn.Module]:
        layers = [walker.layer(at) for at in range(len(walker.layers))]

        def look(*_: Any) -> None:
            held.append([at for at, layer in enumerate(layers) if any(not w.is_meta for w in layer.parameters())])
            assert not any(weight.is_meta for weight in layers[index].parameters())
            assert walker.model.lm_head.weight.is_meta

        with real(walker, index) as layer:
            handle = layer.register_forward_pre_hook(look)
            yield layer
            handle.remove()

    monkeypatch.setattr(Walker, "filled", watched)
    counted(save(tmp_path / "dense", tiny_config("llama", num_hidden_layers=4)), tmp_path / "run", walk=True)
    assert held == [[layer] for layer in range(4) for _ in range(1 + 3)]  # the gains' run, and three batches


def recipe_of(folder: Path, text: Path, **calibrate: Any) -> Recipe:
    data = recipe_data(folder, text)
    return make_recipe({**data, "calibrate": {**data["calibrate"], **calibrate}})


def test_float16_on_a_cpu_is_computed_in_float32_and_that_is_told(
    tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvprune"), "propagate", True)
    model = tiny_model(tiny_config("llama"), torch.float16)
    for name, dtype in (("half", torch.float16), ("single", torch.float32)):
        model.to(dtype).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvprune"):
            kvprune.calibrate(recipe_of(tmp_path / name, text), tmp_path / f"run-{name}")
        assert ("float16 on this CPU: computed in float32" in caplog.text) == (name == "half")
    found, expected = (load_file(tmp_path / f"run-{name}/stats.safetensors") for name in ("half", "single"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert read_stats(tmp_path / "run-half/stats.safetensors")[1]["run"]["dtype"] == "float32"


@pytest.mark.parametrize("has", [True, False])
def test_a_cpu_without_bfloat16_runs_it_only_where_it_is_named(
    has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvprune.dense.has_bfloat16", lambda: has)
    dense = open_dense(str(save_model(tmp_path / "dense", dtype=torch.bfloat16)))
    assert dense.run_dtype("auto", "cpu") == ("bfloat16" if has else "float32")
    assert dense.run_dtype("bfloat16", "cpu") == dense.run_dtype("auto", "cuda") == "bfloat16"


class OddConfig(LlamaConfig):  # type: ignore[misc]
    model_type = "odd-llama"


class OddModel(LlamaModel):  # type: ignore[misc]
    """Does between its layers, or with its tokens, what a walk cannot know of."""

    config_class = OddConfig

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        odd = self.config.odd
        if odd == "tokens":
            kwargs["position_ids"] = input_ids % 7
        if odd != "between":
            return super().forward(input_ids, **kwargs)
        handle = self.layers[0].register_forward_hook(lambda _, __, out: out * 0.5)
        try:
            return super().forward(input_ids, **kwargs)
        finally:
            handle.remove()


class OddForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    config_class = OddConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = OddModel(config)
        if config.odd == "float32":
            self._keep_in_fp32_modules_strict = {"layers.1.mlp.up_proj", "norm"}
        self.post_init()


AutoConfig.register("odd-llama", OddConfig)
AutoModelForCausalLM.register(OddConfig, OddForCausalLM)


def odd_model(folder: Path, odd: str, dtype: torch.dtype) -> Path:
    return save(folder, OddConfig(**COMMON, odd=odd), dtype=dtype)


REASONS = {
    "tokens": "what its layers are called with depends on the tokens",
    "between": "something happens between its layers",
}


@pytest.mark.parametrize("odd", REASONS)
def test_a_model_that_cannot_be_walked_is_counted_by_forwards(
    odd: str, tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvprune"), "propagate", True)
    dtype = torch.float32
    folder = odd_model(tmp_path / "dense", odd, dtype)
    with pytest.raises(CannotWalkError) as refused:
        open_dense(str(folder)).walker(Setup("cpu", dtype, BATCH), LENGTH)
    assert str(refused.value) == REASONS[odd]
    with caplog.at_level(logging.INFO, "kvprune"):
        kvprune.calibrate(recipe_of(folder, text), tmp_path / "run")
    assert f"calibrate: by forwards of the whole model, since {REASONS[odd]}" in caplog.text
    assert kvprune.plan(tmp_path / "run").ffns[0].width == 36
    with pytest.raises(KvpruneError, match=r"calibrate\.collect: gram is summed layer by layer, and") as without_gram:
        kvprune.calibrate(recipe_of(folder, text, collect=GRAM), tmp_path / "gram")
    assert REASONS[odd] in str(without_gram.value)
    assert not (tmp_path / "gram").exists()


def test_what_transformers_keeps_in_float32_is_run_in_it(tmp_path: Path) -> None:
    dense = open_dense(str(odd_model(tmp_path / "dense", "float32", torch.bfloat16)))
    walker = dense.walker(Setup("cpu", torch.bfloat16, BATCH), LENGTH)
    loaded = dense.load("bfloat16", "cpu")
    for index in range(len(walker.layers)):
        with walker.filled(index) as layer:
            kinds = {name: parameter.dtype for name, parameter in layer.named_parameters()}
            assert kinds == {name: p.dtype for name, p in loaded.model.layers[index].named_parameters()}
            assert set(kinds.values()) == {torch.float32, torch.bfloat16}
    assert walker.model.model.norm.weight.dtype == loaded.model.norm.weight.dtype == torch.float32


def test_an_odd_model_in_its_ordinary_state_is_walked(tmp_path: Path) -> None:
    assert_walk_is_forwards(odd_model(tmp_path / "dense", "no", torch.bfloat16), tmp_path)


def test_a_parameter_that_is_stored_in_another_form_is_named(tmp_path: Path) -> None:
    dense = open_dense(str(save_model(tmp_path / "dense")))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"):
        pieces = {key: held for key, held in dense.pieces.items() if key != name}
        with pytest.raises(CannotWalkError, match=f"^its weight files do not hold {name} as one tensor$"):
            replace(dense, pieces=pieces).walker(Setup("cpu", torch.float32, BATCH), LENGTH)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_gram_scores_are_those_of_the_models_coefficients(shape: str, tmp_path: Path) -> None:
    dense = open_dense(str(save_model(tmp_path / "dense", shape)))
    counted(tmp_path / "dense", tmp_path / "run", walk=True, collect=GRAM)
    model = dense.load("auto", "cpu")
    for ffn, stats in zip(dense.layout.ffns, read_stats(tmp_path / "run/stats.safetensors")[0], strict=True):
        sums = empty_gram(ffn.width, 0)
        seen: list[Tensor] = []
        model.get_submodule(ffn.module).register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.inference_mode():
            model.base_model(input_ids=tokens(), use_cache=False)
            add_tokens(sums, seen[0][:, 2:].flatten(0, 1))
            cost, turn = elimination(mirror(sums), value_rows(model, ffn))
        assert stats.removal_cost is not None and stats.removal_turn is not None
        assert torch.allclose(stats.removal_cost, cost, rtol=1e-3)
        assert stats.removal_turn.sort().values.tolist() == list(range(ffn.width))
        assert float((stats.removal_turn - turn).abs().double().mean()) < 1  # float32 sums in another order


def test_gram_scores_plan_and_are_refused_without_the_matrices(tmp_path: Path, text: Path) -> None:
    folder = save_model(tmp_path / "dense")
    kvprune.calibrate(recipe_of(folder, text, collect=GRAM), tmp_path / "run")
    stats = read_stats(tmp_path / "run/stats.safetensors")[0][0]
    kept = {score: kvprune.plan(tmp_path / "run", overrides=[f"plan.score={score}"], dry_run=True).ffns[0].kept
            for score in ("greedy", "reconstruction", "wanda")}  # fmt: skip
    assert stats.removal_cost is not None and stats.removal_turn is not None
    assert kept["greedy"] == sorted(stats.removal_turn.argsort()[12:].tolist())
    assert kept["reconstruction"] == sorted(stats.removal_cost.argsort()[12:].tolist())
    with pytest.raises(
        KvpruneError, match=r"plan\.score: greedy reads Gram matrices, and calibrate\.collect is \[counts\]"
    ):
        data = recipe_data(folder, text, score="greedy")
        make_recipe({**data, "calibrate": {**data["calibrate"], "collect": ["counts"]}})
    assert make_recipe(recipe_data(folder, text, score="greedy")).calibrate.collect == ["counts", "gram"]
