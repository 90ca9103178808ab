"""Where a long export keeps what it has done, so that it goes on after a kill."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgellm.errors import EdgeLLMError
from edgellm.format.temporary import lock_folder

__all__ = ["Workspace"]

_STAMP = "fingerprint.json"


class Workspace:
    """A folder beside the output, `.NAME.partial`, removed when the export is whole.

    It is locked until `close`, or the end of the process: two exports to one output at a time
    would take each other's work for theirs.

    Args:
        output: The file to be.
        fingerprint: What the work depends on; work with another fingerprint is thrown away.

    Raises:
        EdgeLLMError: Another export works there.
        OSError: The folder cannot be made.
    """

    def __init__(self, output: Path, fingerprint: dict[str, Any]) -> None:
        self.folder = output.with_name(f".{output.name}.partial")
        try:
            self._lock: int | None = lock_folder(self.folder)
        except BlockingIOError:
            raise EdgeLLMError(
                f"another export to {output} is at work: wait for it, or name another output"
            ) from None
        try:
            self._stamp(json.dumps(fingerprint, sort_keys=True))
        except BaseException:
            os.close(self._lock)
            raise

    def _stamp(self, stamp: str) -> None:
        file = self.folder / _STAMP
        if not file.is_file() or file.read_text() != stamp:
            for path in self.folder.iterdir():
                path.unlink()
            file.write_text(stamp)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, name: str) -> Path:
        """Where a file of that name would lie."""
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
        path = self.path(f"{name}.npz")
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)

    def remove(self) -> None:
        """Removes the folder."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def close(self) -> None:
        """Lets others work there; the folder stays if there is work in it."""
        if self._lock is not None and any(self.folder.glob("*.npz")):
            os.close(self._lock)
            self._lock = None
        self.remove()
