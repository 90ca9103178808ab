"""File tensors and canonical tensors turn into one another without loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgellm.models import (
    ModelDescription,
    canonical_shapes,
    file_shapes,
    find_hf,
    fuse,
    fused_parts,
    interleave_gate_up,
    unfuse,
)
from edgellm.types import Float32Array

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "sliding_window": 8,
}


def describe(architecture: str, **changes: Any) -> ModelDescription:
    config = {**CONFIG, "architectures": [architecture], **changes}
    return find_hf(config).model_from_hf(config)


def test_names_and_shapes_are_those_of_the_architecture_document() -> None:
    shapes = file_shapes(describe("Gemma3ForCausalLM", tie_word_embeddings=False))
    layer = {
        name.removeprefix("layers.1."): shape
        for name, shape in shapes.items()
        if name.startswith("layers.1.")
    }
    assert layer == {
        "attn_norm": (1, 64),
        "qkv": (256, 64),
        "q_norm": (1, 32),
        "k_norm": (1, 32),
        "o": (64, 128),
        "post_attn_norm": (1, 64),
        "ffn_norm": (1, 64),
        "gate_up": (160, 64),
        "down": (64, 72),
        "post_ffn_norm": (1, 64),
    }
    outer = {name: shape for name, shape in shapes.items() if not name.startswith("layers.")}
    assert outer == {
        "embed": (131, 64),
        "head": (131, 64),
        "final_norm": (1, 64),
        "rope.0.inv_freq": (1, 16),
        "rope.1.inv_freq": (1, 16),
    }
    qwen = file_shapes(describe("Qwen2ForCausalLM"))
    assert qwen["layers.0.qkv_bias"] == (1, 256)
    assert "head" not in file_shapes(describe("LlamaForCausalLM", tie_word_embeddings=True))


def test_gate_and_up_alternate_by_panels_of_16_rows() -> None:
    gate = np.arange(1, 25, dtype=np.float32)[:, None]
    both = interleave_gate_up(gate, -gate)[:, 0]
    assert both.shape == (64,)
    assert (both[:16] == np.arange(1, 17)).all()
    assert (both[16:32] == -np.arange(1, 17)).all()
    assert (both[32:40] == np.arange(17, 25)).all()
    assert (both[40:48] == 0).all()
    assert (both[48:56] == -np.arange(17, 25)).all()
    assert (both[56:] == 0).all()


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"],
)
def test_what_is_fused_comes_apart_again(architecture: str) -> None:
    model = describe(architecture, tie_word_embeddings=False)
    random = np.random.default_rng(0)
    tensors: dict[str, Float32Array] = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in canonical_shapes(model).items()
    }
    parts = fused_parts(model)
    assert sorted(part for group in parts.values() for part in group) == sorted(tensors)
    fused = {name: fuse(name, [tensors[part] for part in group]) for name, group in parts.items()}
    ropes = {f"rope.{j}.inv_freq": table[None] for j, table in enumerate(model.inv_freqs)}
    assert {name: array.shape for name, array in (fused | ropes).items()} == file_shapes(model)
    get = unfuse(model, fused.__getitem__)
    for name, array in tensors.items():
        assert get(name).shape == array.shape
        assert (get(name) == array).all()
