"""The shelves of a run folder: how artifacts are written, read, digested and described."""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.errors import KvpruneError

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 2
LIBRARIES = ("kvprune", "torch", "transformers", "datasets", "lm_eval", "safetensors", "accelerate", "peft")


@dataclass(frozen=True)
class RunFolder:
    """Where the artifacts of one run are."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def stats(self) -> Path:
        return self.path / "stats.safetensors"

    @property
    def partial_stats(self) -> Path:
        return self.path / "stats.partial.safetensors"

    @property
    def walk(self) -> Path:
        """What a calibration or a refit that is under way keeps of its finished layers."""
        return self.path / ".walk"

    @property
    def samples(self) -> Path:
        return self.path / "self_samples.json"

    @property
    def sensitivity(self) -> Path:
        return self.path / "sensitivity.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def values(self) -> Path:
        return self.path / "values.safetensors"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def recovered(self) -> Path:
        return self.path / "recover.json"

    @property
    def recovering(self) -> Path:
        """What a training that is under way keeps."""
        return self.path / ".recover"

    @property
    def recover_samples(self) -> Path:
        return self.path / "recover_samples.json"

    @property
    def eval(self) -> Path:
        return self.path / "eval"

    @property
    def results(self) -> Path:
        return self.path / "eval" / "results.json"


@dataclass(frozen=True)
class Size:
    """A model's size in every unit that a budget can have. Tied parameters count once."""

    slots: int
    ffn_params: int
    total_params: int
    bytes: int


# What people read for each unit of `Size`.
UNITS = {
    "slots": "FFN slots",
    "ffn_params": "FFN parameters",
    "total_params": "parameters",
    "bytes": "bytes of weights",
}


def budget_words(budget: dict[str, Any]) -> str:
    """A requested budget, "keep 0.8", as it is told wherever it is told."""
    return ", ".join(f"{unit} {value}" for unit, value in budget.items() if value is not None)


@dataclass(frozen=True)
class FfnPlan:
    """Which slots of one FFN stay: `kept` is sorted; `guarded` and `protected` are among them."""

    name: str
    width_before: int
    kept: list[int]
    guarded: list[int] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)
    tokens: int = 0  # that were counted; of an expert, those that were routed to it

    @property
    def width(self) -> int:
        return len(self.kept)

    @property
    def removed(self) -> list[int]:
        """The slots that do not stay, sorted."""
        return sorted(set(range(self.width_before)) - set(self.kept))


@dataclass(frozen=True)
class Plan:
    """The decision: kept slots per FFN, and the budget as requested and as achieved."""

    provenance: dict[str, Any]
    budget: dict[str, Any]
    before: Size
    after: Size
    ffns: list[FfnPlan]
    layers: list[dict[str, int]]  # of each decoder layer, the fields of the config that set widths in it
    validated: dict[str, float] = field(default_factory=dict)  # losses of this allocation and of a uniform one

    def differing(self) -> list[str]:
        """The fields whose value is not the same in all layers that have it."""
        names = dict.fromkeys(name for fields in self.layers for name in fields)
        return [name for name in names if len({fields[name] for fields in self.layers if name in fields}) > 1]

    @property
    def loads(self) -> str:
        """Where the checkpoint will load."""
        if not self.differing():
            return "loads with stock transformers, and wherever the dense model does: each config field has one value"
        return (
            f"{', '.join(self.differing())} differs by layer: loads with transformers 5.15 or newer and "
            "trust_remote_code=True only; vLLM, llama.cpp and other engines build all layers alike and refuse it"
        )


def write_plan(path: Path, plan: Plan) -> None:
    """Write `plan` as JSON, atomically."""
    write_json(path, asdict(plan))


def read_plan(path: Path) -> Plan:
    """Read what `write_plan` wrote. Raises KvpruneError where the file is not a plan."""
    data = read_json(path)
    try:
        return Plan(
            provenance=data["provenance"],
            budget=data["budget"],
            before=Size(**data["before"]),
            after=Size(**data["after"]),
            ffns=[FfnPlan(**item) for item in data["ffns"]],
            layers=data["layers"],
            validated=data["validated"],
        )
    except (KeyError, TypeError) as error:
        raise KvpruneError(f"{path}: not a plan ({error}); make it again with: kvprune plan {path.parent}") from None


def provenance(artifact: str, recipe: dict[str, Any], inputs: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """What an artifact says of itself: format, versions, the recipe values it rests on and its inputs' digests."""
    return {
        "format": f"kvprune.{artifact}",
        "version": FORMAT_VERSION,
        "made_with": {"python": platform.python_version(), **library_versions()},
        "recipe": recipe,
        "inputs": inputs,
        **extra,
    }


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries that results depend on."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, make it durable, then move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # that of a killed process may be a link to another run's file
    try:
        write(temporary)
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Make the run folder and keep other kvprunes from writing to it. Raises KvpruneError where one does already."""
    run.path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run.path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise KvpruneError(f"{run.path}: another kvprune is at work in this run folder; wait for it") from None
    finally:
        os.close(descriptor)


def fsync(path: Path) -> None:
    """Ask the disk to keep a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON, atomically."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises KvpruneError where it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvpruneError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError as error:
        raise KvpruneError(f"{path}: not valid JSON: {error}") from None


def write_tensors(path: Path, tensors: "dict[str, torch.Tensor]", meta: dict[str, Any]) -> None:
    """Write `tensors` as safetensors with `meta` as JSON in its header, atomically."""
    from safetensors.torch import save

    text = {"kvprune": json.dumps(meta, ensure_ascii=False)}

    def write(temporary: Path) -> None:
        temporary.write_bytes(save(tensors, metadata=text))

    write_atomic(path, write)


def read_tensors(path: Path) -> "tuple[dict[str, torch.Tensor], dict[str, Any]]":
    """Read what `write_tensors` wrote: tensors and metadata. Raises KvpruneError where the file is broken."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})["kvprune"])
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118
    except FileNotFoundError:
        raise KvpruneError(f"{path}: no such file; make it with: kvprune calibrate") from None
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise KvpruneError(f"{path}: not an artifact of kvprune ({error}); remove it and run the stage again") from None


def read_meta(path: Path) -> dict[str, Any]:
    """Only the metadata of what `write_tensors` wrote. No torch is imported."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return dict(json.loads((file.metadata() or {})["kvprune"]))
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise KvpruneError(f"{path}: not an artifact of kvprune ({error}); remove it and run the stage again") from None


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_names(folder: Path) -> list[str]:
    """All files below `folder`, sorted, as paths relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def result_file(folder: Path, task: str) -> Path:
    """Where the result of an evaluation task is, in `eval/dense` or `eval/slim`; its samples lie beside it."""
    return folder / f"{task.replace('/', '_')}.json"


def samples_file(folder: Path, task: str) -> Path:
    """Where a task's samples are, one JSON row each."""
    return result_file(folder, task).with_suffix(".samples.jsonl")


def cache_folder() -> Path:
    """Where kvprune keeps what can be made again: $KVPRUNE_CACHE, else kvprune in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVPRUNE_CACHE") or Path(base) / "kvprune")
