"""How parameters of a model lie on disk: under other names, one expert a file entry, halves apart or several in one.

transformers renames, stacks and joins tensors on load, and says how in its own conversion mapping. What is joined or
stacked can be cut piece by piece; a parameter that is made of disk tensors in any other way is left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from kvprune.ffn.checkpoint import Checkpoint, Cut
from kvprune.ffn.layout import Ffn, Shape

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """One tensor on disk that holds a parameter or a part of it."""

    disk: str
    expert: int | None = None  # the parameter is a stack of such tensors along axis 0
    part: int = 0  # the parameter is `parts` such tensors joined along `along`
    parts: int = 1
    along: int = 0
    share: int = 0  # the tensor is `shares` parameters joined along axis 0
    shares: int = 1


Pieces = dict[str, tuple[Piece, ...]]


def stored_pieces(checkpoint: Checkpoint, model: Any) -> Pieces:
    """Parameters and buffers of `model`, which may be on the meta device, to the tensors on disk that they are made of.

    Those that are not there as a whole, or are made by other means than stacking and joining, are left out.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    state = model.state_dict()
    found: dict[str, list[Piece]] = {}
    for disk, entry in checkpoint.tensors.items():
        target, pattern = rename_source_key(disk, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            found.setdefault(target if target in state else disk, []).append(Piece(disk))
            continue
        converter = next(item for item in converters if pattern in item.source_patterns)
        for name, piece in _converted(disk, target, pattern, converter):
            whole = name in state and tuple(state[name].shape) == entry.shape  # it may be stored as it is made to be
            found.setdefault(name, []).append(Piece(disk) if whole else piece)
    ordered = {name: tuple(sorted(pieces, key=_order)) for name, pieces in found.items()}
    return {name: pieces for name, pieces in ordered.items() if _complete(pieces, state.get(name))}


def _converted(disk: str, target: str, pattern: str, converter: Any) -> list[tuple[str, Piece]]:
    """The parameters that `disk` is a piece of, by the operations of `converter`; none where they are others."""
    operations = [type(item) for item in converter.operations]
    sources, targets = list(converter.source_patterns), list(converter.target_patterns)
    if operations == [Chunk] and converter.operations[0].dim == 0 and len(sources) == 1:
        first = _plain(targets[0])
        return [
            (target.replace(first, _plain(other), 1), Piece(disk, share=at, shares=len(targets)))
            for at, other in enumerate(targets)
        ]
    if operations not in ([MergeModulelist], [MergeModulelist, Concatenate], [Concatenate]) or len(targets) > 1:
        return []
    stacked = operations[0] is MergeModulelist
    if stacked and converter.operations[0].dim != 0:
        return []
    expert = _number(disk, target) if stacked else None
    if operations[-1] is Concatenate:
        along = converter.operations[-1].dim
        return [(target, Piece(disk, expert, sources.index(pattern), len(sources), along))]
    return [(target, Piece(disk, expert))] if len(sources) == 1 else []


def _plain(pattern: str) -> str:
    """What a target pattern puts into a name."""
    return pattern.replace("\\", "").strip("^$")


def _number(disk: str, target: str) -> int:
    """The expert's number: the one number in the name on disk that the parameter's name lacks, its last one."""
    have = re.findall(r"(?<=\.)\d+(?=\.)", target)
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", disk)
    for number in have:
        if number in numbers:
            numbers.remove(number)
    return int(numbers[-1]) if numbers else -1


def _order(piece: Piece) -> tuple[int, int]:
    return piece.part, -1 if piece.expert is None else piece.expert


def _complete(pieces: Sequence[Piece], parameter: Tensor | None) -> bool:
    if parameter is None:
        return len(pieces) == 1 and pieces[0] == Piece(pieces[0].disk)
    experts = range(parameter.shape[0]) if pieces[0].expert is not None else [None]
    wanted = [(part, expert) for part in range(pieces[0].parts) for expert in experts]
    return [(piece.part, piece.expert) for piece in pieces] == wanted


def stored_shape(checkpoint: Checkpoint, pieces: Sequence[Piece]) -> Shape:
    """The shape of the parameter that `pieces` make."""
    shape = list(checkpoint.tensors[pieces[0].disk].shape)
    if pieces[0].shares > 1 and shape:
        shape[0] //= pieces[0].shares
    if pieces[0].expert is not None:
        shape.insert(0, len(pieces) // pieces[0].parts)
    if pieces[0].parts > 1:  # of different sizes, where they are no keys
        axis = pieces[0].along - (pieces[0].expert is not None)
        firsts = [piece for piece in pieces if piece.expert in (None, 0)]
        shape[pieces[0].along] = sum(checkpoint.tensors[piece.disk].shape[axis] for piece in firsts)
    return tuple(shape)


def read_parameter(checkpoint: Checkpoint, pieces: Sequence[Piece], device: str, dtype: torch.dtype) -> Tensor:
    """A parameter on `device`, in `dtype` if it is a float: a view of the mapped file where nothing is to be done."""

    def read(piece: Piece) -> Tensor:
        entry = checkpoint.tensors[piece.disk]
        with safe_open(checkpoint.folder / entry.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(entry.name)
        if piece.shares > 1:
            tensor = tensor.chunk(piece.shares)[piece.share]
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    parts = []
    for part in range(pieces[0].parts):
        mine = [read(piece) for piece in pieces if piece.part == part]
        parts.append(torch.stack(mine) if pieces[0].expert is not None else mine[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, pieces[0].along)


@dataclass(frozen=True)
class Kept:
    """Which slots of an FFN stay, sorted."""

    ffn: Ffn
    slots: Sequence[int]


def kept_indices(kept: Sequence[Kept]) -> dict[str, tuple[int, list[list[int]]]]:
    """By parameter: the axis that slots lie on, and what stays along it, for each expert or as the only list."""
    found: dict[str, tuple[int, list[list[int]]]] = {}
    for item in kept:
        for param in item.ffn.cuts():
            found.setdefault(param.name, (param.axis, []))[1].append(param.indices(item.slots, item.ffn.width))
    return found


def cut_tensor(tensor: Tensor, axis: int, lists: list[list[int]], *, stacked: bool) -> Tensor:
    """The parts of a parameter that stay, as `kept_indices` tells them."""
    if not stacked:
        return tensor.index_select(axis, torch.tensor(lists[0], dtype=torch.int64, device=tensor.device))
    index = torch.tensor(lists, dtype=torch.int64, device=tensor.device)  # [experts, kept]
    shape = [1] * tensor.ndim
    shape[0], shape[axis] = index.shape
    sizes = [*tensor.shape]
    sizes[axis] = index.shape[1]
    return tensor.gather(axis, index.view(shape).expand(sizes))


def make_cuts(pieces: Pieces, kept: Sequence[Kept], shapes: Mapping[str, Shape]) -> dict[str, Cut]:
    """What to cut of each tensor on disk. `shapes` are those of the whole parameters."""
    stacked = {param.name for item in kept if item.ffn.expert is not None for param in item.ffn.cuts()}
    cuts: dict[str, Cut] = {}
    for name, (axis, lists) in kept_indices(kept).items():
        size = shapes[name][axis]
        for piece in pieces[name]:
            own = lists if name in stacked and piece.expert is None else [lists[piece.expert or 0]]
            if piece.parts > 1:
                step = size // piece.parts
                own = [
                    [at - piece.part * step for at in item if piece.part * step <= at < (piece.part + 1) * step]
                    for item in own
                ]
            if piece.shares > 1:
                own = [[at + piece.share * size for at in item] for item in own]
            slots = np.array(own if name in stacked and piece.expert is None else own[0], dtype=np.int64)
            cut = Cut(axis - (piece.expert is not None), slots)
            if piece.disk in cuts:  # several parameters in one tensor, in the order of their shares
                cut = Cut(cut.axis, np.sort(np.concatenate([cuts[piece.disk].slots, slots])))
            cuts[piece.disk] = cut
    return cuts
