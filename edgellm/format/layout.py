"""E4, E5 and E8 tensors in numpy: tiles to codes and scales and back, and to float32.

ARCHITECTURE.md, "Arithmetic", has the layout. Kernels compute on the tiles as they lie; this is for
reference, tests and export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from edgellm.format.spec import (
    GROUP_COLS,
    GROUP_LINES,
    LINE_BYTES,
    PANEL_ROWS,
    SCALE_LINES,
    SUPERBLOCK_COLS,
    tensor_bytes,
)
from edgellm.types import Float32Array, TensorFormat, round_up

__all__ = ["Grouped", "dequantize", "integers", "pack_e8", "pack_grouped", "unpack_grouped"]

_GROUPS = SUPERBLOCK_COLS // GROUP_COLS
_NIBBLE_LINES = 4  # of a group of E4 and E5; a fifth line has the fifth bits of E5's codes
# of code line l, l of the first four columns and 4 + l of the others
_FIFTH_BITS = np.array([[0, 4], [1, 5], [2, 6], [3, 7]], np.uint8)[..., None]
_PANELS_AT_ONCE = 4  # the temporaries of 64 rows of a few thousand columns stay in cache
_U8Array = npt.NDArray[np.uint8]
_I8Array = npt.NDArray[np.int8]
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """An E4 or E5 tensor: w = d * (s * codes - z). Columns are padded to a multiple of 32."""

    codes: _U8Array
    """(rows, padded columns), 0..15; of E5 0..31."""
    s: _U8Array
    """(rows, groups), 1..15; of E5 1..8."""
    z: _U8Array
    """(rows, groups), 0..255."""
    d: Float32Array
    """(rows, superblocks), above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Tiles of one width that follow one another in every panel: all full ones, or the last."""

    start: int
    """First byte within the panel."""
    count: int
    first: int
    """Number of the first superblock."""
    cols: int
    """Columns of one tile."""
    group_lines: int
    scale_lines: int

    @property
    def code_lines(self) -> int:
        return self.cols // GROUP_COLS * self.group_lines

    @property
    def bytes(self) -> int:
        return self.count * (self.code_lines + self.scale_lines) * LINE_BYTES

    @property
    def columns(self) -> slice:
        first = self.first * SUPERBLOCK_COLS
        return slice(first, first + self.count * self.cols)

    @property
    def superblocks(self) -> slice:
        return slice(self.first, self.first + self.count)


def _runs(tensor_format: TensorFormat, cols: int) -> Iterator[_Run]:
    full, rest = divmod(round_up(cols, GROUP_COLS), SUPERBLOCK_COLS)
    start = 0
    for first, count, width in ((0, full, SUPERBLOCK_COLS), (full, 1, rest)):
        if count and width:
            run = _Run(
                start=start,
                count=count,
                first=first,
                cols=width,
                group_lines=GROUP_LINES[tensor_format],
                scale_lines=SCALE_LINES[tensor_format],
            )
            start += run.bytes
            yield run


def _panels(data: npt.ArrayLike, tensor_format: TensorFormat, rows: int, cols: int) -> _U8Array:
    """The tensor's bytes as (panels, bytes of a panel), a view."""
    flat = np.asarray(data, np.uint8).reshape(-1)
    if flat.size != tensor_bytes(tensor_format, rows, cols):
        raise ValueError(f"{flat.size} bytes are not a ({rows}, {cols}) {tensor_format.name}")
    return flat.reshape(-(-rows // PANEL_ROWS), -1)


def _tiles(panels: _U8Array, run: _Run) -> tuple[_U8Array, _U8Array, Float32Array]:
    """Views of a run with the row in front.

    Returns:
        The codes (panels, 16, tiles, lines, 4), the s and z lines of E4 and E5 (panels, 16,
        tiles, 3, 4) and D (panels, 16, tiles).
    """
    lines = run.code_lines + run.scale_lines
    part = panels[:, run.start : run.start + run.bytes]
    tiles = part.reshape(len(panels), run.count, lines, PANEL_ROWS, 4).transpose(0, 3, 1, 2, 4)
    d: Float32Array = tiles[..., -1, :].view("<f4")[..., 0]
    return tiles[..., : run.code_lines, :], tiles[..., run.code_lines : -1, :], d


def unpack_grouped(
    data: npt.ArrayLike, tensor_format: TensorFormat, rows: int, cols: int
) -> Grouped:
    """Takes the tiles of a (rows, cols) tensor apart.

    Args:
        data: its stored bytes, uint8.
        tensor_format: E4 or E5.
        rows: rows of the tensor.
        cols: columns of the tensor.

    Raises:
        ValueError: `data` has another size.
    """
    panels = _panels(data, tensor_format, rows, cols)
    padded = round_up(cols, GROUP_COLS)
    num_superblocks = -(-padded // SUPERBLOCK_COLS)
    codes = np.empty((len(panels), PANEL_ROWS, padded), np.uint8)
    s = np.empty((len(panels), PANEL_ROWS, num_superblocks, _GROUPS), np.uint8)
    z = np.empty_like(s)
    d = np.empty((len(panels), PANEL_ROWS, num_superblocks), np.float32)
    for run in _runs(tensor_format, cols):
        lines, scales, d_run = _tiles(panels, run)
        codes[..., run.columns] = _join_codes(lines, run)
        s[:, :, run.superblocks] = _join_nibbles(scales[..., 0, :])
        z[:, :, run.superblocks] = scales[..., 1:, :].reshape(s[:, :, run.superblocks].shape)
        d[:, :, run.superblocks] = d_run
    groups = padded // GROUP_COLS
    flat = len(panels) * PANEL_ROWS
    return Grouped(
        codes=codes.reshape(flat, -1)[:rows],
        s=s.reshape(flat, -1)[:rows, :groups],
        z=z.reshape(flat, -1)[:rows, :groups],
        d=d.reshape(flat, -1)[:rows],
    )


def _join_codes(lines: _U8Array, run: _Run) -> _U8Array:
    """(panels, 16, tiles, lines, 4) bytes to (panels, 16, columns) codes."""
    groups = lines.reshape(*lines.shape[:3], -1, run.group_lines, 4)
    nibbles = groups[..., :_NIBBLE_LINES, :]
    codes = np.empty((*nibbles.shape[:-1], 2, 4), np.uint8)
    np.bitwise_and(nibbles, 15, out=codes[..., 0, :])
    np.right_shift(nibbles, 4, out=codes[..., 1, :])
    if run.group_lines > _NIBBLE_LINES:
        codes |= (groups[..., -1:, None, :] >> _FIFTH_BITS & 1) << 4
    return codes.reshape(*lines.shape[:2], -1)


def _split_codes(codes: _U8Array, lines: _U8Array, run: _Run) -> None:
    """The inverse of `_join_codes`: fills `lines`."""
    groups = lines.reshape(*lines.shape[:3], -1, run.group_lines, 4)
    pairs = codes.reshape(*groups.shape[:-2], _NIBBLE_LINES, 2, 4)
    groups[..., :_NIBBLE_LINES, :] = pairs[..., 0, :] & 15 | pairs[..., 1, :] << 4
    if run.group_lines > _NIBBLE_LINES:
        fifths = pairs >> 4 << _FIFTH_BITS
        groups[..., -1, :] = np.bitwise_or.reduce(fifths, axis=(-3, -2))


def _join_nibbles(words: _U8Array) -> _U8Array:
    """(..., 4) bytes to (..., 8) values of 4 bits, low ones first."""
    return np.stack((words & 15, words >> 4), axis=-1).reshape(*words.shape[:-1], 8)


def pack_grouped(parts: Grouped, tensor_format: TensorFormat) -> _U8Array:
    """Builds the stored bytes of a tensor, uint8; the inverse of `unpack_grouped`.

    Args:
        parts: codes and scales; rows are filled up to 16 with zero weights.
        tensor_format: E4 or E5.
    """
    rows, padded = parts.codes.shape
    num_superblocks = -(-padded // SUPERBLOCK_COLS)
    flat = np.zeros(tensor_bytes(tensor_format, rows, padded), np.uint8)
    panels = _panels(flat, tensor_format, rows, padded)
    codes = _fill_rows(parts.codes, padded, 0)
    s = _fill_rows(parts.s, num_superblocks * _GROUPS, 1)
    s[..., padded // GROUP_COLS :] = 0
    z = _fill_rows(parts.z, num_superblocks * _GROUPS, 0)
    d = _fill_rows(parts.d, num_superblocks, 0)
    for run in _runs(tensor_format, padded):
        lines, scales, d_run = _tiles(panels, run)
        _split_codes(codes[..., run.columns], lines, run)
        groups = slice(run.superblocks.start * _GROUPS, run.superblocks.stop * _GROUPS)
        nibbles = s[..., groups].reshape(*lines.shape[:3], 4, 2)
        scales[..., 0, :] = nibbles[..., 0] | nibbles[..., 1] << 4
        scales[..., 1:, :] = z[..., groups].reshape(*lines.shape[:3], 2, 4)
        d_run[...] = d[..., run.superblocks]
    return flat


def pack_e8(codes: _I8Array, d: Float32Array) -> _U8Array:
    """Builds the stored bytes of an E8 tensor, uint8.

    Args:
        codes: (rows, columns) int8, -127..127; filled up to 16 rows and 32 columns with zeros.
        d: (rows, superblocks).
    """
    rows, cols = codes.shape
    flat = np.zeros(tensor_bytes(TensorFormat.E8, rows, cols), np.uint8)
    panels = _panels(flat, TensorFormat.E8, rows, cols)
    filled = _fill_rows(codes.view(np.uint8), round_up(cols, GROUP_COLS), 0)
    scales = _fill_rows(d, d.shape[1], 0)
    for run in _runs(TensorFormat.E8, cols):
        lines, _, d_run = _tiles(panels, run)
        lines[...] = filled[..., run.columns].reshape(lines.shape)
        d_run[...] = scales[..., run.superblocks]
    return flat


def _fill_rows(values: npt.NDArray[_Scalar], cols: int, fill: int) -> npt.NDArray[_Scalar]:
    """(rows, columns) to (panels, 16, cols): missing rows are `fill`, missing columns zero."""
    rows = round_up(len(values), PANEL_ROWS)
    filled = np.zeros((rows, cols), values.dtype)
    filled[: len(values), : values.shape[1]] = values
    filled[len(values) :] = fill
    return filled.reshape(-1, PANEL_ROWS, cols)


def integers(
    data: npt.ArrayLike, tensor_format: TensorFormat, rows: int, cols: int
) -> tuple[_I8Array, Float32Array]:
    """The exact integers of a quantised tensor and what they are multiplied by.

    Args:
        data: the stored bytes, uint8.
        tensor_format: E4, E5 or E8.
        rows: rows of the tensor.
        cols: columns of the tensor.

    Returns:
        (rows, cols) int8 and D (rows, superblocks) float32.

    Raises:
        ValueError: `data` has another size.
    """
    panels = _panels(data, tensor_format, rows, cols)
    values = np.empty((rows, cols), np.int8)
    d = np.empty((rows, -(-cols // SUPERBLOCK_COLS)), np.float32)
    for first in range(0, len(panels), _PANELS_AT_ONCE):
        target = slice(first * PANEL_ROWS, min((first + _PANELS_AT_ONCE) * PANEL_ROWS, rows))
        count = target.stop - target.start
        for run in _runs(tensor_format, cols):
            part, d_part = _integers_of_run(panels[first : first + _PANELS_AT_ONCE], run)
            width = values[target, run.columns].shape[1]
            values[target, run.columns] = part.reshape(len(part), -1)[:count, :width]
            d[target, run.superblocks] = d_part[:count]
    return values, d


def _integers_of_run(panels: _U8Array, run: _Run) -> tuple[_I8Array, Float32Array]:
    """(rows, tiles, columns of a tile) int8 and D (rows, tiles)."""
    lines, scales, d = _tiles(panels, run)
    shape = (len(panels) * PANEL_ROWS, run.count, -1)
    if scales.shape[-2] == 0:
        return lines.reshape(shape).view(np.int8), d.reshape(shape[:2])
    grouped = (*lines.shape[:3], -1, GROUP_COLS)
    values = _join_codes(lines, run).reshape(grouped)
    num_groups = values.shape[-2]
    # s * q is at most 248 and s * q - z an int8, so 8 bits that wrap around are exact
    values *= _join_nibbles(scales[..., 0, :])[..., :num_groups, None]
    values -= scales[..., 1:, :].reshape(*lines.shape[:3], _GROUPS)[..., :num_groups, None]
    return values.reshape(shape).view(np.int8), d.reshape(shape[:2])


def dequantize(
    data: npt.ArrayLike, tensor_format: TensorFormat, rows: int, cols: int
) -> Float32Array:
    """The numbers a tensor stands for: float32(D * integer), one rounding each.

    Args:
        data: the stored bytes, uint8.
        tensor_format: how they are stored.
        rows: rows of the tensor.
        cols: columns of the tensor.

    Returns:
        (rows, cols) float32; a read-only view of `data` if that is F32 already.

    Raises:
        ValueError: `data` has another size.
    """
    if tensor_format == TensorFormat.F32:
        flat = np.asarray(data, np.uint8).reshape(-1)
        if flat.size != rows * cols * 4:
            raise ValueError(f"{flat.size} bytes are not a ({rows}, {cols}) F32")
        return flat.view("<f4").reshape(rows, cols)
    panels = _panels(data, tensor_format, rows, cols)
    values = np.empty((rows, cols), np.float32)
    for first in range(0, len(panels), _PANELS_AT_ONCE):
        target = values[first * PANEL_ROWS : (first + _PANELS_AT_ONCE) * PANEL_ROWS]
        for run in _runs(tensor_format, cols):
            part, d = _integers_of_run(panels[first : first + _PANELS_AT_ONCE], run)
            scaled = (part * d[:, :, None]).reshape(len(part), -1)
            window = target[:, run.columns]
            window[...] = scaled[: window.shape[0], : window.shape[1]]
    return values
