"""Opens a model to export, by what it is rather than how it is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from edgellm.errors import ModelNotFoundError, UnsupportedModelError
from edgellm.exporters.gguf import MAGIC as GGUF_MAGIC
from edgellm.exporters.gguf_model import load_gguf
from edgellm.exporters.hf import load_hf
from edgellm.exporters.onnx_model import is_onnx_folder, load_onnx
from edgellm.exporters.source import ModelSource, refuse_lfs_pointer
from edgellm.format.spec import MAGIC as EDGE_MAGIC

__all__ = ["open_source"]

_HEAD_BYTES: Final = 64


def open_source(path: str | os.PathLike[str]) -> ModelSource:
    """Opens a model to export, of whichever kind it is.

    Args:
        path: A Hugging Face folder, a GGUF file, or an ONNX model: its file or folder.

    Returns:
        The model, its weights not yet read.

    Raises:
        ModelNotFoundError: There is nothing of that name.
        FormatError: It is broken.
        UnsupportedModelError: It is of a kind or architecture that is not supported.
    """
    path = Path(path)
    if path.suffix == ".onnx" or is_onnx_folder(path):
        return load_onnx(path)
    if path.is_dir():
        return load_hf(path)
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file or folder")
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    refuse_lfs_pointer(path, head)
    if head.startswith(GGUF_MAGIC):
        return load_gguf(path)
    if head.startswith(EDGE_MAGIC):
        raise UnsupportedModelError(f"{path} is an .edge file already: edgellm run {path}")
    if path.suffix == ".safetensors":
        raise UnsupportedModelError(
            f"{path} holds weights only: name its folder, with config.json and tokenizer.json"
        )
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise UnsupportedModelError(
            f"{path} is a pickle, which can run code when opened and is never read: write the "
            "weights with safetensors.torch.save_file and export the folder"
        )
    raise UnsupportedModelError(f"{path} is no GGUF file, ONNX model or Hugging Face folder")
