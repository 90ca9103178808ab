"""The JSON files beside an ONNX model, in Hugging Face's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from edgellm.errors import UnsupportedModelError
from edgellm.models import ModelDescription, ModelSpec
from edgellm.models._options import shortest_float
from edgellm.models._rope import Rope, inverse_frequencies

__all__ = ["generation_config", "hf_config", "tokenizer_config"]

_MODEL_TYPES: Final = {"gemma3": "gemma3_text"}  # others are the architecture's name
_ACTIVATIONS: Final = {
    "silu": {"hidden_act": "silu"},
    "gelu_tanh": {"hidden_activation": "gelu_pytorch_tanh"},
}


def hf_config(
    this: ModelDescription, spec: ModelSpec, tokenizer: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json, read back and compared before it is returned.

    Args:
        this: the model.
        spec: its architecture.
        tokenizer: META's "tokenizer".

    Raises:
        UnsupportedModelError: config.json has no way to say something of the model.
    """
    config = {
        "architectures": [spec.hf_architectures[0]],
        "model_type": _MODEL_TYPES.get(this.architecture, this.architecture),
        "hidden_size": this.hidden_size,
        "num_hidden_layers": this.num_layers,
        "num_attention_heads": this.num_heads,
        "num_key_value_heads": this.num_kv_heads,
        "head_dim": this.head_dim,
        "intermediate_size": this.ffn_size,
        "vocab_size": this.vocab_size,
        "max_position_embeddings": this.max_context,
        "rms_norm_eps": this.norm_eps,
        "tie_word_embeddings": this.is_tied and not this.has_embed_scale,
        **_ACTIVATIONS[this.activation],
        **_attention(this),
        **_ropes(this),
        "bos_token_id": tokenizer["bos_id"],
        "eos_token_id": tokenizer["eos_ids"],
        "torch_dtype": "float32",
    }
    again = spec.model_from_hf(config)
    same = dataclasses.replace(
        again,
        num_tokens=this.num_tokens,
        kv_format=this.kv_format,
        rope=this.rope,
        is_tied=this.is_tied,
        has_embed_scale=this.has_embed_scale,
        has_hadamard=this.has_hadamard,
    )
    tables = zip(again.inv_freqs, this.inv_freqs, strict=True)
    if same != this or not all(np.allclose(a, b, rtol=1e-6, atol=0) for a, b in tables):
        raise UnsupportedModelError(
            "config.json cannot describe this model: what it says is read back as another one"
        )
    return config


def _attention(this: ModelDescription) -> dict[str, Any]:
    """What each architecture says about windows, biases and scale."""
    windows = [layer.window for layer in this.layers]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    if this.architecture == "llama":
        return {"attention_bias": False, "mlp_bias": False}
    if this.architecture == "mistral":
        return {"sliding_window": windows[0] or None}
    sliding = {"sliding_window": max(windows)} if any(windows) else {}
    if this.architecture == "gemma3":
        scalar = shortest_float(this.attention_scale**-2)
        is_whole = abs(scalar - round(scalar)) < 1e-4 * scalar
        return {
            **sliding,
            "layer_types": kinds,
            "query_pre_attn_scalar": round(scalar) if is_whole else scalar,
            "attention_bias": False,
        }
    bias = {} if this.has_qkv_bias else {"attention_bias": False}
    return {**sliding, "layer_types": kinds, "use_sliding_window": any(windows), **bias}


def _ropes(this: ModelDescription) -> dict[str, Any]:
    result: dict[str, Any] = {"rope_theta": this.rope[0]["theta"]}
    scaling = _scaling(this)
    if scaling:
        result["rope_scaling"] = scaling
    if len(this.rope) > 1:  # Gemma: the second is for layers with a window, and never scaled
        result["rope_local_base_freq"] = this.rope[1]["theta"]
    return result


def _scaling(this: ModelDescription) -> dict[str, Any]:
    rope = this.rope[0]
    if rope["kind"] == "default":
        return {}
    if rope["kind"] == "linear":
        return {"rope_type": "linear", "factor": rope["factor"]}
    if rope["kind"] == "factors":
        # A GGUF holds the table and not what it was made of; Llama 3's models differ in the factor
        # alone. A table that is not theirs is found by the comparison in hf_config.
        plain = inverse_frequencies(Rope(theta=rope["theta"]), this.head_dim)
        factor = round(float((plain / this.inv_freqs[0]).max()), 3)
        rope = {"factor": factor, "low_freq_factor": 1, "high_freq_factor": 4}
        rope["original_context"] = 8192
    return {
        "rope_type": "llama3",
        "factor": rope["factor"],
        "low_freq_factor": rope["low_freq_factor"],
        "high_freq_factor": rope["high_freq_factor"],
        "original_max_position_embeddings": rope["original_context"],
    }


def tokenizer_config(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json; chat templates are files of their own.

    Args:
        tokenizer: META's "tokenizer".
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer["add_bos"],
        **tokenizer["special_tokens"],
    }


def generation_config(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json of a file that has none.

    Args:
        tokenizer: META's "tokenizer".
    """
    return {"bos_token_id": tokenizer["bos_id"], "eos_token_id": tokenizer["eos_ids"]}
