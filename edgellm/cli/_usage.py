"""Wrong arguments that only the library finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

__all__ = ["as_usage"]


@contextmanager
def as_usage() -> Iterator[None]:
    """Reports a ValueError as wrong usage, exit code 2."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from None
