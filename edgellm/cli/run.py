"""`edgellm run`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli import _store

if TYPE_CHECKING:
    from edgellm.engine import LLM, Delta, SamplingParams, Stats

__all__ = ["command", "figures"]

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


@click.command()
@_store.model_argument
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("-n", "--max-tokens", type=click.IntRange(0), help="Most tokens to generate.")
@click.option("-c", "--context", type=click.IntRange(1), help="Tokens the KV cache holds.")
@click.option("--temperature", type=float, help="0 takes the most probable token.")
@click.option("--top-k", type=int, help="Keep the K most probable tokens; 0 keeps all.")
@click.option("--top-p", type=float, help="Keep the tokens that hold this probability.")
@click.option("--min-p", type=float, help="Drop tokens below this share of the best.")
@click.option("--repetition-penalty", type=float, help="1 is off.")
@click.option("--presence-penalty", type=float, help="0 is off.")
@click.option("--frequency-penalty", type=float, help="0 is off.")
@click.option("--seed", type=int, help="Repeat an answer; the default is drawn.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text; repeatable.")
@click.option("--raw", is_flag=True, help="Continue the text itself, without a chat template.")
@_store.threads_option
@click.option("--isa", help="Force an instruction set; see: edgellm kernels.")
@_store.kv_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def command(
    model: str,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    context: int | None,
    stop: tuple[str, ...],
    raw: bool,
    threads: int | None,
    isa: str | None,
    kv: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    r"""Answer PROMPT, or chat when there is none.

    MODEL is an .edge file or the name of a pulled model. PROMPT may come through a pipe; "-" asks
    for it. Sampling options that are not given are those the model's makers recommend, or greedy.

    \b
    edgellm run smollm2 "Why is the sky blue?"
    cat notes.txt | edgellm run smollm2 --system "Summarise."
    edgellm run smollm2
    """
    path = _store.resolve(model)
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = _read_stdin()
    if prompt is None and (raw or as_json):
        raise click.UsageError("--raw and --json need a prompt")
    if raw and system is not None:
        raise click.UsageError("--system needs a chat template; leave out --raw")

    from edgellm.engine import LLM

    cache = _store.cache_folder()
    with LLM(path, context=context, threads=threads, isa=isa, kv=kv, cache=cache) as llm:
        if llm.info.isa == "ref" and isa is None:
            click.echo(
                "edgellm: this CPU has none of the fast instruction sets, answers are slow; see:"
                " edgellm kernels",
                err=True,
            )
        params = _sampling(llm, sampling)
        if prompt is None:
            from edgellm.cli import _chat

            _chat.chat(llm, params, system=system, max_tokens=max_tokens, stop=stop)
            return
        if raw:
            deltas = llm.stream(prompt, params, max_tokens=max_tokens, stop=stop)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": prompt})
            deltas = llm.stream_chat(messages, params, max_tokens=max_tokens, stop=stop)
        if as_json:
            _print_json(deltas)
        else:
            _print(deltas, params)


def figures(stats: Stats, sampling: SamplingParams) -> str:
    """One line about an answer; the seed only where it matters."""
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    parts = [
        f"prompt {stats.prompt_tokens} tokens{cached}, {stats.prefill_tok_s:,.1f} tok/s",
        f"generated {stats.generated_tokens}, {stats.decode_tok_s:,.1f} tok/s",
        f"first token {stats.first_token_ms:,.1f} ms",
        f"memory {stats.peak_memory_bytes / 1e6:,.0f} MB (KV cache {stats.kv_bytes / 1e6:,.0f} MB)",
    ]
    if sampling.temperature > 0:
        parts.append(f"seed {stats.seed}")
    return f"[{' | '.join(parts)}]"


def _sampling(llm: LLM, options: dict[str, Any]) -> SamplingParams:
    given = {name: options[name] for name in _SAMPLING if options[name] is not None}
    return dataclasses.replace(llm.sampling, **given)


def _read_stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode()
    except UnicodeDecodeError as err:
        raise ValueError(f"the prompt is not UTF-8 at byte {err.start}; convert it first") from err


def _print(deltas: Iterator[Delta], sampling: SamplingParams) -> None:
    for delta in deltas:
        click.echo(delta.text, nl=False)
        sys.stdout.flush()
    click.echo()
    if delta.stats:
        click.echo(figures(delta.stats, sampling), err=True)


def _print_json(deltas: Iterator[Delta]) -> None:
    pieces = list(deltas)
    last = pieces[-1]
    result = {
        "text": "".join(piece.text for piece in pieces),
        "ids": [token for piece in pieces for token in piece.ids],
        "finish_reason": last.finish_reason,
        "stats": dataclasses.asdict(last.stats) if last.stats else None,
    }
    click.echo(json.dumps(result, ensure_ascii=False))
