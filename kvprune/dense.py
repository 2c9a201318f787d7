"""The dense model, as far as it is known without loading weights: source, config, FFNs, and where tensors lie."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import Checkpoint, model_names, open_checkpoint
from kvprune.ffn.layout import Layout, find_layout, meta_model
from kvprune.ffn.walk import Setup, Walker, check_calls, open_walker, reader
from kvprune.sources.models import ModelSource, fingerprint, load_config, load_model, open_model

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Dense:
    """What the stages share of a recipe's model. `names` maps parameters of the model to names on disk."""

    source: ModelSource
    config: Any
    layout: Layout
    checkpoint: Checkpoint
    names: dict[str, str]
    trust_remote_code: bool

    def run_dtype(self, dtype: str, device: str) -> str:
        """The type that the model is run in, for the recipe's `dtype`: auto is the stored one.

        float16 becomes float32 on a CPU, which has few kernels for it; the weights lose nothing by that.
        """
        if dtype == "auto":
            stored = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
            kinds = (STORED[entry.dtype] for entry in self.checkpoint.tensors.values() if entry.dtype in STORED)
            dtype = stored if stored in STORED.values() else next(kinds, "float32")
        return "float32" if dtype == "float16" and device == "cpu" else dtype

    def walker(self, setup: Setup, length: int) -> Walker:
        """The model, to be walked layer by layer over sequences of `length`.

        Raises CannotWalkError, with the reason, where it cannot be.
        """
        walker = open_walker(
            self.config,
            self.layout.layers,
            reader(self.checkpoint, self.names, setup.dtype, setup.device),
            set(self.names),
            setup,
            trust_remote_code=self.trust_remote_code,
        )
        generator = torch.Generator().manual_seed(0)
        check_calls(walker, torch.randint(0, self.config.vocab_size, (1, length), generator=generator))
        return walker

    def slim_walker(self, setup: Setup, kept: list[list[int]]) -> Walker:
        """The model with only the `kept` slots of each FFN, all of one width, to be walked like the dense one."""
        config = copy.deepcopy(self.config)
        setattr(config, self.layout.width_field, len(kept[0]))
        whole = reader(self.checkpoint, self.names, setup.dtype, setup.device)
        cuts = {
            name: (axis, torch.tensor(slots, device=setup.device))
            for ffn, slots in zip(self.layout.ffns, kept, strict=True)
            for name, axis in ffn.cuts().items()
        }

        def read(name: str) -> Tensor:
            return whole(name).index_select(*cuts[name]) if name in cuts else whole(name)

        known = set(self.names)
        return open_walker(config, self.layout.layers, read, known, setup, trust_remote_code=self.trust_remote_code)

    def stored_dtype(self) -> torch.dtype:
        """The type that value matrices have on disk. Raises KvpruneError where they are not all of one float type."""
        values = [ffn.value for ffn in self.layout.ffns]
        names = [f"{value.name}.weight" for value in values] + [f"{value.name}.bias" for value in values if value.bias]
        kinds = {self.checkpoint.tensors[self.names[name]].dtype for name in names if name in self.names}
        if len(kinds) > 1 or not kinds <= STORED.keys():
            raise KvpruneError(
                f"{self.source.title}: values and their biases are stored as {', '.join(sorted(kinds))}, and a refit "
                f"writes one of {', '.join(STORED)}; set refit.method: none"
            )
        kind: torch.dtype = getattr(torch, STORED[kinds.pop()])
        return kind

    def one_ffn_dtype(self) -> bool:
        """Whether all that is cut is stored in the type of the value matrices."""
        kinds = {self.checkpoint.tensors[self.names[name]].dtype for ffn in self.layout.ffns for name in ffn.cuts()}
        return len(kinds) == 1

    def stored_as(self, dtype: str) -> bool:
        """Whether any tensor on disk is of this type."""
        return any(STORED.get(entry.dtype) == dtype for entry in self.checkpoint.tensors.values())

    def check_unchanged(self) -> None:
        """Raise KvpruneError where the model's files are others than when it was opened."""
        if fingerprint(self.source.name, self.source.commit) != self.source.fingerprint:
            raise KvpruneError(
                f"{self.source.title}: its files have changed while they were read; run the same command again"
            )

    def load(self, dtype: str, device: str) -> Any:
        """Load the model itself. Raises KvpruneError where its weight files do not hold all of it."""
        return self.load_with_report(dtype, device)[0]

    def load_with_report(self, dtype: str, device: str) -> tuple[Any, dict[str, Any]]:
        """Load the model, with transformers' report of the keys."""
        model, info = load_model(
            self.source.folder,
            dtype=self.run_dtype(dtype, device),
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
