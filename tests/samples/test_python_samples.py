"""Each Python sample runs as its docstring says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[2] / "samples/python"


def run(name: str, *arguments: str, stdin: str = "") -> str:
    result = subprocess.run(
        [sys.executable, str(SAMPLES / name), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def path(tiny_edge_of: Callable[[str], Path]) -> str:
    return str(tiny_edge_of("llama"))


def test_every_sample_has_a_test() -> None:
    assert {file.name for file in SAMPLES.glob("*.py")} == {
        "quick_start.py",
        "streaming_chat.py",
        "logits.py",
    }


def test_quick_start(path: str) -> None:
    assert "tok/s, ended by" in run("quick_start.py", path, "Hello")


def test_streaming_chat_computes_only_what_is_new(path: str) -> None:
    output = run("streaming_chat.py", path, stdin="Hello\nAgain\n")
    first, second = (
        int(line.split()[0].removeprefix("("))
        for line in output.splitlines()
        if line.endswith("were still in the cache)")
    )
    assert first == 0
    assert second > 5


def test_logits(path: str) -> None:
    lines = run("logits.py", path, "The quick").splitlines()
    assert len(lines) == 5
    shares = [float(line.split("%")[0]) for line in lines]
    assert shares == sorted(shares, reverse=True)
