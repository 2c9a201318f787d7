"""The dense model, as far as it is known without loading weights: source, config, FFNs, and where tensors lie."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import read_json
from kvprune.errors import KvpruneError
from kvprune.ffn.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from kvprune.ffn.fields import meta_model, text_config, thin_config, with_field
from kvprune.ffn.find import find_layout
from kvprune.ffn.layout import Ffn, Layout, Shape, resize
from kvprune.ffn.perlayer import CODE_FILE
from kvprune.ffn.stored import Kept, Pieces, cut_tensor, kept_indices, stored_pieces, stored_shape
from kvprune.ffn.walk import Setup, Walker, check_calls, open_walker, reader
from kvprune.sources.models import ModelSource, fingerprint, load_config, load_model, open_model

OWN_CODE = CODE_FILE.removesuffix("py")
STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def has_bfloat16() -> bool:
    """Whether this CPU takes products in bfloat16 by instructions of its own, and not at a fraction of the speed."""
    asking = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # not there where torch has no oneDNN
    return asking is not None and bool(asking())


@dataclass(frozen=True)
class Dense:
    """What the stages share of a recipe's model. `pieces` says which tensors on disk hold each of its parameters."""

    source: ModelSource
    config: Any
    layout: Layout
    checkpoint: Checkpoint
    pieces: Pieces
    trust_remote_code: bool

    @property
    def text_config(self) -> Any:
        """The config of the language model: of a multimodal one, its part."""
        return text_config(self.config)

    def asked_dtype(self, dtype: str) -> str:
        """The type that the recipe's `dtype` names: auto is the stored one."""
        if dtype != "auto":
            return dtype
        stored = str(getattr(self.config, "dtype", None)).removeprefix("torch.")
        kinds = (STORED[entry.dtype] for entry in self.checkpoint.tensors.values() if entry.dtype in STORED)
        return stored if stored in STORED.values() else next(kinds, "float32")

    def run_dtype(self, dtype: str, device: str) -> str:
        """The type that the model is run in, for the recipe's `dtype`.

        A CPU has few kernels for float16, and some have none for bfloat16, which auto then avoids: float32 is faster
        there, and the weights lose nothing by it.
        """
        asked = self.asked_dtype(dtype)
        if device == "cpu" and (asked == "float16" or (dtype == "auto" and asked == "bfloat16" and not has_bfloat16())):
            return "float32"
        return asked

    def walker(self, setup: Setup, length: int) -> Walker:
        """The model, to be walked layer by layer over sequences of `length`.

        Raises CannotWalkError, with the reason, where it cannot be.
        """
        walker = open_walker(
            self.config,
            thin_config(self.config, self.layout),
            self.layout.layers,
            reader(self.checkpoint, self.pieces, setup.device),
            set(self.pieces),
            setup,
            trust_remote_code=self.trust_remote_code,
        )
        generator = torch.Generator().manual_seed(0)
        check_calls(walker, torch.randint(0, self.text_config.vocab_size, (1, length), generator=generator))
        return walker

    def slim_walker(self, setup: Setup, kept: list[list[int]]) -> Walker:
        """The model with only the `kept` slots of each FFN, to be walked like the dense one."""
        whole = reader(self.checkpoint, self.pieces, setup.device)
        cuts = kept_indices([Kept(ffn, slots) for ffn, slots in zip(self.layout.ffns, kept, strict=True)])
        stacked = {param.name for ffn in self.layout.ffns if ffn.expert is not None for param in ffn.cuts()}

        def read(name: str, dtype: torch.dtype) -> Tensor:
            tensor = whole(name, dtype)
            return cut_tensor(tensor, *cuts[name], stacked=name in stacked) if name in cuts else tensor

        known = set(self.pieces)
        layers, thin = self.layout.layers, thin_config(self.config, self.layout)
        walker = open_walker(self.config, thin, layers, read, known, setup, trust_remote_code=self.trust_remote_code)
        for ffn, slots in zip(self.layout.ffns, kept, strict=True):
            if not ffn.expert:  # a stack is resized with its first expert
                resize(walker.model, ffn, len(slots))
        return walker

    def entries(self, name: str) -> list[TensorEntry]:
        """The tensors on disk that hold the parameter `name`; none where it is not held as a whole."""
        return [self.checkpoint.tensors[piece.disk] for piece in self.pieces.get(name, ())]

    def shapes(self) -> dict[str, Shape]:
        """Shapes of the parameters on disk."""
        return {name: stored_shape(self.checkpoint, pieces) for name, pieces in self.pieces.items()}

    def bytes_per_slot(self, ffn: Ffn) -> int:
        """What one slot of an FFN takes on disk."""
        total = 0
        for param in ffn.cuts():
            pieces = self.pieces[param.name]
            size = sum((entry.end - entry.start) for entry in self.entries(param.name)) // pieces[0].shares
            stack = stored_shape(self.checkpoint, pieces)[0] if ffn.expert is not None else 1
            total += size // stack // ffn.width
        return total

    def stored_dtype(self) -> torch.dtype:
        """The type that value matrices have on disk. Raises KvpruneError where they are not all of one float type."""
        values = [name for ffn in self.layout.ffns for name in (ffn.value.name, ffn.value_bias) if name]
        kinds = {entry.dtype for name in values for entry in self.entries(name)}
        if len(kinds) > 1 or not kinds <= STORED.keys():
            raise KvpruneError(
                f"{self.source.title}: values and their biases are stored as {', '.join(sorted(kinds))}, and a refit "
                f"writes one of {', '.join(STORED)}; set refit.method: none"
            )
        kind: torch.dtype = getattr(torch, STORED[kinds.pop()])
        return kind

    def check_values(self) -> None:
        """Raise KvpruneError where a value matrix is not stored as one tensor, or one for each expert."""
        for ffn in self.layout.ffns:
            piece = self.pieces[ffn.value.name][0]
            if piece.parts > 1 or piece.shares > 1:
                raise KvpruneError(
                    f"{self.source.title}: {ffn.value.name} is stored in parts, and refitted values cannot be written; "
                    "set refit.method: none"
                )

    def one_ffn_dtype(self) -> bool:
        """Whether all that is cut is stored in the type of the value matrices."""
        cuts = {param.name for ffn in self.layout.ffns for param in ffn.cuts()}
        return len({entry.dtype for name in cuts for entry in self.entries(name)}) == 1

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
    data = read_json(source.folder / "config.json")
    if own := [place for place in (data.get("auto_map") or {}).values() if str(place).startswith(OWN_CODE)]:
        raise KvpruneError(
            f"{source.title}: kvprune made its widths differ by layer ({own[0]}); start from the dense model"
        )
    layout = find_layout(config, trust_remote_code=trust_remote_code)
    for field in layout.fields:
        try:
            with_field(data, field.name, field.value)
        except (KeyError, TypeError, AttributeError):
            text = f"{source.title}: config.json has no place for {field.name}, which sets a width"
            raise KvpruneError(text) from None
    checkpoint = open_checkpoint(source.folder)
    pieces = stored_pieces(checkpoint, meta_model(config, trust_remote_code=trust_remote_code))
    _check_stored(source, checkpoint, pieces, layout)
    return Dense(source, config, layout, checkpoint, pieces, trust_remote_code)


def _check_stored(source: ModelSource, checkpoint: Checkpoint, pieces: Pieces, layout: Layout) -> None:
    """Raise KvpruneError where a parameter that is to be cut is not on disk, or has another width there."""
    for ffn in layout.ffns:
        for param in ffn.cuts():
            if param.name not in pieces:
                raise KvpruneError(
                    f"{source.title}: no weight file holds {param.name} in a form that can be cut piece by piece"
                )
            shape = stored_shape(checkpoint, pieces[param.name])
            width = ffn.width * (2 if param.fused else 1)
            if len(shape) <= param.axis or shape[param.axis] != width:
                entry = checkpoint.tensors[pieces[param.name][0].disk]
                raise KvpruneError(
                    f"{source.title}: {entry.file}: {entry.name} has shape {list(entry.shape)}, and config.json says "
                    f"width {ffn.width}"
                )
