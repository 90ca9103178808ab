"""Where a long export keeps what it has done, so that it goes on after a kill."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Workspace"]

_STAMP = "fingerprint.json"


class Workspace:
    """A folder beside the output, `.NAME.partial`, removed when the export is whole.

    Args:
        output: The file to be.
        fingerprint: What the work depends on; work with another fingerprint is thrown away.
    """

    def __init__(self, output: Path, fingerprint: dict[str, Any]) -> None:
        self.folder = output.with_name(f".{output.name}.partial")
        self._stamp = json.dumps(fingerprint, sort_keys=True)
        stamp_file = self.folder / _STAMP
        if not stamp_file.is_file() or stamp_file.read_text() != self._stamp:
            self.remove()

    def path(self, name: str) -> Path:
        """Where a file of that name would lie; the folder is there afterwards."""
        if not self.folder.is_dir():
            self.folder.mkdir()
            (self.folder / _STAMP).write_text(self._stamp)
        return self.folder / name

    def save(self, name: str, **arrays: npt.NDArray[Any]) -> None:
        """Keeps arrays under a name; they are there whole or not at all."""
        temporary = self.path(f"{name}.tmp")
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path(f"{name}.npz"))

    def load(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        """What was kept under a name, None if nothing was."""
        path = self.folder / f"{name}.npz"
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
