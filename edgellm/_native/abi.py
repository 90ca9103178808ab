"""The structs and prototypes of `edgellm.h`, field by field.

A test compares every layout with what the library itself says (`elm_abi_layout`).
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import ClassVar

ABI_VERSION = 1

STATUS_OK = 0
STATUS_INVALID_ARGUMENT = 1
STATUS_IO = 2
STATUS_FORMAT = 3
STATUS_UNSUPPORTED = 4
STATUS_OUT_OF_MEMORY = 5
STATUS_CONTEXT_FULL = 6
STATUS_NONFINITE = 7
STATUS_BUSY = 8


class Error(ctypes.Structure):
    """`elm_error`."""

    _fields_: ClassVar = [("code", c_int32), ("message", c_char * 508)]


class Allocator(ctypes.Structure):
    """`elm_allocator`; never filled from Python, here for the layout."""

    _fields_: ClassVar = [("context", c_void_p), ("allocate", c_void_p), ("release", c_void_p)]


class ModelOptions(ctypes.Structure):
    """`elm_model_options`."""

    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("num_threads", c_int32),
        ("isa", c_char_p),
        ("verify", c_int32),
        ("reserved", c_int32),
        ("allocator", POINTER(Allocator)),
        ("log", c_void_p),
        ("log_context", c_void_p),
    ]


class ModelInfo(ctypes.Structure):
    """`elm_model_info`."""

    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("ffn_size", c_int32),
        ("vocab_size", c_int32),
        ("num_tokens", c_int32),
        ("max_context", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
        ("file_bytes", c_uint64),
        ("weight_bytes", c_uint64),
        ("weight_bytes_per_token", c_uint64),
        ("model_id", c_uint8 * 32),
        ("isa", c_char * 32),
    ]


class SessionOptions(ctypes.Structure):
    """`elm_session_options`."""

    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("context_length", c_int32),
        ("chunk_length", c_int32),
        ("kv_format", c_int32),
        ("decode_threads", c_int32),
        ("prefill_threads", c_int32),
    ]


class SessionInfo(ctypes.Structure):
    """`elm_session_info`."""

    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("context_length", c_int32),
        ("num_tokens", c_int32),
        ("chunk_length", c_int32),
        ("kv_format", c_int32),
        ("decode_threads", c_int32),
        ("prefill_threads", c_int32),
        ("reserved", c_int32),
        ("kv_bytes", c_uint64),
        ("scratch_bytes", c_uint64),
        ("num_passes", c_uint64),
        ("num_barriers", c_uint64),
    ]


class Sampling(ctypes.Structure):
    """`elm_sampling`."""

    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("seed", c_uint64),
        ("bias_ids", POINTER(c_int32)),
        ("bias_values", POINTER(c_float)),
        ("num_bias", c_uint32),
        ("reserved", c_uint32),
    ]


class KernelInfo(ctypes.Structure):
    """`elm_kernel_info`."""

    _fields_: ClassVar = [
        ("struct_size", c_uint32),
        ("is_compiled", c_int32),
        ("is_supported", c_int32),
        ("is_chosen", c_int32),
        ("op", c_char * 32),
        ("name", c_char * 64),
        ("isa", c_char * 32),
        ("reason", c_char * 96),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "elm_error": Error,
    "elm_allocator": Allocator,
    "elm_model_options": ModelOptions,
    "elm_model_info": ModelInfo,
    "elm_session_options": SessionOptions,
    "elm_session_info": SessionInfo,
    "elm_sampling": Sampling,
    "elm_kernel_info": KernelInfo,
}


def layout(name: str, struct: type[ctypes.Structure]) -> str:
    """One line as `elm_abi_layout` writes it: name, size, then each field and its offset."""
    fields = [f"{field[0]} {getattr(struct, field[0]).offset}" for field in struct._fields_]
    return " ".join([name, str(ctypes.sizeof(struct)), *fields])


_ERROR = POINTER(Error)
_SIZE = POINTER(c_size_t)

# name: (result, arguments). Handles and data are void pointers.
PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "elm_status_name": (c_char_p, [c_int32]),
    "elm_version": (c_char_p, []),
    "elm_abi_version": (c_uint32, []),
    "elm_abi_layout": (c_size_t, [c_char_p, c_size_t]),
    "elm_model_options_default": (None, [POINTER(ModelOptions)]),
    "elm_model_open": (c_int32, [c_char_p, POINTER(ModelOptions), POINTER(c_void_p), _ERROR]),
    "elm_model_close": (None, [c_void_p]),
    "elm_model_get_info": (c_int32, [c_void_p, POINTER(ModelInfo), _ERROR]),
    "elm_model_plan": (c_int32, [c_void_p, c_char_p, c_size_t, _SIZE, _ERROR]),
    "elm_session_options_default": (None, [POINTER(SessionOptions)]),
    "elm_session_create": (
        c_int32,
        [c_void_p, POINTER(SessionOptions), POINTER(c_void_p), _ERROR],
    ),
    "elm_session_destroy": (None, [c_void_p]),
    "elm_session_bytes": (
        c_int32,
        [c_void_p, POINTER(SessionOptions), POINTER(c_uint64), POINTER(c_uint64), _ERROR],
    ),
    "elm_session_get_info": (c_int32, [c_void_p, POINTER(SessionInfo), _ERROR]),
    "elm_session_prefill": (c_int32, [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, _ERROR]),
    "elm_session_step": (
        c_int32,
        [c_void_p, POINTER(Sampling), POINTER(c_int32), c_size_t, _SIZE, _ERROR],
    ),
    "elm_session_logits": (c_int32, [c_void_p, c_void_p, _ERROR]),
    "elm_session_truncate": (c_int32, [c_void_p, c_size_t, _ERROR]),
    "elm_sampling_default": (None, [POINTER(Sampling)]),
    "elm_sample": (
        c_int32,
        [
            c_void_p,
            c_size_t,
            POINTER(Sampling),
            c_void_p,
            c_size_t,
            c_size_t,
            c_uint64,
            POINTER(c_int32),
            _ERROR,
        ],
    ),
    "elm_kernel_count": (c_size_t, []),
    "elm_kernel_get": (c_int32, [c_size_t, POINTER(KernelInfo), _ERROR]),
    "elm_probe_read": (c_int32, [c_uint64, c_int32, POINTER(c_double), _ERROR]),
    "elm_probe_int8": (c_int32, [c_char_p, c_int32, POINTER(c_double), _ERROR]),
    "elm_tensor_bytes": (c_uint64, [c_int32, c_uint64, c_uint64]),
    "elm_quantize": (
        c_int32,
        [c_int32, c_void_p, c_void_p, c_uint64, c_uint64, c_uint64, c_uint64, c_void_p, _ERROR],
    ),
}
