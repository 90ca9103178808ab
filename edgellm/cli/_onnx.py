"""`edgellm export --to onnx`: options and what they do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from edgellm.cli import _store
from edgellm.cli._format import format_bytes

__all__ = ["options"]

_OURS = {"source", "output", "to", "onnx_weights", "onnx_activations", "quiet"}
_ONLY_ONNX = ("onnx_weights", "onnx_activations")


def options(export: Callable[..., None]) -> Callable[..., None]:
    """Gives the command of `export` the options --to, --onnx-weights, --onnx-activations."""

    @click.option(
        "--to",
        type=click.Choice(["edge", "onnx"]),
        default="edge",
        show_default=True,
        help="onnx: SOURCE is an .edge model, the output a new folder for ONNX Runtime.",
    )
    @click.option(
        "--onnx-weights",
        type=click.Choice(["int4", "float"]),
        default="int4",
        show_default=True,
        help="As integers that ONNX Runtime's MatMulNBits multiplies, or as float32.",
    )
    @click.option(
        "--onnx-activations",
        type=click.Choice(["float", "int8"]),
        default="float",
        show_default=True,
        help="As they are, or rounded where edgellm rounds: its numbers, more slowly.",
    )
    @functools.wraps(export)
    def command(
        to: str,
        onnx_weights: Literal["int4", "float"],
        onnx_activations: Literal["float", "int8"],
        **others: Any,
    ) -> None:
        context = click.get_current_context()
        given = [
            parameter.opts[0]
            for parameter in context.command.params
            if parameter.name not in _OURS
            and parameter.name is not None
            and context.get_parameter_source(parameter.name) == ParameterSource.COMMANDLINE
        ]
        if to == "onnx":
            if given:
                raise click.UsageError(f"{given[0]} does nothing with --to onnx")
            how = onnx_weights, onnx_activations
            _export(others["source"], others["output"], how, others["quiet"])
            return
        for name in _ONLY_ONNX:
            if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --to onnx")
        export(**others)

    return command


def _export(
    source: Path,
    output: Path | None,
    how: tuple[Literal["int4", "float"], Literal["float", "int8"]],
    quiet: bool,
) -> None:
    from edgellm.exporters.to_onnx import export_onnx

    path = _store.resolve(str(source))
    report = export_onnx(path, output or Path(f"{path.stem}-onnx"), *how)
    if not quiet:
        click.echo(f"{report.output}: {format_bytes(report.num_bytes)} of model and weights")
