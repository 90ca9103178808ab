"""The `.edge` file: one format, one writer, one reader."""

from __future__ import annotations

from edgellm.format.reader import EdgeFile
from edgellm.format.spec import Section, SectionType, Tensor, tensor_bytes
from edgellm.format.writer import EdgeWriter

__all__ = ["EdgeFile", "EdgeWriter", "Section", "SectionType", "Tensor", "tensor_bytes"]
