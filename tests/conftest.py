"""Tiny random models built from real transformers configs, saved as folders that kvprune opens like any other."""

import copy
import json
import os
import random
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvprune.artifacts import FfnPlan, Plan
from kvprune.dense import Dense
from kvprune.ffn.walk import CannotWalkError
from kvprune.stages.plan import layer_fields, model_size
from tests.browser import BROWSERS, Browser

WIDTH = 48
HIDDEN = 32
LAYERS = 2
VOCABULARY = 260

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": WIDTH,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
GPT2 = {"n_embd": HIDDEN, "n_head": 4, "n_layer": LAYERS, "n_positions": 128, "vocab_size": VOCABULARY} | {
    key: COMMON[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
}
# Name to (model type, config values). One for each way in which a supported FFN is built, stored or tied.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "llama-bias-tied": ("llama", {**COMMON, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", COMMON),
    "qwen2": ("qwen2", COMMON),
    "qwen3": ("qwen3", COMMON),
    "gemma2": ("gemma2", {**COMMON, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**COMMON, "query_pre_attn_scalar": 8}),
    "smollm3": ("smollm3", COMMON),
    "olmo2": ("olmo2", COMMON),
    "gpt2": ("gpt2", GPT2),
    "gpt2-inner": ("gpt2", {**GPT2, "n_inner": WIDTH}),
}


def tiny_config(shape: str, **changes: Any) -> Any:
    """The config of one of SHAPES."""
    kind, values = SHAPES[shape]
    return AutoConfig.for_model(kind, **copy.deepcopy({**values, **changes}))


def tiny_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model with weights large enough that its slots differ, norms and biases included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.to(dtype)


def tiny_tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, and BOS, EOS, PAD."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 256)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def save_model(folder: Path, shape: str = "llama", dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """A tiny model and its tokenizer as a checkpoint folder."""
    tiny_model(tiny_config(shape), dtype).save_pretrained(folder, **save)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_plan(dense: Dense, widths: list[int], seed: int) -> Plan:
    """A plan that keeps random slots of every FFN and expert, as many as `widths` says."""
    draw, layout = random.Random(seed), dense.layout
    return Plan(
        provenance={},
        budget={},
        before=model_size(dense, [ffn.width for ffn in layout.ffns]),
        after=model_size(dense, widths),
        ffns=[
            FfnPlan(ffn.name, ffn.width, sorted(draw.sample(range(ffn.width), width)))
            for ffn, width in zip(layout.ffns, widths, strict=True)
        ],
        layers=layer_fields(layout, widths),
    )


def words(count: int) -> str:
    """A text that is neither constant nor random."""
    alphabet = string.ascii_lowercase
    return " ".join(alphabet[at % 26] * (at % 7 + 1) + alphabet[at * at % 26] for at in range(count))


def recipe_data(model: Path, text: Path, **plan: Any) -> dict[str, Any]:
    """A small recipe of a local model and text."""
    return {
        "model": str(model),
        "calibrate": {"text": str(text), "tokens": 512, "sequence_length": 32},
        "plan": {"budget": {"keep": 0.75}, "round_to": 4, **plan},
        "evaluate": {"tasks": ["builtin"], "limit": 1, "max_length": 64},
    }


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """A task file of lm-eval and its documents: how likely is `a` after `q`. `more` are other values of it."""
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    data = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "output_type": "loglikelihood",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "perplexity"}],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(data | more), encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The real model first: where processes share the files, the slowest must not be the last."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """Tests share nothing with the user's cache, but for the real model, which is dequantised once a session."""
    real = request.node.get_closest_marker("real") is not None
    base = Path(os.environ.get("KVPRUNE_TEST_CACHE") or tmp_path_factory.getbasetemp() / "cache")
    monkeypatch.setenv("KVPRUNE_CACHE", str(base if real else tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def any_cpu(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """Tiny models run in the type that they are stored in; the real one as is fastest on the machine."""
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setattr("kvprune.dense.has_bfloat16", lambda: True)


@pytest.fixture
def cannot_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is one that cannot be run layer by layer."""

    def refuse(*_: Any) -> None:
        raise CannotWalkError("its layers are shy")

    monkeypatch.setattr(Dense, "walker", refuse)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file of about 3,000 bytes."""
    file = tmp_path / "text.txt"
    file.write_text(words(500), encoding="utf-8")
    return file


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a checkpoint folder: `make_folder("gpt2", torch.bfloat16, max_shard_size="20KB")`."""
    return lambda *args, **kwargs: save_model(tmp_path / "dense", *args, **kwargs)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of pages; they are skipped where none is installed."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"no browser is installed (one of {', '.join(BROWSERS)})")
    running = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def data() -> Path:
    """The folder of public data sets that benchmarks and some tests read."""
    folder = os.environ.get("KVPRUNE_DATA")
    if not folder:
        pytest.skip("KVPRUNE_DATA is not set: no data sets to test with")
    return Path(folder)
