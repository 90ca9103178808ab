"""Writes an `.edge` model as an ONNX folder: model, weights, tokenizer, templates, configs.

The folder is made beside its place and renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from edgellm._native import version
from edgellm.errors import EdgeLLMError, FormatError, MissingExtraError
from edgellm.exporters.to_onnx_config import generation_config, hf_config, tokenizer_config
from edgellm.exporters.to_onnx_graph import build_model
from edgellm.exporters.to_onnx_weights import DATA_NAME, OnnxWeights, Weights
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize
from edgellm.format.spec import SectionType
from edgellm.format.temporary import sync_folder
from edgellm.models import ModelDescription, ModelSpec, file_shapes, specs
from edgellm.types import Float32Array, TensorFormat

__all__ = ["MODEL_NAME", "OnnxReport", "export_onnx", "load_package"]

MODEL_NAME: Final = "model.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxReport:
    """What was written: the folder, and the bytes of model and weights."""

    output: Path
    num_bytes: int


def load_package(name: str) -> ModuleType:
    """Imports onnx or onnxruntime.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtraError(
            f'this needs the {name} package: pip install "edgellm[onnx]"'
        ) from None


def export_onnx(path: Path, output: Path, weights: Weights = "int4") -> OnnxReport:
    """Writes a model as a folder that ONNX Runtime and Optimum load.

    Memory: a few million weights at a time, and the scales of the largest matrix.

    Args:
        path: the `.edge` file.
        output: the folder, which must not exist.
        weights: "int4" keeps E4 as MatMulNBits of 4 bits (scale D * s, zero point z / s, both
            rounded to float32) and other formats as MatMulNBits of 8 bits (exact); "float" writes
            what the weights stand for.

    Raises:
        EdgeLLMError: the folder exists or cannot be written.
        FormatError: the file is broken.
        MissingExtraError: the onnx package is not installed.
        UnsupportedModelError: the architecture is not known, or config.json cannot describe it.
    """
    load_package("onnx")
    if os.path.lexists(output):
        raise EdgeLLMError(f"{output} exists: remove it or name another folder")
    with EdgeFile.open(path, verify=True) as file, _new_folder(output) as folder:
        description, spec = _describe(file)
        _write_texts(file, description, spec, folder)
        with (folder / DATA_NAME).open("xb") as out:
            writer = OnnxWeights(file, description, spec, out, weights)
            model = build_model(description, writer, f"edgellm {version()}")
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        data = model.SerializeToString()
        _write(folder / MODEL_NAME, data)
    return OnnxReport(output=output, num_bytes=size + len(data))


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that gets its name, or is removed if anything fails."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    except OSError as error:
        raise EdgeLLMError(f"{output}: cannot create: {error.strerror}") from None
    try:
        yield folder
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)  # mkdtemp's is for the owner only
        sync_folder(folder)
        folder.rename(output)
        sync_folder(output.parent)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise EdgeLLMError(f"{output}: cannot write: {error.strerror}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _describe(file: EdgeFile) -> tuple[ModelDescription, ModelSpec]:
    """The model, its tensors' shapes checked, and its architecture."""
    meta = file.meta

    def read(name: str) -> Float32Array:
        entry = file.tensors[name]
        return dequantize(file.tensor_data(name), entry.format, entry.rows, entry.cols)

    names = [f"rope.{number}.inv_freq" for number in range(meta["model"]["num_ropes"])]
    tables = tuple(read(name)[0] for name in names if name in file.tensors)
    description = ModelDescription.from_meta(meta["model"], tables, tuple(meta["rope"]))
    for name, shape in file_shapes(description).items():
        entry = file.tensors.get(name)
        if entry is None or (entry.rows, entry.cols) != shape:
            raise FormatError(
                f"{file.path}: tensor {name} is missing or not {shape}; export the model again"
            )
        if (entry.format == TensorFormat.F32) != (shape[0] == 1):
            raise FormatError(
                f"{file.path}: tensor {name} of {shape} is {entry.format.name}; export the model "
                "again"
            )
    for spec in specs():
        if spec.architecture == description.architecture:
            return description, spec
    raise FormatError(
        f"{file.path}: architecture {description.architecture!r} is not known: update edgellm"
    )


def _write_texts(
    file: EdgeFile, description: ModelDescription, spec: ModelSpec, folder: Path
) -> None:
    tokenizer = file.meta["tokenizer"]
    _write_json(folder / "config.json", hf_config(description, spec, tokenizer))
    _write(folder / "tokenizer.json", file.section_bytes(SectionType.TOKENIZER))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer))
    if file.section(SectionType.GENERATION_CONFIG):
        data = file.section_bytes(SectionType.GENERATION_CONFIG)
        _write(folder / "generation_config.json", data)
    else:
        _write_json(folder / "generation_config.json", generation_config(tokenizer))
    for name in file.chat_templates:
        data = file.section_bytes(SectionType.CHAT_TEMPLATE, name)
        if name == "default":
            _write(folder / "chat_template.jinja", data)
            continue
        more = folder / "additional_chat_templates"
        more.mkdir(exist_ok=True)
        _write(more / f"{name}.jinja", data)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
