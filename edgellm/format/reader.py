"""The Python reader of `.edge` files. Distrusts every byte, and maps the file read-only.

`native/src/format/file.c` accepts and refuses the same files; a test compares the two over a corpus
of broken ones.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from edgellm.errors import EdgeLLMError, FormatError, ModelNotFoundError
from edgellm.format import spec
from edgellm.format.crc32c import crc32c
from edgellm.format.foreign import describe_foreign
from edgellm.format.meta import check_meta, check_test_vectors, parse_json
from edgellm.format.spec import Section, SectionType, Tensor
from edgellm.types import TensorFormat, round_up

__all__ = ["EdgeFile"]

_TAG = re.compile(rb"[a-z0-9_.]*")
_TENSOR_NAME = re.compile(rb"[!-~]+")
_TAGGED = (SectionType.CHAT_TEMPLATE, SectionType.WEIGHTS)
_REQUIRED = (
    (SectionType.META, ""),
    (SectionType.TOKENIZER, ""),
    (SectionType.TEST_VECTORS, ""),
    (SectionType.TENSOR_INDEX, ""),
    (SectionType.WEIGHTS, "globals"),
)


class EdgeFile:
    """An open `.edge` file, checked. Arrays it hands out stay valid after `close`.

    Attributes:
        path: where it lies.
        model_id: SHA-256 of the section table, 64 hexadecimal digits.
        sections: the section table.
        tensors: the tensor index, by name, in rising order.
        meta: META, checked.
    """

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        """Checks `data`, the bytes of the file; `open` is the way to get here."""
        self.path = path
        self._data = data
        self.model_id, num_sections = self._read_superblock()
        self.sections = self._read_table(num_sections)
        self._check_gaps()
        for section in self.sections:
            if (
                section.type in SectionType.__members__.values()
                and section.type != SectionType.WEIGHTS
            ):
                self._check_crc(section)
        self.meta: dict[str, Any] = parse_json(
            self.section_bytes(SectionType.META), f"{path}: section META"
        )
        check_meta(self.meta, f"{path}: section META")
        self.tensors = self._read_index()

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> Self:
        """Maps and checks a file.

        Args:
            path: the file.
            verify: also check every CRC, hash and padding byte of the weights (reads the file).

        Raises:
            ModelNotFoundError: there is no such file.
            FormatError: it is not a valid `.edge` file; the message says what it is, if known.
            EdgeLLMError: the operating system cannot read it.
        """
        path = Path(path)
        try:
            if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):
                raise FormatError(f"{path}: not a regular file; name a .edge file")
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(64)
                if not head.startswith(spec.MAGIC):
                    raise FormatError(f"{path}: {describe_foreign(path, head, size)}")
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    mapped.madvise(mmap.MADV_HUGEPAGE)  # as elm_map_open: whoever reads first
        except FileNotFoundError:
            raise ModelNotFoundError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise FormatError(
                f"{path}: a folder, not a .edge file; for a Hugging Face folder run: "
                f"edgellm export {path} -o {path.name}.edge"
            ) from None
        except OSError as error:
            raise EdgeLLMError(f"{path}: cannot read: {error.strerror}") from error
        edge_file = cls(path, np.frombuffer(mapped, np.uint8))
        if verify:
            edge_file.verify()
        if hasattr(mmap, "MADV_DONTNEED"):
            # What the checks touched would count twice once the C library maps the file too; it
            # stays in the page cache.
            mapped.madvise(mmap.MADV_DONTNEED)
        return edge_file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the map; it goes when the last array handed out goes."""
        self._data = np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._data.size

    def section(self, section_type: SectionType, tag: str = "") -> Section | None:
        """The section of that type and tag, or None."""
        for section in self.sections:
            if section.type == section_type and section.tag == tag:
                return section
        return None

    def section_bytes(self, section_type: SectionType, tag: str = "") -> bytes:
        """A copy of a section's content, which must be there.

        Raises:
            FormatError: the file has no such section.
        """
        section = self.section(section_type, tag)
        if section is None:
            self._fail(f"{section_type.name} {tag}".rstrip(), "missing")
        return self._slice(section).tobytes()

    def tensor_data(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, (size,) uint8, read-only, in the map.

        Raises:
            FormatError: the file has no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{self.path}: there is no tensor {name}; export the model again")
        start = self.sections[tensor.section].offset + tensor.offset
        return self._data[start : start + tensor.size]

    @cached_property
    def tokenizer_json(self) -> str:
        """`tokenizer.json`, verbatim."""
        return self._text(SectionType.TOKENIZER, "")

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """Jinja sources by name; the usual one is `default`."""
        return {
            section.tag: self._text(SectionType.CHAT_TEMPLATE, section.tag)
            for section in self.sections
            if section.type == SectionType.CHAT_TEMPLATE
        }

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or an empty dict if there was none."""
        if self.section(SectionType.GENERATION_CONFIG) is None:
            return {}
        try:
            value = json.loads(self._text(SectionType.GENERATION_CONFIG, ""))
        except (ValueError, RecursionError):
            self._fail("GENERATION_CONFIG", "broken JSON")
        if not isinstance(value, dict):
            self._fail("GENERATION_CONFIG", "not a JSON object")
        return value

    @cached_property
    def test_vectors(self) -> dict[str, Any]:
        """TEST_VECTORS, checked."""
        where = f"{self.path}: section TEST_VECTORS"
        value: dict[str, Any] = parse_json(self.section_bytes(SectionType.TEST_VECTORS), where)
        check_test_vectors(value, self.meta["model"]["num_tokens"], where)
        return value

    def verify(self) -> None:
        """Checks CRC-32C and SHA-256 of every section, and the padding between tensors.

        Raises:
            FormatError: it names the first section that is damaged.
        """
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(self._verify_section, self.sections):
                pass
        by_section: dict[int, list[Tensor]] = {}
        for tensor in self.tensors.values():
            by_section.setdefault(tensor.section, []).append(tensor)
        for number, tensors in by_section.items():
            section = self.sections[number]
            end = 0
            for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
                if self._data[section.offset + end : section.offset + tensor.offset].any():
                    self._fail(section.label, f"bytes before tensor {tensor.name} are not zero")
                end = tensor.offset + tensor.size

    def _verify_section(self, section: Section) -> None:
        self._check_crc(section)
        if hashlib.sha256(self._slice(section).data).digest() != section.sha256:
            self._fail(section.label, "SHA-256 differs: the content is damaged")

    def _check_crc(self, section: Section) -> None:
        if crc32c(self._slice(section)) != section.crc32c:
            self._fail(section.label, "CRC differs: the content is damaged")

    def _slice(self, section: Section) -> npt.NDArray[np.uint8]:
        return self._data[section.offset : section.offset + section.size]

    def _text(self, section_type: SectionType, tag: str) -> str:
        try:
            return self.section_bytes(section_type, tag).decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"{section_type.name} {tag}".rstrip(), f"not UTF-8 at byte {error.start}")

    def _fail(self, section: str, what: str) -> NoReturn:
        raise FormatError(
            f"{self.path}: section {section}: {what}; copy, download or export the file again"
        )

    def _read_superblock(self) -> tuple[str, int]:
        """Checks the superblock and the table's hash; returns model id and number of sections."""
        data = self._data
        block = data[: spec.SUPERBLOCK_BYTES].tobytes()
        if len(block) < spec.SUPERBLOCK_BYTES:
            self._fail("superblock", f"truncated: {len(block)} bytes, not {spec.SUPERBLOCK_BYTES}")
        (_, major, _, block_size, file_size, incompatible, _, table, count, entry, zero, digest) = (
            spec.SUPERBLOCK.unpack_from(block)
        )
        head = spec.SUPERBLOCK.size
        if major != spec.MAJOR:
            self._fail("superblock", f"format {major}, and this edgellm reads {spec.MAJOR}")
        if crc32c(block[:head]) != int.from_bytes(block[head : head + 4], "little"):
            self._fail("superblock", "CRC differs: the file is damaged")
        if file_size != data.size:
            self._fail("superblock", f"the file has {data.size} bytes, not {file_size}")
        unknown = incompatible & ~spec.KNOWN_INCOMPATIBLE
        if unknown:
            bit = (unknown & -unknown).bit_length() - 1
            self._fail("superblock", f"needs feature {bit}, unknown here: update edgellm")
        if (block_size, table, entry, zero) != (
            spec.SUPERBLOCK_BYTES,
            spec.SUPERBLOCK_BYTES,
            spec.SECTION_ENTRY_BYTES,
            0,
        ) or any(block[head + 4 :]):
            self._fail("superblock", "a fixed field has another value")
        table_end = spec.SUPERBLOCK_BYTES + count * spec.SECTION_ENTRY_BYTES
        if not 1 <= count <= spec.MAX_SECTIONS or table_end > data.size:
            self._fail("superblock", f"{count} sections do not fit")
        if hashlib.sha256(data[spec.SUPERBLOCK_BYTES : table_end].tobytes()).digest() != digest:
            self._fail("table", "SHA-256 differs: the file is damaged")
        return digest.hex(), count

    def _read_table(self, count: int) -> tuple[Section, ...]:
        start = spec.SUPERBLOCK_BYTES
        end = start + count * spec.SECTION_ENTRY_BYTES
        table = self._data[start:end].tobytes()
        sections: list[Section] = []
        seen: set[tuple[int, str]] = set()
        for fields in spec.SECTION_ENTRY.iter_unpack(table):
            section = self._read_section(len(sections), fields)
            if (section.type, section.tag) in seen:
                self._fail(section.label, "there twice")
            alignment = 1 << section.align_log2
            if section.offset < end or section.offset - end >= alignment:
                self._fail(section.label, "overlaps or leaves a gap")
            seen.add((section.type, section.tag))
            sections.append(section)
            end = section.offset + section.size
        if end != self._data.size:
            self._fail(sections[-1].label, "does not end with the file")
        for required, tag in _REQUIRED:
            if (required, tag) not in seen:
                self._fail(f"{required.name} {tag}".rstrip(), "missing")
        return tuple(sections)

    def _read_section(self, number: int, fields: tuple[Any, ...]) -> Section:
        kind, flags, offset, size, align_log2, crc, digest, raw_tag, zero = fields
        tag = raw_tag.rstrip(b"\0")
        if not _TAG.fullmatch(tag) or any(zero):
            self._fail(f"number {number}", "the tag is not a name or padding is not zero")
        section = Section(
            type=kind,
            tag=tag.decode("ascii"),
            offset=offset,
            size=size,
            align_log2=align_log2,
            crc32c=crc,
            sha256=digest,
            flags=flags,
        )
        if flags & ~spec.FLAG_MUST_UNDERSTAND or (flags and not section.is_known):
            self._fail(section.label, "must be understood and is not: update edgellm")
        if section.is_known and bool(tag) != (kind in _TAGGED):
            self._fail(section.label, "has a tag or lacks one")
        if not spec.MIN_ALIGN_LOG2 <= align_log2 <= spec.MAX_ALIGN_LOG2 or (
            kind == SectionType.WEIGHTS and align_log2 != spec.WEIGHTS_ALIGN_LOG2
        ):
            self._fail(section.label, f"alignment 2^{align_log2} is not allowed")
        if offset % (1 << align_log2):
            self._fail(section.label, "is not aligned")
        limit = spec.SECTION_LIMITS.get(kind, spec.MAX_WEIGHTS_BYTES)
        if not 1 <= size <= limit or offset + size > self._data.size:
            self._fail(section.label, f"{size} bytes at {offset} are too many or none")
        return section

    def _check_gaps(self) -> None:
        end = spec.SUPERBLOCK_BYTES + len(self.sections) * spec.SECTION_ENTRY_BYTES
        for section in self.sections:
            if self._data[end : section.offset].any():
                self._fail(section.label, "bytes before it are not zero")
            end = section.offset + section.size

    def _read_index(self) -> dict[str, Tensor]:
        data = self.section_bytes(SectionType.TENSOR_INDEX)
        if len(data) % spec.TENSOR_ENTRY_BYTES:
            self._fail("TENSOR_INDEX", f"{len(data)} bytes are not a number of entries")
        tensors: dict[str, Tensor] = {}
        before = b""
        for fields in spec.TENSOR_ENTRY.iter_unpack(data):
            name = fields[0].rstrip(b"\0")
            if name <= before or not _TENSOR_NAME.fullmatch(name):
                self._fail("TENSOR_INDEX", f"name {name!r} is not one, out of order or repeated")
            before = name
            tensor = self._read_tensor(name.decode("ascii"), fields)
            tensors[tensor.name] = tensor
        self._check_tiling(tensors.values())
        return tensors

    def _read_tensor(self, name: str, fields: tuple[Any, ...]) -> Tensor:
        _, tensor_format, number, rows, cols, offset, size, zero = fields
        if tensor_format not in TensorFormat.__members__.values():
            self._fail("TENSOR_INDEX", f"tensor {name} has unknown format {tensor_format}")
        if number >= len(self.sections) or self.sections[number].type != SectionType.WEIGHTS:
            self._fail("TENSOR_INDEX", f"tensor {name} is in section {number}, not of weights")
        if not (1 <= rows <= spec.MAX_DIM and 1 <= cols <= spec.MAX_DIM) or any(zero):
            self._fail("TENSOR_INDEX", f"tensor {name} has shape ({rows}, {cols}) or stray bytes")
        tensor = Tensor(
            name=name,
            format=TensorFormat(tensor_format),
            section=number,
            rows=rows,
            cols=cols,
            offset=offset,
            size=size,
        )
        if size != spec.tensor_bytes(tensor.format, rows, cols):
            self._fail("TENSOR_INDEX", f"tensor {name} has {size} bytes, its shape asks for others")
        return tensor

    def _check_tiling(self, tensors: Iterable[Tensor]) -> None:
        """Tensors of a section follow one another on the next 4 KiB and fill it."""
        ends = {
            number: 0
            for number, section in enumerate(self.sections)
            if section.type == SectionType.WEIGHTS
        }
        for tensor in sorted(tensors, key=lambda tensor: (tensor.section, tensor.offset)):
            if tensor.offset != round_up(ends[tensor.section], spec.TENSOR_ALIGN):
                self._fail("TENSOR_INDEX", f"tensor {tensor.name} overlaps or leaves a gap")
            ends[tensor.section] = tensor.offset + tensor.size
        for number, end in ends.items():
            section = self.sections[number]
            if end != section.size:
                self._fail(section.label, f"has {section.size} bytes, its tensors {end}")
