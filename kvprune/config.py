"""The config.json of a slim checkpoint, and the code that comes with it where widths differ by layer."""

import json
import tempfile
from pathlib import Path

from transformers import AutoConfig

from kvprune.artifacts import Plan, RunFolder, read_json, write_text
from kvprune.dense import Dense
from kvprune.errors import KvpruneError
from kvprune.ffn.fields import meta_model, shapes_of, with_field
from kvprune.ffn.perlayer import CODE_FILE, modeling_code, own_auto_map, per_layer_config
from kvprune.schema import PlanSection
from kvprune.sources.models import one_line


def write_config(dense: Dense, plan: Plan, target: Path, *, biased: bool = False) -> None:
    """Write config.json into `target`: the dense one with other widths, and the FFN's biases on if `biased`.

    Where a width differs by layer, also the code that builds such a model.
    """
    config = read_json(dense.source.folder / "config.json")
    differing = plan.differing()
    for name, value in {name: value for fields in plan.layers for name, value in fields.items()}.items():
        if name not in differing:
            config = with_field(config, name, value)
    if differing:
        layers = [{name: fields[name] for name in differing if name in fields} for fields in plan.layers]
        base = stock_class(dense)
        config = per_layer_config(config, layers, base)
        write_text(target / CODE_FILE, modeling_code(base, layers_path(dense)))
    if biased and dense.layout.bias_field is not None:
        config = with_field(config, dense.layout.bias_field, True)
    write_text(target / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def check_by_layer(dense: Dense, section: PlanSection) -> None:
    """Raise KvpruneError where no model of this class can be built whose layers differ in width."""
    layout = dense.layout
    way_out = f"plan.allocation: {section.allocation} cannot be had: {dense.source.title}"
    first = layout.ffns[0]
    field = layout.field_of(first)
    narrow = max(1, field.value // 2)
    widths: list[dict[str, int]] = [{} for _ in layout.layers]
    widths[layout.layers.index(first.layer)] = {field.name: narrow}
    data = read_json(dense.source.folder / "config.json")
    model = meta_model(dense.config, trust_remote_code=dense.trust_remote_code)
    base, expected = type(model), shapes_of(model)
    try:
        with tempfile.TemporaryDirectory() as name:
            config = per_layer_config(data, widths, base)
            write_text(Path(name) / "config.json", json.dumps(config))
            write_text(Path(name) / CODE_FILE, modeling_code(base, layers_path(dense)))
            opened = AutoConfig.from_pretrained(name, trust_remote_code=True)  # code that was written a line above
            found = shapes_of(meta_model(opened, trust_remote_code=True))
    except KvpruneError as error:
        raise KvpruneError(f"{way_out}: {error}; use uniform") from None
    except Exception as error:  # noqa: BLE001  (classes raise anything where their layers cannot be built anew)
        raise KvpruneError(
            f"{way_out}: its layers cannot be built one by one: {one_line(error)}; use uniform"
        ) from None
    for ffn in layout.ffns:
        if ffn.layer == first.layer and ffn.name in field.multiples:
            for param in ffn.cuts():
                shape = list(expected[param.name])
                shape[param.axis] = field.width(ffn, narrow) * (2 if param.fused else 1)
                expected[param.name] = tuple(shape)
    if found != expected:
        raise KvpruneError(f"{way_out}: {base.__name__} takes no width of a layer's own; use uniform")


def stock_class(dense: Dense) -> type:
    """The class that the dense model is built of."""
    return type(meta_model(dense.config, trust_remote_code=dense.trust_remote_code))


def is_own_code(run: RunFolder, dense: Dense) -> bool:
    """Whether the only code in `model/` is what an export writes there: that may be run unasked."""
    code = run.model / CODE_FILE
    if not code.is_file() or [*run.model.rglob("*.py")] != [code]:
        return False
    base = stock_class(dense)
    named = read_json(run.model / "config.json").get("auto_map") or {}
    own = {name: place for name, place in named.items() if name != "AutoTokenizer"} == own_auto_map(base)
    return own and code.read_text(encoding="utf-8") == modeling_code(base, layers_path(dense))


def layers_path(dense: Dense) -> str:
    """The path of the model's list of decoder layers."""
    return dense.layout.layers[0].rpartition(".")[0]


def needs_code(plan: Plan, dense: Dense) -> bool:
    """Whether the checkpoint of `plan` loads with trust_remote_code only."""
    return dense.trust_remote_code or bool(plan.differing())
