"""The model card of a slim checkpoint, written from its `kvprune.json` and, once there are any, its results."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvprune.artifacts import UNITS, budget_words

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

BASE_CARD = "BASE_README.md"
BUILTIN_TEXTS = ("builtin", "builtin-task", "builtin-held-out", "self")  # that every kvprune has, or makes
MOST_WIDTHS = 128  # that are told one by one
# The Hub knows finetune, adapter, merge and quantized: these are weights of the same kind, with others in them.
RELATION = "finetune"


@dataclass(frozen=True)
class Figure:
    """A metric of a task, dense and slim, and what is known of chance."""

    task: str
    metric: str
    dense: float
    slim: float
    errors: tuple[float, float] | None = None  # standard errors of the two
    interval: tuple[float, float, float] | None = None  # slim against dense, and the ends of its 95 % interval
    ratio: bool = True  # slim / dense; else slim - dense
    dataset: str = ""  # that the task is made from
    config: str | None = None
    split: str | None = None


def load_command(folder: str, trust_remote_code: bool = False) -> str:
    """The Python lines that load a checkpoint folder with stock transformers."""
    trust = ", trust_remote_code=True" if trust_remote_code else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f'model = AutoModelForCausalLM.from_pretrained("{folder}"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}"{trust})'
    )


def model_card(
    about: dict[str, Any],
    folder: Path,
    *,
    name: str | None = None,
    licence: str | None = None,
    figures: list[Figure] | None = None,
) -> str:
    """README.md for the checkpoint that `about` (its kvprune.json) describes; `folder` may hold the base model's card.

    `name` is what it is published as, `licence` that of a base model whose card has none, and `figures` are its
    results, None where it was not evaluated.
    """
    place = name or "this-folder"
    title = name.partition("/")[2] if name else f"{about['model']['title']}, slimmed with kvprune"
    parts = [
        f"---\n{_header(about, folder, name, licence, figures or []).to_yaml()}\n---",
        f"# {title}",
        _what(about),
        _budget(about),
        f"## Results\n\n{_results(about, figures)}",
        f"## Load\n\n{_loader(about)}:\n\n```python\n{load_command(place, about['trust_remote_code'])}\n```",
        f"## Reproduce\n\n{_reproduce(about, place)}",
        f"## Recipe\n\n{_recipe(about)}",
        f"## Limitations\n\n{_limitations(about, folder)}",
    ]
    return "\n\n".join(parts) + "\n"


def base_fields(folder: Path) -> dict[str, Any]:
    """What the base model's card says that the slim model's card keeps: licence, language, task."""
    base = folder / BASE_CARD
    text = base.read_text(encoding="utf-8", errors="replace") if base.is_file() else ""
    if not text.startswith("---\n"):
        return {}
    try:
        fields = yaml.safe_load(text[4:].partition("\n---")[0])
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError):  # a day that is none
        return {}
    wanted = ("license", "license_name", "license_link", "language", "pipeline_tag")
    return {key: fields[key] for key in wanted if fields.get(key)} if isinstance(fields, dict) else {}


def unpublished(about: dict[str, Any]) -> dict[str, list[str]]:
    """What a checkpoint was made from that is on one machine only: recipe keys to names."""
    recipe, model = about["recipe"], about["recipe"]["model"]
    texts = {"calibrate.text": recipe["calibrate"]["text"]}
    if about.get("recover"):
        texts |= {f"recover.{key}": recipe["recover"][key] for key in ("text", "held_out")}
    tasks = recipe["evaluate"]["include_path"] if about.get("recover") else None  # whose documents were not trained on
    known = (*BUILTIN_TEXTS, *(about["calibration"] or {}).get("datasets", ()), *_trained_on(about))
    found = {} if about["model"]["commit"] or model.startswith("builtin:") else {"model": [model]}
    for key, sources in texts.items():
        if local := [source["source"] for source in sources if source["source"] not in known]:
            found[key] = local
    return found | ({"evaluate.include_path": [tasks]} if tasks else {})


def _trained_on(about: dict[str, Any]) -> list[str]:
    """Data sets of the Hub that it was trained on, or looked at while it was."""
    return list((about.get("recover") or {}).get("datasets", ()))


def first_and_best(recovery: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a recovery saw of each held-out text before training, and at the point that stays."""
    texts = {look["step"]: look["texts"] for look in recovery["looks"]}
    return texts[0], texts[recovery["best"]]


def mean_errors(ffns: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean errors before and after a refit, of the FFNs that held-back tokens reach."""
    seen = [ffn for ffn in ffns if ffn["error_before"]] or ffns
    before, after = (sum(ffn[key] for ffn in seen) / len(seen) for key in ("error_before", "error_after"))
    return before, after


def _header(
    about: dict[str, Any], folder: Path, name: str | None, licence: str | None, figures: list[Figure]
) -> "ModelCardData":
    """What the Hub reads: the YAML before the text."""
    from huggingface_hub import ModelCardData

    model = about["model"]
    fields = {"pipeline_tag": "text-generation", **base_fields(folder)}
    if licence is not None:
        fields["license"] = licence
    if model["commit"] and "/" in model["title"]:
        fields |= {"base_model": model["title"], "base_model_relation": RELATION}
    if datasets := [*dict.fromkeys([*((about["calibration"] or {}).get("datasets") or ()), *_trained_on(about)])]:
        fields["datasets"] = datasets
    results = [_eval_result(figure) for figure in figures if math.isfinite(figure.slim)]
    if results:
        fields |= {"eval_results": results, "model_name": name or model["title"]}
    tags = ["kvprune", "pruned", *(["distilled"] if about.get("recover") else [])]
    return ModelCardData(library_name="transformers", tags=tags, **fields)


def _eval_result(figure: Figure) -> "EvalResult":
    """A result as the Hub has it: of the slim model, since the page is its own; the dense one's is in the name."""
    from huggingface_hub import EvalResult

    plain = figure.metric.rpartition(" ")[2].partition(",")[0]
    kind = "perplexity" if plain.endswith("perplexity") else {"acc": "accuracy"}.get(plain, plain)
    return EvalResult(
        task_type="text-generation",
        dataset_type=figure.dataset or figure.task,
        dataset_name=figure.task,
        dataset_config=figure.config,
        dataset_split=figure.split,
        metric_type=kind,
        metric_name=f"{figure.metric.replace('_', ' ')} (dense model: {figure.dense:.4g})",
        metric_value=round(figure.slim, 6),
    )


def _what(about: dict[str, Any]) -> str:
    model, recipe = about["model"], about["recipe"]
    changes: dict[int, list[int]] = {}
    for item in about["ffns"]:
        changes.setdefault(item["width_before"], []).append(len(item["kept"]))
    widths = ", ".join(f"{before} → {_widths(after)}" for before, after in changes.items())
    origin = model["title"] + (f" at commit {model['commit']}" if model["commit"] else "")
    note = f" (dense here is {model['note']})" if model["note"] else ""
    return (
        f"{origin}{note} with {recipe['plan']['allocation']} FFN widths {widths}, slots chosen by the score "
        f"`{recipe['plan']['score']}` on\n{recipe['calibrate']['tokens']:,} tokens of "
        f"{_texts(recipe['calibrate']['text'])}. {_refit(about)}"
    )


def _budget(about: dict[str, Any]) -> str:
    before, after, verified = about["budget"]["before"], about["budget"]["after"], about["verified"]
    table = "\n".join(
        f"| {label} | {before[key]:,} | {after[key]:,} | {after[key] / before[key]:.1%} |"
        for key, label in UNITS.items()
    )
    values = " or refitted values" if about["refit"] else ""
    values += " or trained weights" if about.get("recover") else ""
    against = "trained model's" if about.get("recover") else "masked dense model's"
    proof = (
        f"its float32 logits differ from the {against} by {verified['logit_difference']:.1e} of the largest"
        if verified["logit_difference"] is not None
        else f"its logits were not compared ({verified['note']})"
    )
    return (
        f"| | dense | slim | kept |\n|---|---:|---:|---:|\n{table}\n\n"
        f"Requested budget: {budget_words(about['budget']['requested'])}.\nVerified at export: "
        f"{verified['tensors']} tensors equal the expected slices{values} bit for bit, and {proof}."
    )


def _widths(widths: list[int]) -> str:
    """The only one, or smallest and largest, and where they are few each."""
    if min(widths) == max(widths):
        return str(widths[0])
    each = f" ({' '.join(map(str, widths))})" if len(widths) <= MOST_WIDTHS else ""
    return f"{min(widths)} to {max(widths)}{each}"


def _texts(sources: list[dict[str, Any]]) -> str:
    if len(sources) == 1:
        return f"`{sources[0]['source']}`"
    return " and ".join(f"`{source['source']}` (weight {source['weight']:g})" for source in sources)


def _refit(about: dict[str, Any]) -> str:
    """What was done to the values."""
    layers = about["refit"]
    if not layers:
        return f"Values are as they were. {_trained(about)}"
    done = [layer for layer in layers if layer["refitted"]]
    before, after = mean_errors(layers)
    method = about["recipe"]["refit"]["method"]
    return (
        f"The values of the kept slots were refitted ({method}) in {len(done)} of {len(layers)} FFNs on the same "
        f"tokens: mean error on held-back ones {before:.3f} before and {after:.3f} after. {_trained(about)}"
    )


def _trained(about: dict[str, Any]) -> str:
    """Whether anything was trained, on what, how long, and what came of it."""
    found = about.get("recover")
    if not found:
        return "Nothing was trained."
    section = about["recipe"]["recover"]
    first, best = first_and_best(found)
    gains = ", ".join(f"{first[name]['loss']:.3f} → {best[name]['loss']:.3f} on {name}" for name in first)
    return (
        f"It was then trained: the dense model taught it on {found['tokens']:,} tokens of {_texts(section['text'])} in "
        f"{found['seconds'] / 60:.0f} minutes\n({found['learning']:,} parameters, train `{section['train']}`, learning "
        f"rate {section['learning_rate']:g}; KL to the dense model in nats a token, on held-out text: {gains})."
    )


def _results(about: dict[str, Any], figures: list[Figure] | None) -> str:
    if figures is None:
        return "It was not evaluated when this card was written."
    rows = [
        f"| {figure.task}: {figure.metric.replace('_', ' ')} | {_value(figure, 0)} | {_value(figure, 1)} "
        f"| {_against(figure)} |"
        for figure in figures
    ]
    settings = about["recipe"]["evaluate"]
    limit = f", the first {settings['limit']} documents of each task" if settings["limit"] else ""
    notes = f"By lm-eval{limit}."
    if any(figure.errors for figure in figures):
        notes += " ±: standard error."
    if any(figure.interval for figure in figures):
        notes += " In brackets: 95 % interval, dense and slim paired by document (bootstrap)."
    return "\n".join(["| | dense | slim | slim against dense |", "|---|---:|---:|---:|", *rows, "", notes])


def _value(figure: Figure, at: int) -> str:
    error = f" ± {figure.errors[at]:.2g}" if figure.errors else ""
    return f"{(figure.dense, figure.slim)[at]:.4g}{error}"


def _against(figure: Figure) -> str:
    if figure.interval is None:
        return f"× {figure.slim / figure.dense:.3f}" if figure.dense else "-"
    middle, low, high = figure.interval
    if figure.ratio:
        return f"× {middle:.3f} [{low:.3f}, {high:.3f}]"
    return f"{middle:+.4f} [{low:+.4f}, {high:+.4f}]"


def _loader(about: dict[str, Any]) -> str:
    if not about["trust_remote_code"]:
        return "Stock transformers loads it, without remote code"
    return f"It needs its own code, which `trust_remote_code=True` runs ({about['loads']})"


def _reproduce(about: dict[str, Any], place: str) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["made_with"].items())
    run = (about["calibration"] or {}).get("run")
    where = f", on {run['device']} in {run['dtype']}, {run['batch_size']} sequences at once" if run else ""
    trained = (about.get("recover") or {}).get("made_with", about["made_with"])
    others = [f"{name} {version}" for name, version in trained.items() if about["made_with"].get(name) != version]
    versions += f" (trained with {', '.join(others)})" if others else ""
    text = (
        f"```sh\nkvprune reproduce {place}\n```\n\nruns the recipe again and compares every tensor. Made with "
        f"{versions}{where}."
    )
    if local := unpublished(about):
        names = " and ".join(f"`{name}`" for some in local.values() for name in some)
        flags = " ".join(f"--set {key}=…" for key in local)
        text += f"\nNot published are {names}: who has them says where, with `{flags}`."
    return text


def _recipe(about: dict[str, Any]) -> str:
    recipe = yaml.safe_dump(about["recipe"], sort_keys=False, allow_unicode=True, width=110).rstrip()
    digest = (about["calibration"] or {}).get("tokens")
    tokens = f"The calibration tokens have the SHA-256 `{digest}`.\n" if digest else ""
    return (
        f"```yaml\n{recipe}\n```\n\n{tokens}`kvprune.json` holds the recipe too, with the kept slots of every FFN, "
        "digests of all files, and versions."
    )


def _limitations(about: dict[str, Any], folder: Path) -> str:
    lines = [
        "It can do less than the base model, above all on text unlike what it was calibrated on; results on a task "
        "say little about others.",
        "Biases and faults of the base model are still there, and none was looked for.",
    ]
    if about["verified"]["logit_difference"] is None:
        lines.append("Tensors and shapes were verified; the model was too large to compare its outputs as well.")
    if (folder / BASE_CARD).is_file():
        lines.append(f"What the base model's card says of its use holds here too: {BASE_CARD}.")
    return "\n".join(f"- {line}" for line in lines)
