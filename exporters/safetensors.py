"""Reader of safetensors files that trusts nothing in them.

The rules are those of the reference implementation: a header of at most 100 MB, tensors without
holes or overlaps that fill the file exactly, sizes that follow from shape and type.

Source: https://github.com/huggingface/safetensors, README and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.source import let_go, parse_json, refuse_lfs_pointer
from edgellm.types import Float32Array

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 65_536
MAX_DIMS = 8

_ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_READABLE: Final[Mapping[str, str]] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_ARRAYS: Final[Mapping[str, str]] = {**_READABLE, "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsTensor:
    """One entry of the header; `offset` counts from the start of the file, bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsFile:
    """An open safetensors file: `tensors`, and rows of them as float32."""

    def __init__(self, path: Path) -> None:
        """Opens and checks the file.

        Args:
            path: The file.

        Raises:
            FormatError: The file is broken or not safetensors.
        """
        self.path = path
        with path.open("rb") as file:
            head = file.read(64)
            refuse_lfs_pointer(path, head)
            size = path.stat().st_size
            header_bytes = int.from_bytes(head[:8], "little")
            if len(head) < 10 or head[8:9] != b"{":
                raise FormatError(f"{path} is not a safetensors file")
            if header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise FormatError(
                    f"{path}: the header claims {header_bytes} bytes; the file has {size} and "
                    f"{MAX_HEADER_BYTES} are allowed: broken or truncated, download it again"
                )
            file.seek(8)
            header = parse_json(file.read(header_bytes), f"{path}: the header")
            self.tensors = _read_tensors(path, header, 8 + header_bytes, size)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, slowest dimension first."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def dtype(self, name: str) -> str:
        """The tensor's number type, for example "BF16"."""
        return self.tensors[name].dtype

    def rows(self, name: str, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32; a vector is one row.

        Raises:
            UnsupportedModelError: The tensor is not of type F32, F16 or BF16.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in _READABLE:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is of type {tensor.dtype}; edgellm reads F32, F16 "
                "and BF16: export from the unquantised model"
            )
        cols = tensor.shape[-1]
        dtype = np.dtype(_READABLE[tensor.dtype])
        start = tensor.offset + first * cols * dtype.itemsize
        raw = np.frombuffer(self._map, dtype, count * cols, start).reshape(count, cols)
        if tensor.dtype == "BF16":
            values = (raw.astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.astype(np.float32)
        let_go(self._map, start, raw.nbytes)
        return values

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor's numbers where they lie, read-only; BF16 as uint16.

        Raises:
            UnsupportedModelError: The tensor is not of type F32, F16, BF16, I32 or I64.
        """
        tensor = self.tensors[name]
        dtype = _ARRAYS.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r} is of type {tensor.dtype}")
        items = math.prod(tensor.shape)
        return np.frombuffer(self._map, dtype, items, tensor.offset).reshape(tensor.shape)


def _read_tensors(
    path: Path, header: dict[str, Any], base: int, file_size: int
) -> dict[str, SafetensorsTensor]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{path}: __metadata__ is not a map of strings")
    if len(header) > MAX_TENSORS:
        raise FormatError(f"{path}: {len(header)} tensors, at most {MAX_TENSORS} allowed")
    tensors = [_read_tensor(path, name, entry) for name, entry in header.items()]
    end = 0
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.size)):
        if tensor.offset != end:
            raise FormatError(
                f"{path}: tensor {tensor.name!r} begins at {tensor.offset}, not where the one "
                f"before it ends ({end})"
            )
        end += tensor.size
    if base + end != file_size:
        raise FormatError(
            f"{path}: the tensors end at byte {base + end}, the file has {file_size}: truncated "
            "or damaged, download it again"
        )
    return {
        t.name: SafetensorsTensor(
            name=t.name, dtype=t.dtype, shape=t.shape, offset=base + t.offset, size=t.size
        )
        for t in tensors
    }


def _read_tensor(path: Path, name: str, entry: object) -> SafetensorsTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise FormatError(f"{where} is of unknown type {dtype!r}")
    if not _is_counts(shape) or len(shape) > MAX_DIMS:
        raise FormatError(f"{where} has impossible shape {shape!r:.80}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where} has impossible offsets {offsets!r:.80}")
    begin, end = offsets
    if math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise FormatError(f"{where}: {dtype} {shape} does not take {end - begin} bytes")
    return SafetensorsTensor(
        name=name, dtype=dtype, shape=tuple(shape), offset=begin, size=end - begin
    )


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
