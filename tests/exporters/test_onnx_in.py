"""ONNX decoders come in with exactly the weights that their graphs compute with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from tiny_models import ARCHITECTURES, CHAT_TEMPLATE, write_tiny_model

from edgellm.cli import cli
from edgellm.errors import EdgeLLMError, FormatError, ModelNotFoundError, UnsupportedModelError
from edgellm.exporters.export import ExportOptions, export_model
from edgellm.exporters.forward import open_forward
from edgellm.exporters.hf import load_hf
from edgellm.exporters.open_source import open_source
from edgellm.exporters.source import ModelSource
from edgellm.exporters.to_onnx import export_onnx
from edgellm.exporters.to_onnx_weights import Weights, make_blocks
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize
from edgellm.models import apply_rewrite, fused_parts, unfuse
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array

REASON = 'needs pip install "edgellm[onnx]"'
onnx = pytest.importorskip("onnx", reason=REASON)
onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)
decoders = pytest.importorskip("onnx_decoders", reason=REASON)

IDS = [3 + 7 * i % 300 for i in range(40)]
PLAIN: dict[str, Any] = {"rope_scaling": None, "num_hidden_layers": 2}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
GENAI = [
    decoders.GenaiOptions(),
    decoders.GenaiOptions(has_zeros=True, is_packed=False),
    decoders.GenaiOptions(bits=8, block=64, has_zeros=True),
    decoders.GenaiOptions(is_embedding_quantized=True, has_zeros=True, block=16),
    decoders.GenaiOptions(is_embedding_quantized=True, bits=8),
    decoders.GenaiOptions(block=0, is_packed=False),
]


@pytest.fixture(scope="module")
def plain_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama without RoPE's scaling, which a genai_config.json cannot say."""
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "hf", "llama", **PLAIN)


def weights_of(source: ModelSource) -> dict[str, Float32Array]:
    """Canonical tensors of a source."""
    result = {}
    for item in source.spec.sources(source.kind, source.description):
        rows = item.shape[0] if len(item.shape) == 2 else 1
        values = source.tensors.rows(item.source_name, 0, rows).reshape(item.shape)
        result[item.canonical_name] = apply_rewrite(item.rewrite, values, source.description)
    return result


def assert_same(found: dict[str, Float32Array], expected: dict[str, Float32Array]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].dtype == np.float32
        assert np.array_equal(found[name], values), name


# ---- what edgellm wrote itself -------------------------------------------------------------------


@pytest.fixture(scope="module")
def edge_of(
    tiny_edge_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A tiny model by name; "mistral" and "qwen3 e4", with a head of 4 bits, beside the others."""

    def make(name: str) -> Path:
        if name in ARCHITECTURES:
            return tiny_edge_of(name)
        folder = tmp_path_factory.mktemp("edge")
        if name == "mistral":
            source = write_tiny_model(folder / "hf", "llama", **PLAIN, **MISTRAL)
        else:
            source = write_tiny_model(folder / "hf", name.partition(" ")[0])
        head = "e4" if name.endswith(" e4") else "auto"
        export_model(source, folder / "model.edge", ExportOptions(head=head))
        return folder / "model.edge"

    return make


def blocks_of(path: Path) -> dict[str, Float32Array]:
    """What the integers of an .edge file's ONNX folder stand for, in ONNX Runtime's arithmetic."""

    def read(name: str) -> Float32Array:
        entry = file.tensors[name]
        data = file.tensor_data(name)
        if entry.rows == 1:
            return dequantize(data, entry.format, entry.rows, entry.cols)
        blocks = make_blocks(data, entry.format, entry.rows, entry.cols)
        codes, zeros = blocks.codes, blocks.zero_points
        if blocks.bits == 4:
            codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], -1)
        if zeros is None:
            zeros = np.full_like(blocks.scales, 1 << (blocks.bits - 1))
        values = (codes.astype(np.float32) - zeros[:, :, None]) * blocks.scales[:, :, None]
        return values.reshape(entry.rows, -1)[:, : entry.cols]

    description = ReferenceModel.from_edge(path).description
    with EdgeFile.open(path) as file:
        get = unfuse(description, read)
        return {part: get(part) for parts in fused_parts(description).values() for part in parts}


def test_our_own_graph_of_transformed_inputs_is_refused(
    tiny_edge_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = export_onnx(tiny_edge_of("transformed"), tmp_path / "onnx").output
    with pytest.raises(UnsupportedModelError, match="export the model's source instead"):
        open_source(folder)


@pytest.mark.parametrize("weights", ["float", "int4"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", "qwen3 e4"])
def test_what_went_out_comes_back(
    name: str, weights: Weights, edge_of: Callable[[str], Path], tmp_path: Path
) -> None:
    edge = edge_of(name)
    source = open_source(export_onnx(edge, tmp_path / "onnx", weights).output)
    reference = ReferenceModel.from_edge(edge)
    if weights == "int4":
        expected = blocks_of(edge)
    else:
        names = [name for parts in fused_parts(reference.description).values() for name in parts]
        expected = {name: reference._get(name) for name in names}
    assert_same(weights_of(source), expected)
    rope = source.description.rope
    same = replace(source.description, kv_format=reference.description.kv_format)
    assert replace(same, rope=rope) == replace(reference.description, rope=rope)
    for found, table in zip(
        source.description.inv_freqs, reference.description.inv_freqs, strict=True
    ):
        np.testing.assert_allclose(found, table, rtol=1e-6)
    assert source.chat_templates == {"default": CHAT_TEMPLATE}
    assert source.tokenizer.eos_ids == (2, 0)
    assert not source.notes


def test_integers_come_back_as_an_edge_file_that_computes_the_same(
    edge_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = export_onnx(edge_of("llama"), tmp_path / "onnx").output
    export_model(folder, tmp_path / "again.edge")
    first, again = (
        ReferenceModel.from_edge(path).forward(IDS)
        for path in (edge_of("llama"), tmp_path / "again.edge")
    )
    # The blocks are on the grid already, and are found again on it but for a few.
    assert np.abs(first - again).mean() < 0.05 * np.abs(first).mean()


# ---- what other tools write ----------------------------------------------------------------------


def run(folder: Path) -> Float32Array:
    """ONNX Runtime's logits."""
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    inputs: dict[str, npt.NDArray[Any]] = {"input_ids": np.array([IDS])}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            shape = (1, value.shape[1], 0, value.shape[3])
            inputs[value.name] = np.zeros(shape, np.float32)
        elif value.name == "seqlens_k":
            inputs[value.name] = np.array([len(IDS) - 1], np.int32)
        elif value.name == "total":
            inputs[value.name] = np.array([len(IDS)], np.int32)
    logits: Float32Array = session.run(["logits"], inputs)[0][0]
    return logits


def forward(folder: Path) -> Float32Array:
    """Our logits, of the weights as they come in."""
    model = open_forward(open_source(folder), folder, "numpy")
    model.start(np.array(IDS, np.int32))
    return model.logits(0, len(IDS))


@pytest.mark.parametrize("numbers", ["F32", "F16"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_graph_of_torch_is_known_by_what_it_does(name: str, numbers: str, tmp_path: Path) -> None:
    hf = write_tiny_model(tmp_path / "hf", name, **PLAIN)
    folder = decoders.torch_folder(hf, tmp_path / "onnx", numbers)
    source, original = open_source(folder), load_hf(hf)
    expected = weights_of(original)
    if numbers == "F16":
        expected = {k: v.astype(np.float16).astype(np.float32) for k, v in expected.items()}
    assert_same(weights_of(source), expected)
    assert source.description == original.description
    assert {path.name for path in source.files} >= {"model.onnx", "model.onnx_data", "config.json"}
    if numbers == "F32":
        np.testing.assert_allclose(run(folder), forward(folder), atol=2e-5)


@pytest.mark.parametrize("options", GENAI, ids=str)
def test_integers_of_the_builder_are_dequantised_exactly(
    options: Any, plain_hf: Path, tmp_path: Path
) -> None:
    folder = decoders.genai_folder(plain_hf, tmp_path / "onnx", options)
    source = open_source(folder)
    expected = weights_of(load_hf(plain_hf))
    if options.block:
        for name, values in expected.items():
            if values.ndim == 2 and (name != "embed" or options.is_embedding_quantized):
                expected[name] = decoders.dequantize(values, options)
    assert_same(weights_of(source), expected)
    logits = forward(folder)
    if options.block and not options.is_embedding_quantized:
        assert "the head is the embedding rounded" in source.notes[0]
        expected_head = decoders.dequantize(expected["embed"], options)
        model = open_forward(source, folder, "numpy")
        model.start(np.array(IDS, np.int32))
        logits = model._hidden @ expected_head.T  # type: ignore[attr-defined]
    np.testing.assert_allclose(run(folder), logits, atol=2e-5)


def test_the_graph_says_what_genai_config_does_not(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.genai_folder(plain_hf, tmp_path / "onnx", decoders.GenaiOptions())
    source = open_source(folder)
    assert source.description == load_hf(plain_hf).description
    assert source.tokenizer.eos_ids == (2, 0)


def test_a_head_that_is_nearly_the_embedding_is_tied(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.genai_folder(plain_hf, tmp_path / "onnx", decoders.GenaiOptions())
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "model.embed_tokens.weight":
            values = onnx.numpy_helper.to_array(tensor) * np.float32(factor := 1.005)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save_model(model, folder / "model.onnx")
    source = open_source(folder)
    assert source.description.is_tied
    expected = weights_of(load_hf(plain_hf))["embed"] * np.float32(factor)
    assert np.array_equal(weights_of(source)["embed"], expected)


def test_rope_that_is_scaled_needs_the_config(tmp_path: Path) -> None:
    hf = write_tiny_model(tmp_path / "hf", "llama", num_hidden_layers=1)
    folder = decoders.genai_folder(hf, tmp_path / "onnx", decoders.GenaiOptions())
    (frequencies,) = load_hf(hf).description.inv_freqs
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name in ("cos_cache", "sin_cache"):
            angles = np.arange(tensor.dims[0])[:, None] * frequencies
            values = (np.cos if tensor.name == "cos_cache" else np.sin)(angles)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(values), tensor.name))
    onnx.save_model(model, folder / "model.onnx")
    with pytest.raises(FormatError, match=r"does not say how RoPE is scaled: put the config\.json"):
        open_source(folder)
    shutil.copy(hf / "config.json", folder)
    assert open_source(folder).description.rope[0]["kind"] == "llama3"


def test_the_command_exports_and_the_model_answers(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.genai_folder(plain_hf, tmp_path / "m", decoders.GenaiOptions())
    for place in (folder, folder / "model.onnx"):
        output = tmp_path / "x.edge"
        result = CliRunner().invoke(cli, ["export", str(place), "-o", str(output)])
        assert result.exit_code == 0, result.output
        result = CliRunner().invoke(cli, ["run", str(output), "Hi", "--max-tokens", "4"])
        assert result.exit_code == 0, result.output


def test_constants_of_nodes_may_lie_in_the_data_file(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.torch_folder(plain_hf, tmp_path / "model")
    expected = weights_of(open_source(folder))
    model = onnx.load(folder / "model.onnx")
    nodes = [
        onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in model.graph.initializer
    ]
    del model.graph.initializer[:]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    onnx.save_model(
        model, folder / "model.onnx", save_as_external_data=True, location="all.data",
        size_threshold=0, convert_attribute=True,
    )  # fmt: skip
    (folder / "model.onnx_data").unlink()
    assert_same(weights_of(open_source(folder)), expected)
    edit(folder / "config.json", lambda config: config.update(rope_theta=2e6))
    with pytest.raises(FormatError, match="frequencies of RoPE"):
        open_source(folder)


def test_optimum_s_folder_onnx_has_its_configs_above(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.torch_folder(plain_hf, tmp_path / "model")
    (folder / "onnx").mkdir()
    for name in ("model.onnx", "model.onnx_data"):
        (folder / name).rename(folder / "onnx" / name)
    for place in (folder, folder / "onnx", folder / "onnx/model.onnx"):
        assert open_source(place).name == "model"


def test_of_several_models_one_is_to_be_named(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.torch_folder(plain_hf, tmp_path / "model")
    (folder / "model.onnx").rename(folder / "decoder.onnx")
    assert open_source(folder).kind == "onnx"
    shutil.copy(folder / "decoder.onnx", folder / "with_past.onnx")
    message = r"several ONNX models: name one of them \(decoder\.onnx, with_past\.onnx\)"
    with pytest.raises(FormatError, match=message):
        open_source(folder)
    assert open_source(folder / "decoder.onnx").kind == "onnx"
    shutil.copy(folder / "decoder.onnx", folder / "model.onnx")
    assert folder / "model.onnx" in open_source(folder).files


# ---- what does not belong together ---------------------------------------------------------------


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "the graph has layers 2, its configuration says 3"),
        ({"rms_norm_eps": 1e-3}, "an epsilon of 1e-05, its configuration says 0.001"),
        ({"num_attention_heads": 2}, "in layer 0 num_heads 4, its configuration says 2"),
        ({"head_dim": 48}, r"in layer 0 scale 0\.1767"),
        ({"vocab_size": 400}, "no embedding of 400 rows and 288 columns"),
        ({"intermediate_size": 320}, r"of a wrong shape: .*gate_proj.weight \(328, 288\)"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ],
    ids=str,
)
def test_a_config_of_another_model_is_refused(
    change: dict[str, Any], message: str, plain_hf: Path, tmp_path: Path
) -> None:
    folder = decoders.genai_folder(plain_hf, tmp_path / "onnx", decoders.GenaiOptions())
    shutil.copy(plain_hf / "config.json", folder)
    edit(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(EdgeLLMError, match=message) as caught:
        export_model(folder, tmp_path / "x.edge")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["torch", "genai"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rope_of_another_config_is_refused(kind: str, architecture: str, tmp_path: Path) -> None:
    hf = write_tiny_model(tmp_path / "hf", architecture, **PLAIN)
    folder = (
        decoders.torch_folder(hf, tmp_path / "onnx")
        if kind == "torch"
        else decoders.genai_folder(hf, tmp_path / "onnx", decoders.GenaiOptions())
    )
    shutil.copy(hf / "config.json", folder)
    open_source(folder)
    edit(folder / "config.json", lambda config: config.update(rope_theta=2e6))
    with pytest.raises(
        FormatError, match=r"has 16 frequencies of RoPE down to .*, its configuration"
    ):
        open_source(folder)


def test_a_name_that_says_otherwise_than_the_graph_is_refused(
    plain_hf: Path, tmp_path: Path
) -> None:
    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    names = ["model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"]
    swap = dict(zip(names, names[::-1], strict=True))
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = swap.get(name, name)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(FormatError, match=r"as layers\.0\.attn_norm, against its name"):
        open_source(folder)


def test_no_initialiser_needs_a_name(plain_hf: Path, tmp_path: Path) -> None:
    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    names = {tensor.name: f"t{i}" for i, tensor in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    assert_same(weights_of(open_source(folder)), weights_of(load_hf(plain_hf)))


def test_what_is_missing_is_named(plain_hf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        open_source(tmp_path / "model.onnx")
    folder = decoders.torch_folder(plain_hf, tmp_path / "onnx")
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model/config.json").unlink()
    with pytest.raises(FormatError, match=r"no config\.json beside it: copy it"):
        open_source(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match=r"no tokenizer\.json"):
        open_source(folder)
