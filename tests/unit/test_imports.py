"""`import edgellm` is light, and every name that is offered exists."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

import edgellm

HEAVY = {
    "torch",
    "transformers",
    "onnx",
    "onnxruntime",
    "llvmlite",
    "jinja2",
    "gguf",
    "safetensors",
}


def modules_after(statement: str) -> set[str]:
    """Top-level packages loaded in a fresh interpreter after `statement`."""
    code = f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    return {name.partition(".")[0] for name in json.loads(output)}


@pytest.mark.parametrize("statement", ["import edgellm", "import edgellm.cli"])
def test_import_loads_no_heavy_package(statement: str) -> None:
    assert modules_after(statement) & HEAVY == set()


def test_import_time_is_reported(report: Callable[[str], None]) -> None:
    def seconds(code: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    import_ms = 1e3 * (seconds("import edgellm") - seconds(""))
    report(f"import edgellm: {import_ms:.0f} ms (target 150)")
    assert import_ms > 0


def public_modules() -> list[str]:
    found = ["edgellm"]
    for info in pkgutil.walk_packages(edgellm.__path__, "edgellm."):
        if not info.name.endswith("__main__"):
            found.append(info.name)
    return found


@pytest.mark.parametrize("name", public_modules())
def test_every_name_in_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert [entry for entry in names if not hasattr(module, entry)] == []
    assert len(set(names)) == len(names)
