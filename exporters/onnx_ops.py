"""What each operation of an ONNX graph does with hidden values.

A handler takes a node with at least one hidden input and returns the value of its results, or one
for each of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Final

from edgellm.errors import UnsupportedModelError
from edgellm.exporters.onnx_attention import (
    attend,
    on_attention,
    on_groupqueryattention,
    on_multiheadattention,
    on_rotaryembedding,
    on_softmax,
)
from edgellm.exporters.onnx_constants import broken
from edgellm.exporters.onnx_types import OnnxNode
from edgellm.exporters.onnx_walk import Kind, Site, Value, Walk
from edgellm.exporters.onnx_weights import Blocked, Dense, Scaled, Weight
from edgellm.exporters.to_onnx_graph import HADAMARD_NAME

MICROSOFT: Final = "com.microsoft"
# These move numbers.
_SAME: Final = (
    "Cast", "CastLike", "Concat", "Expand", "Flatten", "Gather", "GatherND", "Identity", "Reshape",
    "ScatterElements", "ScatterND", "Slice", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
)  # fmt: skip


def _on_same(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if node.op in ("Cast", "CastLike", "Identity"):
        return values[0]
    if node.op == "Concat" and walk.has_weights(node):
        raise walk.unknown(node, "which joins constants to a hidden value")
    return dataclasses.replace(walk.union(node, values), linear=None)


def _on_neg(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    return values[0].times(-1.0)


def _on_pow(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    """A square or cube, or what makes a root's inverse of a mean."""
    kind: Kind = "mean" if values[0].kind == "mean" else "power"
    return dataclasses.replace(values[0], kind=kind, linear=None)


def _on_root(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if values[0].kind != "mean":
        raise walk.unknown(node, "of something other than a mean")
    return dataclasses.replace(values[0], linear=None)


def _on_add(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if len(values) == 2:
        return walk.sum(node, values[0], values[1])
    value, constant = values[0], walk.constants.among(node)
    if constant is not None and constant.count == 1:
        if value.kind == "plain" and value.scale is not None:
            raise walk.unknown(node, "which adds a number")
        epsilon = walk.constants.scalar(constant) if value.kind == "mean" else None
        return dataclasses.replace(value, linear=None, epsilon=epsilon)
    if value.kind == "scores":
        return value  # the mask
    vector, linear = walk.constants.vector(constant), value.linear
    if vector is None or linear is None or linear.weight is None or linear.bias is not None:
        raise walk.unknown(node, "which adds something that is neither a bias nor a residual,")
    if vector.shape != linear.weight.shape[:1]:
        raise broken(walk.file, node, f"adds {vector.shape} numbers to {linear.weight.shape[0]}")
    linear.bias = vector
    return value


def _on_sub(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    constant = walk.constants.among(node)
    if len(values) == 2 and values[0].sites == values[1].sites:
        return walk.union(node, values)
    if len(values) == 2 or constant is None or constant.count != 1:
        raise walk.unknown(node, "which subtracts something other than a number,")
    if values[0].kind == "plain":
        raise walk.unknown(node, "which subtracts a number")
    return dataclasses.replace(values[0], linear=None)


def _on_mul(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    kinds = sorted(value.kind for value in values)
    if kinds == ["mean", "plain"]:
        return _normed(walk, node, values)
    constant = walk.constants.among(node)
    if len(values) == 2:
        return _product(walk, node, values)
    if constant is None or constant.num_axes != 1:
        if values[0].kind in ("plain", "normed") and walk.has_weights(node):
            raise walk.unknown(node, "which multiplies by constants")
        if constant is not None and constant.count == 1:
            return values[0].times(walk.constants.scalar(constant))
        angles = walk.angles(node)
        return dataclasses.replace(
            values[0].times(1.0 if angles else None), turned=angles or values[0].turned
        )
    vector, value = walk.constants.vector(constant), values[0]
    (site, *others) = value.sites
    if vector is not None and site.kind == "embedding" and not others and value.kind == "plain":
        if not isinstance(site.weight, Dense | Blocked) or vector.shape != site.weight.shape[1:]:
            raise walk.unknown(node, "which multiplies the embedding a second time,")
        site.weight = Scaled(weight=site.weight, factors=vector.rows(0, 1)[0])
        return value
    if vector is None or value.kind != "normed":
        raise walk.unknown(node, "which multiplies by a vector that is not a norm's,")
    return _norm(walk, node, value.sites, vector, value.epsilon)


def _product(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    left, right = sorted(values, key=lambda value: value.kind != "sigmoid")
    if left.kind == "sigmoid":
        if left.sites != {right.linear}:
            raise walk.unknown(node, "of a sigmoid and something else than what is under it")
        return dataclasses.replace(_activation(walk, node, right, "silu"), scale=1.0)
    result = walk.union(node, values)
    is_square = node.inputs[0] == node.inputs[1] and result.kind == "plain"
    scale = None if left.scale is None or right.scale is None else left.scale * right.scale
    return dataclasses.replace(result, kind="power" if is_square else result.kind, scale=scale)


def _on_div(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if [value.kind for value in values] == ["plain", "mean"]:
        return _normed(walk, node, values)
    constant = walk.constants.among(node)
    if (
        len(values) == 2
        or (constant is not None and constant.num_axes == 1)
        or (values[0].kind in ("plain", "normed") and walk.has_weights(node))
    ):
        raise walk.unknown(node, "which divides by something other than a number,")
    number = None if constant is None else walk.constants.scalar(constant)
    return values[0].times(1 / number if number else None)


def _on_reducemean(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if values[0].kind != "power":
        raise walk.unknown(node, "of something other than squares")
    return dataclasses.replace(values[0], kind="mean", linear=None)


def _on_sigmoid(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    (site, *others) = values[0].sites
    if others or values[0].linear is not site:
        raise walk.unknown(node, "of something other than a linear layer's result")
    return Value(sites=values[0].sites, kind="sigmoid")


def _on_fastgelu(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if any(node.inputs[1:]):
        raise walk.unknown(node, "with a bias")
    return _activation(walk, node, values[0], "gelu_tanh")


def _on_tanh(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if values[0].kind != "power":
        raise walk.unknown(node, "of something other than a polynomial")
    return _activation(walk, node, values[0], "gelu_tanh")


def _on_swish(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    is_silu = node.number("alpha", 1.0) == 1.0
    return _activation(walk, node, values[0], "silu" if is_silu else "swish")


def _on_quickgelu(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    is_silu = node.number("alpha", 1.702) == 1.0
    return _activation(walk, node, values[0], "silu" if is_silu else "quick gelu")


def _on_gelu(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    is_tanh = node.attributes.get("approximate") == b"tanh"
    return _activation(walk, node, values[0], "gelu_tanh" if is_tanh else "gelu")


def _on_erf(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    scale = values[0].scale
    if scale is None or not math.isclose(scale, math.sqrt(0.5), rel_tol=1e-3):
        raise walk.unknown(node, "of something other than x / sqrt(2)")
    return _activation(walk, node, values[0], "gelu")


def _on_gelu_of_runtime(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    return _activation(walk, node, values[0], "gelu")


def _activation(walk: Walk, node: OnnxNode, value: Value, name: str) -> Value:
    (site, *others) = value.sites
    if others or site.kind != "linear":
        raise walk.unknown(node, "which is not a gate's activation,")
    if site.activation not in (None, name):
        raise walk.unknown(node, f"which follows {site.activation},")
    site.activation = name
    return Value(sites=value.sites, scale=None)


def _on_matmul(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if len(values) == 2:
        return attend(walk, node, values)
    if node.inputs[1].startswith(HADAMARD_NAME):
        raise UnsupportedModelError(
            f"{walk.file.path}: written by edgellm from a calibrated model, it transforms what its"
            " matrices multiply, which is not read back: export the model's source instead"
        )
    matrix = walk.constants.input(node, 1)
    if matrix is None or len(matrix.shape) != 2 or node.inputs[0] not in walk.values:
        raise walk.unknown(node, "whose matrix is not an initialiser,")
    return _linear(walk, node, values[0], walk.constants.matrix(matrix, is_transposed=True))


def _on_gemm(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    matrix = walk.constants.input(node, 1)
    has_bias = any(node.inputs[2:])
    bias = walk.constants.vector(walk.constants.input(node, 2)) if has_bias else None
    numbers = [node.number(key, 1.0) for key in ("alpha", "beta")]
    if matrix is None or len(matrix.shape) != 2 or len(values) != 1 or numbers != [1.0, 1.0]:
        raise walk.unknown(node, "whose matrix is not an initialiser,")
    if node.integer("transA", 0) or (has_bias and bias is None):
        raise walk.unknown(node, "with a transposed input or a bias that is not a vector,")
    is_transposed = not node.integer("transB", 0)
    return _linear(
        walk, node, values[0], walk.constants.matrix(matrix, is_transposed=is_transposed), bias
    )


def _on_matmulnbits(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    rows, cols = node.integer("N", 0), node.integer("K", 0)
    if min(rows, cols) < 1:
        raise broken(walk.file, node, "has no N and K")
    optional = [*node.inputs[4:], "", ""]
    if optional[0] or len(values) != 1:
        raise walk.unknown(node, "with reordered columns (g_idx)")
    bias = walk.constants.vector(walk.constants.input(node, 5)) if optional[1] else None
    if optional[1] and bias is None:
        raise walk.unknown(node, "with a bias that is not a vector,")
    return _linear(walk, node, values[0], walk.constants.blocked(node, (1, 2, 3), rows, cols), bias)


def _linear(
    walk: Walk, node: OnnxNode, value: Value, weight: Weight, bias: Weight | None = None
) -> Value:
    if value.kind != "plain" or (bias is not None and bias.shape != weight.shape[:1]):
        raise walk.unknown(node, f"of {value.kind} values")
    site = walk.site(node, "linear", walk.unscaled(node, value).sites, weight)
    site.bias = bias
    return Value(sites=frozenset((site,)), linear=site)


def _on_split(walk: Walk, node: OnnxNode, values: list[Value]) -> Value | tuple[Value, ...]:
    """Of a layer's result, that of several layers in one; otherwise halves for RoPE."""
    value, linear = values[0], values[0].linear
    if linear is None or linear.weight is None:
        return dataclasses.replace(value, linear=None)
    rows = linear.weight.shape[0]
    sizes = [int(size) for size in walk.constants.numbers(node, 1)]
    sizes = sizes or node.integers("split")
    if not sizes and rows % len(node.outputs) == 0:
        sizes = [rows // len(node.outputs)] * len(node.outputs)
    if sum(sizes) != rows or len(sizes) != len(node.outputs) or min(sizes) < 1:
        raise broken(walk.file, node, f"splits {rows} rows into {sizes}")
    return walk.split(linear, sizes)


def _on_rmsnormalization(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    vector = walk.constants.vector(walk.constants.input(node, 1))
    if vector is None or len(values) != 1 or values[0].kind != "plain":
        raise walk.unknown(node, "whose weight is not an initialiser,")
    if node.integer("axis", -1) != -1:
        raise walk.unknown(node, "over another axis than the last")
    epsilon = node.number("epsilon", 1e-5)
    return _norm(walk, node, walk.unscaled(node, values[0]).sites, vector, epsilon)


def _on_skip_rmsnormalization(walk: Walk, node: OnnxNode, values: list[Value]) -> tuple[Value, ...]:
    vector = walk.constants.vector(walk.constants.input(node, 2))
    if vector is None or len(values) != 2 or any(node.inputs[3:]):
        raise walk.unknown(node, "which has a bias or whose weight is not an initialiser,")
    total = walk.sum(node, values[0], values[1])
    normed = _norm(walk, node, total.sites, vector, node.number("epsilon", 1e-12))
    return (normed, normed, normed, total)


def _normed(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if values[0].sites != values[1].sites:
        raise walk.unknown(node, "which divides by the mean of something else,")
    epsilon = next(value.epsilon for value in values if value.kind == "mean")
    plain = next(value for value in values if value.kind == "plain")
    sites = walk.unscaled(node, plain).sites
    return Value(sites=sites, kind="normed", epsilon=epsilon)


def _norm(
    walk: Walk, node: OnnxNode, inputs: frozenset[Site], weight: Weight, epsilon: float | None
) -> Value:
    site = walk.site(node, "norm", inputs, weight)
    site.epsilon = epsilon
    return Value(sites=frozenset((site,)))


# Of ONNX Runtime's operations the attributes that are read, and those that are not with the values
# that change nothing. Later versions have more, of which nothing is known.
_READ: Final[Mapping[str, tuple[str, ...]]] = {
    "FastGelu": (),
    "Gelu": (),
    "GroupQueryAttention": (
        "do_rotary", "kv_num_heads", "local_window_size", "num_heads", "qk_norm_epsilon", "scale",
        "sliding_window_cache",  # how long the cache's buffers are
    ),
    "MatMulNBits": ("K", "N", "accuracy_level", "bits", "block_size"),
    "MultiHeadAttention": ("mask_filter_value", "num_heads", "scale", "unidirectional"),
    "QuickGelu": ("alpha",),
    "RotaryEmbedding": ("interleaved", "num_heads", "rotary_embedding_dim"),
    "SkipSimplifiedLayerNormalization": ("epsilon",),
}  # fmt: skip
_HARMLESS: Final[Mapping[str, tuple[object, ...]]] = {
    "causal": (1,), "is_packed_batching": (0,), "k_quant_type": (b"NONE",),
    "kv_cache_bit_width": (0,), "qk_output": (0,), "rotary_interleaved": (0,), "scale": (1.0,),
    "smooth_softmax": (-1, 0), "softcap": (0.0,),
    "v_quant_type": (b"NONE",), "weight_prepacked": (0,),
}  # fmt: skip


def check_attributes(walk: Walk, node: OnnxNode) -> None:
    """Refuses an operation of ONNX Runtime that has an attribute which may change its result.

    Args:
        walk: The walk.
        node: One that has a handler.

    Raises:
        UnsupportedModelError: It has one.
    """
    if node.domain != MICROSOFT:
        return
    for key, value in node.attributes.items():
        if key not in _READ[node.op] and value not in _HARMLESS.get(key, ()):
            raise walk.unknown(node, f"with {key}")


HANDLERS: Final[
    Mapping[tuple[str, str], Callable[[Walk, OnnxNode, list[Value]], Value | tuple[Value, ...]]]
] = {
    **dict.fromkeys((("", op) for op in _SAME), _on_same),
    ("", "Neg"): _on_neg,
    ("", "Pow"): _on_pow,
    ("", "Reciprocal"): _on_root,
    ("", "Sqrt"): _on_root,
    ("", "Add"): _on_add,
    ("", "Sub"): _on_sub,
    ("", "Mul"): _on_mul,
    ("", "Div"): _on_div,
    ("", "ReduceMean"): _on_reducemean,
    ("", "Softmax"): on_softmax,
    ("", "Sigmoid"): _on_sigmoid,
    ("", "Tanh"): _on_tanh,
    ("", "Erf"): _on_erf,
    ("", "Gelu"): _on_gelu,
    ("", "Swish"): _on_swish,
    ("", "MatMul"): _on_matmul,
    ("", "Gemm"): _on_gemm,
    ("", "Split"): _on_split,
    ("", "Attention"): on_attention,
    ("", "RotaryEmbedding"): on_rotaryembedding,
    ("", "RMSNormalization"): _on_rmsnormalization,
    ("", "SimplifiedLayerNormalization"): _on_rmsnormalization,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _on_skip_rmsnormalization,
    (MICROSOFT, "MatMulNBits"): _on_matmulnbits,
    (MICROSOFT, "GroupQueryAttention"): on_groupqueryattention,
    (MICROSOFT, "MultiHeadAttention"): on_multiheadattention,
    (MICROSOFT, "RotaryEmbedding"): on_rotaryembedding,
    (MICROSOFT, "FastGelu"): _on_fastgelu,
    (MICROSOFT, "Gelu"): _on_gelu_of_runtime,
    (MICROSOFT, "QuickGelu"): _on_quickgelu,
}
