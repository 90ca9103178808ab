"""`edgellm export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from edgellm.cli import _onnx
from edgellm.cli._format import format_bytes, format_rounding, table
from edgellm.cli._progress import Bar
from edgellm.cli._usage import as_usage

if TYPE_CHECKING:
    from edgellm.exporters.export import ExportOptions, ExportPlan, ExportReport

__all__ = ["command"]

_CHAT = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hello! How can I help?"},
)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: the source's name with -int4.edge, in this folder.",
)
@click.option(
    "--head",
    type=click.Choice(["e4", "q8", "auto"]),
    default="auto",
    show_default=True,
    help="Embedding and head in 4.5 or 8.1 bits a weight; auto: as --bits decides, q8 with fast.",
)
@click.option(
    "--quality",
    type=click.Choice(["best", "balanced", "fast"]),
    default="balanced",
    show_default=True,
    help="fast rounds the weights as they are and carries 4-bit ones over where E4 holds them; the "
    "others calibrate (minutes).",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Text to calibrate on. Default: ours, and one that the model writes.",
)
@click.option(
    "--bits",
    type=click.FloatRange(4.5, 8.2),
    help="Bits a weight up to which the matrices that hurt most in 4 bits get 5 or 8. Default: 5; "
    "with --head e4 or q8 all layers get 4.",
)
@click.option(
    "-t", "--threads", type=click.IntRange(1, 1024), help="Default: CPUs of this process."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@_onnx.options
def command(
    source: Path,
    output: Path | None,
    head: Literal["e4", "q8", "auto"],
    quality: Literal["best", "balanced", "fast"],
    calibration: Path | None,
    bits: float | None,
    threads: int | None,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Make an INT4 model file of SOURCE: a GGUF file, a Hugging Face folder or an ONNX model.

    The same source gives the same bytes. An older file under the output's name stays until the new
    one is whole. A calibration that was interrupted goes on where it was.
    """
    from edgellm.exporters.export import ExportOptions, check_plan, plan_export, run_plan

    if quality == "fast" and (calibration is not None or bits is not None):
        raise click.UsageError("--calibration and --bits go with --quality balanced or best")
    options = ExportOptions(
        head=head, threads=threads, quality=quality, calibration=calibration, bits=bits
    )
    plan = plan_export(source, options)
    output = output or Path(f"{plan.source.name}-int4.edge")
    with as_usage():
        check_plan(plan, output, options)
    if dry_run:
        click.echo(_describe(plan, output, options))
        return
    if quiet:
        run_plan(plan, output, options)
        return
    with Bar("calibrating", lambda count: f"{count} layers") as first, Bar("exporting") as bar:
        report = run_plan(plan, output, options, bar.update, first.update)
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    if report.rounding:
        click.echo(f"weights      {format_rounding(report.rounding)}")
    click.echo(_summary(report))


def _summary(report: ExportReport) -> str:
    bits = 8 * report.plan.weight_bytes / report.plan.num_weights
    return (
        f"{report.output}: {format_bytes(report.file_bytes)}, {bits:.2f} bits a weight, model "
        f"{report.model_id[:12]}"
    )


def _describe(plan: ExportPlan, output: Path, options: ExportOptions) -> str:
    from edgellm.exporters.quality import free_tensors

    free, size = frozenset[str](), format_bytes(plan.weight_bytes)
    if options.budget is not None:
        free = free_tensors(plan.tensors, options.is_head_free)
        size = f"about {format_bytes(int(options.budget * plan.num_weights / 8))}"
    source, model = plan.source, plan.source.description
    eos = ", ".join(f"{i} {plan.tokenizer.token_bytes(i)!r}" for i in source.tokenizer.eos_ids)
    bos = f"{source.tokenizer.bos_id}" if source.tokenizer.add_bos else "not added"
    lines = [
        f"source       {source.kind}, {model.architecture}, {len(source.tensors.shapes)} tensors",
        f"output       {output}, {size} of weights",
        f"layers       {model.num_layers} of {model.hidden_size}, {model.num_heads} heads with "
        f"{model.num_kv_heads} for keys and values, head size {model.head_dim}, "
        f"feed-forward {model.ffn_size}",
        f"vocabulary   {model.num_tokens} tokens in {model.vocab_size} rows",
        f"context      {model.max_context} tokens",
        f"BOS          {bos}",
        f"EOS          {eos}",
        *(f"note         {note}" for note in plan.notes),
        "",
        _tensor_table(plan, free),
    ]
    if "default" in source.chat_templates:
        lines += ["", "a chat of three messages:", "", _rendered(plan)]
    return "\n".join(lines)


def _tensor_table(plan: ExportPlan, free: frozenset[str]) -> str:
    """One row per tensor; those that differ only in the layer's number share one.

    The `free` ones get their format as the budget allows, by measurement.
    """
    from edgellm.exporters.sensitivity import FORMATS
    from edgellm.format.spec import tensor_bytes

    choice = ", ".join(kind.name for kind in FORMATS)
    groups: dict[tuple[str, ...], list[int]] = {}
    for tensor in plan.tensors:
        name = tensor.name
        if name.startswith("layers."):
            name = "layers.*." + name.rpartition(".")[2]
        origin = " ".join(dict.fromkeys(tensor.source_types)) or "computed"
        shape = f"{tensor.rows} x {tensor.cols}"
        becomes, size = tensor.format.name, tensor.size
        if tensor.name in free:
            becomes, size = choice, tensor_bytes(FORMATS[0], tensor.rows, tensor.cols)
        groups.setdefault((name, shape, origin, becomes), []).append(size)
    rows = [
        (
            *group[:1],
            str(len(sizes)),
            *group[1:],
            f"{format_bytes(sum(sizes))}{' or more' * (group[3] == choice)}",
        )
        for group, sizes in groups.items()
    ]
    return table(("tensor", "count", "shape", "from", "to", "size"), rows, right=(1, 2, 5))


def _rendered(plan: ExportPlan) -> str:
    from edgellm.errors import TemplateError
    from edgellm.exporters.vectors import make_templates

    template = make_templates(plan.source)["default"]
    for messages in (_CHAT, _CHAT[1:]):
        try:
            return template.render(messages, add_generation_prompt=True)
        except TemplateError as error:
            reason = str(error)
    return reason
