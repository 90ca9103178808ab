"""Threads for the arithmetic of calibration."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["workers"]


@contextmanager
def workers(threads: int) -> Iterator[Executor]:
    """Threads that each multiply matrices alone.

    BLAS with threads of its own wakes them for every small product and lets them spin between; on a
    busy machine that took five times the CPU time. It would also round differently with their
    number.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        yield pool
