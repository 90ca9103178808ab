"""Matrices of GPTQ and AWQ checkpoints, packed to 4 bits, as rows of float32.

A matrix `x.weight` (out, in) is `x.qweight`, `x.qzeros` and `x.scales` there, one row for each
input or group of inputs: w[o, i] = (code[i, o] - zero[g, o]) * scale[g, o], g the group of i, with
eight codes or zero points in an int32.

- GPTQ packs the codes of eight inputs, the first in the low bits, and the zero points of eight
  outputs. Its first format stores zero - 1, modulo 16. `x.g_idx` names the group of each input,
  which are not in order if they were quantised by activation.
- AWQ ("gemm") packs eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7.

Source: AutoGPTQ's and AutoAWQ's packing as their loaders undo it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.source import TensorStore
from edgellm.types import Float32Array

__all__ = ["PackedTensors", "Packing", "read_packing"]

_PER_WORD: Final = 8
_IN_ORDER: Final = np.arange(0, 32, 4, dtype=np.uint32)
# of the outputs 0..7 of a word of AWQ
_INTERLEAVED: Final = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)


class RawStore(TensorStore, Protocol):
    """A store that also has integers."""

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor's numbers where they lie, read-only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What config.json says of how matrices are packed.

    Attributes:
        method: "gptq" or "awq".
        group: Inputs with the same scale; -1: all.
        is_zero_less_one: Zero points are stored less one.
    """

    method: str
    group: int
    is_zero_less_one: bool


def read_packing(config: Mapping[str, Any], where: str) -> Packing | None:
    """Reads config.json's quantization_config.

    Args:
        config: config.json.
        where: Its name, for messages.

    Returns:
        None if there is none.

    Raises:
        UnsupportedModelError: It is of another kind than GPTQ and AWQ of 4 bits.
    """
    entry = config.get("quantization_config")
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: quantization_config is not a JSON object")

    def require(key: str, value: object, *allowed: object) -> None:
        if not any(value == item and type(value) is type(item) for item in allowed):
            listed = " or ".join(map(repr, allowed))
            raise UnsupportedModelError(
                f"{where}: quantization_config: {key} is {value!r:.80}; edgellm reads GPTQ and AWQ "
                f"of 4 bits, {key} {listed}: export from the unquantised model"
            )

    method, group = entry.get("quant_method"), entry.get("group_size", 128)
    require("quant_method", method, "gptq", "awq")
    require("bits", entry.get("bits"), 4)
    if type(group) is not int or (group < 1 and group != -1):
        raise FormatError(f"{where}: quantization_config: group_size is {group!r:.80}")
    checkpoint = entry.get("checkpoint_format", "gptq")
    if method == "gptq":
        require("checkpoint_format", checkpoint, "gptq", "gptq_v2")
    else:
        require("version", str(entry.get("version", "gemm")).lower(), "gemm")
        require("zero_point", entry.get("zero_point", True), True)
    return Packing(
        method=str(method),
        group=group,
        is_zero_less_one=method == "gptq" and checkpoint == "gptq",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """A packed matrix; `groups` (in,) has the group of each input."""

    stem: str
    shape: tuple[int, int]
    groups: npt.NDArray[np.integer[Any]]


class PackedTensors:
    """The tensors of a checkpoint with packed matrices, as one store of floats."""

    def __init__(self, store: RawStore, packing: Packing, wanted: Collection[str]) -> None:
        """Finds the packed matrices.

        Args:
            store: The tensors as they are stored.
            packing: How matrices are packed.
            wanted: Names of the tensors the model has.

        Raises:
            FormatError: The tensors of a matrix do not belong together.
        """
        self._store = store
        self._packing = packing
        self._matrices: dict[str, _Matrix] = {}
        hidden = set[str]()
        for name in store.shapes:
            stem, _, kind = name.rpartition(".")
            if kind == "qweight":
                self._matrices[f"{stem}.weight"] = self._matrix(stem)
                hidden |= {f"{stem}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
                # AutoGPTQ writes a bias of zeros for matrices without one.
                bias = f"{stem}.bias"
                if bias in store.shapes and bias not in wanted and not store.array(bias).any():
                    hidden.add(bias)
        if doubled := self._matrices.keys() & store.shapes.keys():
            raise FormatError(f"tensor {min(doubled)!r} is there both packed and as floats")
        self._shapes = {name: item.shape for name, item in self._matrices.items()} | {
            name: shape for name, shape in store.shapes.items() if name not in hidden
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, slowest dimension first."""
        return self._shapes

    def dtype(self, name: str) -> str:
        """The tensor's number type, for example "GPTQ g128"."""
        if name not in self._matrices:
            return self._store.dtype(name)
        group = self._packing.group
        return f"{self._packing.method.upper()} {f'g{group}' if group > 0 else 'per row'}"

    def rows(self, name: str, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32; a vector is one row."""
        if name not in self._matrices:
            return self._store.rows(name, first, count)
        matrix = self._matrices[name]
        stem, groups = matrix.stem, matrix.groups
        words = self._store.array(f"{stem}.qweight").view(np.uint32)
        if self._packing.method == "gptq":
            order = _IN_ORDER
            codes = _unpack(words[:, first : first + count].T, order)
        else:
            order = _INTERLEAVED
            codes = _unpack_outputs(words, order, first, count)
        packed = self._store.array(f"{stem}.qzeros").view(np.uint32)
        zeros = _unpack_outputs(packed, order, first, count)
        if self._packing.is_zero_less_one:
            zeros = zeros + np.uint8(1) & np.uint8(15)
        scales = self._store.rows(f"{stem}.scales", 0, int(groups.max()) + 1)
        values = codes.astype(np.float32)
        values -= zeros[:, groups]
        values *= scales[:, first : first + count].T[:, groups]
        return values

    def _matrix(self, stem: str) -> _Matrix:
        inputs, outputs = self._pair(f"{stem}.qweight", "I32")
        if self._packing.method == "gptq":
            inputs *= _PER_WORD
        else:
            outputs *= _PER_WORD
        if inputs < 1:
            raise FormatError(f"{stem}.qweight is empty")
        size = inputs if self._packing.group == -1 else self._packing.group
        num_groups = -(-inputs // size)
        scales = self._pair(f"{stem}.scales", "F16", "BF16", "F32")
        zeros = self._pair(f"{stem}.qzeros", "I32")
        if scales != (num_groups, outputs) or zeros[0] != num_groups:
            raise FormatError(
                f"{stem}: {scales} scales for {inputs} inputs and {outputs} outputs in groups of "
                f"{size}"
            )
        if zeros[1] * _PER_WORD != outputs:
            raise FormatError(f"{stem}: {zeros[1] * _PER_WORD} zero points for {outputs} outputs")
        groups: npt.NDArray[np.integer[Any]] = np.arange(inputs) // size
        if self._packing.method == "gptq" and f"{stem}.g_idx" in self._store.shapes:
            groups = self._store.array(f"{stem}.g_idx")
            if groups.dtype.kind != "i" or groups.shape != (inputs,):
                raise FormatError(f"{stem}.g_idx is {groups.dtype} {groups.shape}")
            if groups.min() < 0 or groups.max() >= num_groups:
                raise FormatError(f"{stem}.g_idx names groups outside 0..{num_groups - 1}")
        return _Matrix(stem=stem, shape=(outputs, inputs), groups=groups)

    def _pair(self, name: str, *dtypes: str) -> tuple[int, int]:
        """The shape of a tensor of one of these types and two dimensions."""
        shape = self._store.shapes.get(name, ())
        if len(shape) != 2 or self._store.dtype(name) not in dtypes:
            raise FormatError(
                f"tensor {name!r} is missing"
                if name not in self._store.shapes
                else f"tensor {name!r} is {self._store.dtype(name)} {shape}, not a matrix of "
                f"{' or '.join(dtypes)}"
            )
        return shape[0], shape[1]


def _unpack(words: npt.NDArray[np.uint32], shifts: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """(n, m) words to (n, 8 m) codes."""
    codes = (words[:, :, None] >> shifts & 15).astype(np.uint8)
    return codes.reshape(len(words), -1)


def _unpack_outputs(
    words: npt.NDArray[np.uint32], shifts: npt.NDArray[np.uint32], first: int, count: int
) -> npt.NDArray[np.uint8]:
    """Outputs [first, first + count) of (n, outputs / 8) words, (count, n)."""
    begin, end = first // _PER_WORD, -(-(first + count) // _PER_WORD)
    start = first - begin * _PER_WORD
    return _unpack(words[:, begin:end], shifts)[:, start : start + count].T
