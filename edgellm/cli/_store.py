"""Pulled models, and which file a MODEL argument means."""

from __future__ import annotations

import os
from pathlib import Path

import click

from edgellm.cli import _sources
from edgellm.errors import ModelNotFoundError

__all__ = [
    "cache_folder",
    "kv_option",
    "model_argument",
    "names",
    "resolve",
    "store_folder",
    "stored_path",
    "threads_option",
]

SUFFIX = ".edge"

model_argument = click.argument("model", metavar="MODEL")
threads_option = click.option(
    "-t",
    "--threads",
    type=click.IntRange(1),
    help="The default is measured at the first run, for decode and prefill apart.",
)
kv_option = click.option(
    "--kv",
    type=click.Choice(["f16", "int8"]),
    help="Numbers of the KV cache; the default is what the file says (edgellm show).",
)


def store_folder() -> Path:
    """Where pulled models lie: $XDG_DATA_HOME/edgellm/models, or below ~/.local/share."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "edgellm" / "models"


def cache_folder() -> Path:
    """Where measurements of this device lie: $XDG_CACHE_HOME/edgellm, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgellm"


def stored_path(name: str) -> Path:
    """Where the model `name` lies or would lie."""
    return store_folder() / f"{name}{SUFFIX}"


def names() -> list[str]:
    """Names of all pulled models, sorted."""
    return sorted(path.name.removesuffix(SUFFIX) for path in store_folder().glob(f"*{SUFFIX}"))


def resolve(model: str) -> Path:
    """The file that MODEL means: a path, or the name of a pulled model.

    Raises:
        ModelNotFoundError: there is neither; says what to type.
    """
    path = Path(model)
    if path.exists():
        return path
    if model in names():
        return stored_path(model)
    if model in _sources.SOURCES:
        raise ModelNotFoundError(f"{model} has not been pulled yet; run: edgellm pull {model}")
    if os.sep in model or path.suffix:
        raise ModelNotFoundError(f"{model}: no such file")
    known = ", ".join(names()) or "none"
    raise ModelNotFoundError(
        f"{model}: no such file and no pulled model (pulled: {known}; to be had:"
        f" {', '.join(_sources.SOURCES)})"
    )
