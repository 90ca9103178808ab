"""The weights of an `.edge` file as ONNX initialisers, streamed into an external data file.

A matrix is written in one of two ways: "float" is what it stands for, under its Hugging Face name
and in Hugging Face's orientation; "int4" keeps the integers as blocks that MatMulNBits reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize, integers, unpack_grouped
from edgellm.format.spec import GROUP_COLS, PANEL_ROWS, SUPERBLOCK_COLS
from edgellm.models import ModelDescription, ModelSpec, canonical_shapes, fused_parts, unfuse
from edgellm.types import Float32Array, TensorFormat

__all__ = ["DATA_NAME", "Blocks", "Matrix", "OnnxWeights", "Weights", "make_blocks"]

Weights: TypeAlias = Literal["int4", "float"]

DATA_NAME: Final = "model.onnx.data"
# Readers map tensors: Windows at multiples of 64 KiB, which pays for large ones, others at pages.
_PAGE: Final = 1 << 12
_LARGE_ALIGNMENT: Final = 1 << 16
_LARGE_BYTES: Final = 1 << 20
_PIECE_WEIGHTS: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Integers in blocks along a row: w = (code - zero point) * scale, each in float32."""

    bits: int
    block: int
    """Columns of a block; the last one of a row is padded."""
    codes: npt.NDArray[np.uint8]
    """(rows, blocks, block * bits / 8), the first of two codes in the low bits."""
    scales: Float32Array
    """(rows, blocks)."""
    zero_points: Float32Array | None
    """(rows, blocks), None where it is half of the codes' range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix among the initialisers; `block` is 0 where it is float32 and has no scales."""

    rows: int
    cols: int
    codes: str
    bits: int = 32
    block: int = 0
    scales: str = ""
    zero_points: str = ""


def _e4_blocks(data: npt.NDArray[np.uint8], rows: int, cols: int) -> Blocks:
    """E4 with D * s as scale and z / s as zero point.

    Both are rounded, so a weight may differ from float32(D * (s * q - z)) by 1e-7 of the largest.
    """
    parts = unpack_grouped(data, TensorFormat.E4, rows, cols)
    if not parts.s.all():
        raise ValueError("a group has a scale of 0")
    groups = parts.s.shape[1]
    pairs = parts.codes.reshape(rows, groups, GROUP_COLS // 2, 2)
    s = parts.s.astype(np.float32)
    d = np.repeat(parts.d, SUPERBLOCK_COLS // GROUP_COLS, axis=1)[:, :groups]
    return Blocks(
        bits=4,
        block=GROUP_COLS,
        codes=np.bitwise_or(pairs[..., 0], pairs[..., 1] << 4, dtype=np.uint8),
        scales=d * s,
        zero_points=np.divide(parts.z, s, dtype=np.float32),
    )


def _int8_blocks(
    data: npt.NDArray[np.uint8], tensor_format: TensorFormat, rows: int, cols: int
) -> Blocks:
    """Every format whose weights are D times an int8, exactly."""
    values, d = integers(data, tensor_format, rows, cols)
    codes = np.full((rows, d.shape[1] * SUPERBLOCK_COLS), 128, np.uint8)
    codes[:, :cols] = values.view(np.uint8) ^ 128
    return Blocks(
        bits=8,
        block=SUPERBLOCK_COLS,
        codes=codes.reshape(rows, -1, SUPERBLOCK_COLS),
        scales=d,
        zero_points=None,
    )


def make_blocks(
    data: npt.NDArray[np.uint8], tensor_format: TensorFormat, rows: int, cols: int
) -> Blocks:
    """A stored matrix as blocks; 4 bits for E4, 8 for every other format.

    Args:
        data: its stored bytes.
        tensor_format: how they are stored.
        rows: rows of the matrix.
        cols: columns of the matrix.
    """
    if tensor_format == TensorFormat.E4:
        return _e4_blocks(data, rows, cols)
    return _int8_blocks(data, tensor_format, rows, cols)


class OnnxWeights:
    """Makes initialisers of canonical tensors, each once.

    Attributes:
        initializers: TensorProtos, large ones with their data in the external file.
    """

    def __init__(
        self,
        file: EdgeFile,
        description: ModelDescription,
        spec: ModelSpec,
        out: BinaryIO,
        weights: Weights,
    ) -> None:
        """Prepares to write.

        Args:
            file: where the tensors are.
            description: its model.
            spec: its architecture, which knows Hugging Face's names.
            out: the external data file, empty.
            weights: form of the matrices.
        """
        self.initializers: list[Any] = []
        self._file = file
        self._out = out
        self._weights = weights
        self._shapes = canonical_shapes(description)
        self._source = {
            source.canonical_name: source.source_name for source in spec.sources("hf", description)
        }
        self._vector = unfuse(description, self._read_vector)
        self._panels = _panel_steps(description)
        self._matrices: dict[str, Matrix] = {}
        self._names: set[str] = set()

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """An initialiser inside the model file; the same name is made once.

        Returns:
            Its name.
        """
        import onnx

        if name not in self._names:
            self._names.add(name)
            self.initializers.append(onnx.numpy_helper.from_array(values, name))
        return name

    def vector(self, canonical: str) -> str:
        """A canonical vector under its Hugging Face name, as it is multiplied or added.

        Gemma's norms therefore hold 1 + w where Hugging Face's checkpoints hold w.
        """
        return self.constant(self._source[canonical], self._vector(canonical))

    def matrix(self, canonical: str) -> Matrix:
        """A canonical matrix in the chosen form, (rows, cols) as in Hugging Face's checkpoints."""
        if canonical not in self._matrices:
            write = self._write_float if self._weights == "float" else self._write_blocks
            self._matrices[canonical] = write(canonical)
        return self._matrices[canonical]

    def _write_float(self, canonical: str) -> Matrix:
        rows, cols = self._shapes[canonical]
        name = self._source[canonical]
        start = self._begin(rows * cols * 4)
        for piece in self._pieces(canonical, dequantize):
            self._out.write(piece.data)
        self._end(name, np.float32, (rows, cols), start)
        return Matrix(rows=rows, cols=cols, codes=name)

    def _write_blocks(self, canonical: str) -> Matrix:
        """Codes stream; scales and zero points, a fraction of them, are written behind."""
        rows, cols = self._shapes[canonical]
        stem = self._source[canonical].removesuffix(".weight") + ".MatMul.weight_"
        scales, zero_points = [], []
        start = self._begin(rows * cols // 2)
        try:
            for part in self._pieces(canonical, make_blocks):
                self._out.write(np.ascontiguousarray(part.codes).data)
                scales.append(part.scales)
                if part.zero_points is not None:
                    zero_points.append(part.zero_points)
        except ValueError as error:
            raise FormatError(f"{self._file.path}: tensor {canonical}: {error}") from None
        codes = self._end(f"{stem}Q{part.bits}", np.uint8, (rows, *part.codes.shape[1:]), start)
        return Matrix(
            rows=rows,
            cols=cols,
            codes=codes,
            bits=part.bits,
            block=part.block,
            scales=self._write_whole(f"{stem}scales", scales),
            zero_points=self._write_whole(f"{stem}zero_points", zero_points),
        )

    def _write_whole(self, name: str, pieces: list[Float32Array]) -> str:
        if not pieces:
            return ""
        values = np.concatenate(pieces)
        start = self._begin(values.nbytes)
        self._out.write(values.data)
        return self._end(name, np.float32, values.shape, start)

    def _begin(self, num_bytes: int) -> int:
        """Offset of a tensor of at least `num_bytes`, after the padding it asks for."""
        alignment = _LARGE_ALIGNMENT if num_bytes >= _LARGE_BYTES else _PAGE
        self._out.write(bytes(-self._out.tell() % alignment))
        return self._out.tell()

    def _end(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...], start: int) -> str:
        import onnx

        tensor = onnx.TensorProto(
            name=name,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
            dims=shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        place = {"location": DATA_NAME, "offset": start, "length": self._out.tell() - start}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name

    def _pieces(self, canonical: str, convert: Callable[..., Any]) -> Iterator[Any]:
        """`convert(data, format, rows, cols)` of a few million weights after the other.

        A canonical matrix is every n-th panel of its file tensor from some panel on, and any run of
        panels is a stored matrix of its own.
        """
        name, first, step = self._panels[canonical]
        entry = self._file.tensors[name]
        rows, cols = self._shapes[canonical]
        panels = self._file.tensor_data(name).reshape(-(-entry.rows // PANEL_ROWS), -1)[first::step]
        at_once = max(1, _PIECE_WEIGHTS // (PANEL_ROWS * cols))
        for start in range(0, -(-rows // PANEL_ROWS), at_once):
            count = min(at_once * PANEL_ROWS, rows - start * PANEL_ROWS)
            data = panels[start : start + -(-count // PANEL_ROWS)]
            yield convert(np.ascontiguousarray(data), entry.format, count, cols)

    def _read_vector(self, name: str) -> Float32Array:
        entry = self._file.tensors[name]
        return dequantize(self._file.tensor_data(name), entry.format, entry.rows, entry.cols)


def _panel_steps(description: ModelDescription) -> dict[str, tuple[str, int, int]]:
    """Canonical matrix to its file tensor, its first panel there and the step to the next."""
    shapes = canonical_shapes(description)
    result = {}
    for name, parts in fused_parts(description).items():
        first = 0
        for number, part in enumerate(parts):
            if name.endswith(".gate_up"):
                result[part] = (name, number, len(parts))
            else:
                result[part] = (name, first // PANEL_ROWS, 1)
            first += shapes[part][0]
    return result
