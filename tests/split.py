"""kvprune as its command line, where accelerate takes CPUs for GPUs: it splits models (FSDP) on those only.

Splitting itself is real, over gloo between CPUs.
"""

import sys
from typing import Any

from accelerate.state import DistributedType, PartialState
from torch.distributed.tensor import DTensor

from kvprune import dense
from kvprune.cli import main
from kvprune.teaching import training


def split() -> None:
    """Have accelerate split what it prepares, and say so on stderr."""
    init, prepare = PartialState.__init__, training.prepare

    def on_a_gpu(self: Any, *arguments: Any, **more: Any) -> None:
        init(self, *arguments, **more)
        self.distributed_type = DistributedType.MULTI_GPU

    def telling(*arguments: Any) -> training.Work:
        work = prepare(*arguments)
        whole = any(not isinstance(item, DTensor) for item in work.learning.values())
        sys.stderr.write(f"split: {not whole}\n")  # at once: two processes write here
        return work

    dense.has_bfloat16 = lambda: True  # as on a GPU
    PartialState.__init__ = on_a_gpu
    training.prepare = telling  # type: ignore[assignment]


if __name__ == "__main__":
    split()
    sys.exit(main(sys.argv[1:]))
