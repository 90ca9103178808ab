"""Finds the weights of a decoder in an ONNX graph, by what the graph does with them.

One pass over the nodes, in order. It follows the values that depend on the embedding ("hidden"
values) and notes each *site* where they meet a weight: the embedding, linear layers, RMSNorms; and
each sum of two different branches. A value remembers the sites it comes from. What cannot be a
decoder of a supported kind, above all an operation that is not known, is an error: nothing that
touches a hidden value is passed over. Values that do not depend on the embedding (masks, RoPE) are
not followed.
"""

from __future__ import annotations

from typing import Final

from edgellm.errors import FormatError
from edgellm.exporters.onnx_constants import broken
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_lookup import Lookups
from edgellm.exporters.onnx_ops import HANDLERS, MICROSOFT, check_attributes
from edgellm.exporters.onnx_types import OnnxNode
from edgellm.exporters.onnx_walk import Sites, Value, Walk
from edgellm.exporters.onnx_weights import FLOATS, Weight

_NOT_VALUES: Final = frozenset(("Shape", "Size", "IsNaN", "IsInf"))
_QUANTIZED: Final = frozenset(
    (
        "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "MatMulBnb4",
        "MatMulInteger", "MatMulIntegerToFloat", "QLinearMatMul", "QuantizeLinear",
    )
)  # fmt: skip
_NOT_READ: Final = ": of quantised models only MatMulNBits is read, export from the float model"


def find_sites(file: OnnxModelFile, vocab_size: int, hidden_size: int) -> Sites:
    """Walks the graph.

    Args:
        file: The model.
        vocab_size: Rows of the embedding, by which it is known.
        hidden_size: Its columns.

    Returns:
        Everything that meets a hidden value.

    Raises:
        FormatError: The graph is broken, or not that of a decoder.
        UnsupportedModelError: It has an operation or option that is not known.
    """
    graph, walk = file.graph, Walk(file)
    lookups = Lookups(walk.constants, vocab_size, hidden_size)
    outputs = set(graph.outputs)
    known = {"", *graph.initializers, *graph.inputs}
    for node in graph.nodes:
        for name in node.inputs:
            if name not in known:
                raise broken(file, node, f"takes {name[:80]!r}, which nothing before it makes")
        for name in node.outputs:
            if name and name in known:
                raise broken(file, node, f"makes {name[:80]!r} a second time")
            known.add(name)
        if not node.outputs:
            raise broken(file, node, "makes nothing")
        if any(name in walk.values for name in node.inputs):
            _follow(walk, node)
        elif not _is_embedding(walk, lookups, node, (vocab_size, hidden_size)):
            walk.constants.note(node)
        for name in node.outputs:
            if name in outputs and name in walk.values:
                walk.unscaled(node, walk.values[name])
    if not walk.sites:
        raise FormatError(
            f"{file.path} has no embedding of {vocab_size} rows and {hidden_size} columns, as its "
            f"configuration says{_why_none(file)}"
        )
    return Sites(
        sites=tuple(walk.sites),
        attentions=tuple(walk.attentions),
        outputs=tuple(walk.values[name] for name in graph.outputs if name in walk.values),
    )


def _is_embedding(walk: Walk, lookups: Lookups, node: OnnxNode, shape: tuple[int, int]) -> bool:
    """Notes the embedding if the node is one."""
    table = walk.constants.input(node, 0)
    weight: Weight | None = None
    if table is None or table.shape[:1] != shape[:1]:
        weight = lookups.note(node)
    elif (node.domain, node.op, table.shape) == ("", "Gather", shape):
        if node.integer("axis", 0) != 0:
            return False
        if table.tensor.type not in FLOATS:
            raise walk.unknown(node, f"of ONNX type {table.tensor.type}{_NOT_READ}")
        weight = walk.constants.matrix(table, is_transposed=False)
    elif (node.domain, node.op) == (MICROSOFT, "GatherBlockQuantized"):
        if node.integer("quantize_axis", 1) not in (1, -1) or node.integer("gather_axis", 0) != 0:
            raise walk.unknown(node, "along other axes than its rows")
        weight = walk.constants.blocked(node, (0, 2, 3), *shape)
    else:
        weight = lookups.note(node)
    if weight is None:
        return False
    if walk.sites:
        raise walk.unknown(node, ", a second embedding,")
    site = walk.site(node, "embedding", (), weight)
    walk.values[node.outputs[0]] = Value(sites=frozenset((site,)))
    return True


def _follow(walk: Walk, node: OnnxNode) -> None:
    """A node with a hidden input: finds out what its results are."""
    if node.op in _NOT_VALUES and not node.domain:
        return
    handler = HANDLERS.get((node.domain, node.op))
    if handler is None:
        how = _NOT_READ if node.op in _QUANTIZED else ""
        raise walk.unknown(node, f"on the way of the weights{how}")
    check_attributes(walk, node)
    result = handler(walk, node, [walk.values[n] for n in node.inputs if n in walk.values])
    if isinstance(result, Value):
        result = (result,) * len(node.outputs)
    for name, value in zip(node.outputs, result, strict=False):
        if name:
            walk.values[name] = value


def _why_none(file: OnnxModelFile) -> str:
    if any(node.op in ("If", "Loop", "Scan") for node in file.graph.nodes):
        return ": a merged decoder keeps it in If, use or export the one that is not merged"
    if "inputs_embeds" in file.graph.inputs:
        return ": it takes embeddings, which another file computes"
    return ""
