"""The forward pass of a foreign model in float32: what its exported file is measured against."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

from edgellm.errors import EdgeLLMError, FormatError, MissingExtraError, UnsupportedModelError
from edgellm.exporters.plan import plan_tensors
from edgellm.exporters.source import ModelSource
from edgellm.models import SourceTensor, apply_rewrite
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array, Int32Array

__all__ = ["ForwardEngine", "SourceForward", "open_forward"]

ForwardEngine: TypeAlias = Literal["auto", "transformers", "numpy"]

_PACKAGES: Final = ("torch", "transformers")


class SourceForward(Protocol):
    """A model that computes one sequence at a time."""

    engine: str

    def start(self, ids: Int32Array) -> None:
        """Computes a sequence of (n,) token ids up to the head."""
        ...

    def logits(self, start: int, stop: int) -> Float32Array:
        """(stop - start, vocab_size) float32: logits after those tokens of the sequence."""
        ...


def open_forward(
    source: ModelSource,
    path: Path,
    engine: ForwardEngine = "auto",
    *,
    threads: int | None = None,
    is_kept: bool = True,
) -> SourceForward:
    """Opens a model to run it.

    Args:
        source: The model, from `open_source`.
        path: The file or folder it was opened from.
        engine: "transformers", "numpy" (our reference forward pass), or "auto": transformers where
            it and torch are installed and read the model, which may not be ONNX.
        threads: For transformers; None: as torch chooses.
        is_kept: Whether the numpy engine keeps the weights in memory, 4 bytes each, or reads them
            at each use.

    Raises:
        FormatError: Its tensors are not those of the architecture, or a weight is not finite.
        MissingExtraError: transformers was asked for and is not installed.
        EdgeLLMError: transformers could not load it.
        UnsupportedModelError: transformers was asked for an ONNX model.
    """
    plan_tensors(source, "q8")  # checks that all tensors are there
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if engine == "numpy" or (engine == "auto" and (missing or source.kind == "onnx")):
        return _NumpyForward(source, is_kept)
    if source.kind == "onnx":
        raise UnsupportedModelError(f"transformers does not read {path}: choose the numpy engine")
    if missing:
        raise MissingExtraError(f"{' and '.join(missing)} missing: pip install {' '.join(missing)}")
    return _TransformersForward(source, path, threads)


class _NumpyForward:
    def __init__(self, source: ModelSource, is_kept: bool) -> None:
        self.engine = "numpy"
        sources = source.spec.sources(source.kind, source.description)
        items = {item.canonical_name: item for item in sources}
        get = functools.partial(_canonical_tensor, source, items)
        self._model = ReferenceModel(source.description, functools.cache(get) if is_kept else get)
        self._hidden = np.empty((0, 0), np.float32)

    def start(self, ids: Int32Array) -> None:
        self._hidden = self._model.hidden(ids)

    def logits(self, start: int, stop: int) -> Float32Array:
        return self._model.logits(self._hidden[start:stop])


class _TransformersForward:
    def __init__(self, source: ModelSource, path: Path, threads: int | None) -> None:
        import torch
        import transformers

        self._torch = torch
        if threads is not None:
            torch.set_num_threads(threads)
        is_file = source.kind == "gguf"
        with _quiet(transformers):
            try:
                self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    path.parent if is_file else path,
                    **({"gguf_file": path.name} if is_file else {"use_safetensors": True}),
                    dtype=torch.float32,
                    local_files_only=True,
                    trust_remote_code=False,
                ).eval()
            except Exception as error:  # of a dozen kinds, its own, torch's and Python's
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise EdgeLLMError(
                    f"transformers cannot load {path}: {reason}; our own forward pass needs no"
                    " transformers: choose the numpy engine"
                ) from None
        self.engine = f"transformers {transformers.__version__}"
        self._hidden: Any = None

    def start(self, ids: Int32Array) -> None:
        # A piece of the head at a time: all logits of a window may take more memory than the model.
        with self._torch.inference_mode():
            tokens = self._torch.from_numpy(ids.astype(np.int64))[None]
            self._hidden = self._model.base_model(tokens, use_cache=False).last_hidden_state[0]

    def logits(self, start: int, stop: int) -> Float32Array:
        with self._torch.inference_mode():
            rows: Float32Array = self._model.lm_head(self._hidden[start:stop]).numpy()
        return rows


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keeps transformers from printing while a model loads."""
    logging = transformers.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def _canonical_tensor(
    source: ModelSource, items: Mapping[str, SourceTensor], name: str
) -> Float32Array:
    item = items[name]
    rows = item.shape[0] if len(item.shape) == 2 else 1
    values = source.tensors.rows(item.source_name, 0, rows)
    if not np.isfinite(values).all():
        raise FormatError(f"source tensor {item.source_name!r} holds NaN or infinity")
    return apply_rewrite(item.rewrite, values.reshape(item.shape), source.description)
