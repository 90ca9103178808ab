"""`edgellm kernels`."""

from __future__ import annotations

import dataclasses
import json

import click

from edgellm.cli._format import table

__all__ = ["command"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def command(as_json: bool) -> None:
    """List the kernels: which this CPU gets, and why not the rest."""
    from edgellm import _native

    rows = _native.kernels()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
        return
    cells = [
        (row.op, row.name, row.isa, "chosen" if row.is_chosen else row.reason or "available")
        for row in rows
    ]
    click.echo(table(("op", "kernel", "isa", "here"), cells))
