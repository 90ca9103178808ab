"""The rooms of the house: who may import whom, and what only one room may do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("edgellm", "exporters", "devices")

# ARCHITECTURE.md, "Layers". The package's own __init__ shows the engine's names to the user.
LEVELS = {
    "errors": 0,
    "types": 0,
    "format": 1,
    "models": 1,
    "text": 1,
    "_native": 2,
    "devices": 3,
    "exporters": 3,
    "engine": 4,
    "__init__": 5,
    "eval": 6,
    "cli": 7,
    "__main__": 8,
}


def modules() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "edgellm" else parts[0]


def imported_rooms(node: ast.AST) -> Iterator[str]:
    """Names right below `edgellm` that an import statement reaches."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        package, _, rest = name.partition(".")
        if package == "edgellm":
            room = rest.partition(".")[0]
            yield room if room in LEVELS else "__init__"


def in_functions(tree: ast.Module) -> set[ast.AST]:
    """What does not run at import: bodies of functions, and imports for the type checker."""

    def waits(node: ast.AST) -> bool:
        if isinstance(node, ast.If):
            return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)

    return {inner for outer in ast.walk(tree) if waits(outer) for inner in ast.walk(outer)}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_downward(path: Path) -> None:
    room = room_of(path)
    assert room in LEVELS, f"{path.name}: a new room needs a level in ARCHITECTURE.md and here"
    upward = [
        f"line {node.lineno}: {room} imports {other}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for other in imported_rooms(node)
        if LEVELS[other] > LEVELS[room]
    ]
    assert upward == []


def test_only_commands_and_eval_reach_the_exporters_and_only_inside_a_function() -> None:
    found = []
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = in_functions(tree)
        for node in ast.walk(tree):
            if "exporters" not in imported_rooms(node) or room_of(path) == "exporters":
                continue
            if room_of(path) not in ("cli", "eval") or node not in inside:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_ctypes_is_imported_in_native_only() -> None:
    pattern = re.compile(r"^\s*(import|from) (ctypes|cffi)\b", re.MULTILINE)
    users = {room_of(path) for path in modules() if pattern.search(path.read_text("utf-8"))}
    assert users <= {"_native"}


def test_the_environment_is_read_in_cli_only() -> None:
    pattern = re.compile(r"\bos\.(environ|getenv)\b|\bfrom os import .*\b(environ|getenv)\b")
    users = {room_of(path) for path in modules() if pattern.search(path.read_text("utf-8"))}
    assert users <= {"cli"}


def test_kernels_include_neither_runtime_nor_api() -> None:
    pattern = re.compile(r'#include "(?:\.\./)*(?:src/)?(runtime|api)/')
    kernels = (ROOT / "native/src/kernels").rglob("*.[chi]*")
    assert [str(p.relative_to(ROOT)) for p in kernels if pattern.search(p.read_text("utf-8"))] == []


def test_the_c_library_prints_nothing_and_never_leaves_the_process() -> None:
    pattern = re.compile(r"\b(f?printf|puts|exit|abort|_Exit|getenv|assert|perror)\s*\(")
    found = []
    for path in sorted((ROOT / "native/src").rglob("*.[ch]")):
        code = path.read_text("utf-8")
        for left_out in (r"/\*.*?\*/", r"//[^\n]*", r"#if defined\(ELM_CHECKS\).*?#else"):
            code = re.sub(left_out, "", code, flags=re.DOTALL)
        found += [f"{path.relative_to(ROOT)}: {hit.group(1)}" for hit in pattern.finditer(code)]
    assert found == []
