"""Rounds a matrix to the grid of E4 or E5 so that its products change least, not its numbers.

Minimises the squared error of the outputs on calibration inputs, (W - Q) H (W - Q)^T with
H = X^T X: columns are rounded one after another and each makes good for the errors of those before
it (GPTQ), then codes are improved one column at a time given all others (coordinate descent), then
D is fitted to the codes by least squares.

Source: Frantar et al., GPTQ, arXiv:2210.17323, with static groups and columns in falling order of
H's diagonal, in the form of Chee et al., QuIP (LDLQ), arXiv:2307.13304, which needs no inverse of
H; coordinate descent as in Behdin et al., QuantEase, arXiv:2309.01885.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from edgellm._native import quantize
from edgellm.exporters.moments import moved_weights
from edgellm.format.layout import Grouped, pack_grouped, unpack_grouped
from edgellm.format.spec import GROUP_COLS, SUPERBLOCK_COLS, tensor_bytes
from edgellm.types import Float32Array, TensorFormat

__all__ = ["Feedback", "fit", "quantize_grouped", "quantize_matrix"]

_U8Array = npt.NDArray[np.uint8]

_LEVELS: Final = {TensorFormat.E4: 16, TensorFormat.E5: 32}
_BLOCK: Final = 64  # columns whose updates are gathered into one matrix product
_LEAST_ROWS, _MOST_ROWS = 256, 1024  # of a matrix worked on at a time
_MAX_ATTEMPTS: Final = 8  # at a damping that lets the Cholesky factorisation succeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """Which steps are taken beside the weighted fit.

    Attributes:
        is_asymmetric: Whether the float model's outputs are what a matrix is fitted to, though its
            inputs are the quantised model's.
        is_spread: Whether the error of a column is spread over the columns to come.
        sweeps: Coordinate descents over all columns, each after a refit of D but the first.
        damping: What is added to H's diagonal, as a part of its mean: with few calibration tokens
            H is known badly, and a larger damping trusts it less.
    """

    is_asymmetric: bool = True
    is_spread: bool = True
    sweeps: int = 2
    damping: float = 0.3


def fit(
    tensor_format: TensorFormat, weights: Float32Array, importance: Float32Array, pool: Executor
) -> _U8Array:
    """Quantises a matrix by a weighted search for each superblock alone.

    Args:
        tensor_format: E4, E5 or E8.
        weights: (rows, cols) float32.
        importance: (cols,) float32, the mean square of each column's input.
        pool: Threads to use; the bytes do not depend on their number.

    Returns:
        The stored bytes, uint8.

    Raises:
        ValueError: A weight is not finite.
    """
    rows, cols = weights.shape
    weights = np.ascontiguousarray(weights, np.float32)
    importance = np.ascontiguousarray(importance, np.float32)
    out = np.empty(tensor_bytes(tensor_format, rows, cols), np.uint8)

    def fit_rows(first: int) -> None:
        part = weights[first : first + _LEAST_ROWS]
        quantize(tensor_format, part, out, importance=importance, first_row=first, rows=rows)

    list(pool.map(fit_rows, range(0, rows, _LEAST_ROWS)))
    return out


def quantize_matrix(
    tensor_format: TensorFormat,
    weights: Float32Array,
    moments: Float32Array,
    missing: Float32Array | None,
    feedback: Feedback,
    pool: Executor,
) -> _U8Array:
    """Quantises a matrix.

    Args:
        tensor_format: E4, E5 or E8.
        weights: (rows, cols) float32.
        moments: (cols, cols) float32, the mean of x^T x over calibration inputs x (1, cols).
        missing: What the outputs lack on these inputs (`moved_weights`), if anything.
        feedback: Steps to take.
        pool: Threads to use; the bytes do not depend on their number.

    Returns:
        The stored bytes, uint8.

    Raises:
        ValueError: A weight is not finite.
    """
    if tensor_format != TensorFormat.E8 and (feedback.is_spread or feedback.sweeps):
        return quantize_grouped(tensor_format, weights, moments, missing, feedback, pool)
    if missing is not None:
        weights = moved_weights(weights, moments, missing)
    return fit(tensor_format, weights, moments.diagonal(), pool)


def quantize_grouped(
    tensor_format: TensorFormat,
    weights: Float32Array,
    moments: Float32Array,
    missing: Float32Array | None,
    feedback: Feedback,
    pool: Executor,
) -> _U8Array:
    """Quantises a matrix to E4 or E5 by error feedback; as `quantize_matrix`."""
    rows, cols = weights.shape
    order = np.argsort(-moments.diagonal(), kind="stable")
    factors = pool.submit(_factorise, moments, order, feedback.damping)
    if missing is not None:
        weights = moved_weights(weights, moments, missing)
    fitted = fit(tensor_format, weights, moments.diagonal(), pool)
    damped, factor = factors.result()
    parts = unpack_grouped(fitted, tensor_format, rows, cols)
    codes = parts.codes.copy()
    d = parts.d.copy()
    count = min(max(-(-rows // 4), _LEAST_ROWS), _MOST_ROWS)

    def improve(first: int) -> None:
        part = slice(first, min(first + count, rows))
        grid = _Grid.of(parts, part, cols, _LEVELS[tensor_format])
        found = grid.codes
        if feedback.is_spread:
            found = _spread(weights[part], factor, order, grid)
        for sweep in range(feedback.sweeps):
            if sweep:
                ratio = _refit(weights[part], damped, grid, found)
                d[part] *= ratio
                grid = replace(grid, step=grid.step * _per_column(ratio, SUPERBLOCK_COLS, cols))
            found = _descend(weights[part], damped, grid, found)
        codes[part, :cols] = found.astype(np.uint8)

    list(pool.map(improve, range(0, rows, count)))
    return pack_grouped(Grouped(codes=codes, s=parts.s, z=parts.z, d=d), tensor_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """w = step * (code - zero), each (rows, cols) float32; codes are below `levels`."""

    step: Float32Array
    zero: Float32Array
    codes: Float32Array
    levels: int

    @classmethod
    def of(cls, parts: Grouped, rows: slice, cols: int, levels: int) -> _Grid:
        s = _per_column(parts.s[rows].astype(np.float32), GROUP_COLS, cols)
        z = _per_column(parts.z[rows].astype(np.float32), GROUP_COLS, cols)
        return cls(
            step=_per_column(parts.d[rows], SUPERBLOCK_COLS, cols) * s,
            zero=z / s,
            codes=parts.codes[rows, :cols].astype(np.float32),
            levels=levels,
        )


def _per_column(values: Float32Array, width: int, cols: int) -> Float32Array:
    """(rows, n) numbers of `width` columns each to (rows, cols)."""
    wide: Float32Array = np.repeat(values, width, axis=1)[:, :cols]
    return wide


def _factorise(
    moments: Float32Array, order: npt.NDArray[np.intp], damping: float
) -> tuple[Float32Array, Float32Array]:
    """H with its damping, doubled until it can be factorised.

    Returns:
        H, and with its columns in `order` the U of H = (I + U) D (I + U)^T, U strictly upper
        triangular: what each column takes of the errors of those before it.
    """
    diagonal = np.arange(len(moments))
    mean = max(float(moments.diagonal().mean(dtype=np.float64)), 1e-30)
    backwards = order[::-1]
    for attempt in range(_MAX_ATTEMPTS):
        damped = moments.copy()
        damped[diagonal, diagonal] += np.float32(damping * 2**attempt * mean)
        try:
            lower = np.linalg.cholesky(damped[np.ix_(backwards, backwards)].astype(np.float64))
        except np.linalg.LinAlgError:
            continue
        lower /= lower.diagonal().copy()
        return damped, np.triu(lower[::-1, ::-1].astype(np.float32), 1)
    raise ValueError("the calibration inputs have no covariance that can be factorised")


def _spread(
    weights: Float32Array, factor: Float32Array, order: npt.NDArray[np.intp], grid: _Grid
) -> Float32Array:
    """Codes (rows, cols) by error feedback, columns in `order`."""
    cols = len(order)
    wanted = np.ascontiguousarray(weights.T[order])
    step = np.ascontiguousarray(grid.step.T[order])
    zero = np.ascontiguousarray(grid.zero.T[order])
    codes, errors = np.empty_like(wanted), np.empty_like(wanted)
    for first in range(0, cols, _BLOCK):
        last = min(first + _BLOCK, cols)
        window = wanted[first:last] + factor[:first, first:last].T @ errors[:first]
        for j in range(first, last):
            value = window[j - first] / step[j] + zero[j]
            codes[j] = np.clip(np.rint(value), 0, grid.levels - 1)
            errors[j] = wanted[j] - step[j] * (codes[j] - zero[j])
            window[j - first + 1 :] += factor[j, j + 1 : last, None] * errors[j]
    out = np.empty_like(codes)
    out[order] = codes
    return np.ascontiguousarray(out.T)


def _descend(
    weights: Float32Array, moments: Float32Array, grid: _Grid, codes: Float32Array
) -> Float32Array:
    """One sweep: every column gets the codes that are best given all others."""
    step, zero = np.ascontiguousarray(grid.step.T), np.ascontiguousarray(grid.zero.T)
    codes = np.ascontiguousarray(codes.T)
    gradient = moments @ (step * (codes - zero) - weights.T)  # right for the columns to come
    curvature = np.maximum(moments.diagonal(), np.float32(1e-30))
    for first in range(0, len(codes), _BLOCK):
        last = min(first + _BLOCK, len(codes))
        window = gradient[first:last]
        moves = np.empty_like(window)
        for j in range(first, last):
            best = codes[j] - window[j - first] / (curvature[j] * step[j])
            chosen = np.clip(np.rint(best), 0, grid.levels - 1)
            moves[j - first] = step[j] * (chosen - codes[j])
            codes[j] = chosen
            window[j - first + 1 :] += moments[j + 1 : last, j, None] * moves[j - first]
        gradient[last:] += moments[last:, first:last] @ moves
    return np.ascontiguousarray(codes.T)


def _refit(
    weights: Float32Array, moments: Float32Array, grid: _Grid, codes: Float32Array
) -> Float32Array:
    """Factors (rows, superblocks) for D that suit the codes best, near 1."""
    rows, cols = weights.shape
    blocks = [slice(k, min(k + SUPERBLOCK_COLS, cols)) for k in range(0, cols, SUPERBLOCK_COLS)]
    found = grid.step * (codes - grid.zero)
    square = np.empty((rows, len(blocks), len(blocks)))
    product = np.empty((rows, len(blocks)))
    for i, block in enumerate(blocks):
        through = found[:, block] @ moments[block]
        product[:, i] = np.einsum("rk,rk->r", through, weights, dtype=np.float64)
        for j, other in enumerate(blocks):
            square[:, i, j] = np.einsum(
                "rk,rk->r", through[:, other], found[:, other], dtype=np.float64
            )
    ridge = 1e-3 * np.trace(square, axis1=1, axis2=2) / len(blocks) + 1e-30
    square += ridge[:, None, None] * np.eye(len(blocks))
    product += ridge[:, None]
    ratio = np.linalg.solve(square, product[..., None])[..., 0]
    return np.asarray(np.clip(ratio, 0.8, 1.25), np.float32)
