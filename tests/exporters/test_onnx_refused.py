"""ONNX graphs that compute something else than a decoder that edgellm knows are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_tiny_model

from edgellm.errors import EdgeLLMError, FormatError
from edgellm.exporters.export import export_model
from edgellm.exporters.open_source import open_source
from edgellm.exporters.to_onnx import export_onnx

REASON = 'needs pip install "edgellm[onnx]"'
onnx = pytest.importorskip("onnx", reason=REASON)
decoders = pytest.importorskip("onnx_decoders", reason=REASON)


@pytest.fixture(scope="module")
def plain_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama without RoPE's scaling, which a genai_config.json cannot say."""
    sizes = {"rope_scaling": None, "num_hidden_layers": 1}
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "hf", "llama", **sizes)


def change_graph(folder: Path, change: Callable[[Any], None]) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model.graph)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def set_attribute(graph: Any, op: str, key: str, value: object) -> None:
    for node in graph.node:
        if node.op_type == op:
            kept = [item for item in node.attribute if item.name != key]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute(key, value)])


@pytest.mark.parametrize(
    ("op", "key", "value", "message"),
    [
        ("GroupQueryAttention", "causal", 0, "with causal is not supported"),
        ("GroupQueryAttention", "softcap", 30.0, "with softcap is not supported"),
        ("GroupQueryAttention", "of_tomorrow", 1, "with of_tomorrow is not supported"),
        ("GroupQueryAttention", "do_rotary", 0, "the queries of layer 0 are not turned by RoPE"),
        ("GroupQueryAttention", "scale", b"x", "attribute 'scale' is not a float"),
        ("MatMulNBits", "weight_prepacked", 1, "with weight_prepacked is not supported"),
        ("MatMulNBits", "bits", 0, "numbers of 0 bits"),
        ("MatMulNBits", "bits", -1, "numbers of -1 bits"),
        ("MatMulNBits", "bits", 1 << 40, "numbers of 1099511627776 bits"),
    ],
)
def test_attributes_that_change_the_result_are_refused(
    op: str, key: str, value: object, message: str, plain_hf: Path, tmp_path: Path
) -> None:
    folder = decoders.genai_folder(plain_hf, tmp_path / "onnx", decoders.GenaiOptions())
    shutil.copy(plain_hf / "config.json", folder)
    change_graph(folder, lambda graph: set_attribute(graph, op, key, value))
    with pytest.raises(EdgeLLMError, match=message):
        open_source(folder)


def test_caches_of_a_part_of_each_head_are_refused(plain_hf: Path, tmp_path: Path) -> None:
    def halve(graph: Any) -> None:
        for tensor in graph.initializer:
            if tensor.name in ("cos_cache", "sin_cache"):
                table = onnx.numpy_helper.to_array(tensor, str(folder))[:, ::2]
                tensor.CopyFrom(onnx.numpy_helper.from_array(table.copy(), tensor.name))

    folder = decoders.genai_folder(plain_hf, tmp_path / "onnx", decoders.GenaiOptions())
    change_graph(folder, halve)
    with pytest.raises(
        FormatError, match=r"has 8 frequencies of RoPE .*, its configuration says 16"
    ):
        open_source(folder)


@pytest.mark.parametrize(
    ("swapped", "layer"), [({0: 1}, "layer 2 has"), ({0: 1, 1: 0}, "layer 0 has"), ({}, "")]
)
def test_each_layer_has_its_own_rope(swapped: dict[int, int], layer: str, tmp_path: Path) -> None:
    hf = write_tiny_model(tmp_path / "hf", "gemma3")
    export_model(hf, tmp_path / "x.edge")
    folder = export_onnx(tmp_path / "x.edge", tmp_path / "onnx", "float").output
    names = {
        f"/model/rope.{old}/{part}/output_0": f"/model/rope.{new}/{part}/output_0"
        for old, new in swapped.items()
        for part in ("Cos", "Sin")
    }

    def swap(graph: Any) -> None:
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    change_graph(folder, swap)
    if not swapped:
        open_source(folder)
        return
    with pytest.raises(FormatError, match=f"{layer} 16 frequencies of RoPE"):
        open_source(folder)


def test_queries_that_nothing_turns_are_refused(plain_hf: Path, tmp_path: Path) -> None:
    def drop(graph: Any) -> None:
        for node in graph.node:
            if node.op_type in ("Cos", "Sin"):
                node.op_type = "Abs"

    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    shutil.copy(plain_hf / "config.json", folder)
    change_graph(folder, drop)
    with pytest.raises(EdgeLLMError, match="multiplies by constants"):
        open_source(folder)


def insert_after(graph: Any, number: int, op: str, others: list[str], **options: Any) -> None:
    """Puts an operation behind a MatMul; `others` are its inputs beside the product."""
    product = [node for node in graph.node if node.op_type == "MatMul"][number]
    node = onnx.helper.make_node(op, ["product", *others], [product.output[0]], **options)
    product.output[0] = "product"
    graph.node.insert(list(graph.node).index(product) + 1, node)


@pytest.mark.parametrize(
    ("product", "op", "number", "message"),
    [
        (5, "Mul", 0.22, "multiplied by 0.22"),
        (5, "Div", 8.0, "multiplied by 0.125"),
        (-1, "Div", 8.0, "multiplied by 0.125"),
        (0, "Mul", 2.0, "has in layer 0 scale .*, its configuration says 0.17677669"),
        (2, "Neg", None, "multiplied by -1"),
        (5, "Add", 1.0, "adds a number"),
        (5, "Sub", 1.0, "subtracts a number"),
        (5, "Pow", 3.0, "of plain and power values"),
        (5, "Sqrt", None, "of something other than a mean"),
        (5, "Tanh", None, "of something other than a polynomial"),
        (5, "Erf", None, r"of something other than x / sqrt\(2\)"),
    ],
)
def test_arithmetic_that_no_decoder_has_is_refused(
    product: int, op: str, number: float | None, message: str, plain_hf: Path, tmp_path: Path
) -> None:
    def add(graph: Any) -> None:
        others = []
        if number is not None:
            constant = onnx.numpy_helper.from_array(np.float32(number), "number")
            graph.initializer.append(constant)
            others.append("number")
        insert_after(graph, product, op, others)

    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    change_graph(folder, add)
    with pytest.raises(EdgeLLMError, match=message):
        open_source(folder)


@pytest.mark.parametrize("change", ["no product", "another number"])
def test_a_sigmoid_is_silu_only_beside_what_is_under_it(
    change: str, plain_hf: Path, tmp_path: Path
) -> None:
    def edit_gate(graph: Any) -> None:
        sigmoid = next(node for node in graph.node if node.op_type == "Sigmoid")
        product = next(node for node in graph.node if sigmoid.output[0] in node.input)
        if change == "another number":  # x * sigmoid(1.702 x)
            number = onnx.numpy_helper.from_array(np.float32(1.702), "number")
            graph.initializer.append(number)
            scaled = onnx.helper.make_node("Mul", [sigmoid.input[0], "number"], ["scaled"])
            graph.node.insert(list(graph.node).index(sigmoid), scaled)
            sigmoid.input[0] = "scaled"
            return
        for node in graph.node:
            for place, name in enumerate(node.input):
                if name == product.output[0]:
                    node.input[place] = sigmoid.output[0]
        graph.node.remove(product)

    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    change_graph(folder, edit_gate)
    with pytest.raises(EdgeLLMError, match=r"of (a sigmoid and )?something (other|else)"):
        open_source(folder)


@pytest.mark.parametrize("op", ["Mul", "Div", "Concat"])
def test_constants_that_meet_hidden_values_are_refused(
    op: str, plain_hf: Path, tmp_path: Path
) -> None:
    def add(graph: Any) -> None:
        for name, value in (
            ("gamma", np.full(288, 0.5, np.float32)),
            ("shape", np.array([1, 1, 288])),
        ):
            graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        shaped = onnx.helper.make_node("Reshape", ["gamma", "shape"], ["shaped"])
        graph.node.insert(0, shaped)
        insert_after(graph, 5, op, ["shaped"], **({"axis": 1} if op == "Concat" else {}))

    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    change_graph(folder, add)
    with pytest.raises(EdgeLLMError, match=rf"{op} .* is not supported"):
        open_source(folder)


def test_softmax_is_over_the_keys(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    change_graph(folder, lambda graph: set_attribute(graph, "Softmax", "axis", -2))
    with pytest.raises(EdgeLLMError, match="over another axis than the keys is not supported"):
        open_source(folder)
