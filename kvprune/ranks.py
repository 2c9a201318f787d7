"""Several processes at one calibration, refit or recovery, as `torchrun` starts them: who am I, and sums over all.

Every process (rank) has a share of the batches. Sums go through torch.distributed: gloo between CPUs, nccl between
GPUs. Rank 0 alone writes to the run folder. One process is the same with nothing to do.
"""

import gc
import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kvprune.errors import KvpruneError

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = timedelta(hours=24)  # rank 0 may sample for long; a rank that dies is noticed at once all the same


class _LostError(KvpruneError):
    """The other processes are gone."""


@dataclass(frozen=True)
class Ranks:
    """This process among all that share the work."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, *tensors: "Tensor") -> None:
        """Replace each of `tensors` by its sum over the ranks, in place."""
        self._reduce(tensors, "SUM")

    def largest(self, *tensors: "Tensor") -> None:
        """Replace each of `tensors` by its elementwise maximum over the ranks, in place."""
        self._reduce(tensors, "MAX")

    def _reduce(self, tensors: "tuple[Tensor, ...]", kind: str) -> None:
        if self.count > 1:
            from torch import distributed

            for tensor in tensors:
                with _told():
                    distributed.all_reduce(tensor, getattr(distributed.ReduceOp, kind))

    def data_of_first(self, data: Any) -> Any:
        """What rank 0 has as `data`, made of what JSON knows, on every rank."""
        if self.count == 1:
            return data
        import torch

        text = bytearray(json.dumps(data if self.first else None).encode())
        size = torch.tensor(len(text))
        self._broadcast(size)
        letters = torch.frombuffer(text, dtype=torch.uint8) if self.first else torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(letters)
        return json.loads(letters.numpy().tobytes())

    def tensor_of_first(self, tensor: "Tensor | None") -> "Tensor":
        """Rank 0's `tensor` (on the CPU) on every rank; others may have None."""
        import torch

        if self.count > 1:
            about = self.data_of_first(
                [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] if tensor is not None else None
            )
            if not self.first:
                tensor = torch.empty(about[0], dtype=getattr(torch, about[1]))
        assert tensor is not None
        if self.count > 1:
            tensor = tensor.contiguous()
            self._broadcast(tensor.view(-1).view(torch.uint8))
        return tensor

    def _broadcast(self, tensor: "Tensor") -> None:
        from torch import distributed

        with _told():
            distributed.broadcast(tensor, 0)

    def all_true(self, condition: bool) -> bool:
        """Whether `condition` holds on every rank."""
        if self.count == 1:
            return condition
        import torch

        failed = torch.tensor(int(not condition))
        self.sum(failed)
        return not int(failed)


ALONE = Ranks()


def launched() -> Ranks:
    """This process's place as its launcher says in the environment; ALONE without a launcher."""
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def own_device(device: str) -> str:
    """`cuda` becomes this rank's GPU on its node."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None and launched().count > 1 else device


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Meet the other ranks, if there are any, and part from them at the end."""
    ranks = launched()
    if ranks.count == 1:
        yield ranks
        return
    import torch
    from torch import distributed

    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    with _told():
        distributed.init_process_group(backend, timeout=PATIENCE)
    try:
        yield ranks
    except _LostError:  # torchrun is about to stop this one too: the reason has to be told before
        raise
    except BaseException as error:
        # What frames hold, as a model that is trained together, would outlive the group and wait for ever at its end.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise
    finally:
        distributed.destroy_process_group()


@contextmanager
def _told() -> Iterator[None]:
    """An error between ranks in one line: the rank that died says why itself."""
    from torch import distributed

    try:
        yield
    except (RuntimeError, distributed.DistError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise _LostError(f"rank {launched().rank}: lost the other processes, so this one stops: {text}") from None
