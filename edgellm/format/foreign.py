"""Naming files that are not `.edge` files, so that a message can say what to do with them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["describe_foreign"]


def describe_foreign(path: Path, head: bytes, size: int) -> str:
    """What a file without the magic is, and what to do with it."""
    export = f"run: edgellm export {path} -o {path.with_suffix('.edge').name}"
    if size == 0:
        return "an empty file; copy, download or export it again"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; run: git lfs pull"
    if head.startswith(b"GGUF"):
        return f"a GGUF file; {export}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return f"a safetensors file; export the folder it is in, run: edgellm export {path.parent}"
    if path.suffix == ".onnx":
        return f"an ONNX model; {export}"
    if head.startswith((b"PK\x03\x04", b"\x80\x02")):
        return "a PyTorch or zip file; export a folder with safetensors instead"
    return "not a .edge file; make one with: edgellm export MODEL -o FILE.edge"
