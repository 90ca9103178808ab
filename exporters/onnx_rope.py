"""RoPE as an ONNX graph has it: frequencies under a cosine, or caches of cosines and sines.

Hidden values do not pass through them, so that no weight tells whether they are those of the
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from edgellm.errors import FormatError
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_match import Decoder
from edgellm.exporters.onnx_ops import MICROSOFT
from edgellm.exporters.onnx_types import DOUBLE, OnnxTensor
from edgellm.exporters.onnx_walk import constants_before
from edgellm.exporters.onnx_weights import Dense
from edgellm.models import ModelDescription
from edgellm.types import Float32Array

__all__ = ["check_rope", "rope_base"]

_CACHES: Final[Mapping[tuple[str, str], tuple[int, int]]] = {  # inputs: cosines, sines
    ("", "RotaryEmbedding"): (1, 2),
    (MICROSOFT, "RotaryEmbedding"): (2, 3),
    (MICROSOFT, "GroupQueryAttention"): (7, 8),
}


def check_rope(file: OnnxModelFile, decoder: Decoder, description: ModelDescription) -> None:
    """Compares the frequencies that the graph turns positions by with the configuration's.

    Args:
        file: The model.
        decoder: What its graph holds.
        description: The configuration's model.

    Raises:
        FormatError: The graph has others, lacks some, or has none that are found.
    """
    found = dict(_frequencies(file, description.head_dim // 2))
    for number, layer in enumerate(decoder.layers):
        wanted = description.inv_freqs[description.layers[number].rope]
        for what, name in zip(("queries", "keys"), layer.attention.turned, strict=True):
            if name not in found:
                raise FormatError(
                    f"{file.path}: the {what} of layer {number} are not turned by RoPE, or not in "
                    "a way that edgellm knows"
                )
            if not _is_alike(found[name], wanted):
                raise FormatError(
                    f"{file.path}: layer {number} has {len(found[name])} frequencies of RoPE down "
                    f"to {found[name][-1]:.4g}, its configuration says {len(wanted)} down to "
                    f"{wanted[-1]:.4g}: they do not belong together, or what exported the model "
                    "did not understand its rope_parameters"
                )


def _is_alike(found: Float32Array, wanted: Float32Array) -> bool:
    # Halves and bfloat16 hold two digits or three, and the smallest halves are multiples of 6e-8.
    return found.shape == wanted.shape and np.allclose(found, wanted, rtol=5e-3, atol=1e-7)


def rope_base(cos: Float32Array, sin: Float32Array, *, is_half: bool) -> float | None:
    """The base that plain RoPE's caches were made with.

    Args:
        cos: (positions, head size / 2) cosines.
        sin: The same of sines.
        is_half: They were rounded to 16 bits.

    Returns:
        The shortest number that gives these caches; None if they are those of a scaled RoPE.
    """
    positions, half = cos.shape
    if positions < 2 or half < 2:
        return None
    # The slowest pair tells most; at the last position a half has digits enough, if it is not past
    # one turn by then.
    candidates = []
    for position in (1, positions - 1):
        angle = math.atan2(sin[position, -1], cos[position, -1]) / position
        if 0 < angle < 1:
            base = angle ** (-half / (half - 1))
            candidates += [float(f"{base:.{digits}g}") for digits in (1, 2, 3, 5, 7)]
    # Caches are computed in float32: an angle is off by half a digit of its position.
    tolerance = 4e-7 * positions + (1e-3 if is_half else 1e-6)
    rows = np.unique(np.linspace(1, positions - 1, 64, dtype=np.int64))
    for base in sorted(candidates, key=lambda base: len(f"{base:g}".rstrip("0"))):
        angles = rows[:, None] * base ** (-np.arange(half) / half)
        if all(
            np.abs(table[rows] - function(angles)).max() <= tolerance
            for table, function in ((cos, np.cos), (sin, np.sin))
        ):
            return base
    return None


def _frequencies(file: OnnxModelFile, count: int) -> Iterator[tuple[str, Float32Array]]:
    """What turns, as `Value` names it, and by how many radians a position.

    (count,) of angles, of caches as many as they have.
    """
    makers = {name: node for node in file.graph.nodes for name in node.outputs}
    sizes = count, 2 * count
    for node in file.graph.nodes:
        kind = node.domain, node.op
        if kind == ("", "Cos"):
            for tensor in constants_before(file, makers, node.inputs[:1]):
                if math.prod(tensor.shape) in sizes:
                    found = _row(file, tensor, (1, math.prod(tensor.shape)), 0)
                    if _is_falling(found[:count]) and np.isin(found, found[:count]).all():
                        yield node.inputs[0], found[:count]
        elif kind in _CACHES:
            if node.op == "GroupQueryAttention" and not node.integer("do_rotary", 0):
                continue
            rows = [
                _row(file, tensor, tensor.shape, 1)
                for index in _CACHES[kind]
                for tensor in constants_before(file, makers, node.inputs[index : index + 1])
                if len(tensor.shape) > 1 and math.prod(tensor.shape[:-1]) > 1
            ]
            if len(rows) == len(_CACHES[kind]) and len(rows[0]) == len(rows[1]):
                yield node.outputs[0], np.arctan2(rows[1], rows[0])


def _row(
    file: OnnxModelFile, tensor: OnnxTensor, shape: tuple[int, ...], number: int
) -> Float32Array:
    """A row of a constant, seen as (..., cols)."""
    flat = math.prod(shape[:-1]), shape[-1]
    if tensor.type == DOUBLE:
        return np.asarray(file.array(tensor).reshape(flat)[number], np.float32)
    whole = Dense(file=file, tensor=tensor, shape=flat, stored=flat)
    return whole.rows(number, 1).reshape(-1)


def _is_falling(values: Float32Array) -> bool:
    return bool(np.isfinite(values).all() and (values > 0).all() and (np.diff(values) <= 0).all())
