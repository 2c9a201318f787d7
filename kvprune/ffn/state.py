"""What a walk keeps on disk after each layer, so that a stop loses the layer at hand and nothing before it.

Hidden states of all sequences, in memory or in a mapped file, and for each finished layer a file with what was found.
A layer's file is written last: where it is, the hidden states after it are.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvprune.artifacts import fsync, read_tensors, write_tensors
from kvprune.progress import log
from kvprune.ranks import Ranks


@dataclass
class Hidden:
    """Hidden states `[sequences, tokens, hidden]` of one run of the model. `name` tells several runs apart.

    `states` is what a layer reads and `after` what it writes: one tensor in memory, two in files.
    """

    folder: Path
    name: str
    states: Tensor
    after: Tensor
    in_memory: bool

    def commit(self, layer: int) -> None:
        """Keep what was written as the state after `layer` layers, on disk, and read from it from now on.

        The state before stays until `forget`, so that a stop between two files finds one that fits.
        """
        part = _part(self.folder, self.name)
        if self.in_memory:
            with part.open("wb") as file:
                file.write(self.after.view(torch.uint8).numpy().data)
        fsync(part)  # elsewhere `after` is mapped there
        os.replace(part, place(self.folder, self.name, layer))
        self.states = self.after
        if not self.in_memory:
            self.after = _mapped(part, self.states.shape, self.states.dtype)

    def forget(self, layer: int) -> None:
        """Remove the state after `layer` layers, if there is one."""
        place(self.folder, self.name, layer).unlink(missing_ok=True)


def place(folder: Path, name: str, layer: int) -> Path:
    """The file of the state after `layer` layers."""
    return folder / f"{name}.{layer}.hidden"


def make_hidden(
    folder: Path,
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    in_memory: bool,
    layer: int | None = None,
) -> Hidden:
    """Hidden states with nothing in them yet, to be written to `after`; or, with `layer`, those kept after it."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = None if layer is None else _mapped(place(folder, name, layer), torch.Size(shape), dtype)
    if in_memory:
        tensor = torch.empty(shape, dtype=dtype) if kept is None else kept.clone()
        return Hidden(folder, name, tensor, tensor, True)
    after = _mapped(_part(folder, name), torch.Size(shape), dtype)
    return Hidden(folder, name, after if kept is None else kept, after, False)


def _part(folder: Path, name: str) -> Path:
    return folder / f".{name}.hidden.tmp"


def _mapped(path: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A file as a tensor that is written through; made, or brought to its size, where it is not there."""
    if not shape.numel():  # of a rank without a batch
        path.touch()
        return torch.empty(shape, dtype=dtype)
    with path.open("ab") as file:  # space is taken now: a disk that fills up must not show while the file is mapped
        os.posix_fallocate(file.fileno(), 0, shape.numel() * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype).view(shape)


@dataclass(frozen=True)
class Shelf:
    """Where a walk keeps its finished layers: rank 0 files in `folder`, each rank its hidden states in `states`."""

    folder: Path
    states: Path
    ranks: Ranks

    def done(self, names: list[str]) -> int:
        """How many layers are finished, with the hidden states `names` of this rank, and of all the others."""
        done = int(self.ranks.data_of_first(next(at for at in range(10**9) if not self._layer(at).is_file())))
        there = all(place(self.states, name, done).is_file() for name in names)
        if not done or self.ranks.all_true(there):
            return done
        if self.ranks.first:
            log.info("%d finished layers are of no use without their hidden states; starting afresh", done)
            for index in range(done):
                self._layer(index).unlink()
        self.ranks.all_true(True)
        return 0

    def finish(self, index: int, runs: list[Hidden], tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Keep what was found in layer `index`, after the hidden states that `runs` leave it with."""
        for hidden in runs:
            hidden.commit(index + 1)
        self.ranks.all_true(True)  # every rank has its states on disk before the layer counts as finished
        if self.ranks.first:
            write_tensors(self._layer(index), tensors, about)
        self.ranks.all_true(True)
        for hidden in runs:
            hidden.forget(index)

    def read(self, count: int) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """What was found in the first `count` layers: all tensors, and what was said of each layer. Of rank 0."""
        tensors: dict[str, Tensor] = {}
        about = []
        for index in range(count):
            found, said = read_tensors(self._layer(index))
            tensors |= found
            about.append(said)
        return tensors, about

    def clear(self) -> None:
        """Remove all of it, once its result is on disk."""
        self.ranks.all_true(True)
        for left in self.states.glob(f"*.{self.ranks.rank}.*"):
            left.unlink(missing_ok=True)  # a state of another rank may be called so, too
        with suppress(OSError):  # another rank's may still be there
            self.states.rmdir()
        self.ranks.all_true(True)
        if self.ranks.first:
            for folder in (self.folder, self.states):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other walks may keep theirs beside it
                self.folder.parent.rmdir()

    def _layer(self, index: int) -> Path:
        return self.folder / f"layer.{index}.safetensors"


def kept_bytes(states: Path, run: Path) -> int:
    """What hidden states of walks of `run` take on disk already, below `states`."""
    return sum(file.stat().st_size for file in states.glob(f"{_prefix(run)}*/*.hidden"))


def find_shelf(base: Path, states: Path, run: Path, about: dict[str, Any], ranks: Ranks) -> Shelf:
    """The shelf of the walk of `run` that `about` describes."""
    name = _prefix(run) + _short(json.dumps(about, sort_keys=True))
    return Shelf(base / name, states / name, ranks)


def open_shelf(base: Path, states: Path, run: Path, about: dict[str, Any], ranks: Ranks) -> Shelf:
    """The shelf of the walk of `run` that `about` describes; what other walks of this run left there is removed.

    `base` is the run's own folder, `states` may have those of other runs, too.
    """
    shelf = find_shelf(base, states, run, about, ranks)
    for folder, others in ((base, "*"), (states, f"{_prefix(run)}*")):
        for other in folder.glob(others):
            if other.name != shelf.folder.name and os.environ.get("LOCAL_RANK", "0") == "0":  # one on each node
                log.info("%s: removed what another recipe or batch size had left unfinished", other.name)
                shutil.rmtree(other, ignore_errors=True)
    return shelf


def _prefix(run: Path) -> str:
    return f"{_short(str(run.resolve()))}-"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
