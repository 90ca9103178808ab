"""The shape of the tree: sizes, names, and what must not be committed."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Lines a file may have, by where it lies and how its name ends; the first pattern that fits counts.
LINE_LIMITS = (
    ("native/include/**/*.h", 400),
    ("native/src/kernels/**/*.[ch]", 400),
    ("native/**/*.[ch]", 500),
    ("edgellm/models/[a-z]*.py", 150),
    ("tests/**/*.py", 500),
    ("**/*.py", 400),
)
FUNCTION_LINES = 80
FILE_BYTES = 200_000

# A longer file or function, and why it is better whole.
LIFTED: dict[str, str] = {
    "native/tests/kernels_test.c": "the checks of all ops share their inputs and comparison",
}

KERNELS = ROOT / "native/src/kernels"
# <op>_<type>[_<type>]__<isa>: the types of activation and weight.
KERNEL_NAME = re.compile(r"[a-z]+(_[a-z]+)*(_(f32|f16|q8|e4|e5|e8)){1,2}__[a-z0-9_]+")


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        return sorted(path for path in ROOT.rglob("*") if path.is_file())
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return sorted(path for path in paths if path.is_file())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_files() -> list[Path]:
    suffixes = {".py", ".c", ".h", ".inl", ".inc", ".md", ".toml", ".txt", ".cmake", ".yaml", ""}
    return [path for path in tracked_files() if path.suffix in suffixes]


def fits(name: str, pattern: str) -> bool:
    expression = re.escape(pattern)
    for glob, regex in ((r"\*\*/", "(.*/)?"), (r"\*", "[^/]*"), (r"\[", "["), (r"\]", "]")):
        expression = expression.replace(glob, regex)
    return re.fullmatch(expression.replace(r"\-", "-"), name) is not None


def test_no_file_outgrows_its_limit() -> None:
    found = []
    for path in tracked_files():
        name = name_of(path)
        limit = next((lines for pattern, lines in LINE_LIMITS if fits(name, pattern)), None)
        if limit is None or name in LIFTED:
            continue
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            found.append(f"{name}: {lines} lines, limit {limit}")
    assert found == []


def test_no_line_of_c_is_longer_than_100_columns() -> None:
    found = []
    for path in tracked_files():
        if path.suffix in {".c", ".h", ".inl", ".inc"}:
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{name_of(path)}:{i}" for i, line in enumerate(lines, 1) if len(line) > 100]
    assert found == []


def test_no_python_function_outgrows_its_limit() -> None:
    found = []
    for path in tracked_files():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            name = f"{name_of(path)}:{node.name}"
            if lines > FUNCTION_LINES and name not in LIFTED:
                found.append(f"{name}: {lines} lines, limit {FUNCTION_LINES}")
    assert found == []


def test_a_lifted_limit_still_has_its_reason() -> None:
    names = {name_of(path) for path in tracked_files()}
    assert [entry for entry in LIFTED if entry.partition(":")[0] not in names] == []
    assert all(len(reason) > 10 for reason in LIFTED.values())


def test_no_committed_file_is_large() -> None:
    sizes = {name_of(path): path.stat().st_size for path in tracked_files()}
    assert {name: size for name, size in sizes.items() if size > FILE_BYTES} == {}


def test_no_path_of_one_machine_is_committed() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home/[a-z]\w*|Users/\w+)/[\w.]")
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert found == []


def kernel_files() -> list[Path]:
    return sorted(KERNELS.rglob("*__*.c"))


def kernel_rows() -> list[tuple[str, str]]:
    """(op, isa) of every row of the table, in order."""
    table = (KERNELS / "kernels.inc").read_text(encoding="utf-8")
    return re.findall(r"^ELM_KERNEL\((\w+), (\w+), \w+\)", table, re.MULTILINE)


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.stem)
def test_a_kernel_file_is_named_by_the_grammar_and_has_its_row(path: Path) -> None:
    flags = (ROOT / "native/cmake/elm_isa.cmake").read_text(encoding="utf-8")
    op, _, isa = path.stem.partition("__")
    assert KERNEL_NAME.fullmatch(path.stem), "a kernel file is <op>_<types>__<isa>.c"
    assert path.parent.name == op, "a kernel lies in the folder of its op"
    assert re.search(rf"\bELM_ISA_FLAGS_{isa}\b", flags), f"elm_isa.cmake has no flags for {isa}"
    assert (op, isa) in kernel_rows(), f"kernels.inc has no row for {path.name}"


def test_every_kernel_row_has_its_file_and_every_op_ends_with_ref() -> None:
    rows = kernel_rows()
    stems = {path.stem for path in kernel_files()}
    assert [f"{op}__{isa}" for op, isa in rows if f"{op}__{isa}" not in stems] == []
    assert len(set(rows)) == len(rows)
    assert {op: isa for op, isa in rows} == {op: "ref" for op, _ in rows}


def test_the_papers_of_the_house_are_there() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    architecture = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert "## Details that caused bugs" in architecture
    header = (ROOT / "native/include/edgellm/edgellm.h").read_text("utf-8")
    assert f'elm_version(void); /* "{version}" */' in header


def test_every_make_target_named_in_the_documents_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", (ROOT / document).read_text("utf-8")))
        assert named - targets == set(), document
    helped = set(re.findall(r"^([a-z][a-z0-9-]*):.*?## ", makefile, re.MULTILINE))
    assert {"demo", "test", "lint", "format", "models-check", "fuzz", "bench", "clean"} <= helped
