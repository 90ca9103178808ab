"""The C library's calls: arrays in, arrays and typed errors out.

This is the only place that turns arrays into addresses. Every call checks dtype, shape and
contiguity and keeps the array alive until the C side returns.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from edgellm._native import abi
from edgellm._native.library import load
from edgellm.errors import (
    ContextFullError,
    EdgeLLMError,
    FormatError,
    NativeError,
    OutOfMemoryError,
    UnsupportedDeviceError,
)
from edgellm.types import Float32Array, TensorFormat

__all__ = [
    "KernelInfo",
    "ModelInfo",
    "NativeModel",
    "NativeSession",
    "Sampling",
    "SessionInfo",
    "kernels",
    "probe_read",
    "quantize",
    "sample",
    "tensor_bytes",
]

# Most tokens one step may return.
_STEP_CAPACITY = 64

_ERRORS: dict[int, type[EdgeLLMError]] = {
    abi.STATUS_FORMAT: FormatError,
    abi.STATUS_UNSUPPORTED: UnsupportedDeviceError,
    abi.STATUS_OUT_OF_MEMORY: OutOfMemoryError,
    abi.STATUS_CONTEXT_FULL: ContextFullError,
    abi.STATUS_NONFINITE: NativeError,
    abi.STATUS_BUSY: NativeError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """`elm_model_info`: sizes of an open model; counts in tokens, sizes in bytes."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    num_tokens: int
    max_context: int
    num_threads: int
    file_bytes: int
    weight_bytes: int
    weight_bytes_per_token: int
    model_id: str
    isa: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """`elm_session_info`: lengths in tokens, sizes in bytes, passes and barriers since creation."""

    context_length: int
    num_tokens: int
    chunk_length: int
    kv_bytes: int
    scratch_bytes: int
    num_passes: int
    num_barriers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """`elm_kernel_info`: one kernel, and why this CPU cannot use it if it cannot."""

    op: str
    name: str
    isa: str
    is_compiled: bool
    is_supported: bool
    is_chosen: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`elm_sampling`; the meaning of each field is in edgellm.h. The C side checks the ranges."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def to_struct(self) -> abi.Sampling:
        """The C struct; it keeps the bias arrays alive."""
        ids = (ctypes.c_int32 * len(self.logit_bias))(*self.logit_bias.keys())
        values = (ctypes.c_float * len(self.logit_bias))(*self.logit_bias.values())
        return abi.Sampling(
            struct_size=ctypes.sizeof(abi.Sampling),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            bias_ids=ctypes.cast(ids, ctypes.POINTER(ctypes.c_int32)),
            bias_values=ctypes.cast(values, ctypes.POINTER(ctypes.c_float)),
            num_bias=len(self.logit_bias),
        )


class NativeModel:
    """An open `.edge` file; shareable between threads. Closing it closes its sessions first.

    Args:
        path: the file.
        threads: in the model's pool; 0: one per CPU this process may use.
        isa: force an instruction set, such as "ref" or "avx2"; None: the fastest supported.
        verify: check the CRC of the weights too.

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
    ) -> None:
        self._lib = load()
        self._handle = ctypes.c_void_p()
        self._sessions: weakref.WeakSet[NativeSession] = weakref.WeakSet()
        self._lock = threading.Lock()
        options = abi.ModelOptions()
        self._lib.elm_model_options_default(byref(options))
        options.num_threads = _int32(threads, "threads")
        options.isa = None if isa is None else isa.encode()
        options.verify = verify
        error = abi.Error()
        status = self._lib.elm_model_open(
            os.fsencode(Path(path)), byref(options), byref(self._handle), byref(error)
        )
        _check(status, error)
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
        _check(self._lib.elm_model_plan(self._open(), None, 0, byref(length), byref(error)), error)
        text = ctypes.create_string_buffer(length.value + 1)
        status = self._lib.elm_model_plan(
            self._open(), text, len(text), byref(length), byref(error)
        )
        _check(status, error)
        return text.value.decode()

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
        _check(status, error)
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
        options.context_length = _int32(context, "context")
        options.chunk_length = _int32(chunk, "chunk")
        return options

    def _get_info(self) -> ModelInfo:
        raw = abi.ModelInfo(struct_size=ctypes.sizeof(abi.ModelInfo))
        error = abi.Error()
        _check(self._lib.elm_model_get_info(self._handle, byref(raw), byref(error)), error)
        fields = _fields(raw, "struct_size", "reserved")
        return ModelInfo(**fields | {"model_id": bytes(raw.model_id).hex()})


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
        _check(status, self._error)

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
            _check(status, self._error)
        return SessionInfo(**_fields(raw, "struct_size"))

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
        tokens = _ids_array(ids)
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
            _check(status, self._error)
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
                _check(status, self._error)
            return self._ids[: self._num_ids.value]

    def logits(self) -> Float32Array:
        """(vocab,) float32: logits after the last token of the sequence."""
        logits = np.empty(self._vocab_size, np.float32)
        with self._lock:
            status = self._lib.elm_session_logits(self._open(), logits.ctypes.data, self._refs[1])
            _check(status, self._error)
        return logits

    def truncate(self, num_tokens: int) -> None:
        """Drops all tokens from position `num_tokens` on."""
        with self._lock:
            _check(
                self._lib.elm_session_truncate(self._open(), num_tokens, self._refs[1]),
                self._error,
            )

    def _open(self) -> ctypes.c_void_p:
        if not self._handle:
            raise ValueError("the session is closed")
        return self._handle


def sample(
    logits: Float32Array,
    sampling: Sampling,
    history: Sequence[int] = (),
    *,
    num_generated: int = 0,
    position: int = 0,
) -> int:
    """The sampler alone.

    Args:
        logits: (n,) float32, C-contiguous.
        sampling: how to choose.
        history: the whole sequence; its last `num_generated` tokens were generated.
        num_generated: at most the length of `history`.
        position: keys the random numbers.

    Returns:
        A token id in [0, n).

    Raises:
        ValueError: a parameter or an id is out of range.
        NativeError: a logit is NaN or +infinity.
    """
    _require(logits, np.float32, 1, "logits")
    past = _ids_array(history)
    error = abi.Error()
    token = ctypes.c_int32()
    status = load().elm_sample(
        logits.ctypes.data,
        logits.size,
        byref(sampling.to_struct()),
        past.ctypes.data,
        past.size,
        num_generated,
        position,
        byref(token),
        byref(error),
    )
    _check(status, error)
    return token.value


def kernels() -> list[KernelInfo]:
    """Every kernel of this build, in the library's order."""
    library = load()
    rows = []
    for index in range(library.elm_kernel_count()):
        raw = abi.KernelInfo(struct_size=ctypes.sizeof(abi.KernelInfo))
        error = abi.Error()
        _check(library.elm_kernel_get(index, byref(raw), byref(error)), error)
        fields = _fields(raw, "struct_size")
        flags = {name: bool(fields[name]) for name in fields if name.startswith("is_")}
        rows.append(KernelInfo(**fields | flags))
    return rows


def probe_read(num_bytes: int, threads: int = 0) -> float:
    """Read bandwidth of this machine.

    Args:
        num_bytes: size of the buffer that is read.
        threads: 0: one per CPU this process may use.

    Returns:
        Bytes per second.
    """
    error = abi.Error()
    rate = ctypes.c_double()
    status = load().elm_probe_read(num_bytes, _int32(threads, "threads"), byref(rate), byref(error))
    _check(status, error)
    return rate.value


def tensor_bytes(tensor_format: TensorFormat, rows: int, cols: int) -> int:
    """Bytes of a (rows, cols) tensor in `tensor_format`; 0 if it is not representable."""
    size: int = load().elm_tensor_bytes(int(tensor_format), rows, cols)
    return size


def quantize(
    tensor_format: TensorFormat,
    weights: Float32Array,
    out: npt.NDArray[np.uint8],
    *,
    first_row: int = 0,
    rows: int | None = None,
) -> None:
    """Quantises rows [first_row, first_row + n) of a (rows, cols) tensor into `out`.

    Calls on disjoint ranges may run in several threads at once; the bytes do not depend on how the
    rows are cut.

    Args:
        tensor_format: E4 or E8.
        weights: (n, cols) float32, C-contiguous; n is a multiple of 16 unless the range ends the
            tensor.
        out: the whole tensor's buffer, `tensor_bytes(tensor_format, rows, cols)` long; uint8.
        first_row: a multiple of 16.
        rows: of the whole tensor; None: first_row + n.

    Raises:
        ValueError: a shape is wrong or a weight is not finite.
    """
    _require(weights, np.float32, 2, "weights")
    _require(out, np.uint8, 1, "out")
    num_rows, cols = weights.shape
    rows = first_row + num_rows if rows is None else rows
    needed = tensor_bytes(tensor_format, rows, cols)
    if out.size != needed or not out.flags.writeable:
        raise ValueError(f"out must be a writable buffer of {needed} bytes, not {out.size}")
    error = abi.Error()
    status = load().elm_quantize(
        int(tensor_format),
        weights.ctypes.data,
        first_row,
        num_rows,
        rows,
        cols,
        out.ctypes.data,
        byref(error),
    )
    _check(status, error)


def _check(status: int, error: abi.Error) -> None:
    if status != abi.STATUS_OK:
        _fail(status, error.message.decode("utf-8", "replace"))


def _fail(status: int, message: str) -> NoReturn:
    if status == abi.STATUS_INVALID_ARGUMENT:
        raise ValueError(message)
    if status == abi.STATUS_IO:
        raise OSError(message)
    raise _ERRORS.get(status, NativeError)(message)


def _fields(raw: ctypes.Structure, *skip: str) -> dict[str, Any]:
    names = [entry[0] for entry in raw._fields_ if entry[0] not in skip]
    values = {name: getattr(raw, name) for name in names}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def _int32(value: int, what: str) -> int:
    if not 0 <= value < 2**31:
        raise ValueError(f"{what} is {value}; it must be 0 to {2**31 - 1}")
    return value


def _ids_array(ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    array = np.asarray(ids if len(ids) else [], dtype=np.int64).reshape(-1)
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise ValueError("a token id is negative or above 2147483647")
    return np.ascontiguousarray(array, dtype=np.int32)


def _require(array: npt.NDArray[Any], dtype: type, ndim: int, what: str) -> None:
    if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
        raise ValueError(
            f"{what} must be a C-contiguous {ndim}-d {np.dtype(dtype)} array,"
            f" not {array.ndim}-d {array.dtype}"
        )
