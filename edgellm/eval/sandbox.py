"""Runs programs that a model wrote, each in a process of its own with little in reach."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgellm.eval import _guard

__all__ = ["Outcome", "describe", "run_program"]

MEMORY_BYTES: Final = 1 << 29
TIMEOUT_S: Final = 10
_START_S: Final = 5  # for the interpreter, on a slow device
_UNSHARE: Final = ("--user", "--net", "--ipc", "--pid", "--fork", "--kill-child")
_SHOWN_CHARACTERS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended.

    Attributes:
        is_passed: By itself, at its end.
        reason: "passed", "timed out", "killed", or the name of the exception.
    """

    is_passed: bool
    reason: str


def run_program(program: str, *, timeout_s: int = TIMEOUT_S) -> Outcome:
    """Runs a Python program that is not trusted.

    It has the standard library, 512 MiB, no environment, no input and no output. Where the system
    lets `unshare` make namespaces it has no network and sees no other process.

    Args:
        program: Its source.
        timeout_s: Seconds of processor time, and of time.
    """
    token, start = secrets.token_hex(16), time.monotonic()
    command = [
        *_namespaces(),
        *(sys.executable, "-I", "-S", "-B", str(Path(_guard.__file__).resolve())),
        *(str(timeout_s), str(MEMORY_BYTES), token),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="edgellm-eval-") as folder,
        tempfile.TemporaryFile() as answer,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        ) as process,
    ):
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout_s + _START_S)
        except subprocess.TimeoutExpired:
            return Outcome(is_passed=False, reason="timed out")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        answer.seek(0)
        said = answer.read().decode(errors="replace")
    if said == token:
        return Outcome(is_passed=True, reason="passed")
    if process.returncode and not said:
        # The processor limit ends it by SIGKILL too: the first process of a namespace gets no
        # signal that it could have ignored.
        is_late = time.monotonic() - start >= timeout_s
        return Outcome(is_passed=False, reason="timed out" if is_late else "killed")
    return Outcome(is_passed=False, reason=said[:_SHOWN_CHARACTERS] or "ended early")


def describe() -> str:
    """What a program under test is kept from, for the user."""
    network = (
        "no network"
        if _namespaces()
        else "sockets refused by Python only, since unshare makes no namespaces here"
    )
    return (
        f"each program runs in a process of its own: {TIMEOUT_S} s, {MEMORY_BYTES >> 20} MiB,"
        f" standard library, no environment, writes no files, {network}"
    )


@functools.cache
def _namespaces() -> tuple[str, ...]:
    """The command that cuts off network and processes; empty where it does not work."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, *_UNSHARE)
    try:
        found = subprocess.run((*command, "true"), capture_output=True, timeout=_START_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return command if found.returncode == 0 else ()
