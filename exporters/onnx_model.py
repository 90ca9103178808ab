"""Opens an ONNX model as a model to export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.errors import FormatError, ModelNotFoundError
from edgellm.exporters.hf import FolderConfig, model_of_folder, read_configs
from edgellm.exporters.onnx_config import GenaiConfig, check_decoder
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_graph import find_sites
from edgellm.exporters.onnx_match import Decoder, match_decoder
from edgellm.exporters.onnx_rope import check_rope
from edgellm.exporters.onnx_weights import Blocked, Dense, OnnxTensors, Weight
from edgellm.exporters.plan import CHUNK_WEIGHTS
from edgellm.exporters.source import ModelSource
from edgellm.models import ModelDescription, ModelSpec, find_hf


def is_onnx_folder(folder: Path) -> bool:
    """Whether a folder holds an ONNX model rather than a Hugging Face one."""
    return bool(_models(folder)) and not any(folder.glob("*.safetensors"))


def _models(folder: Path) -> list[Path]:
    """The .onnx files of a folder or, where it has none, of its folder "onnx"."""
    return sorted(folder.glob("*.onnx")) or sorted(folder.glob("onnx/*.onnx"))


def _only_model(folder: Path) -> Path:
    """The folder's model.onnx or only model."""
    models = _models(folder)
    named = [path for path in models if path.name == "model.onnx"] or models
    if len(named) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in models[:9])
        raise FormatError(f"{folder} holds several ONNX models: name one of them ({names})")
    return named[0] if named else folder / "model.onnx"


def load_onnx(path: Path) -> ModelSource:
    """Opens an ONNX decoder with what lies beside it.

    It may come from `optimum`, `torch.onnx`, or ONNX Runtime GenAI's builder. config.json and
    tokenizer.json lie in its folder, or in the one above if that is called "onnx".

    Args:
        path: The .onnx file, or a folder with one.

    Returns:
        The model, its weights not yet read.

    Raises:
        ModelNotFoundError: There is no such file.
        FormatError: A file is broken or missing, or graph and configuration differ.
        UnsupportedModelError: An architecture, operation or option is not supported.
    """
    if path.is_dir():
        path = _only_model(path)
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file")
    folder, files = path.parent, list[Path]()
    has_config = any((folder / name).is_file() for name in ("config.json", "genai_config.json"))
    if folder.resolve().name == "onnx" and not has_config:
        folder = folder.resolve().parent
        path = folder / "onnx" / path.name
    configs = read_configs(folder, files)
    genai = _read_genai(path.parent / "genai_config.json", files)
    config = configs.config
    if config:
        spec = find_hf(config)
        description = spec.model_from_hf(config)
        sizes = description.vocab_size, description.hidden_size
    elif genai is not None:
        genai.spec()
        sizes = genai.vocab_size, genai.hidden_size
    else:
        raise FormatError(
            f"{path} has no config.json beside it: copy it, and tokenizer.json, from the model it "
            "was exported from"
        )
    file = OnnxModelFile(path)
    decoder = match_decoder(find_sites(file, *sizes), str(path))
    if not config and genai is not None:
        config = genai.hf_config(file, decoder, is_tied=_is_head_embedding(decoder))
        spec = find_hf(config)
        description = spec.model_from_hf(config)
    check_decoder(decoder, description, str(path))
    check_rope(file, decoder, description)
    weights, notes = _weights(decoder, spec, description, str(path))
    return model_of_folder(
        folder,
        _with_eos(dataclasses.replace(configs, config=config), genai),
        [*files, *file.files],
        kind="onnx",
        spec=spec,
        description=description,
        tensors=OnnxTensors(weights),
        notes=notes,
    )


def _read_genai(path: Path, files: list[Path]) -> GenaiConfig | None:
    if not path.is_file():
        return None
    files.append(path)
    return GenaiConfig(path)


def _with_eos(configs: FolderConfig, genai: GenaiConfig | None) -> FolderConfig:
    """GenAI's builder puts generation_config.json's list of end tokens into its own file."""
    if genai is None or genai.eos_ids is None or configs.generation.get("eos_token_id") is not None:
        return configs
    return dataclasses.replace(configs, generation={"eos_token_id": genai.eos_ids})


def _weights(
    decoder: Decoder, spec: ModelSpec, description: ModelDescription, where: str
) -> tuple[dict[str, Weight], tuple[str, ...]]:
    """The weights by Hugging Face's names, and notes; what the architecture lacks keeps its role.

    A tied head that is the same as the embedding is left out.
    """
    names = {item.canonical_name: item.source_name for item in spec.sources("onnx", description)}
    weights, notes = decoder.weights(), list[str]()
    if description.is_tied:
        names["head"] = spec.hf_names["head"]
        embed, head = weights["embed"], weights["head"]
        if isinstance(head, Blocked) and isinstance(embed, Dense) and _is_rounded(embed, head):
            notes.append(
                f"the head is the embedding rounded to {head.bits} bits; the embedding is used for "
                "both"
            )
            del weights["head"]
        elif embed.is_same(head):
            del weights["head"]
    _check_names(weights, names, where)
    return {names.get(role, role): weight for role, weight in weights.items()}, tuple(notes)


def _check_names(weights: dict[str, Weight], names: dict[str, str], where: str) -> None:
    """Where an initialiser has kept the name of a weight, it is the one that the graph says."""
    roles = {name: role for role, name in names.items() if role not in ("embed", "head")}
    for role, weight in weights.items():
        # Wrappers put their own names before it, such as "m.model.layers.0.mlp.up_proj.weight".
        parts = weight.name.split(".")
        for first in range(min(len(parts), 8)):
            other = roles.get(".".join(parts[first:]))
            if other is not None and other != role:
                raise FormatError(
                    f"{where}: the graph uses {weight.name[:120]!r} as {role}, against its name"
                )


def _is_head_embedding(decoder: Decoder) -> bool:
    """Whether embedding and head are the same numbers, rounded or not."""
    weights: dict[str, Any] = decoder.weights()
    embed, head = weights["embed"], weights["head"]
    if embed.shape != head.shape:
        return False
    if embed.is_same(head):
        return True
    if isinstance(head, Blocked) and isinstance(embed, Dense):
        return _is_rounded(embed, head)
    step = max(1, CHUNK_WEIGHTS // head.shape[1])
    return all(
        np.array_equal(embed.rows(first, count), head.rows(first, count))
        for first in range(0, head.shape[0], step)
        for count in (min(step, head.shape[0] - first),)
    )


def _is_rounded(embed: Dense, head: Blocked) -> bool:
    """Whether no number of the head is more than one step of its grid from the embedding's.

    A tenth more is allowed: a model may hold its tied tensor twice, rounded in two ways.
    """
    if embed.shape != head.shape:
        return False
    rows, cols = head.shape
    step = max(1, CHUNK_WEIGHTS // cols)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        error = np.abs(embed.rows(first, count) - head.rows(first, count))
        steps = np.abs(head.grid(first, count).scales).repeat(head.block, axis=1)[:, :cols]
        if not (error <= 1.1 * steps).all():
            return False
    return True
