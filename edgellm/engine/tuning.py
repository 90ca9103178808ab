"""How many threads decode and prefill: measured on first use of a model, kept for this machine.

More threads than memory can feed slow decoding down, and hardware threads that share a core rarely
help a matrix product; neither can be told from the processor's name. Results never depend on it.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from edgellm import devices
from edgellm._native import NativeModel, NativeSession, version
from edgellm.engine._store import store_path, write_record

__all__ = ["candidates", "choose", "default_folder", "tune_threads"]

KINDS = ("decode", "prefill")
_BUDGET_S = 0.8
_SHARE_S = _BUDGET_S / len(KINDS)
_MAX_ROUNDS = 10
_MIN_GAIN = 0.05  # below it a smaller count may be faster by chance only
_MAX_SWITCHES_PER_S = 100
_FEW_SWITCHES = 5
_PROMPT = 32  # tokens of a prefill pass
_PREFILL_GAIN = 4  # times the speed of decode, guessed before it is measured

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


def choose(
    counts: list[int], measure: Measure, is_disturbed: Callable[[], bool]
) -> dict[str, int] | None:
    """The fastest count for each kind of pass; what is too slow to compare keeps the largest.

    Args:
        counts: the largest first.
        measure: called for about _BUDGET_S in all, by its own figures.
        is_disturbed: whether other programs have used the processors meanwhile.

    Returns:
        By kind; None if what was measured is not worth keeping: after a disturbance, or if the
        first pass alone was too slow, since its weights may have come from a disk.
    """
    first_s = measure("decode", counts[0])
    if first_s > _SHARE_S or is_disturbed():
        return None
    decode, decode_s = _fastest(counts, "decode", measure, pass_s=first_s, spent=first_s)
    if is_disturbed():
        return None
    guess_s = decode_s * _PROMPT / _PREFILL_GAIN
    prefill, _ = _fastest(counts, "prefill", measure, pass_s=guess_s, spent=0.0)
    return None if is_disturbed() else {"decode": decode, "prefill": prefill}


def _fastest(
    counts: list[int], kind: str, measure: Measure, *, pass_s: float, spent: float
) -> tuple[int, float]:
    """The fastest count and its seconds, of at least two rounds in _SHARE_S.

    The counts take turns, and the best time of each decides: what disturbs one disturbs them all.
    """
    best = dict.fromkeys(counts, math.inf)
    round_s = sum(pass_s * counts[0] / count for count in counts)
    rounds = 0
    while rounds < _MAX_ROUNDS and spent + round_s <= _SHARE_S:
        times = {count: measure(kind, count) for count in counts}
        best = {count: min(best[count], times[count]) for count in counts}
        round_s = sum(times.values())
        spent += round_s
        rounds += 1
    if rounds < 2:
        return counts[0], pass_s
    fastest = min(counts, key=best.__getitem__)
    if best[fastest] > best[counts[0]] * (1 - _MIN_GAIN):
        fastest = counts[0]
    return fastest, best[fastest]


def tune_threads(native: NativeModel, folder: Path) -> None:
    """Sets the threads of the model's coming sessions: as kept in `folder`, or measured and kept.

    Args:
        native: a model whose pool has as many threads as this process may use.
        folder: where measurements of this machine are kept. What cannot be read there is measured
            again, and what cannot be written is not kept; nor what a busy machine gave.
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
            chosen = choose(counts, measure, _disturbance())
        if chosen is None:
            return
        with contextlib.suppress(OSError):
            write_record(path, chosen)
    native.use_threads(**chosen)


def _disturbance() -> Callable[[], bool]:
    """A question: were threads of this process often sent away from a processor since this call?

    Threads beside busy programs are, hundreds of times a second; with a processor each, hardly.
    """

    def switches() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    first, started = switches(), perf_counter()

    def is_disturbed() -> bool:
        limit = _MAX_SWITCHES_PER_S * (perf_counter() - started)
        return switches() - first > max(limit, _FEW_SWITCHES)

    return is_disturbed


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
