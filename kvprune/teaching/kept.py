"""What a training that is under way keeps on disk: its last step, to go on from, and its best point so far."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kvprune.artifacts import read_tensors, write_atomic
from kvprune.progress import log


@dataclass(frozen=True)
class Kept:
    """The folder of one training, and what that training is: of another one nothing is read."""

    folder: Path
    key: dict[str, Any]

    def save(self, name: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """Write the point `name`, in place of one of that name."""
        meta = {"kvprune": json.dumps({"key": self.key, **about}, ensure_ascii=False)}

        def write(temporary: Path) -> None:
            save_file(tensors, temporary, metadata=meta)

        write_atomic(self._file(name), write)

    def read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What `save` wrote in the same training, or None."""
        if not self._file(name).is_file():
            return None
        tensors, about = read_tensors(self._file(name))
        if about.pop("key") != self.key:
            log.info("recover: %s is of other settings or another model; training from the start", self._file(name))
            return None
        return tensors, about

    def drop_all_but(self, *names: str) -> None:
        """Remove the other points."""
        for file in self.folder.glob("*.safetensors"):
            if file.stem not in names:
                file.unlink()

    def clear(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
