"""What every reader of a foreign model hands to the exporter."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from edgellm.errors import FormatError
from edgellm.models import ModelDescription, ModelSpec
from edgellm.types import Float32Array

LFS_POINTER = b"version https://git-lfs"
MAX_JSON_BYTES = 64 << 20


class TensorStore(Protocol):
    """Source tensors by name; nothing is read before `rows` asks for it."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, slowest dimension first."""
        ...

    def dtype(self, name: str) -> str:
        """Name of the source's number type, for reports."""
        ...

    def rows(self, name: str, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32; a vector is one row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerInfo:
    """META's "tokenizer": what tokenizer.json does not say.

    Attributes:
        add_bos: A prompt without a template begins with BOS.
        bos_id: Id of BOS, None if the model has none.
        eos_ids: Every id that ends an answer, in the order found.
        is_synthesised: tokenizer.json was made from GGUF fields.
        special_tokens: Texts that chat templates name, for example {"bos_token": "<s>"}.
    """

    add_bos: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    is_synthesised: bool
    special_tokens: Mapping[str, str]

    def to_meta(self) -> dict[str, Any]:
        """The record as META holds it."""
        return {
            "add_bos": self.add_bos,
            "bos_id": self.bos_id,
            "eos_ids": list(self.eos_ids),
            "is_synthesised": self.is_synthesised,
            "special_tokens": dict(self.special_tokens),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A foreign model, opened and described, its weights not yet read.

    Attributes:
        kind: Which reader made it; also the key of `ModelSpec.sources`.
        name: Stem for an output file.
        files: Every file that was read, hashed into META.
        tensors: The weights.
        spec: The architecture.
        description: Shapes and constants.
        tokenizer_json: tokenizer.json; verbatim if the source has one.
        tokenizer: What goes with it.
        chat_templates: Jinja source by name; "default" is the one used when none is named.
        generation_config: generation_config.json verbatim, if there is one.
        notes: What the user should know about how it was read.
    """

    kind: Literal["gguf", "hf", "onnx"]
    name: str
    files: tuple[Path, ...]
    tensors: TensorStore
    spec: ModelSpec
    description: ModelDescription
    tokenizer_json: bytes
    tokenizer: TokenizerInfo
    chat_templates: Mapping[str, str]
    generation_config: bytes | None
    notes: tuple[str, ...] = ()


def refuse_lfs_pointer(path: Path, head: bytes) -> None:
    """Raises FormatError if `head`, the file's first bytes, is a Git-LFS pointer's."""
    if head.startswith(LFS_POINTER):
        raise FormatError(f"{path} is a Git-LFS pointer, not the file itself: run git lfs pull")


def let_go(mapped: mmap.mmap, start: int, size: int) -> None:
    """Takes bytes of a mapped file out of this process's memory; a later read maps them again."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, start + size - first)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: The file.

    Returns:
        The object.

    Raises:
        FormatError: The file is larger than 64 MiB, an LFS pointer or not a JSON object.
    """
    if path.stat().st_size > MAX_JSON_BYTES:
        raise FormatError(f"{path} is larger than {MAX_JSON_BYTES} bytes: not a model's JSON file")
    data = path.read_bytes()
    refuse_lfs_pointer(path, data)
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object, refusing duplicate keys and NaN; `where` goes into the message."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where} is not a JSON object but {type(value).__name__}")
    return value


def file_stem(name: str) -> str:
    """`name` reduced to letters, digits, dot, dash and underscore, for an output file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} occurs twice")
        result[key] = value
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
