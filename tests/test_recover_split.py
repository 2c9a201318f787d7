"""A recovery whose models are split over processes (FSDP 2) is the same as one in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprune.artifacts import RunFolder
from tests.test_recover import exported, recover, weights

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "ACCELERATE_USE_CPU": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # as accelerate launch has it by default
    "OMP_NUM_THREADS": "1",
}


def recover_split(run: RunFolder, **section: Any) -> tuple[dict[str, Any], str]:
    """What two processes report, and what they print."""
    settings = [item for key, value in section.items() for item in ("--set", f"recover.{key}={value}")]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.split",
    ]
    done = subprocess.run(
        [*launch, "recover", str(run.path), "--json", "--set", "recover.method=distill", *settings],
        env={**os.environ, **FSDP},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(("dtype", "train"), [(torch.float32, "ffn"), (torch.bfloat16, "ffn"), (torch.float32, "lora")])
def test_split_over_two_processes_the_losses_are_those_of_one(tmp_path: Path, dtype: torch.dtype, train: str) -> None:
    one, two = (exported(tmp_path, dtype=dtype, name=name) for name in ("one", "two"))
    alone = recover(one, train=train)
    report, said = recover_split(two, train=train)
    assert said.count("split: True") == 2
    near = 1e-4 if dtype == torch.float32 else 2e-2
    assert report["losses"] == pytest.approx(alone["losses"], rel=near)
    assert alone["improved"]
    assert report["best"] == alone["best"]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, tensor in weights(two).items():
        assert torch.allclose(tensor, weights(one)[name], rtol=tolerance, atol=tolerance), name
