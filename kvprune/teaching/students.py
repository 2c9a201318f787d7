"""The student: the slim model, which of its parameters learn, and what it shares with its teacher."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.errors import KvpruneError
from kvprune.ffn.layout import Layout, linear_maps
from kvprune.schema import Recover
from kvprune.sources.models import one_line


@dataclass(frozen=True)
class Student:
    """A slim model made ready to learn. `trained` are its names of what learns: with LoRA, of the adapters."""

    model: Any
    trained: tuple[str, ...]
    shared: int  # bytes of parameters that are the teacher's own
    layers: tuple[nn.Module, ...]  # of the decoder


def make_student(model: Any, layout: Layout, section: Recover, teacher: Any | None) -> Student:
    """Let what `section.train` says of the slim `model` learn, in float32, and nothing else.

    What does not learn and is the same in the `teacher` becomes the teacher's, so that it is held once. Raises
    KvpruneError where the model cannot learn like that.
    """
    model.requires_grad_(False)
    if section.train == "lora":
        model = with_adapters(model, layout, section)
        learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    else:
        learning = learning_names(model, layout, section.train)
    parameters = dict(model.named_parameters())
    for name in learning:
        parameters[name].data = parameters[name].data.float()
        parameters[name].requires_grad_(True)
    shared = share(_base(model), teacher) if teacher is not None else 0
    layers = tuple(_base(model).get_submodule(name) for name in layout.layers)
    return Student(model, tuple(learning), shared, layers)


def learning_names(model: nn.Module, layout: Layout, train: str) -> list[str]:
    """Names of the parameters of the slim `model` that learn: values, all of the FFNs, or all there are."""
    there = dict(model.named_parameters())
    if train == "all":
        return list(there)
    names: list[str] = []
    for ffn in layout.ffns:
        bias = ffn.value_bias or f"{ffn.value.name.removesuffix('.weight')}.bias"
        names += [ffn.value.name, bias]
        if train == "ffn":
            names += [param.name for param in ffn.cuts()] + [*ffn.missing_biases(1)]
    return [name for name in dict.fromkeys(names) if name in there]


def check_adaptable(layout: Layout) -> None:
    """Raise KvpruneError where there is more to adapt than linear maps."""
    if stack := next((ffn.value.name for ffn in layout.ffns if ffn.expert is not None), None):
        raise KvpruneError(
            f"recover.train: lora adapts linear maps, and {stack} is a stack of experts; use train: ffn or values"
        )


def with_adapters(model: Any, layout: Layout, section: Recover) -> Any:
    """Low-rank adapters beside every linear map of the decoder layers. Hu et al. 2021 (arXiv:2106.09685)."""
    from peft import LoraConfig, get_peft_model

    check_adaptable(layout)
    assert section.rank is not None  # of a complete recipe
    maps = linear_maps(model, layout)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=2 * section.rank,
        lora_dropout=0.0,
        target_modules=list(maps),
        fan_in_fan_out=any(maps.values()),
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(section.seed)
            return get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:  # of a class that peft cannot wrap
        raise KvpruneError(f"recover.train: peft cannot adapt this model: {one_line(error)}; use train: ffn") from None


def merged(model: Any) -> Any:
    """The slim model with its adapters added to its weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def _base(model: Any) -> nn.Module:
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


@torch.no_grad()
def share(student: nn.Module, teacher: nn.Module) -> int:
    """Make the student's parameters that do not learn and equal the teacher's one with them. Returns their bytes."""
    theirs = dict(teacher.named_parameters(remove_duplicate=False))
    shared = dict[int, int]()  # of tied parameters one
    for path, module in student.named_modules():
        for key, parameter in [*module._parameters.items()]:
            other = theirs.get(_plain(f"{path}.{key}" if path else key))
            if parameter is None or other is None or parameter is other or parameter.requires_grad:
                continue
            if _equal(parameter, other):
                module._parameters[key] = other
                shared[id(other)] = other.nbytes
    return sum(shared.values())


def _plain(name: str) -> str:
    """A parameter's name without the layers that adapters wrap around it."""
    return name.replace(".base_layer.", ".")


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)


@torch.no_grad()
def put(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the parameters of these names other values, in their own types."""
    there = dict(model.named_parameters())
    for name, tensor in tensors.items():
        there[name].copy_(tensor)


def changed_weights(names: Iterable[str]) -> list[str]:
    """Parameters of the slim model that learning changes: themselves, or those that adapters are merged into."""
    found = [name.removeprefix("base_model.model.").replace(".lora_A.default.", ".") for name in names]
    return [name for name in found if ".lora_B." not in name]


def lighter(section: Recover, micro: int, *, whole: bool) -> str:
    """What makes a recovery take less memory."""
    ways = [f"--batch-size {micro // 2}"] if micro > 1 else []
    ways += ["--checkpointing"] if whole else []
    ways += ["recover.train values or lora"] if section.train in ("ffn", "all") else []
    return ", or ".join([*ways, "a shorter recover.sequence_length"])
