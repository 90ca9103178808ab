"""The calls that need no model: sampler, kernels, bandwidth, quantisation."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref

import numpy as np
import numpy.typing as npt

from edgellm._native import abi
from edgellm._native.library import load
from edgellm._native.marshal import check, fields, ids_array, int32, require
from edgellm._native.records import KernelInfo, Sampling
from edgellm.types import Float32Array, TensorFormat

__all__ = ["kernels", "probe_int8", "probe_read", "quantize", "sample", "tensor_bytes"]


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
    require(logits, np.float32, 1, "logits")
    past = ids_array(history)
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
    check(status, error)
    return token.value


def kernels() -> list[KernelInfo]:
    """Every kernel of this build, in the library's order."""
    library = load()
    rows = []
    for index in range(library.elm_kernel_count()):
        raw = abi.KernelInfo(struct_size=ctypes.sizeof(abi.KernelInfo))
        error = abi.Error()
        check(library.elm_kernel_get(index, byref(raw), byref(error)), error)
        values = fields(raw, "struct_size")
        flags = {name: bool(values[name]) for name in values if name.startswith("is_")}
        rows.append(KernelInfo(**values | flags))
    return rows


def probe_read(num_bytes: int, threads: int) -> float:
    """Read bandwidth of this machine.

    Args:
        num_bytes: size of the buffer that is read, at least 4,096.
        threads: 1 to 256.

    Returns:
        Bytes per second.

    Raises:
        ValueError: a number is out of range.
    """
    error = abi.Error()
    rate = ctypes.c_double()
    status = load().elm_probe_read(num_bytes, int32(threads, "threads"), byref(rate), byref(error))
    check(status, error)
    return rate.value


def probe_int8(isa: str, threads: int) -> float:
    """Int8 peak of an instruction set on this machine.

    Args:
        isa: its name, as `kernels` gives it.
        threads: 1 to 256.

    Returns:
        Operations per second; a multiply and an add are two.

    Raises:
        ValueError: no such instruction set, or not so many threads.
        UnsupportedDeviceError: this CPU does not have it.
    """
    error = abi.Error()
    rate = ctypes.c_double()
    count = int32(threads, "threads")
    status = load().elm_probe_int8(isa.encode(), count, byref(rate), byref(error))
    check(status, error)
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
    importance: Float32Array | None = None,
    first_row: int = 0,
    rows: int | None = None,
) -> None:
    """Quantises rows [first_row, first_row + n) of a (rows, cols) tensor into `out`.

    Calls on disjoint ranges may run in several threads at once; the bytes do not depend on how the
    rows are cut.

    Args:
        tensor_format: E4, E5 or E8.
        weights: (n, cols) float32, C-contiguous; n is a multiple of 16 unless the range ends the
            tensor.
        out: the whole tensor's buffer, `tensor_bytes(tensor_format, rows, cols)` long; uint8.
        importance: (cols,) float32 >= 0, the mean square of each column's activation: weights the
            squared errors that E4 and E5 minimise; None: all alike.
        first_row: a multiple of 16.
        rows: of the whole tensor; None: first_row + n.

    Raises:
        ValueError: a shape is wrong or a weight is not finite.
    """
    require(weights, np.float32, 2, "weights")
    require(out, np.uint8, 1, "out")
    num_rows, cols = weights.shape
    if importance is not None:
        require(importance, np.float32, 1, "importance")
        if importance.size != cols:
            raise ValueError(f"importance has {importance.size} numbers for {cols} columns")
    rows = first_row + num_rows if rows is None else rows
    needed = tensor_bytes(tensor_format, rows, cols)
    if out.size != needed or not out.flags.writeable:
        raise ValueError(f"out must be a writable buffer of {needed} bytes, not {out.size}")
    error = abi.Error()
    status = load().elm_quantize(
        int(tensor_format),
        weights.ctypes.data,
        None if importance is None else importance.ctypes.data,
        first_row,
        num_rows,
        rows,
        cols,
        out.ctypes.data,
        byref(error),
    )
    check(status, error)
