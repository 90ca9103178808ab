"""An open model and its sessions.

Arrays become addresses here and in `functions` only. Every call checks dtype, shape and contiguity
and keeps the array alive until the C side returns.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from edgellm._native import abi
from edgellm._native.library import load
from edgellm._native.marshal import check, fields, ids_array, int32
from edgellm._native.records import KV_FORMATS, ModelInfo, SessionInfo
from edgellm.types import Float32Array

__all__ = ["NativeModel", "NativeSession"]

# Most tokens one step may return.
_STEP_CAPACITY = 64


class NativeModel:
    """An open `.edge` file; shareable between threads. Closing it closes its sessions first.

    Args:
        path: the file.
        threads: in the model's pool; 0: one per CPU this process may use, without much slower ones.
        isa: force an instruction set, such as "ref" or "avx2"; None: the fastest supported.
        verify: check the CRC of the weights too.
        kv: numbers of the KV cache of its sessions, "f16" or "int8"; None: what the file says.

    Raises:
        OSError, FormatError, UnsupportedDeviceError, OutOfMemoryError: as the C library says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int = 0,
        isa: str | None = None,
        verify: bool = False,
        kv: str | None = None,
    ) -> None:
        if kv is not None and kv not in KV_FORMATS:
            raise ValueError(f"kv is {kv!r}; give one of {', '.join(KV_FORMATS)}")
        self._kv_format = 0 if kv is None else KV_FORMATS[kv]
        self._threads = (0, 0)
        self._lib = load()
        self._handle = ctypes.c_void_p()
        self._sessions: weakref.WeakSet[NativeSession] = weakref.WeakSet()
        self._lock = threading.Lock()
        options = abi.ModelOptions()
        self._lib.elm_model_options_default(byref(options))
        options.num_threads = int32(threads, "threads")
        options.isa = None if isa is None else isa.encode()
        options.verify = verify
        error = abi.Error()
        status = self._lib.elm_model_open(
            os.fsencode(Path(path)), byref(options), byref(self._handle), byref(error)
        )
        check(status, error)
        self.info = self._get_info()

    def __enter__(self) -> NativeModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def close(self) -> None:
        """Closes the model and its sessions; a running call is waited for."""
        with self._lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
            for session in list(self._sessions):
                session.close()
            self._lib.elm_model_close(handle)

    def plan(self) -> str:
        """The execution plan as text, one step a line."""
        error = abi.Error()
        length = ctypes.c_size_t()
        check(self._lib.elm_model_plan(self._open(), None, 0, byref(length), byref(error)), error)
        text = ctypes.create_string_buffer(length.value + 1)
        status = self._lib.elm_model_plan(
            self._open(), text, len(text), byref(length), byref(error)
        )
        check(status, error)
        return text.value.decode()

    @property
    def threads(self) -> tuple[int, int]:
        """How many take part in decode and in prefill passes of sessions made from now on."""
        decode, prefill = self._threads
        return decode or self.info.num_threads, prefill or self.info.num_threads

    def use_threads(self, decode: int, prefill: int) -> None:
        """Sets how many threads of the pool take part; 0: all. Sessions that exist keep theirs."""
        self._threads = int32(decode, "decode"), int32(prefill, "prefill")

    def session_bytes(self, context: int = 0, chunk: int = 0) -> tuple[int, int]:
        """Memory a session would take.

        Args:
            context: tokens the KV cache holds; 0: the model's longest.
            chunk: most tokens computed in one pass; 0: chosen.

        Returns:
            (KV cache, everything else), bytes.
        """
        error = abi.Error()
        kv, scratch = ctypes.c_uint64(), ctypes.c_uint64()
        options = self._session_options(context, chunk)
        status = self._lib.elm_session_bytes(
            self._open(), byref(options), byref(kv), byref(scratch), byref(error)
        )
        check(status, error)
        return kv.value, scratch.value

    def create_session(self, context: int = 0, chunk: int = 0) -> NativeSession:
        """A new, empty sequence; arguments as for `session_bytes`."""
        options = self._session_options(context, chunk)
        with self._lock:
            session = NativeSession(self, self._open(), options)
            self._sessions.add(session)
        return session

    def _open(self) -> ctypes.c_void_p:
        if not self._handle:
            raise ValueError("the model is closed")
        return self._handle

    def _session_options(self, context: int, chunk: int) -> abi.SessionOptions:
        options = abi.SessionOptions()
        self._lib.elm_session_options_default(byref(options))
        options.context_length = int32(context, "context")
        options.chunk_length = int32(chunk, "chunk")
        options.kv_format = self._kv_format
        options.decode_threads, options.prefill_threads = self._threads
        return options

    def _get_info(self) -> ModelInfo:
        raw = abi.ModelInfo(struct_size=ctypes.sizeof(abi.ModelInfo))
        error = abi.Error()
        check(self._lib.elm_model_get_info(self._handle, byref(raw), byref(error)), error)
        values = fields(raw, "struct_size", "reserved")
        return ModelInfo(**values | {"model_id": bytes(raw.model_id).hex()})


class NativeSession:
    """One sequence of tokens and its KV cache; made by `NativeModel.create_session`.

    Calls from several threads take turns; the caller sees to it that their order makes sense.
    """

    def __init__(
        self, model: NativeModel, handle: ctypes.c_void_p, options: abi.SessionOptions
    ) -> None:
        self._lib = load()
        self._model = model  # keeps it open
        self._vocab_size = model.info.vocab_size
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._error = abi.Error()
        self._ids = (ctypes.c_int32 * _STEP_CAPACITY)()
        self._num_ids = ctypes.c_size_t()
        self._refs = (byref(self._num_ids), byref(self._error))
        status = self._lib.elm_session_create(
            handle, byref(options), byref(self._handle), byref(self._error)
        )
        check(status, self._error)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def close(self) -> None:
        """Frees the session's memory; a running call is waited for."""
        with self._lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._lib.elm_session_destroy(handle)

    def info(self) -> SessionInfo:
        """Lengths, sizes and counters as they are now."""
        raw = abi.SessionInfo(struct_size=ctypes.sizeof(abi.SessionInfo))
        with self._lock:
            status = self._lib.elm_session_get_info(self._open(), byref(raw), self._refs[1])
            check(status, self._error)
        values = fields(raw, "struct_size", "reserved")
        (kv_format,) = (name for name, value in KV_FORMATS.items() if value == raw.kv_format)
        return SessionInfo(**values | {"kv_format": kv_format})

    def prefill(
        self, ids: Sequence[int] | npt.NDArray[np.int32], num_logits: int = 0
    ) -> Float32Array:
        """Appends tokens and computes them; if they do not fit, nothing changes.

        Args:
            ids: (n,) token ids.
            num_logits: how many of the last positions' logits to return, at most n.

        Returns:
            (num_logits, vocab) float32.

        Raises:
            ContextFullError: with the length asked for and the context.
        """
        tokens = ids_array(ids)
        if not 0 <= num_logits <= tokens.size:
            raise ValueError(f"num_logits is {num_logits}; it must be 0 to {tokens.size}")
        logits = np.empty((num_logits, self._vocab_size), np.float32)
        with self._lock:
            status = self._lib.elm_session_prefill(
                self._open(),
                tokens.ctypes.data,
                tokens.size,
                logits.ctypes.data if num_logits else None,
                num_logits,
                self._refs[1],
            )
            check(status, self._error)
        return logits

    def step(self, sampling: abi.Sampling) -> list[int]:
        """Samples the next token, appends it and returns it; more than one may come back.

        Args:
            sampling: made once per answer by `Sampling.to_struct`.
        """
        with self._lock:
            status = self._lib.elm_session_step(
                self._open(), sampling, self._ids, _STEP_CAPACITY, *self._refs
            )
            if status:
                check(status, self._error)
            return self._ids[: self._num_ids.value]

    def logits(self) -> Float32Array:
        """(vocab,) float32: logits after the last token of the sequence."""
        logits = np.empty(self._vocab_size, np.float32)
        with self._lock:
            status = self._lib.elm_session_logits(self._open(), logits.ctypes.data, self._refs[1])
            check(status, self._error)
        return logits

    def truncate(self, num_tokens: int) -> None:
        """Drops all tokens from position `num_tokens` on."""
        with self._lock:
            check(
                self._lib.elm_session_truncate(self._open(), num_tokens, self._refs[1]),
                self._error,
            )

    def _open(self) -> ctypes.c_void_p:
        if not self._handle:
            raise ValueError("the session is closed")
        return self._handle
