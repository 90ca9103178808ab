"""The only ctypes of the project: the C library as Python objects and functions."""

from __future__ import annotations

from edgellm._native.functions import (
    kernels,
    probe_int8,
    probe_read,
    quantize,
    sample,
    tensor_bytes,
)
from edgellm._native.library import trim_heap, version
from edgellm._native.model import NativeModel, NativeSession
from edgellm._native.records import KV_FORMATS, KernelInfo, ModelInfo, Sampling, SessionInfo

__all__ = [
    "KV_FORMATS",
    "KernelInfo",
    "ModelInfo",
    "NativeModel",
    "NativeSession",
    "Sampling",
    "SessionInfo",
    "kernels",
    "probe_int8",
    "probe_read",
    "quantize",
    "sample",
    "tensor_bytes",
    "trim_heap",
    "version",
]
