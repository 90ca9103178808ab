"""Which source rows become which rows of which tensor of the file.

The plan accounts for every tensor of the source before anything is read: each is used exactly once,
or the export fails with all that is stray, missing or of a wrong shape.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from edgellm.errors import FormatError
from edgellm.exporters.source import ModelSource
from edgellm.format.spec import PANEL_ROWS, tensor_bytes
from edgellm.models import SourceTensor, apply_rewrite, file_shapes, fuse, fused_parts
from edgellm.types import Float32Array, TensorFormat, round_up

HeadFormat = Literal["e4", "q8"]

# Weights of one piece of work: 16 MiB as float32, so that all cores together stay small.
CHUNK_WEIGHTS: Final = 1 << 22
_MAX_NAMED: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of the file to be.

    Attributes:
        name: Its name in the file.
        section: Tag of its WEIGHTS section.
        format: How it will be stored.
        rows: Rows.
        cols: Columns.
        parts: The source tensors it is made of, in order; none for a RoPE table.
        source_types: Their number types, for reports.
    """

    name: str
    section: str
    format: TensorFormat
    rows: int
    cols: int
    parts: tuple[SourceTensor, ...]
    source_types: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        """Whether it is a RoPE table, which the description has."""
        return self.name.startswith("rope.")

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return tensor_bytes(self.format, self.rows, self.cols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows of a file tensor that are made at once.

    Attributes:
        tensor: The tensor they belong to.
        first_row: The first of them, a multiple of 16.
        num_rows: How many.
        reads: Source tensor, first row and number of rows to read, for each part.
    """

    tensor: FileTensor
    first_row: int
    num_rows: int
    reads: tuple[tuple[SourceTensor, int, int], ...]


def plan_tensors(source: ModelSource, head: HeadFormat) -> list[FileTensor]:
    """The tensors of the file, in the order of the model.

    Args:
        source: The model.
        head: Format of the embedding and the head.

    Returns:
        Every tensor of the file.

    Raises:
        FormatError: Source tensors are left over, missing or of a wrong shape; names them all.
    """
    wanted = source.spec.sources(source.kind, source.description)
    _check_sources(source, wanted)
    by_canonical = {item.canonical_name: item for item in wanted}
    parts = fused_parts(source.description)
    tensors = []
    for name, (rows, cols) in file_shapes(source.description).items():
        made_of = tuple(by_canonical[part] for part in parts.get(name, ()))
        is_layer = name.startswith("layers.")
        tensors.append(
            FileTensor(
                name=name,
                section=name.rpartition(".")[0] if is_layer else "globals",
                format=_format(name, made_of, head),
                rows=rows,
                cols=cols,
                parts=made_of,
                source_types=tuple(source.tensors.dtype(part.source_name) for part in made_of),
            )
        )
    # Sections are written in the order in which their tensors are declared.
    return sorted(tensors, key=lambda tensor: tensor.section != "globals")


def chunks(tensor: FileTensor, head_dim: int) -> Iterator[Chunk]:
    """Cuts a quantised tensor into pieces of work.

    A piece never cuts a panel, nor a head, whose rows a rewrite may exchange.

    Args:
        tensor: A tensor of the plan, not F32.
        head_dim: Rows of a head, a multiple of 16.
    """
    step = max(head_dim, CHUNK_WEIGHTS // tensor.cols // head_dim * head_dim)
    if tensor.name.endswith(".gate_up"):
        total = tensor.parts[0].shape[0]
        for first in range(0, total, step):
            count = min(step, total - first)
            yield Chunk(
                tensor=tensor,
                first_row=2 * first,
                num_rows=2 * round_up(count, PANEL_ROWS),
                reads=tuple((part, first, count) for part in tensor.parts),
            )
        return
    base = 0
    for part in tensor.parts:
        for first in range(0, part.shape[0], step):
            count = min(step, part.shape[0] - first)
            yield Chunk(
                tensor=tensor,
                first_row=base + first,
                num_rows=count,
                reads=((part, first, count),),
            )
        base += part.shape[0]


def read_chunk(source: ModelSource, chunk: Chunk) -> Float32Array:
    """The chunk's rows.

    Args:
        source: The model.
        chunk: Which rows.

    Returns:
        (num_rows, cols) float32.

    Raises:
        FormatError: A weight is not finite.
    """
    pieces = [_read(source, part, first, count) for part, first, count in chunk.reads]
    return fuse(chunk.tensor.name, pieces)


def read_vector(source: ModelSource, tensor: FileTensor) -> Float32Array:
    """A whole F32 tensor, (1, n): a norm, a bias or a RoPE table."""
    if tensor.is_table:
        number = int(tensor.name.split(".")[1])
        return source.description.inv_freqs[number].reshape(1, -1)
    pieces = [_read(source, part, 0, 1).reshape(-1) for part in tensor.parts]
    return fuse(tensor.name, pieces)


def read_whole(source: ModelSource, part: SourceTensor) -> Float32Array:
    """A canonical tensor, (rows, cols) or (n,) float32; errors as for `read_chunk`."""
    rows = part.shape[0] if len(part.shape) == 2 else 1
    return np.ascontiguousarray(_read(source, part, 0, rows).reshape(part.shape), np.float32)


def _read(source: ModelSource, part: SourceTensor, first: int, count: int) -> Float32Array:
    values = source.tensors.rows(part.source_name, first, count)
    if not np.isfinite(values).all():
        raise FormatError(f"source tensor {part.source_name!r} holds NaN or infinity")
    return apply_rewrite(part.rewrite, values, source.description)


def _format(name: str, parts: tuple[SourceTensor, ...], head: HeadFormat) -> TensorFormat:
    if not parts or len(parts[0].shape) == 1:
        return TensorFormat.F32
    if name in ("embed", "head") and head == "q8":
        return TensorFormat.E8
    return TensorFormat.E4


def _check_sources(source: ModelSource, wanted: list[SourceTensor]) -> None:
    shapes = source.tensors.shapes
    names = {item.source_name for item in wanted}
    copies = source.spec.copies(source.kind, source.description)
    ignorable = source.spec.ignorable(source.kind)
    missing = [item.source_name for item in wanted if item.source_name not in shapes]
    wrong = [
        f"{item.source_name} {shapes[item.source_name]} instead of {item.shape}"
        for item in wanted
        if item.source_name in shapes and shapes[item.source_name] != item.shape
    ]
    stray = [
        name
        for name in shapes
        if name not in names
        and name not in copies
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignorable)
    ]
    found = [("missing", missing), ("of a wrong shape", wrong), ("left over", stray)]
    if any(items for _, items in found):
        listed = "; ".join(f"{what}: {_listed(items)}" for what, items in found if items)
        raise FormatError(
            f"the tensors are not those of {source.description.architecture!r}: {listed}"
        )
    for copy, original in copies.items():
        if copy in shapes and not _is_equal(source, copy, original):
            raise FormatError(
                f"config.json says that embedding and head are one, but {copy!r} differs from "
                f"{original!r}: set tie_word_embeddings to false"
            )


def _is_equal(source: ModelSource, left: str, right: str) -> bool:
    shape = source.tensors.shapes[left]
    if shape != source.tensors.shapes[right]:
        return False
    step = max(1, CHUNK_WEIGHTS // shape[-1])
    return all(
        np.array_equal(
            source.tensors.rows(left, first, min(step, shape[0] - first)),
            source.tensors.rows(right, first, min(step, shape[0] - first)),
        )
        for first in range(0, shape[0], step)
    )


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return ", ".join(items[:_MAX_NAMED]) + more
