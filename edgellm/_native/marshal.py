"""Across the border: statuses become typed errors, sequences become checked arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from edgellm._native import abi
from edgellm.errors import (
    ContextFullError,
    EdgeLLMError,
    FormatError,
    NativeError,
    OutOfMemoryError,
    UnsupportedDeviceError,
)

__all__ = ["check", "fields", "ids_array", "int32", "require"]

_ERRORS: dict[int, type[EdgeLLMError]] = {
    abi.STATUS_FORMAT: FormatError,
    abi.STATUS_UNSUPPORTED: UnsupportedDeviceError,
    abi.STATUS_OUT_OF_MEMORY: OutOfMemoryError,
    abi.STATUS_CONTEXT_FULL: ContextFullError,
    abi.STATUS_NONFINITE: NativeError,
    abi.STATUS_BUSY: NativeError,
}


def check(status: int, error: abi.Error) -> None:
    """Raises the typed error of a failed call, with the library's message."""
    if status != abi.STATUS_OK:
        _fail(status, error.message.decode("utf-8", "replace"))


def _fail(status: int, message: str) -> NoReturn:
    if status == abi.STATUS_INVALID_ARGUMENT:
        raise ValueError(message)
    if status == abi.STATUS_IO:
        raise OSError(message)
    raise _ERRORS.get(status, NativeError)(message)


def fields(raw: ctypes.Structure, *skip: str) -> dict[str, Any]:
    """A struct's fields by name, texts decoded."""
    names = [entry[0] for entry in raw._fields_ if entry[0] not in skip]
    values = {name: getattr(raw, name) for name in names}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def int32(value: int, what: str) -> int:
    """Returns `value` if it is a count that fits int32."""
    if not 0 <= value < 2**31:
        raise ValueError(f"{what} is {value}; it must be 0 to {2**31 - 1}")
    return value


def ids_array(ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Token ids as (n,) int32, C-contiguous."""
    array = np.asarray(ids if len(ids) else [], dtype=np.int64).reshape(-1)
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise ValueError("a token id is negative or above 2147483647")
    return np.ascontiguousarray(array, dtype=np.int32)


def require(array: npt.NDArray[Any], dtype: type, ndim: int, what: str) -> None:
    """Refuses an array that is not of that type and shape, or not C-contiguous."""
    if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
        raise ValueError(
            f"{what} must be a C-contiguous {ndim}-d {np.dtype(dtype)} array,"
            f" not {array.ndim}-d {array.dtype}"
        )
