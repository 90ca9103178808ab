"""Architectures, one declarative file each, and the numpy reference forward pass.

`find_hf` and `find_gguf` give the `ModelSpec` of a source; `edgellm.models._reference` has the
reference. A new architecture is one new file with a `SPEC` in this folder.
"""

from __future__ import annotations

from edgellm.models._registry import find_gguf, find_hf, specs
from edgellm.models._spec import (
    Layer,
    ModelDescription,
    ModelSpec,
    Rewrite,
    SourceKind,
    SourceTensor,
    canonical_shapes,
)
from edgellm.models._tensors import (
    apply_rewrite,
    file_shapes,
    fuse,
    fused_parts,
    interleave_gate_up,
    unfuse,
)

__all__ = [
    "Layer",
    "ModelDescription",
    "ModelSpec",
    "Rewrite",
    "SourceKind",
    "SourceTensor",
    "apply_rewrite",
    "canonical_shapes",
    "file_shapes",
    "find_gguf",
    "find_hf",
    "fuse",
    "fused_parts",
    "interleave_gate_up",
    "specs",
    "unfuse",
]
