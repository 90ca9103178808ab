"""An `.edge` model as ONNX: ONNX Runtime, which shares no code with us, computes the same model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from tiny_models import ARCHITECTURES, write_tiny_model

from edgellm.cli import cli
from edgellm.errors import EdgeLLMError, FormatError, MissingExtraError, UnsupportedModelError
from edgellm.exporters import to_onnx, to_onnx_witness
from edgellm.exporters.export import ExportOptions, export_model
from edgellm.exporters.to_onnx import export_onnx
from edgellm.exporters.to_onnx_config import hf_config
from edgellm.exporters.to_onnx_weights import Blocks, Weights, make_blocks
from edgellm.exporters.to_onnx_witness import OnnxModel
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize
from edgellm.models import ModelDescription, canonical_shapes, find_hf, specs
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array, TensorFormat

onnx = pytest.importorskip("onnx", reason='needs pip install "edgellm[onnx]"')
onnxruntime = pytest.importorskip("onnxruntime", reason='needs pip install "edgellm[onnx]"')

# More tokens than any window of the tiny models, 16.
IDS = [3 + 7 * i % 300 for i in range(75)]
# Two float32 computations of logits of up to 9; 7e-6 when written.
TOLERANCE = 3e-5
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 16,
    "rope_scaling": None,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def edge(
    tiny_edge_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A tiny model by name: those of tiny_edge_of, "mistral", "llama e4" with a head of 4 bits."""

    @functools.cache
    def make(name: str) -> Path:
        if name in (*ARCHITECTURES, "mixed", "transformed"):
            return tiny_edge_of(name)
        folder = tmp_path_factory.mktemp("edge")
        changes = MISTRAL if name == "mistral" else {}
        source = write_tiny_model(folder / "hf", "llama", **changes)
        head = "e4" if name == "llama e4" else "auto"
        export_model(source, folder / "model.edge", ExportOptions(head=head))
        return folder / "model.edge"

    return make


@pytest.fixture(scope="module")
def folder_of(
    edge: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Weights], Path]:
    @functools.cache
    def make(name: str, weights: Weights) -> Path:
        folder = tmp_path_factory.mktemp("onnx") / "model"
        return export_onnx(edge(name), folder, weights).output

    return make


def initializers(folder: Path) -> dict[str, npt.NDArray[Any]]:
    model = onnx.load(folder / "model.onnx")
    return {item.name: onnx.numpy_helper.to_array(item) for item in model.graph.initializer}


@pytest.mark.parametrize("weights", ["int4", "float"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral", "llama e4", "mixed", "transformed"])
def test_onnx_runtime_computes_the_logits_of_the_reference(
    name: str,
    weights: Weights,
    edge: Callable[[str], Path],
    folder_of: Callable[[str, Weights], Path],
) -> None:
    expected = ReferenceModel.from_edge(edge(name)).forward(IDS)
    found = OnnxModel(folder_of(name, weights)).logits(IDS, {})
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral"])
def test_pieces_through_the_cache_give_the_logits_of_the_whole(
    name: str, folder_of: Callable[[str, Weights], Path]
) -> None:
    model = OnnxModel(folder_of(name, "float"))
    past: dict[str, Float32Array] = {}
    cuts = ((0, 40), (40, 41), (41, 42), (42, len(IDS)))
    pieces = [model.logits(IDS[start:stop], past) for start, stop in cuts]
    np.testing.assert_allclose(
        np.concatenate(pieces), model.logits(IDS, {}), rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_padded_batch_gives_the_logits_of_each_sequence(
    name: str, folder_of: Callable[[str, Weights], Path]
) -> None:
    folder = folder_of(name, "int4")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    short, padding = IDS[:30], len(IDS) - 30
    mask = np.ones((2, len(IDS)), np.int64)
    mask[1, :padding] = 0
    inputs = {
        "input_ids": np.array([IDS, [0] * padding + short]),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0),
    }
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            shape = (2, value.shape[1], 0, value.shape[3])
            inputs[value.name] = np.zeros(shape, np.float32)
    whole, padded = session.run(["logits"], inputs)[0]
    model = OnnxModel(folder)
    np.testing.assert_allclose(whole, model.logits(IDS, {}), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(padded[padding:], model.logits(short, {}), rtol=0, atol=TOLERANCE)


def dequantize_blocks(blocks: Blocks) -> Float32Array:
    """As ONNX Runtime computes them."""
    codes = blocks.codes
    if blocks.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], -1)
    middle = np.full_like(blocks.scales, 1 << (blocks.bits - 1))
    zero = middle if blocks.zero_points is None else blocks.zero_points
    values = (codes.astype(np.float32) - zero[..., None]) * blocks.scales[..., None]
    return np.asarray(values.reshape(len(codes), -1), np.float32)


def test_blocks_of_8_bits_are_exact_and_of_4_bits_right_to_the_last_bits(
    edge: Callable[[str], Path],
) -> None:
    with EdgeFile.open(edge("mixed")) as file:
        formats = set()
        for entry in file.tensors.values():
            if entry.format == TensorFormat.F32:
                continue
            formats.add(entry.format)
            data = file.tensor_data(entry.name)
            expected = dequantize(data, entry.format, entry.rows, entry.cols)
            blocks = make_blocks(data, entry.format, entry.rows, entry.cols)
            found = dequantize_blocks(blocks)[:, : entry.cols]
            if blocks.bits == 8:
                assert (found == expected).all()
            else:
                np.testing.assert_allclose(found, expected, rtol=0, atol=3e-7 * expected.max())
        assert formats == {TensorFormat.E4, TensorFormat.E5, TensorFormat.E8}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_float_initialisers_are_the_weights_under_hugging_face_s_names(
    name: str, edge: Callable[[str], Path], folder_of: Callable[[str, Weights], Path]
) -> None:
    folder = folder_of(name, "float")
    config = json.loads((folder / "config.json").read_text())
    spec = find_hf(config)
    reference = ReferenceModel.from_edge(edge(name))
    found = initializers(folder)
    for source in spec.sources("hf", reference.description):
        expected = reference._get(source.canonical_name)
        assert found[source.source_name].dtype == np.float32
        assert (found[source.source_name] == expected).all(), source.source_name
    assert set(canonical_shapes(reference.description)) == {
        source.canonical_name for source in spec.sources("hf", reference.description)
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_float_graph_has_standard_operators_only_and_is_valid(
    name: str, folder_of: Callable[[str, Weights], Path]
) -> None:
    path = folder_of(name, "float") / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    nodes = onnx.load(path, load_external_data=False).graph.node
    assert {node.domain for node in nodes} == {""}
    names = [node.name for node in nodes]
    assert len(set(names)) == len(names)


def test_external_data_lies_on_pages_beside_the_model(
    folder_of: Callable[[str, Weights], Path],
) -> None:
    folder = folder_of("llama", "int4")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    ends = [0]
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            assert place["location"] == "model.onnx.data"
            assert int(place["offset"]) % 4096 == 0
            assert int(place["offset"]) >= ends[-1]
            ends.append(int(place["offset"]) + int(place["length"]))
    assert ends[-1] == (folder / "model.onnx.data").stat().st_size


def test_the_same_model_gives_the_same_bytes(
    edge: Callable[[str], Path], folder_of: Callable[[str, Weights], Path], tmp_path: Path
) -> None:
    first = folder_of("gemma3", "int4")
    second = export_onnx(edge("gemma3"), tmp_path / "again", "int4").output
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_the_text_side_goes_along_verbatim(
    tiny_hf: Callable[[str], Path], folder_of: Callable[[str, Weights], Path]
) -> None:
    source, folder = tiny_hf("llama"), folder_of("llama", "int4")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    assert (folder / "chat_template.jinja").read_text() == template


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral"])
def test_transformers_reads_config_and_tokenizer(
    name: str, folder_of: Callable[[str, Weights], Path]
) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle of the tests")
    folder = folder_of(name, "float")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert type(config).__name__.removesuffix("Config").removesuffix("Text").lower() == name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|stop|>"
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|start|>user\nHi<|stop|>\n<|start|>assistant\n"


def describe(path: Path) -> ModelDescription:
    return ReferenceModel.from_edge(path).description


def config_of(description: ModelDescription) -> dict[str, Any]:
    (spec,) = (one for one in specs() if one.architecture == description.architecture)
    return hf_config(description, spec, {"bos_id": 1, "eos_ids": [2]})


def test_llama_3_s_rope_of_a_gguf_is_found_again(edge: Callable[[str], Path]) -> None:
    plain = find_hf(config := config_of(describe(edge("llama")))).model_from_hf(
        {
            **config,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        }
    )
    as_gguf = replace(plain, rope=({"kind": "factors", "theta": 500_000},))
    assert config_of(as_gguf)["rope_scaling"]["factor"] == 32


def test_what_config_json_cannot_say_is_refused(edge: Callable[[str], Path]) -> None:
    description = describe(edge("llama"))
    odd = replace(
        description,
        rope=({"kind": "factors", "theta": 10_000},),
        inv_freqs=(description.inv_freqs[0] * np.linspace(1, 0.3, 16, dtype=np.float32),),
    )
    for changed in (odd, replace(description, attention_scale=0.3)):
        with pytest.raises(UnsupportedModelError, match=r"config\.json cannot describe"):
            config_of(changed)


def test_a_failed_export_leaves_nothing(
    edge: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(to_onnx, "build_model", full)
    with pytest.raises(EdgeLLMError, match="new: cannot write: No space left on device"):
        export_onnx(edge("llama"), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_refused(edge: Callable[[str], Path], tmp_path: Path) -> None:
    data = bytearray(edge("llama").read_bytes())
    with EdgeFile.open(edge("llama")) as file:
        place = file.tensors["layers.0.o"]
        data[file.sections[place.section].offset + place.offset] ^= 1
    (tmp_path / "damaged.edge").write_bytes(data)
    with pytest.raises(FormatError, match="CRC differs"):
        export_onnx(tmp_path / "damaged.edge", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.edge"]


def test_a_group_without_a_scale_is_refused(edge: Callable[[str], Path]) -> None:
    with EdgeFile.open(edge("llama e4")) as file:
        entry = file.tensors["layers.0.o"]
        data = np.zeros_like(file.tensor_data("layers.0.o"))
    with pytest.raises(ValueError, match="a group has a scale of 0"):
        make_blocks(data, entry.format, entry.rows, entry.cols)


def test_an_existing_folder_is_not_touched(edge: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(EdgeLLMError, match="old exists: remove it or name another folder"):
        export_onnx(edge("llama"), tmp_path / "old")
    assert list(tmp_path.rglob("*")) == [tmp_path / "old"]


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_names_the_command(
    package: str, edge: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = to_onnx.importlib.import_module

    def missing(name: str) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(to_onnx.importlib, "import_module", missing)
    needs_it = {
        "onnx": lambda: export_onnx(edge("llama"), tmp_path / "new"),
        "onnxruntime": lambda: OnnxModel(tmp_path),
    }
    with pytest.raises(MissingExtraError, match=r'pip install "edgellm\[onnx\]"'):
        needs_it[package]()
    assert list(tmp_path.iterdir()) == []


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_the_command_writes_a_folder(edge: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "new"
    result = run("export", "--to", "onnx", edge("llama"), "-o", output, "--onnx-weights", "float")
    assert result.exit_code == 0, result.output
    assert str(output) in result.output
    assert "model.embed_tokens.weight" in initializers(output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx", "--head", "e4"], "--head does nothing with --to onnx"),
        (["--onnx-weights", "float"], "--onnx-weights needs --to onnx"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = run("export", tmp_path / "model", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral"])
def test_verify_asks_the_witness(name: str, edge: Callable[[str], Path]) -> None:
    result = run("verify", "--against", "onnxruntime", edge(name))
    assert result.exit_code == 0, result.output
    assert "witness        ONNX Runtime" in result.output
    assert "nats; same first choice" in result.output


@pytest.mark.parametrize("name", [*ARCHITECTURES, "mistral"])
def test_the_witness_may_differ_by_what_the_roundings_cost_the_model(
    name: str, edge: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_onnx_witness, "_MAX_MEAN_KL", 0.0)
    result = run("verify", "--against", "onnxruntime", edge(name))
    assert result.exit_code == 0, result.output
    assert "(0.00000 allowed)" not in result.output


def test_verify_fails_where_the_witness_differs(
    edge: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(path: Path, folder: Path, weights: Weights) -> Any:
        """Writes another model: one norm is reversed."""
        report = export_onnx(path, folder, weights)
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        (norm,) = (item for item in model.graph.initializer if item.name == "model.norm.weight")
        reversed_ = onnx.numpy_helper.to_array(norm)[::-1].copy()
        norm.CopyFrom(onnx.numpy_helper.from_array(reversed_, norm.name))
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        return report

    monkeypatch.setattr(to_onnx_witness, "export_onnx", other)
    result = run("verify", "--against", "onnxruntime", edge("llama"))
    assert isinstance(result.exception, EdgeLLMError)
    assert "nats a token" in str(result.exception)
