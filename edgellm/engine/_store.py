"""Measurements of this device, kept as JSON files."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from edgellm._native import NativeModel

__all__ = ["store_path", "write_record"]


def store_path(
    folder: Path, kind: str, native: NativeModel, kv_format: str, device: str, *lengths: str
) -> Path:
    """Where a measurement of this device, model and way of running it lies.

    Args:
        folder: where measurements of this device are kept.
        kind: what was measured.
        native: the model that was measured.
        kv_format: of the cache it was measured with.
        device: the CPU's name, as the device's report gives it.
        lengths: what else sets it apart from others of its kind.
    """
    info = native.info
    place = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    decode, prefill = native.threads
    threads = f"{decode}" if decode == prefill else f"{decode}+{prefill}"
    run = "-".join([info.isa, threads, kv_format, *lengths])
    return folder / f"{kind}-{place}-{info.model_id[:16]}-{run}.json"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes a record whole or not at all; its folder is made if missing.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
