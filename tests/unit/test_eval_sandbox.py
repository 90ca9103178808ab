"""Programs that a model wrote end in time and touch nothing of the user's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from edgellm.eval.humaneval import HumanEval
from edgellm.eval.sandbox import _namespaces, describe, run_program

PROBLEM = {
    "task_id": "x/0",
    "prompt": 'def double(n):\n    """Twice n.\n    >>> double(2)\n    4\n    """\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = 1", "passed"),
        ("import math, collections, re, typing, itertools, functools, heapq", "passed"),
        ("import subprocess, asyncio, multiprocessing, tempfile", "passed"),
        ("print('much ' * 100_000)", "passed"),
        ("assert False", "AssertionError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("x = (", "SyntaxError"),
        ("class E\ud800: pass", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("raise type('E' * 5000, (Exception,), {})", "E" * 40),
        ("input()", "EOFError"),
        ("import numpy", "ModuleNotFoundError"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import os; os._exit(0)", "ended early"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.system('true')", "PermissionError"),
        ("import os; os.kill(1, 9)", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import ctypes; ctypes.CDLL(None)", "PermissionError"),
        ("import resource; resource.setrlimit(0, (-1, -1))", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.environ['x'] = 'y'", "PermissionError"),
        ("import os; assert set(os.environ) <= {'LC_CTYPE'}", "passed"),
    ],
)
def test_how_a_program_ends(program: str, reason: str) -> None:
    outcome = run_program(program)
    assert outcome.reason == reason
    assert outcome.is_passed == (reason == "passed")


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_is_ended_in_time(program: str) -> None:
    start = time.monotonic()
    assert run_program(program, timeout_s=1).reason == "timed out"
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    "write",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "import os; os.open({path!r}, os.O_CREAT | os.O_WRONLY)",
        "import os; os.mkdir({path!r})",
        "import os; os.symlink('/', {path!r})",
        "import pathlib; pathlib.Path({path!r}).touch()",
        "import shutil; shutil.copy('/etc/hostname', {path!r})",
        "import sqlite3; sqlite3.connect({path!r}).execute('create table t(x)')",
        "import dbm.ndbm; dbm.ndbm.open({path!r}, 'c')",
        "import dbm.dumb; dbm.dumb.open({path!r}, 'c')",
        "import zipfile; zipfile.ZipFile({path!r}, 'w')",
    ],
)
def test_nothing_is_written(write: str, tmp_path: Path) -> None:
    outcome = run_program(write.format(path=str(tmp_path / "trace")))
    assert not outcome.is_passed
    assert list(tmp_path.iterdir()) == []


def test_a_user_s_file_is_neither_removed_nor_changed(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("kept")
    for call in ("os.remove", "os.truncate", "os.rename", "os.chmod"):
        more = {"os.remove": "", "os.rename": f", {str(path)!r} + 'x'"}.get(call, ", 0")
        assert not run_program(f"import os; {call}({str(path)!r}{more})").is_passed
    assert path.read_text() == "kept"


def test_the_network_is_cut_off_below_python_where_the_system_can() -> None:
    if not _namespaces():
        assert "sockets refused by Python only" in describe()
        pytest.skip("unshare makes no namespaces here")
    # The import hook cannot see /sys: an interface other than lo would show the network.
    program = "assert open('/proc/net/dev').read().count(':') <= 1"
    assert run_program(program).reason == "passed"


@pytest.mark.parametrize(
    ("answer", "is_chat", "is_passed"),
    [
        ("    return 2 * n\n", False, True),
        ("    return n\n", False, False),
        ("```python\ndef double(n):\n    return 2 * n\n```\nIt doubles.", True, True),
        ("Sure:\n```py\n    return n + n\n```", True, True),
        ("```\ndef double(n):\n    return n * n\n```", True, False),
        ("I cannot.", True, False),
    ],
)
def test_answers_are_judged_by_the_tests(answer: str, is_chat: bool, is_passed: bool) -> None:
    assert HumanEval().judge(PROBLEM, answer, is_chat=is_chat)[0] is is_passed
