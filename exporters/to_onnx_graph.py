"""The forward pass as a graph of standard ONNX operators (opset 18), any batch and length.

Matrices kept as integers are multiplied by com.microsoft's MatMulNBits, in float32. Inputs and
outputs have the names that Optimum gives them: input_ids, attention_mask, position_ids,
past_key_values.N.key and .value; logits, present.N.key and .value.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from edgellm.exporters.to_onnx_weights import Matrix, OnnxWeights
from edgellm.models import Layer, ModelDescription
from edgellm.models._hadamard import blocks, matrix_of

__all__ = ["HADAMARD_NAME", "build_model"]

HADAMARD_NAME: Final = "/constants/float32/hadamard_"  # and the number of a block's columns

# IR 9 and opset 18 are what every ONNX Runtime since 1.16 and most converters read.
_IR_VERSION: Final = 9
_OPSET: Final = 18
_MASKED: Final = np.finfo(np.float32).min


def build_model(description: ModelDescription, weights: OnnxWeights, producer: str) -> Any:
    """Builds the model; its initialisers are written while it is built.

    Args:
        description: the model.
        weights: makes its initialisers.
        producer: name and version of what makes it.

    Returns:
        An onnx.ModelProto.
    """
    import onnx

    graph = _Graph(weights)
    inputs, outputs = _signature(description)
    _Forward(description, graph).run()
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes, description.architecture, inputs, outputs, weights.initializers
        ),
        opset_imports=[
            onnx.helper.make_opsetid("", _OPSET),
            onnx.helper.make_opsetid("com.microsoft", 1),
        ],
        ir_version=_IR_VERSION,
    )
    model.producer_name, _, model.producer_version = producer.partition(" ")
    return model


def _signature(this: ModelDescription) -> tuple[list[Any], list[Any]]:
    import onnx

    def value(name: str, kind: int, *shape: str | int) -> Any:
        return onnx.helper.make_tensor_value_info(name, kind, shape)

    number, ids = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    batch, length, total = "batch_size", "sequence_length", "total_sequence_length"
    inputs = [
        value("input_ids", ids, batch, length),
        value("attention_mask", ids, batch, total),
        value("position_ids", ids, batch, length),
    ]
    outputs = [value("logits", number, batch, length, this.vocab_size)]
    heads, size = this.num_kv_heads, this.head_dim
    for i in range(this.num_layers):
        for part in ("key", "value"):
            past = value(
                f"past_key_values.{i}.{part}", number, batch, heads, "past_sequence_length", size
            )
            inputs.append(past)
            outputs.append(value(f"present.{i}.{part}", number, batch, heads, total, size))
    return inputs, outputs


class _Graph:
    """Nodes in order; every value is named after the place it is computed at."""

    def __init__(self, weights: OnnxWeights) -> None:
        self.nodes: list[Any] = []
        self.weights = weights
        self._taken: dict[str, int] = {}

    def node(self, at: str, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds an operator with one output; returns its name."""
        return self.nodes_of(at, op, *inputs, num=1, domain=domain, **attributes)[0]

    def nodes_of(
        self, at: str, op: str, *inputs: str, num: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Adds an operator with `num` outputs; returns their names."""
        import onnx

        name = f"{at}/{op}"
        count = self._taken[name] = self._taken.get(name, -1) + 1
        name += f"_{count}" if count else ""
        outputs = [f"{name}/output_{i}" for i in range(num)]
        node = onnx.helper.make_node(op, inputs, outputs, name, domain=domain, **attributes)
        self.nodes.append(node)
        return outputs

    def rename(self, output: str) -> None:
        """Names the last node's only output."""
        self.nodes[-1].output[0] = output

    def ints(self, *values: int) -> str:
        """A constant (n,) int64."""
        name = f"/constants/int64/{'_'.join(map(str, values))}"
        return self.weights.constant(name, np.array(values, np.int64))

    def scalar(self, value: int) -> str:
        """A constant int64 without dimensions."""
        return self.weights.constant(f"/constants/int64/scalar_{value}", np.array(value, np.int64))

    def number(self, value: float | np.float32) -> str:
        """A constant float32 without dimensions."""
        number = np.float32(value)
        return self.weights.constant(f"/constants/float32/{number}", np.array(number))


class _Forward:
    """Adds the forward pass to a graph.

    The hidden state is (batch * length, hidden) throughout; attention alone knows both.
    """

    def __init__(self, description: ModelDescription, graph: _Graph) -> None:
        self._this = description
        self._graph = graph
        self._ropes: list[tuple[str, str]] = []
        self._masks: dict[int, str] = {}
        self._shapes: dict[str, str] = {}

    def run(self) -> None:
        """Adds everything."""
        this, node = self._this, self._graph.node
        at = "/model"
        ids_shape = node(at, "Shape", "input_ids")
        for name, tail in {
            "query": (this.num_heads, this.head_dim),
            "key": (this.num_kv_heads, this.head_dim),
            "logits": (this.vocab_size,),
        }.items():
            self._shapes[name] = node(at, "Concat", ids_shape, self._graph.ints(*tail), axis=0)
        self._add_masks(ids_shape)
        self._ropes = [self._rope(number) for number in range(this.num_ropes)]
        x = self._embed()
        for number, layer in enumerate(this.layers):
            at = f"/model/layers.{number}"
            x = node(at, "Add", x, self._attention(x, number, layer))
            x = node(at, "Add", x, self._ffn(x, number))
        x = self._norm(x, "final_norm", "/model/norm")
        x = self._transformed(x, this.hidden_size, "/model/norm")
        logits = self._linear(x, "embed" if this.is_tied else "head", "/lm_head")
        node("/lm_head", "Reshape", logits, self._shapes["logits"])
        self._graph.rename("logits")

    def _add_masks(self, ids_shape: str) -> None:
        """What is added to the scores, (batch, 1, 1, length, total), for each window there is."""
        graph, node, at = self._graph, self._graph.node, "/model/mask"
        zero = graph.scalar(0)
        length = node(at, "Gather", ids_shape, graph.scalar(1))
        past = node(at, "Shape", "past_key_values.0.key", start=2, end=3)
        past = node(at, "Squeeze", past)
        total = node(at, "Add", past, length)
        one = graph.scalar(1)
        queries = node(at, "Range", past, total, one)
        keys = node(at, "Range", zero, total, one)
        queries = node(at, "Unsqueeze", queries, graph.ints(1))
        distance = node(at, "Sub", queries, keys)
        is_token = node(at, "Greater", "attention_mask", zero)
        is_token = node(at, "Unsqueeze", is_token, graph.ints(1, 2, 3))
        is_past = node(at, "GreaterOrEqual", distance, zero)
        for window in sorted({layer.window for layer in self._this.layers}):
            seen = is_past
            if window:
                is_near = node(at, "Less", distance, graph.scalar(window))
                seen = node(at, "And", is_past, is_near)
            seen = node(at, "And", seen, is_token)
            mask = node(at, "Where", seen, graph.number(0), graph.number(_MASKED))
            self._masks[window] = mask

    def _rope(self, number: int) -> tuple[str, str]:
        """Cosine and sine, (batch, 1, length, d / 2).

        The angle is reduced to one turn in double, so that it is right at every position.
        """
        import onnx

        graph, node, at = self._graph, self._graph.node, f"/model/rope.{number}"
        table = self._this.inv_freqs[number].astype(np.float64)
        positions = node(at, "Unsqueeze", "position_ids", graph.ints(1, 3))
        positions = node(at, "Cast", positions, to=onnx.TensorProto.DOUBLE)
        frequencies = graph.weights.constant(f"rope.{number}.inv_freq", table)
        turn = graph.weights.constant("/constants/float64/turn", np.array(2 * math.pi))
        angle = node(at, "Mod", node(at, "Mul", positions, frequencies), turn, fmod=1)
        angle = node(at, "Cast", angle, to=onnx.TensorProto.FLOAT)
        return node(at, "Cos", angle), node(at, "Sin", angle)

    def _embed(self) -> str:
        graph, node, at = self._graph, self._graph.node, "/model/embed_tokens"
        table = graph.weights.matrix("embed")
        ids = node(at, "Reshape", "input_ids", graph.ints(-1))
        x = node(at, "Gather", table.codes, ids)
        if table.block:
            x = self._dequantize(x, ids, table, at)
        if self._this.is_tied:  # transformed as a head: this undoes it
            x = self._transformed(x, self._this.hidden_size, at)
        if self._this.embedding_scale != 1:
            x = node(at, "Mul", x, graph.number(self._this.embedding_scale))
        if self._this.has_embed_scale:
            x = node(at, "Mul", x, graph.weights.vector("embed_scale"))
        return x

    def _dequantize(self, codes: str, ids: str, table: Matrix, at: str) -> str:
        """Rows of a matrix in blocks: (n, blocks, bytes) uint8 to (n, cols)."""
        import onnx

        graph, node = self._graph, self._graph.node
        last = graph.ints(-1)
        if table.bits == 4:
            low = graph.weights.constant("/constants/uint8/15", np.array(15, np.uint8))
            four = graph.weights.constant("/constants/uint8/4", np.array(4, np.uint8))
            halves = (
                node(at, "BitwiseAnd", codes, low),
                node(at, "BitShift", codes, four, direction="RIGHT"),
            )
            pairs = [node(at, "Unsqueeze", half, last) for half in halves]
            codes = node(at, "Concat", *pairs, axis=-1)
            codes = node(at, "Reshape", codes, graph.ints(0, 0, table.block))
        zero = graph.number(1 << (table.bits - 1))
        if table.zero_points:
            zero = node(at, "Unsqueeze", node(at, "Gather", table.zero_points, ids), last)
        scales = node(at, "Unsqueeze", node(at, "Gather", table.scales, ids), last)
        values = node(at, "Cast", codes, to=onnx.TensorProto.FLOAT)
        values = node(at, "Mul", node(at, "Sub", values, zero), scales)
        values = node(at, "Reshape", values, graph.ints(0, -1))
        if table.cols % table.block:
            values = node(at, "Slice", values, graph.ints(0), graph.ints(table.cols), graph.ints(1))
        return values

    def _attention(self, x: str, number: int, layer: Layer) -> str:
        this, graph, node = self._this, self._graph, self._graph.node
        name, at = f"layers.{number}.", f"/model/layers.{number}/self_attn"
        x = self._norm(x, name + "attn_norm", f"/model/layers.{number}/input_layernorm")
        x = self._transformed(x, this.hidden_size, f"/model/layers.{number}/input_layernorm")
        query, key, value = (self._heads(x, number, role, layer.rope) for role in ("q", "k", "v"))
        query = node(at, "Mul", query, graph.number(this.attention_scale))
        shared = []
        for fresh, part in ((key, "key"), (value, "value")):
            node(at, "Concat", f"past_key_values.{number}.{part}", fresh, axis=2)
            graph.rename(f"present.{number}.{part}")
            shared.append(node(at, "Unsqueeze", f"present.{number}.{part}", graph.ints(2)))
        # (batch, kv heads, heads of each, length, d) meets (batch, kv heads, 1, total, d)
        groups = this.num_heads // this.num_kv_heads
        split = graph.ints(0, this.num_kv_heads, groups, -1, this.head_dim)
        query = node(at, "Reshape", query, split)
        keys = node(at, "Transpose", shared[0], perm=[0, 1, 2, 4, 3])
        scores = node(at, "Add", node(at, "MatMul", query, keys), self._masks[layer.window])
        mixed = node(at, "MatMul", node(at, "Softmax", scores, axis=-1), shared[1])
        mixed = node(at, "Transpose", mixed, perm=[0, 3, 1, 2, 4])
        mixed = node(at, "Reshape", mixed, graph.ints(-1, this.num_heads * this.head_dim))
        mixed = self._transformed(mixed, this.num_heads * this.head_dim, at)
        out = self._linear(mixed, name + "o", f"{at}/o_proj")
        if this.has_post_norms:
            at = f"/model/layers.{number}/post_attention_layernorm"
            out = self._norm(out, name + "post_attn_norm", at)
        return out

    def _heads(self, x: str, number: int, role: str, rope: int) -> str:
        """Queries, keys or values: (batch, heads, length, d), normed and rotated as they are."""
        this, node = self._this, self._graph.node
        name, at = f"layers.{number}.{role}", f"/model/layers.{number}/self_attn/{role}"
        bias = f"{name}_bias" if this.has_qkv_bias else None
        y = self._linear(x, name, f"{at}_proj", bias)
        y = node(at, "Reshape", y, self._shapes["query" if role == "q" else "key"])
        if this.has_qk_norm and role != "v":
            y = self._norm(y, f"{name}_norm", f"{at}_norm")
        y = node(at, "Transpose", y, perm=[0, 2, 1, 3])
        if role == "v":
            return y
        cos, sin = self._ropes[rope]
        first, second = self._graph.nodes_of(at, "Split", y, num=2, axis=-1, num_outputs=2)
        turned = (
            node(at, "Sub", node(at, "Mul", first, cos), node(at, "Mul", second, sin)),
            node(at, "Add", node(at, "Mul", second, cos), node(at, "Mul", first, sin)),
        )
        return node(at, "Concat", *turned, axis=-1)

    def _ffn(self, x: str, number: int) -> str:
        this, node = self._this, self._graph.node
        name, layer = f"layers.{number}.", f"/model/layers.{number}"
        norms = ("post_attention_layernorm", "")
        if this.has_post_norms:
            norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        at = f"{layer}/mlp"
        x = self._norm(x, name + "ffn_norm", f"{layer}/{norms[0]}")
        x = self._transformed(x, this.hidden_size, f"{layer}/{norms[0]}")
        gate = self._linear(x, name + "gate", f"{at}/gate_proj")
        gate = self._silu(gate, at) if this.activation == "silu" else self._gelu_tanh(gate, at)
        both = node(at, "Mul", gate, self._linear(x, name + "up", f"{at}/up_proj"))
        both = self._transformed(both, this.ffn_size, at)
        out = self._linear(both, name + "down", f"{at}/down_proj")
        if this.has_post_norms:
            out = self._norm(out, name + "post_ffn_norm", f"{layer}/{norms[1]}")
        return out

    def _silu(self, x: str, at: str) -> str:
        node = self._graph.node
        return node(f"{at}/act_fn", "Mul", x, node(f"{at}/act_fn", "Sigmoid", x))

    def _gelu_tanh(self, x: str, at: str) -> str:
        node, number, at = self._graph.node, self._graph.number, f"{at}/act_fn"
        cube = node(at, "Mul", node(at, "Mul", node(at, "Mul", x, x), x), number(0.044715))
        inner = node(at, "Mul", node(at, "Add", x, cube), number(math.sqrt(2 / math.pi)))
        outer = node(at, "Add", node(at, "Tanh", inner), number(1))
        return node(at, "Mul", node(at, "Mul", x, number(0.5)), outer)

    def _transformed(self, x: str, cols: int, at: str) -> str:
        """Hidden values (n, cols) as a matrix of the file expects them."""
        graph, node = self._graph, self._graph.node
        if not self._this.has_hadamard:
            return x
        done = []
        for first, width, block in _alike(cols):
            part = x
            if width < cols:
                ends = graph.ints(first), graph.ints(first + width), graph.ints(1)
                part = node(at, "Slice", x, *ends)
            matrix = graph.weights.constant(f"{HADAMARD_NAME}{block}", matrix_of(block))
            part = node(at, "Reshape", part, graph.ints(-1, width // block, block))
            part = node(at, "MatMul", part, matrix)
            done.append(node(at, "Reshape", part, graph.ints(-1, width)))
        return node(at, "Concat", *done, axis=1) if len(done) > 1 else done[0]

    def _norm(self, x: str, canonical: str, at: str) -> str:
        """RMSNorm over the last axis."""
        graph, node = self._graph, self._graph.node
        square = node(at, "Pow", x, graph.number(2))
        mean = node(at, "ReduceMean", square, graph.ints(-1))
        root = node(at, "Sqrt", node(at, "Add", mean, graph.number(self._this.norm_eps)))
        return node(at, "Mul", node(at, "Div", x, root), graph.weights.vector(canonical))

    def _linear(self, x: str, canonical: str, at: str, bias: str | None = None) -> str:
        """(n, cols) times a matrix, (n, rows)."""
        graph, node = self._graph, self._graph.node
        matrix = graph.weights.matrix(canonical)
        offset = [graph.weights.vector(bias)] if bias else []
        if not matrix.block:
            return node(at, "Gemm", x, matrix.codes, *offset, transB=1)
        scales = [matrix.scales, matrix.zero_points] if matrix.zero_points else [matrix.scales]
        y = node(
            at,
            "MatMulNBits",
            x,
            matrix.codes,
            *scales,
            domain="com.microsoft",
            K=matrix.cols,
            N=matrix.rows,
            bits=matrix.bits,
            block_size=matrix.block,
            accuracy_level=1,  # float32; higher ones round the activations
        )
        return node(at, "Add", y, *offset) if offset else y


def _alike(cols: int) -> list[tuple[int, int, int]]:
    """Superblocks of the same blocks taken together: first column, width and a block's width."""
    found: list[tuple[int, int, int]] = []
    for first, width, block in blocks(cols):
        if found and found[-1][2] == block:
            start, before, _ = found[-1]
            found[-1] = (start, before + width, block)
        else:
            found.append((first, width, block))
    return found
