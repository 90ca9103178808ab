"""Reads Hugging Face model folders: config, safetensors, tokenizer.json, templates."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
from tokenizers import Tokenizer

from edgellm.errors import FormatError, ModelNotFoundError, UnsupportedModelError
from edgellm.exporters.packed import PackedTensors, read_packing
from edgellm.exporters.safetensors import SafetensorsFile
from edgellm.exporters.source import (
    ModelSource,
    TensorStore,
    TokenizerInfo,
    file_stem,
    parse_json,
    read_json,
    refuse_lfs_pointer,
)
from edgellm.format.spec import (
    MAX_CHAT_TEMPLATE_BYTES,
    MAX_GENERATION_CONFIG_BYTES,
    MAX_TOKENIZER_BYTES,
)
from edgellm.models import ModelDescription, ModelSpec, find_hf
from edgellm.types import Float32Array

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKEN_KEYS = re.compile(r"[a-z_]+_token")


class ShardedTensors:
    """The tensors of all safetensors files of a folder, as one store."""

    def __init__(self, files: Iterable[SafetensorsFile]) -> None:
        """Joins the files.

        Args:
            files: Open files.

        Raises:
            FormatError: Two files hold a tensor of the same name.
        """
        self._owner: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.tensors:
                other = self._owner.setdefault(name, file)
                if other is not file:
                    raise FormatError(
                        f"tensor {name!r} is in both {other.path.name} and {file.path}"
                    )

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, slowest dimension first."""
        return {name: file.tensors[name].shape for name, file in self._owner.items()}

    def dtype(self, name: str) -> str:
        """The tensor's number type, for example "BF16"."""
        return self._owner[name].dtype(name)

    def rows(self, name: str, first: int, count: int) -> Float32Array:
        """Rows [first, first + count) as (count, cols) float32; a vector is one row."""
        return self._owner[name].rows(name, first, count)

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor's numbers where they lie, read-only."""
        return self._owner[name].array(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig:
    """The JSON files of a folder; empty where one is not there."""

    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: dict[str, Any]
    generation_bytes: bytes | None


def load_hf(folder: Path) -> ModelSource:
    """Opens a Hugging Face folder.

    Args:
        folder: The folder.

    Returns:
        The model, its weights not yet read.

    Raises:
        ModelNotFoundError: There is no config.json.
        FormatError: A file is broken or missing.
        UnsupportedModelError: An architecture, option or kind of file is not supported.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(
            f"{folder} is not a model folder: it has no config.json; name a Hugging Face folder "
            "or a .gguf file"
        )
    files: list[Path] = []
    configs = read_configs(folder, files)
    packing = read_packing(configs.config, str(folder / "config.json"))
    config = {key: value for key, value in configs.config.items() if key != "quantization_config"}
    spec = find_hf(config)
    description = spec.model_from_hf(config)
    stored = _open_tensors(folder, files)
    tensors: TensorStore = stored
    if packing is not None:
        wanted = {item.source_name for item in spec.sources("hf", description)}
        tensors = PackedTensors(stored, packing, wanted)
    return model_of_folder(
        folder,
        configs,
        files,
        kind="hf",
        spec=spec,
        description=description,
        tensors=tensors,
    )


def model_of_folder(
    folder: Path,
    configs: FolderConfig,
    files: list[Path],
    *,
    kind: Literal["hf", "onnx"],
    spec: ModelSpec,
    description: ModelDescription,
    tensors: TensorStore,
    notes: tuple[str, ...] = (),
) -> ModelSource:
    """Adds tokenizer and templates of a folder to a model whose weights are known.

    Args:
        folder: The folder.
        configs: Its JSON files.
        files: What was read so far; gets what is read now.
        kind: Which reader's names the tensors have.
        spec: The architecture.
        description: The model, its tokens not yet counted.
        tensors: The weights.
        notes: What the user should know.

    Returns:
        The model.

    Raises:
        FormatError: A file is broken or missing.
    """
    tokenizer_json, tokenizer = _read_tokenizer(folder, files)
    templates = _read_templates(folder, configs.tokenizer, files)
    num_tokens = _count_tokens(folder, tokenizer, description.vocab_size)
    return ModelSource(
        kind=kind,
        name=file_stem(folder.resolve().name),
        files=tuple(files),
        tensors=tensors,
        spec=spec,
        description=dataclasses.replace(description, num_tokens=num_tokens),
        tokenizer_json=tokenizer_json,
        tokenizer=_tokenizer_info(folder, configs, tokenizer, num_tokens),
        chat_templates=templates,
        generation_config=configs.generation_bytes,
        notes=notes,
    )


def read_configs(folder: Path, files: list[Path]) -> FolderConfig:
    """Reads the JSON files of a folder that are there; adds their paths to `files`."""

    def optional(name: str) -> dict[str, Any]:
        path = folder / name
        if not path.is_file():
            return {}
        files.append(path)
        return read_json(path)

    config = optional("config.json")
    generation = optional("generation_config.json")
    tokenizer = optional("tokenizer_config.json")
    special = optional("special_tokens_map.json")
    generation_bytes = None
    if generation:
        generation_bytes = (folder / "generation_config.json").read_bytes()
        if len(generation_bytes) > MAX_GENERATION_CONFIG_BYTES:
            raise FormatError(
                f"{folder / 'generation_config.json'} is larger than "
                f"{MAX_GENERATION_CONFIG_BYTES} bytes"
            )
    return FolderConfig(
        config=config,
        generation=generation,
        tokenizer={**special, **tokenizer},
        generation_bytes=generation_bytes,
    )


def _open_tensors(folder: Path, files: list[Path]) -> ShardedTensors:
    index = folder / "model.safetensors.index.json"
    found = [] if index.is_file() else [*folder.glob("*.safetensors")]  # AutoGPTQ names its own way
    single = found[0] if len(found) == 1 else folder / "model.safetensors"
    if single.is_file():
        files.append(single)
        return ShardedTensors([SafetensorsFile(single)])
    if index.is_file():
        files.append(index)
        return _open_shards(folder, index, files)
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise UnsupportedModelError(
            f"{folder} holds its weights as pickles (.bin, .pt), which can run code when opened "
            "and are never read: load them with torch.load(..., weights_only=True), write them "
            "with safetensors.torch.save_file to model.safetensors, and export again"
        )
    raise FormatError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json: download the "
        "weights"
    )


def _open_shards(folder: Path, index: Path, files: list[Path]) -> ShardedTensors:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index} has no weight_map")
    shards: dict[str, SafetensorsFile] = {}
    for name in sorted({str(value) for value in weight_map.values()}):
        # A plain name: the index must not lead out of the folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise FormatError(f"{index} names {name!r}, which is not a safetensors file beside it")
        path = folder / name
        if not path.is_file():
            raise FormatError(f"{path} is missing; {index.name} needs it: download all shards")
        files.append(path)
        shards[name] = SafetensorsFile(path)
    for tensor, name in weight_map.items():
        if tensor not in shards[str(name)].tensors:
            raise FormatError(f"{folder / str(name)} does not hold {tensor!r} as {index.name} says")
    return ShardedTensors(shards.values())


def _read_tokenizer(folder: Path, files: list[Path]) -> tuple[bytes, Tokenizer]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        made = (
            f'make it: python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
        if (folder / "tokenizer.model").is_file():
            raise FormatError(f"{folder} has a tokenizer.model but no tokenizer.json; {made}")
        raise FormatError(f"{folder} has no tokenizer.json: download it, or {made}")
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise FormatError(f"{path} is larger than {MAX_TOKENIZER_BYTES} bytes")
    data = path.read_bytes()
    refuse_lfs_pointer(path, data)
    parse_json(data, str(path))
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:
        # the package raises bare Exception, and a panic of its Rust code is a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise FormatError(f"{path} is not a tokenizer that can be loaded: {reason}") from None
    files.append(path)
    return data, tokenizer


def _count_tokens(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> int:
    """Ids that have a row; added tokens past the last row can never be computed and are left out.

    Gemma 3's small models have such a token, `<image_soft_token>`.
    """
    base = tokenizer.get_vocab(with_added_tokens=False)
    if base and max(base.values()) >= vocab_size:
        raise FormatError(
            f"{folder / 'tokenizer.json'} has ids up to {max(base.values())}, but config.json says "
            f"vocab_size {vocab_size}: tokenizer and model do not belong together"
        )
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return min(last + 1, vocab_size)


def _tokenizer_info(
    folder: Path, configs: FolderConfig, tokenizer: Tokenizer, num_tokens: int
) -> TokenizerInfo:
    special = {
        key: text
        for key, value in sorted(configs.tokenizer.items())
        if _TOKEN_KEYS.fullmatch(key) and (text := _token_text(value)) is not None
    }
    bos_id = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    add_bos = configs.tokenizer.get("add_bos_token")
    if not isinstance(add_bos, bool):
        # What the tokenizer's own post-processor puts before a text.
        add_bos = bos_id is not None and tokenizer.encode("a").ids[:1] == [bos_id]
    if add_bos and bos_id is None:
        raise FormatError(
            f"{folder / 'tokenizer_config.json'} says add_bos_token, but names no bos_token that "
            "tokenizer.json knows"
        )
    return TokenizerInfo(
        add_bos=add_bos,
        bos_id=bos_id,
        eos_ids=_eos_ids(folder, configs, tokenizer, special, num_tokens),
        is_synthesised=False,
        special_tokens=special,
    )


def _eos_ids(
    folder: Path,
    configs: FolderConfig,
    tokenizer: Tokenizer,
    special: Mapping[str, str],
    num_tokens: int,
) -> tuple[int, ...]:
    """generation_config's list, else config's, else the tokenizer's eos_token."""
    value = configs.generation.get("eos_token_id")
    where = "generation_config.json"
    if value is None:
        value, where = configs.config.get("eos_token_id"), "config.json"
    if value is None and "eos_token" in special:
        value, where = tokenizer.token_to_id(special["eos_token"]), "tokenizer_config.json"
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not ids:
        raise FormatError(
            f"{folder} does not say which token ends an answer: add eos_token_id to "
            "generation_config.json"
        )
    for item in ids:
        if type(item) is not int or not 0 <= item < num_tokens:
            raise FormatError(
                f"{folder / where}: eos_token_id {item!r} is not one of {num_tokens} tokens"
            )
    return tuple(dict.fromkeys(ids))


def _token_text(value: object) -> str | None:
    """A token is written as its text or as an object with "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_templates(
    folder: Path, tokenizer_config: Mapping[str, Any], files: list[Path]
) -> dict[str, str]:
    """Chat templates by name; files of their own win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        for item in entry:
            if not isinstance(item, dict) or not all(
                isinstance(item.get(key), str) for key in ("name", "template")
            ):
                raise FormatError(
                    f"{folder / 'tokenizer_config.json'}: chat_template is not a list of name and "
                    "template"
                )
            templates[item["name"]] = item["template"]
    elif entry is not None:
        raise FormatError(f"{folder / 'tokenizer_config.json'}: chat_template is not a text")
    for name, path in _template_files(folder):
        files.append(path)
        if path.suffix == ".json":
            text = read_json(path).get("chat_template")
            if not isinstance(text, str):
                raise FormatError(f"{path} has no chat_template")
            templates[name] = text
        else:
            templates[name] = _read_text(path)
    return templates


def _template_files(folder: Path) -> list[tuple[str, Path]]:
    """Files that hold a template, the winning one last."""
    found = [("default", folder / name) for name in ("chat_template.json", "chat_template.jinja")]
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return [(n, p) for n, p in [*found, *((p.stem, p) for p in more)] if p.is_file()]


def _read_text(path: Path) -> str:
    if path.stat().st_size > MAX_CHAT_TEMPLATE_BYTES:
        raise FormatError(f"{path} is larger than {MAX_CHAT_TEMPLATE_BYTES} bytes")
    data = path.read_bytes()
    refuse_lfs_pointer(path, data)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{path} is not UTF-8") from None
