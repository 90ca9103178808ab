"""What calibration inputs say of a matrix: second moments, and the weights that suit them best."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

import numpy as np

from edgellm.models._reference import round_q8
from edgellm.types import Float32Array

__all__ = [
    "fitting_moments",
    "lacking_outputs",
    "mean_product",
    "moved_weights",
    "output_error",
    "second_moments",
    "token_scales",
]

_OUTLIER: Final = 10.0  # times the median energy: tokens beyond it count as much as one at it
_COLS: Final = 128  # of a product computed at a time
_ROWS: Final = 4096  # of weights compared at a time
_DAMPING: Final = 1.0  # times the mean of the diagonal
_STREAM_SHARE: Final = 0.5  # of what the stream lacks, that a matrix which adds to it makes good


def token_scales(inputs: Float32Array) -> Float32Array:
    """What to multiply tokens by, so that none towers over the others (an attention sink).

    Args:
        inputs: (n, cols).

    Returns:
        (n, 1) float32, at most 1.
    """
    energy = np.square(inputs).sum(axis=1, dtype=np.float64, keepdims=True)
    limit = _OUTLIER * float(np.median(energy))
    scales = np.sqrt(np.minimum(1.0, limit / np.maximum(energy, 1e-30)))
    return np.asarray(scales, np.float32)


def fitting_moments(
    weights: Float32Array,
    inputs: Sequence[Float32Array],
    exact_inputs: Sequence[Float32Array],
    added_to: tuple[Sequence[Float32Array], Sequence[Float32Array]] | None,
    pool: Executor,
) -> tuple[Float32Array, Float32Array | None]:
    """What a matrix of a layer is fitted by, over the tokens of windows.

    Args:
        weights: (rows, cols) what it is in the float model.
        inputs: (n, cols) of each window in the quantised model, before they are rounded.
        exact_inputs: (n, cols) of each window in the float model; none: outputs are not compared.
        added_to: The streams that its outputs are added to, in the quantised model and in the float
            model, if they are added as they come.
        pool: Threads to use; the result does not depend on their number.

    Returns:
        Second moments of the rounded inputs, (cols, cols), and the mean product with them of what
        the outputs lack, (rows, cols), if they are compared.
    """
    rounded = list(pool.map(round_q8, inputs))
    scales = [token_scales(x) for x in rounded]
    missing = None
    if exact_inputs:
        lack = np.subtract if added_to is None else partial(lacking_outputs, weights)
        lacking = list(pool.map(lack, exact_inputs, rounded, *(added_to or ())))
        for x, scale in zip(lacking, scales, strict=True):
            x *= scale**2
        missing = mean_product(lacking, rounded, pool)
        missing = weights @ missing if added_to is None else missing
    for x, scale in zip(rounded, scales, strict=True):
        x *= scale
    return second_moments(rounded, pool), missing


def second_moments(inputs: Sequence[Float32Array], pool: Executor) -> Float32Array:
    """Mean of x^T x over the tokens x of windows.

    Args:
        inputs: (n, cols) of each window.
        pool: Threads to use; the result does not depend on their number.

    Returns:
        (cols, cols) float32.
    """
    cols = inputs[0].shape[1]
    out = np.empty((cols, cols), np.float32)

    def part(first: int) -> None:
        rows, rest = slice(first, first + _COLS), slice(first, cols)
        out[rows, rest] = _mean([x[:, rows] for x in inputs], [x[:, rest] for x in inputs])
        out[rest, rows] = out[rows, rest].T

    list(pool.map(part, range(0, cols, _COLS)))
    return out


def mean_product(
    left: Sequence[Float32Array], right: Sequence[Float32Array], pool: Executor
) -> Float32Array:
    """Mean of a^T b over the tokens of windows.

    Args:
        left: (n, rows) of each window.
        right: (n, cols) of each window.
        pool: Threads to use; the result does not depend on their number.

    Returns:
        (rows, cols) float32.
    """

    def part(first: int) -> Float32Array:
        return _mean([x[:, first : first + _COLS] for x in left], right)

    return np.concatenate(list(pool.map(part, range(0, left[0].shape[1], _COLS))))


def _mean(left: Sequence[Float32Array], right: Sequence[Float32Array]) -> Float32Array:
    total = sum((a.T @ b for a, b in zip(left, right, strict=True)), np.float32(0))
    return np.asarray(total, np.float32) / np.float32(sum(map(len, left)))


def lacking_outputs(
    weights: Float32Array,
    exact_inputs: Float32Array,
    inputs: Float32Array,
    stream: Float32Array,
    exact_stream: Float32Array,
) -> Float32Array:
    """What the outputs lack and a share of what the stream they are added to lacks already.

    Args:
        weights: (rows, cols).
        exact_inputs: (n, cols) those of the float model.
        inputs: (n, cols) those of the quantised model.
        stream: (n, rows) that of the quantised model.
        exact_stream: (n, rows) that of the float model.

    Returns:
        (n, rows) float32.
    """
    share = np.float32(_STREAM_SHARE)
    return (exact_inputs - inputs) @ weights.T + (exact_stream - stream) * share


def output_error(weights: Float32Array, found: Float32Array, importance: Float32Array) -> float:
    """Squared change of the outputs, all rows together, if no two inputs depend on each other.

    Args:
        weights: (rows, cols).
        found: (rows, cols) what they became.
        importance: (cols,) mean square of each input.
    """
    total = 0.0
    for first in range(0, len(weights), _ROWS):
        rows = slice(first, first + _ROWS)
        per_column = np.square(weights[rows] - found[rows]).sum(axis=0, dtype=np.float64)
        total += float(per_column @ importance)
    return total


def moved_weights(
    weights: Float32Array, moments: Float32Array, missing: Float32Array
) -> Float32Array:
    """Weights whose outputs on the quantised model's inputs are closest to the float model's.

    Args:
        weights: (rows, cols) W.
        moments: (cols, cols) mean of x^T x over the quantised model's inputs x.
        missing: (rows, cols) mean of d^T x, d what W's outputs on these inputs lack.

    Returns:
        (rows, cols) W + missing (moments + damping)^-1.

    Source: the asymmetric calibration of Li et al., GPTAQ, arXiv:2504.02692, by least squares.
    """
    damped = moments.copy()
    diagonal = np.arange(len(damped))
    mean = max(float(moments.diagonal().mean(dtype=np.float64)), 1e-30)
    damped[diagonal, diagonal] += np.float32(_DAMPING * mean)
    moved = weights + np.linalg.solve(damped, missing.T).T
    return np.ascontiguousarray(moved, np.float32)
