"""`edgellm list`."""

from __future__ import annotations

import json

import click

from edgellm.cli import _sources, _store
from edgellm.cli._format import format_bytes, table

__all__ = ["command"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def command(as_json: bool) -> None:
    """List pulled models, and those to be had."""
    names = dict.fromkeys([*_store.names(), *_sources.SOURCES])
    paths = {name: _store.stored_path(name) for name in names}
    sizes = {name: path.stat().st_size for name, path in paths.items() if path.exists()}
    if as_json:
        rows = [
            {"name": name, "path": str(paths[name]), "size_bytes": sizes.get(name)}
            for name in names
        ]
        click.echo(json.dumps(rows))
        return
    cells = [
        (name, format_bytes(sizes[name]), str(paths[name]))
        if name in sizes
        else (name, "-", f"not here; run: edgellm pull {name}")
        for name in names
    ]
    click.echo(table(("name", "size", "file"), cells, (1,)))
