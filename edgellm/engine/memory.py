"""Does it fit? Asked before memory is taken."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from edgellm.devices import DeviceReport
from edgellm.errors import OutOfMemoryError

__all__ = ["check_fit", "largest_context", "peak_memory_bytes"]


def check_fit(
    *,
    file_bytes: int,
    session_bytes: Callable[[int], tuple[int, int]],
    context: int,
    device: DeviceReport,
) -> None:
    """Refuses a session that the device has no memory for.

    Args:
        file_bytes: of the mapped model that are not yet counted as used.
        session_bytes: (KV cache, scratch) bytes of a session of this many tokens.
        context: tokens asked for.
        device: what `probe()` found.

    Raises:
        OutOfMemoryError: with the numbers and the longest context that fits.
    """
    kv, scratch = session_bytes(context)
    needed = file_bytes + kv + scratch
    if needed <= device.available_bytes:
        return
    longest = largest_context(
        lambda length: file_bytes + sum(session_bytes(length)), context - 1, device.available_bytes
    )
    advice = f"a context of {longest} tokens would fit" if longest else "no context would fit"
    raise OutOfMemoryError(
        f"a context of {context} tokens needs {_mb(needed)} (model {_mb(file_bytes)}, KV cache"
        f" {_mb(kv)}, scratch {_mb(scratch)}), {_mb(device.available_bytes)} are available;"
        f" {advice}"
    )


def largest_context(needed_bytes: Callable[[int], int], limit: int, available_bytes: int) -> int:
    """Longest context, at most `limit` tokens, for which `needed_bytes` are available; 0: none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if needed_bytes(middle) <= available_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def peak_memory_bytes() -> int:
    """Most memory this process has held so far, mapped files included."""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split("\n")
        ):
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
