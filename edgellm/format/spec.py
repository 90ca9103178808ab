"""Constants and records of the `.edge` file; ARCHITECTURE.md has the layout in words.

The C reader has the same limits in `native/src/format/limits.h`; a test compares the two.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from edgellm.types import TensorFormat, round_up

MAGIC = b"\x89EDGE\r\n\x1a"
MAJOR = 1
MINOR = 0
SUPERBLOCK_BYTES = 4096
SECTION_ENTRY_BYTES = 128
TENSOR_ENTRY_BYTES = 128
KNOWN_INCOMPATIBLE = 0

MAX_SECTIONS = 1024
MAX_TENSORS = 65_536
MAX_LAYERS = 512
MAX_DIM = 2**31 - 1
MAX_META_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 64 << 20
MAX_CHAT_TEMPLATE_BYTES = 256 << 10
MAX_GENERATION_CONFIG_BYTES = 64 << 10
MAX_TEST_VECTORS_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 1 << 42

TENSOR_ALIGN = 4096
WEIGHTS_ALIGN_LOG2 = 16
TEXT_ALIGN_LOG2 = 3

PANEL_ROWS = 16
SUPERBLOCK_COLS = 256
GROUP_COLS = 32
LINE_BYTES = 64


class SectionType(enum.IntEnum):
    """What a section holds."""

    META = 1
    TOKENIZER = 2
    CHAT_TEMPLATE = 3
    GENERATION_CONFIG = 4
    TEST_VECTORS = 5
    TENSOR_INDEX = 6
    WEIGHTS = 7


FLAG_MUST_UNDERSTAND = 1

# magic, major, minor, superblock size, file size, incompat, compat, table offset, number of
# sections, entry size, zero, model id; CRC-32C of these 0x60 bytes follows
SUPERBLOCK = struct.Struct("<8sHHIQQQQIIQ32s")
# type, flags, offset, size, align_log2, crc32c, sha256, tag, zero
SECTION_ENTRY = struct.Struct("<IIQQII32s32s32s")
# name, format, section, rows, cols, offset, size, zero
TENSOR_ENTRY = struct.Struct("<64sIIQQQQ24s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One entry of the section table."""

    type: int
    tag: str
    offset: int
    size: int
    align_log2: int
    crc32c: int
    sha256: bytes
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One entry of the tensor index; `offset` counts from the start of its section."""

    name: str
    format: TensorFormat
    section: int
    rows: int
    cols: int
    offset: int
    size: int


def tensor_bytes(tensor_format: TensorFormat, rows: int, cols: int) -> int:
    """Bytes of a (rows, cols) tensor in `tensor_format`."""
    if tensor_format == TensorFormat.F32:
        return rows * cols * 4
    num_panels = -(-rows // PANEL_ROWS)
    padded = round_up(cols, GROUP_COLS)
    num_superblocks = -(-padded // SUPERBLOCK_COLS)
    if tensor_format == TensorFormat.E4:
        panel = padded // 8 * LINE_BYTES + num_superblocks * 4 * LINE_BYTES
    else:
        panel = padded // 4 * LINE_BYTES + num_superblocks * LINE_BYTES
    return num_panels * panel
