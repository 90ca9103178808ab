"""What the attentions of an ONNX graph do with hidden values: in one node, or made of products."""

from __future__ import annotations

import dataclasses

from edgellm.exporters.onnx_constants import broken
from edgellm.exporters.onnx_types import OnnxNode
from edgellm.exporters.onnx_walk import Attention, Value, Walk


def on_softmax(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    """Scores become probabilities."""
    if values[0].kind != "scores":
        raise walk.unknown(node, "which is not that of an attention,")
    if node.integer("axis", -1) not in (-1, 3):
        raise walk.unknown(node, "over another axis than the keys")
    if values[0].attention is not None:
        values[0].attention.scale = values[0].scale
    return dataclasses.replace(values[0], kind="probabilities", scale=1.0)


def attend(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    """A product of two hidden values: scores, or probabilities times values."""
    left, right = values
    both = walk.union(node, values)
    if [left.kind, right.kind] == ["plain", "plain"]:
        attention = Attention(node=str(node), query=left.sites, key=right.sites)
        scale = None if left.scale is None or right.scale is None else left.scale * right.scale
        attention.turned = left.turned, right.turned
        return Value(sites=both.sites, kind="scores", attention=attention, scale=scale)
    if left.kind != "probabilities" or right.kind != "plain" or left.attention is None:
        raise walk.unknown(node, f"of {left.kind} and {right.kind} values")
    left.attention.value = walk.unscaled(node, right).sites
    walk.attentions.append(left.attention)
    return Value(sites=both.sites)


def on_groupqueryattention(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    """ONNX Runtime's attention with a cache, with RoPE or behind it."""
    if any(node.inputs[10:]):
        raise walk.unknown(node, "with an attention bias, sinks or a quantised cache")
    linear = values[0].linear
    if len(values) == 1 and linear is not None and linear.weight is not None:
        num_heads, num_kv = node.integer("num_heads", 0), node.integer("kv_num_heads", 0)
        rows = linear.weight.shape[0]
        size = rows // max(1, num_heads + 2 * num_kv)
        if min(num_heads, num_kv, size) < 1 or size * (num_heads + 2 * num_kv) != rows:
            raise broken(walk.file, node, f"has {num_heads} and {num_kv} heads of {rows} rows")
        values = list(walk.split(linear, [num_heads * size, num_kv * size, num_kv * size]))
    result = _fused(walk, node, values)
    cos, sin = walk.constants.input(node, 7), walk.constants.input(node, 8)
    if node.integer("do_rotary", 0) and cos is not None and sin is not None:
        walk.attentions[-1].rope = (cos, sin)
        walk.attentions[-1].turned = (node.outputs[0], node.outputs[0])
    return result


def on_attention(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    """ONNX's own attention."""
    if node.number("softcap", 0.0):
        raise walk.unknown(node, "with softcap")
    return _fused(walk, node, values)


def on_multiheadattention(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    """ONNX Runtime's attention without shared heads."""
    if any(node.inputs[3:4]):
        raise walk.unknown(node, "with a bias")
    return _fused(walk, node, values)


def _fused(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    if len(values) != 3:
        raise walk.unknown(node, "without queries, keys and values from the embedding")
    query, key, value = (walk.unscaled(node, value) for value in values)
    node.number("scale", 0.0)
    attention = Attention(
        node=str(node), query=query.sites, key=key.sites, value=value.sites,
        options=dict(node.attributes), turned=(query.turned, key.turned),
    )  # fmt: skip
    walk.attentions.append(attention)
    return Value(sites=walk.union(node, values).sites)


def on_rotaryembedding(walk: Walk, node: OnnxNode, values: list[Value]) -> Value:
    """RoPE in one node."""
    if node.integer("interleaved", 0) or len(values) != 1:
        raise walk.unknown(node, "with interleaved")
    return dataclasses.replace(values[0], linear=None, turned=node.outputs[0])
