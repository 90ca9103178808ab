"""Llama: Llama 1 to 3.2, SmolLM2, and everything else that says LlamaForCausalLM.

Source: modeling_llama.py of transformers; src/models/llama.cpp of llama.cpp. A GGUF with the
architecture "llama" holds q and k with their rows permuted for interleaved RoPE, and Llama 3's
RoPE scaling as the table `rope_freqs.weight`. Mistral's GGUFs are "llama" as well.
"""

from __future__ import annotations

from edgellm.models._names import GGUF_NAMES, HF_NAMES
from edgellm.models._options import Options
from edgellm.models._rope import Rope, read_gguf_rope, read_hf_ropes
from edgellm.models._spec import Attention, GgufTensors, Layer, ModelSpec, Rewrite


def _hf_attention(options: Options, num_layers: int) -> Attention:
    layers = (Layer(),) * num_layers
    return Attention(ropes=read_hf_ropes(options), layers=layers)


def _gguf_attention(options: Options, num_layers: int, tensors: GgufTensors) -> Attention:
    # 10,000 is what llama.cpp assumes: files of Llama 1 and 2 do not have the key.
    theta = options.number("rope.freq_base", 10_000.0)
    rope = read_gguf_rope(options, theta=theta)
    if "rope_freqs.weight" in tensors.shapes:
        table = tensors.read("rope_freqs.weight").reshape(-1)
        factors = tuple((table * rope.factor).tolist())
        rope = Rope(theta=theta, kind="factors", factors=factors)
    return Attention(ropes=(rope,), layers=(Layer(),) * num_layers)


SPEC = ModelSpec(
    architecture="llama",
    hf_architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    activation="silu",
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    # num_key_value_heads defaults to num_attention_heads and head_dim to hidden_size / heads.
    hf_defaults={"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False},
    hf_require={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1,),
    },
    gguf_require={"attention.sliding_window": (0,)},
    gguf_ignorable=("rope_freqs.weight",),
    gguf_rewrites={"q": Rewrite.UNPERMUTE, "k": Rewrite.UNPERMUTE},
    hf_attention=_hf_attention,
    gguf_attention=_gguf_attention,
)
