"""What a backend says about the device it found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """Answer of a backend's `probe()`.

    Attributes:
        name: of the backend, "cpu" for example.
        is_available: whether models can be run on it now.
        reason: why not; empty if available.
        description: the device in a few words.
        num_threads: that this process may use.
        num_cores: physical cores these threads run on.
        memory_bytes: in all; the limit of this process's group if that is lower.
        available_bytes: of these, free or freed at once when asked for.
    """

    name: str
    is_available: bool
    reason: str
    description: str
    num_threads: int
    num_cores: int
    memory_bytes: int
    available_bytes: int
