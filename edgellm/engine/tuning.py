"""How many threads decode and prefill: measured on first use of a model, kept for this machine.

More threads than memory can feed slow decoding down, and hardware threads that share a core rarely
help a matrix product; neither can be told from the processor's name. Results never depend on it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from edgellm import devices
from edgellm._native import NativeModel, NativeSession, version
from edgellm.engine._store import store_path, write_record

__all__ = ["candidates", "choose", "default_folder", "tune_threads"]

KINDS = ("decode", "prefill")
_BUDGET_S = 0.8
_MAX_ROUNDS = 10
_MIN_GAIN = 0.05  # below it a smaller count may be faster by chance only
_PROMPT = 32  # tokens of a prefill pass

Measure = Callable[[str, int], float]
"""Seconds of one pass, given "decode" or "prefill" and the number of threads."""


def default_folder() -> Path | None:
    """Where a program that names no folder keeps measurements; None without a home."""
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache" / "edgellm"
    return None


def candidates(num_threads: int, num_cores: int) -> list[int]:
    """Counts worth trying, the largest first.

    Args:
        num_threads: of the pool.
        num_cores: physical cores; fewer where hardware threads share them.
    """
    counts = {num_threads, num_threads - 1, num_threads // 2, min(num_cores, num_threads)}
    return sorted(counts - {0}, reverse=True)


def choose(counts: list[int], measure: Measure) -> dict[str, int] | None:
    """The fastest count for each kind of pass; a smaller one must be clearly faster.

    The counts take turns, and the best time of each decides: what disturbs one disturbs them all.

    Args:
        counts: the largest first.
        measure: called for at most _BUDGET_S in all, by its own figures.

    Returns:
        By kind; None if the passes are too slow to be compared in that time.
    """
    chosen = {}
    for kind in KINDS:
        best = dict.fromkeys(counts, math.inf)
        spent = measure(kind, counts[0])  # not counted: nothing is in a cache yet
        round_s = sum(spent * counts[0] / count for count in counts)
        rounds = 0
        while rounds < _MAX_ROUNDS and spent + round_s <= _BUDGET_S / len(KINDS):
            times = {count: measure(kind, count) for count in counts}
            best = {count: min(best[count], times[count]) for count in counts}
            round_s = sum(times.values())
            spent += round_s
            rounds += 1
        if rounds < 2:
            return None
        fastest = min(counts, key=best.__getitem__)
        is_clear = best[fastest] < best[counts[0]] * (1 - _MIN_GAIN)
        chosen[kind] = fastest if is_clear else counts[0]
    return chosen


def tune_threads(native: NativeModel, folder: Path) -> None:
    """Sets the threads of the model's coming sessions: as kept in `folder`, or measured and kept.

    Args:
        native: a model whose pool has as many threads as this process may use.
        folder: where measurements of this machine are kept. What cannot be read there is measured
            again, and what cannot be written is not kept.
    """
    report = devices.probe("cpu")
    counts = candidates(native.info.num_threads, report.num_cores)
    if len(counts) == 1:
        return
    cores = f"{report.num_cores}cores"
    path = store_path(folder, "threads", native, cores, report.description, version())
    chosen = _load(path, counts)
    if chosen is None:
        with _passes(native, counts) as measure:
            chosen = choose(counts, measure)
        if chosen is None:
            return
        with contextlib.suppress(OSError):
            write_record(path, chosen)
    native.use_threads(**chosen)


def _load(path: Path, counts: list[int]) -> dict[str, int] | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads(path.read_bytes())
        chosen = {kind: record[kind] for kind in KINDS}
        if all(type(count) is int and count in counts for count in chosen.values()):
            return chosen
    return None


@contextlib.contextmanager
def _passes(native: NativeModel, counts: list[int]) -> Iterator[Measure]:
    """Real passes of the model, in one small session for each count."""
    length = min(_PROMPT, native.info.max_context)
    sessions: dict[int, NativeSession] = {}
    for count in counts:
        native.use_threads(count, count)
        sessions[count] = native.create_session(length)
    native.use_threads(0, 0)

    def measure(kind: str, count: int) -> float:
        session = sessions[count]
        session.truncate(0)
        started = perf_counter()
        if kind == "decode":
            session.prefill([0], 1)
        else:
            session.prefill([0] * length)
        return perf_counter() - started

    try:
        yield measure
    finally:
        for session in sessions.values():
            session.close()
