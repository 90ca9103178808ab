"""The chat of `edgellm run`: several lines, commands, history, and Ctrl-C for one answer."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, SamplingParams
from edgellm.cli import _chat


@pytest.fixture(scope="module")
def path(tiny_edge_of: Callable[[str], Path]) -> Path:
    return tiny_edge_of("llama")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1) as llm:
        yield llm


def talk(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException], **options: Any
) -> list[list[dict[str, Any]]]:
    """Types the lines and leaves; returns the messages of each answer asked for."""
    asked: list[list[dict[str, Any]]] = []
    real = llm.stream_chat
    script = iter([*lines, EOFError])

    def read_line(prompt: str) -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    def stream_chat(messages: list[dict[str, Any]], *arguments: Any, **named: Any) -> Any:
        asked.append([dict(message) for message in messages])
        return real(messages, *arguments, **named)

    monkeypatch.setattr("builtins.input", read_line)
    monkeypatch.setattr(llm, "stream_chat", stream_chat)
    defaults: dict[str, Any] = {"system": None, "max_tokens": 3, "stop": ()}
    sampling = SamplingParams(logit_bias=dict.fromkeys(llm.eos_ids, -1e9))
    _chat.chat(llm, sampling, **(defaults | options))
    return asked


def contents(messages: list[dict[str, Any]], role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (['"""one', "  two", 'three"""'], "one\n  two\nthree"),
        (['"""', "one", "", 'two"""'], "one\n\ntwo"),
        (['"""one"""'], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (["a\\b"], "a\\b"),
    ],
)
def test_a_message_may_have_several_lines(lines: list[str], message: str) -> None:
    script = iter(lines)
    assert _chat.read_message(lambda prompt: next(script)) == message
    assert list(script) == []


def test_the_history_goes_along(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = talk(llm, monkeypatch, "one", "", "two", system="Be brief.")
    assert contents(second, "user") == ["one", "two"]
    assert contents(first, "system") == contents(second, "system") == ["Be brief."]
    (answer,) = contents(second, "assistant")
    output = capsys.readouterr()
    assert output.out.startswith(answer)
    assert output.err.count("[prompt ") == 2
    assert re.search(r"\(\d+ cached\)", output.err)


def test_commands(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = talk(
        llm,
        monkeypatch,
        *("one", "/clear", "two", "/system Be kind.", "three", "/system", "/help", "/nonsense"),
        *("/etc/passwd?", "/exit", "never reached"),
    )
    assert [contents(messages, "user") for messages in asked] == [
        ["one"],
        ["two"],
        ["three"],
        ["three", "/etc/passwd?"],
    ]
    assert [contents(messages, "system") for messages in asked] == [[], [], *[["Be kind."]] * 2]
    errors = capsys.readouterr().err
    for part in ("Be kind.", "Ctrl-C stops", "no command /nonsense"):
        assert part in errors


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = _chat.click.echo
    pieces = []

    def echo(text: Any = "", nl: bool = True, **options: Any) -> None:
        if not nl:
            pieces.append(text)
            if len(pieces) == 3:
                raise KeyboardInterrupt
        real(text, nl=nl, **options)

    monkeypatch.setattr(_chat.click, "echo", echo)
    _, second = talk(llm, monkeypatch, "one", KeyboardInterrupt, "two", max_tokens=50)
    assert contents(second, "assistant") == ["".join(pieces[:3])]
    errors = capsys.readouterr().err
    assert "(stopped)" in errors
    assert "Ctrl-D or /exit leaves" in errors


def test_a_full_context_is_said_and_the_chat_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(path, threads=1, context=40) as llm:
        asked = talk(llm, monkeypatch, "one " * 40, "two")
    assert [contents(messages, "user") for messages in asked] == [["one " * 40], ["two"]]
    assert "/clear starts anew" in capsys.readouterr().err


def test_in_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(path: Path) -> None:
    ours, theirs = pty.openpty()
    code = "from edgellm.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(path), "-t", "1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=become_foreground,
    )
    os.close(theirs)
    try:
        wait_for(ours, ">>> ")
        os.write(ours, b"hello\n")
        wait_for(ours, "hello\r\n")
        os.write(ours, b"\x03")
        # The tiny model may have ended its answer by itself.
        wait_for(ours, "(stopped)", "leaves)")
        wait_for(ours, ">>> ")
        os.write(ours, b"/exit\n")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def become_foreground() -> None:
    """Makes the terminal on stdin the controlling one, so that Ctrl-C reaches the process.

    What a shell has started with & ignores it, and its children with it.
    """
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def wait_for(terminal: int, *texts: str) -> None:
    seen = ""
    deadline = time.monotonic() + 60
    while not any(text in seen for text in texts):
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"waited for {texts}, saw {seen!r}"
        seen += os.read(terminal, 1).decode(errors="replace")
