"""Writes the tensors of a file, on all cores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError
from edgellm.exporters.carry import Rounding, measure_rounding, quantize_or_carry
from edgellm.exporters.plan import Chunk, FileTensor, chunks, read_chunk, read_vector
from edgellm.exporters.source import ModelSource
from edgellm.format import EdgeWriter
from edgellm.format.spec import tensor_bytes
from edgellm.types import TensorFormat

__all__ = ["Made", "Progress", "WrittenWeights", "write_weights"]

Progress: TypeAlias = Callable[[int, int], None]
Made: TypeAlias = Callable[[str], Mapping[str, npt.NDArray[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """What became of all tensors.

    Attributes:
        digests: SHA-256 of the source files, hexadecimal.
        roundings: What a quantised source lost by being rounded again, in pieces of the tensors.
    """

    digests: list[str]
    roundings: list[Rounding]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    num_bytes: int
    rounding: Rounding | None = None


def write_weights(
    writer: EdgeWriter,
    source: ModelSource,
    tensors: tuple[FileTensor, ...],
    threads: int,
    progress: Progress | None,
    made: Made | None = None,
) -> WrittenWeights:
    """Writes all tensors and hashes the source files meanwhile.

    Args:
        writer: Where the tensors are declared.
        source: The model.
        tensors: What becomes of each tensor.
        threads: Threads to use.
        progress: Called with the bytes written and their total, in this thread.
        made: For a section its tensors, quantised already; None: all are quantised here.

    Returns:
        Digests of the source files, and what was lost.
    """
    total, done = sum(tensor.size for tensor in tensors), 0
    with ThreadPoolExecutor(threads) as pool:
        hashes = [pool.submit(_sha256, file) for file in source.files]
        tasks = [
            pool.submit(_write, writer, source, task) for task in _tasks(source, tensors, made)
        ]
        if made is not None:
            sections = dict.fromkeys(tensor.section for tensor in tensors)
            tasks += [pool.submit(_write_section, writer, made, section) for section in sections]
        try:
            for finished in _in_order_of_completion(tasks):
                done += finished
                if progress is not None:
                    progress(done, total)
            # In the order of the tensors, so that sums do not depend on the threads.
            found = [task.result().rounding for task in tasks]
            return WrittenWeights(
                digests=[task.result() for task in hashes],
                roundings=[rounding for rounding in found if rounding is not None],
            )
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _tasks(
    source: ModelSource, tensors: tuple[FileTensor, ...], made: Made | None
) -> Iterator[FileTensor | Chunk]:
    """Small tensors whole, the others in pieces."""
    for tensor in tensors:
        if made is not None and not tensor.is_table:
            continue
        if tensor.format == TensorFormat.F32:
            yield tensor
        else:
            yield from chunks(tensor, source.description.head_dim)


def _write_section(writer: EdgeWriter, made: Made, section: str) -> _Written:
    tensors = made(section)
    for name, data in tensors.items():
        writer.write_tensor(name, np.ascontiguousarray(data))
    return _Written(num_bytes=sum(data.nbytes for data in tensors.values()))


def _write(writer: EdgeWriter, source: ModelSource, task: FileTensor | Chunk) -> _Written:
    """Makes and writes one tensor or piece."""
    if isinstance(task, FileTensor):
        vector = read_vector(source, task).astype("<f4")
        writer.write_tensor(task.name, vector)
        return _Written(num_bytes=vector.nbytes)
    # Panels follow one another, so that rows which begin and end with one are a tensor themselves.
    weights = np.ascontiguousarray(read_chunk(source, task), np.float32)
    tensor = task.tensor
    out = np.empty(tensor_bytes(tensor.format, task.num_rows, tensor.cols), np.uint8)
    try:
        quantize_or_carry(tensor.format, weights, out)
    except ValueError as error:
        raise FormatError(f"tensor {tensor.name}: {error}") from None
    offset = tensor_bytes(tensor.format, task.first_row, tensor.cols)
    writer.write_tensor(tensor.name, out, offset=offset)
    types = [source.tensors.dtype(part.source_name) for part, _, _ in task.reads]
    rounding = measure_rounding(tensor.name, types, weights, tensor.format, out)
    return _Written(num_bytes=out.nbytes, rounding=rounding)


def _in_order_of_completion(tasks: list[Future[_Written]]) -> Iterator[int]:
    pending = set(tasks)
    while pending:
        finished, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        for task in finished:
            yield task.result().num_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
