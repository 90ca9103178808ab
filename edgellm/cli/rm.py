"""`edgellm rm`."""

from __future__ import annotations

import click

from edgellm.cli import _store
from edgellm.cli._format import format_bytes
from edgellm.errors import ModelNotFoundError

__all__ = ["command"]


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def command(names: tuple[str, ...]) -> None:
    """Delete pulled models; files elsewhere are never touched."""
    for name in names:
        if name not in _store.names():
            known = ", ".join(_store.names()) or "none"
            raise ModelNotFoundError(f"{name} has not been pulled (pulled: {known})")
    for name in names:
        path = _store.stored_path(name)
        size = path.stat().st_size
        path.unlink()
        click.echo(f"deleted {name}, {format_bytes(size)} freed")
