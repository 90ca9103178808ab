"""Weights on a 4-bit grid are carried over, and what is not is said with its error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from source_files import gguf_of_llama
from tiny_models import write_tiny_model

from edgellm._native import quantize
from edgellm.cli import cli
from edgellm.exporters.carry import quantize_or_carry
from edgellm.exporters.export import ExportOptions, export_model
from edgellm.exporters.plan import chunks, read_chunk
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize
from edgellm.format.spec import tensor_bytes
from edgellm.types import Float32Array, TensorFormat

E4 = TensorFormat.E4
# Every matrix's columns are whole groups, and those of qkv and gate_up one superblock.
SIZES: dict[str, Any] = {"intermediate_size": 320, "num_hidden_layers": 2}


def stored(weights: Float32Array, by: Any) -> npt.NDArray[np.uint8]:
    out = np.empty(tensor_bytes(E4, *weights.shape), np.uint8)
    by(E4, weights, out)
    return out


def carried(weights: Float32Array) -> Float32Array:
    return dequantize(stored(weights, quantize_or_carry), E4, *weights.shape)


def on_grid(rows: int, cols: int, seed: int = 0) -> Float32Array:
    """Weights D * (s * q - z) with limits as E4's; D has 11 bits, so that products are exact."""
    random = np.random.default_rng(seed)
    s = random.integers(1, 16, (rows, cols // 32, 1))
    z = random.integers(np.maximum(0, 15 * s - 127), 129)
    integers = s * random.integers(0, 16, (rows, cols // 32, 32)) - z
    d = (random.random((rows, -(-cols // 256))) + 0.1).astype(np.float16)
    wide = np.repeat(d, 256, axis=1)[:, :cols].astype(np.float32)
    return integers.reshape(rows, cols).astype(np.float32) * wide


@pytest.mark.parametrize(("rows", "cols"), [(16, 256), (48, 576), (37, 1280), (5, 32), (300, 2048)])
def test_weights_on_the_grid_are_carried_bit_for_bit(rows: int, cols: int) -> None:
    weights = on_grid(rows, cols)
    assert np.array_equal(carried(weights), weights)


def test_scales_and_zero_points_in_float32_are_carried_within_float32_s_rounding() -> None:
    random = np.random.default_rng(1)
    codes = random.integers(0, 16, (64, 1, 512)).astype(np.float32)
    scales = random.random((64, 1, 1), np.float32) + np.float32(0.1)
    weights = ((codes - np.float32(7)) * scales).reshape(64, 512)
    error = np.abs(carried(weights) - weights)
    assert error.max() <= 2**-22 * np.abs(weights).max()
    assert np.abs(dequantize(stored(weights, quantize), E4, 64, 512) - weights).max() > 1e-3


def is_held(integers: npt.NDArray[np.int64]) -> bool:
    """Whether some s and z within E4's limits hold a group, by trying all of them."""
    for s in range(1, 16):
        for z in range(max(0, 15 * s - 127), 129):
            codes, rests = np.divmod(integers + z, s)
            if not rests.any() and codes.min() >= 0 and codes.max() <= 15:
                return True
    return False


@pytest.mark.parametrize(
    ("integers", "wanted"),
    [
        (np.arange(32) % 16 + 100, False),  # z would be below 0
        (np.arange(32) % 2 * 15 + 100, True),
        (np.arange(32) % 16 - 128, True),
        (np.full(32, 127), True),
        (np.full(32, -128), True),
        (np.full(32, 1), True),
        (np.arange(32) % 2 * 32 - 60, True),  # s is a divisor of the step
        (np.arange(32) % 2 * 34 - 60, False),  # its largest divisor is 2
        (np.arange(32) % 2 * 17 - 60, False),  # s would be 17, or a code
        (np.arange(32) % 16 * 15 - 98, True),
        (np.arange(32) % 16 * 15 - 113, True),
        (np.arange(32) % 9 * 3 + 20, True),
        (np.arange(32) % 9 * 3 + 22, False),
    ],
)
def test_groups_at_the_limits_of_the_format(integers: npt.NDArray[np.int64], wanted: bool) -> None:
    assert is_held(integers) == wanted
    others = np.arange(32) % 16 * 7 - 60
    row = np.concatenate((integers, others)).astype(np.float32) * np.float32(0.25)
    weights = np.tile(row, (16, 1))
    assert np.array_equal(carried(weights), weights) == wanted


def test_a_group_is_carried_whenever_some_scale_and_zero_point_hold_it() -> None:
    random = np.random.default_rng(4)
    held = 0
    for _ in range(60):
        span, step = random.integers(1, 17), random.integers(1, 18)
        low = random.integers(-128, max(-127, 128 - span * step))
        integers = np.clip(low + step * random.integers(0, span + 1, 32), -128, 127)
        others = np.arange(32) % 16 * 7 - 60
        row = np.concatenate((integers, others)).astype(np.float32) * np.float32(0.25)
        weights = np.tile(row, (16, 1))
        assert np.array_equal(carried(weights), weights) == is_held(integers), integers
        held += is_held(integers)
    assert 10 < held < 50


@pytest.mark.parametrize("kind", ["normal", "bfloat16", "outlier", "zeros", "odd", "tiny"])
def test_weights_on_no_grid_are_quantised_as_ever(kind: str) -> None:
    random = np.random.default_rng(2)
    weights = random.standard_normal((40, 500 if kind == "odd" else 512)).astype(np.float32)
    if kind == "bfloat16":
        weights = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif kind == "outlier":
        weights[:, 5] = 1e5
    elif kind == "zeros":
        weights[:] = 0
    elif kind == "tiny":
        weights = on_grid(40, 512) * np.float32(2**-120)
    assert np.array_equal(stored(weights, quantize_or_carry), stored(weights, quantize))


@pytest.mark.parametrize("row", [20, 76])
def test_one_weight_off_the_grid_costs_its_panel_only(row: int) -> None:
    weights = on_grid(77, 512)
    weights[row, 300] *= np.float32(1.001)
    data = stored(weights, quantize_or_carry).reshape(5, -1)
    panel = row // 16
    assert np.array_equal(data[panel], stored(weights, quantize).reshape(5, -1)[panel])
    found = dequantize(data.reshape(-1), E4, 77, 512)
    others = np.arange(77) // 16 != panel
    assert np.array_equal(found[others], weights[others])


def fast_export(source: Path, output: Path, **options: Any) -> Any:
    return export_model(source, output, ExportOptions(quality="fast", **options))


def test_our_own_onnx_comes_back_exactly(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason='needs pip install "edgellm[onnx]"')
    from edgellm.exporters.to_onnx import export_onnx

    folder = write_tiny_model(tmp_path / "hf", "qwen2", **SIZES)
    first, second = tmp_path / "first.edge", tmp_path / "second.edge"
    assert fast_export(folder, first).rounding == {}
    report = fast_export(export_onnx(first, tmp_path / "onnx", "int4").output, second)
    kinds = {kind for errors in report.rounding.values() for kind in errors}
    assert kinds >= {"qkv", "o", "gate_up", "down", "head"}
    assert {error for errors in report.rounding.values() for error in errors.values()} == {0.0}
    with EdgeFile.open(first) as before, EdgeFile.open(second) as after:
        for name, tensor in before.tensors.items():
            size = (tensor.format, tensor.rows, tensor.cols)
            old, new = (dequantize(f.tensor_data(name), *size) for f in (before, after))
            # the ONNX file's scale and zero point are rounded, and so is D
            assert np.abs(old - new).max() <= 2**-21 * np.abs(old).max(), name


def q4_0(array: Float32Array) -> tuple[int, bytes]:
    """ggml's type 2: 32 weights as a float16 scale and nibbles, weight j with weight j + 16."""
    blocks = array.reshape(-1, 32)
    extreme = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(1)]
    scales = (extreme / -8).astype(np.float16)
    steps = blocks / np.where(scales == 0, 1, scales).astype(np.float32)[:, None]
    codes = np.clip(np.rint(steps) + 8, 0, 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return 2, b"".join(
        struct.pack("<e", scale) + row.tobytes() for scale, row in zip(scales, packed, strict=True)
    )


def test_q4_0_is_rounded_again_and_the_error_is_told(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    changes = {**SIZES, "rope_scaling": None, "hidden_size": 256}
    folder = write_tiny_model(tmp_path / "hf", "llama", **changes)
    source, output = tmp_path / "model.gguf", tmp_path / "x.edge"
    source.write_bytes(gguf_of_llama(folder, q4_0))
    report = fast_export(source, output)
    squares = dict.fromkeys(("qkv", "o", "gate_up", "down", "embed"), 0.0)
    errors = dict(squares)
    with EdgeFile.open(output) as file:
        for tensor in report.plan.tensors:
            kind = tensor.name.rpartition(".")[2]
            if kind not in errors:
                continue
            pieces = chunks(tensor, report.plan.source.description.head_dim)
            wanted = np.concatenate([read_chunk(report.plan.source, piece) for piece in pieces])
            found = dequantize(
                file.tensor_data(tensor.name), tensor.format, tensor.rows, tensor.cols
            )
            errors[kind] += float(np.sum((found - wanted).astype(np.float64) ** 2))
            squares[kind] += float(np.sum(wanted.astype(np.float64) ** 2))
        assert file.meta["quantization"]["rounding"] == report.rounding
    assert set(report.rounding) == {"Q4_0"}
    assert set(report.rounding["Q4_0"]) == set(errors)
    for kind, error in report.rounding["Q4_0"].items():
        assert 0 < error < 0.1
        assert error == pytest.approx(np.sqrt(errors[kind] / squares[kind]), rel=0.01), kind
    printed = CliRunner().invoke(cli, ["show", str(output)]).output
    assert "re-rounded from Q4_0: " in printed


def test_float_sources_have_nothing_to_tell_and_may_be_carried_all_the_same(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", "qwen2", **SIZES)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = on_grid(*tensors[name].shape, seed=3)
    save_file(tensors, folder / "model.safetensors")
    report = fast_export(folder, tmp_path / "x.edge")
    assert report.rounding == {}
    with EdgeFile.open(tmp_path / "x.edge") as file:
        tensor = file.tensors["layers.1.o"]
        data = file.tensor_data("layers.1.o")
        assert np.array_equal(dequantize(data, E4, tensor.rows, tensor.cols), tensors[name])
        assert "rounding" not in file.meta["quantization"]
