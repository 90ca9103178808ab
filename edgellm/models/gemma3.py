"""Gemma 3, text: sliding windows in most layers with a RoPE of their own, q/k norm, four norms.

Norms multiply by 1 + w: Hugging Face stores w, GGUF 1 + w. The embedding is scaled by
sqrt(hidden_size), in float32 (transformers rounds it to the weights' type, which at bfloat16 is
another number).

Source: modeling_gemma3.py of transformers; src/models/gemma3.cpp of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from edgellm.models._names import GGUF_NAMES, HF_NAMES
from edgellm.models._options import Options
from edgellm.models._rope import Rope, read_gguf_rope, read_hf_rope
from edgellm.models._spec import Attention, GgufTensors, Layer, ModelSpec, Rewrite

_GLOBAL, _LOCAL = 0, 1
_KINDS = ("full_attention", "sliding_attention")
_NORMS = (
    "final_norm",
    "attn_norm",
    "post_attn_norm",
    "ffn_norm",
    "post_ffn_norm",
    "q_norm",
    "k_norm",
)


def _layers(kinds: list[str], window: int) -> tuple[Layer, ...]:
    layer = {_KINDS[0]: Layer(rope=_GLOBAL), _KINDS[1]: Layer(rope=_LOCAL, window=window)}
    return tuple(layer[kind] for kind in kinds)


def _pattern(num_layers: int, period: int) -> list[str]:
    """Every `period`-th layer attends to everything."""
    return [_KINDS[1] if (i + 1) % period else _KINDS[0] for i in range(num_layers)]


def _hf_attention(options: Options, num_layers: int) -> Attention:
    kinds = options.names("layer_types", num_layers, _KINDS)
    if kinds is None:
        kinds = _pattern(num_layers, options.count("sliding_window_pattern"))
    nested = Options(options.table("rope_parameters"), where="config.json: rope_parameters")
    nested.only(_KINDS)
    none: dict[str, Any] = {}
    scaling = (options.table("rope_scaling"), none)  # the old form is for the global layers alone
    thetas = (options.number("rope_theta"), options.number("rope_local_base_freq"))
    ropes = tuple(
        read_hf_rope(
            {**nested.table(kind), **old},
            theta=theta,
            max_context=options.count("max_position_embeddings"),
            where=f"rope_parameters.{kind}",
        )
        for kind, old, theta in zip(_KINDS, scaling, thetas, strict=True)
    )
    return Attention(ropes=ropes, layers=_layers(kinds, options.count("sliding_window")))


def _gguf_attention(options: Options, num_layers: int, tensors: GgufTensors) -> Attention:
    # llama.cpp: a period of 6 and a local base of 10,000 where the file does not say; the scaling
    # is for the global layers alone.
    period = options.count("attention.sliding_window_pattern", 6)
    kinds = _pattern(num_layers, period)
    ropes = (
        read_gguf_rope(options, theta=options.number("rope.freq_base")),
        Rope(theta=options.number("rope.freq_base_swa", 10_000.0)),
    )
    return Attention(ropes=ropes, layers=_layers(kinds, options.count("attention.sliding_window")))


def _gguf_query_scalar(options: Options, head_dim: int) -> int:
    # No key holds it. llama.cpp knows the 27B model, the only one where it is not the head size,
    # by its 62 layers.
    if options.count("block_count") == 62:
        return options.count("embedding_length") // options.count("attention.head_count")
    return head_dim


SPEC = ModelSpec(
    architecture="gemma3",
    hf_architectures=("Gemma3ForCausalLM",),
    gguf_architectures=("gemma3",),
    activation="gelu_tanh",
    has_qk_norm=True,
    has_post_norms=True,
    is_embedding_scaled=True,
    hf_names={
        **HF_NAMES,
        "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "ffn_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "post_ffn_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    },
    gguf_names=GGUF_NAMES,
    hf_defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    hf_query_scalar="query_pre_attn_scalar",
    gguf_query_scalar=_gguf_query_scalar,
    hf_rewrites=dict.fromkeys(_NORMS, Rewrite.ADD_ONE),
    hf_require={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
        "use_bidirectional_attention": (False,),
    },
    gguf_require={"attn_logit_softcapping": (), "final_logit_softcapping": ()},
    hf_attention=_hf_attention,
    gguf_attention=_gguf_attention,
)
