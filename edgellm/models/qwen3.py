"""Qwen3 (dense): Qwen2 without biases, with a norm on each head of q and k.

Source: modeling_qwen3.py of transformers; src/models/qwen3.cpp of llama.cpp.
"""

from __future__ import annotations

import dataclasses

from edgellm.models import qwen2

SPEC = dataclasses.replace(
    qwen2.SPEC,
    architecture="qwen3",
    hf_architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    has_qkv_bias=False,
    has_qk_norm=True,
    hf_defaults={**qwen2.SPEC.hf_defaults, "head_dim": 128},
    hf_require={**qwen2.SPEC.hf_require, "attention_bias": (False,)},
)
