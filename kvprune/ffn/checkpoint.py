"""Safetensors checkpoints on disk: which tensors they hold, what each is called in the model, and cutting them.

The format (github.com/huggingface/safetensors): eight bytes little-endian header length, a JSON header of names to
dtype, shape and data_offsets, then the data without holes. Files are memory-mapped, so reading costs page cache and
no memory of our own.
"""

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kvprune.errors import KvpruneError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WRITE_BLOCK = 2**26  # bytes of mapped file handed to one write
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are byte offsets in `file`."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def itemsize(self) -> int:
        """Bytes an element. Raises KvpruneError for a type that has no whole bytes or is unknown."""
        if self.dtype not in BITS:
            raise KvpruneError(f"{self.file}: {self.name}: dtype {self.dtype} cannot be cut")
        return BITS[self.dtype] // 8


@dataclass(frozen=True)
class Cut:
    """Keep `slots` `[kept]` of a tensor along `axis`; or `[experts, kept]`, of each item along axis 0 its own."""

    axis: int
    slots: npt.NDArray[np.int64]

    def shape(self, entry: TensorEntry) -> tuple[int, ...]:
        """The shape after the cut. Raises KvpruneError where the slots do not lie on that axis."""
        fits = self.axis < len(entry.shape) and (self.slots.ndim == 1 or len(self.slots) == entry.shape[0])
        if not fits or (self.slots.size and int(self.slots.max()) >= entry.shape[self.axis]):
            raise KvpruneError(f"{entry.file}: {entry.name} has shape {list(entry.shape)}, which the plan does not fit")
        return (*entry.shape[: self.axis], self.slots.shape[-1], *entry.shape[self.axis + 1 :])

    def words(self, data: memoryview, entry: TensorEntry) -> npt.NDArray[Any]:
        """The kept slots as unsigned integers of the element size: a slice never needs the value."""
        whole = np.frombuffer(data[entry.start : entry.end], dtype=f"<u{entry.itemsize}").reshape(entry.shape)
        if self.slots.ndim == 1:
            return np.ascontiguousarray(np.take(whole, self.slots, axis=self.axis))
        items = zip(whole, self.slots, strict=True)
        return np.stack([np.take(item, slots, axis=self.axis - 1) for item, slots in items])


@dataclass(frozen=True)
class Replaced:
    """Write these elements, as unsigned integers of the element size, in place of a tensor."""

    elements: npt.NDArray[Any]

    def shape(self, _: TensorEntry) -> tuple[int, ...]:
        """Their shape."""
        return self.elements.shape

    def words(self, _: memoryview, entry: TensorEntry) -> npt.NDArray[Any]:
        """The elements themselves. Raises KvpruneError where they are of another size than the tensor's."""
        if self.elements.itemsize != entry.itemsize:
            raise KvpruneError(
                f"{entry.file}: {entry.name} is stored as {entry.dtype}, and the refitted values are not"
            )
        return self.elements


@dataclass(frozen=True)
class Patched:
    """Cut a stack of experts, and write these elements in place of some: `items` by their place along axis 0."""

    cut: Cut
    items: dict[int, npt.NDArray[Any]]

    def shape(self, entry: TensorEntry) -> tuple[int, ...]:
        """The shape after the cut."""
        return self.cut.shape(entry)

    def words(self, data: memoryview, entry: TensorEntry) -> npt.NDArray[Any]:
        """The kept slots, with the new elements in their places."""
        words = self.cut.words(data, entry)
        for at, elements in self.items.items():
            words[at] = Replaced(elements).words(data, entry)
        return words


@dataclass(frozen=True)
class Added:
    """Write a tensor of these elements, of the safetensors `dtype`, at the end of `file`, where no such tensor was."""

    elements: npt.NDArray[Any]
    dtype: str
    file: str

    def entry(self, name: str) -> TensorEntry:
        """What the source would hold if it held the tensor."""
        return TensorEntry(name, self.file, self.dtype, self.elements.shape, 0, self.elements.nbytes)

    def shape(self, _: TensorEntry) -> tuple[int, ...]:
        """Their shape."""
        return self.elements.shape

    def words(self, _data: memoryview, _entry: TensorEntry) -> npt.NDArray[Any]:
        """The elements themselves."""
        return self.elements


Change = Cut | Replaced | Patched | Added


def changed_entries(checkpoint: "Checkpoint", changes: dict[str, Change], file: str) -> list[TensorEntry]:
    """The tensors of `file` in their order, and those that are added to it."""
    held = [entry for entry in checkpoint.tensors.values() if entry.file == file]
    return held + [
        change.entry(name) for name, change in changes.items() if isinstance(change, Added) and change.file == file
    ]


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors files. Tensors are in file order, so that walking them reads forwards."""

    folder: Path
    files: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    index: dict[str, Any] | None

    @property
    def bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in self.files)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers of all weight files of `folder`. Raises KvpruneError where one is missing or broken."""
    index = _read_index(folder / INDEX) if (folder / INDEX).is_file() else None
    if index is not None:
        files = tuple(sorted(set(index["weight_map"].values())))
        for file in files:
            if PurePosixPath(file).name != file:
                raise KvpruneError(f"{folder / INDEX}: names a shard outside of its folder: {file}")
            if not (folder / file).is_file():
                raise KvpruneError(f"{folder / INDEX}: names a shard that is not there: {file}; download it again")
    elif (folder / SINGLE).is_file():
        files = (SINGLE,)
    else:
        raise KvpruneError(
            f"{folder}: neither {SINGLE} nor {INDEX}; kvprune reads safetensors only, never pickled weights"
        )
    tensors = {entry.name: entry for file in files for entry in _entries(folder, file)}
    if index is not None and (lost := sorted(set(index["weight_map"]) - set(tensors))):
        raise KvpruneError(f"{folder / INDEX}: names {len(lost)} tensors that no shard holds, {lost[0]} first")
    return Checkpoint(folder, files, tensors, index)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = dict(json.loads(path.read_text(encoding="utf-8")))
        valid = all(isinstance(file, str) for file in index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise KvpruneError(f"{path}: not a valid index of shards; download it again")
    return index


def _entries(folder: Path, file: str) -> Iterator[TensorEntry]:
    header, base = read_header(folder / file)
    found = [
        TensorEntry(
            name, file, item["dtype"], tuple(item["shape"]), *(base + offset for offset in item["data_offsets"])
        )
        for name, item in header.items()
        if name != "__metadata__"
    ]
    return iter(sorted(found, key=lambda entry: entry.start))


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's JSON header, and the offset at which its data begins.

    Raises KvpruneError where the file is no safetensors file or is cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise KvpruneError(f"{path}: truncated or not a safetensors file ({size:,} bytes); download it again")
            header = json.loads(file.read(length))
        end = max((item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"), default=0)
    except OSError as error:
        raise KvpruneError(f"{path}: cannot read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise KvpruneError(f"{path}: not a safetensors file (its header is not valid); download it again") from None
    if 8 + length + end != size:
        raise KvpruneError(
            f"{path}: truncated or corrupt: {size:,} bytes where its header asks for {8 + length + end:,}; "
            "download it again"
        )
    return header, 8 + length


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """A file's bytes without reading them: pages come from the page cache as they are touched."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        yield memoryview(pages)
    finally:
        with suppress(BufferError):  # after an error its traceback still holds views, and the map goes with them
            pages.close()


def write_cut_file(source: Path, entries: list[TensorEntry], changes: dict[str, Change], target: Path) -> None:
    """Copy a safetensors file and change some of its tensors: same names, order, dtypes and metadata."""
    header, _ = read_header(source)
    layout: dict[str, Any] = {"__metadata__": header["__metadata__"]} if "__metadata__" in header else {}
    offset = 0
    for entry in entries:
        shape, size = entry.shape, entry.end - entry.start
        if entry.name in changes:
            shape = changes[entry.name].shape(entry)
            size = int(np.prod(shape)) * entry.itemsize
        layout[entry.name] = {"dtype": entry.dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(layout, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned, as the reference writer leaves it
    with target.open("wb") as out, mapped(source) as data:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for entry in entries:
            if entry.name in changes:
                out.write(changes[entry.name].words(data, entry).data)
            else:
                _write_blocks(out, data[entry.start : entry.end])


def _write_blocks(out: IO[bytes], data: memoryview) -> None:
    for start in range(0, len(data), WRITE_BLOCK):
        out.write(data[start : start + WRITE_BLOCK])


def find_difference(checkpoint: Checkpoint, changes: dict[str, Change], slim: Checkpoint) -> str | None:
    """Compare every tensor of `slim` bit for bit with what `changes` make of `checkpoint`. None, or what differs."""
    entries = {file: changed_entries(checkpoint, changes, file) for file in checkpoint.files}
    if [entry.name for file in checkpoint.files for entry in entries[file]] != list(slim.tensors):
        return "the tensor names differ"
    for file in checkpoint.files:
        with mapped(checkpoint.folder / file) as dense, mapped(slim.folder / file) as thin:
            for entry in entries[file]:
                if not _is_expected(dense, entry, changes.get(entry.name), thin, slim.tensors[entry.name]):
                    return f"{entry.name} is not what it should be"
    return None


def _is_expected(
    dense: memoryview, entry: TensorEntry, change: Change | None, thin: memoryview, written: TensorEntry
) -> bool:
    got = np.frombuffer(thin[written.start : written.end], dtype=np.uint8)
    if change is None:
        expected = np.frombuffer(dense[entry.start : entry.end], dtype=np.uint8)
    else:
        expected = change.words(dense, entry).reshape(-1).view(np.uint8)
    shape = entry.shape if change is None else change.shape(entry)
    return (written.dtype, written.shape) == (entry.dtype, shape) and np.array_equal(got, expected)
