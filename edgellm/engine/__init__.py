"""LLM, sessions, generation, sampling parameters, statistics."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.engine.llm import LLM
    from edgellm.engine.model import Message
    from edgellm.engine.results import Completion, Delta, FinishReason, Stats
    from edgellm.engine.sampling import SamplingParams
    from edgellm.engine.session import Session

__all__ = [
    "LLM",
    "Completion",
    "Delta",
    "FinishReason",
    "Message",
    "SamplingParams",
    "Session",
    "Stats",
]

_MODULES = {
    "LLM": "llm",
    "Message": "model",
    "SamplingParams": "sampling",
    "Session": "session",
} | dict.fromkeys(("Completion", "Delta", "FinishReason", "Stats"), "results")


def __getattr__(name: str) -> object:
    # Its modules without text (tuning, baselines) do not wait for tokenizers, nor hold its memory.
    if name in _MODULES:
        return getattr(importlib.import_module(f"edgellm.engine.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'edgellm.engine' has no attribute {name!r}")
