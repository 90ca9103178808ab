"""ONNX decoders of Llama's kind as other tools write them, for tests; ONNX Runtime can run them.

`torch_folder` has what `torch.onnx` makes of transformers: standard operators, transposed matrices
without names. `genai_folder` has what ONNX Runtime GenAI's builder makes: fused operators, integers
in blocks, a genai_config.json.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

_TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_NUMBERS = {"F32": np.float32, "F16": np.float16}


def torch_folder(source: Path, folder: Path, numbers: str = "F32") -> Path:
    """Writes `source`, a tiny Hugging Face folder, as torch.onnx and optimum would."""
    folder.mkdir()
    for name in (*_TEXTS, "config.json"):
        shutil.copy(source / name, folder)
    decoder = _TorchDecoder(source, _NUMBERS[numbers])
    decoder.run()
    onnx.save_model(
        decoder.model(), folder / "model.onnx", save_as_external_data=True,
        location="model.onnx_data", size_threshold=1024,
    )  # fmt: skip
    return folder


@dataclass(frozen=True, kw_only=True)
class GenaiOptions:
    """What the builder is told; `block` 0 keeps floats."""

    bits: int = 4
    block: int = 32
    has_zeros: bool = False
    is_packed: bool = True
    is_embedding_quantized: bool = False


def genai_folder(source: Path, folder: Path, options: GenaiOptions) -> Path:
    """Writes `source` as ONNX Runtime GenAI's builder would."""
    folder.mkdir()
    for name in _TEXTS[:2]:
        shutil.copy(source / name, folder)
    decoder = _GenaiDecoder(source, options)
    decoder.run()
    onnx.save_model(
        decoder.model(), folder / "model.onnx", save_as_external_data=True,
        location="model.onnx.data", size_threshold=0,
    )  # fmt: skip
    (folder / "genai_config.json").write_text(json.dumps(_genai_config(decoder.config)))
    return folder


def _genai_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {
            "type": config["model_type"],
            "bos_token_id": 1,
            "eos_token_id": [2, 0],
            "context_length": config["max_position_embeddings"],
            "vocab_size": config["vocab_size"],
            "decoder": {
                "filename": "model.onnx",
                "head_size": config["head_dim"],
                "hidden_size": config["hidden_size"],
                "num_attention_heads": config["num_attention_heads"],
                "num_hidden_layers": config["num_hidden_layers"],
                "num_key_value_heads": config["num_key_value_heads"],
            },
        }
    }


def quantize(
    matrix: npt.NDArray[np.float32], options: GenaiOptions
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Codes (rows, blocks, block), scales and zero points (rows, blocks), by rounding."""
    rows, cols = matrix.shape
    blocks = np.zeros((rows, -(-cols // options.block) * options.block), np.float32)
    blocks[:, :cols] = matrix
    blocks = blocks.reshape(rows, -1, options.block)
    top = (1 << options.bits) - 1
    low, high = (blocks.min(axis=2).clip(max=0), blocks.max(axis=2).clip(min=0))
    if options.has_zeros:
        scales = ((high - low) / top).astype(np.float32)
        zeros = np.rint(-low / scales).astype(np.uint8)
    else:
        scales = (np.maximum(-low, high) / (top // 2)).astype(np.float32)
        zeros = np.full(scales.shape, (top + 1) // 2, np.uint8)
    codes = np.rint(blocks / scales[:, :, None]) + zeros[:, :, None]
    return codes.clip(0, top).astype(np.uint8), scales, zeros


def dequantize(matrix: npt.NDArray[np.float32], options: GenaiOptions) -> npt.NDArray[np.float32]:
    """What the written blocks of a matrix stand for."""
    codes, scales, zeros = quantize(matrix, options)
    values = (codes.astype(np.float32) - zeros[:, :, None]) * scales[:, :, None]
    return values.reshape(len(matrix), -1)[:, : matrix.shape[1]]


def pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Codes along the last axis, two of 4 bits in a byte, each row to whole bytes."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4


def rope_cache(config: dict[str, Any], length: int) -> tuple[npt.NDArray[np.float32], ...]:
    """Cosine and sine, (length, head_dim / 2), of RoPE without scaling."""
    half = config["head_dim"] // 2
    angles = np.arange(length)[:, None] * config["rope_theta"] ** (-np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass
class _Decoder:
    """Nodes and initialisers; a value is its name."""

    config: dict[str, Any]
    tensors: dict[str, npt.NDArray[np.float32]]
    dtype: type[np.floating[Any]]
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, Any] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        domain = attributes.pop("domain", "")
        names = [f"{kind}_{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(
            helper.make_node(kind, inputs, names, names[0], domain=domain, **attributes)
        )
        return names[0]

    def constant(self, name: str, values: npt.ArrayLike, dtype: Any = None) -> str:
        if name not in self.initializers:
            array = np.asarray(values, dtype or self.dtype)
            self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def ints(self, *values: int) -> str:
        return self.constant(f"ints_{values}", values, np.int64)

    def tensor(self, name: str) -> str:
        return self.constant(name, self.tensors[name])

    def bias(self, name: str, y: str) -> str:
        if name + ".bias" not in self.tensors:
            return y
        return self.op("Add", self.tensor(name + ".bias"), y)

    def linear(self, x: str, name: str) -> str:
        raise NotImplementedError

    def mlp(self, x: str, layer: str) -> str:
        gate = self.linear(x, f"{layer}mlp.gate_proj")
        gate = self.op("Mul", gate, self.op("Sigmoid", gate))
        both = self.op("Mul", gate, self.linear(x, f"{layer}mlp.up_proj"))
        return self.linear(both, f"{layer}mlp.down_proj")

    def head(self) -> str:
        return "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"

    def finish(self, logits: str, inputs: list[Any]) -> Any:
        self.nodes.append(helper.make_node("Identity", [logits], ["logits"], "logits"))
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        output = helper.make_tensor_value_info("logits", kind, [1, "n", self.config["vocab_size"]])
        graph = helper.make_graph(
            self.nodes, "decoder", inputs, [output], list(self.initializers.values())
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _read(source: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]:
    config = json.loads((source / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config, load_file(source / "model.safetensors")


class _TorchDecoder(_Decoder):
    """Without a cache, for sequences of any length."""

    def __init__(self, source: Path, dtype: type[np.floating[Any]]) -> None:
        super().__init__(*_read(source), dtype)
        self._logits = ""

    def linear(self, x: str, name: str) -> str:
        matrix = self.tensors[name + ".weight"].T
        place = self.constant(f"onnx::MatMul_{len(self.nodes)}", np.ascontiguousarray(matrix))
        return self.bias(name, self.op("MatMul", x, place))

    def norm(self, x: str, name: str) -> str:
        mean = self.op("ReduceMean", self.op("Pow", x, self.constant("two", 2)), self.ints(-1))
        sum_ = self.op("Add", mean, self.constant("epsilon", self.config["rms_norm_eps"]))
        root = self.op("Div", self.constant("one", 1), self.op("Sqrt", sum_))
        return self.op("Mul", self.tensor(name), self.op("Mul", x, root))

    def run(self) -> None:
        config, half = self.config, self.config["head_dim"] // 2
        positions = self.op("Unsqueeze", self.op("Range", *self._range()), self.ints(1))
        frequencies = config["rope_theta"] ** (-np.arange(half) / half)
        angles = self.op(
            "Mul", self.op("Cast", positions, to=TensorProto.FLOAT),
            self.constant("frequencies", np.tile(frequencies, 2), np.float32),
        )  # fmt: skip
        number = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        self._cos, self._sin = (
            self.op("Cast", self.op(kind, angles), to=number) for kind in ("Cos", "Sin")
        )
        x = self.op("Gather", self.tensor("model.embed_tokens.weight"), "input_ids")
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            normed = self.norm(x, f"{layer}input_layernorm.weight")
            x = self.op("Add", x, self._attention(normed, f"{layer}self_attn."))
            normed = self.norm(x, f"{layer}post_attention_layernorm.weight")
            x = self.op("Add", x, self.mlp(normed, layer))
        self._logits = self.linear(self.norm(x, "model.norm.weight"), self.head())

    def model(self) -> Any:
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "n"])
        return self.finish(self._logits, [ids])

    def _range(self) -> tuple[str, str, str]:
        zero, one = (self.constant(f"int_{i}", i, np.int64) for i in (0, 1))
        return zero, self.op("Gather", self.op("Shape", "input_ids"), one), one

    def _attention(self, x: str, at: str) -> str:
        config = self.config
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        query, key, value = (
            self._heads(self.linear(x, f"{at}{role}_proj"), count)
            for role, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, key = self._rotate(query), self._rotate(key)
        key, value = self._repeat(key), self._repeat(value)
        key = self.op("Transpose", key, perm=[0, 1, 3, 2])
        root = self.constant("root", math.sqrt(math.sqrt(config["head_dim"])))
        scores = self.op("MatMul", self.op("Div", query, root), self.op("Div", key, root))
        scores = self.op("Add", scores, self._mask())
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        mixed = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = self.op("Reshape", mixed, self.ints(0, 0, heads * config["head_dim"]))
        return self.linear(mixed, f"{at}o_proj")

    def _heads(self, x: str, heads: int) -> str:
        x = self.op("Reshape", x, self.ints(0, 0, heads, self.config["head_dim"]))
        return self.op("Transpose", x, perm=[0, 2, 1, 3])

    def _rotate(self, x: str) -> str:
        half = self.config["head_dim"] // 2
        ends = (self.ints(0), self.ints(half), self.ints(2 * half))
        last = self.ints(3)
        first, second = (self.op("Slice", x, *ends[i : i + 2], last) for i in (0, 1))
        turned = self.op("Concat", self.op("Neg", second), first, axis=-1)
        return self.op("Add", self.op("Mul", x, self._cos), self.op("Mul", turned, self._sin))

    def _repeat(self, x: str) -> str:
        config = self.config
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        x = self.op("Unsqueeze", x, self.ints(2))
        x = self.op("Expand", x, self.ints(1, 1, groups, 1, 1))
        return self.op("Reshape", x, self.ints(0, groups * config["num_key_value_heads"], -1,
                                               config["head_dim"]))  # fmt: skip

    def _mask(self) -> str:
        _, count, one = self._range()
        square = self.op("Unsqueeze", count, self.ints(0))
        square = self.op("Concat", square, square, axis=0)
        full = self.op("Expand", self.constant("masked", -1e4), square)
        return self.op("Trilu", full, one, upper=1)


class _GenaiDecoder(_Decoder):
    """With a cache, which a run begins empty."""

    def __init__(self, source: Path, options: GenaiOptions) -> None:
        super().__init__(*_read(source), np.float32)
        self._options = options
        self._inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "n"]),
            helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
            helper.make_tensor_value_info("total", TensorProto.INT32, [1]),
        ]
        self._logits = ""

    def linear(self, x: str, name: str, *more: str) -> str:
        matrix = np.concatenate([self.tensors[f"{part}.weight"] for part in (name, *more)])
        place = name.replace("self_attn.q_proj", "self_attn.qkv_proj") if more else name
        rows, cols = matrix.shape
        if not self._options.block:
            weight = self.constant(f"{place}.MatMul.weight", matrix.T.copy())
            y = self.op("MatMul", x, weight)
        else:
            y = self.op(
                "MatMulNBits", x, *self._blocks(f"{place}.MatMul.weight", matrix),
                domain="com.microsoft", K=cols, N=rows, bits=self._options.bits,
                block_size=self._options.block,
            )  # fmt: skip
        if f"{name}.bias" not in self.tensors:
            return y
        bias = np.concatenate([self.tensors[f"{part}.bias"] for part in (name, *more)])
        return self.op("Add", y, self.constant(f"{place}.Add.bias", bias))

    def _blocks(self, place: str, matrix: npt.NDArray[np.float32]) -> list[str]:
        options = self._options
        codes, scales, zeros = quantize(matrix, options)
        inputs = [
            self.constant(f"{place}_quant", pack(codes, options.bits), np.uint8),
            self.constant(f"{place}_scales", scales),
        ]
        if options.has_zeros:
            packed = pack(zeros, options.bits)
            inputs.append(self.constant(f"{place}_zeros", packed, np.uint8))
        return inputs

    def run(self) -> None:
        config = self.config
        x = self._embed()
        skip = ""
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            normed, x = self._norm(x, skip, f"{layer}input_layernorm.weight")
            skip = self._attention(normed, i)
            normed, x = self._norm(x, skip, f"{layer}post_attention_layernorm.weight")
            skip = self.mlp(normed, layer)
        normed, _ = self._norm(x, skip, "model.norm.weight")
        self._logits = self.linear(normed, self.head())

    def model(self) -> Any:
        return self.finish(self._logits, self._inputs)

    def _embed(self) -> str:
        if not self._options.is_embedding_quantized:
            return self.op("Gather", self.tensor("model.embed_tokens.weight"), "input_ids")
        matrix = self.tensors["model.embed_tokens.weight"]
        codes, *others = self._blocks("model.embed_tokens.weight", matrix)
        flat = numpy_helper.to_array(self.initializers[codes]).reshape(len(matrix), -1)
        codes = self.constant("model.embed_tokens.weight_flat", flat, np.uint8)
        return self.op(
            "GatherBlockQuantized", codes, "input_ids", *others, domain="com.microsoft",
            bits=self._options.bits, block_size=self._options.block, quantize_axis=1,
        )  # fmt: skip

    def _norm(self, x: str, skip: str, name: str) -> tuple[str, str]:
        """The normed sum, and the sum."""
        epsilon, weight = self.config["rms_norm_eps"], self.tensor(name)
        if not skip:
            return self.op("SimplifiedLayerNormalization", x, weight, epsilon=epsilon, axis=-1), x
        normed = self.op(
            "SkipSimplifiedLayerNormalization", x, skip, weight, domain="com.microsoft",
            epsilon=epsilon, outputs=4,
        )  # fmt: skip
        outputs = self.nodes[-1].output
        outputs[1] = outputs[2] = ""
        return normed, outputs[3]

    def _attention(self, x: str, layer: int) -> str:
        config, at = self.config, f"model.layers.{layer}.self_attn."
        roles = [f"{at}{role}_proj" for role in ("q", "k", "v")]
        if self._options.is_packed:
            heads = [self.linear(x, *roles), "", ""]
        else:
            heads = [self.linear(x, role) for role in roles]
        caches = rope_cache(config, config["max_position_embeddings"])
        ropes = [
            self.constant(f"{n}_cache", c) for n, c in zip(("cos", "sin"), caches, strict=True)
        ]
        kv_heads, size = config["num_key_value_heads"], config["head_dim"]
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        for name in past:
            shape = [1, kv_heads, "past", size]
            self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        mixed = self.op(
            "GroupQueryAttention", *heads, *past, "seqlens_k", "total", *ropes,
            domain="com.microsoft", num_heads=config["num_attention_heads"],
            kv_num_heads=kv_heads, scale=1 / math.sqrt(size), do_rotary=1, outputs=3,
        )  # fmt: skip
        return self.linear(mixed, f"{at}o_proj")
