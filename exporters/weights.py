"""Writes the tensors of a file, on all cores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm._native import quantize
from edgellm.errors import FormatError
from edgellm.exporters.plan import Chunk, FileTensor, chunks, read_chunk, read_vector
from edgellm.exporters.source import ModelSource
from edgellm.format import EdgeWriter
from edgellm.format.spec import tensor_bytes
from edgellm.types import TensorFormat

__all__ = ["Made", "Progress", "write_weights"]

Progress: TypeAlias = Callable[[int, int], None]
Made: TypeAlias = Callable[[str], Mapping[str, npt.NDArray[Any]]]


def write_weights(
    writer: EdgeWriter,
    source: ModelSource,
    tensors: tuple[FileTensor, ...],
    threads: int,
    progress: Progress | None,
    made: Made | None = None,
) -> list[str]:
    """Writes all tensors and hashes the source files meanwhile.

    Args:
        writer: Where the tensors are declared.
        source: The model.
        tensors: What becomes of each tensor.
        threads: Threads to use.
        progress: Called with the bytes written and their total, in this thread.
        made: For a section its tensors, quantised already; None: all are quantised here.

    Returns:
        SHA-256 of the source files, hexadecimal.
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
            return [task.result() for task in hashes]
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


def _write_section(writer: EdgeWriter, made: Made, section: str) -> int:
    tensors = made(section)
    for name, data in tensors.items():
        writer.write_tensor(name, np.ascontiguousarray(data))
    return sum(data.nbytes for data in tensors.values())


def _write(writer: EdgeWriter, source: ModelSource, task: FileTensor | Chunk) -> int:
    """Makes and writes one tensor or piece; returns its bytes."""
    if isinstance(task, FileTensor):
        vector = read_vector(source, task).astype("<f4")
        writer.write_tensor(task.name, vector)
        return vector.nbytes
    # Panels follow one another, so that rows which begin and end with one are a tensor themselves.
    weights = np.ascontiguousarray(read_chunk(source, task), np.float32)
    tensor = task.tensor
    out = np.empty(tensor_bytes(tensor.format, task.num_rows, tensor.cols), np.uint8)
    try:
        quantize(tensor.format, weights, out)
    except ValueError as error:
        raise FormatError(f"tensor {tensor.name}: {error}") from None
    offset = tensor_bytes(tensor.format, task.first_row, tensor.cols)
    writer.write_tensor(tensor.name, out, offset=offset)
    return out.nbytes


def _in_order_of_completion(tasks: list[Future[int]]) -> Iterator[int]:
    pending = set(tasks)
    while pending:
        finished, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        for task in finished:
            yield task.result()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
