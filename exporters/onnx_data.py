"""Numbers of an ONNX model: in the file itself and in data files beside it, mapped, not loaded.

A model must not lead out of its folder: what it names is opened component by component, without
following links, and a file that has other names is refused, since one of them may lie elsewhere.

Source: https://github.com/onnx/onnx/blob/main/docs/ExternalData.md
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.onnx_file import MAX_FILE_BYTES, MAX_LIST, decode_varints, parse_model
from edgellm.exporters.onnx_types import (
    BFLOAT16,
    DOUBLE,
    FLOAT,
    FLOAT16,
    INT8,
    INT32,
    INT64,
    ITEM_BITS,
    UINT8,
    OnnxGraph,
    OnnxTensor,
    Span,
)
from edgellm.exporters.source import refuse_lfs_pointer

MAX_DATA_FILES: Final = 1024

_DTYPES: Final = {
    FLOAT: "<f4", FLOAT16: "<f2", BFLOAT16: "<u2", DOUBLE: "<f8", INT32: "<i4", INT64: "<i8",
    INT8: "i1", UINT8: "u1",
}  # fmt: skip
_NAMES: Final = {FLOAT: "F32", FLOAT16: "F16", BFLOAT16: "BF16", DOUBLE: "F64"}


class OnnxModelFile:
    """An open ONNX model: its graph, and the numbers of its tensors."""

    def __init__(self, path: Path) -> None:
        """Opens the model file and every data file it names, and checks all places and sizes.

        Args:
            path: The .onnx file, which is there.

        Raises:
            FormatError: It is broken, or its data is missing, damaged or out of its folder.
            UnsupportedModelError: It is no inference graph, or of an unknown opset.
        """
        self.path = path
        size = path.stat().st_size
        if not 0 < size <= MAX_FILE_BYTES:
            raise FormatError(f"{path} has {size} bytes: not an ONNX model")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        refuse_lfs_pointer(path, self._map[:64])
        self.graph: OnnxGraph = parse_model(self._map, str(path))
        self._data: dict[str, mmap.mmap] = {}
        self._places: dict[OnnxTensor, tuple[mmap.mmap, Span]] = {}
        self._open_data()

    @property
    def files(self) -> tuple[Path, ...]:
        """The model file and its data files."""
        return (self.path, *(self.path.parent / name for name in self._data))

    def dtype(self, tensor: OnnxTensor) -> str:
        """The tensor's number type, for reports, for example "F16"."""
        return _NAMES.get(tensor.type, f"ONNX type {tensor.type}")

    def array(self, tensor: OnnxTensor) -> npt.NDArray[Any]:
        """The tensor's numbers where they lie, read-only.

        Args:
            tensor: One of the graph.

        Returns:
            An array of the tensor's shape; BF16 as uint16.

        Raises:
            UnsupportedModelError: The numbers are of a type or in a form that is not read.
        """
        where = f"{self.path}: tensor {tensor.name[:80]!r}"
        if tensor.type not in _DTYPES:
            raise UnsupportedModelError(
                f"{where} is of ONNX type {tensor.type}: export from a float model"
            )
        dtype = np.dtype(_DTYPES[tensor.type])
        if tensor in self._places:
            buffer, span = self._places[tensor]
        elif tensor.span is not None:
            buffer, span = self._map, tensor.span
        elif tensor.varints is not None and tensor.type in (INT32, INT64):
            numbers = decode_varints(self._map, tensor.varints, MAX_LIST, str(self.path))
            if len(numbers) != int(np.prod(tensor.shape)):
                raise FormatError(f"{where} has {len(numbers)} numbers, not {tensor.shape}")
            return np.array(numbers, np.int64).reshape(tensor.shape)
        else:
            raise FormatError(
                f"{where} has no data, or holds it as varints: load it and save it with the onnx "
                "package"
            )
        flat = np.frombuffer(buffer, dtype, tensor.size // dtype.itemsize, span[0])
        return flat.reshape(tensor.shape)

    def _open_data(self) -> None:
        spans: dict[str, set[Span]] = {}
        attributes = (value for node in self.graph.nodes for value in node.attributes.values())
        constants = (value for value in attributes if isinstance(value, OnnxTensor))
        for tensor in (*self.graph.initializers.values(), *constants):
            if tensor.external is None:
                continue
            if tensor.type not in ITEM_BITS:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {tensor.name[:80]!r} is of ONNX type {tensor.type}"
                )
            name, span = self._place(tensor)
            spans.setdefault(name, set()).add(span)
            self._places[tensor] = (self._data[name], span)
        for name, used in spans.items():
            end = 0
            for span in sorted(used):
                if span[0] < end:
                    raise FormatError(f"{self.path}: tensors overlap in {name}, at byte {span[0]}")
                end = span[1]

    def _place(self, tensor: OnnxTensor) -> tuple[str, Span]:
        """Name and bytes of the data file a tensor lies in; opens it if it is not open yet."""
        where = f"{self.path}: tensor {tensor.name[:80]!r}"
        entries = tensor.external or {}
        name = entries.get("location", "")
        if name not in self._data:
            if len(self._data) >= MAX_DATA_FILES:
                raise FormatError(f"{self.path} names more than {MAX_DATA_FILES} data files")
            self._data[name] = _map_beside(self.path, name, where)
        size = len(self._data[name])
        offset = _number(entries.get("offset", "0"), where)
        length = _number(entries.get("length", str(max(0, size - offset))), where)
        if offset + length > size:
            raise FormatError(
                f"{where} lies at bytes {offset} to {offset + length} of {name}, which has {size}: "
                "truncated, download it again"
            )
        if length != tensor.size:
            raise FormatError(
                f"{where} has {length} bytes in {name}; its shape {tensor.shape} takes "
                f"{tensor.size}"
            )
        return name, (offset, offset + length)


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise FormatError(f"{where} lies at an impossible place {text[:40]!r}")
    return int(text)


def _map_beside(model: Path, location: str, where: str) -> mmap.mmap:
    """Maps a data file that the model names, if it is within the model's folder."""
    parts = location.split("/")
    if "\0" in location or "\\" in location or any(part in ("", ".", "..") for part in parts):
        raise FormatError(
            f"{where} lies in {location[:200]!r}, which is not a file in the model's folder"
        )
    path = model.parent / location
    with _opened(model.parent, parts, path) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is not a file")
        if status.st_nlink != 1:
            raise FormatError(
                f"{path} has other names (hard links), perhaps out of the model's folder: copy the "
                f"folder (cp -rL '{model.parent}' NEW) and export the copy"
            )
        if not status.st_size:
            raise FormatError(f"{path} is empty: download it again")
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    refuse_lfs_pointer(path, data[:64])
    return data


@contextlib.contextmanager
def _opened(folder: Path, parts: list[str], path: Path) -> Iterator[int]:
    """The file as a descriptor, opened without following a link in any component."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            mode = os.stat(part, dir_fd=at, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise FormatError(
                    f"{path} is or lies behind a symbolic link, which could lead anywhere: copy "
                    f"the folder (cp -rL '{folder}' NEW) and export the copy"
                )
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise FormatError(f"{path} is not a file")  # opening a device may do things
            inner = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = inner
        yield at
    except FileNotFoundError:
        raise FormatError(
            f"{path} is missing; {folder} is not whole without it: download it, it holds the "
            "model's weights"
        ) from None
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(at)
