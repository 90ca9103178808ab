"""Calibrated quantisation: what each step promises, and that a killed export goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_models import ARCHITECTURES, write_tiny_model

from edgellm.cli import cli
from edgellm.errors import EdgeLLMError, FormatError
from edgellm.exporters import quality
from edgellm.exporters.calibrated import Calibrator
from edgellm.exporters.calibration import Calibration, digest, encode_windows
from edgellm.exporters.equalize import Alphas
from edgellm.exporters.error_feedback import Feedback, fit, quantize_grouped
from edgellm.exporters.export import ExportOptions, export_model, plan_export, run_plan
from edgellm.exporters.float_pass import KINDS
from edgellm.exporters.moments import mean_product, moved_weights, second_moments, token_scales
from edgellm.exporters.quality import Quality
from edgellm.exporters.sensitivity import Candidate, spend
from edgellm.exporters.workers import workers
from edgellm.exporters.workspace import Workspace
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize, integers, unpack_grouped
from edgellm.models import canonical_shapes
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array, TensorFormat

GROUPED = (TensorFormat.E4, TensorFormat.E5)
SMALL: dict[str, Any] = {"intermediate_size": 72}
TEXT = "Rain fell on the old town all night, and the river rose by a hand's breadth.\n" * 200


@pytest.fixture
def pool() -> Iterator[Executor]:
    with workers(2) as pool:
        yield pool


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Quality(windows=3, feedback=Feedback())
    monkeypatch.setitem(quality.QUALITIES, "balanced", quick)


def correlated(rows: int, cols: int) -> tuple[Float32Array, Float32Array]:
    """Weights, and the second moments of inputs that depend on one another."""
    random = np.random.default_rng(0)
    inputs = random.standard_normal((2000, cols)) @ random.standard_normal((cols, cols))
    inputs *= np.exp(random.standard_normal(cols))
    weights = random.standard_normal((rows, cols)) / np.sqrt(cols)
    return weights.astype(np.float32), (inputs.T @ inputs / 2000).astype(np.float32)


def loss(
    data: np.ndarray, kind: TensorFormat, weights: Float32Array, moments: Float32Array
) -> float:
    error = (dequantize(data, kind, *weights.shape) - weights).astype(np.float64)
    return float(((error @ moments) * error).sum())


@pytest.mark.parametrize("kind", GROUPED)
def test_each_step_of_error_feedback_lowers_the_loss(kind: TensorFormat, pool: Executor) -> None:
    weights, moments = correlated(40, 320)
    steps = [
        Feedback(is_spread=False, sweeps=0),
        Feedback(is_spread=True, sweeps=0, damping=0.01),
        Feedback(is_spread=True, sweeps=2, damping=0.01),
    ]
    losses = [
        loss(quantize_grouped(kind, weights, moments, None, step, pool), kind, weights, moments)
        for step in steps
    ]
    assert losses[1] < 0.8 * losses[0]
    assert losses[2] < 0.99 * losses[1]


@pytest.mark.parametrize("kind", GROUPED)
def test_error_feedback_keeps_within_the_format(kind: TensorFormat, pool: Executor) -> None:
    weights, moments = correlated(21, 96)
    data = quantize_grouped(kind, weights, moments, None, Feedback(), pool)
    parts = unpack_grouped(data, kind, 21, 96)
    wide = parts.s[:, :, None].astype(int) * parts.codes.reshape(21, -1, 32) - parts.z[:, :, None]
    assert np.array_equal(wide.reshape(21, -1), integers(data, kind, 21, 96)[0])
    assert (parts.d > 0).all()


def test_error_feedback_is_that_of_the_paper(pool: Executor) -> None:
    weights, moments = correlated(32, 160)
    kind, feedback = TensorFormat.E4, Feedback(sweeps=0, damping=0.05)
    fitted = unpack_grouped(fit(kind, weights, moments.diagonal(), pool), kind, 32, 160)
    found = unpack_grouped(
        quantize_grouped(kind, weights, moments, None, feedback, pool), kind, 32, 160
    ).codes
    step = np.repeat(fitted.d, 256, axis=1)[:, :160] * np.repeat(fitted.s, 32, axis=1)
    zero = np.repeat(fitted.z / fitted.s, 32, axis=1)
    damped = moments + 0.05 * np.mean(moments.diagonal()) * np.eye(160)
    order = np.argsort(-moments.diagonal())
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    rest, codes = weights.astype(np.float64), np.empty((32, 160))
    for i, column in enumerate(order):
        ideal = rest[:, column] / step[:, column] + zero[:, column]
        codes[:, column] = np.clip(np.rint(ideal), 0, 15)
        value = step[:, column] * (codes[:, column] - zero[:, column])
        error = (rest[:, column] - value) / upper[i, i]
        rest[:, order[i + 1 :]] -= error[:, None] * upper[i, i + 1 :]
    assert np.mean(codes != found) < 0.01  # float32 rounds a few the other way
    assert np.mean(codes != fitted.codes) > 0.1


def test_moved_weights_bring_outputs_closer(pool: Executor) -> None:
    random = np.random.default_rng(2)
    weights, _ = correlated(24, 96)
    floats = [random.standard_normal((400, 96)).astype(np.float32) for _ in range(3)]
    mixing = np.eye(96) + 0.1 * random.standard_normal((96, 96))
    inputs = [(x @ mixing).astype(np.float32) for x in floats]  # what came before is off
    missing = mean_product(
        [(a - b) @ weights.T for a, b in zip(floats, inputs, strict=True)], inputs, pool
    )
    moved = moved_weights(weights, second_moments(inputs, pool), missing)

    def distance(found: Float32Array) -> float:
        pairs = zip(floats, inputs, strict=True)
        return sum(float(np.square(x @ weights.T - y @ found.T).sum()) for x, y in pairs)

    assert distance(moved) < 0.5 * distance(weights)


def test_products_are_the_mean_over_tokens(pool: Executor) -> None:
    random = np.random.default_rng(3)
    left = [random.standard_normal((n, 150)).astype(np.float32) for n in (5, 7)]
    right = [random.standard_normal((n, 40)).astype(np.float32) for n in (5, 7)]
    expected = np.concatenate(left).T @ np.concatenate(right) / 12
    assert np.allclose(mean_product(left, right, pool), expected, atol=1e-5)
    expected = np.concatenate(left).T @ np.concatenate(left) / 12
    moments = second_moments(left, pool)
    assert np.allclose(moments, expected, atol=1e-5)
    assert np.array_equal(moments, moments.T)


def test_no_token_towers_over_the_others() -> None:
    inputs = np.ones((9, 4), np.float32)
    inputs[3] *= 1000
    scales = token_scales(inputs)
    assert scales.shape == (9, 1)
    assert np.array_equal(np.delete(scales, 3), np.ones(8))
    assert np.square(inputs[3] * scales[3]).sum() == pytest.approx(40, rel=1e-5)


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    weights, moments = correlated(600, 64)
    results = []
    for threads in (1, 3):
        with workers(threads) as pool:
            results.append(
                quantize_grouped(TensorFormat.E4, weights, moments, None, Feedback(), pool)
            )
    assert np.array_equal(*results)


def test_moments_without_information_are_damped_until_they_factorise(pool: Executor) -> None:
    weights, _ = correlated(16, 64)
    moments = np.zeros((64, 64), np.float32)
    data = quantize_grouped(TensorFormat.E4, weights, moments, None, Feedback(), pool)
    assert np.abs(dequantize(data, TensorFormat.E4, 16, 64) - weights).max() < 0.1


@pytest.mark.parametrize("has_hadamard", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_equalised_and_transformed_model_is_the_same_function(
    architecture: str, has_hadamard: bool, tmp_path: Path, pool: Executor
) -> None:
    source = write_tiny_model(tmp_path / "model", architecture, intermediate_size=352)
    plan = plan_export(source, ExportOptions())
    ids = np.random.default_rng(1).integers(0, 300, (4, 32)).astype(np.int32)
    calibration = Calibration(windows=ids[1:], held_out=ids[:1], sha256=digest(ids), origin="test")
    calibrator = Calibrator(
        plan.source,
        plan.tensors,
        calibration,
        Workspace(tmp_path / "out.edge", {}),
        alphas=Alphas(qkv=0.7, o=0.6, gate_up=0.8, down=0.5, head=0.9),
        has_hadamard=has_hadamard,
        feedback=Feedback(),
        pool=pool,
        advance=lambda: None,
    )
    hidden = calibrator.collect()
    head, norm, factor = calibrator._head_for_file()
    tensors = {"embed": calibrator._whole("embed"), calibrator._head: head, "final_norm": norm}
    if calibrator.description.has_embed_scale:
        tensors["embed_scale"] = 1 / factor
    for number in range(plan.source.description.num_layers):
        tensors |= calibrator._for_file(f"layers.{number}")
    assert set(tensors) == set(canonical_shapes(calibrator.description))
    plain = ReferenceModel(plan.source.description, calibrator._whole)
    found = ReferenceModel(calibrator.description, tensors.__getitem__).forward(ids[0])
    assert np.allclose(plain.forward(ids[0]), found, atol=2e-4, rtol=1e-3)
    assert np.allclose(hidden, plain.hidden(ids[0]), atol=1e-5)
    assert np.ptp(factor) > 0.01


def test_sensitivities_rank_as_the_logits_do(
    tmp_path: Path, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_export(write_tiny_model(tmp_path / "model", "qwen2", **SMALL), ExportOptions())
    description = plan.source.description
    ids = np.random.default_rng(1).integers(0, 300, (2, 64)).astype(np.int32)
    calibrator = Calibrator(
        plan.source,
        plan.tensors,
        Calibration(windows=ids[1:], held_out=ids[:1], sha256="", origin="test"),
        Workspace(tmp_path / "out.edge", {}),
        alphas=Alphas(),
        feedback=Feedback(),
        pool=pool,
        advance=lambda: None,
    )
    calibrator.collect()
    seen: list[Candidate] = []
    monkeypatch.setattr(
        "edgellm.exporters.calibrated.spend", lambda items, budget: seen.extend(items) or {}
    )
    calibrator.choose(0, is_head_free=True)
    layers = [f"layers.{i}.{kind}" for i in range(3) for kind in KINDS]
    assert sorted(item.name for item in seen) == sorted(["embed", "head", *layers])
    expected = ReferenceModel(description, calibrator._whole).forward(ids[1])
    for item in seen:
        parts = calibrator._tried(item.name, _Tensors(calibrator), {})
        changed = ReferenceModel(
            description, lambda name, parts=parts: parts.get(name, calibrator._whole(name))
        ).forward(ids[1])
        exact = quality.kl_sum(expected, changed) / len(ids[1])
        assert item.losses[TensorFormat.E4] == pytest.approx(exact, rel=0.35)
        assert item.losses[TensorFormat.E5] < 0.4 * item.losses[TensorFormat.E4]
        assert item.losses[TensorFormat.E8] < 0.02 * item.losses[TensorFormat.E4]


class _Tensors(dict[str, Any]):
    """Canonical tensors of a calibrator's model, read when asked for."""

    def __init__(self, calibrator: Calibrator) -> None:
        super().__init__()
        self._calibrator = calibrator

    def __missing__(self, name: str) -> Float32Array:
        return self._calibrator._whole(name)


def test_bytes_are_spent_where_they_save_most() -> None:
    sizes = {TensorFormat.E4: 45, TensorFormat.E5: 55, TensorFormat.E8: 81}
    losses = {TensorFormat.E4: 1.0, TensorFormat.E5: 0.25, TensorFormat.E8: 0.0}
    items = [
        Candidate(name=name, sizes=sizes, losses={k: v * weight for k, v in losses.items()})
        for name, weight in (("a", 1.0), ("b", 10.0), ("c", 0.1))
    ]
    assert set(spend(items, 0).values()) == {TensorFormat.E4}
    assert spend(items, 145)["b"] == TensorFormat.E5
    chosen = spend(items, 182)
    assert [chosen[name].name for name in "abc"] == ["E4", "E8", "E4"] or [
        chosen[name].name for name in "abc"
    ] == ["E5", "E8", "E4"]
    assert sum(sizes[kind] for kind in chosen.values()) <= 182
    assert set(spend(items, 1000).values()) == {TensorFormat.E8}


def test_no_other_formats_within_the_budget_lose_less() -> None:
    kinds = (TensorFormat.E4, TensorFormat.E5, TensorFormat.E8)
    random = np.random.default_rng(1)
    for _ in range(20):
        items = []
        for name in "abcde":
            scale = int(random.integers(1, 40))
            sizes = dict(zip(kinds, (9 * scale, 11 * scale, 16 * scale), strict=True))
            losses = dict(zip(kinds, sorted(random.random(3), reverse=True), strict=True))
            items.append(Candidate(name=name, sizes=sizes, losses=losses))
        least = sum(item.sizes[TensorFormat.E4] for item in items)
        budget = int(least * random.uniform(1, 1.8))

        def sizes_and_losses(
            choice: tuple[TensorFormat, ...], items: list[Candidate] = items
        ) -> tuple[int, float]:
            pairs = list(zip(items, choice, strict=True))
            return sum(i.sizes[kind] for i, kind in pairs), sum(i.losses[kind] for i, kind in pairs)

        found = spend(items, budget)
        size, loss = sizes_and_losses(tuple(found[item.name] for item in items))
        choices = map(sizes_and_losses, product(kinds, repeat=len(items)))
        assert size <= budget
        assert loss == min(other for fitting, other in choices if fitting <= budget)


def test_the_model_writes_no_more_than_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, openings: Any, count: int, length: int, *_: object) -> Any:
        return np.full((count, length), 7, np.int32)

    monkeypatch.setattr(quality, "write_own_text", write)
    plan = plan_export(write_tiny_model(tmp_path / "model", "llama", **SMALL), ExportOptions())
    length = min(512, plan.source.description.max_context)
    for most, ours in ((6, 3), (100_000, None)):
        with Workspace(tmp_path / f"{most}.edge", {}) as workspace:
            windows = quality._gather(
                plan.source, plan.tokenizer, TEXT * 9, None, most, workspace, 1, Path.touch
            ).windows
        own = (windows == 7).all(axis=1)
        assert windows.shape[1] == length
        assert own.sum() == len(windows) / 2 == (ours or len(windows) / 2)
        assert not own[: len(own) // 2].any()


@pytest.mark.usefixtures("is_quick")
@pytest.mark.parametrize("ffn", [72, 96])  # 32 divides 96: inputs are transformed
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_a_calibrated_export(architecture: str, ffn: int, tmp_path: Path, text: Path) -> None:
    source = write_tiny_model(tmp_path / "model", architecture, intermediate_size=ffn)
    made = []
    for threads in (1, 2):
        output = tmp_path / f"{threads}.edge"
        options = ExportOptions(
            quality="balanced", calibration=text, bits=5.4, head="e4", threads=threads
        )
        export_model(source, output, options)
        made.append(output.read_bytes())
    assert made[0] == made[1]
    assert not list(tmp_path.glob(".*.partial"))
    with EdgeFile.open(output) as file:
        card = file.meta["quantization"]
        assert file.meta["model"].get("has_hadamard", False) == (ffn == 96)
        formats = {name: entry.format for name, entry in file.tensors.items()}
        weights = sum(entry.rows * entry.cols for entry in file.tensors.values())
        size = sum(entry.size for entry in file.tensors.values())
    assert card["quality"] == "balanced"
    assert card["calibration"]["origin"] == "calibration.txt"
    assert len(card["calibration"]["sha256"]) == 64
    assert 0 < card["measured"]["kl"] < 0.1
    assert card["measured"]["perplexity"] > 1
    assert formats["embed"] == TensorFormat.E4
    assert {TensorFormat.E4, TensorFormat.E5} & {formats[f"layers.0.{kind}"] for kind in KINDS}
    assert 8 * size / weights <= 5.4


@pytest.mark.usefixtures("is_quick")
def test_calibration_pays(tmp_path: Path, text: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "llama", **SMALL)
    plan = plan_export(source, ExportOptions())
    divergences = []
    plain = Feedback(is_spread=False, sweeps=0)
    for feedback in (plain, Feedback(sweeps=3, damping=0.05)):
        quick = Quality(windows=8, feedback=feedback)
        quality.QUALITIES["balanced"] = quick
        output = tmp_path / "out.edge"
        run_plan(plan, output, ExportOptions(quality="balanced", calibration=text))
        with EdgeFile.open(output) as file:
            divergences.append(file.meta["quantization"]["measured"]["kl"])
    assert divergences[1] < divergences[0]


CHILD = """
import sys
from pathlib import Path
from edgellm.exporters import quality
from edgellm.exporters.error_feedback import Feedback
from edgellm.exporters.export import ExportOptions, export_model
quality.QUALITIES["balanced"] = quality.Quality(windows=3, feedback=Feedback())
source, output, text = map(Path, sys.argv[1:])
options = ExportOptions(quality="balanced", calibration=text, bits=5.4, threads=1)
export_model(source, output, options)
"""


def test_a_killed_export_goes_on_where_it_was(tmp_path: Path, text: Path) -> None:
    source = write_tiny_model(
        tmp_path / "model", "llama", num_hidden_layers=4, intermediate_size=72
    )
    whole, output = tmp_path / "whole.edge", tmp_path / "killed.edge"
    command = [sys.executable, "-c", CHILD, str(source)]
    subprocess.run([*command, str(whole), str(text)], check=True)
    output.write_bytes(b"what was there before")
    marker = tmp_path / ".killed.edge.partial/layers.1.npz"
    with subprocess.Popen([*command, str(output), str(text)]) as child:
        deadline = time.monotonic() + 120
        while not marker.exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert output.read_bytes() == b"what was there before"
    before = marker.stat().st_mtime_ns
    kept = {file.name for file in marker.parent.glob("*.npz")}
    assert {"windows.npz", "float.npz", "formats.npz", "globals.npz"} <= kept
    watch = subprocess.Popen([*command, str(output), str(text)])
    stamps = set()
    while watch.poll() is None:
        if marker.exists():
            stamps.add(marker.stat().st_mtime_ns)
        time.sleep(0.002)
    assert watch.returncode == 0
    assert stamps == {before}
    assert output.read_bytes() == whole.read_bytes()
    assert not marker.parent.exists()


def test_work_on_another_source_of_the_same_size_and_time_is_thrown_away(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "llama", **SMALL)
    weights = source / "model.safetensors"

    def fingerprint() -> object:
        os.utime(weights, (315532800, 315532800))
        plan = plan_export(source, ExportOptions())
        return quality._fingerprint(plan.source, plan.tensors, [])

    before = fingerprint()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint() != before


def test_every_window_has_one_bos(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "llama", **SMALL)
    path = source / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True}))
    tokenizer = plan_export(source, ExportOptions()).tokenizer
    assert tokenizer.bos_id is not None
    assert tokenizer.encode("a")[0] == tokenizer.bos_id
    windows = encode_windows(tokenizer, "Rain fell on the old town. " * 50, tokenizer.bos_id, 16)
    assert (windows[:, 0] == tokenizer.bos_id).all()
    assert (windows[:, 1:] != tokenizer.bos_id).all()


@pytest.mark.usefixtures("is_quick")
def test_a_calibration_text_is_not_replaced(tmp_path: Path, text: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "llama", **SMALL)
    before = text.read_bytes()
    with pytest.raises(ValueError, match="is read by this command"):
        export_model(source, text, ExportOptions(quality="balanced", calibration=text))
    assert text.read_bytes() == before


@pytest.mark.usefixtures("is_quick")
def test_what_a_calibration_text_must_be(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "llama", **SMALL)
    path = tmp_path / "text.txt"
    options = ExportOptions(quality="balanced", calibration=path)
    for content, problem in (
        (None, "no such file"),
        (b"", "is empty"),
        (b"abc\xff", "is not UTF-8: byte 3"),
        (b"too short", "has 0 windows of 512 tokens; it needs 4 or more"),
    ):
        if content is not None:
            path.write_bytes(content)
        result = CliRunner().invoke(
            cli, ["export", str(source), "-o", str(tmp_path / "x.edge"), "--calibration", str(path)]
        )
        assert isinstance(result.exception, EdgeLLMError)
        assert problem in str(result.exception)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["model", "text.txt"]
    path.write_bytes(b"too short")
    with pytest.raises(FormatError, match="4 or more"):
        export_model(source, tmp_path / "x.edge", options)


def test_usage_of_quality(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", "llama", **SMALL)
    for extra in (["--bits", "5"], ["--calibration", "x"]):
        result = CliRunner().invoke(cli, ["export", str(source), "--quality", "fast", *extra])
        assert result.exit_code == 2
        assert "go with --quality balanced or best" in result.output
    with pytest.raises(ValueError, match=r"not within 4.5..8.2"):
        replace(ExportOptions(quality="best"), bits=3.0)


def test_the_kinds_are_all_matrices_of_a_layer(tmp_path: Path) -> None:
    plan = plan_export(write_tiny_model(tmp_path / "m", "gemma3", **SMALL), ExportOptions())
    matrices = {tensor.name for tensor in plan.tensors if tensor.format != TensorFormat.F32}
    assert matrices == {"embed", *(f"layers.{i}.{kind}" for i in range(3) for kind in KINDS)}
