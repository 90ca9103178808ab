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
LIFTED: dict[str, str] = {}

ISAS = "ref|avx2|avx512vnni|amx|neon|neon_dotprod|neon_i8mm"
TYPES = "f32|f16|i32|q8|e4|e8"
KERNEL_FILE = re.compile(rf"[a-z0-9]+(_[a-z0-9]+)*__({ISAS})\.c")
KERNEL_NAME = re.compile(rf"elm_[a-z0-9]+(_[a-z0-9]+)*__({ISAS})")


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
    return sorted((ROOT / "native/src/kernels").rglob("*__*.c"))


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.name)
def test_a_kernel_file_has_a_name_of_the_grammar_and_defines_it(path: Path) -> None:
    assert KERNEL_FILE.fullmatch(path.name), f"{path.name} is not <op>[_<act>_<wgt>]__<isa>.c"
    source = path.read_text(encoding="utf-8")
    assert f"elm_{path.stem}" in source


def test_every_kernel_row_parses_and_has_its_file() -> None:
    stems = {path.stem for path in kernel_files()}
    rows: dict[str, list[str]] = {}
    for table in sorted((ROOT / "native/src/kernels").rglob("kernels.inc")):
        code = re.sub(r"/\*.*?\*/", "", table.read_text(encoding="utf-8"), flags=re.DOTALL)
        rows[name_of(table)] = re.findall(r"\b(elm_[a-z0-9_]+__[a-z0-9_]+)\b", code)
    for table_name, names in rows.items():
        assert names, f"{table_name} has no rows"
        assert names[-1].endswith("__ref"), f"{table_name}: the ref row comes last"
        for name in names:
            assert KERNEL_NAME.fullmatch(name), f"{table_name}: {name} is not of the grammar"
            assert name.removeprefix("elm_") in stems, f"{table_name}: {name} has no file"


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
