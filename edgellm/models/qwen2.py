"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v.

Source: modeling_qwen2.py of transformers; src/models/qwen2.cpp of llama.cpp. GGUFs hold q and k as
they are.
"""

from __future__ import annotations

from edgellm.models._names import GGUF_NAMES, HF_NAMES
from edgellm.models._options import Options
from edgellm.models._rope import read_gguf_rope, read_hf_ropes
from edgellm.models._spec import Attention, GgufTensors, Layer, ModelSpec


def hf_attention(options: Options, num_layers: int) -> Attention:
    """Sliding windows only with `use_sliding_window`: by `layer_types`, or in the upper layers."""
    kinds = options.names("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if not options.flag("use_sliding_window"):
        kinds = ["full_attention"] * num_layers
    elif kinds is None:
        first = options.count("max_window_layers", minimum=0)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    window = options.count("sliding_window") if "sliding_attention" in kinds else 0
    layers = tuple(Layer(window=window if kind == "sliding_attention" else 0) for kind in kinds)
    return Attention(ropes=read_hf_ropes(options), layers=layers)


def gguf_attention(options: Options, num_layers: int, tensors: GgufTensors) -> Attention:
    """One RoPE and no windows."""
    rope = read_gguf_rope(options, theta=options.number("rope.freq_base"))
    return Attention(ropes=(rope,), layers=(Layer(),) * num_layers)


SPEC = ModelSpec(
    architecture="qwen2",
    hf_architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    activation="silu",
    has_qkv_bias=True,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    hf_defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    hf_require={"hidden_act": ("silu",), "partial_rotary_factor": (1,)},
    gguf_require={"attention.sliding_window": (0,)},
    hf_attention=hf_attention,
    gguf_attention=gguf_attention,
)
