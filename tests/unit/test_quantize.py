"""The quantiser: exact integers, small errors, the same bytes however the work is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from edgellm._native import quantize, tensor_bytes
from edgellm.format.layout import dequantize, pack_grouped, unpack_grouped
from edgellm.types import Float32Array, TensorFormat

SHAPES = [(1, 1), (15, 33), (16, 100), (17, 576), (33, 896)]
GROUPED = [TensorFormat.E4, TensorFormat.E5]
MOST_CODE = {TensorFormat.E4: 15, TensorFormat.E5: 31}
MOST_SCALE = {TensorFormat.E4: 15, TensorFormat.E5: 8}


def quantized(tensor_format: TensorFormat, weights: Float32Array) -> npt.NDArray[np.uint8]:
    out = np.empty(tensor_bytes(tensor_format, *weights.shape), np.uint8)
    quantize(tensor_format, weights, out)
    return out


def bell(rows: int, cols: int, seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed).normal(0, 0.02, (rows, cols)).astype(np.float32)


def squared_error(weights: Float32Array, other: Float32Array) -> float:
    return float(((weights.astype(np.float64) - other) ** 2).sum())


def round_to_nearest(weights: Float32Array, most_code: int) -> Float32Array:
    """Codes 0..most_code between the extremes of each group; scale and minimum, floats, take 2 bits
    more a weight."""
    groups = weights.reshape(len(weights), -1, 32)
    low = groups.min(-1, keepdims=True)
    step = (groups.max(-1, keepdims=True) - low) / most_code
    rounded: Float32Array = np.rint((groups - low) / step) * step + low
    return rounded.reshape(weights.shape)


@pytest.mark.parametrize("tensor_format", GROUPED)
@pytest.mark.parametrize("kind", ["bell", "heavy", "positive", "negative", "constant", "outlier"])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_every_group_is_an_exact_int8(
    tensor_format: TensorFormat, kind: str, rows: int, cols: int
) -> None:
    weights = bell(rows, cols)
    weights = {
        "bell": weights,
        "heavy": weights**5,
        "positive": weights + 1,
        "negative": weights - 1,
        "constant": np.full_like(weights, -0.3),
        "outlier": np.where(np.arange(cols) % 100 == 7, np.float32(9), weights),
    }[kind]
    parts = unpack_grouped(quantized(tensor_format, weights), tensor_format, rows, cols)
    s, z = parts.s.astype(int), parts.z.astype(int)
    assert s.min() >= 1
    assert s.max() <= MOST_SCALE[tensor_format]
    assert z.max() <= 128
    assert (MOST_CODE[tensor_format] * s - z).max() <= 127
    assert (parts.d >= np.finfo(np.float32).tiny).all()


@pytest.mark.parametrize("tensor_format", GROUPED)
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_the_layout_is_the_one_numpy_writes(
    tensor_format: TensorFormat, rows: int, cols: int
) -> None:
    data = quantized(tensor_format, bell(rows, cols))
    parts = unpack_grouped(data, tensor_format, rows, cols)
    assert (pack_grouped(parts, tensor_format) == data).all()


@pytest.mark.parametrize(
    ("tensor_format", "factor"), [(TensorFormat.E4, 0.83), (TensorFormat.E5, 0.92)]
)
def test_the_fit_loses_less_than_rounding_with_float_scales(
    tensor_format: TensorFormat, factor: float
) -> None:
    weights = bell(64, 576)
    ours = dequantize(quantized(tensor_format, weights), tensor_format, 64, 576)
    nearest = round_to_nearest(weights, MOST_CODE[tensor_format])
    assert squared_error(weights, ours) < factor * squared_error(weights, nearest)


def test_a_fifth_bit_leaves_less_than_a_third_of_the_error() -> None:
    weights = bell(64, 576)
    e4, e5 = (
        squared_error(weights, dequantize(quantized(kind, weights), kind, 64, 576))
        for kind in GROUPED
    )
    assert e5 < e4 / 3


def test_e8_is_within_half_a_step() -> None:
    weights = bell(20, 300)
    ours = dequantize(quantized(TensorFormat.E8, weights), TensorFormat.E8, 20, 300)
    for first in (0, 256):
        part = slice(first, first + 256)
        step = np.abs(weights[:, part]).max(-1, keepdims=True) / 127
        assert (np.abs(weights - ours)[:, part] <= 0.5001 * step).all()


def test_zeros_stay_zeros() -> None:
    weights = bell(4, 320)
    weights[1] = 0
    weights[:, 64:128] = 0
    for tensor_format in (*GROUPED, TensorFormat.E8):
        ours = dequantize(quantized(tensor_format, weights), tensor_format, 4, 320)
        assert (ours[1] == 0).all()
        assert (ours[:, 64:128] == 0).all()


@pytest.mark.parametrize("tensor_format", [*GROUPED, TensorFormat.E8])
def test_threads_and_cuts_do_not_change_a_byte(tensor_format: TensorFormat) -> None:
    rows, cols = 150, 200
    weights = bell(rows, cols)
    whole = quantized(tensor_format, weights)
    for step in (16, 48, 112):
        cut = np.full_like(whole, 0xA5)

        def work(first: int, step: int = step, cut: npt.NDArray[np.uint8] = cut) -> None:
            part = weights[first : first + step]
            quantize(tensor_format, part, cut, first_row=first, rows=rows)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(0, rows, step)))
        assert (cut == whole).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_named(value: float) -> None:
    weights = bell(20, 40)
    weights[18, 39] = value
    with pytest.raises(ValueError, match="row 18, column 39"):
        quantized(TensorFormat.E4, weights)


def test_rows_are_cut_at_panels() -> None:
    out = np.empty(tensor_bytes(TensorFormat.E4, 40, 64), np.uint8)
    with pytest.raises(ValueError, match="multiples of 16"):
        quantize(TensorFormat.E4, bell(16, 64), out, first_row=8, rows=40)
    with pytest.raises(ValueError, match="multiples of 16"):
        quantize(TensorFormat.E4, bell(20, 64), out, first_row=0, rows=40)
