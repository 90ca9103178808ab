"""The chat of `edgellm run`: history, commands, several lines, and Ctrl-C for one answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

import click

from edgellm.cli.run import figures
from edgellm.engine import LLM, Message, SamplingParams
from edgellm.errors import ContextFullError, TemplateError

__all__ = ["chat", "read_message"]

HELP = '''\
/system TEXT   set the system message (without TEXT: show it) and start anew
/clear         forget the conversation
/help          this text
/exit          leave; so does Ctrl-D
Ctrl-C stops an answer. Several lines: """ before and after them, or \\ at the end of a line.'''


def chat(
    llm: LLM,
    sampling: SamplingParams,
    *,
    system: str | None,
    max_tokens: int | None,
    stop: Sequence[str],
) -> None:
    """Talks until Ctrl-D or /exit.

    Args:
        llm: the model.
        sampling: for every answer.
        system: the first system message, or None.
        max_tokens: most tokens of an answer, or None.
        stop: strings that end an answer.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    click.echo("Type a message, or /help.", err=True)
    history: list[Message] = []
    while True:
        try:
            text = read_message(input)
            word, _, rest = text.partition(" ")
            if not text.strip():
                continue
            if word in ("/exit", "/bye", "/quit"):
                return
            if word == "/help":
                click.echo(HELP, err=True)
            elif word == "/clear":
                history = []
            elif word == "/system":
                if rest.strip():
                    system, history = rest.strip(), []
                else:
                    click.echo(system or "(no system message)", err=True)
            elif word.startswith("/") and word[1:].isalpha():
                click.echo(f"no command {word}; see /help", err=True)
            else:
                first: list[Message] = []
                if system is not None:
                    first = [{"role": "system", "content": system}]
                asked: Message = {"role": "user", "content": text}
                answer = _answer(llm, [*first, *history, asked], sampling, max_tokens, stop)
                if answer is not None:
                    history += [asked, {"role": "assistant", "content": answer}]
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /exit leaves)", err=True)
        except EOFError:
            click.echo(err=True)
            return


def read_message(read_line: Callable[[str], str]) -> str:
    r"""Reads one message, of several lines if they are quoted by three quotes or end in `\`.

    Args:
        read_line: prints a prompt and returns a line; raises EOFError at the end.
    """
    line = read_line(">>> ")
    if line.startswith('"""'):
        text = line[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + read_line("... ")
        return text.rstrip()[:-3].strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line("... "))
    return "\n".join(lines)


def _answer(
    llm: LLM,
    messages: list[Message],
    sampling: SamplingParams,
    max_tokens: int | None,
    stop: Sequence[str],
) -> str | None:
    """Prints an answer and returns it, also if it was stopped; None if there was none."""
    text = ""
    try:
        deltas = llm.stream_chat(messages, sampling, max_tokens=max_tokens, stop=stop)
        with contextlib.closing(deltas):
            for delta in deltas:
                text += delta.text
                click.echo(delta.text, nl=False)
                sys.stdout.flush()
        click.echo()
        if delta.stats:
            click.echo(figures(delta.stats, sampling), err=True)
    except KeyboardInterrupt:
        click.echo("\n(stopped)", err=True)
        return text or None
    except ContextFullError as err:
        click.echo(f"{err}; /clear starts anew", err=True)
        return None
    except TemplateError as err:
        click.echo(str(err), err=True)
        return None
    return text
