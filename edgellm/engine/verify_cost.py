"""V(M): what a pass with M columns costs relative to one, which speculation rests on."""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter

from edgellm._native import NativeModel
from edgellm.engine._store import store_path, write_record

__all__ = ["MAX_COLUMNS", "VERIFY_DEPTH", "measure_verify_cost", "store_verify_cost"]

MAX_COLUMNS = 16
VERIFY_DEPTH = 128  # tokens before the columns

_SEED = 42


def measure_verify_cost(native: NativeModel, rounds: int) -> tuple[list[float], str]:
    """Times passes that append 1 to 16 tokens and return all their logits.

    The sizes take turns, so that a change of the machine's speed meets all of them.

    Args:
        native: an open model.
        rounds: counted passes of each size, after one that is not.

    Returns:
        Seconds of a pass with 1, 2, ..., 16 columns, each the median; and the cache's format.

    Raises:
        ValueError: the model's context is shorter than 144 tokens.
    """
    import numpy as np

    length = VERIFY_DEPTH + MAX_COLUMNS
    if length > native.info.max_context:
        raise ValueError(
            f"the cost of verifying is measured in {length} tokens of context, the model has"
            f" {native.info.max_context}"
        )
    ids = np.random.default_rng(_SEED).integers(0, native.info.num_tokens, length, dtype=np.int32)
    session = native.create_session(length)
    seconds: list[list[float]] = [[] for _ in range(MAX_COLUMNS)]
    session.prefill(ids[:VERIFY_DEPTH])
    for _ in range(rounds + 1):
        for columns in range(1, MAX_COLUMNS + 1):
            session.truncate(VERIFY_DEPTH)
            started = perf_counter()
            session.prefill(ids[VERIFY_DEPTH : VERIFY_DEPTH + columns], columns)
            seconds[columns - 1].append(perf_counter() - started)
    kv_format = session.info().kv_format
    session.close()
    return [statistics.median(times[1:]) for times in seconds], kv_format


def store_verify_cost(
    folder: Path, native: NativeModel, kv_format: str, device: str, seconds: list[float]
) -> Path:
    """Keeps the measurement for this device, model and way of running it; it replaces a former one.

    Args:
        folder: where measurements of this device are kept; made if missing.
        native: the model that was measured.
        kv_format: of the cache it was measured with.
        device: the CPU's name, as the device's report gives it.
        seconds: from `measure_verify_cost`.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written.
    """
    info = native.info
    path = store_path(folder, "verify-cost", native, kv_format, device)
    record = {
        "device": device,
        "model_id": info.model_id,
        "isa": info.isa,
        "threads": info.num_threads,
        "decode_threads": native.threads[0],
        "prefill_threads": native.threads[1],
        "kv_format": kv_format,
        "depth": VERIFY_DEPTH,
        "seconds": seconds,
    }
    write_record(path, record)
    return path
