"""A device with 1 MiB of memory that cannot compute: plans and refusals are tested on it."""

from __future__ import annotations

from edgellm.devices._report import DeviceReport

__all__ = ["probe"]

_MEMORY_BYTES = 1 << 20


def probe() -> DeviceReport:
    """Always the same small device."""
    return DeviceReport(
        name="fake",
        is_available=False,
        reason="it exists for tests and cannot compute",
        description="fake device",
        num_threads=1,
        num_cores=1,
        memory_bytes=_MEMORY_BYTES,
        available_bytes=_MEMORY_BYTES,
    )
