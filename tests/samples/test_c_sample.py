"""The C sample builds against the public header alone and generates what the Python API does."""

from __future__ import annotations

import importlib.resources
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
PROMPT = [5, 40, 90, 7]


@pytest.fixture(scope="module")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = Path(str(importlib.resources.files("edgellm") / "_native" / "libedgellm.so"))
    program = tmp_path_factory.mktemp("sample") / "generate"
    command = [
        *(compiler, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"),
        *("-I", str(ROOT / "native/include"), str(ROOT / "samples/c/generate.c")),
        *(str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)),
    ]
    build = subprocess.run(command, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    return program


def test_ids_in_ids_out(generate: Path, tiny_edge_of: Callable[[str], Path]) -> None:
    path = tiny_edge_of("llama")
    with LLM(path) as llm:
        expected = llm.generate(PROMPT, SamplingParams(temperature=0), max_tokens=12).ids
    ids = ",".join(map(str, PROMPT))
    run = subprocess.run([generate, path, str(len(expected)), ids], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ",".join(map(str, expected)) + "\n"


def test_a_missing_file_is_one_line(generate: Path, tmp_path: Path) -> None:
    run = subprocess.run([generate, tmp_path / "no.edge", "1", "1"], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("generate: ")
    assert run.stderr.count("\n") == 1
