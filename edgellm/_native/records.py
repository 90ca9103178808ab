"""What the C library is told and answers, as Python records."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

from edgellm._native import abi

__all__ = ["KV_FORMATS", "KernelInfo", "ModelInfo", "Sampling", "SessionInfo"]


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


# `elm_kv_format` by name.
KV_FORMATS = {"f16": 1, "int8": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """`elm_session_info`: lengths in tokens, sizes in bytes, passes and barriers since creation.

    Attributes:
        kv_format: "f16" or "int8".
    """

    context_length: int
    num_tokens: int
    chunk_length: int
    kv_format: str
    decode_threads: int
    prefill_threads: int
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
