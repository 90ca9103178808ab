"""Small `.edge` files for tests: valid ones, broken ones whose checksums are right, fuzz inputs.

`python tests/tools/edge_files.py FOLDER` writes the seed inputs of native/tests/fuzz_file.c.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgellm._native import quantize
from edgellm.format import EdgeFile, spec
from edgellm.format.crc32c import crc32c
from edgellm.format.layout import dequantize
from edgellm.format.meta import canonical_json
from edgellm.format.spec import SectionType
from edgellm.format.writer import EdgeWriter
from edgellm.types import TensorFormat

META: dict[str, Any] = {
    "model": {
        "architecture": "llama",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
        "vocab_size": 40,
        "num_tokens": 38,
        "max_context": 128,
        "norm_eps": 1e-05,
        "activation": "silu",
        "attention_scale": 0.25,
        "embedding_scale": 1,
        "is_tied": True,
        "has_qkv_bias": False,
        "has_qk_norm": False,
        "has_post_norms": False,
        "kv_format": "f16",
        "num_ropes": 1,
        "layers": [{"rope": 0, "window": 0}, {"rope": 0, "window": 32}],
    },
    "rope": [{"theta": 10000.0}],
    "tokenizer": {
        "add_bos": True,
        "bos_id": 1,
        "eos_ids": [2, 3],
        "is_synthesised": False,
        "special_tokens": {"bos_token": "<s>"},
    },
    "quantization": {"recipe": "test", "head": "e4", "tensors": {"embed": "e4"}},
    "kv": {},
    "source": {"kind": "gguf", "files": [{"name": "x.gguf", "sha256": "0" * 64}]},
    "exporter": "edgellm 0.1.0",
}
CALIBRATED: dict[str, Any] = META["quantization"] | {
    "quality": "balanced",
    "calibration": {"origin": "own", "sha256": "0123456789abcdef" * 4, "tokens": 16384},
    "measured": {"kl": 0.04567, "perplexity": 26.1, "source_perplexity": 25.5, "tokens": 1024},
}
VECTORS: dict[str, Any] = {
    "texts": [{"text": "naïve ☃", "ids": [4, 5]}],
    "chats": [
        {
            "messages": [{"role": "user", "content": "hi"}],
            "add_generation_prompt": True,
            "rendered": "<user>hi",
            "ids": [6],
        }
    ],
    "greedy": [{"ids": [1], "continuation": [7, 8]}],
}
TENSORS = [
    ("embed", TensorFormat.E4, 40, 64, "globals"),
    ("final_norm", TensorFormat.F32, 1, 64, "globals"),
    ("layers.0.attn_norm", TensorFormat.F32, 1, 64, "layers.0"),
    ("layers.0.o", TensorFormat.E4, 64, 64, "layers.0"),
    ("layers.1.down", TensorFormat.E8, 64, 96, "layers.1"),
    ("layers.1.o", TensorFormat.E5, 40, 288, "layers.1"),
]
BLOCK_BYTES = 0x64  # what the superblock uses


def changed_meta(**changes: Any) -> dict[str, Any]:
    """META with members replaced: `model__head_dim=24`; Ellipsis removes one."""
    meta = copy.deepcopy(META)
    for path, value in changes.items():
        *parents, key = path.split("__")
        target = meta
        for parent in parents:
            target = target[parent]
        if value is ...:
            del target[key]
        else:
            target[key] = value
    return meta


def tensor_content(name: str, size: int) -> np.ndarray:
    """Bytes that depend on the name only."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def write_edge(path: Path, num_tensors: int = len(TENSORS)) -> str:
    """Writes a small valid file and returns its model id."""
    tensors = TENSORS[:num_tensors]
    with EdgeWriter(path) as writer:
        for name, tensor_format, rows, cols, section in tensors:
            writer.add_tensor(name, tensor_format, rows, cols, section=section)
        writer.add_section(SectionType.META, canonical_json(META))
        writer.add_section(SectionType.TOKENIZER, b'{"version":"1.0"}')
        writer.add_section(SectionType.CHAT_TEMPLATE, b"{{ messages }}", "default")
        writer.add_section(SectionType.GENERATION_CONFIG, b'{"top_k": 40}')
        writer.allocate()
        for name, tensor_format, rows, cols, _ in tensors:
            size = spec.tensor_bytes(tensor_format, rows, cols)
            writer.write_tensor(name, tensor_content(name, size))
        writer.add_section(SectionType.TEST_VECTORS, canonical_json(VECTORS))
        return writer.finish()


def write_requantized(
    source: Path,
    output: Path,
    formats: Sequence[TensorFormat],
    card: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> None:
    """Writes a model anew with its matrices in `formats`, which take turns, another `card` as
    META's "quantization" and changes to its "model"."""
    turns = itertools.cycle(formats)
    content: dict[str, np.ndarray] = {}
    with EdgeFile.open(source) as file, EdgeWriter(output) as writer:
        for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.section):
            kind, data = tensor.format, file.tensor_data(tensor.name)
            if kind != TensorFormat.F32:
                weights = dequantize(data, kind, tensor.rows, tensor.cols)
                kind = next(turns)
                data = np.empty(spec.tensor_bytes(kind, tensor.rows, tensor.cols), np.uint8)
                quantize(kind, weights, data)
            content[tensor.name] = data
            tag = file.sections[tensor.section].tag
            writer.add_tensor(tensor.name, kind, tensor.rows, tensor.cols, section=tag)
        for section in file.sections:
            kept = SectionType(section.type)
            if kept == SectionType.META:
                meta = file.meta | ({} if card is None else {"quantization": card})
                meta["model"] = meta["model"] | (model or {})
                writer.add_section(kept, canonical_json(meta))
            elif kept not in (SectionType.TENSOR_INDEX, SectionType.WEIGHTS):
                writer.add_section(kept, file.section_bytes(kept, section.tag), section.tag)
        writer.allocate()
        for name, data in content.items():
            writer.write_tensor(name, data)
        writer.finish()


class Image:
    """Bytes of a file whose fields can be changed; `sealed` puts sizes and checksums right."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    @property
    def num_sections(self) -> int:
        """As the superblock says, but no more than fit."""
        (count,) = struct.unpack_from("<I", self.data, 0x30)
        return min(count, (len(self.data) - spec.SUPERBLOCK_BYTES) // spec.SECTION_ENTRY_BYTES)

    def entry(self, number: int) -> int:
        """Offset of a section's table entry."""
        return spec.SUPERBLOCK_BYTES + number * spec.SECTION_ENTRY_BYTES

    def place(self, number: int) -> tuple[int, int]:
        """Offset and size of a section."""
        offset, size = struct.unpack_from("<QQ", self.data, self.entry(number) + 8)
        return offset, size

    def number(self, section_type: SectionType) -> int:
        """Number of the first section of a type."""
        for number in range(self.num_sections):
            if struct.unpack_from("<I", self.data, self.entry(number))[0] == section_type:
                return number
        raise LookupError(section_type)

    def put(self, offset: int, form: str, *values: Any) -> Image:
        """Overwrites a field."""
        struct.pack_into("<" + form, self.data, offset, *values)
        return self

    def replace_section(self, section_type: SectionType, content: bytes) -> Image:
        """Replaces a section's content, moving what follows; padding stays zero."""
        number = self.number(section_type)
        offset, _ = self.place(number)
        pieces = [self.place(other) for other in range(number + 1, self.num_sections)]
        rest = [bytes(self.data[start : start + length]) for start, length in pieces]
        del self.data[offset:]
        self.data += content
        self.put(self.entry(number) + 16, "Q", len(content))
        for other, piece in enumerate(rest, number + 1):
            self.data += bytes(-len(self.data) % 8)
            self.put(self.entry(other) + 8, "Q", len(self.data))
            self.data += piece
        return self

    def sealed(self, *, size: bool = True) -> bytes:
        """The file with CRCs, SHA-256s and, unless told not to, its size put right."""
        for number in range(self.num_sections):
            offset, length = self.place(number)
            content = bytes(self.data[offset : offset + length])
            if len(content) == length:
                self.put(self.entry(number) + 28, "I", crc32c(content))
                self.put(self.entry(number) + 32, "32s", hashlib.sha256(content).digest())
        if size:
            self.put(0x10, "Q", len(self.data))
        table = self.data[spec.SUPERBLOCK_BYTES : self.entry(self.num_sections)]
        self.put(0x40, "32s", hashlib.sha256(table).digest())
        self.put(0x60, "I", crc32c(bytes(self.data[:0x60])))
        return bytes(self.data)


def compact(data: bytes) -> bytes:
    """The input of the fuzz target that stands for a file: without padding and weights."""
    image = Image(data)
    parts = [data[:BLOCK_BYTES], data[image.entry(0) : image.entry(image.num_sections)]]
    for number in range(image.num_sections):
        offset, size = image.place(number)
        (section_type,) = struct.unpack_from("<I", data, image.entry(number))
        if section_type != SectionType.WEIGHTS:
            parts.append(data[offset : offset + size])
    return b"".join(parts)


def main(folder: Path) -> None:
    """Writes seed inputs: two valid files, and one with META of every kind of JSON token."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "seed.edge"
        write_edge(path)
        (folder / "layers").write_bytes(compact(path.read_bytes()))
        write_edge(path, num_tensors=2)
        data = path.read_bytes()
    (folder / "globals").write_bytes(compact(data))
    odd = b' {"a\\u00e9\\n\\ud83d\\ude00":[null,true,-1.5e-3,{},[]],' + canonical_json(META)[1:]
    odd = odd.replace(b'"model":', '"f\u00fc\u2603\U0001f600":"\\"\\\\",\n"model" : '.encode())
    (folder / "odd_json").write_bytes(
        compact(Image(data).replace_section(SectionType.META, odd).sealed())
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
