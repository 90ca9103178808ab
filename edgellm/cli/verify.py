"""`edgellm verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from edgellm.cli import _store
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm._native import NativeModel
    from edgellm.text import ChatEncoder, Tokenizer

__all__ = ["command"]


@click.command()
@_store.model_argument
@click.option("-t", "--threads", type=click.IntRange(1), help="Default: CPUs of this process.")
@click.option("--isa", help="Force an instruction set; see: edgellm kernels.")
@click.option(
    "--against",
    type=click.Choice(["onnxruntime"]),
    help="Compare the logits with another engine's, too.",
)
def command(model: str, threads: int | None, isa: str | None, against: str | None) -> None:
    """Check a model file, then replay on this device what was recorded at its export.

    The hashes of all sections, token ids of texts, rendered chats with their ids, and greedy
    continuations must be the same. The first difference is named, and the exit code is 1.

    --against onnxruntime exports the model to a temporary folder (1.3 times the file; TMPDIR says
    where) and runs it in ONNX Runtime, in float32. The exit code is 1 if the logits differ by more
    than int8 activations and a float16 cache may cost: 0.003 nats a token, or twice what they cost
    a plain numpy model of the same weights, whichever is more.
    """
    from edgellm._native import NativeModel
    from edgellm.format import EdgeFile
    from edgellm.text import load_text

    path = _store.resolve(model)
    with EdgeFile.open(path, verify=True) as file:
        click.echo(f"hashes         {len(file.sections)} sections, model id {file.model_id}")
        vectors = file.test_vectors
        tokenizer, chat = load_text(file)
        _check_texts(tokenizer, vectors["texts"])
        click.echo(f"texts          {len(vectors['texts'])} tokenised as at export")
        _check_chats(chat, vectors["chats"])
        click.echo(f"chats          {len(vectors['chats'])} rendered and tokenised as at export")
        with NativeModel(path, threads=threads or 0, isa=isa) as native:
            _check_greedy(native, vectors["greedy"])
            count = sum(len(vector["continuation"]) for vector in vectors["greedy"])
            click.echo(
                f"continuations  {len(vectors['greedy'])} of {count} tokens in all, the same on"
                f" {native.info.isa} with {native.info.num_threads} threads"
            )
            if against:
                _check_witness(path, native, threads)
    click.echo(f"{path} is right")


def _check_texts(tokenizer: Tokenizer, vectors: list[dict[str, Any]]) -> None:
    for number, vector in enumerate(vectors):
        _compare(f"text {number}", "ids", tokenizer.encode(vector["text"]), vector["ids"])


def _check_chats(chat: ChatEncoder | None, vectors: list[dict[str, Any]]) -> None:
    if chat is None:
        if vectors:
            raise EdgeLLMError("verify: chats are recorded but the file has no chat template")
        return
    for number, vector in enumerate(vectors):
        encoded = chat.encode(
            vector["messages"], add_generation_prompt=vector["add_generation_prompt"]
        )
        _compare(f"chat {number}", "rendered text", encoded.text, vector["rendered"])
        _compare(f"chat {number}", "ids", encoded.ids, vector["ids"])


def _check_greedy(native: NativeModel, vectors: list[dict[str, Any]]) -> None:
    from edgellm._native import Sampling

    greedy = Sampling().to_struct()
    for number, vector in enumerate(vectors):
        wanted = vector["continuation"]
        session = native.create_session(len(vector["ids"]) + len(wanted))
        session.prefill(vector["ids"])
        found: list[int] = []
        while len(found) < len(wanted):
            found += session.step(greedy)
        session.close()
        _compare(f"continuation {number}", "ids", found[: len(wanted)], wanted)


def _check_witness(path: Path, native: NativeModel, threads: int | None) -> None:
    from edgellm.exporters.to_onnx_witness import compare

    found = compare(path, native, threads=threads)
    same, total = (sum(pair[i] for pair in found.greedy) for i in (0, 1))
    click.echo(
        f"witness        {found.witness}, {found.num_tokens} tokens: KL divergence mean"
        f" {found.mean_kl:.5f} ({found.allowed_kl:.5f} allowed), largest {found.max_kl:.4f} nats;"
        f" same first choice {found.top1:.1%}; greedy {same} of {total} tokens before the first"
        " other one"
    )
    if not found.mean_kl <= found.allowed_kl:
        raise EdgeLLMError(
            f"verify: {found.witness} differs by {found.mean_kl:.5f} nats a token, and int8"
            f" activations and a float16 cache may cost {found.allowed_kl:.5f} of this model:"
            " the runtime is wrong here; please report it with the model's name"
        )


def _compare(what: str, part: str, found: Any, wanted: Any) -> None:
    if found == wanted:
        return
    at = next(
        (i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
        min(len(found), len(wanted)),
    )
    raise EdgeLLMError(
        f"verify: {what}: {part} differ at {at}: here {found[at : at + 8]!r}, at export"
        f" {wanted[at : at + 8]!r}"
    )
