"""Weight names that most architectures share: canonical role to source name."""

from __future__ import annotations

_HF_LAYER = "model.layers.{i}."

HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "embed_scale": "model.embed_tokens.scale",  # ours, in ONNX models only
    "head": "lm_head.weight",
    "final_norm": "model.norm.weight",
    "attn_norm": _HF_LAYER + "input_layernorm.weight",
    "q": _HF_LAYER + "self_attn.q_proj.weight",
    "k": _HF_LAYER + "self_attn.k_proj.weight",
    "v": _HF_LAYER + "self_attn.v_proj.weight",
    "q_bias": _HF_LAYER + "self_attn.q_proj.bias",
    "k_bias": _HF_LAYER + "self_attn.k_proj.bias",
    "v_bias": _HF_LAYER + "self_attn.v_proj.bias",
    "q_norm": _HF_LAYER + "self_attn.q_norm.weight",
    "k_norm": _HF_LAYER + "self_attn.k_norm.weight",
    "o": _HF_LAYER + "self_attn.o_proj.weight",
    "ffn_norm": _HF_LAYER + "post_attention_layernorm.weight",
    "gate": _HF_LAYER + "mlp.gate_proj.weight",
    "up": _HF_LAYER + "mlp.up_proj.weight",
    "down": _HF_LAYER + "mlp.down_proj.weight",
}

GGUF_NAMES = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "attn_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "q_bias": "blk.{i}.attn_q.bias",
    "k_bias": "blk.{i}.attn_k.bias",
    "v_bias": "blk.{i}.attn_v.bias",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "o": "blk.{i}.attn_output.weight",
    "post_attn_norm": "blk.{i}.post_attention_norm.weight",
    "ffn_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "post_ffn_norm": "blk.{i}.post_ffw_norm.weight",
}
