r"""A reference kept in a file, so that a device without the source model can be judged.

Little-endian:

    "\x89EDGEREF"; u32 version (1); u32 length of the header
    header: JSON, `ReferenceHeader`
    u32 ids[num_ids]
    rows, one for each scored token:
        f32 log-probability of the token that came
        f32 log of the probability of all but the num_top most probable tokens together
        u16 codes[num_top + num_drawn]: log-probability times -2,048, rounded
        u16 or u32 ids[num_top + num_drawn]: u16 if the vocabulary has at most 65,536 tokens
    u8[32] SHA-256 of all before

The num_top most probable tokens come first, falling; the others are drawn from the rest in
proportion to their probability (systematic sampling). See `SampledRows` for what follows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from edgellm.errors import EdgeLLMError, FormatError
from edgellm.eval.distributions import Float64Array, IdArray, SampledRows
from edgellm.eval.windows import MIN_SCORED, Windows
from edgellm.format.spec import MAX_CONTEXT, MAX_VOCAB_SIZE
from edgellm.format.temporary import create_temporary, remove_stale, sync_folder

__all__ = [
    "DEFAULT_TOP",
    "MAGIC",
    "ReferenceFile",
    "ReferenceHeader",
    "ReferenceWriter",
    "split_top",
]

MAGIC: Final = b"\x89EDGEREF"
DEFAULT_TOP: Final = 512

_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<8sII")
_MAX_HEADER: Final = 1 << 16
_MAX_IDS: Final = 1 << 24
_DIGEST_BYTES: Final = 32
_READ_BYTES: Final = 1 << 24
_STEPS: Final = 2048.0  # codes a nat; the least log-probability is -32
_GOLDEN: Final = 0.6180339887498949
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceHeader:
    """What a reference file says about itself.

    Attributes:
        reference: Name of the model it was made with.
        engine: What ran it.
        text: Name of the text.
        text_sha256: Of the text in UTF-8.
        vocabulary_sha256: Of the tokens' bytes, see `vocabulary_sha256`.
        num_tokens: Tokens of the vocabulary.
        num_ids: Tokens of the text.
        context: Tokens of a window.
        score: Which tokens of a window count: "all" or "half".
        bos_id: The token that replaces the first of each window; None for none.
        num_top: Most probable tokens kept of each distribution.
        num_drawn: Tokens drawn from the rest.
    """

    reference: str
    engine: str
    text: str
    text_sha256: str
    vocabulary_sha256: str
    num_tokens: int
    num_ids: int
    context: int
    score: str
    bos_id: int | None
    num_top: int
    num_drawn: int

    def row_type(self) -> np.dtype[np.void]:
        """How a row lies in the file."""
        kept = self.num_top + self.num_drawn
        id_type = "<u2" if self.num_tokens <= 1 << 16 else "<u4"
        return np.dtype(
            [
                ("target", "<f4"),
                ("rest", "<f4"),
                ("codes", "<u2", (kept,)),
                ("ids", id_type, (kept,)),
            ]
        )


def split_top(num_top: int, num_tokens: int) -> tuple[int, int]:
    """How many tokens of a distribution are kept for being probable, and how many drawn."""
    return (num_tokens, 0) if num_top >= num_tokens else (num_top, max(1, num_top // 4))


class ReferenceWriter:
    """Writes a reference file; it appears under its name when it is whole.

    Args:
        path: The file.
        header: What it says about itself.
        windows: The text.
    """

    def __init__(
        self, path: str | os.PathLike[str], header: ReferenceHeader, windows: Windows
    ) -> None:
        self.path = Path(os.path.realpath(path))
        self._header, self._row_type = header, header.row_type()
        self._digest = hashlib.sha256()
        self._num_rows = 0
        with self._writing():
            remove_stale(self.path)
            descriptor, self._temporary = create_temporary(self.path)
        self._file = os.fdopen(descriptor, "wb")
        text = json.dumps(dataclasses.asdict(header), sort_keys=True).encode()
        self._write(_PREFIX.pack(MAGIC, _VERSION, len(text)) + text)
        self._write(windows.ids.astype("<u4").tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, log_p: Float64Array, targets: IdArray) -> None:
        """Adds rows.

        Args:
            log_p: (n, tokens) log-probabilities.
            targets: (n,) the tokens that came.

        Raises:
            EdgeLLMError: The operating system refused to write.
        """
        rows = np.zeros(len(log_p), self._row_type)
        rows["target"] = np.take_along_axis(log_p, targets[:, None], 1)[:, 0]
        for row, values in zip(rows, log_p, strict=True):
            offset = self._num_rows * _GOLDEN % 1  # evenly spread over the rows
            ids, row["rest"] = _keep(values, self._header.num_top, self._header.num_drawn, offset)
            row["ids"] = ids
            row["codes"] = np.minimum(np.rint(-values[ids] * _STEPS), 65535)
            self._num_rows += 1
        self._write(rows.tobytes())

    def finish(self) -> None:
        """Completes the file and moves it to its name.

        Raises:
            EdgeLLMError: The operating system refused to write.
        """
        self._write(self._digest.digest())
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        with self._writing():
            self._file.write(data)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EdgeLLMError(f"cannot write {self.path}: {error.strerror or error}") from error


class ReferenceFile:
    """An open reference file, checked from end to end.

    Args:
        path: The file.

    Raises:
        FormatError: It is not a reference file, or is truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = self.path.open("rb")
        try:
            self.header = self._read_header()
            self._row_type = self.header.row_type()
            ids = np.frombuffer(self._read(4 * self.header.num_ids), "<u4")
            if ids.max() >= self.header.num_tokens:
                raise self._error(f"token id {ids.max()} is not in its vocabulary")
            self.windows = Windows(
                ids=ids.astype(np.int32),
                context=self.header.context,
                score=self.header.score,
                bos_id=self.header.bos_id,
            )
            if self.windows.num_scored < MIN_SCORED:
                raise self._error(f"{self.windows.num_scored} tokens to score")
            self._first_row = self._file.tell()
            self._check_body()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def rows(self, first: int, count: int) -> SampledRows:
        """Distributions of scored tokens.

        Args:
            first: Number of the first, counted over all windows.
            count: How many.

        Raises:
            FormatError: A row holds what no writer writes.
        """
        header = self.header
        self._file.seek(self._first_row + first * self._row_type.itemsize)
        rows = np.frombuffer(self._read(count * self._row_type.itemsize), self._row_type)
        ids, target, rest = (rows[name].astype(np.float64) for name in ("ids", "target", "rest"))
        is_log = (target <= 0).all() and np.isfinite(target).all() and (rest <= 1e-6).all()
        if not is_log or ids.max() >= header.num_tokens:
            raise self._error(f"a row from {first} on holds no probability or no token")
        log_p = rows["codes"] / -_STEPS
        total = np.exp(log_p[:, : header.num_top]).sum(axis=1) + np.exp(rest)
        return SampledRows(
            ids=ids.astype(np.int64),
            log_p=log_p - np.log(total)[:, None],
            num_top=header.num_top,
            log_rest=rest - np.log(total),
            log_target=target,
        )

    def _read_header(self) -> ReferenceHeader:
        magic, version, length = _PREFIX.unpack(self._read(_PREFIX.size))
        if magic != MAGIC:
            raise self._error("it is not a reference file")
        if version != _VERSION:
            raise self._error(f"version {version}, this edgellm reads version {_VERSION}")
        if length > _MAX_HEADER:
            raise self._error(f"a header of {length} bytes")
        try:
            fields = json.loads(self._read(length))
            header = ReferenceHeader(**fields)
        except (ValueError, TypeError, RecursionError):
            raise self._error("its header is not what a reference file has") from None
        wrong = _wrong_field(header)
        if wrong:
            raise self._error(f"its header's {wrong} is {str(fields[wrong])[:80]!r}")
        return header

    def _check_body(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        rows = self.windows.num_scored * self._row_type.itemsize
        wanted = self._first_row + rows + _DIGEST_BYTES
        if size != wanted:
            raise self._error(f"{size} bytes instead of {wanted}")
        digest, left = hashlib.sha256(), size - _DIGEST_BYTES
        self._file.seek(0)
        while left:
            piece = self._read(min(left, _READ_BYTES))
            digest.update(piece)
            left -= len(piece)
        if self._read(_DIGEST_BYTES) != digest.digest():
            raise self._error("its SHA-256 is wrong")

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise self._error("it ends too early")
        return data

    def _error(self, reason: str) -> FormatError:
        return FormatError(
            f"reference file {self.path}: {reason}; make it again with --save-reference"
        )


def _keep(
    log_p: Float64Array, num_top: int, num_drawn: int, offset: float
) -> tuple[IdArray, float]:
    """Which tokens of a distribution are kept, and the log of what all but the top ones sum to."""
    if not num_drawn:
        return np.argsort(-log_p, kind="stable"), -np.inf
    top = np.sort(np.argpartition(-log_p, num_top - 1)[:num_top])
    rest = np.exp(log_p)
    rest[top] = 0
    sums = np.cumsum(rest)
    points = (np.arange(num_drawn) + offset) / num_drawn * sums[-1]
    drawn = np.minimum(np.searchsorted(sums, points, side="right"), len(rest) - 1)
    # The stable order puts the lower id first, as argmax does.
    by_probability = top[np.argsort(-log_p[top], kind="stable")]
    return np.concatenate([by_probability, drawn]), float(np.log(sums[-1]))


def _wrong_field(header: ReferenceHeader) -> str | None:
    """Name of a field that is out of its range."""

    def is_int(value: Any, low: int, high: int) -> bool:
        return type(value) is int and low <= value <= high

    vocabulary = header.num_tokens if is_int(header.num_tokens, 1, MAX_VOCAB_SIZE) else 0
    checks = {
        "num_tokens": vocabulary > 0,
        "num_ids": is_int(header.num_ids, 2, _MAX_IDS),
        "context": is_int(header.context, 2, MAX_CONTEXT),
        "score": header.score in ("all", "half"),
        "bos_id": header.bos_id is None or is_int(header.bos_id, 0, vocabulary - 1),
        "num_top": is_int(header.num_top, 1, vocabulary),
        "num_drawn": is_int(header.num_drawn, int(header.num_top != vocabulary), vocabulary),
    }
    for name in ("reference", "engine", "text", "text_sha256", "vocabulary_sha256"):
        value = getattr(header, name)
        checks[name] = isinstance(value, str) and value.isprintable()
        if name.endswith("sha256"):
            checks[name] = checks[name] and _SHA256.fullmatch(value) is not None
    return next((name for name, is_right in checks.items() if not is_right), None)
