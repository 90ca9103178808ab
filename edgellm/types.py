"""Types shared by every layer."""

from __future__ import annotations

import enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Float32Array", "Int32Array", "TensorFormat", "round_up"]

Float32Array: TypeAlias = npt.NDArray[np.float32]
Int32Array: TypeAlias = npt.NDArray[np.int32]


class TensorFormat(enum.IntEnum):
    """How a tensor's numbers are stored; the values are those of `elm_format` in edgellm.h."""

    F32 = 0
    E4 = 1
    E8 = 2
    E5 = 3


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
