"""Weights of an ONNX graph as rows of float32, whichever way the graph holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.errors import UnsupportedModelError
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_types import BFLOAT16, FLOAT, FLOAT16, OnnxTensor
from edgellm.types import Float32Array

FLOATS = (FLOAT, FLOAT16, BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Rows [first, first + shape[0]) of a tensor of floats.

    Attributes:
        file: Where the numbers are.
        tensor: Its numbers.
        shape: (rows, cols) or (n,) of this part.
        stored: The shape in which the tensor is to be seen; (cols, rows) if transposed.
        is_transposed: The tensor holds a row of this matrix as a column.
        first: The first row, or number, of the tensor that is part of this.
        plus: Added to each number.
    """

    file: OnnxModelFile
    tensor: OnnxTensor
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    is_transposed: bool = False
    first: int = 0
    plus: float = 0.0

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.tensor.name

    @property
    def dtype(self) -> str:
        """The number type, for reports."""
        return self.file.dtype(self.tensor)

    def part(self, first: int, count: int) -> Dense:
        """Rows [first, first + count) of this."""
        return replace(self, first=self.first + first, shape=(count, *self.shape[1:]))

    def rows(self, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32; a vector is one row."""
        array = self.file.array(self.tensor).reshape(self.stored)
        if len(self.shape) == 1:
            array = array.reshape(1, -1)[:, self.first : self.first + self.shape[0]]
        elif self.is_transposed:
            array = array[:, self.first + first : self.first + first + count].T
        else:
            array = array[self.first + first : self.first + first + count]
        values = _float32(array, self.tensor)
        return values + np.float32(self.plus) if self.plus else values

    def is_same(self, other: Weight) -> bool:
        """Whether both are the same numbers of the file."""
        return (
            isinstance(other, Dense)
            and other.tensor is self.tensor
            and (other.shape, other.stored, other.is_transposed, other.first, other.plus)
            == (self.shape, self.stored, self.is_transposed, self.first, self.plus)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Rows of a matrix on its grid: w = (code - zero) * scale for each block of columns.

    `codes` is (rows, blocks * block) uint8, with columns past the last one that mean nothing;
    `zeros` and `scales` are (rows, blocks) float32.
    """

    codes: npt.NDArray[np.uint8]
    zeros: Float32Array
    scales: Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Rows [first, first + shape[0]) of a matrix in blocks of 4 or 8 bits.

    Attributes:
        file: Where the numbers are.
        codes: (rows, blocks, block * bits / 8) uint8 or a reshape of it, the first of two codes in
            the low bits.
        scales: Floats, rows x blocks of them.
        zeros: None; or floats, rows x blocks of them; or codes, packed, each row to whole bytes.
        zero: What zero points are without `zeros`.
        shape: (rows, cols) of this part.
        bits: Bits of a code.
        block: Columns of a block.
        first: The first row of the tensors that is part of this.

    Source: docs/ContribOperators.md of ONNX Runtime, MatMulNBits and GatherBlockQuantized.
    """

    file: OnnxModelFile
    codes: OnnxTensor
    scales: OnnxTensor
    zeros: OnnxTensor | None
    zero: float
    shape: tuple[int, ...]
    bits: int
    block: int
    first: int = 0

    @property
    def name(self) -> str:
        """The name of the tensor of codes."""
        return self.codes.name

    @property
    def dtype(self) -> str:
        """The number type, for reports."""
        return f"{self.bits} bits in blocks of {self.block}, {self.file.dtype(self.scales)} scales"

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.shape[1] // self.block)

    def part(self, first: int, count: int) -> Blocked:
        """Rows [first, first + count) of this."""
        return replace(self, first=self.first + first, shape=(count, self.shape[1]))

    def grid(self, first: int, count: int) -> Grid:
        """Rows [first, first + count) on their grid."""
        span = slice(self.first + first, self.first + first + count)
        row_bytes = self.num_blocks * self.block * self.bits // 8
        codes = _unpack(self.file.array(self.codes).reshape(-1, row_bytes)[span], self.bits)
        scales = _float32(
            self.file.array(self.scales).reshape(-1, self.num_blocks)[span], self.scales
        )
        if self.zeros is None:
            zeros = np.full_like(scales, self.zero)
        elif self.zeros.type in FLOATS:
            zeros = _float32(
                self.file.array(self.zeros).reshape(-1, self.num_blocks)[span], self.zeros
            )
        else:
            packed = self.file.array(self.zeros)
            packed = packed.reshape(-1, (self.num_blocks * self.bits + 7) // 8)[span]
            zeros = _unpack(packed, self.bits)[:, : self.num_blocks].astype(np.float32)
        return Grid(codes=codes, zeros=zeros, scales=scales)

    def rows(self, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32."""
        grid = self.grid(first, count)
        values = grid.codes.astype(np.float32).reshape(count, self.num_blocks, self.block)
        values -= grid.zeros[:, :, None]
        values *= grid.scales[:, :, None]
        return np.ascontiguousarray(values.reshape(count, -1)[:, : self.shape[1]])

    def is_same(self, other: Weight) -> bool:
        """Whether both are the same numbers of the file."""
        return isinstance(other, Blocked) and all(
            getattr(self, key) == getattr(other, key)
            for key in ("codes", "scales", "zeros", "zero", "shape", "bits", "block", "first")
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaled:
    """A matrix whose columns have a factor each.

    Attributes:
        weight: The matrix.
        factors: (cols,) float32.
    """

    weight: Dense | Blocked
    factors: Float32Array

    @property
    def name(self) -> str:
        """The matrix's name."""
        return self.weight.name

    @property
    def dtype(self) -> str:
        """The number type, for reports."""
        return self.weight.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, cols)."""
        return self.weight.shape

    def part(self, first: int, count: int) -> Scaled:
        """Rows [first, first + count) of this."""
        return replace(self, weight=self.weight.part(first, count))

    def rows(self, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32."""
        return self.weight.rows(first, count) * self.factors

    def is_same(self, other: Weight) -> bool:
        """Whether both are the same numbers of the file."""
        return (
            isinstance(other, Scaled)
            and self.weight.is_same(other.weight)
            and np.array_equal(self.factors, other.factors)
        )


Weight: TypeAlias = Dense | Blocked | Scaled


class OnnxTensors:
    """The weights of a model by their Hugging Face names and in Hugging Face's orientation."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, slowest dimension first."""
        return {name: weight.shape for name, weight in self._weights.items()}

    def dtype(self, name: str) -> str:
        """The tensor's number type."""
        return self._weights[name].dtype

    def rows(self, name: str, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32; a vector is one row."""
        return self._weights[name].rows(first, count)


def _float32(array: npt.NDArray[np.generic], tensor: OnnxTensor) -> Float32Array:
    if tensor.type == BFLOAT16:
        return (np.ascontiguousarray(array, np.uint32) << 16).view(np.float32)
    if tensor.type not in FLOATS:
        raise UnsupportedModelError(
            f"tensor {tensor.name[:80]!r} is of ONNX type {tensor.type}; edgellm reads floats of "
            "16 and 32 bits, and blocks of MatMulNBits: export from a float model"
        )
    return np.ascontiguousarray(array, np.float32)


def _unpack(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    if bits == 8:
        return packed
    codes = np.empty((packed.shape[0], packed.shape[1], 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(packed.shape[0], -1)
