"""Run INT4 language models on the device in front of you."""

from __future__ import annotations

__version__ = "0.1.0"
