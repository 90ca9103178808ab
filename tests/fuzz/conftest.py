"""Fixtures that hold the two readers against each other."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from edge_files import write_edge

from edgellm.errors import EdgeLLMError
from edgellm.format import EdgeFile

Case = tuple[str, bytes]
Compare = Callable[[Iterable[Case]], dict[str, str]]

_BATCH = 64


@pytest.fixture
def compare(native_tool: Callable[[str], Path], tmp_path: Path) -> Compare:
    """Opens each case with both readers; returns name -> model id, or "" if both refused it."""
    program = native_tool("check_file")

    def in_python(path: Path) -> tuple[str, str]:
        try:
            with EdgeFile.open(path) as file:
                return file.model_id, ""
        except EdgeLLMError as error:
            return "", str(error)

    def run(cases: Iterable[Case]) -> dict[str, str]:
        verdicts: dict[str, str] = {}
        pending = list(cases)
        while pending:
            batch, pending = pending[:_BATCH], pending[_BATCH:]
            paths = [tmp_path / f"{number}.edge" for number in range(len(batch))]
            for path, (_, data) in zip(paths, batch, strict=True):
                path.write_bytes(data)
            done = subprocess.run([program, *paths], capture_output=True, text=True, timeout=60)
            assert done.returncode in (0, 1), done.stderr
            lines = done.stdout.splitlines()
            assert len(lines) == len(batch), "one line each"
            for path, (name, _), line in zip(paths, batch, lines, strict=True):
                model_id, message = in_python(path)
                in_c = line.removeprefix("ok ") if line.startswith("ok ") else ""
                assert in_c == model_id, f"{name}: C says {line!r}, Python {message or 'ok'!r}"
                assert "\n" not in message
                verdicts[name] = model_id
        return verdicts

    return run


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with one WEIGHTS section."""
    path = tmp_path_factory.mktemp("edge") / "small.edge"
    write_edge(path, num_tensors=2)
    return path.read_bytes()


@pytest.fixture(scope="session")
def layered(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with three WEIGHTS sections."""
    path = tmp_path_factory.mktemp("edge") / "layered.edge"
    write_edge(path)
    return path.read_bytes()
