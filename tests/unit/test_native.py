"""The binding: arrays and errors across the border, and the promises of the session calls."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_edge

from edgellm._native import (
    NativeModel,
    Sampling,
    kernels,
    probe_int8,
    probe_read,
    quantize,
    sample,
    tensor_bytes,
)
from edgellm.errors import ContextFullError, EdgeLLMError, FormatError, UnsupportedDeviceError
from edgellm.types import TensorFormat

IDS = [5, 9, 17, 30, 2, 41, 8, 11, 60, 3]


@pytest.fixture(scope="module")
def path(tiny_edge_of: Callable[[str], Path]) -> Path:
    return tiny_edge_of("llama")


@pytest.fixture
def model(path: Path) -> Iterator[NativeModel]:
    with NativeModel(path, threads=1) as model:
        yield model


def test_a_split_prompt_gives_the_same_bits(model: NativeModel) -> None:
    whole = model.create_session(32).prefill(IDS, len(IDS))
    for size in (1, 3, 7):
        session = model.create_session(32, chunk=size)
        pieces = [session.prefill(IDS[i : i + 3], len(IDS[i : i + 3])) for i in range(0, 10, 3)]
        assert np.concatenate(pieces).tobytes() == whole.tobytes()
        assert session.logits().tobytes() == whole[-1].tobytes()


def test_threads_share_a_head_of_a_long_sequence_for_one_barrier_a_layer(tmp_path: Path) -> None:
    path = write_tiny_edge(tmp_path, "llama", num_key_value_heads=1)
    with NativeModel(path, threads=2) as model:

        def barriers_at(length: int) -> int:
            session = model.create_session(length + 1)
            session.prefill([3 + i % 200 for i in range(length)])
            before = session.info().num_barriers
            session.prefill([5])
            return session.info().num_barriers - before

        layers = model.info.num_layers
        assert barriers_at(220) == 5 * layers + 1  # without the head's
        assert barriers_at(240) == 6 * layers + 1
        model.use_threads(1, 2)  # one thread shares with no other
        assert barriers_at(240) == 5 * layers + 1


def test_truncation_forgets(model: NativeModel) -> None:
    session = model.create_session(32)
    expected = session.prefill(IDS, len(IDS))
    session.truncate(4)
    assert session.info().num_tokens == 4
    assert session.logits().tobytes() == expected[3].tobytes()
    assert session.prefill(IDS[4:], 6).tobytes() == expected[4:].tobytes()


def test_a_greedy_step_takes_the_largest_logit_and_costs_one_pass(model: NativeModel) -> None:
    session = model.create_session(64)
    logits = session.prefill(IDS, 1)[0]
    greedy = Sampling().to_struct()
    before = session.info().num_passes
    tokens = session.step(greedy)
    assert tokens[0] == int(logits.argmax())
    assert session.info().num_passes == before
    for _ in range(4):
        tokens += session.step(greedy)
    assert session.info().num_passes == before + 4
    assert session.info().num_tokens == len(IDS) + 5
    again = model.create_session(64).prefill(IDS + tokens, len(tokens) + 1)
    assert [int(row.argmax()) for row in again[:-1]] == tokens


def test_what_does_not_fit_changes_nothing(model: NativeModel) -> None:
    session = model.create_session(8)
    session.prefill(IDS[:5])
    with pytest.raises(ContextFullError, match="8"):
        session.prefill(IDS[:4])
    assert session.info().num_tokens == 5


def test_memory_is_told_before_it_is_taken(model: NativeModel) -> None:
    kv, scratch = model.session_bytes(100)
    info = model.create_session(100).info()
    assert (info.context_length, info.kv_bytes, info.scratch_bytes) == (100, kv, scratch)
    assert model.session_bytes(200)[0] > kv


@pytest.mark.parametrize("token", [-1, 10**6, 2**31, 2**40])
def test_an_unknown_token_is_a_wrong_argument(model: NativeModel, token: int) -> None:
    session = model.create_session(8)
    with pytest.raises(ValueError, match="token"):
        session.prefill([1, token])
    assert session.info().num_tokens == 0


def test_closing_a_model_closes_its_sessions(path: Path) -> None:
    model = NativeModel(path, threads=1)
    session = model.create_session(8)
    model.close()
    model.close()
    with pytest.raises(ValueError, match="closed"):
        session.prefill([1])
    with pytest.raises(ValueError, match="closed"):
        model.plan()


def test_a_session_keeps_its_model_open(path: Path) -> None:
    session = NativeModel(path, threads=1).create_session(8)
    assert session.prefill([1], 1).shape[0] == 1


def test_errors_have_their_types(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sse9"):
        NativeModel(path, isa="sse9")
    foreign = "avx2" if platform.machine() == "aarch64" else "neon"
    with pytest.raises(UnsupportedDeviceError, match=foreign):
        NativeModel(path, isa=foreign)
    broken = tmp_path / "broken.edge"
    broken.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(FormatError) as format_error:
        NativeModel(broken)
    assert "\n" not in str(format_error.value)
    with pytest.raises((OSError, EdgeLLMError), match="nothing"):
        NativeModel(tmp_path / "nothing.edge")
    with pytest.raises(ValueError, match="threads"):
        NativeModel(path, threads=-1)


def test_every_op_has_one_chosen_kernel_and_a_reason_for_each_unsupported_one() -> None:
    rows = kernels()
    ops = {row.op for row in rows}
    assert len(ops) > 1
    for op in ops:
        assert sum(row.is_chosen for row in rows if row.op == op) >= 1
    for row in rows:
        assert row.is_supported == (row.reason == "")
        assert not row.is_chosen or row.is_supported


def test_the_plan_is_text(model: NativeModel) -> None:
    assert len(model.plan().splitlines()) > model.info.num_layers


def test_the_sampler_takes_the_lowest_of_equal_logits() -> None:
    logits = np.array([0.0, 3.0, 3.0, -1.0], np.float32)
    assert sample(logits, Sampling()) == 1
    assert sample(logits, Sampling(logit_bias={2: 0.5})) == 2
    with pytest.raises(ValueError, match="float32"):
        sample(logits.astype(np.float64), Sampling())


def test_reading_has_a_speed() -> None:
    assert probe_read(1 << 20, 1) > 0
    with pytest.raises(ValueError, match="threads"):
        probe_read(1 << 20, 0)


def test_every_instruction_set_of_this_cpu_has_an_int8_peak() -> None:
    for row in {row.isa: row for row in kernels()}.values():
        if row.is_supported:
            assert probe_int8(row.isa, 1) > 0
        else:
            with pytest.raises(UnsupportedDeviceError, match=row.isa):
                probe_int8(row.isa, 1)
    with pytest.raises(ValueError, match="instruction set"):
        probe_int8("abacus", 1)


def test_quantised_rows_do_not_depend_on_the_cut() -> None:
    rows, cols = 40, 96
    weights = np.random.default_rng(0).normal(size=(rows, cols)).astype(np.float32)
    size = tensor_bytes(TensorFormat.E4, rows, cols)
    whole, cut = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    quantize(TensorFormat.E4, weights, whole)
    for first in range(0, rows, 16):
        quantize(TensorFormat.E4, weights[first : first + 16], cut, first_row=first, rows=rows)
    assert whole.tobytes() == cut.tobytes()
    with pytest.raises(ValueError, match="buffer"):
        quantize(TensorFormat.E4, weights, whole[:-1])
    with pytest.raises(ValueError, match="contiguous"):
        quantize(TensorFormat.E4, weights[:, ::2], whole)
