"""Run INT4 language models on the device in front of you.

with LLM("model.edge") as llm:
    print(llm.chat([{"role": "user", "content": "Hello"}]).text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.engine import LLM, Completion, Delta, Message, SamplingParams, Session, Stats

__all__ = [
    "LLM",
    "Completion",
    "Delta",
    "EdgeLLMError",
    "Message",
    "SamplingParams",
    "Session",
    "Stats",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # The engine loads numpy and tokenizers; `edgellm --help` waits for neither.
    if name in __all__:
        return getattr(importlib.import_module("edgellm.engine"), name)
    raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
