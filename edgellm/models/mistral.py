"""Mistral: Llama with a sliding window in every layer. Its GGUFs have the architecture "llama".

Source: modeling_mistral.py of transformers.
"""

from __future__ import annotations

import dataclasses

from edgellm.models import llama
from edgellm.models._options import Options
from edgellm.models._rope import read_hf_ropes
from edgellm.models._spec import Attention, Layer


def _hf_attention(options: Options, num_layers: int) -> Attention:
    # A null is no window and an absent key is MistralConfig's 4,096; Mistral 0.1 has the key.
    window = 0 if options.is_null("sliding_window") else options.count("sliding_window", 4096)
    layer = Layer(window=window)
    return Attention(ropes=read_hf_ropes(options), layers=(layer,) * num_layers)


SPEC = dataclasses.replace(
    llama.SPEC,
    architecture="mistral",
    hf_architectures=("MistralForCausalLM",),
    gguf_architectures=(),
    hf_defaults={**llama.SPEC.hf_defaults, "num_key_value_heads": 8},
    hf_require={**llama.SPEC.hf_require, "layer_types": ()},
    hf_attention=_hf_attention,
)
