"""The Hadamard transform that spreads what towers among a matrix's inputs over its neighbours.

Inputs x become x T and weights W become W T', block by block, with T T'^T = 1: products stay what
they are, but one int8 scale serves a whole superblock of the inputs. The runtime's counterpart is
`native/src/kernels/hadamard.inl`.

Source: Ashkboos et al., QuaRot, arXiv:2404.00456.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import numpy as np

from edgellm.format.spec import GROUP_COLS, SUPERBLOCK_COLS
from edgellm.models._spec import ModelDescription
from edgellm.types import Float32Array

_ROWS: Final = 4096  # transformed at a time


def can_transform(description: ModelDescription) -> bool:
    """Whether all matrices of a model have columns that fall into blocks."""
    attended = description.num_heads * description.head_dim
    widths = (description.hidden_size, description.ffn_size, attended)
    return all(width % GROUP_COLS == 0 for width in widths)


def blocks(cols: int) -> list[tuple[int, int, int]]:
    """What is transformed together: of each superblock its first column, its width and its blocks'.

    A block is the largest power of two that divides the superblock's width.
    """
    widths = [min(SUPERBLOCK_COLS, cols - first) for first in range(0, cols, SUPERBLOCK_COLS)]
    return [(i * SUPERBLOCK_COLS, width, width & -width) for i, width in enumerate(widths)]


def transform(x: Float32Array, out: Float32Array | None = None) -> Float32Array:
    """Inputs transformed, or transformed weights as they were.

    Args:
        x: (n, cols), cols a multiple of 32.
        out: (n, cols) where to put the result, `x` itself if it is not needed; None: a new array.

    Returns:
        (n, cols) float32.
    """
    return _apply(x, out, of_weights=False)


def transform_weights(weights: Float32Array, out: Float32Array | None = None) -> Float32Array:
    """Weights whose products with transformed inputs are those of `weights` with plain inputs.

    Args:
        weights: (rows, cols), cols a multiple of 32.
        out: As for `transform`.

    Returns:
        (rows, cols) float32.
    """
    return _apply(weights, out, of_weights=True)


def transform_layer(layer: Mapping[str, Float32Array]) -> dict[str, Float32Array]:
    """A layer's canonical tensors with all its matrices as by `transform_weights`."""
    return {k: transform_weights(v) if v.ndim == 2 else v for k, v in layer.items()}


def mean_squares(squares: Float32Array) -> Float32Array:
    """Mean squares of transformed inputs, of those of inputs that do not depend on each other."""
    out = np.empty_like(squares)
    for first, width, block in blocks(len(squares)):
        matrix = np.square(matrix_of(block))
        part = squares[first : first + width].reshape(-1, block)
        out[first : first + width] = (part @ matrix).reshape(-1)
    return out


@functools.cache
def matrix_of(block: int, *, of_weights: bool = False) -> Float32Array:
    """(block, block): T of inputs, or T' of weights. Their elements are powers of two."""
    halvings = block.bit_length() - 1
    matrix = np.ones((1, 1), np.float32)
    for _ in range(halvings):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * np.float32(0.5 ** ((halvings + of_weights) // 2))


def _apply(x: Float32Array, out: Float32Array | None, *, of_weights: bool) -> Float32Array:
    out = np.empty_like(x) if out is None else out
    for start in range(0, len(x), _ROWS):
        rows = slice(start, start + _ROWS)
        for first, width, block in blocks(x.shape[1]):
            cols = slice(first, first + width)
            part = np.ascontiguousarray(x[rows, cols]).reshape(-1, block)
            done = part @ matrix_of(block, of_weights=of_weights)
            out[rows, cols] = done.reshape(-1, width)
    return out
