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

_OURS = {"source", "output", "to", "onnx_weights", "quiet"}


def options(export: Callable[..., None]) -> Callable[..., None]:
    """Gives the command of `export` the options --to and --onnx-weights."""

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
    @functools.wraps(export)
    def command(to: str, onnx_weights: Literal["int4", "float"], **others: Any) -> None:
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
            _export(others["source"], others["output"], onnx_weights, others["quiet"])
            return
        if context.get_parameter_source("onnx_weights") == ParameterSource.COMMANDLINE:
            raise click.UsageError("--onnx-weights needs --to onnx")
        export(**others)

    return command


def _export(
    source: Path, output: Path | None, weights: Literal["int4", "float"], quiet: bool
) -> None:
    from edgellm.exporters.to_onnx import export_onnx

    path = _store.resolve(str(source))
    report = export_onnx(path, output or Path(f"{path.stem}-onnx"), weights)
    if not quiet:
        click.echo(f"{report.output}: {format_bytes(report.num_bytes)} of model and weights")
