"""GGUF and safetensors files for tests, whole or deliberately broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f",
    BOOL: "B", U64: "Q", I64: "q", F64: "d",
}  # fmt: skip
GGML_F32, GGML_F16, GGML_Q8_0 = 0, 1, 8


@dataclass(frozen=True)
class Value:
    """A field of an exact type; `items` says that it is an array of that type."""

    type: int
    value: Any
    is_array: bool = False


@dataclass(frozen=True)
class Tensor:
    """A tensor entry; what is None follows from the data."""

    data: bytes
    dims: tuple[int, ...]
    type: int = GGML_F32
    offset: int | None = None
    num_dims: int | None = None


def gguf_string(text: str | bytes) -> bytes:
    """A GGUF string: length and bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: Any) -> bytes:
    """A field's type and content; plain Python values get the type a converter would use."""
    if isinstance(value, bytes):
        return value  # already encoded, for broken files
    if not isinstance(value, Value):
        value = _typed(value)
    items = value.value if value.is_array else [value.value]
    if value.type == STRING:
        content = b"".join(gguf_string(item) for item in items)
    else:
        content = b"".join(struct.pack("<" + _FORMATS[value.type], item) for item in items)
    if value.is_array:
        return struct.pack("<IIQ", ARRAY, value.type, len(items)) + content
    return struct.pack("<I", value.type) + content


def _typed(value: Any) -> Value:
    if isinstance(value, list):
        return Value(_typed(value[0]).type if value else STRING, value, is_array=True)
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING}
    kind = kinds[type(value)]
    return Value(I32 if kind == U32 and value < 0 else kind, value)


def gguf_bytes(
    fields: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]] = (),
    *,
    version: int = 3,
    num_fields: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; counts may be false on purpose."""
    field_list = list(fields.items() if isinstance(fields, Mapping) else fields)
    tensor_list = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensor_list) if num_tensors is None else num_tensors,
        len(field_list) if num_fields is None else num_fields,
    )
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in field_list)
    body = b""
    for name, tensor in tensor_list:
        body += b"\0" * (-len(body) % alignment)
        offset = len(body) if tensor.offset is None else tensor.offset
        num_dims = len(tensor.dims) if tensor.num_dims is None else tensor.num_dims
        head += gguf_string(name) + struct.pack("<I", num_dims)
        head += b"".join(struct.pack("<Q", size) for size in tensor.dims)
        head += struct.pack("<IQ", tensor.type, offset)
        body += tensor.data
    return head + b"\0" * (-len(head) % alignment) + body


def safetensors_bytes(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    """A safetensors file; `header` may be text, and `length` false on purpose."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def gguf_of_llama(
    folder: Path, pack: Callable[[npt.NDArray[np.float32]], tuple[int, bytes]] | None = None
) -> bytes:
    """The GGUF file that a converter makes of a tiny Llama folder.

    Args:
        folder: the folder.
        pack: makes ggml's number of a type and the bytes of a matrix; None: float32.
    """
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for name, array in load_file(folder / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            array = _interleave(array, heads)
        elif name.endswith("k_proj.weight"):
            array = _interleave(array, kv_heads)
        kind, data = 0, array.astype("<f4").tobytes()
        if pack is not None and array.ndim == 2:
            kind, data = pack(array)
        tensors[_gguf_name(name)] = Tensor(data, array.shape[::-1], kind)
    return gguf_bytes({**_llama_fields(config), **bpe_fields(tokenizer)}, tensors)


def bpe_fields(tokenizer: dict[str, Any], pre: str = "gpt-2") -> dict[str, Any]:
    """tokenizer.ggml.* of a byte-level tokenizer.json."""
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Value(I32, [3 if t in special else 1 for t in tokens], True),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _llama_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def _interleave(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows i and i + d/2 of a head side by side, as llama.cpp's converter writes them."""
    rows, cols = array.shape
    halves = array.reshape(heads, 2, rows // heads // 2, cols)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, cols)


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    return f"blk.{layer}.{parts['.'.join(rest)]}.weight"
