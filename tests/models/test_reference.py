"""The reference computes what transformers computes, for every architecture.

Both are float32 and add in different orders. Logits of the tiny models have a spread of about 1;
1e-4 of their largest is some twenty times what is seen, and a thousandth of what any mistake makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgellm.models._reference import ReferenceCache, ReferenceModel, round_q8
from edgellm.models._rope import Rope, inverse_frequencies
from edgellm.types import Float32Array

BOUND = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, linear scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ),
    "llama, head size not hidden/heads": ("Llama", {"head_dim": 48, "rms_norm_eps": 1e-3}),
    "mistral, window 8": ("Mistral", {"sliding_window": 8}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in the upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 tied, window by layer_types": (
        "Qwen3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 256,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3, pattern, query scale of its own, untied": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 100,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3, global RoPE scaled": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def difference(ours: Float32Array, theirs: Float32Array) -> float:
    """Largest difference, as a share of the largest logit."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(
    name: str, make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]
) -> None:
    family, options = CASES[name]
    pair = make_pair(family, **options)
    assert difference(pair.reference().forward(ids), pair.oracle(ids)) < BOUND


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (14, 2), (5, 5), (7, 1)])
def test_query_heads_find_their_key_value_head(
    heads: int, kv_heads: int, make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]
) -> None:
    pair = make_pair(
        "Llama",
        hidden_size=heads * 8,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=50,
    )
    assert difference(pair.reference().forward(ids), pair.oracle(ids)) < BOUND


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_a_sliding_window_ends_where_transformers_ends_it(
    family: str, make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]
) -> None:
    """Window 8, lengths 7 to 17, prefilled at once and split at every place (bug case B30)."""
    pair = make_pair(family, head_dim=16, sliding_window=8)
    reference = pair.reference()
    for length in range(7, 18):
        theirs = pair.oracle(ids[:length])
        assert difference(reference.forward(ids[:length]), theirs) < BOUND
        for split in range(1, length):
            past = ReferenceCache(pair.description)
            reference.forward(ids[:split], past)
            rest = reference.forward(ids[split:length], past)
            assert difference(rest, theirs[split:]) < BOUND


@pytest.mark.parametrize("name", ["llama, llama3 scaling", "qwen2", "qwen3", "gemma3"])
def test_prefill_and_decode_give_what_one_pass_gives(
    name: str, make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]
) -> None:
    family, options = CASES[name]
    pair = make_pair(family, **options)
    reference = pair.reference()
    past = ReferenceCache(pair.description)
    pieces = [reference.forward(ids[:19], past)]
    pieces += [reference.forward([token], past) for token in ids[19:]]
    assert past.num_tokens == len(ids)
    assert difference(np.concatenate(pieces), pair.oracle(ids)) < BOUND


def test_queries_are_attended_in_blocks_without_a_seam(make_pair: Callable[..., Any]) -> None:
    pair = make_pair("Mistral", sliding_window=100, num_hidden_layers=1)
    ids = np.random.default_rng(1).integers(0, 131, 300)
    assert difference(pair.reference().forward(ids), pair.oracle(ids)) < BOUND


def test_llama3_scaling_holds_at_long_positions(make_pair: Callable[..., Any]) -> None:
    """Position 8,192 and beyond (bug case B31), end to end.

    transformers multiplies position and frequency in float32, which at 8,192 is wrong by up to
    2.4e-4 radians; hence the wider bound. Without the scaling the difference is 100 times that.
    """
    pair = make_pair(
        "Llama",
        rope_parameters={**LLAMA3, "original_max_position_embeddings": 1024},
        max_position_embeddings=16_384,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    pair.model.set_attn_implementation("sdpa")
    ids = np.random.default_rng(2).integers(0, 131, 8208)
    theirs = pair.oracle(ids)[-16:]
    assert difference(_last(pair.reference(), ids), theirs) < 1e-3
    table = inverse_frequencies(Rope(theta=LLAMA3["rope_theta"]), pair.description.head_dim)
    unscaled = dataclasses.replace(pair.description, inv_freqs=(table,))
    wrong = ReferenceModel(unscaled, pair.tensors.__getitem__)
    assert difference(_last(wrong, ids), theirs) > 0.1


def _last(reference: ReferenceModel, ids: npt.NDArray[np.int_]) -> Float32Array:
    return reference.logits(reference.hidden(ids)[-16:])


@pytest.mark.parametrize("wrong", [[], [-1], [131]])
def test_ids_outside_the_vocabulary_are_refused(
    wrong: list[int], make_pair: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="ids must be 0 to 130"):
        make_pair("Llama").reference().forward(wrong)


def test_a_dropped_bias_shows(make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]) -> None:
    """Bug case B33: Qwen2 without its q, k and v biases still talks, wrongly."""
    pair = make_pair("Qwen2")
    theirs = pair.oracle(ids)
    for role in ("q_bias", "k_bias", "v_bias"):
        dropped = {
            name: np.zeros_like(array) if name.endswith(role) else array
            for name, array in pair.tensors.items()
        }
        reference = ReferenceModel(pair.description, dropped.__getitem__)
        assert difference(reference.forward(ids), theirs) > 10 * BOUND


def test_activations_near_the_float16_limit_stay_finite(
    make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]
) -> None:
    """Bug case B37: norm weights 200 times too large; Gemma's residual passes 65,504."""
    pair = make_pair("Gemma3", head_dim=32, sliding_window=8)
    large = {
        name: array * np.float32(200) if "post_" in name else array
        for name, array in pair.tensors.items()
    }
    reference = ReferenceModel(pair.description, large.__getitem__)
    assert np.abs(reference.hidden(ids)).max() > 0
    assert np.isfinite(reference.forward(ids)).all()


def test_int8_activations_are_within_half_a_step() -> None:
    x = np.random.default_rng(3).standard_normal((5, 600)).astype(np.float32)
    x[2] = 0
    rounded = round_q8(x)
    for start in (0, 256, 512):
        block, ours = x[:, start : start + 256], rounded[:, start : start + 256]
        step = np.abs(block).max(axis=1, keepdims=True) / 127
        assert (np.abs(block - ours) <= step * 0.5001).all()
    assert (rounded[2] == 0).all()


def test_what_the_runtime_rounds_moves_logits_a_little(
    make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]
) -> None:
    pair = make_pair("Qwen2")
    exact = pair.reference().forward(ids)
    assert 1e-6 < difference(pair.reference(kv="float16").forward(ids), exact) < 5e-3
    assert 1e-4 < difference(pair.reference(activations="q8").forward(ids), exact) < 0.1
