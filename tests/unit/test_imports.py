"""`import edgellm` is light, and every name that is offered exists."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("statement", ["import edgellm", "from edgellm import LLM"])
def test_import_loads_no_heavy_package(statement: str, report: Callable[[str], None]) -> None:
    code = (
        f"import sys, time; start = time.perf_counter(); {statement}; "
        "print(1e3 * (time.perf_counter() - start), *sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    milliseconds, *modules = output.split()
    report(f"{statement}: {float(milliseconds):.0f} ms (target 150)")
    assert {name.partition(".")[0] for name in modules} & HEAVY == set()


def module_names() -> list[str]:
    names = []
    for room, package in (("edgellm", ""), ("exporters", "edgellm."), ("devices", "edgellm.")):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(package + ".".join(parts).removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("name", module_names())
def test_every_name_in_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert [entry for entry in names if not hasattr(module, entry)] == []
    assert len(set(names)) == len(names)
