"""A run of the benchmark that is kept on this device, and what a later run says beside it.

The difference of two medians counts only if it is larger than the larger of the two ranges (fastest
minus slowest round); anything else is noise. Ranges rather than quartiles, because there are few
rounds and a shared machine has bad moments in each run. Below three rounds nothing is said.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from edgellm.engine._store import write_record
from edgellm.errors import FormatError

__all__ = ["MIN_ROUNDS", "Comparison", "Run", "Verdict", "compare", "load_run", "store_run"]

MIN_ROUNDS = 3

Verdict = Literal["noise", "faster", "slower", "too few rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is kept of a run: its rounds, and what the memory gave at the time.

    Attributes:
        date: UTC, ISO 8601.
        version: of edgellm.
        prefill: tokens per second of each round.
        decode: tokens per second of each round.
        probe_gb_s: plain reading, GB/s.
    """

    date: str
    version: str
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    probe_gb_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure beside the stored one.

    Attributes:
        ratio: median over stored median; above 1 is faster.
        spread: range of the rounds over their median.
        stored_spread: the same of the stored rounds.
        verdict: whether the difference means anything.
    """

    ratio: float
    spread: float
    stored_spread: float
    verdict: Verdict


def compare(rounds: Sequence[float], stored: Sequence[float]) -> Comparison:
    """Compares two runs' rounds by the rule above.

    Args:
        rounds: speeds, at least one, above 0.
        stored: those of the earlier run.
    """
    median, before = statistics.median(rounds), statistics.median(stored)
    ranges = max(rounds) - min(rounds), max(stored) - min(stored)
    verdict: Verdict = "noise"
    if min(len(rounds), len(stored)) < MIN_ROUNDS:
        verdict = "too few rounds"
    elif abs(median - before) > max(ranges):
        verdict = "faster" if median > before else "slower"
    return Comparison(
        ratio=median / before,
        spread=ranges[0] / median,
        stored_spread=ranges[1] / before,
        verdict=verdict,
    )


def load_run(path: Path) -> Run | None:
    """The stored run; None if there is none.

    Raises:
        FormatError: the file is not a stored run.
        OSError: it cannot be read.
    """
    try:
        record = json.loads(path.read_bytes())
        run = Run(**record | {key: tuple(record[key]) for key in ("prefill", "decode")})
        speeds = [*run.prefill, *run.decode, run.probe_gb_s]
        is_valid = min(len(run.prefill), len(run.decode)) >= MIN_ROUNDS and all(
            math.isfinite(speed) and speed > 0 for speed in speeds
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError):
        is_valid = False
    if not is_valid:
        raise FormatError(f"{path} is not a stored run; replace it with --save-baseline")
    return run


def store_run(path: Path, run: Run) -> None:
    """Keeps a run at `path`, in the place of a former one.

    Raises:
        OSError: it cannot be written.
    """
    write_record(path, asdict(run))
