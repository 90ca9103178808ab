"""An ONNX graph as edgellm reads it: nodes, and where the numbers of tensors lie.

Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto3
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from edgellm.errors import FormatError

Span: TypeAlias = tuple[int, int]

FLOAT, UINT8, INT8, INT32, INT64, BOOL, FLOAT16, DOUBLE, BFLOAT16 = 1, 2, 3, 6, 7, 9, 10, 11, 16
UINT4, INT4 = 21, 22
ITEM_BITS: Final[Mapping[int, int]] = {
    FLOAT: 32, UINT8: 8, INT8: 8, 4: 16, 5: 16, INT32: 32, INT64: 64, BOOL: 8, FLOAT16: 16,
    DOUBLE: 64, 12: 32, 13: 64, 14: 64, 15: 128, BFLOAT16: 16, UINT4: 4, INT4: 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnnxTensor:
    """A tensor of the file; where its numbers lie, not the numbers.

    Attributes:
        name: Its name, empty for a node's attribute.
        type: TensorProto.DataType.
        shape: Slowest dimension first.
        span: First byte and end within the model file, little-endian numbers.
        varints: The same, of numbers written as varints.
        external: Entries of external_data, if it lies in another file.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    span: Span | None
    varints: Span | None
    external: Mapping[str, str] | None

    @property
    def size(self) -> int:
        """Bytes of its numbers."""
        return (math.prod(self.shape) * ITEM_BITS[self.type] + 7) // 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnnxNode:
    """An operation; an absent optional input is an empty name.

    An attribute is an int, float, bytes, list of ints, `OnnxTensor`, or None for kinds that no
    operation on a weight's way has (subgraphs, lists of strings).
    """

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def integer(self, key: str, default: int) -> int:
        """An attribute that is a whole number."""
        value = self.attributes.get(key, default)
        if not isinstance(value, int):
            raise FormatError(f"{self}: attribute {key!r} is not a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """An attribute that is a float."""
        value = self.attributes.get(key, default)
        if not isinstance(value, float):
            raise FormatError(f"{self}: attribute {key!r} is not a float")
        return value

    def integers(self, key: str) -> list[int]:
        """An attribute that is a list of whole numbers; empty if it is absent."""
        value = self.attributes.get(key) or []
        if not isinstance(value, list):
            raise FormatError(f"{self}: attribute {key!r} is not a list of whole numbers")
        return list(value)

    def __str__(self) -> str:
        return f"{self.op} {(self.name or ''.join(self.outputs[:1]))[:80]!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraph:
    """The inference graph of a model file, nodes in order of computation."""

    nodes: tuple[OnnxNode, ...]
    initializers: Mapping[str, OnnxTensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
