"""The dense model, as far as it is known without loading weights: source, config, FFNs, and where tensors lie."""

from dataclasses import dataclass
from typing import Any

from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import Checkpoint, model_names, open_checkpoint
from kvprune.ffn.layout import Layout, find_layout, meta_model
from kvprune.sources.models import ModelSource, load_config, load_model, open_model


@dataclass(frozen=True)
class Dense:
    """What the stages share of a recipe's model. `names` maps parameters of the model to names on disk."""

    source: ModelSource
    config: Any
    layout: Layout
    checkpoint: Checkpoint
    names: dict[str, str]
    trust_remote_code: bool

    def load(self, dtype: str, device: str) -> Any:
        """Load the model itself. Raises KvpruneError where its weight files do not hold all of it."""
        return self.load_with_report(dtype, device)[0]

    def load_with_report(self, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
        """Load the model, with transformers' report of the keys."""
        model, info = load_model(
            self.source.folder,
            dtype=dtype,
            device=device,
            title=self.source.title,
            trust_remote_code=self.trust_remote_code,
        )
        for kind in ("missing_keys", "mismatched_keys"):
            if info[kind]:
                first = sorted(map(str, info[kind]))[0]
                raise KvpruneError(
                    f"{self.source.title}: its weight files have {kind.replace('_', ' ')}, {first} first; the model "
                    "would be part random: download it again"
                )
        return model, info


def open_dense(name: str, *, commit: str | None = None, trust_remote_code: bool = False) -> Dense:
    """Open the model `name` of a recipe and find its FFNs, in config and in the weight files.

    Raises KvpruneError where it cannot be had, has other FFNs, or stores one in a way that cannot be cut.
    """
    source = open_model(name, commit=commit, trust_remote_code=trust_remote_code)
    config = load_config(source, trust_remote_code=trust_remote_code)
    layout = find_layout(config, trust_remote_code=trust_remote_code)
    checkpoint = open_checkpoint(source.folder)
    names = model_names(checkpoint, meta_model(config, trust_remote_code=trust_remote_code))
    for ffn in layout.ffns:
        for parameter, axis in ffn.cuts().items():
            entry = checkpoint.tensors.get(names.get(parameter, ""))
            if entry is None:
                raise KvpruneError(
                    f"{source.title}: no weight file holds {parameter} as one tensor, so it cannot be cut"
                )
            if len(entry.shape) <= axis or entry.shape[axis] != ffn.width:
                raise KvpruneError(
                    f"{source.title}: {entry.file}: {entry.name} has shape {list(entry.shape)}, and config.json says "
                    f"width {ffn.width}"
                )
    return Dense(source, config, layout, checkpoint, names, trust_remote_code)
