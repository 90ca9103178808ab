"""Constants and records of the `.edge` file; ARCHITECTURE.md has the layout in words.

The C reader has the same limits in `native/src/format/limits.h`; a test compares the two.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from edgellm.format.crc32c import crc32c
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
MAX_DIM = 2**31 - 1
MAX_META_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 64 << 20
MAX_CHAT_TEMPLATE_BYTES = 256 << 10
MAX_GENERATION_CONFIG_BYTES = 64 << 10
MAX_TEST_VECTORS_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 1 << 42

MAX_JSON_DEPTH = 32
MAX_JSON_DIGITS = 17

MAX_LAYERS = 512
MAX_HIDDEN_SIZE = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_FFN_SIZE = 1 << 22
MAX_VOCAB_SIZE = 1 << 24
MAX_CONTEXT = 1 << 24
MAX_ROPES = 16
HEAD_DIM_MULTIPLE = 16
MAX_ARCHITECTURE_BYTES = 31

TENSOR_ALIGN = 4096
MIN_ALIGN_LOG2 = 3
MAX_ALIGN_LOG2 = 16
WEIGHTS_ALIGN_LOG2 = 16
TEXT_ALIGN_LOG2 = 3

PANEL_ROWS = 16
SUPERBLOCK_COLS = 256
GROUP_COLS = 32
LINE_BYTES = 64
# lines of 64 bytes: of the codes of a group, one for each bit of a code; of the scales of a tile
GROUP_LINES = {TensorFormat.E4: 4, TensorFormat.E5: 5, TensorFormat.E8: 8}
SCALE_LINES = {TensorFormat.E4: 4, TensorFormat.E5: 4, TensorFormat.E8: 1}


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

# bytes a section of this type may have; a type that is not here may have MAX_WEIGHTS_BYTES
SECTION_LIMITS = {
    SectionType.META: MAX_META_BYTES,
    SectionType.TOKENIZER: MAX_TOKENIZER_BYTES,
    SectionType.CHAT_TEMPLATE: MAX_CHAT_TEMPLATE_BYTES,
    SectionType.GENERATION_CONFIG: MAX_GENERATION_CONFIG_BYTES,
    SectionType.TEST_VECTORS: MAX_TEST_VECTORS_BYTES,
    SectionType.TENSOR_INDEX: MAX_TENSORS * TENSOR_ENTRY_BYTES,
    SectionType.WEIGHTS: MAX_WEIGHTS_BYTES,
}

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

    @property
    def is_known(self) -> bool:
        """Whether this edgellm knows its type."""
        return self.type in SectionType.__members__.values()

    @property
    def label(self) -> str:
        """How messages name it: `META`, `WEIGHTS layers.3`, `type 99`."""
        name = SectionType(self.type).name if self.is_known else f"type {self.type}"
        return f"{name} {self.tag}".rstrip()

    def pack(self) -> bytes:
        """Its 128 bytes."""
        return SECTION_ENTRY.pack(
            self.type,
            self.flags,
            self.offset,
            self.size,
            self.align_log2,
            self.crc32c,
            self.sha256,
            self.tag.encode(),
            b"",
        )


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

    def pack(self) -> bytes:
        """Its 128 bytes."""
        return TENSOR_ENTRY.pack(
            self.name.encode(),
            self.format,
            self.section,
            self.rows,
            self.cols,
            self.offset,
            self.size,
            b"",
        )


def pack_superblock(file_size: int, table_bytes: int, model_id: bytes) -> bytes:
    """The part of the superblock that is not zero."""
    head = SUPERBLOCK.pack(
        MAGIC,
        MAJOR,
        MINOR,
        SUPERBLOCK_BYTES,
        file_size,
        0,
        0,
        SUPERBLOCK_BYTES,
        table_bytes // SECTION_ENTRY_BYTES,
        SECTION_ENTRY_BYTES,
        0,
        model_id,
    )
    return head + crc32c(head).to_bytes(4, "little")


def tensor_bytes(tensor_format: TensorFormat, rows: int, cols: int) -> int:
    """Bytes of a (rows, cols) tensor in `tensor_format`."""
    if tensor_format == TensorFormat.F32:
        return rows * cols * 4
    num_panels = -(-rows // PANEL_ROWS)
    padded = round_up(cols, GROUP_COLS)
    num_superblocks = -(-padded // SUPERBLOCK_COLS)
    lines = padded // GROUP_COLS * GROUP_LINES[tensor_format]
    lines += num_superblocks * SCALE_LINES[tensor_format]
    return num_panels * lines * LINE_BYTES
