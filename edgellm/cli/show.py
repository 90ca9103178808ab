"""`edgellm show`."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli import _store
from edgellm.cli._format import format_bytes, format_rounding, table

if TYPE_CHECKING:
    from edgellm._native import NativeModel
    from edgellm.format import EdgeFile

__all__ = ["command"]

_CONTEXTS = (2048, 8192, 32768, 131072)


@click.command()
@_store.model_argument
@click.option("--plan", is_flag=True, help="Print the execution plan of this machine.")
@click.option("--tensors", is_flag=True, help="Print a table of all tensors.")
@click.option("--board", help="Say whether it fits a board, and how fast it can be at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, plan: bool, tensors: bool, board: str | None, as_json: bool) -> None:
    """Show what is in a model file and what it needs."""
    if sum((plan, tensors, as_json)) > 1:
        raise click.UsageError("--plan, --tensors and --json exclude one another")

    from edgellm._native import NativeModel
    from edgellm.engine.tuning import tune_threads
    from edgellm.format import EdgeFile

    path = _store.resolve(model)
    with EdgeFile.open(path) as file:
        if tensors:
            click.echo(_tensor_table(file))
            return
        with NativeModel(path) as native:
            if plan:
                tune_threads(native, _store.cache_folder())
                decode, prefill = native.threads
                click.echo(f"threads: {decode} decode, {prefill} prefill")
                click.echo(native.plan().rstrip("\n"))
                return
            card = _card(file, native)
            if board is not None:
                card["board"] = _board(native, board)
    click.echo(json.dumps(card, ensure_ascii=False) if as_json else _text(card))


def _card(file: EdgeFile, native: NativeModel) -> dict[str, Any]:
    from edgellm import devices
    from edgellm.types import TensorFormat

    info = native.info
    contexts = sorted({n for n in _CONTEXTS if n < info.max_context} | {info.max_context})
    needs = []
    for context in contexts:
        kv, scratch = native.session_bytes(context)
        needs.append(
            {
                "context": context,
                "kv_bytes": kv,
                "total_bytes": info.file_bytes + kv + scratch,
            }
        )
    return {
        "path": str(file.path),
        "model_id": file.model_id,
        "file_bytes": info.file_bytes,
        "num_parameters": num_parameters(file),
        "weight_bytes_per_token": info.weight_bytes_per_token,
        "model": {k: v for k, v in file.meta["model"].items() if k != "layers"},
        "windows": [layer["window"] for layer in file.meta["model"]["layers"]],
        "tokenizer": file.meta["tokenizer"],
        "chat_templates": list(file.chat_templates),
        "quantization": file.meta["quantization"],
        "bits_per_weight": _bits_per_weight(file),
        "formats": {
            tensor.name: tensor.format.name
            for tensor in file.tensors.values()
            if tensor.format != TensorFormat.F32
        },
        "kv": file.meta["kv"],
        "source": file.meta["source"],
        "exporter": file.meta["exporter"],
        "memory": needs,
        "available_bytes": devices.probe("cpu").available_bytes,
    }


def num_parameters(file: EdgeFile) -> int:
    """Weights of the model, without the rows that only fill up and the RoPE tables."""
    ffn = file.meta["model"]["ffn_size"]
    total = 0
    for tensor in file.tensors.values():
        if tensor.name.startswith("rope."):
            continue
        rows = 2 * ffn if tensor.name.endswith(".gate_up") else tensor.rows
        total += rows * tensor.cols
    return total


def _bits_per_weight(file: EdgeFile) -> float:
    """Of all weights together, as `edgellm export` prints it."""
    tensors = file.tensors.values()
    num_weights = sum(tensor.rows * tensor.cols for tensor in tensors)
    return 8 * sum(tensor.size for tensor in tensors) / num_weights


def _board(native: NativeModel, name: str) -> dict[str, Any]:
    from edgellm import devices

    profile = devices.profile(name)
    kv, scratch = native.session_bytes(min(native.info.max_context, _CONTEXTS[0]))
    needed = native.info.file_bytes + kv + scratch
    return {
        "name": name,
        "title": profile.title,
        "memory_bytes": profile.memory_bytes,
        "is_fitting": needed <= profile.memory_bytes,
        "decode_limit_tok_s": profile.bandwidth_bytes_per_s / native.info.weight_bytes_per_token,
        "source": profile.source,
    }


def _text(card: dict[str, Any]) -> str:
    model, tokenizer, recipe = card["model"], card["tokenizer"], card["quantization"]
    windows = [window for window in card["windows"] if window]
    attention = f"{model['num_heads']} heads, {model['num_kv_heads']} for keys and values"
    rows = [
        ("file", f"{card['path']}, {format_bytes(card['file_bytes'])}"),
        ("model id", card["model_id"]),
        ("architecture", model["architecture"]),
        ("parameters", f"{card['num_parameters']:,}"),
        ("layers", f"{model['num_layers']} of width {model['hidden_size']}"),
        ("attention", f"{attention}, of size {model['head_dim']}"),
        ("vocabulary", f"{model['num_tokens']:,} tokens in {model['vocab_size']:,} rows"),
        ("context", f"{model['max_context']:,} tokens"),
        ("quantisation", f"{recipe['recipe']}, head {recipe['head']}"),
        *_calibration(recipe),
        ("bits", f"{card['bits_per_weight']:.2f} a weight"),
        *_formats(card["formats"]),
        ("KV cache", _kv_reason(model["kv_format"], card["kv"])),
        ("per token", f"{format_bytes(card['weight_bytes_per_token'])} of weights are read"),
        ("end of text", ", ".join(map(str, tokenizer["eos_ids"])) or "none"),
        ("chat template", ", ".join(card["chat_templates"]) or "none: it completes text (--raw)"),
        ("made from", ", ".join(file["name"] for file in card["source"]["files"])),
        ("made by", card["exporter"]),
    ]
    if "rounding" in recipe:
        rows.insert(9, ("weights", format_rounding(recipe["rounding"])))
    if windows:
        rows.insert(6, ("window", f"{windows[0]} tokens in {len(windows)} of the layers"))
    if "board" in card:
        board = card["board"]
        fits = "fits" if board["is_fitting"] else "does not fit"
        limit = f"at most {board['decode_limit_tok_s']:,.0f} tok/s by its memory's bandwidth"
        rows.append((board["name"], f"{fits} into {board['title']}; {limit} ({board['source']})"))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:{width}}{value}" for name, value in rows]
    cells = [
        (
            f"{need['context']:,}",
            format_bytes(need["kv_bytes"]),
            format_bytes(need["total_bytes"]),
            "yes" if need["total_bytes"] <= card["available_bytes"] else "no",
        )
        for need in card["memory"]
    ]
    lines += ["", table(("context", "KV cache", "memory in all", "fits now"), cells, (0, 1, 2))]
    return "\n".join(lines)


def _calibration(recipe: dict[str, Any]) -> list[tuple[str, str]]:
    """What a calibrated file was made with, and how good it was then."""
    if "quality" not in recipe:
        return []
    used, found = recipe["calibration"], recipe["measured"]
    text = "edgellm's text and the model's own" if used["origin"] == "own" else used["origin"]
    return [
        ("quality", recipe["quality"]),
        ("calibration", f"{text}; {used['tokens']:,} tokens, SHA-256 {used['sha256'][:12]}..."),
        (
            "measured",
            f"KL divergence {found['kl']:.4f} nats a token, perplexity "
            f"{found['source_perplexity']:.2f} -> {found['perplexity']:.2f}, over "
            f"{found['tokens']:,} tokens of the same kind",
        ),
    ]


def _formats(formats: dict[str, str]) -> list[tuple[str, str]]:
    """How many matrices of each kind have which format."""
    kinds: dict[str, Counter[str]] = {}
    for name, kind in formats.items():
        kinds.setdefault(name.rpartition(".")[2], Counter())[kind] += 1
    return [
        (f"- {kind}", ", ".join(f"{n} x {name}" for name, n in sorted(counts.items())))
        for kind, counts in kinds.items()
    ]


def _kv_reason(kv_format: str, measured: dict[str, Any]) -> str:
    """Which cache sessions get, and what was measured at export."""
    if not measured:
        return kv_format
    return (
        f"{kv_format}; int8 instead of float16 was measured to cost {measured['int8_kl']:.5f} nats"
        f" a token over {measured['tokens']:,} tokens"
    )


def _tensor_table(file: EdgeFile) -> str:
    cells = [
        (
            tensor.name,
            tensor.format.name,
            f"{tensor.rows} x {tensor.cols}",
            format_bytes(tensor.size),
            file.sections[tensor.section].tag,
        )
        for tensor in file.tensors.values()
    ]
    return table(("tensor", "format", "shape", "size", "section"), cells, (2, 3))
