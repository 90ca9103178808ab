"""The ctypes structs are those of the C library, to the byte."""

from __future__ import annotations

import re
from ctypes import (
    c_char_p,
    c_double,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path

import pytest

from edgellm._native import abi, library
from edgellm.errors import NativeError

HEADER = Path(__file__).parents[2] / "native/include/edgellm/edgellm.h"


def test_every_struct_has_the_layout_of_the_library() -> None:
    theirs = library.layouts()
    ours = [abi.layout(name, struct) for name, struct in abi.STRUCTS.items()]
    assert sorted(ours) == sorted(theirs)


SCALARS = {
    "int32_t": c_int32,
    "elm_status": c_int32,
    "elm_format": c_int32,
    "uint32_t": c_uint32,
    "uint64_t": c_uint64,
    "size_t": c_size_t,
}


def matches(declared: type | None, c_type: str) -> bool:
    """Whether a ctypes type stands for a C type; data and handles may be void pointers."""
    if c_type == "void":
        return declared is None
    if not c_type.endswith("*"):
        return declared is SCALARS[c_type]
    base = c_type[:-1].strip()
    if base == "char":
        return declared is c_char_p
    if declared is c_void_p:
        return base not in abi.STRUCTS
    pointee = getattr(declared, "_type_", None)
    if base.endswith("*"):
        return pointee is c_void_p
    known = abi.STRUCTS.get(base) or {"double": c_double, **SCALARS}[base]
    return pointee is known


def test_every_function_of_the_header_has_its_prototype_and_no_other() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"ELM_API ([\w ]+\**)\s+(elm_\w+)\(([^)]*)\)", text)
    assert {name for _, name, _ in found} == set(abi.PROTOTYPES)
    for result, name, arguments in found:
        c_types = [re.sub(r"\w+$", "", part).strip() for part in arguments.split(",")]
        wanted = [t.removeprefix("const ").strip() for t in [result, *filter(None, c_types)]]
        declared = [abi.PROTOTYPES[name][0], *abi.PROTOTYPES[name][1]]
        assert len(declared) == len(wanted), name
        for position, (ours, theirs) in enumerate(zip(declared, wanted, strict=True)):
            assert matches(ours, theirs), f"{name}, argument {position}: {ours} is not {theirs}"


def test_status_codes_and_version_are_those_of_the_header() -> None:
    text = HEADER.read_text(encoding="utf-8")
    for name, value in re.findall(r"ELM_(STATUS_\w+) = (\d+)", text):
        assert getattr(abi, name) == int(value)
    assert re.search(rf"#define ELM_ABI_VERSION {abi.ABI_VERSION}\b", text)


def test_a_missing_library_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="reinstall"):
        library.open_library(tmp_path / "libedgellm.so")


def test_another_abi_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(library.load()._name)
    monkeypatch.setattr(abi, "ABI_VERSION", abi.ABI_VERSION + 1)
    with pytest.raises(NativeError, match="ABI version"):
        library.open_library(path)
