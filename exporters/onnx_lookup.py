"""An embedding that is looked up as integers and multiplied out by standard operators.

ONNX Runtime's GatherBlockQuantized takes no zero points that are floats, so a graph with such a
table gathers the rows of codes, scales and zero points by itself; what edgellm writes does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from edgellm.exporters.onnx_constants import Constant, Constants
from edgellm.exporters.onnx_types import UINT8, OnnxNode
from edgellm.exporters.onnx_weights import FLOATS, Blocked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of a table, and what was done to them.

    Attributes:
        table: The table.
        ids: Which rows.
        codes: What its bytes are by now: as they lie, one half of each, or both in turn.
        is_column: A last axis of 1 was added.
        zeros: What was subtracted: the rows of a table, or a number.
    """

    table: Constant
    ids: str
    codes: Literal["bytes", "low", "high", "pairs"] = "bytes"
    is_column: bool = False
    zeros: Constant | float | None = None


class Lookups:
    """Rows of tables by the names of their values.

    Args:
        constants: Those of the graph.
        vocab_size: Rows of a table.
        hidden_size: Columns of the embedding.
    """

    def __init__(self, constants: Constants, vocab_size: int, hidden_size: int) -> None:
        self._constants = constants
        self._shape = vocab_size, hidden_size
        self._known: dict[str, _Rows] = {}

    def note(self, node: OnnxNode) -> Blocked | None:
        """Remembers a node's result if it is rows of a table; the table, if it is the embedding."""
        if node.domain:
            return None
        rows = [self._known.get(name) for name in node.inputs]
        found = None
        if node.op == "Gather":
            found = self._gather(node)
        elif node.op == "Mul" and len(rows) == 2 and rows[0] is not None and rows[1] is not None:
            return self._embedding(node, rows[0], rows[1])
        elif rows and rows[0] is not None:
            found = self._changed(node, rows[0], rows[1:])
        if found is not None:
            self._known[node.outputs[0]] = found
        return None

    def _gather(self, node: OnnxNode) -> _Rows | None:
        table = self._constants.input(node, 0)
        if table is None or table.shape[:1] != self._shape[:1] or node.integer("axis", 0) != 0:
            return None
        return _Rows(table=table, ids=node.inputs[1]) if len(node.inputs) == 2 else None

    def _changed(self, node: OnnxNode, rows: _Rows, others: list[_Rows | None]) -> _Rows | None:
        other = others[0] if others else None
        if node.op == "Cast" and node.attributes.get("to") in FLOATS:
            return rows
        if node.op == "Reshape":
            return dataclasses.replace(rows, is_column=False)
        if node.op == "Unsqueeze" and self._constants.numbers(node, 1).tolist() == [-1]:
            return dataclasses.replace(rows, is_column=True)
        if node.op in ("BitwiseAnd", "BitShift"):
            return self._half(node, rows)
        if node.op == "Concat" and other is not None and len(others) == 1:
            halves = dataclasses.replace(rows, codes="high") == other and rows.codes == "low"
            if halves and rows.is_column and node.integer("axis", 0) == -1:
                return dataclasses.replace(rows, codes="pairs", is_column=False)
        if node.op == "Sub" and rows.zeros is None:
            if other is not None:
                is_same = other.ids == rows.ids and other.zeros is None
                return dataclasses.replace(rows, zeros=other.table) if is_same else None
            constant = self._constants.input(node, 1)
            number = None if constant is None else self._constants.scalar(constant)
            return None if number is None else dataclasses.replace(rows, zeros=number)
        return None

    def _half(self, node: OnnxNode, rows: _Rows) -> _Rows | None:
        numbers = self._constants.numbers(node, 1).tolist()
        if rows.codes != "bytes" or rows.table.tensor.type != UINT8:
            return None
        if node.op == "BitwiseAnd":
            return dataclasses.replace(rows, codes="low") if numbers == [15] else None
        is_right = node.attributes.get("direction") == b"RIGHT" and numbers == [4]
        return dataclasses.replace(rows, codes="high") if is_right else None

    def _embedding(self, node: OnnxNode, codes: _Rows, scales: _Rows) -> Blocked | None:
        bits = {"bytes": 8, "pairs": 4}.get(codes.codes)
        is_ours = codes.ids == scales.ids and scales.zeros is None and len(codes.table.shape) == 3
        if bits is None or not is_ours or codes.table.tensor.type != UINT8:
            return None
        zeros = codes.zeros
        return self._constants.blocks(
            node,
            (codes.table, scales.table, zeros if isinstance(zeros, Constant) else None),
            self._shape,
            bits=bits,
            block=codes.table.shape[2] * 8 // bits,
            zero=0.0 if zeros is None or isinstance(zeros, Constant) else zeros,
        )
