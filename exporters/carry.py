"""Carries weights over that lie on a 4-bit grid already, instead of rounding them a second time.

The grid is found from the numbers alone, so that one way serves every source: GPTQ, AWQ, GGUF,
MatMulNBits, or float weights that were rounded and never packed.

Carried over exactly means: every weight of the file, float32(D * integer), is within 2^-22 of the
superblock's largest weight from the source's float32, which is what a scale and a zero point that
were rounded to float32 leave open. Where the source's products are exact (scales of float16), the
numbers are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgellm._native import quantize
from edgellm.format.layout import Grouped, dequantize, pack_grouped
from edgellm.format.spec import GROUP_COLS, PANEL_ROWS, SUPERBLOCK_COLS, tensor_bytes
from edgellm.types import Float32Array, TensorFormat

__all__ = ["Rounding", "measure_rounding", "quantize_or_carry", "summarise"]

_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_EXACT: Final = np.float32(2**-22)
_MAX_CODE: Final = 15
_LOWEST, _HIGHEST = -128, 127
# Integers of a block are at most 128 and its largest one is found first. Another integer would be
# at least 1/128 away; rounding to float32 moves it by 3e-5.
_NEAR: Final = np.float32(1e-3)
_RANGE: Final = (
    np.float32(1e-30),
    np.float32(1e30),
)  # normal numbers; the quantiser refuses larger
_WEIGHTS_AT_ONCE: Final = 1 << 18  # temporaries stay in cache
# of a group's integers' common divisor, the largest divisor that s can be; 0: they are all alike
_SCALE: Final = np.array(
    [1, *(max(s for s in range(1, 16) if divisor % s == 0) for divisor in range(1, 256))]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What was lost of a quantised source's weights when they were rounded again.

    Attributes:
        source: The source's number type.
        kind: Which of a layer's matrices they belong to: "qkv", "o" ... "head".
        errors: Sum of the squared errors.
        squares: Sum of the squared weights.
        is_exact: All were carried over exactly; `errors` is float32 rounding.
    """

    source: str
    kind: str
    errors: float
    squares: float
    is_exact: bool


def quantize_or_carry(
    tensor_format: TensorFormat, weights: Float32Array, out: npt.NDArray[np.uint8]
) -> None:
    """Quantises a tensor; of E4, panels whose weights lie on its grid keep them.

    Args:
        tensor_format: E4 or E8.
        weights: (rows, cols) float32, finite, C-contiguous.
        out: Its buffer, uint8.

    Raises:
        ValueError: A weight is out of range.
    """
    rows, cols = weights.shape
    panels = out.reshape(-(-rows // PANEL_ROWS), -1)
    carried = np.zeros(len(panels), bool)
    # Columns that fill up a group have codes that only the quantiser defines.
    if tensor_format == TensorFormat.E4 and cols % GROUP_COLS == 0:
        # Weights on no grid are known by their panels' first superblocks.
        possible = _largest_integers(weights[::PANEL_ROWS, :SUPERBLOCK_COLS]) >= 0
        at_once = max(1, _WEIGHTS_AT_ONCE // (PANEL_ROWS * cols))
        for first in range(0, len(panels), at_once):
            part = slice(first, first + at_once)
            if possible[part].any():
                some = weights[first * PANEL_ROWS : (first + at_once) * PANEL_ROWS]
                carried[part] = _carry(some, panels[part])
    if not carried.any():
        quantize(tensor_format, weights, out)
    elif not carried.all():
        rest = weights[~np.repeat(carried, PANEL_ROWS)[:rows]]
        made = np.empty(tensor_bytes(tensor_format, len(rest), cols), np.uint8)
        quantize(tensor_format, rest, made)
        panels[~carried] = made.reshape(-1, panels.shape[1])


def _carry(weights: Float32Array, panels: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Fills the panels that lie on the grid; which ones those are."""
    rows, cols = weights.shape
    num_superblocks = -(-cols // SUPERBLOCK_COLS)
    blocks = np.zeros((rows, num_superblocks * SUPERBLOCK_COLS), np.float32)
    blocks[:, :cols] = weights
    parts, fits = _find_grid(blocks.reshape(-1, SUPERBLOCK_COLS))
    carried = np.logical_and.reduceat(fits.reshape(rows, -1).all(1), range(0, rows, PANEL_ROWS))
    num_groups = cols // GROUP_COLS
    packed = pack_grouped(
        Grouped(
            codes=parts.codes.reshape(rows, -1)[:, :cols],
            s=parts.s.reshape(rows, -1)[:, :num_groups],
            z=parts.z.reshape(rows, -1)[:, :num_groups],
            d=parts.d.reshape(rows, -1),
        ),
        TensorFormat.E4,
    ).reshape(len(panels), -1)
    panels[carried] = packed[carried]
    return carried


def _find_grid(blocks: Float32Array) -> tuple[Grouped, npt.NDArray[np.bool_]]:
    """Codes and scales of superblocks (n, 256), and which of them are exact; others mean nothing.

    With g the common divisor of the differences within a group, s is the largest divisor of g that
    4 bits hold, because that needs the fewest codes; then z is a multiple of s from the group's
    lowest integer. If any s and z hold the group, these do: 15 * s - z and -z can be brought
    within an int8, whose range is larger than 15 * s, by steps of s.
    """
    largest = np.abs(blocks).max(1)
    counts = _largest_integers(blocks)
    fits = counts >= 0
    ratio = np.maximum(counts, 0) / np.where(largest > 0, largest, 1)
    integers = np.rint(blocks * ratio.astype(np.float32)[:, None]).astype(np.int16)
    d = _least_squares(blocks, integers)
    error = np.abs(integers * d[:, None] - blocks).max(1)
    fits &= error <= _EXACT * largest
    groups = integers.reshape(len(blocks), -1, GROUP_COLS)
    low, high = groups.min(2).astype(np.int64), groups.max(2).astype(np.int64)
    steps = groups - low.astype(np.int16)[:, :, None]
    s = _SCALE[np.minimum(np.gcd.reduce(steps, axis=2), len(_SCALE) - 1)]
    # A group of one number has no differences: the smallest s that reaches it.
    s = np.where(low == high, np.maximum(1, -(-high // _MAX_CODE)), s)
    top = _MAX_CODE * s
    is_held = (high - low <= top) & (high <= top) & (high <= _HIGHEST) & (low >= _LOWEST)
    fits &= is_held.all(1)
    lowest_code = np.maximum(0, -(-(np.maximum(0, top - _HIGHEST) + low) // s))
    z = s * lowest_code - low
    codes = steps // s[:, :, None].astype(np.int16) + lowest_code[:, :, None].astype(np.int16)
    parts = Grouped(codes=codes.astype(np.uint8), s=s.astype(np.uint8), z=z.astype(np.uint8), d=d)
    return parts, fits


def _least_squares(blocks: Float32Array, integers: npt.NDArray[np.int16]) -> Float32Array:
    """(n,) float32: the D of each block, 1 where all is zero.

    Sums of a block on a grid are exact in float64, in any order. If its products were exact too,
    this is the D they were made with.
    """
    whole = integers.astype(np.float64)
    over = np.einsum("ij,ij->i", whole, whole)
    d = np.einsum("ij,ij->i", whole, blocks, dtype=np.float64) / np.where(over > 0, over, 1)
    result: Float32Array = np.where(over > 0, d, 1).astype(np.float32)
    return result


def _largest_integers(blocks: Float32Array) -> npt.NDArray[np.int64]:
    """The integer of each block's largest weight if all are integers times one step.

    Args:
        blocks: (n, columns) float32.

    Returns:
        (n,): the least that fits, 1..128; 0 for zeros; -1 if there is none.
    """
    largest = np.abs(blocks).max(1)
    found = np.where(largest == 0, 0, -1)
    left = np.flatnonzero((largest >= _RANGE[0]) & (largest <= _RANGE[1]))
    # A weight of each group refuses nearly every wrong step.
    samples = blocks[left, ::GROUP_COLS] / largest[left, None]
    for count in range(1, -_LOWEST + 1):
        near = np.flatnonzero(_is_near_integers(samples * np.float32(count)))
        if near.size:
            chosen = left[near]
            ratio = np.float32(count) / largest[chosen]
            good = _is_near_integers(blocks[chosen] * ratio[:, None])
            found[chosen[good]] = count
            left, samples = (np.delete(array, near[good], axis=0) for array in (left, samples))
    return found


def _is_near_integers(values: Float32Array) -> npt.NDArray[np.bool_]:
    is_near: npt.NDArray[np.bool_] = np.all(np.abs(values - np.rint(values)) <= _NEAR, axis=1)
    return is_near


def measure_rounding(
    name: str,
    sources: Iterable[str],
    weights: Float32Array,
    tensor_format: TensorFormat,
    data: npt.NDArray[np.uint8],
) -> Rounding | None:
    """Compares what was stored with what the source stands for.

    Args:
        name: The tensor.
        sources: Number types of the source tensors.
        weights: (rows, cols) float32, what they stand for.
        tensor_format: How they were stored.
        data: As stored, uint8.

    Returns:
        None if the source is not quantised.
    """
    kinds = [kind for kind in dict.fromkeys(sources) if kind not in _FLOATS]
    if not kinds:
        return None
    rows, cols = weights.shape
    error = np.abs(dequantize(data, tensor_format, rows, cols) - weights)
    starts = range(0, cols, SUPERBLOCK_COLS)
    limit = _EXACT * np.maximum.reduceat(np.abs(weights), starts, axis=1)
    return Rounding(
        source=" ".join(kinds),
        kind=name.rpartition(".")[2],
        errors=float(np.square(error, dtype=np.float64).sum()),
        squares=float(np.square(weights, dtype=np.float64).sum()),
        is_exact=bool((np.maximum.reduceat(error, starts, axis=1) <= limit).all()),
    )


def summarise(roundings: Iterable[Rounding]) -> dict[str, dict[str, float]]:
    """For each number type of the source, the relative RMS error of each kind of matrix.

    It has three digits, and is 0 if and only if all weights were carried over exactly.
    """
    grouped: dict[str, dict[str, list[Rounding]]] = {}
    for item in roundings:
        grouped.setdefault(item.source, {}).setdefault(item.kind, []).append(item)
    return {
        source: {kind: _relative_error(items) for kind, items in kinds.items()}
        for source, kinds in grouped.items()
    }


def _relative_error(items: list[Rounding]) -> float:
    if all(item.is_exact for item in items):
        return 0.0
    ratio = sum(item.errors for item in items) / sum(item.squares for item in items)
    return float(f"{np.sqrt(ratio):.3g}")
