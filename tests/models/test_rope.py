"""RoPE tables are those of transformers (bug case B31)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgellm.models._reference import _rotation
from edgellm.models._rope import Rope, inverse_frequencies
from edgellm.types import Float32Array

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 12_345.6)


def transformers_table(head_dim: int, parameters: dict[str, Any]) -> Float32Array:
    pytest.importorskip("torch", reason="transformers needs torch")
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=parameters
    )
    table: Float32Array = LlamaRotaryEmbedding(config).inv_freq.numpy()
    return table


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_tables_equal_those_of_transformers(head_dim: int, theta: float) -> None:
    """At most one unit in the last place apart, where torch's power rounds the other way."""
    ours = inverse_frequencies(Rope(theta=theta), head_dim)
    theirs = transformers_table(head_dim, {"rope_type": "default", "rope_theta": theta})
    assert ours.dtype == np.float32
    np.testing.assert_array_max_ulp(ours, theirs, 1)
    assert (ours == theirs).mean() > 0.9


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_tables_equal_those_of_transformers(theta: float, factor: float) -> None:
    ours = inverse_frequencies(
        Rope(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context=8192,
        ),
        128,
    )
    theirs = transformers_table(
        128,
        {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    np.testing.assert_allclose(ours, theirs, rtol=5e-7)
    unscaled = inverse_frequencies(Rope(theta=theta), 128)
    assert (ours[:8] == unscaled[:8]).all()
    np.testing.assert_allclose(ours[-4:], unscaled[-4:] / factor, rtol=1e-7)


def test_linear_tables_equal_those_of_transformers() -> None:
    ours = inverse_frequencies(Rope(theta=1e4, kind="linear", factor=3.0), 64)
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    np.testing.assert_array_max_ulp(ours, transformers_table(64, parameters), 1)


def test_angles_are_taken_in_double() -> None:
    """At position 100,000 a float32 angle would be wrong in the third digit of its cosine."""
    inv_freq = inverse_frequencies(Rope(theta=1e4), 64)
    cos, sin = _rotation(np.array([0, 1, 100_000]), inv_freq)
    angle = 100_000 * inv_freq.astype(np.float64)
    assert cos.shape == sin.shape == (3, 1, 32)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    assert (cos[2, 0] == np.cos(angle).astype(np.float32)).all()
    assert (sin[2, 0] == np.sin(angle).astype(np.float32)).all()
