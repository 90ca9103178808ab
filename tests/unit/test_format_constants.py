"""Checksums, and the constants that Python and C share."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from edgellm.format import crc32c as crc_module
from edgellm.format import spec
from edgellm.format.crc32c import crc32c
from edgellm.types import TensorFormat

LIMITS = Path(__file__).parents[2] / "native/src/format/limits.h"


def test_c_and_python_have_the_same_limits() -> None:
    text = LIMITS.read_text()
    in_c = {name: int(value) for name, value in re.findall(r"#define ELM_(\w+) (\d+)\n", text)}
    in_c |= {
        f"SectionType.{name}": int(value)
        for name, value in re.findall(r"ELM_SECTION_([A-Z_]+) = (\d+)", text)
    }
    in_python = {
        name: value
        for name, value in vars(spec).items()
        if name.isupper() and isinstance(value, int) and name not in ("MINOR", "TEXT_ALIGN_LOG2")
    }
    in_python |= {f"SectionType.{kind.name}": kind.value for kind in spec.SectionType}
    assert in_c == in_python


def bytewise(data: bytes) -> int:
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def test_crc32c_of_the_published_examples() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.parametrize("size", [1, 7, 5684, 5685, 5686, 45480, 45481, 45487, 45488, 45496, 99999])
def test_crc32c_by_folding_equals_bit_by_bit(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert crc32c(data) == bytewise(data.tobytes())


def test_crc32c_of_chunks_equals_that_of_their_concatenation() -> None:
    """CRC is affine: c(a ^ b ^ zero) = c(a) ^ c(b) ^ c(zero), across the chunks of the fold."""
    size = (5 << 20) // 2 + 3
    a, b = np.random.default_rng(1).integers(0, 256, (2, size), dtype=np.uint8)
    assert crc32c(a ^ b) == crc32c(a) ^ crc32c(b) ^ crc32c(bytes(size))
    assert crc32c(memoryview(a)) == crc32c(a.tobytes())


def test_the_sparse_multiple_of_the_polynomial_is_one() -> None:
    power = 1 << 31  # x^0 in reversed bits
    powers = []
    for _ in range(crc_module._DEGREE + 1):
        powers.append(power)
        power = power >> 1 ^ (0x82F63B78 if power & 1 else 0)
    assert powers[5685] ^ powers[1362] ^ powers[426] ^ powers[0] == 0


@pytest.mark.parametrize(
    ("tensor_format", "rows", "cols", "size"),
    [
        (TensorFormat.F32, 3, 5, 60),
        (TensorFormat.E4, 16, 256, 36 * 64),
        (TensorFormat.E4, 17, 257, 2 * (36 + 8) * 64),
        (TensorFormat.E5, 16, 256, 44 * 64),
        (TensorFormat.E5, 17, 257, 2 * (44 + 9) * 64),
        (TensorFormat.E8, 16, 256, 65 * 64),
        (TensorFormat.E8, 1, 1, 9 * 64),
    ],
)
def test_bytes_of_a_tensor(tensor_format: TensorFormat, rows: int, cols: int, size: int) -> None:
    assert spec.tensor_bytes(tensor_format, rows, cols) == size
