"""Activation equalisation: channels that tower over their neighbours are made smaller, for free.

Activations are int8 with one scale for 256 channels. A factor per channel moves from a norm, from
v's rows or from up's rows into the columns of the next matrix; in exact arithmetic nothing changes.

Source: Xiao et al., SmoothQuant, arXiv:2211.10438.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgellm.models import ModelDescription
from edgellm.types import Float32Array

__all__ = ["ALPHAS", "Alphas", "equalize_attention", "equalize_ffn", "equalizing_factors"]

_SMALLEST: Final = 1e-4  # of the largest channel: a channel that is never used is not blown up


@dataclass(frozen=True, slots=True, kw_only=True)
class Alphas:
    """How far each kind of input is equalised: 0 not at all, 1 to the same size everywhere."""

    qkv: float = 0.0
    o: float = 0.0
    gate_up: float = 0.0
    down: float = 0.0
    head: float = 0.0


ALPHAS: Final = Alphas(qkv=0.5, o=0.3, gate_up=0.5, down=0.5, head=0.3)


def equalizing_factors(
    kind: str, squares: Float32Array, alphas: Alphas, description: ModelDescription
) -> Float32Array:
    """What each channel of a matrix's input is divided by, (root mean square)^alpha.

    Args:
        kind: "qkv", "o", "gate_up", "down" or "head".
        squares: (cols,) mean square of each channel.
        alphas: How far.
        description: The model.

    Returns:
        (cols,) float32 with a geometric mean of 1.
    """
    alpha: float = getattr(alphas, kind)
    if kind == "o":  # heads that share a value head share its channels' factors
        shape = (description.num_kv_heads, -1, description.head_dim)
        shared = squares.reshape(shape).mean(axis=1, keepdims=True)
        squares = np.broadcast_to(shared, squares.reshape(shape).shape).reshape(-1)
    size = np.sqrt(squares.astype(np.float64))
    size = np.maximum(size, max(float(size.max()) * _SMALLEST, 1e-30))
    log = alpha * np.log(size)
    return np.asarray(np.exp(log - log.mean()), np.float32)


def equalize_attention(
    layer: Mapping[str, Float32Array],
    squares: Mapping[str, Float32Array],
    alphas: Alphas,
    description: ModelDescription,
) -> dict[str, Float32Array]:
    """Equalises the inputs of q, k, v and of o.

    Args:
        layer: The layer's canonical tensors by role.
        squares: Mean square of each channel of the inputs "qkv" and "o".
        alphas: How far.
        description: The model.

    Returns:
        The tensors that change, by role.
    """
    factor = equalizing_factors("qkv", squares["qkv"], alphas, description)
    changed = {role: layer[role] * factor for role in ("q", "k", "v")}
    changed["attn_norm"] = layer["attn_norm"] / factor
    factor = equalizing_factors("o", squares["o"], alphas, description)
    changed["o"] = layer["o"] * factor
    per_group = factor.reshape(description.num_kv_heads, -1, description.head_dim)
    of_values = per_group[:, 0].reshape(-1)
    changed["v"] = changed["v"] / of_values[:, None]
    if description.has_qkv_bias:
        changed["v_bias"] = layer["v_bias"] / of_values
    return changed


def equalize_ffn(
    layer: Mapping[str, Float32Array],
    squares: Mapping[str, Float32Array],
    alphas: Alphas,
    description: ModelDescription,
) -> dict[str, Float32Array]:
    """Equalises the inputs of gate, up and of down; as `equalize_attention`."""
    factor = equalizing_factors("gate_up", squares["gate_up"], alphas, description)
    changed = {role: layer[role] * factor for role in ("gate", "up")}
    changed["ffn_norm"] = layer["ffn_norm"] / factor
    factor = equalizing_factors("down", squares["down"], alphas, description)
    changed["up"] = changed["up"] / factor[:, None]
    changed["down"] = layer["down"] * factor
    return changed
