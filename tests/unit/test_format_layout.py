"""E4, E5 and E8 tiles in numpy, against the words of ARCHITECTURE.md read byte by byte."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.format.layout import (
    Grouped,
    dequantize,
    integers,
    pack_e8,
    pack_grouped,
    unpack_grouped,
)
from edgellm.format.spec import tensor_bytes
from edgellm.types import TensorFormat

SHAPES = [(16, 256), (1, 32), (17, 40), (33, 300), (50, 576), (16, 896), (70, 512)]
GROUPED = [TensorFormat.E4, TensorFormat.E5]


def make_grouped(tensor_format: TensorFormat, rows: int, cols: int) -> Grouped:
    """Random codes and scales that keep to the limit of an int8."""
    random = np.random.default_rng(rows * 1000 + cols)
    most_code, most_scale = {TensorFormat.E4: (15, 15), TensorFormat.E5: (31, 8)}[tensor_format]
    padded = -(-cols // 32) * 32
    s = random.integers(1, most_scale + 1, (rows, padded // 32), dtype=np.uint8)
    low = np.maximum(0, most_code * s.astype(int) - 127)
    return Grouped(
        codes=random.integers(0, most_code + 1, (rows, padded), dtype=np.uint8),
        s=s,
        z=random.integers(low, 129, dtype=np.int64).astype(np.uint8),
        d=random.random((rows, -(-padded // 256)), dtype=np.float32) + np.float32(0.01),
    )


def grouped_weight(
    data: np.ndarray, bits: int, cols: int, row: int, col: int
) -> tuple[int, np.float32]:
    """s * q - z and D of one weight, straight from the text of ARCHITECTURE.md."""
    padded = -(-cols // 32) * 32
    num_superblocks = -(-padded // 256)
    panel = data[row // 16 * (padded * 2 * bits + num_superblocks * 256) :]
    superblock, k = divmod(col, 256)
    width = min(padded - 256 * superblock, 256)
    tile = panel[superblock * (256 * 2 * bits + 256) :]
    r, g = row % 16, k // 32
    group = tile[g * bits * 64 :]
    line, j = k % 32 // 8, k % 4
    byte = group[line * 64 + 4 * r + j]
    is_low = k % 8 < 4
    q = int(byte) & 15 if is_low else int(byte) >> 4
    if bits == 5:
        fifths = int(group[4 * 64 + 4 * r + j])
        q += 16 * (fifths >> (line if is_low else 4 + line) & 1)
    scales = tile[width * 2 * bits :]
    word = int.from_bytes(scales[4 * r : 4 * r + 4].tobytes(), "little")
    z = scales[64 + 64 * (g // 4) + 4 * r + g % 4]
    d = scales[192 + 4 * r : 192 + 4 * r + 4].view("<f4")[0]
    return (word >> (4 * g) & 15) * q - int(z), d


@pytest.mark.parametrize("tensor_format", GROUPED)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_grouped_tiles_lie_as_architecture_says(
    tensor_format: TensorFormat, rows: int, cols: int
) -> None:
    data = pack_grouped(make_grouped(tensor_format, rows, cols), tensor_format)
    values, d = integers(data, tensor_format, rows, cols)
    weights = dequantize(data, tensor_format, rows, cols)
    bits = {TensorFormat.E4: 4, TensorFormat.E5: 5}[tensor_format]
    random = np.random.default_rng(0)
    for row, col in zip(random.integers(0, rows, 200), random.integers(0, cols, 200), strict=True):
        integer, scale = grouped_weight(data, bits, cols, row, col)
        assert values[row, col] == integer
        assert d[row, col // 256] == scale
        assert weights[row, col] == scale * np.float32(integer)


@pytest.mark.parametrize("tensor_format", GROUPED)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_grouped_round_trip(tensor_format: TensorFormat, rows: int, cols: int) -> None:
    parts = make_grouped(tensor_format, rows, cols)
    data = pack_grouped(parts, tensor_format)
    assert data.size == tensor_bytes(tensor_format, rows, cols)
    again = unpack_grouped(data, tensor_format, rows, cols)
    for name in ("codes", "s", "z", "d"):
        assert np.array_equal(getattr(again, name), getattr(parts, name))


@pytest.mark.parametrize("tensor_format", GROUPED)
def test_rows_past_the_end_are_zero_weights(tensor_format: TensorFormat) -> None:
    data = pack_grouped(make_grouped(tensor_format, 3, 64), tensor_format)
    padding = unpack_grouped(data, tensor_format, 16, 64)
    assert not padding.codes[3:].any()
    assert (padding.s[3:] == 1).all()
    assert not padding.z[3:].any()
    assert not padding.d[3:].any()


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_e8_lies_as_architecture_says(rows: int, cols: int) -> None:
    random = np.random.default_rng(1)
    codes = random.integers(-127, 128, (rows, cols), dtype=np.int8)
    d = random.random((rows, -(-cols // 256)), dtype=np.float32)
    data = pack_e8(codes, d)
    values, scales = integers(data, TensorFormat.E8, rows, cols)
    assert np.array_equal(values, codes)
    assert np.array_equal(scales, d)
    expected = codes.astype(np.float32) * np.repeat(d, 256, axis=1)[:, :cols]
    assert np.array_equal(dequantize(data, TensorFormat.E8, rows, cols), expected)
    padded = -(-cols // 32) * 32
    width = min(padded, 256)
    row, col = min(rows - 1, 15), min(cols, 256) - 1
    assert data.view(np.int8)[col // 4 * 64 + 4 * row + col % 4] == codes[row, col]
    assert data[width * 16 + 4 * row :][:4].view("<f4")[0] == d[row, 0]


def test_f32_is_a_view() -> None:
    data = np.arange(6, dtype=np.float32).view(np.uint8)
    values = dequantize(data, TensorFormat.F32, 2, 3)
    assert np.array_equal(values, [[0, 1, 2], [3, 4, 5]])
    assert np.shares_memory(values, data)


@pytest.mark.parametrize("tensor_format", list(TensorFormat))
def test_a_wrong_size_is_refused(tensor_format: TensorFormat) -> None:
    with pytest.raises(ValueError, match="bytes are not"):
        dequantize(np.zeros(100, np.uint8), tensor_format, 16, 32)
