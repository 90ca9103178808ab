"""The CPU: how many threads and how much memory this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from edgellm.devices._report import DeviceReport

__all__ = ["probe"]

# Limits above this are how cgroup v1 writes "none".
_NO_LIMIT = 1 << 60


def probe(root: Path = Path("/")) -> DeviceReport:
    """Reads /proc, /sys and the control groups; all are optional.

    Args:
        root: of the file system; tests pass another one.

    Returns:
        Memory is that of the machine or of the tightest control group around this process.

    Source: https://docs.kernel.org/filesystems/proc.html#meminfo (MemAvailable),
        https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
    """
    total, available = _machine_memory(root)
    for limit, used in _group_limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return DeviceReport(
        name="cpu",
        is_available=True,
        reason="",
        description=_cpu_name(root),
        num_threads=len(_cpus()),
        num_cores=_num_cores(root),
        memory_bytes=total,
        available_bytes=available,
    )


def _cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _num_cores(root: Path) -> int:
    """Hardware threads of one core name the same siblings; a CPU that names none is a core."""
    folder = root / "sys/devices/system/cpu"
    siblings = {cpu: _text(folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in _cpus()}
    return len({text or cpu for cpu, text in siblings.items()})


def _machine_memory(root: Path) -> tuple[int, int]:
    fields = _pairs(root / "proc/meminfo")
    if "MemTotal:" in fields and "MemAvailable:" in fields:
        return fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used without reclaimable file pages) of this process's control groups, bytes."""
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be that of the host; the mount then is the group itself.
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(base):
                break
            limit, used = _text(folder / names[0]).strip(), _text(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
                stat = _pairs(folder / "memory.stat")
                reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
                limits.append((int(limit), max(int(used) - reclaimable, 0)))
    return limits


def _cpu_name(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _pairs(path: Path) -> dict[str, int]:
    """Lines of "name number", others left out."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
