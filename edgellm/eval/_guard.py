"""Runs one program that a model wrote; `sandbox` starts this file in a process of its own.

    _guard.py SECONDS BYTES TOKEN < PROGRAM

Prints TOKEN if the program ended by itself, else the name of what ended it. The audit hook stands
between a careless program and the user's files; it would not hold an attacker.
"""

from __future__ import annotations

import os
import resource
import sys

_MAX_OUTPUT_BYTES = 64  # the answer, and all that a library could write past the audit hook
_MAX_FILES = 64
_REFUSED = (
    "ctypes.",
    "fcntl.",
    "mmap.",
    "os.",
    "pty.",
    "resource.",
    "shutil.",
    "signal.",
    "socket.",
    "sqlite3.",
    "subprocess.",
    "sys.addaudithook",
    "syslog.",
)
_REFUSED_MODULES = ("_dbm", "_gdbm")  # open files in C, unseen by the hook
_ALLOWED = ("os.listdir", "os.scandir", "os.walk")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        flags = arguments[2]
        if isinstance(flags, int) and flags & _WRITES:
            raise PermissionError("a program under test writes no files")
    elif event == "import" and arguments[0] in _REFUSED_MODULES:
        raise PermissionError(f"a program under test may not import {arguments[0]}")
    elif event.startswith(_REFUSED) and event not in _ALLOWED:
        raise PermissionError(f"a program under test may not use {event}")


def _limit(seconds: int, memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: _MAX_OUTPUT_BYTES,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _main() -> None:
    seconds, memory_bytes, token = sys.argv[1:]
    del sys.argv[1:]
    program = sys.stdin.buffer.read().decode()
    answer = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    _limit(int(seconds), int(memory_bytes))
    sys.addaudithook(_refuse)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        token = type(error).__name__
    os.write(answer, token.encode("utf-8", "replace")[:_MAX_OUTPUT_BYTES])
    os._exit(0)


if __name__ == "__main__":
    _main()
