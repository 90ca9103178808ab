"""Constants of an ONNX graph: initialisers, and what the graph makes of them before their use."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_types import UINT8, OnnxNode, OnnxTensor
from edgellm.exporters.onnx_weights import FLOATS, Blocked, Dense

_MAX_NUMBERS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A tensor of the file, transposed, reshaped or with a number added."""

    tensor: OnnxTensor
    shape: tuple[int, ...]
    is_transposed: bool = False
    plus: float = 0.0

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_axes(self) -> int:
        """Axes, leading ones of 1 left out: 0 for a number, 1 for a vector."""
        shape = self.shape
        while shape and shape[0] == 1:
            shape = shape[1:]
        return len(shape)


class Constants:
    """The constants of a graph by name, as weights where they are used as such."""

    def __init__(self, file: OnnxModelFile) -> None:
        self._file = file
        self._known = {
            name: Constant(tensor=tensor, shape=tensor.shape)
            for name, tensor in file.graph.initializers.items()
        }

    def input(self, node: OnnxNode, index: int) -> Constant | None:
        """An input of a node, None if it is absent or no constant."""
        return self._known.get(node.inputs[index]) if index < len(node.inputs) else None

    def among(self, node: OnnxNode) -> Constant | None:
        """The first constant among a node's inputs."""
        return next((self._known[name] for name in node.inputs if name in self._known), None)

    def note(self, node: OnnxNode) -> None:
        """A node without hidden inputs: remembers its result if it is a weight in another form."""
        if node.op == "Constant" and isinstance(node.attributes.get("value"), OnnxTensor):
            tensor = node.attributes["value"]
            self._known[node.outputs[0]] = Constant(tensor=tensor, shape=tensor.shape)
            return
        constants = [self._known.get(name) for name in node.inputs]
        if not constants or constants[0] is None or not node.outputs or node.domain:
            return
        first, result = constants[0], None
        if node.op == "Identity" or (node.op == "Cast" and node.attributes.get("to") in FLOATS):
            result = first
        elif node.op == "Transpose" and len(first.shape) == 2:
            if (node.integers("perm") or [1, 0]) == [1, 0]:
                result = dataclasses.replace(
                    first, shape=first.shape[::-1], is_transposed=not first.is_transposed
                )
        elif node.op == "Reshape" and not first.is_transposed and len(constants) == 2:
            shape = [int(size) for size in self.numbers(node, 1)]
            if all(size > 0 for size in shape) and math.prod(shape) == first.count:
                result = dataclasses.replace(first, shape=tuple(shape))
        elif node.op == "Add" and len(constants) == 2 and constants[1] is not None:
            ones = [one for one in (first, constants[1]) if one.count == 1]
            others = [one for one in (first, constants[1]) if one.count != 1]
            plus = self.scalar(ones[0]) if len(ones) == 1 else None
            if plus is not None and not others[0].plus and others[0].tensor.type in FLOATS:
                result = dataclasses.replace(others[0], plus=plus)
        if result is not None:
            self._known[node.outputs[0]] = result

    def numbers(self, node: OnnxNode, index: int) -> npt.NDArray[Any]:
        """A small constant input as a flat array; empty if it is none."""
        constant = self.input(node, index)
        if constant is None or constant.count > _MAX_NUMBERS:
            return np.empty(0)
        return self._file.array(constant.tensor).reshape(-1)

    def scalar(self, constant: Constant) -> float | None:
        """A constant of one number; None if it is not a float."""
        if constant.tensor.type not in FLOATS or constant.count != 1:
            return None
        return float(
            Dense(file=self._file, tensor=constant.tensor, shape=(1,), stored=(1,)).rows(0, 1)[0, 0]
        )

    def matrix(self, constant: Constant, *, is_transposed: bool) -> Dense:
        """A constant matrix as (rows, cols), of which it may be the transpose."""
        shape = constant.shape[::-1] if is_transposed else constant.shape
        return Dense(
            file=self._file,
            tensor=constant.tensor,
            shape=shape,
            stored=constant.shape[::-1] if constant.is_transposed else constant.shape,
            is_transposed=constant.is_transposed != is_transposed,
            plus=constant.plus,
        )

    def vector(self, constant: Constant | None) -> Dense | None:
        """A constant vector, leading dimensions of 1 left out; None if it is none."""
        if constant is None or constant.num_axes != 1:
            return None
        return Dense(
            file=self._file,
            tensor=constant.tensor,
            shape=(constant.count,),
            stored=(constant.count,),
            plus=constant.plus,
        )

    def blocked(
        self, node: OnnxNode, places: tuple[int, int, int], rows: int, cols: int
    ) -> Blocked:
        """Codes, scales and zero points of a node's inputs."""
        bits, block = node.integer("bits", 4), node.integer("block_size", 0)
        codes, scales, zeros = (self.input(node, index) for index in places)
        has_zeros = len(node.inputs) > places[2] and node.inputs[places[2]]
        if codes is None or scales is None or (has_zeros and zeros is None):
            raise broken(
                self._file, node, "has codes, scales or zero points that are not initialisers"
            )
        return self.blocks(node, (codes, scales, zeros), (rows, cols), bits=bits, block=block)

    def blocks(
        self,
        node: OnnxNode,
        parts: tuple[Constant, Constant, Constant | None],
        shape: tuple[int, int],
        *,
        bits: int,
        block: int,
        zero: float | None = None,
    ) -> Blocked:
        """Codes, scales and zero points as a weight of (rows, cols); errors are of `node`.

        `zero` is the zero point where there are none, the middle of the codes if it is None.
        """
        codes, scales, zeros = parts
        rows, cols = shape
        num_blocks = -(-cols // block) if block >= 16 else 0
        if bits not in (4, 8) or not num_blocks or block * bits % 8:
            raise UnsupportedModelError(
                f"{self._file.path}: {node} has blocks of {block} numbers of {bits} bits; edgellm "
                "reads 4 and 8 bits in blocks of 16 and more"
            )
        wanted = {"codes": (codes, rows * num_blocks * (block * bits // 8))}
        wanted["scales"] = (scales, rows * num_blocks)
        if zeros is not None:
            packed = rows * ((num_blocks * bits + 7) // 8)
            is_float = zeros.tensor.type in FLOATS
            wanted["zero points"] = (zeros, rows * num_blocks if is_float else packed)
        for what, (constant, count) in wanted.items():
            if constant.count != count or constant.is_transposed or constant.plus:
                raise broken(
                    self._file,
                    node,
                    f"has {what} of shape {constant.shape} for {rows} rows, {cols} columns",
                )
        if codes.tensor.type != UINT8 or scales.tensor.type not in FLOATS:
            raise broken(
                self._file, node, "has codes that are not uint8 or scales that are not floats"
            )
        if zeros is not None and zeros.tensor.type not in (UINT8, *FLOATS):
            raise broken(self._file, node, "has zero points that are neither uint8 nor floats")
        return Blocked(
            file=self._file,
            codes=codes.tensor,
            scales=scales.tensor,
            zeros=None if zeros is None else zeros.tensor,
            zero=1 << (bits - 1) if zero is None else zero,
            shape=shape,
            bits=bits,
            block=block,
        )


def broken(file: OnnxModelFile, node: OnnxNode, what: str) -> FormatError:
    """The error that a node is wrong; `what` is a verb and what follows."""
    return FormatError(f"{file.path}: {node} {what}")
