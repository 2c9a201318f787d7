"""The model card of a slim checkpoint, written from its `kvprune.json`."""

from pathlib import Path
from typing import Any

import yaml

from kvprune.artifacts import UNITS, budget_words


def load_command(folder: str, trust_remote_code: bool = False) -> str:
    """The Python lines that load a checkpoint folder with stock transformers."""
    trust = ", trust_remote_code=True" if trust_remote_code else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'model = AutoModelForCausalLM.from_pretrained("{folder}"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")'
    )


def model_card(about: dict[str, Any], folder: Path) -> str:
    """README.md for the checkpoint that `about` (its kvprune.json) describes; `folder` may hold BASE_README.md."""
    model, budget, recipe = about["model"], about["budget"], about["recipe"]
    before, after = budget["before"], budget["after"]
    plan = recipe["plan"]
    base = folder / "BASE_README.md"
    head = {"library_name": "transformers", "tags": ["kvprune", "pruned"], **_base_fields(base)}
    if model["commit"] and "/" in model["title"]:
        head["base_model"] = model["title"]
    changes: dict[int, set[int]] = {}
    for item in about["ffns"]:
        changes.setdefault(item["width_before"], set()).add(len(item["kept"]))
    widths = ", ".join(f"{before} → {' to '.join(map(str, _ends(after)))}" for before, after in changes.items())
    origin = model["title"] + (f" at commit {model['commit']}" if model["commit"] else "")
    note = f" (dense here is {model['note']})" if model["note"] else ""
    table = "\n".join(
        f"| {label} | {before[key]:,} | {after[key]:,} | {after[key] / before[key]:.1%} |"
        for key, label in UNITS.items()
    )
    verified = about["verified"]
    proof = (
        f"its float32 logits differ from the masked dense model's by {verified['logit_difference']:.1e} of the largest"
        if verified["logit_difference"] is not None
        else verified["note"]
    )
    values = " or refitted values" if about["refit"] else ""
    return f"""---
{yaml.safe_dump(head, sort_keys=False).strip()}
---

# {model["title"]}, slimmed with kvprune

{origin}{note} with {plan["allocation"]} FFN widths {widths}, slots chosen by the score `{plan["score"]}` on
{recipe["calibrate"]["tokens"]:,} tokens of {_texts(recipe["calibrate"]["text"])}. {_refit(about)}

| | dense | slim | kept |
|---|---:|---:|---:|
{table}

Requested budget: {budget_words(budget["requested"])}.
Verified at export: {verified["tensors"]} tensors equal the expected slices{values} bit for bit, and {proof}.

## Load

{_loader(about)}:

```python
{load_command("this-folder", about["trust_remote_code"])}
```

`kvprune.json` holds the whole recipe, the kept slots of every layer, and versions.
{"The base model's card is BASE_README.md." if base.is_file() else ""}
"""


def _ends(widths: set[int]) -> list[int]:
    """The only one, or smallest and largest."""
    return sorted({min(widths), max(widths)})


def _texts(sources: list[dict[str, Any]]) -> str:
    if len(sources) == 1:
        return f"`{sources[0]['source']}`"
    return " and ".join(f"`{source['source']}` (weight {source['weight']:g})" for source in sources)


def _refit(about: dict[str, Any]) -> str:
    """What was done to the values."""
    layers = about["refit"]
    if not layers:
        return "Values are as they were, and nothing was trained."
    done = [layer for layer in layers if layer["refitted"]]
    before, after = mean_errors(layers)
    method = about["recipe"]["refit"]["method"]
    return (
        f"The values of the kept slots were refitted ({method}) in {len(done)} of {len(layers)} FFNs on the same "
        f"tokens: mean error on held-back ones {before:.3f} before and {after:.3f} after. Nothing was trained."
    )


def mean_errors(ffns: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean errors before and after a refit, of the FFNs that held-back tokens reach."""
    seen = [ffn for ffn in ffns if ffn["error_before"]] or ffns
    before, after = (sum(ffn[key] for ffn in seen) / len(seen) for key in ("error_before", "error_after"))
    return before, after


def _loader(about: dict[str, Any]) -> str:
    if not about["trust_remote_code"]:
        return "Stock transformers loads it, without remote code"
    return f"It needs its own code, which `trust_remote_code=True` runs ({about['loads']})"


def _base_fields(base: Path) -> dict[str, Any]:
    """Licence, language and base model of the base card, so that the slim model's card keeps to them."""
    text = base.read_text(encoding="utf-8", errors="replace") if base.is_file() else ""
    if not text.startswith("---\n"):
        return {}
    try:
        fields = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    wanted = ("license", "license_name", "license_link", "language", "pipeline_tag")
    return {key: fields[key] for key in wanted if key in fields} if isinstance(fields, dict) else {}
