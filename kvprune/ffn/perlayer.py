"""Checkpoints whose FFN width differs by layer: their config.json, and the code that builds such a model.

transformers records per-layer values in a config (`per_layer_config`), but its classes build every layer from one
width. A folder of this kind therefore brings a few lines of code, which `trust_remote_code=True` runs. Without them
the stock class asks the config for one width, and the config refuses to name one: loud, not wrong.
"""

import copy
from string import Template
from typing import Any

from kvprune.errors import KvpruneError
from kvprune.ffn.fields import text_config

CODE_FILE = "modeling_kvprune.py"
AUTO_CLASS = "AutoModelForCausalLM"
OVERRIDES = "per_layer_config"
ANSWERS_ANYWAY = "allow_global_per_layer_attribute_access"  # a stock class would build all layers alike, silently

CODE = Template('''\
"""$base with decoder layers that differ in the width of their feed-forward networks.

Written by kvprune. "per_layer_config" in config.json holds what differs. The stock class builds all layers from one
width; this class lets it do so, then builds those layers anew, each from its own values.

Load with AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).
"""

import inspect
from contextlib import contextmanager

from transformers import $base
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

LAYERS = "$layers"


@contextmanager
def showing(config, values):
    """Let the config, which all layers share, show the values of one layer."""
    shared = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in shared.items():
            setattr(config, name, value)


def layer_like(layer, config, index):
    """A new layer of the same class, for the config as it is now, with what the model has set on the layer since."""
    takes_index = len(inspect.signature(type(layer)).parameters) > 1
    new = type(layer)(config, index) if takes_index else type(layer)(config)
    for name in vars(layer).keys() - vars(new).keys() - {"_is_hf_initialized"}:
        setattr(new, name, getattr(layer, name))
    return new


class $name($base):
    def __init__(self, config, *args, **kwargs):
        text = config.get_text_config()
        if isinstance(text, self.config_class):  # a text model is built from its part of a multimodal config
            config = text
        own = text.to_dict().get("per_layer_config") or {}
        text.per_layer_config = None  # as long as it is set, the config raises where one width is asked for
        try:
            super().__init__(config, *args, **kwargs)
            layers = self.get_submodule(LAYERS)
            for index, values in own.items():
                with showing(text, values):
                    layers[int(index)] = layer_like(layers[int(index)], text, int(index))
            self.post_init()  # initialises the new layers, and nothing twice
        finally:
            text.per_layer_config = own

    @classmethod
    def is_custom_code(cls):
        """False, so that transformers converts names on disk, and initialises, as for the stock class."""
        return False


# Some rules for names on disk are known by the name of the stock class.
if (mapping := get_checkpoint_conversion_mapping($base.__name__)) is not None:
    register_checkpoint_conversion_mapping($name.__name__, mapping, overwrite=True)
''')


def class_name(base_class: type) -> str:
    """The name of the class that `modeling_code` defines."""
    return f"Kvprune{base_class.__name__}"


def own_auto_map(base_class: type) -> dict[str, str]:
    """What config.json says of where the generated class is."""
    return {AUTO_CLASS: f"{CODE_FILE.removesuffix('.py')}.{class_name(base_class)}"}


def modeling_code(base_class: type, layers: str) -> str:
    """The source of modeling_kvprune.py for a stock class; `layers` is the path of its list of decoder layers.

    Raises KvpruneError where the class is not one of transformers' own, which the code could import.
    """
    import transformers

    base = base_class.__name__
    if getattr(transformers, base, None) is not base_class:
        raise KvpruneError(
            f"{base}: custom code ({base_class.__module__}); a checkpoint with a width for each layer can only be "
            "written for a class of transformers itself; choose one width for all layers"
        )
    if not all(part.isidentifier() or part.isdecimal() for part in layers.split(".")):
        raise KvpruneError(f"{base}: not the path of a list of decoder layers: {layers!r}")
    return CODE.substitute(base=base, name=class_name(base_class), layers=layers)


def per_layer_config(config: dict[str, Any], widths: list[dict[str, int]], base_class: type) -> dict[str, Any]:
    """The data of config.json with each layer's own widths, naming the class that `modeling_code` makes.

    `widths` has one item a layer: fields of the config to values, the fields of a nested config as text_config.NAME.
    What is left out is as the config has it for all layers. Raises KvpruneError where the config cannot hold them.
    """
    slim = copy.deepcopy(config)
    full = _config_of(config)
    if len(widths) != (count := _layer_count(full)):
        raise KvpruneError(f"model type {full.model_type}: {count} layers, and widths for {len(widths)}")
    digits = len(str(count - 1))  # padded, so that sorted keys are in the order of the layers
    written = False
    for index, fields in enumerate(widths):
        for name, width in fields.items():
            data, known, field = _find_field(slim, full, name)
            if getattr(known, field) == width:
                continue
            data.setdefault(OVERRIDES, {}).setdefault(str(index).zfill(digits), {})[field] = width
            data.pop(ANSWERS_ANYWAY, None)
            written = True
    if not written:
        raise KvpruneError(f"model type {full.model_type}: no layer differs, so a stock class can load the checkpoint")
    # Entries for a tokenizer stay. Those for the config or other models are code that would run in place of ours.
    entries = {key: value for key, value in (config.get("auto_map") or {}).items() if key == "AutoTokenizer"}
    entries |= own_auto_map(base_class)
    return slim | {"architectures": [class_name(base_class)], "auto_map": entries}


def _config_of(data: dict[str, Any]) -> Any:
    """What transformers makes of config.json: it knows the fields that were left out, and by which name they are read.

    Raises KvpruneError where layers have values of their own already, which the generated class would not keep.
    """
    from transformers import CONFIG_MAPPING

    kind = data.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise KvpruneError(f"model type {kind}: not one of transformers' own; choose one width for all layers")
    config = CONFIG_MAPPING[kind].from_dict(decoded(data))
    if text_config(config).is_heterogeneous:
        raise KvpruneError(f"model type {kind}: its layers differ already; choose one width for all layers")
    return config


def _layer_count(config: Any) -> int:
    """How many decoder layers a model has; of an encoder and decoder, the latter's."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def decoded(data: Any) -> Any:
    """The data of config.json with the numbers that JSON does not have, as transformers writes them."""
    if isinstance(data, dict):
        if data.keys() == {"__float__"}:
            return float(data["__float__"])
        return {key: decoded(value) for key, value in data.items()}
    return [decoded(value) for value in data] if isinstance(data, list) else copy.deepcopy(data)


def _find_field(data: Any, config: Any, name: str) -> tuple[dict[str, Any], Any, str]:
    """The part of config.json that holds a field, what transformers makes of that part, and the field's own name.

    Its own name, since a value that is recorded under an alias would not stop a stock class from reading the other.
    """
    *parts, field = name.split(".")
    known = config
    for part in parts:
        data, known = (data or {}).get(part), getattr(known, part, None)
    if data is None or known is not text_config(config) or not hasattr(known, field):
        raise KvpruneError(f"model type {config.model_type}: its text model has no field {name} in config.json")
    return data, known, known.attribute_map.get(field, field)
