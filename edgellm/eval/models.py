"""What can be evaluated: `.edge` files through the engine, models that are exported as they are."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from edgellm import devices
from edgellm.engine.model import Model, check_context
from edgellm.errors import ModelNotFoundError
from edgellm.eval.windows import vocabulary_sha256
from edgellm.format.spec import MAGIC as EDGE_MAGIC
from edgellm.models import ModelDescription, canonical_shapes
from edgellm.text import Tokenizer
from edgellm.types import Float32Array, Int32Array

__all__ = [
    "EdgeModel",
    "LogitsModel",
    "ReferenceEngine",
    "SourceModel",
    "open_model",
    "starts_with",
]

ReferenceEngine: TypeAlias = Literal["auto", "transformers", "numpy"]

# Logits that the engine returns at a time: 64 MB.
_BLOCK_LOGITS: Final = 1 << 24


class LogitsModel(Protocol):
    """A model that gives the logits of one window after the other.

    Attributes:
        name: For people.
        path: Its file or folder.
        engine: What runs it.
        size_bytes: Of its file, or of all files it was read from.
        num_parameters: Weights, without padding.
        num_tokens: Tokens it knows.
        vocabulary: `vocabulary_sha256` of its tokens.
        tokenizer: Its tokenizer.
    """

    name: str
    path: Path
    engine: str
    size_bytes: int
    num_parameters: int
    num_tokens: int
    vocabulary: str
    tokenizer: Tokenizer

    def start(self, ids: Int32Array) -> None:
        """Takes the next window, (n,) token ids."""
        ...

    def logits(self, start: int, stop: int) -> Float32Array:
        """(stop - start, num_tokens) logits after those tokens; asked for in rising order."""
        ...

    def close(self) -> None:
        """Frees it."""
        ...


class EdgeModel:
    """An `.edge` file, run by the engine.

    Args:
        path: The file.
        context: Tokens of a window.
        threads: None: one per CPU this process may use.
        isa: None: the fastest.
        kv: Numbers of the KV cache; None: what the file says.
    """

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        threads: int | None = None,
        isa: str | None = None,
        kv: str | None = None,
    ) -> None:
        self._model = Model(path, threads=threads, isa=isa, kv=kv, device="cpu")
        try:
            self._session = self._model.native.create_session(self._model.choose_context(context))
            self.tokenizer = self._model.tokenizer
            self.num_tokens = self._model.info.num_tokens
            self.vocabulary = vocabulary_sha256(self.tokenizer, self.num_tokens)
        except BaseException:
            self._model.close()
            raise
        info = self._session.info()
        self.name, self.path = path.stem, path
        self.engine = f"edgellm {self._model.info.isa}, {info.kv_format} cache"
        self.size_bytes = path.stat().st_size
        description = ModelDescription.from_meta(self._model.file.meta["model"], ())
        self.num_parameters = _count(description)
        rows = max(1, _BLOCK_LOGITS // self._model.info.vocab_size)
        self._rows = min(rows, info.chunk_length)
        self._ids = np.empty(0, np.int32)
        self._done = 0
        self._block = np.empty((0, 0), np.float32)

    def start(self, ids: Int32Array) -> None:
        """As `LogitsModel.start`."""
        self._session.truncate(0)
        self._ids, self._done = ids, 0
        self._block = self._block[:0]

    def logits(self, start: int, stop: int) -> Float32Array:
        """As `LogitsModel.logits`."""
        pieces = []
        while start < stop:
            first = self._done - len(self._block)
            if start >= self._done:
                if start > self._done:
                    self._session.prefill(self._ids[self._done : start])
                chunk = self._ids[start : start + self._rows]
                self._block = self._session.prefill(chunk, len(chunk))
                first, self._done = start, start + len(chunk)
            piece = self._block[start - first : stop - first, : self.num_tokens]
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def close(self) -> None:
        """As `LogitsModel.close`."""
        self._model.close()


class SourceModel:
    """A GGUF file, Hugging Face folder or ONNX model in float32, run by transformers or by numpy.

    Args:
        path: The file or folder.
        context: Tokens of a window.
        engine: Which of the two; "auto": transformers where it is installed and reads it.
        threads: For transformers.
    """

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        engine: ReferenceEngine = "auto",
        threads: int | None = None,
    ) -> None:
        from edgellm.exporters.forward import open_forward
        from edgellm.exporters.open_source import open_source
        from edgellm.exporters.vectors import make_tokenizer

        source = open_source(path)
        check_context(context, source.description.max_context)
        self.name, self.path = source.name, path
        self.tokenizer = make_tokenizer(source)
        self.num_tokens = source.description.num_tokens
        self.vocabulary = vocabulary_sha256(self.tokenizer, self.num_tokens)
        weights = [file for file in source.files if file.suffix not in (".json", ".jinja")]
        self.size_bytes = sum(file.stat().st_size for file in weights)
        self.num_parameters = _count(source.description)
        available = devices.probe("cpu").available_bytes
        self._forward = open_forward(
            source,
            path,
            engine,
            threads=threads,
            is_kept=2 * 4 * self.num_parameters < available,
        )
        self.engine = f"{self._forward.engine}, float32"

    def start(self, ids: Int32Array) -> None:
        """As `LogitsModel.start`."""
        self._forward.start(ids)

    def logits(self, start: int, stop: int) -> Float32Array:
        """As `LogitsModel.logits`."""
        return self._forward.logits(start, stop)[:, : self.num_tokens]

    def close(self) -> None:
        """As `LogitsModel.close`."""
        del self._forward


def open_model(
    path: str | os.PathLike[str],
    *,
    context: int,
    threads: int | None = None,
    isa: str | None = None,
    kv: str | None = None,
    engine: ReferenceEngine = "auto",
) -> LogitsModel:
    """Opens a model of either kind; arguments as for `EdgeModel` and `SourceModel`.

    Raises:
        ModelNotFoundError: There is nothing of that name.
        EdgeLLMError: One of its kinds; says what is wrong with the file.
        ValueError: A window is longer than the model's context.
    """
    path = Path(path)
    if starts_with(path, EDGE_MAGIC):
        return EdgeModel(path, context=context, threads=threads, isa=isa, kv=kv)
    return SourceModel(path, context=context, engine=engine, threads=threads)


def starts_with(path: Path, magic: bytes) -> bool:
    """Whether a file begins so; a folder does not.

    Raises:
        ModelNotFoundError: There is nothing of that name.
    """
    if path.is_dir():
        return False
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _count(description: ModelDescription) -> int:
    return sum(math.prod(shape) for shape in canonical_shapes(description).values())
