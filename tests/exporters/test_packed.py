"""GPTQ and AWQ checkpoints, packed here bit by bit as AutoGPTQ and AutoAWQ lay them out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tiny_models import write_tiny_model

from edgellm.cli import cli
from edgellm.errors import EdgeLLMError, FormatError, UnsupportedModelError
from edgellm.exporters.export import ExportOptions, export_model
from edgellm.exporters.open_source import open_source
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize
from edgellm.models import fuse
from edgellm.types import Float32Array, TensorFormat

Arrays = dict[str, npt.NDArray[Any]]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: npt.NDArray[np.int64], order: tuple[int, ...] = tuple(range(8))) -> Any:
    """(n, 8 m) numbers of 0..15 to (n, m) int32: nibble i of a word is number order[i]."""
    result = np.zeros((len(codes), codes.shape[1] // 8), np.int64)
    for nibble, number in enumerate(order):
        result |= codes[:, number::8] << 4 * nibble
    return result.astype(np.uint32).view(np.int32)


class Checkpoint:
    """A tiny Llama folder with packed matrices, and what they stand for."""

    def __init__(self, folder: Path, method: str, group: int, **config: Any) -> None:
        self.folder = write_tiny_model(folder, "llama", **SIZES)
        self.random = np.random.default_rng(len(method) + group)
        self.config = {"quant_method": method, "bits": 4, "group_size": group, **config}
        self.method, self.group = method, group
        self.wanted: dict[str, Float32Array] = {}
        self.tensors: Arrays = {}
        for name, array in load_file(self.folder / "model.safetensors").items():
            if name.endswith("_proj.weight"):
                self.pack(name.removesuffix(".weight"), *array.shape)
            else:
                self.tensors[name] = array.astype(np.float16)
        self.write()

    def pack(self, stem: str, outputs: int, inputs: int) -> None:
        random = self.random
        num_groups = 1 if self.group == -1 else -(-inputs // self.group)
        index = np.arange(inputs) // (inputs if self.group == -1 else self.group)
        if self.config.get("desc_act"):
            index = random.permutation(index)
        codes = random.integers(0, 16, (inputs, outputs))
        zeros = random.integers(0, 16, (num_groups, outputs))
        scales = (random.random((num_groups, outputs)) * 0.02 + 0.001).astype(np.float16)
        values = np.empty((outputs, inputs), np.float32)
        for column in range(inputs):
            g = index[column]
            values[:, column] = (codes[column] - zeros[g]) * scales[g].astype(np.float32)
        self.wanted[f"{stem}.weight"] = values
        if self.method == "gptq":
            kept = (zeros - 1) % 16 if self.config.get("checkpoint_format") != "gptq_v2" else zeros
            self.tensors[f"{stem}.qweight"] = np.ascontiguousarray(words(codes.T).T)
            self.tensors[f"{stem}.qzeros"] = words(kept)
            self.tensors[f"{stem}.g_idx"] = index.astype(np.int32)
        else:
            self.tensors[f"{stem}.qweight"] = words(codes, AWQ_OUTPUTS)
            self.tensors[f"{stem}.qzeros"] = words(zeros, AWQ_OUTPUTS)
        self.tensors[f"{stem}.scales"] = scales

    def write(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors")
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "quantization_config": self.config}))


def test_a_single_file_of_another_name(tmp_path: Path) -> None:
    folder = Checkpoint(tmp_path / "model", "gptq", 64).folder
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-64g.safetensors")
    assert open_source(folder).tensors.dtype("model.layers.0.mlp.up_proj.weight") == "GPTQ g64"
    (folder / "another.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match=r"neither model.safetensors nor"):
        open_source(folder)


@pytest.mark.parametrize(
    ("method", "group", "config"),
    [
        ("gptq", 128, {}),
        ("gptq", 32, {"checkpoint_format": "gptq", "sym": False}),
        ("gptq", 64, {"checkpoint_format": "gptq_v2"}),
        ("gptq", -1, {}),
        ("gptq", 64, {"desc_act": True}),
        ("awq", 128, {"version": "gemm", "zero_point": True}),
        ("awq", 32, {"version": "GEMM"}),
    ],
)
def test_matrices_are_what_the_packing_stands_for(
    tmp_path: Path, method: str, group: int, config: dict[str, Any]
) -> None:
    checkpoint = Checkpoint(tmp_path / "m", method, group, **config)
    source = open_source(checkpoint.folder)
    assert not [name for name in source.tensors.shapes if ".q" in name and "q_proj" not in name]
    for name, values in checkpoint.wanted.items():
        assert source.tensors.shapes[name] == values.shape
        assert np.array_equal(source.tensors.rows(name, 0, len(values)), values), name
        assert np.array_equal(source.tensors.rows(name, 13, 22), values[13:35]), name


def fast(folder: Path, output: Path) -> Any:
    return export_model(folder, output, ExportOptions(quality="fast"))


def test_gptq_with_a_scale_a_row_is_carried_over_exactly(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "m", "gptq", -1)
    report = fast(checkpoint.folder, tmp_path / "x.edge")
    exact = dict.fromkeys(("qkv", "o", "gate_up", "down"), 0.0)
    assert report.rounding == {"GPTQ per row": exact}
    stem = "model.layers.1."
    q, k, v, o, gate, up, down = (
        checkpoint.wanted[f"{stem}{part}_proj.weight"]
        for part in (
            *(f"self_attn.{name}" for name in "qkvo"),
            *(f"mlp.{name}" for name in ("gate", "up", "down")),
        )
    )
    tensors = {"qkv": [q, k, v], "o": [o], "gate_up": [gate, up], "down": [down]}
    with EdgeFile.open(tmp_path / "x.edge") as file:
        assert file.meta["quantization"]["rounding"] == report.rounding
        assert file.meta["quantization"]["tensors"]["layers.1.o"] == "GPTQ per row"
        for name, parts in tensors.items():
            wanted = fuse(f"layers.1.{name}", parts)
            data = file.tensor_data(f"layers.1.{name}")
            assert np.array_equal(dequantize(data, TensorFormat.E4, *wanted.shape), wanted), name


def test_the_command_says_what_was_carried_over(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "m", "awq", 128)
    output = str(tmp_path / "x.edge")
    arguments = ["export", str(checkpoint.folder), "-o", output, "--quality", "fast"]
    exported = CliRunner().invoke(cli, arguments).output
    shown = CliRunner().invoke(cli, ["show", output]).output
    for text in (exported, shown):
        line = next(line for line in text.splitlines() if line.startswith("weights "))
        assert re.search(r"re-rounded from AWQ g128: .*qkv [\d.]+ %.*\(relative RMS error\)", line)
        assert line.endswith("carried over exactly from AWQ g128: o")


def test_awq_with_two_scales_a_superblock_is_rounded_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "m", "awq", 128)
    report = fast(checkpoint.folder, tmp_path / "x.edge")
    assert set(report.rounding) == {"AWQ g128"}
    with EdgeFile.open(tmp_path / "x.edge") as file:
        errors, squares = 0.0, 0.0
        for layer in range(SIZES["num_hidden_layers"]):
            wanted = checkpoint.wanted[f"model.layers.{layer}.mlp.down_proj.weight"]
            data = file.tensor_data(f"layers.{layer}.down")
            found = dequantize(data, TensorFormat.E4, *wanted.shape)
            errors += float(np.sum((found - wanted).astype(np.float64) ** 2))
            squares += float(np.sum(wanted.astype(np.float64) ** 2))
    assert 0 < report.rounding["AWQ g128"]["down"] < 0.1
    assert report.rounding["AWQ g128"]["down"] == pytest.approx(np.sqrt(errors / squares), rel=0.01)
    # its rows are one group of 128
    assert report.rounding["AWQ g128"]["o"] == 0


def test_a_bias_of_zeros_that_the_model_lacks_is_passed_over(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "m", "gptq", 128)
    name = "model.layers.0.self_attn.q_proj.bias"
    checkpoint.tensors[name] = np.zeros(128, np.float16)
    checkpoint.write()
    fast(checkpoint.folder, tmp_path / "x.edge")
    checkpoint.tensors[name] = np.ones(128, np.float16)
    checkpoint.write()
    with pytest.raises(FormatError, match=f"left over: {name}"):
        fast(checkpoint.folder, tmp_path / "x.edge")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 8}, "bits is 8; edgellm reads GPTQ and AWQ of 4 bits, bits 4"),
        ({"bits": True}, "bits is True"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": None}, "quant_method is None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is False"),
    ],
)
def test_other_packings_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    checkpoint = Checkpoint(tmp_path / "m", "gptq", 128)
    checkpoint.config |= config
    checkpoint.write()
    with pytest.raises(UnsupportedModelError) as caught:
        open_source(checkpoint.folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def _set(name: str, change: Callable[[Any], Any]) -> Callable[[Arrays], object]:
    full = f"model.layers.0.mlp.up_proj.{name}"
    return lambda tensors: tensors.update({full: np.ascontiguousarray(change(tensors[full]))})


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (_set("g_idx", lambda a: a + 1), r"g_idx names groups outside 0\.\.1"),
        (_set("g_idx", lambda a: a - 1), r"g_idx names groups outside 0\.\.1"),
        (_set("g_idx", lambda a: a[:8]), "g_idx is int32"),
        (_set("g_idx", lambda a: a.astype(np.float32)), "g_idx is float32"),
        (_set("scales", lambda a: a[:1]), "scales for 256 inputs and 256 outputs"),
        (_set("scales", lambda a: a.astype(np.int32)), "is I32 .*, not a matrix of F16"),
        (_set("qzeros", lambda a: a[:, :3]), "24 zero points for 256 outputs"),
        (_set("qzeros", lambda a: a[:1]), "scales for 256 inputs"),
        (_set("qweight", lambda a: a[0]), "not a matrix of I32"),
        (_set("qweight", lambda a: a[:4]), "for 32 inputs"),
        (_set("qweight", lambda a: a.astype(np.float32)), "is F32"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.scales"), "up_proj.scales' is missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.zeros((256, 256), "f2")}),
            "up_proj.weight' is there both packed and as floats",
        ),
    ],
)
def test_tensors_that_do_not_belong_together_are_one_line(
    tmp_path: Path, update: Callable[[Arrays], object], message: str
) -> None:
    checkpoint = Checkpoint(tmp_path / "m", "gptq", 128)
    update(checkpoint.tensors)
    checkpoint.write()
    with pytest.raises(EdgeLLMError, match=message) as caught:
        fast(checkpoint.folder, tmp_path / "x.edge")
    assert "\n" not in str(caught.value)


def test_an_empty_matrix_is_refused_whatever_the_groups(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "m", "gptq", -1)
    _set("qweight", lambda a: a[:0])(checkpoint.tensors)
    checkpoint.write()
    with pytest.raises(FormatError, match=r"up_proj\.qweight is empty"):
        open_source(checkpoint.folder)
