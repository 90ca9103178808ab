"""Between canonical (unfused) tensors and the tensors of an `.edge` file.

The file holds q, k and v as one matrix, and gate and up as one with their rows interleaved by
panels of 16, so that one step computes them together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.format.spec import PANEL_ROWS
from edgellm.models._spec import ModelDescription, Rewrite, canonical_shapes
from edgellm.types import Float32Array, round_up

_FUSED = {
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "q_bias": "qkv_bias",
    "k_bias": "qkv_bias",
    "v_bias": "qkv_bias",
    "gate": "gate_up",
    "up": "gate_up",
}


def fused_parts(description: ModelDescription) -> dict[str, tuple[str, ...]]:
    """File tensors of a model and the canonical tensors each is made of, in order.

    The RoPE tables are not among them: they are `description.inv_freqs`.
    """
    parts: dict[str, tuple[str, ...]] = {}
    for canonical in canonical_shapes(description):
        prefix, _, role = canonical.rpartition(".")
        name = f"{prefix}.{_FUSED[role]}" if role in _FUSED else canonical
        parts[name] = (*parts.get(name, ()), canonical)
    return parts


def fuse(name: str, parts: list[Float32Array]) -> Float32Array:
    """One tensor of the file.

    Args:
        name: its name in the file, such as "layers.0.qkv".
        parts: the canonical tensors of `fused_parts`, in that order.

    Returns:
        (rows, cols) float32; a vector becomes (1, n).
    """
    if name.endswith(".gate_up"):
        return interleave_gate_up(*parts)
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0)
    return whole.reshape(1, -1) if whole.ndim == 1 else whole


def interleave_gate_up(gate: Float32Array, up: Float32Array) -> Float32Array:
    """16 rows of gate, 16 of up, and so on.

    Args:
        gate: (ffn, hidden).
        up: (ffn, hidden).

    Returns:
        (2 * round_up(ffn, 16), hidden); rows past ffn are zero.
    """
    ffn, hidden = gate.shape
    out = np.zeros((2, round_up(ffn, PANEL_ROWS), hidden), dtype=np.float32)
    out[0, :ffn] = gate
    out[1, :ffn] = up
    panels = out.reshape(2, -1, PANEL_ROWS, hidden)
    return np.ascontiguousarray(panels.swapaxes(0, 1)).reshape(-1, hidden)


def file_shapes(description: ModelDescription) -> dict[str, tuple[int, int]]:
    """All tensors of a model's file, RoPE tables included: name to (rows, cols)."""
    shapes = canonical_shapes(description)
    result = {}
    for name, parts in fused_parts(description).items():
        rows = [round_up(shapes[part][0], PANEL_ROWS) for part in parts]
        if not name.endswith(".gate_up"):
            rows = [shapes[part][0] for part in parts]
        is_vector = len(shapes[parts[0]]) == 1
        result[name] = (1, sum(rows)) if is_vector else (sum(rows), shapes[parts[0]][1])
    for number in range(description.num_ropes):
        result[f"rope.{number}.inv_freq"] = (1, description.head_dim // 2)
    return result


def unfuse(
    description: ModelDescription, read: Callable[[str], Float32Array]
) -> Callable[[str], Float32Array]:
    """Canonical tensors out of those of a file.

    Args:
        description: the model.
        read: returns a file tensor, (rows, cols) float32.

    Returns:
        A function from canonical name to tensor, (rows, cols) or (n,). It reads the file tensor
        at each call; a part of a fused tensor is a copy, so that the whole can go.
    """
    shapes = canonical_shapes(description)
    origin = {
        part: (name, parts) for name, parts in fused_parts(description).items() for part in parts
    }

    def get(canonical: str) -> Float32Array:
        name, parts = origin[canonical]
        whole = read(name)
        shape = shapes[canonical]
        if name.endswith(".gate_up"):
            panels = whole.reshape(-1, 2, PANEL_ROWS, shape[1])
            return panels[:, parts.index(canonical)].reshape(-1, shape[1])[: shape[0]]
        if len(shape) == 1:
            whole = whole.reshape(-1)
        if len(parts) == 1:
            return whole
        start = sum(shapes[part][0] for part in parts[: parts.index(canonical)])
        return whole[start : start + shape[0]].copy()

    return get


def apply_rewrite(
    rewrite: Rewrite, array: Float32Array, description: ModelDescription
) -> Float32Array:
    """Applies a constant rewrite to a source tensor, or to whole heads of its rows.

    Args:
        rewrite: what to do.
        array: the source tensor, float32; for UNPERMUTE (heads * head_dim, cols).
        description: the model it belongs to.

    Returns:
        The canonical tensor, of the same shape; `array` itself if there is nothing to do.

    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, of which UNPERMUTE is the
    inverse.
    """
    if rewrite is Rewrite.ADD_ONE:
        return array + np.float32(1)
    if rewrite is Rewrite.UNPERMUTE:
        pairs = array.reshape(-1, description.head_dim // 2, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
    return array
