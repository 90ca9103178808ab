"""Reader of GGUF files that trusts nothing in them.

Every length is checked against a limit and the file's size before anything is allocated; tensor
data is mapped and dequantised a few rows at a time.

Source: the GGUF specification (ggml docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import importlib
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np

from edgellm.errors import FormatError, MissingExtraError, UnsupportedModelError
from edgellm.exporters.source import let_go, refuse_lfs_pointer
from edgellm.types import Float32Array, round_up

MAGIC = b"GGUF"
MAX_FIELDS = 65_536
MAX_TENSORS = 65_536
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 1 << 24
MAX_DIMS = 4
MAX_NAME_BYTES = 1024
DEFAULT_ALIGNMENT = 32

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: Final[Mapping[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
    7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip

T = TypeVar("T", int, float, str, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One entry of the tensor table.

    Attributes:
        name: As in the file.
        type: Number of the ggml type.
        shape: Slowest dimension first, so that a weight is (rows, cols).
        offset: From the start of the file, bytes.
        size: Bytes.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    size: int


class GGUFFile:
    """An open GGUF file: `fields`, `tensors`, and rows of weights as float32."""

    def __init__(self, path: Path) -> None:
        """Opens and checks the file.

        Args:
            path: The file.

        Raises:
            FormatError: The file is broken or not GGUF.
            MissingExtraError: The `gguf` package is not installed.
        """
        self.path = path
        self._gguf = _gguf_package()
        with path.open("rb") as file:
            head = file.read(64)
            refuse_lfs_pointer(path, head)
            if head[:4] != MAGIC:
                raise FormatError(f"{path} is not a GGUF file: it begins with {head[:4]!r}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, self._map)
        num_tensors = _read_header(cursor)
        self.fields = _read_fields(cursor)
        self.tensors = self._read_tensors(cursor, num_tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, slowest dimension first."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def dtype(self, name: str) -> str:
        """Name of the tensor's ggml type, for example "Q4_K"."""
        return str(self._gguf.GGMLQuantizationType(self.tensors[name].type).name)

    def field(self, key: str, kind: type[T]) -> T | None:
        """A scalar field, or None if the file has no such key.

        Args:
            key: Name of the field.
            kind: The type it must have; an int passes for a float.

        Raises:
            FormatError: The field has another type.
        """
        value = self.fields.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise FormatError(
                f"{self.path}: field {key!r} is {_kind(value)}, {kind.__name__} expected"
            )
        return value

    def array(self, key: str, kind: type[T], count: int | None = None) -> list[T] | None:
        """An array field, or None if the file has no such key.

        Args:
            key: Name of the field.
            kind: The type every item must have.
            count: Number of items it must have.

        Raises:
            FormatError: The field is not such an array.
        """
        value = self.fields.get(key)
        if value is None:
            return None
        # An array has one item type, so that the first item speaks for all.
        if not isinstance(value, list) or (value and type(value[0]) is not kind):
            raise FormatError(
                f"{self.path}: field {key!r} is {_kind(value)}, array of {kind.__name__} expected"
            )
        if count is not None and len(value) != count:
            raise FormatError(f"{self.path}: field {key!r} has {len(value)} items, not {count}")
        return value

    def rows(self, name: str, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32; a vector is one row.

        Raises:
            UnsupportedModelError: The `gguf` package cannot dequantise the tensor's type.
        """
        tensor = self.tensors[name]
        cols = tensor.shape[-1]
        row_bytes = tensor.size // (math.prod(tensor.shape) // cols)
        start = tensor.offset + first * row_bytes
        raw = np.frombuffer(self._map, np.uint8, count * row_bytes, start).reshape(count, row_bytes)
        try:
            values = self._gguf.quants.dequantize(raw, self._gguf.GGMLQuantizationType(tensor.type))
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is of type {self.dtype(name)}, which the gguf "
                "package cannot dequantise; export from another quantisation of the model"
            ) from None
        let_go(self._map, start, raw.nbytes)
        return np.ascontiguousarray(values, np.float32).reshape(count, cols)

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        alignment = self.field("general.alignment", int)
        if alignment is None:
            alignment = DEFAULT_ALIGNMENT
        if not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment}, not a power of two in 8..65536")
        tensors: dict[str, GGUFTensor] = {}
        for _ in range(num_tensors):
            tensor = self._read_tensor(cursor)
            if tensor.name in tensors:
                raise cursor.error(f"tensor {tensor.name!r} occurs twice")
            tensors[tensor.name] = tensor
        base = round_up(cursor.offset, alignment)
        return _placed(cursor, tensors, base, alignment)

    def _read_tensor(self, cursor: _Cursor) -> GGUFTensor:
        name = cursor.string("tensor name", MAX_NAME_BYTES)
        num_dims = cursor.number("<u4")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.error(f"tensor {name!r} has {num_dims} dimensions, 1..4 expected")
        shape = tuple(cursor.number("<u8") for _ in range(num_dims))[::-1]
        kind, offset = cursor.number("<u4"), cursor.number("<u8")
        try:
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise cursor.error(f"tensor {name!r} is of unknown type {kind}") from None
        # Python integers do not wrap, so the product is exact however large the sizes are.
        num_items = math.prod(shape)
        if min(shape) < 1 or max(shape) >= 2**31 or shape[-1] % block:
            raise cursor.error(f"tensor {name!r} has impossible shape {shape}")
        size = num_items // block * block_bytes
        return GGUFTensor(name=name, type=kind, shape=shape, offset=offset, size=size)


class _Cursor:
    """A position in the mapped header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0

    def error(self, message: str) -> FormatError:
        return FormatError(f"{self.path}: {message}")

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.offset:
            raise self.error(f"truncated: {size} bytes wanted at offset {self.offset}")
        taken = self.data[self.offset : self.offset + size]
        self.offset += size
        return taken

    def number(self, dtype: str) -> int:
        return int.from_bytes(self.take(int(dtype[2:])), "little")

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        size = self.number("<u8")
        if size > limit:
            raise self.error(f"{what} is {size} bytes long, at most {limit} allowed")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def items(self, kind: int, count: int, what: str) -> list[Any]:
        if kind == _STRING:
            return self._strings(count, what)
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            if np.any(values > 1):
                raise self.error(f"{what} holds a bool that is neither 0 nor 1")
            values = values.astype(bool)
        return list(values.tolist())

    def _strings(self, count: int, what: str) -> list[str]:
        # Each string takes 8 bytes at least: refuses a count that the file cannot hold.
        if count * 8 > len(self.data) - self.offset:
            raise self.error(f"{what} claims {count} strings, more than the file holds")
        return [self.string(what) for _ in range(count)]


def _read_header(cursor: _Cursor) -> int:
    cursor.take(4)
    version = cursor.number("<u4")
    if version not in (2, 3):
        if struct.unpack(">I", struct.pack("<I", version))[0] in (1, 2, 3):
            raise cursor.error("big-endian GGUF is not supported; convert it to little-endian")
        raise cursor.error(f"GGUF version {version} is not supported, 2 and 3 are")
    num_tensors = cursor.number("<u8")
    if num_tensors > MAX_TENSORS:
        raise cursor.error(f"{num_tensors} tensors claimed, at most {MAX_TENSORS} allowed")
    return num_tensors


def _read_fields(cursor: _Cursor) -> dict[str, Any]:
    num_fields = cursor.number("<u8")
    if num_fields > MAX_FIELDS:
        raise cursor.error(f"{num_fields} fields claimed, at most {MAX_FIELDS} allowed")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string("field name", MAX_NAME_BYTES)
        if not key or key in fields:
            raise cursor.error(f"field {key!r} occurs twice" if key else "a field has no name")
        kind, count, what = cursor.number("<u4"), 1, f"field {key!r}"
        is_array = kind == _ARRAY
        if is_array:
            kind, count = cursor.number("<u4"), cursor.number("<u8")
            if count > MAX_ARRAY_ITEMS:
                raise cursor.error(f"{what} has {count} items, at most {MAX_ARRAY_ITEMS} allowed")
        if kind != _STRING and kind not in _SCALARS:
            raise cursor.error(f"{what} is of unknown type {kind}")
        items = cursor.items(kind, count, what)
        fields[key] = items if is_array else items[0]
    return fields


def _placed(
    cursor: _Cursor, tensors: dict[str, GGUFTensor], base: int, alignment: int
) -> dict[str, GGUFTensor]:
    """The tensors with offsets from the start of the file; checks that each has its own bytes."""
    placed: dict[str, GGUFTensor] = {}
    end, last = base, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        start = base + tensor.offset
        if tensor.offset % alignment:
            raise cursor.error(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
        if start < end:
            raise cursor.error(f"tensors {last!r} and {tensor.name!r} overlap")
        end, last = start + tensor.size, tensor.name
        if end > len(cursor.data):
            raise cursor.error(
                f"truncated: tensor {tensor.name!r} ends at byte {end}, the file has "
                f"{len(cursor.data)}; download it again"
            )
        placed[tensor.name] = GGUFTensor(
            name=tensor.name, type=tensor.type, shape=tensor.shape, offset=start, size=tensor.size
        )
    return placed


def _kind(value: object) -> str:
    if isinstance(value, list):
        return f"array of {type(value[0]).__name__}" if value else "an empty array"
    return type(value).__name__


def _gguf_package() -> ModuleType:
    try:
        importlib.import_module("gguf.quants")
    except ImportError:
        raise MissingExtraError(
            'reading GGUF files needs the gguf package: pip install "edgellm[export]"'
        ) from None
    return importlib.import_module("gguf")
