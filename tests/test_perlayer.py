"""Checkpoints whose layers differ in width: cut by hand, loaded by a process that knows nothing of kvprune."""

import ast
import copy
import json
import os
import re
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from kvprune.errors import KvpruneError
from kvprune.ffn.perlayer import CODE_FILE, modeling_code, per_layer_config
from tests.conftest import COMMON, GPT2, WIDTH, tiny_config

LAYERS = 3
SHARES = (0.75, 0.5, 1)  # of each layer's slots; the last layer stays as the config has it for all
TOKENS = torch.arange(1, 25).reshape(2, 12)
BASE = {**COMMON, "num_hidden_layers": LAYERS}
MOE = {**BASE, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QUERY = {**BASE, "query_pre_attn_scalar": 8}
DENSE, EXPERTS = {"": "intermediate_size"}, {"experts": "intermediate_size"}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


class Family(NamedTuple):
    """How to make a model; where its layers are; which field sets the width of an FFN with this in its name."""

    kind: str
    values: dict[str, Any]
    fields: dict[str, str] = DENSE
    layers: str = "model.layers"
    build: str = "AutoModelForCausalLM"


FAMILIES = {
    "llama": Family("llama", {**BASE, "mlp_bias": True}),
    "llama-tied": Family("llama", {**BASE, "tie_word_embeddings": True}),
    "qwen2": Family("qwen2", BASE),
    "qwen3": Family("qwen3", BASE),
    "gemma2": Family("gemma2", QUERY),
    "gemma3_text": Family("gemma3_text", QUERY),
    "phi3": Family("phi3", BASE),
    "gpt2": Family("gpt2", {**GPT2, "n_layer": LAYERS}, {"": "n_inner"}, "transformer.h"),
    "gpt_neox": Family("gpt_neox", BASE, layers="gpt_neox.layers"),
    "opt": Family(
        "opt",
        {**BASE, "ffn_dim": WIDTH, "word_embed_proj_dim": 32, "activation_function": "gelu"},
        {"": "ffn_dim"},
        "model.decoder.layers",
    ),
    "mixtral": Family("mixtral", MOE, EXPERTS),
    "gpt_oss": Family("gpt_oss", MOE, EXPERTS),
    "qwen2_moe": Family(
        "qwen2_moe",
        {**MOE, "shared_expert_intermediate_size": 24},
        {"shared_expert": "shared_expert_intermediate_size", "experts": "moe_intermediate_size"},
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **{key: value for key, value in MOE.items() if key not in ("head_dim", "num_local_experts", "num_experts")},
            **{"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
            **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        },
        {"expert": "moe_intermediate_size", "": "intermediate_size"},
    ),
    "gemma3": Family(
        "gemma3",
        {
            "text_config": QUERY,
            "vision_config": {**VISION, "image_size": 16, "patch_size": 4},
            "mm_tokens_per_image": 4,
        },
        {"": "text_config.intermediate_size"},
        "model.language_model.layers",
    ),
    # A multimodal checkpoint of which AutoModelForCausalLM builds the text model only.
    "qwen3_5": Family(
        "qwen3_5",
        {
            "text_config": {
                **BASE,
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
                **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
                **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 32,
            },
        },
        {"": "text_config.intermediate_size"},
        build="AutoModelForImageTextToText",
    ),
}
# Names on disk: the FFN's own name; the axis of the slots; how many rows a slot has, one after the other or as halves.
KEY, VALUE = "key", "value"
PLACES = [
    (r"(.*\.(?:mlp|experts\.\d+|shared_experts?))\.(?:gate|up)_proj\.(?:weight|bias)", 0, "plain", KEY),
    (r"(.*\.(?:mlp|experts\.\d+|shared_experts?))\.down_proj\.weight", 1, "plain", VALUE),
    (r"(.*\.experts\.\d+)\.w[13]\.weight", 0, "plain", KEY),
    (r"(.*\.experts\.\d+)\.w2\.weight", 1, "plain", VALUE),
    (r"(.*\.mlp)\.gate_up_proj\.weight", 0, "halves", KEY),
    (r"(.*\.experts)\.gate_up_proj(?:_bias)?", -1, "pairs", KEY),
    (r"(.*\.experts)\.down_proj", 1, "plain", VALUE),
    (r"(.*layers\.\d+)\.fc1\.(?:weight|bias)", 0, "plain", KEY),
    (r"(.*layers\.\d+)\.fc2\.weight", 1, "plain", VALUE),
    (r"(.*\.mlp)\.dense_h_to_4h\.(?:weight|bias)", 0, "plain", KEY),
    (r"(.*\.mlp)\.dense_4h_to_h\.weight", 1, "plain", VALUE),
    (r"(.*\.mlp)\.c_fc\.(?:weight|bias)", -1, "plain", KEY),
    (r"(.*\.mlp)\.c_proj\.weight", 0, "plain", VALUE),
]


def kept_slots(ffn: str, slots: int) -> Tensor:
    """Other slots for each FFN (each expert, too), as many as its layer's share."""
    layer = int(re.search(r"\.(\d+)", ffn).group(1))  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(zlib.crc32(ffn.encode()))
    return torch.randperm(slots, generator=generator)[: int(slots * SHARES[layer])].sort().values


def cut_one(tensor: Tensor, axis: int, form: str, role: str, ffn: str) -> tuple[Tensor, Tensor]:
    """What stays of one FFN's tensor; and the whole with the values of the other slots zeroed."""
    slots = tensor.shape[axis] // (1 if form == "plain" else 2)
    kept = kept_slots(ffn, slots)
    rows = {
        "plain": kept,
        "halves": torch.cat([kept, kept + slots]),
        "pairs": (2 * kept[:, None] + torch.tensor([0, 1])).flatten(),
    }
    if role == VALUE:
        gone = torch.tensor([at for at in range(slots) if at not in kept.tolist()], dtype=torch.int64)
        masked = tensor.index_fill(axis, gone, 0)
    else:
        masked = tensor
    return tensor.index_select(axis, rows[form]).contiguous(), masked


def cut(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor on disk: what stays of it, and what the masked original has."""
    for pattern, axis, form, role in PLACES:
        if (match := re.fullmatch(pattern, name)) and "vis" not in name:
            if not match[1].endswith(".experts"):
                return cut_one(tensor, axis, form, role, match[1])
            inner = axis if axis < 0 else axis - 1
            pairs = [cut_one(one, inner, form, role, f"{match[1]}.{at}") for at, one in enumerate(tensor)]
            return torch.stack([kept for kept, _ in pairs]), torch.stack([masked for _, masked in pairs])
    return tensor, tensor


def own_widths(family: Family, config: Any, names: list[str]) -> list[dict[str, int]]:
    """Each layer's fields: those of the FFNs that it has."""
    widths: list[dict[str, int]] = [{} for _ in range(LAYERS)]
    for name in names:
        match = next((match for pattern, *_ in PLACES if (match := re.fullmatch(pattern, name))), None)
        if match is None or "vis" in name:
            continue
        layer = int(re.search(r"\.(\d+)", name).group(1))  # type: ignore[union-attr]
        field = next(field for part, field in family.fields.items() if part in match[1])
        whole = getattr(config.get_text_config(), field.rpartition(".")[2]) or 4 * COMMON["hidden_size"]
        if SHARES[layer] < 1:
            widths[layer][field] = int(whole * SHARES[layer])
    return widths


def stock_class(config: Any) -> type:
    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(config))


def make(base: Path, name: str) -> tuple[Path, Path]:
    """A family's folders: with layers of different widths, and the dense model with the same slots silenced."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.kind, **copy.deepcopy(family.values))
    torch.manual_seed(0)
    model = getattr(transformers, family.build).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    dense, thin = base / f"{name}-dense", base / f"{name}-thin"
    model.save_pretrained(dense)
    thin.mkdir()
    tensors = {key: cut(key, tensor) for key, tensor in load_file(dense / "model.safetensors").items()}
    save_file({key: kept for key, (kept, _) in tensors.items()}, thin / "model.safetensors", {"format": "pt"})
    save_file({key: masked for key, (_, masked) in tensors.items()}, dense / "model.safetensors", {"format": "pt"})
    data = json.loads((dense / "config.json").read_text())
    kind = stock_class(AutoConfig.from_pretrained(dense))
    slim = per_layer_config(data, own_widths(family, config, list(tensors)), kind)
    (thin / "config.json").write_text(json.dumps(slim))
    (thin / CODE_FILE).write_text(modeling_code(kind, family.layers))
    return dense, thin


# Another process, which does not import kvprune.
LOADER = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM

TRUST = {"trust_remote_code": True}
base, names = Path(sys.argv[1]), sys.argv[2:]
tokens, seen, logits = torch.tensor(json.loads((base / "tokens.json").read_text())), {}, {}

def load(folder, **more):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **TRUST, **more)
    with torch.no_grad():
        return model, {key: [str(item) for item in found] for key, found in info.items() if found}, model(tokens).logits

def facts(model):  # of a loaded or a new model, which should be the same for the stock class
    text = model.config.get_text_config()
    own = [module for module in model.modules() if "config" in module.__dict__]
    return {
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "dtypes": {name: str(parameter.dtype) for name, parameter in model.named_parameters()},
        "other configs": sum(module.config is not text for module in own),
        "checkpointing": sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
    }

def build(folder):
    config = AutoConfig.from_pretrained(folder)
    config.get_text_config().gradient_checkpointing = True
    return AutoModelForCausalLM.from_config(config, **TRUST)

for name in names:
    thin, again, dense = (base / f"{name}-{kind}" for kind in ("thin", "again", "dense"))
    model, problems, logits[name] = load(thin)
    new = model.generate(tokens, max_new_tokens=1, do_sample=False, pad_token_id=0)
    model.save_pretrained(again)
    _, more_problems, logits[f"{name}-again"] = load(again)
    half, half_problems, logits[f"{name}-half"] = load(thin, dtype=torch.bfloat16, device_map="cpu")
    stock = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    built = [build(thin), build(dense)]
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(thin), **TRUST)
    seen[name] = {
        "class": type(model).__name__,
        "problems": [problems, more_problems, half_problems],
        "generated": new.shape[1] - tokens.shape[1],
        "loaded": [facts(half), facts(stock)],
        "built": [facts(one) for one in built],
        "spread": [{key: float(p.std()) for key, p in one.named_parameters() if p.numel() > 255} for one in built],
        "widths": [one.config.get_text_config().to_dict()["per_layer_config"] for one in (model, built[0], meta)],
        "meta": all(parameter.is_meta for parameter in meta.parameters()),
    }
assert "kvprune" not in sys.modules
torch.save(logits, base / "logits.pt")
(base / "seen.json").write_text(json.dumps(seen))
"""


@dataclass
class Loaded:
    """What the other process saw: of each family what it loaded, and logits by name."""

    base: Path
    seen: dict[str, Any]
    logits: dict[str, Tensor]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """All families' folders, loaded in one fresh process."""
    base = tmp_path_factory.mktemp("perlayer")
    for name in FAMILIES:
        make(base, name)
    (base / "tokens.json").write_text(json.dumps(TOKENS.tolist()))
    environment = {**os.environ, "HF_MODULES_CACHE": str(base / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOADER, str(base), *FAMILIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=base, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads((base / "seen.json").read_text())
    return Loaded(base, seen, torch.load(base / "logits.pt", weights_only=True))


def close(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fresh_process_loads_the_masked_original(loaded: Loaded, name: str) -> None:
    seen = loaded.seen[name]
    masked = AutoModelForCausalLM.from_pretrained(loaded.base / f"{name}-dense")
    with torch.no_grad():
        expected = masked(TOKENS).logits
    assert seen["class"] == f"Kvprune{type(masked).__name__}"
    assert seen["problems"] == [{}, {}, {}]
    assert seen["generated"] == 1
    assert close(loaded.logits[name], expected) < 1e-5
    half = (loaded.logits[f"{name}-half"] - expected).abs()
    assert half.median() < 0.02 * expected.abs().max()  # a router may choose other experts for a token or two


@pytest.mark.parametrize("name", FAMILIES)
def test_all_but_the_widths_is_as_in_the_stock_class(loaded: Loaded, name: str) -> None:
    seen = loaded.seen[name]
    for mine, stock in (seen["loaded"], seen["built"]):
        assert mine == stock
    assert seen["built"][0]["checkpointing"] >= LAYERS
    assert seen["meta"]
    assert seen["widths"][0] == seen["widths"][1] == seen["widths"][2] != {}
    new, stock = seen["spread"]
    assert new == {key: pytest.approx(stock[key], rel=0.35) for key in new}  # initialised in the same way


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_model_is_such_a_folder_again(loaded: Loaded, name: str) -> None:
    thin, again = loaded.base / f"{name}-thin", loaded.base / f"{name}-again"
    assert torch.equal(loaded.logits[f"{name}-again"], loaded.logits[name])
    assert (again / CODE_FILE).read_text() == (thin / CODE_FILE).read_text()
    first, second = (AutoConfig.from_pretrained(folder) for folder in (thin, again))
    widths = [config.get_text_config().to_dict()["per_layer_config"] for config in (first, second)]
    assert widths[0] == widths[1]
    assert first.auto_map == second.auto_map
    assert first.architectures == second.architectures
    tensors = [{key: t.shape for key, t in load_file(folder / "model.safetensors").items()} for folder in (thin, again)]
    if name != "qwen3_5":  # of a multimodal checkpoint the text model is saved
        assert tensors[0] == tensors[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_without_its_code_a_folder_does_not_load(loaded: Loaded, name: str) -> None:
    thin = loaded.base / f"{name}-thin"
    for trust in (None, False):
        with pytest.raises(AmbiguousGlobalPerLayerAttributeError):
            AutoModelForCausalLM.from_pretrained(thin, trust_remote_code=trust)
    with pytest.raises(AmbiguousGlobalPerLayerAttributeError):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(thin))
    with pytest.raises(AmbiguousGlobalPerLayerAttributeError):
        AutoModel.from_pretrained(thin)


def data_of(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    return {**json.loads(tiny_config(kind).to_json_string()), **changes}


def test_config_names_only_what_differs() -> None:
    data = data_of(
        num_hidden_layers=12,
        auto_map={"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C", "AutoTokenizer": ["a.T", None]},
        allow_global_per_layer_attribute_access=True,
    )
    before = copy.deepcopy(data)
    slim = per_layer_config(
        data,
        [{"intermediate_size": 40}, {"intermediate_size": WIDTH}, *[{}] * 9, {"intermediate_size": 8}],
        LlamaForCausalLM,
    )
    assert data == before
    changed = {key: value for key, value in slim.items() if data.get(key) != value}
    assert changed == {
        "per_layer_config": {"00": {"intermediate_size": 40}, "11": {"intermediate_size": 8}},
        "architectures": ["KvpruneLlamaForCausalLM"],
        "auto_map": {
            "AutoTokenizer": ["a.T", None],
            "AutoModelForCausalLM": "modeling_kvprune.KvpruneLlamaForCausalLM",
        },
    }
    assert data.keys() - slim.keys() == {"allow_global_per_layer_attribute_access"}
    written = AutoConfig.for_model(**slim).to_dict()["per_layer_config"]
    assert written == slim["per_layer_config"]  # as transformers writes it


def test_a_field_goes_by_its_own_name() -> None:
    """A value recorded under an alias would not stop the stock class, which reads the other name."""
    slim = per_layer_config(data_of("gpt2"), [{"hidden_size": 8}, {}], GPT2LMHeadModel)
    assert slim["per_layer_config"] == {"0": {"n_embd": 8}}


@pytest.mark.parametrize(
    ("changes", "widths", "message"),
    [
        ({}, [{"intermediate_size": 8}], "llama: 2 layers, and widths for 1"),
        ({}, [{"intermediate_size": WIDTH}, {}], "no layer differs"),
        ({}, [{"n_inner": 8}, {}], "has no field n_inner"),
        ({}, [{"text_config.intermediate_size": 8}, {}], "has no field text_config.intermediate_size"),
        ({"model_type": "mine"}, [{"intermediate_size": 8}, {}], "mine: not one of transformers' own"),
        ({"per_layer_config": {"0": {"intermediate_size": 8}}}, [{"intermediate_size": 8}, {}], "differ already"),
    ],
)
def test_a_config_that_cannot_hold_the_widths_is_refused(changes: Any, widths: Any, message: str) -> None:
    with pytest.raises(KvpruneError, match=re.escape(message)) as error:
        per_layer_config(data_of(**changes), widths, LlamaForCausalLM)
    assert len(str(error.value).splitlines()) == 1


class Custom(LlamaForCausalLM):  # type: ignore[misc]
    """What a repository of its own code would bring."""


def test_code_is_written_for_stock_classes_only() -> None:
    with pytest.raises(KvpruneError, match=r"^Custom: custom code \(tests\.test_perlayer\)"):
        modeling_code(Custom, "model.layers")
    with pytest.raises(KvpruneError, match="not the path"):
        modeling_code(LlamaForCausalLM, 'model.layers"; import os')


def test_code_stands_alone() -> None:
    code = ast.parse(modeling_code(LlamaForCausalLM, "model.layers"))
    modules = {node.module for node in ast.walk(code) if isinstance(node, ast.ImportFrom)}
    modules |= {item.name for node in ast.walk(code) if isinstance(node, ast.Import) for item in node.names}
    assert modules == {"inspect", "contextlib", "transformers", "transformers.conversion_mapping"}
