"""Thread counts: fake timings decide, the outcome is kept, and no count changes a result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM, devices
from edgellm._native import NativeModel
from edgellm.engine import tuning

IDS = [5, 9, 17, 30, 2, 41, 8, 11, 60, 3]
NUM_THREADS = 4


@pytest.fixture(scope="module")
def path(tiny_edge_of: Callable[[str], Path]) -> Path:
    return tiny_edge_of("llama")


@pytest.fixture
def native(path: Path) -> Iterator[NativeModel]:
    with NativeModel(path, threads=NUM_THREADS) as native:
        yield native


def timings(
    seconds: dict[str, dict[int, float]], calls: list[tuple[str, int]] | None = None
) -> tuning.Measure:
    def measure(kind: str, count: int) -> float:
        if calls is not None:
            calls.append((kind, count))
        return seconds[kind][count]

    return measure


def quiet() -> bool:
    return False


def no_measure(*_: object) -> dict[str, int]:
    raise AssertionError("measured again")


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "expected"),
    [(1, 1, [1]), (2, 2, [2, 1]), (8, 8, [8, 7, 4]), (12, 6, [12, 11, 6]), (6, 2, [6, 5, 3, 2])],
)
def test_few_counts_are_tried(num_threads: int, num_cores: int, expected: list[int]) -> None:
    assert tuning.candidates(num_threads, num_cores) == expected


def test_decode_and_prefill_are_chosen_apart_and_only_clear_gains_count() -> None:
    seconds = {
        "decode": {4: 0.010, 3: 0.008, 2: 0.007},
        "prefill": {4: 0.0100, 3: 0.0097, 2: 0.015},
    }
    assert tuning.choose([4, 3, 2], timings(seconds), quiet) == {"decode": 2, "prefill": 4}


def test_the_best_of_several_turns_decides() -> None:
    decode = iter([0.010, 0.009, 0.030, *[0.030, 0.012] * 9])  # 2 threads, 1 thread, and so on

    def measure(kind: str, count: int) -> float:
        return next(decode) if kind == "decode" else 0.010

    assert tuning.choose([2, 1], measure, quiet) == {"decode": 2, "prefill": 2}


def test_it_takes_less_than_a_second_or_is_left() -> None:
    for slow in (1e-4, 0.01, 0.05, 0.1, 0.3, 5.0):
        calls: list[tuple[str, int]] = []
        seconds = {kind: {4: slow, 3: slow, 2: slow} for kind in tuning.KINDS}
        chosen = tuning.choose([4, 3, 2], timings(seconds, calls), quiet)
        assert len(calls) * slow <= 0.8 or len(calls) == 1
        assert chosen == (None if slow == 5.0 else {"decode": 4, "prefill": 4})


def test_slow_prefill_does_not_hold_up_what_decode_gains() -> None:
    calls: list[tuple[str, int]] = []
    seconds = {"decode": {4: 0.030, 3: 0.025, 2: 0.020}, "prefill": {4: 1.0, 3: 2.0, 2: 3.0}}
    assert tuning.choose([4, 3, 2], timings(seconds, calls), quiet) == {"decode": 2, "prefill": 4}
    assert {kind for kind, _ in calls} == {"decode"}


def test_what_a_busy_machine_gave_is_not_kept(
    native: NativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {kind: {4: 0.010, 3: 0.001, 2: 0.001} for kind in tuning.KINDS}
    for number_of_quiet in range(3):
        answers = iter([False] * number_of_quiet + [True])
        assert tuning.choose([4, 3, 2], timings(seconds), answers.__next__) is None
    monkeypatch.setattr(tuning, "candidates", lambda threads, cores: [4, 3, 2])
    monkeypatch.setattr(tuning, "_disturbance", lambda: lambda: True)
    tuning.tune_threads(native, tmp_path)
    assert native.threads == (NUM_THREADS, NUM_THREADS)
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_is_used_again(
    native: NativeModel, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "choose", lambda *_: {"decode": 2, "prefill": 3})
    tuning.tune_threads(native, tmp_path)
    assert native.threads == (2, 3)
    info = native.create_session(32).info()
    assert (info.decode_threads, info.prefill_threads) == (2, 3)
    monkeypatch.setattr(tuning, "choose", no_measure)
    with NativeModel(path, threads=NUM_THREADS) as again:
        tuning.tune_threads(again, tmp_path)
        assert again.threads == (2, 3)
    with (
        NativeModel(path, threads=NUM_THREADS - 1) as fewer,  # other CPUs: another record
        pytest.raises(AssertionError, match="again"),
    ):
        tuning.tune_threads(fewer, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"decode": 2}', '{"decode": "2", "prefill": 2}'),
        *('{"decode": 9, "prefill": 2}', '{"decode": 0, "prefill": 2}', "\udcff"),
    ],
)
def test_a_broken_record_is_measured_anew(
    content: str, native: NativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "choose", lambda *_: {"decode": 3, "prefill": 3})
    tuning.tune_threads(native, tmp_path)
    (record,) = tmp_path.iterdir()
    record.write_bytes(content.encode(errors="surrogateescape"))
    native.use_threads(0, 0)
    monkeypatch.setattr(tuning, "choose", lambda *_: {"decode": 2, "prefill": 4})
    tuning.tune_threads(native, tmp_path)
    assert native.threads == (2, 4)
    assert json.loads(record.read_text()) == {"decode": 2, "prefill": 4}


def test_a_folder_that_cannot_be_written_does_no_harm(
    native: NativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "choose", lambda *_: {"decode": 2, "prefill": 2})
    (tmp_path / "file").write_text("")
    tuning.tune_threads(native, tmp_path / "file")
    assert native.threads == (2, 2)


def test_real_passes_are_measured_and_leave_no_session(native: NativeModel, tmp_path: Path) -> None:
    tuning.tune_threads(native, tmp_path)
    cores = devices.probe("cpu").num_cores
    assert set(native.threads) <= set(tuning.candidates(NUM_THREADS, cores))
    assert all(not session._handle for session in native._sessions)


def test_threads_that_are_asked_for_are_not_tuned(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda threads, cores: [threads, 1])
    monkeypatch.setattr(tuning, "choose", no_measure)
    with LLM(path, threads=3, cache=tmp_path) as llm:
        assert llm.info.num_threads == 3
    with pytest.raises(AssertionError, match="again"):
        LLM(path, cache=tmp_path)


def test_no_count_changes_a_bit(native: NativeModel) -> None:
    expected = native.create_session(64).prefill(IDS, len(IDS))
    for decode, prefill in ((1, 2), (2, 1), (3, 4), (4, 2)):
        native.use_threads(decode, prefill)
        session = native.create_session(64)
        whole = session.prefill(IDS, len(IDS))
        session.truncate(0)
        steps = [session.prefill([token], 1) for token in IDS]
        assert whole.tobytes() == expected.tobytes()
        assert np.concatenate(steps).tobytes() == expected.tobytes()


def test_more_threads_than_the_pool_has_are_refused(native: NativeModel) -> None:
    native.use_threads(NUM_THREADS + 1, 1)
    with pytest.raises(ValueError, match="the model's pool has 4"):
        native.create_session(32)
