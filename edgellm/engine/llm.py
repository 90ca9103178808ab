"""The door to a model: open it, ask it, close it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgellm._native import ModelInfo
from edgellm.engine.model import Model
from edgellm.engine.sampling import SamplingParams
from edgellm.engine.session import Session
from edgellm.engine.tuning import default_folder

__all__ = ["LLM"]


class LLM(Session):
    """A model and its default session.

    Use it as a context manager, or call `close`. It can be shared between threads: calls on it take
    turns, and `session()` makes more sequences that run side by side.

    Args:
        path: an `.edge` file.
        context: tokens the KV cache holds; None: the model's longest, at most 8,192.
        threads: None: up to one per CPU this process may use, without cores that are much slower;
            how many are fastest for decode and for prefill is measured when the model is first
            used, which takes less than a second, and kept in `cache`.
        isa: force an instruction set, such as "ref" or "avx2"; None: the fastest supported.
        kv: numbers of the KV cache, "f16" or "int8"; None: what the file says.
        device: a backend of `edgellm.devices`.
        cache: folder for what is measured on this machine; None: ~/.cache/edgellm.

    Raises:
        ModelNotFoundError: there is no such file.
        FormatError: it is not a valid `.edge` file.
        UnsupportedDeviceError: this CPU lacks `isa`, or the device cannot be used.
        OutOfMemoryError: model, KV cache and scratch do not fit; names a context that would.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        context: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
        kv: str | None = None,
        device: str = "cpu",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        folder = default_folder() if cache is None else Path(cache)
        model = Model(path, threads=threads, isa=isa, kv=kv, device=device, cache=folder)
        try:
            super().__init__(model, context)
        except BaseException:
            model.close()
            raise

    def close(self) -> None:
        """Frees the model and all its sessions."""
        super().close()
        self._model.close()

    def session(self, context: int | None = None) -> Session:
        """Another sequence of this model with a KV cache of its own.

        Args:
            context: tokens; None: as many as the default session.
        """
        return Session(self._model, self.context if context is None else context)

    @property
    def info(self) -> ModelInfo:
        """Sizes of the model."""
        return self._model.info

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return self._model.eos_ids

    @property
    def sampling(self) -> SamplingParams:
        """The default: what the model's makers recommend, or greedy."""
        return self._model.default_sampling()

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, with the beginning-of-text token if the model wants one."""
        return self._model.tokenize(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids, without control tokens."""
        return self._model.tokenizer.decode(list(ids))

    def plan(self) -> str:
        """The execution plan as text, one step a line."""
        return self._model.native.plan()
