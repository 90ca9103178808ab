"""The quantiser: exact integers, small errors, the same bytes however the work is cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from edgellm._native import quantize, tensor_bytes
from edgellm.format.layout import dequantize, pack_e4, unpack_e4
from edgellm.types import Float32Array, TensorFormat

SHAPES = [(1, 1), (15, 33), (16, 100), (17, 576), (33, 896)]


def quantized(tensor_format: TensorFormat, weights: Float32Array) -> npt.NDArray[np.uint8]:
    out = np.empty(tensor_bytes(tensor_format, *weights.shape), np.uint8)
    quantize(tensor_format, weights, out)
    return out


def bell(rows: int, cols: int, seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed).normal(0, 0.02, (rows, cols)).astype(np.float32)


def squared_error(weights: Float32Array, other: Float32Array) -> float:
    return float(((weights.astype(np.float64) - other) ** 2).sum())


def round_to_nearest(weights: Float32Array) -> Float32Array:
    """16 levels between the extremes of each group, scale and minimum in float: 6 bits a weight."""
    groups = weights.reshape(len(weights), -1, 32)
    low = groups.min(-1, keepdims=True)
    step = (groups.max(-1, keepdims=True) - low) / 15
    rounded: Float32Array = np.rint((groups - low) / step) * step + low
    return rounded.reshape(weights.shape)


@pytest.mark.parametrize("kind", ["bell", "heavy", "positive", "negative", "constant", "outlier"])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_every_group_is_an_exact_int8(kind: str, rows: int, cols: int) -> None:
    weights = bell(rows, cols)
    weights = {
        "bell": weights,
        "heavy": weights**5,
        "positive": weights + 1,
        "negative": weights - 1,
        "constant": np.full_like(weights, -0.3),
        "outlier": np.where(np.arange(cols) % 100 == 7, np.float32(9), weights),
    }[kind]
    parts = unpack_e4(quantized(TensorFormat.E4, weights), rows, cols)
    s, z = parts.s.astype(int), parts.z.astype(int)
    assert s.min() >= 1
    assert s.max() <= 15
    assert z.max() <= 128
    assert (15 * s - z).max() <= 127
    assert (parts.d >= np.finfo(np.float32).tiny).all()


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_the_layout_is_the_one_numpy_writes(rows: int, cols: int) -> None:
    data = quantized(TensorFormat.E4, bell(rows, cols))
    assert (pack_e4(unpack_e4(data, rows, cols)) == data).all()


def test_e4_loses_less_than_rounding_with_float_scales() -> None:
    weights = bell(64, 576)
    ours = dequantize(quantized(TensorFormat.E4, weights), TensorFormat.E4, 64, 576)
    assert squared_error(weights, ours) < 0.83 * squared_error(weights, round_to_nearest(weights))


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
    for tensor_format in (TensorFormat.E4, TensorFormat.E8):
        ours = dequantize(quantized(tensor_format, weights), tensor_format, 4, 320)
        assert (ours[1] == 0).all()
        assert (ours[:, 64:128] == 0).all()


@pytest.mark.parametrize("tensor_format", [TensorFormat.E4, TensorFormat.E8])
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
