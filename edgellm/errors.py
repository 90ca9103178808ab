"""Every error edgellm raises on purpose.

EdgeLLMError
├── FormatError             the .edge file (or a source model) is broken or not what it claims
├── UnsupportedModelError   a valid model that edgellm cannot run or export
├── UnsupportedDeviceError  this machine lacks what was asked for
├── ContextFullError        prompt or generation does not fit the context
├── TemplateError           the chat template refused the messages or does not parse
├── MissingExtraError       an optional package is not installed; names the pip command
├── ModelNotFoundError      no such file or pulled model
├── OutOfMemoryError        the memory asked for is not there
└── NativeError             the C library failed in a way that has no class of its own

Wrong arguments from a caller are ValueError or TypeError. A message is one line: what was wrong,
where, and what to do.
"""

from __future__ import annotations

__all__ = [
    "ContextFullError",
    "EdgeLLMError",
    "FormatError",
    "MissingExtraError",
    "ModelNotFoundError",
    "NativeError",
    "OutOfMemoryError",
    "TemplateError",
    "UnsupportedDeviceError",
    "UnsupportedModelError",
]


class EdgeLLMError(Exception):
    """Base of all errors raised on purpose."""


class FormatError(EdgeLLMError):
    """A file is broken or not what it claims to be."""


class UnsupportedModelError(EdgeLLMError):
    """A valid model that edgellm cannot export or run."""


class UnsupportedDeviceError(EdgeLLMError):
    """This machine lacks what was asked for."""


class ContextFullError(EdgeLLMError):
    """A prompt or a generation does not fit the context."""


class TemplateError(EdgeLLMError):
    """A chat template does not parse or refused the messages."""


class MissingExtraError(EdgeLLMError):
    """An optional package is not installed."""


class ModelNotFoundError(EdgeLLMError):
    """There is no such file and no pulled model of that name."""


class OutOfMemoryError(EdgeLLMError):
    """The memory asked for is not there."""


class NativeError(EdgeLLMError):
    """The C library failed in a way that has no class of its own."""
