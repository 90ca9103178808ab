"""LLM, sessions, generation, sampling parameters, statistics."""

from __future__ import annotations

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
