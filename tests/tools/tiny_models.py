"""Tiny random models of every architecture as Hugging Face folders, made without torch.

A folder holds what a real one holds: config.json, model.safetensors, tokenizer.json,
tokenizer_config.json with a chat template, generation_config.json. The same architecture gives the
same bytes each time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
SPECIAL_TOKENS = ("<|end|>", "<|start|>", "<|stop|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|stop|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. It was the best of times; it was the worst.",
    "def add(first, second):\n    return first + second\n",
    "Wer reitet so spät durch Nacht und Wind? L'été, où êtes-vous ? 你好，世界 🙂",
)

# hidden_size is not a multiple of 256 and ffn_size not of 16, so that the padding of superblocks
# and panels is met; head_dim is not hidden/heads.
_SIZES: dict[str, Any] = {
    "hidden_size": 288,
    "intermediate_size": 328,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {
        **{key: value for key, value in _SIZES.items() if key != "head_dim"},
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "qwen3": {
        **_SIZES,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "gemma3": {
        **{key: value for key, value in _SIZES.items() if key != "hidden_act"},
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}


def tiny_config(architecture: str, vocab_size: int) -> dict[str, Any]:
    """config.json of the tiny model; its vocab_size has 9 padding rows."""
    return {**_CONFIGS[architecture], "vocab_size": vocab_size + 9}


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of about 300 tokens with three special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors under Hugging Face's names; activations stay near unit size."""
    random = np.random.default_rng(seed)
    architecture = config["model_type"]
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    tensors: dict[str, npt.NDArray[np.float32]] = {}

    def matrix(name: str, rows: int, cols: int) -> None:
        scale = 1.0 / np.sqrt(cols)
        tensors[name] = (random.standard_normal((rows, cols)) * scale).astype(np.float32)

    def norm(name: str, size: int) -> None:
        centre = 0.0 if architecture == "gemma3_text" else 1.0
        tensors[name] = (centre + 0.1 * random.standard_normal(size)).astype(np.float32)

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden)
    norm("model.norm.weight", hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{layer}self_attn.{name}_proj.weight", rows * head_dim, hidden)
            if architecture == "qwen2":
                bias = random.standard_normal(rows * head_dim) * 0.1
                tensors[f"{layer}self_attn.{name}_proj.bias"] = bias.astype(np.float32)
        matrix(f"{layer}self_attn.o_proj.weight", hidden, heads * head_dim)
        matrix(f"{layer}mlp.gate_proj.weight", ffn, hidden)
        matrix(f"{layer}mlp.up_proj.weight", ffn, hidden)
        matrix(f"{layer}mlp.down_proj.weight", hidden, ffn)
        norm(f"{layer}input_layernorm.weight", hidden)
        norm(f"{layer}post_attention_layernorm.weight", hidden)
        if architecture in ("qwen3", "gemma3_text"):
            norm(f"{layer}self_attn.q_norm.weight", head_dim)
            norm(f"{layer}self_attn.k_norm.weight", head_dim)
        if architecture == "gemma3_text":
            norm(f"{layer}pre_feedforward_layernorm.weight", hidden)
            norm(f"{layer}post_feedforward_layernorm.weight", hidden)
    return tensors


def write_tiny_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """Writes the folder of a tiny model and returns it.

    Args:
        folder: created if missing.
        architecture: one of ARCHITECTURES.
        changes: replace keys of config.json, for example `num_hidden_layers=1`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    config = {**tiny_config(architecture, tokenizer.get_vocab_size()), **changes}
    save_file(tiny_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|start|>",
            "eos_token": "<|stop|>",
            "pad_token": "<|end|>",
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0]})
    return folder


def write_tiny_edge(folder: Path, architecture: str, **changes: Any) -> Path:
    """Exports a tiny model whose config.json is changed and returns the .edge file."""
    from edgellm.exporters.export import ExportOptions, export_model

    output = folder / f"{architecture}.edge"
    export_model(write_tiny_model(folder / "hf", architecture, **changes), output, ExportOptions())
    return output


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
