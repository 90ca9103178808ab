"""safetensors files: what is read is right, and a broken file is one line that says so."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_files import safetensors_bytes

from edgellm.errors import EdgeLLMError, FormatError, UnsupportedModelError
from edgellm.exporters.safetensors import SafetensorsFile

HUGE = 2**64 - 1


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    return path


def entry(begin: int, end: int, shape: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_rows_are_read_as_float32(tmp_path: Path, dtype: str) -> None:
    values = np.array([[1.5, -2.0, 0.0], [3.25, 1e-3, 6e4]], np.float32)
    if dtype == "BF16":
        data = (values.view(np.uint32) >> 16).astype("<u2")
        wanted = (data.astype(np.uint32) << 16).view(np.float32)
    else:
        data = values.astype({"F32": "<f4", "F16": "<f2"}[dtype])
        wanted = data.astype(np.float32)
    header = {"w": entry(0, data.nbytes, [2, 3], dtype), "__metadata__": {"format": "pt"}}
    file = SafetensorsFile(write(tmp_path, safetensors_bytes(header, data.tobytes())))
    assert file.shapes == {"w": (2, 3)}
    assert np.array_equal(file.rows("w", 0, 2), wanted)
    assert np.array_equal(file.rows("w", 1, 1), wanted[1:])


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_a_type_that_is_not_read_is_named(tmp_path: Path, dtype: str) -> None:
    size = 8 if dtype == "F64" else 1
    data = safetensors_bytes({"w": entry(0, size, [1], dtype)}, b"\0" * size)
    file = SafetensorsFile(write(tmp_path, data))
    with pytest.raises(UnsupportedModelError, match=f"'w' is of type {dtype}"):
        file.rows("w", 0, 1)


GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 16, [1, 2])}
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a safetensors file"),
    "9 bytes": (b"\2\0\0\0\0\0\0\0{", "not a safetensors file"),
    "another file": (b"\x80\x02ctorch._utils" + b"\0" * 100, "not a safetensors file"),
    "Git-LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
        "git lfs pull",
    ),
    "header of 2^64 - 1": (safetensors_bytes(GOOD, b"\0" * 16, length=HUGE), "header claims"),
    "header of 100 MB": (safetensors_bytes(GOOD, b"\0" * 16, length=10**8 + 1), "header claims"),
    "header past the end": (safetensors_bytes({}, b"", length=3), "header claims"),
    "not JSON": (safetensors_bytes(b"{nonsense}", b""), "not valid JSON"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}', b""), "not valid JSON"),
    "NaN": (safetensors_bytes(b'{"a": NaN}', b""), "not valid JSON"),
    "deep JSON": (safetensors_bytes(b'{"a":' + b"[" * 99_999, b""), "not valid JSON"),
    "key twice": (safetensors_bytes(b'{"a": 1, "a": 1}', b""), "'a' occurs twice"),
    "no description": (safetensors_bytes({"a": 5}, b""), "not described"),
    "a key too many": (safetensors_bytes({"a": {**entry(0, 0, [0]), "x": 1}}, b""), "described"),
    "unknown type": (safetensors_bytes({"a": entry(0, 4, [1], "F4")}, b"\0" * 4), "unknown type"),
    "type is a number": (safetensors_bytes({"a": entry(0, 4, [1], 3)}, b"\0" * 4), "unknown type"),
    "shape is a text": (safetensors_bytes({"a": entry(0, 4, "1")}, b"\0" * 4), "impossible shape"),  # type: ignore[arg-type]
    "shape of true": (safetensors_bytes({"a": entry(0, 4, [True])}, b"\0" * 4), "impossible shape"),
    "shape of -1": (safetensors_bytes({"a": entry(0, 4, [-1])}, b"\0" * 4), "impossible shape"),
    "shape of 1.0": (safetensors_bytes({"a": entry(0, 4, [1.0])}, b"\0" * 4), "impossible shape"),
    "shape of 2^64": (safetensors_bytes({"a": entry(0, 4, [2**64])}, b"\0" * 4), "impossible"),
    "shape of 2^124": (
        safetensors_bytes({"a": entry(0, 4, [2**62, 2**62])}, b"\0" * 4),
        "does not take 4 bytes",
    ),
    "9 dimensions": (safetensors_bytes({"a": entry(0, 4, [1] * 9)}, b"\0" * 4), "impossible"),
    "offsets backwards": (safetensors_bytes({"a": entry(4, 0, [1])}, b"\0" * 4), "offsets"),
    "negative offset": (safetensors_bytes({"a": entry(-4, 0, [1])}, b"\0" * 4), "offsets"),
    "one offset": (
        safetensors_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b""),
        "offsets",
    ),
    "size and shape differ": (safetensors_bytes({"a": entry(0, 8, [3])}, b"\0" * 8), "not take"),
    "hole": (
        safetensors_bytes({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, b"\0" * 20),
        "begins at 12",
    ),
    "overlap": (
        safetensors_bytes({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12),
        "begins at 4",
    ),
    "many on one range": (
        safetensors_bytes({name: entry(0, 8, [2]) for name in "abc"}, b"\0" * 8),
        "begins at 0",
    ),
    "begins late": (safetensors_bytes({"a": entry(4, 8, [1])}, b"\0" * 8), "begins at 4"),
    "data cut short": (safetensors_bytes(GOOD, b"\0" * 15), "truncated"),
    "data too long": (safetensors_bytes(GOOD, b"\0" * 17), "truncated or damaged"),
    "metadata is a list": (safetensors_bytes({"__metadata__": []}, b""), "__metadata__"),
    "metadata of numbers": (safetensors_bytes({"__metadata__": {"a": 1}}, b""), "__metadata__"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line_that_says_what(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    path = write(tmp_path, data)
    with pytest.raises(FormatError, match=message) as caught:
        SafetensorsFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = safetensors_bytes(GOOD, bytes(16))
    for length in range(len(whole)):
        with pytest.raises(FormatError):
            SafetensorsFile(write(tmp_path, whole[:length]))


def test_flipped_bits_never_end_in_another_error(tmp_path: Path) -> None:
    whole = safetensors_bytes(GOOD, bytes(16))
    source = random.Random(2)
    messages: list[str] = []
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data) - 16)] ^= 1 << source.randrange(8)
        try:
            SafetensorsFile(write(tmp_path, bytes(data)))
        except EdgeLLMError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert not any("\n" in message for message in messages)


def test_a_million_keys_with_two_alike_take_no_hour(tmp_path: Path) -> None:
    keys = b",".join(b'"%x":0' % number for number in range(10**6))
    path = write(tmp_path, safetensors_bytes(b"{" + keys + b',"f423f":0}', b""))
    with pytest.raises(FormatError, match="'f423f' occurs twice"):
        SafetensorsFile(path)


def test_the_good_one_is_good(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path, safetensors_bytes(json.dumps(GOOD).encode(), bytes(16))))
    assert file.shapes == {"a": (2,), "b": (1, 2)}
