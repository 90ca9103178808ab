"""Rotary position embedding: what sources say about it, and the table they all become."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.errors import UnsupportedModelError
from edgellm.models._options import Options, shortest_float
from edgellm.types import Float32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One RoPE: `kind` "default", "linear" (needs factor), "llama3" (needs all) or "factors".

    `factors` (head_dim / 2,) divide the frequencies one by one: a GGUF's form of "llama3".
    """

    theta: float
    kind: str = "default"
    factor: float = 1
    low_freq_factor: float = 1
    high_freq_factor: float = 1
    original_context: float = 1
    factors: tuple[float, ...] = ()

    def to_meta(self) -> dict[str, Any]:
        """As META shows it to people."""
        meta: dict[str, Any] = {"kind": self.kind, "theta": shortest_float(self.theta)}
        if self.kind in ("linear", "llama3"):
            meta["factor"] = shortest_float(self.factor)
        if self.kind == "llama3":
            meta["low_freq_factor"] = shortest_float(self.low_freq_factor)
            meta["high_freq_factor"] = shortest_float(self.high_freq_factor)
            meta["original_context"] = shortest_float(self.original_context)
        return meta


def inverse_frequencies(rope: Rope, head_dim: int) -> Float32Array:
    """The table of a RoPE.

    In float32 as transformers computes it, with the power rounded correctly, so that the table is
    the same whichever C library made it.

    Args:
        rope: what the source says.
        head_dim: size of a head.

    Returns:
        (head_dim / 2,) angles per position, radians.

    Source: `ROPE_INIT_FUNCTIONS` of transformers; "Extending Context Window of Large Language
    Models via Positional Interpolation" (arXiv 2306.15595) for linear scaling.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(float(np.float32(rope.theta)), exponents.astype(np.float64))
    table: Float32Array = np.float32(1) / powers.astype(np.float32)
    if rope.kind == "linear":
        return table / np.float32(rope.factor)
    if rope.kind == "factors":
        factors = np.asarray(rope.factors, dtype=np.float32)
        if factors.shape != table.shape:
            raise UnsupportedModelError(
                f"rope_freqs.weight has {factors.size} factors, head size {head_dim} needs "
                f"{table.size}"
            )
        return table / factors
    return _llama3(rope, table) if rope.kind == "llama3" else table


def _llama3(rope: Rope, table: Float32Array) -> Float32Array:
    """Long wavelengths divided by the factor, short ones kept, those between interpolated."""
    one, factor = np.float32(1), np.float32(rope.factor)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    context = np.float32(rope.original_context)
    wavelength = np.float32(2 * math.pi) / table
    is_long = wavelength > np.float32(rope.original_context / rope.low_freq_factor)
    is_short = wavelength < np.float32(rope.original_context / rope.high_freq_factor)
    smooth = (context / wavelength - low) / np.float32(high - low)
    between = (one - smooth) * table / factor + smooth * table
    result: Float32Array = np.where(is_long, table / factor, np.where(is_short, table, between))
    return result


def read_hf_rope(
    scaling: Mapping[str, Any], *, theta: float, max_context: int, where: str = "rope_parameters"
) -> Rope:
    """One RoPE of a `config.json`.

    Args:
        scaling: `rope_scaling` of older configs, or (one object of) `rope_parameters` of newer.
        theta: the base where `scaling` has none.
        max_context: where a "llama3" scaling has no `original_max_position_embeddings`.
        where: name of the object, for messages.

    Raises:
        UnsupportedModelError: another kind of scaling, or a parameter is missing.
    """
    options = Options(scaling, where=f"config.json: {where}")
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(
            f"config.json: {where} has the RoPE scaling {kind!r}; edgellm supports default, "
            "linear and llama3"
        )
    options.require({"partial_rotary_factor": (1,)})
    base = options.number("rope_theta", theta)
    if kind == "default":
        return Rope(theta=base)
    if kind == "linear":
        return Rope(theta=base, kind=kind, factor=options.number("factor"))
    rope = Rope(
        theta=base,
        kind=kind,
        factor=options.number("factor"),
        low_freq_factor=options.number("low_freq_factor"),
        high_freq_factor=options.number("high_freq_factor"),
        original_context=options.number("original_max_position_embeddings", max_context),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise UnsupportedModelError(
            f"config.json: {where} has high_freq_factor {rope.high_freq_factor}, which must be "
            f"above low_freq_factor {rope.low_freq_factor}"
        )
    return rope


def read_hf_ropes(options: Options) -> tuple[Rope, ...]:
    """The only RoPE of a `config.json`: `rope_theta` and `rope_scaling`, or `rope_parameters`."""
    scaling = options.table("rope_scaling") or options.table("rope_parameters")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedModelError(
            "config.json: rope_parameters has one RoPE per kind of layer; edgellm supports one for "
            "all layers of this architecture"
        )
    rope = read_hf_rope(
        scaling,
        theta=options.number("rope_theta"),
        max_context=options.count("max_position_embeddings"),
    )
    return (rope,)


def read_gguf_rope(options: Options, *, theta: float) -> Rope:
    """The RoPE of GGUF metadata with base `theta`: "none" or "linear" scaling.

    As in llama.cpp a factor without a type is linear, and `rope.scale_linear` its old name.
    """
    factor = options.get("rope.scaling.factor", options.get("rope.scale_linear", None))
    kind = options.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind == "none":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=options.number("rope.scaling.factor", factor))
    raise UnsupportedModelError(
        f"GGUF metadata: rope.scaling.type is {kind!r}; edgellm supports none and linear"
    )
