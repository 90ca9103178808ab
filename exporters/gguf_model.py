"""Opens a GGUF file as a model to export."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.gguf import GGUFFile
from edgellm.exporters.gguf_tokenizer import synthesise_tokenizer
from edgellm.exporters.source import ModelSource, file_stem
from edgellm.models import find_gguf
from edgellm.types import Float32Array

# The quantisation's name at the end of a file's name says nothing about the exported file.
_QUANTISATION = re.compile(r"[.-](?:I?Q\d\w*|TQ\d_\d|B?F16|F32|MXFP4)$", re.IGNORECASE | re.ASCII)


def load_gguf(path: Path) -> ModelSource:
    """Opens a GGUF file.

    Args:
        path: The file.

    Returns:
        The model, its weights not yet read.

    Raises:
        FormatError: The file is broken, or a vocabulary without a model.
        UnsupportedModelError: The architecture, the tokenizer or an option is not supported.
        MissingExtraError: The `gguf` package is not installed.
    """
    gguf = GGUFFile(path)
    architecture = gguf.field("general.architecture", str)
    if architecture is None:
        raise FormatError(f"{path}: the file does not say its general.architecture")
    num_shards = gguf.field("split.count", int)
    if num_shards is not None and num_shards > 1:
        raise UnsupportedModelError(
            f"{path} is one of {num_shards} parts: join them with llama-gguf-split --merge"
        )
    if not gguf.tensors:
        raise FormatError(f"{path} holds no tensors: it is a vocabulary without a model")
    spec = find_gguf(architecture)

    def read(name: str) -> Float32Array:
        shape = gguf.tensors[name].shape
        num_rows = int(np.prod(shape[:-1]))
        return gguf.rows(name, 0, num_rows).reshape(shape)

    description = spec.model_from_gguf(gguf.fields, gguf.shapes, read)
    tokenizer_json, tokenizer, num_tokens = synthesise_tokenizer(gguf)
    if num_tokens > description.vocab_size:
        raise FormatError(
            f"{path}: the tokenizer has {num_tokens} tokens, the embedding only "
            f"{description.vocab_size} rows"
        )
    return ModelSource(
        kind="gguf",
        name=file_stem(_QUANTISATION.sub("", path.stem)),
        files=(path,),
        tensors=gguf,
        spec=spec,
        description=dataclasses.replace(description, num_tokens=num_tokens),
        tokenizer_json=tokenizer_json,
        tokenizer=tokenizer,
        chat_templates=_templates(gguf),
        generation_config=None,
    )


def _templates(gguf: GGUFFile) -> dict[str, str]:
    templates = {}
    default = gguf.field("tokenizer.chat_template", str)
    if default is not None:
        templates["default"] = default
    for name in gguf.array("tokenizer.chat_templates", str) or []:
        template = gguf.field(f"tokenizer.chat_template.{name}", str)
        if template is None:
            raise FormatError(f"{gguf.path}: chat template {name!r} is announced but missing")
        templates[name] = template
    return templates
