"""The native engine computes the model that the reference computes.

What may differ is what the runtime rounds: int8 activations and its KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import ARCHITECTURES

from edgellm import LLM
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array

# More tokens than the sliding window of the tiny Gemma (16), and more than two blocks of the cache.
IDS = [3 + 7 * i % 300 for i in range(75)]
KL_BOUND = 0.003  # nats a token; 0.0002 to 0.0007 when written


def mean_kl(expected: Float32Array, got: Float32Array) -> float:
    def log_softmax(logits: Float32Array) -> np.ndarray:
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    p, q = log_softmax(expected), log_softmax(got)
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=1)))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "mixed", "transformed"])
def test_logits_are_those_of_the_reference(
    architecture: str, tiny_edge_of: Callable[[str], Path], report: Callable[[str], None]
) -> None:
    path = tiny_edge_of(architecture)
    model = ReferenceModel.from_edge(path)
    known = model.description.num_tokens
    expected = model.forward(IDS)[:, :known]
    with LLM(path) as llm:
        got = llm.logits(IDS)
    assert np.isneginf(got[:, known:]).all()
    kl = mean_kl(expected, got[:, :known])
    report(f"KL of native from float, tiny {architecture}: {kl:.2g} nats/token")
    assert kl <= KL_BOUND
