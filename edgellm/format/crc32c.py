"""CRC-32C (Castagnoli) in numpy, fast enough for files of gigabytes.

Source: RFC 3720, appendix B.4 (polynomial, bit order, test values).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["crc32c"]

_POLYNOMIAL = 0x82F63B78  # bit-reversed

# x^5685 = x^1362 + x^426 + 1 modulo the polynomial (a test checks it), and, because squaring is
# linear over GF(2), so for all exponents times 2^k: a word (64 x 5685 bits from where it vanishes)
# may be added to three later words instead. That is XOR of whole arrays, without a table.
_DEGREE = 5685
_NEAR = _DEGREE - 1362
_MIDDLE = _DEGREE - 426
_CHUNK_BYTES = 1 << 20


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        remainder = byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (_POLYNOMIAL if remainder & 1 else 0)
        table.append(remainder)
    return tuple(table)


_TABLE = _make_table()


def crc32c(data: bytes | memoryview | npt.NDArray[Any]) -> int:
    """CRC-32C of `data`.

    Args:
        data: contiguous bytes; an array counts as its bytes.

    Returns:
        The checksum, 0..2^32 - 1.
    """
    source = np.frombuffer(data, np.uint8)
    remainder = 0xFFFFFFFF
    if source.size > _DEGREE:
        source = _fold_all(source)
        remainder = 0
    for byte in source.tobytes():
        remainder = remainder >> 8 ^ _TABLE[(remainder ^ byte) & 0xFF]
    return remainder ^ 0xFFFFFFFF


def _fold_all(source: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Bytes of the same checksum (from remainder 0), at most _DEGREE of them."""
    words_end = source.size // 8 * 8
    carry = np.empty(0, np.uint8)
    for start in range(0, words_end, _CHUNK_BYTES):
        chunk = np.concatenate((carry, source[start : min(start + _CHUNK_BYTES, words_end)]))
        if start == 0:
            chunk[:4] ^= 0xFF
        carry = _fold(chunk.view(np.uint64)).view(np.uint8)
    return _fold(np.concatenate((carry, source[words_end:])))


def _fold(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Adds all but the last _DEGREE values to later ones, in place; returns what is left."""
    end = max(values.size - _DEGREE, 0)
    for start in range(0, end, _NEAR):
        stop = min(start + _NEAR, end)
        head = values[start:stop]
        for distance in (_NEAR, _MIDDLE, _DEGREE):
            values[start + distance : stop + distance] ^= head
    return values[end:]
