"""The one writer of `.edge` files.

The file is complete under its name or it is not there: everything is written to a temporary beside
the target, which is renamed over it at the very end. WEIGHTS sections come first and text sections
behind them, so that what is only known once the weights are written (test vectors, the quantiser's
report in META) can still be added.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgellm.errors import EdgeLLMError, FormatError
from edgellm.format import spec
from edgellm.format.crc32c import crc32c
from edgellm.format.meta import check_meta, check_test_vectors, parse_json
from edgellm.format.spec import Section, SectionType, Tensor
from edgellm.format.temporary import (
    create_temporary,
    remove_stale,
    reserve,
    sync_folder,
    write_at,
)
from edgellm.types import TensorFormat, round_up

__all__ = ["EdgeWriter"]

_TAG = re.compile(r"[a-z0-9_.]{1,32}")
_TENSOR_NAME = re.compile(r"[!-~]{1,64}")
_WEIGHTS_ALIGN = 1 << spec.WEIGHTS_ALIGN_LOG2
_TEXT_ALIGN = 1 << spec.TEXT_ALIGN_LOG2


class EdgeWriter:
    """Writes one `.edge` file, streaming.

    Declare all tensors, `allocate`, write every tensor's bytes from any number of threads, add the
    text sections at any time, `finish`; `complete` makes a whole file to try out before that.
    Leaving the `with` block without `finish` removes the temporary and leaves an older file of that
    name as it was. The bytes depend on what was declared and written only, not on the order of
    writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Prepares to write `path`; nothing is touched before `allocate`."""
        self.path = Path(os.path.realpath(path))
        self._weights: dict[str, list[Tensor]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._written: dict[str, int] = {}
        self._texts: dict[tuple[SectionType, str], bytes] = {}
        self._lock = threading.Lock()
        self._file = -1
        self._temporary: Path | None = None
        self._starts: list[int] = []
        self._weight_digests: dict[str, tuple[int, bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._discard()

    def add_tensor(
        self, name: str, tensor_format: TensorFormat, rows: int, cols: int, *, section: str
    ) -> None:
        """Declares a tensor; tensors of a section lie in the order in which they are declared.

        Args:
            name: printable ASCII without spaces, at most 64 bytes, unique.
            tensor_format: how its numbers are stored.
            rows: rows, 1..2^31 - 1.
            cols: columns, 1..2^31 - 1.
            section: tag of its WEIGHTS section: `globals`, `layers.0`...

        Raises:
            ValueError: one of these is not so, or `allocate` was already called.
        """
        if self._file >= 0:
            raise ValueError(f"tensor {name}: declare it before allocate()")
        if name in self._tensors or not _TENSOR_NAME.fullmatch(name):
            raise ValueError(f"tensor {name!r}: the name is taken or not a name")
        if not _TAG.fullmatch(section):
            raise ValueError(f"tensor {name}: section {section!r} is not a tag")
        if not (0 < rows <= spec.MAX_DIM and 0 < cols <= spec.MAX_DIM):
            raise ValueError(f"tensor {name}: ({rows}, {cols}) is not a shape")
        siblings = self._weights.setdefault(section, [])
        offset = 0
        if siblings:
            offset = round_up(siblings[-1].offset + siblings[-1].size, spec.TENSOR_ALIGN)
        tensor = Tensor(
            name=name,
            format=TensorFormat(tensor_format),
            section=list(self._weights).index(section),
            rows=rows,
            cols=cols,
            offset=offset,
            size=spec.tensor_bytes(tensor_format, rows, cols),
        )
        if offset + tensor.size > spec.MAX_WEIGHTS_BYTES or len(self._tensors) == spec.MAX_TENSORS:
            raise ValueError(f"tensor {name}: more than a .edge file can hold")
        siblings.append(tensor)
        self._tensors[name] = tensor

    def add_section(
        self, section: SectionType, data: bytes, tag: str = "", *, replace: bool = False
    ) -> None:
        """Adds a text section, at any time before `finish`.

        Args:
            section: META, TOKENIZER, CHAT_TEMPLATE, GENERATION_CONFIG or TEST_VECTORS.
            data: its content, verbatim; META and TEST_VECTORS come from `canonical_json`.
            tag: the name of a chat template (`default`); empty for the others.
            replace: the section is there already and takes this content instead.

        Raises:
            ValueError: another section, or one that is (not) there already, or a wrong tag.
            FormatError: the content is empty, too large, not UTF-8 or not what the section holds.
        """
        if section in (SectionType.WEIGHTS, SectionType.TENSOR_INDEX):
            raise ValueError(f"{section.name} is written from the tensors")
        if ((section, tag) in self._texts) != replace:
            is_there = "not there" if replace else "there already"
            raise ValueError(f"section {section.name} {tag} is {is_there}")
        if bool(tag) != (section == SectionType.CHAT_TEMPLATE):
            raise ValueError(f"section {section.name} with tag {tag!r}")
        if tag and not _TAG.fullmatch(tag):
            raise ValueError(f"{tag!r} is not a tag")
        if not 0 < len(data) <= spec.SECTION_LIMITS[section]:
            raise FormatError(
                f"{section.name} has {len(data)} bytes, not 1..{spec.SECTION_LIMITS[section]}"
            )
        if section == SectionType.META:
            check_meta(parse_json(data, "META"))
        elif section == SectionType.TEST_VECTORS:
            check_test_vectors(parse_json(data, "TEST_VECTORS"), spec.MAX_VOCAB_SIZE)
        else:
            _check_utf8(data, section.name)
        self._texts[section, tag] = bytes(data)

    def allocate(self, *, late_sections: int = 2, late_bytes: int = 2 << 20) -> int:
        """Makes the temporary and reserves the whole file, so that a full disk is known now.

        Args:
            late_sections: how many sections will be added afterwards.
            late_bytes: how many bytes those may have.

        Returns:
            The bytes reserved: the size of the file, if the late sections are as large as said.

        Raises:
            ValueError: called twice, or no tensor was declared.
            EdgeLLMError: the folder cannot be written or the file does not fit.
        """
        if self._file >= 0 or not self._tensors:
            raise ValueError("allocate() comes once, after the tensors")
        num_sections = len(self._weights) + 1 + len(self._texts) + late_sections
        if not self.path.parent.is_dir():
            raise EdgeLLMError(f"cannot write {self.path}: there is no folder {self.path.parent}")
        if self.path.is_dir():
            raise EdgeLLMError(f"cannot write {self.path}: it is a folder; name a file")
        self._starts, end = self._place_weights(num_sections)
        end += len(self._tensors) * spec.TENSOR_ENTRY_BYTES
        end += sum(len(data) + _TEXT_ALIGN for data in self._texts.values())
        end += late_bytes + late_sections * _TEXT_ALIGN
        with self._writing():
            remove_stale(self.path)
            self._file, self._temporary = create_temporary(self.path)
            try:
                reserve(self._file, end)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    raise
                folder = self.path.parent
                free = shutil.disk_usage(folder).free
                raise EdgeLLMError(
                    f"{self.path.name} needs {end / 1e6:.1f} MB, but {folder} has "
                    f"{free / 1e6:.1f} MB free or a limit ({error.strerror}): make room or choose "
                    "another folder"
                ) from None
        return end

    def write_tensor(
        self, name: str, data: bytes | memoryview | npt.NDArray[Any], *, offset: int = 0
    ) -> None:
        """Writes bytes of a tensor; may be called from several threads, in any order.

        Args:
            name: a declared tensor.
            data: contiguous bytes, or an array whose bytes they are.
            offset: where in the tensor they go, bytes.

        Raises:
            ValueError: they do not lie within the tensor, or `allocate` was not called.
            EdgeLLMError: the operating system refused to write.
        """
        tensor = self._tensors[name]
        view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
        if self._file < 0:
            raise ValueError("write_tensor() comes after allocate()")
        if self._weight_digests:
            raise ValueError("write_tensor() comes before complete()")
        if offset < 0 or offset + view.nbytes > tensor.size:
            raise ValueError(
                f"tensor {name}: bytes {offset}..{offset + view.nbytes} of {tensor.size}"
            )
        start = self._starts[tensor.section] + tensor.offset + offset
        with self._writing():
            write_at(self._file, view, start)
        with self._lock:
            self._written[name] = self._written.get(name, 0) + view.nbytes

    def finish(self) -> str:
        """Completes the file and moves it to its name.

        Returns:
            The model id, 64 hexadecimal digits.

        Raises:
            ValueError: a required section or bytes of a tensor are missing.
            EdgeLLMError: the operating system refused to write.
        """
        model_id = self._write_whole()
        with self._writing():
            os.fsync(self._file)
            if hasattr(os, "posix_fadvise"):
                # The pages just written are small; read anew, the page cache can hold the weights
                # in huge ones, which makes decoding faster (see elm_map_open).
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
            if self._temporary is not None:
                os.replace(self._temporary, self.path)
                self._temporary = None
            self._discard()
            sync_folder(self.path.parent)
        return model_id.hex()

    def complete(self) -> Path:
        """Makes the temporary a whole file, so that it can be tried out before `finish`.

        All sections must be there; `add_section` may still replace one. Weights cannot change any
        more.

        Returns:
            The temporary's path, which `finish` takes away.

        Raises:
            ValueError: a required section or bytes of a tensor are missing.
            EdgeLLMError: the operating system refused to write.
        """
        self._write_whole()
        if self._temporary is None:
            raise ValueError("complete() comes before finish()")
        return self._temporary

    def _write_whole(self) -> bytes:
        """Writes all but the weights into the temporary; returns the model id."""
        self._check_complete()
        with self._writing():
            table = self._write_sections()
            model_id = hashlib.sha256(table).digest()
            write_at(self._file, memoryview(table), spec.SUPERBLOCK_BYTES)
            size = os.fstat(self._file).st_size
            write_at(self._file, memoryview(spec.pack_superblock(size, len(table), model_id)), 0)
        return model_id

    def _check_complete(self) -> None:
        for name, tensor in self._tensors.items():
            if self._written.get(name, 0) != tensor.size:
                written = self._written.get(name, 0)
                raise ValueError(f"tensor {name}: {written} of {tensor.size} bytes written")
        for required in (SectionType.META, SectionType.TOKENIZER, SectionType.TEST_VECTORS):
            if (required, "") not in self._texts:
                raise ValueError(f"section {required.name} is missing")
        if "globals" not in self._weights:
            raise ValueError("section WEIGHTS globals is missing")
        num_sections = len(self._weights) + 1 + len(self._texts)
        if num_sections > spec.MAX_SECTIONS:
            raise ValueError(f"{num_sections} sections, more than {spec.MAX_SECTIONS}")
        if self._place_weights(num_sections)[0] != self._starts:
            raise ValueError(f"{num_sections} sections: not the number allocate() was told")

    def _write_sections(self) -> bytes:
        """Writes index and text sections, cuts the file to size and returns the section table."""
        planned: list[tuple[SectionType, str, int, int]] = []
        end = 0
        for (tag, tensors), start in zip(self._weights.items(), self._starts, strict=True):
            end = start + tensors[-1].offset + tensors[-1].size
            planned.append((SectionType.WEIGHTS, tag, start, end - start))
        index = b"".join(tensor.pack() for _, tensor in sorted(self._tensors.items()))
        texts = {(SectionType.TENSOR_INDEX, ""): index, **self._texts}
        order = sorted(texts, key=lambda key: (key[0] != SectionType.TENSOR_INDEX, key))
        for section, tag in order:
            data = texts[section, tag]
            start = round_up(end, _TEXT_ALIGN)
            padding = bytes(start - end)  # not a hole: an earlier `complete` may have written there
            write_at(self._file, memoryview(padding + data), end)
            planned.append((section, tag, start, len(data)))
            end = start + len(data)
        os.ftruncate(self._file, end)
        whole = np.frombuffer(mmap.mmap(self._file, end, access=mmap.ACCESS_READ), np.uint8)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = list(pool.map(lambda item: self._digest(whole, *item), planned))
        sections = [
            Section(
                type=section,
                tag=tag,
                offset=start,
                size=size,
                align_log2=_align_log2(section),
                crc32c=checksum,
                sha256=digest,
            )
            for (section, tag, start, size), (checksum, digest) in zip(
                planned, digests, strict=True
            )
        ]
        return b"".join(section.pack() for section in sections)

    def _digest(
        self, whole: npt.NDArray[np.uint8], section: SectionType, tag: str, start: int, size: int
    ) -> tuple[int, bytes]:
        """CRC-32C and SHA-256 of a section; those of weights are computed once."""
        found = self._weight_digests.get(tag) if section == SectionType.WEIGHTS else None
        if found is None:
            piece = whole[start : start + size]
            found = crc32c(piece), hashlib.sha256(piece.data).digest()
            if section == SectionType.WEIGHTS:
                self._weight_digests[tag] = found
        return found

    def _place_weights(self, num_sections: int) -> tuple[list[int], int]:
        """Starts of the WEIGHTS sections and the end of the last."""
        starts = []
        end = spec.SUPERBLOCK_BYTES + num_sections * spec.SECTION_ENTRY_BYTES
        for tensors in self._weights.values():
            starts.append(round_up(end, _WEIGHTS_ALIGN))
            end = starts[-1] + tensors[-1].offset + tensors[-1].size
        return starts, end

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise EdgeLLMError(f"cannot write {self.path}: {reason}") from error

    def _discard(self) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _align_log2(section: SectionType) -> int:
    is_weights = section == SectionType.WEIGHTS
    return spec.WEIGHTS_ALIGN_LOG2 if is_weights else spec.TEXT_ALIGN_LOG2


def _check_utf8(data: bytes, where: str) -> None:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{where} is not UTF-8 at byte {error.start}") from None
