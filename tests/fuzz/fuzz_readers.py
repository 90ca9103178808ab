"""Fuzz targets of the readers of foreign models; `make fuzz-readers` runs them.

    fuzz_readers.py TARGET FOLDER [OPTIONS OF LIBFUZZER]

TARGET is one of TARGETS. FOLDER gets the seeds, which are small whole files, and what is found to
reach new code. Mutations know the format: most of them change a header's tree or a message and
leave the rest whole. Whatever a reader raises that is not of edgellm's own kinds is a finding.
"""

from __future__ import annotations

import json
import math
import os
import random
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import onnx
from onnx_decoders import GenaiOptions, genai_folder, torch_folder
from source_files import BOOL, F32, U8, Tensor, Value, gguf_bytes, gguf_of_llama, safetensors_bytes
from tiny_models import write_tiny_model

from edgellm.errors import EdgeLLMError
from edgellm.exporters.gguf import GGUFFile
from edgellm.exporters.gguf_model import load_gguf
from edgellm.exporters.hf import ShardedTensors
from edgellm.exporters.onnx_model import load_onnx
from edgellm.exporters.onnx_ops import HANDLERS
from edgellm.exporters.packed import PackedTensors, read_packing
from edgellm.exporters.plan import plan_tensors
from edgellm.exporters.safetensors import SafetensorsFile
from edgellm.exporters.source import ModelSource, TensorStore

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "rope_scaling": None,
}  # fmt: skip
NUMBERS = (0, 1, 2, 3, 15, 16, 31, 32, 33, 64, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1)
PACKED_GROUP = 16  # inputs
OPS = sorted({name for _, name in HANDLERS} | {"If", "Constant", "GatherBlockQuantized"})


# ---- readers -------------------------------------------------------------------------------------


def read_all(store: TensorStore) -> None:
    """A few rows of every tensor whose shape a plan would accept."""
    for name, shape in store.shapes.items():
        if 1 <= len(shape) <= 2 and min(shape) > 0:
            store.rows(name, 0, 1)
            store.rows(name, shape[0] - 1 if len(shape) == 2 else 0, 1)


def read_model(source: ModelSource) -> None:
    """All that an export reads before it quantises."""
    plan_tensors(source, "q8")
    read_all(source.tensors)


def read_safetensors(folder: Path, data: bytes) -> None:
    read_all(SafetensorsFile(place(folder, "model.safetensors", data)))


def read_packed(folder: Path, data: bytes) -> None:
    """The same tensors as GPTQ's and as AWQ's."""
    store = ShardedTensors([SafetensorsFile(place(folder, "model.safetensors", data))])
    for method in ("gptq", "awq"):
        entry = {"quant_method": method, "bits": 4, "group_size": PACKED_GROUP}
        packing = read_packing({"quantization_config": entry}, "config.json")
        assert packing is not None
        try:
            read_all(PackedTensors(store, packing, ()))
        except EdgeLLMError:
            continue


def read_gguf(folder: Path, data: bytes) -> None:
    read_all(GGUFFile(place(folder, "model.gguf", b"GGUF" + data[4:])))


def read_gguf_model(folder: Path, data: bytes) -> None:
    read_model(load_gguf(place(folder, "model.gguf", b"GGUF" + data[4:])))


def read_onnx(folder: Path, data: bytes) -> None:
    """The seeds' configurations and data files lie in a folder each."""
    for one in (folder / "torch", folder / "genai"):
        try:
            read_model(load_onnx(place(one, "model.onnx", data)))
        except EdgeLLMError:
            continue


def place(folder: Path, name: str, data: bytes) -> Path:
    """A new file: the one before may be mapped still."""
    (folder / "new").write_bytes(data)
    os.replace(folder / "new", folder / name)
    return folder / name


# ---- mutations -----------------------------------------------------------------------------------


def mutate_bytes(data: bytes, source: random.Random) -> bytes:
    """Writes a number somewhere: lengths and counts are what matters in GGUF."""
    if source.random() < 0.3 or len(data) < 16:
        return bytes(atheris.Mutate(data, len(data) + 64))
    layout = source.choice(("<I", "<Q", "<B"))
    at = source.randrange(min(len(data), 1 << source.randrange(4, 17)))
    number = source.choice(NUMBERS) % 256 ** struct.calcsize(layout)
    new = struct.pack(layout, number)
    return data[:at] + new + data[at + len(new) :]


def mutate_safetensors(data: bytes, source: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        mutate_json(header, source)
    except (ValueError, TypeError, RecursionError):
        return bytes(atheris.Mutate(data, len(data) + 64))
    return safetensors_bytes(header, data[8 + length :])


def mutate_packed(data: bytes, source: random.Random) -> bytes:
    """The group of an input, or the header."""
    length = int.from_bytes(data[:8], "little")
    if source.random() < 0.7 or len(data) <= 8 + length + 4:
        return mutate_safetensors(data, source)
    at = 8 + length + 4 * source.randrange((len(data) - 8 - length) // 4)
    return data[:at] + struct.pack("<I", source.choice(NUMBERS) % 2**32) + data[at + 4 :]


def mutate_json(value: Any, source: random.Random) -> None:
    """Changes something somewhere in a tree."""
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = source.choice(list(keys))
        if isinstance(value[key], dict | list) and source.random() < 0.8:
            value = value[key]
            continue
        kind = source.randrange(4)
        if kind == 0:
            del value[key]
        elif kind == 1 and isinstance(value, dict):
            value[f"{key}{source.randrange(9)}"] = value[key]
        elif kind == 2 and isinstance(value[key], int):
            value[key] += source.choice((-4, -1, 1, 4))
        else:
            value[key] = source.choice(
                (*NUMBERS, -1, 0.5, None, True, "F32", "BF16", "I64", [], {})
            )
        return


def mutate_onnx(data: bytes, source: random.Random) -> bytes:
    model = onnx.ModelProto()
    if source.random() < 0.2:
        return bytes(atheris.Mutate(data, len(data) + 64))
    try:
        model.ParseFromString(data)
        for _ in range(source.randint(1, 3)):
            mutate_message(model, names_of(model), source)
        return model.SerializeToString()
    except Exception:  # what protobuf cannot parse, or hold
        return bytes(atheris.Mutate(data, len(data) + 64))


def names_of(model: Any) -> list[str]:
    nodes = list(model.graph.node)
    return [name for node in nodes for name in (*node.input, *node.output)] or ["x"]


def mutate_message(message: Any, names: list[str], source: random.Random) -> None:
    """Changes something somewhere below a protobuf message."""
    while True:
        fields = message.ListFields()
        if not fields:
            return
        field, value = source.choice(fields)
        is_list = not isinstance(value, bytes | str | int | float | bool) and hasattr(
            value, "__len__"
        )
        at = source.randrange(len(value)) if is_list and len(value) else None
        if at is not None and source.random() < 0.1:
            del value[at]
            return
        if field.message_type is not None:
            inner = value[at] if at is not None else value
            if at is not None and source.random() < 0.1:
                value.add().CopyFrom(inner)
                return
            message = inner
            continue
        new = scalar(value[at] if at is not None else value, field.name, names, source)
        if at is not None:
            value[at] = new
        else:
            setattr(message, field.name, new)
        return


def scalar(old: Any, field: str, names: list[str], source: random.Random) -> Any:
    if isinstance(old, str):
        return source.choice(OPS) if field == "op_type" else source.choice((*names, "", "0", "40"))
    if isinstance(old, bytes):
        return old[: source.randrange(len(old) + 1)] + source.randbytes(source.randrange(5))
    if isinstance(old, float):
        return source.choice((0.0, 1.0, -1.0, float("inf"), float("nan"), 1e-6))
    return source.choice((*NUMBERS[:12], old + 1, old - 1, -1, -(2**31)))


# ---- seeds ---------------------------------------------------------------------------------------


def safetensors_seeds(folder: Path) -> Iterator[bytes]:
    del folder
    kinds = (("F32", 4), ("F16", 2), ("BF16", 2), ("I64", 8))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for kind, size in kinds:
        offsets = [end, end + 6 * size]
        header[kind.lower()] = {"dtype": kind, "shape": [2, 3], "data_offsets": offsets}
        end += 6 * size
    yield safetensors_bytes(header, bytes(end))


def packed_seeds(folder: Path) -> Iterator[bytes]:
    """A matrix of 32 inputs and 16 outputs; GPTQ's has the groups of its inputs first."""
    del folder
    for shape in ((4, 16), (32, 2)):
        parts = {
            "x.g_idx": ("I32", (32,), 4),
            "x.qweight": ("I32", shape, 4),
            "x.qzeros": ("I32", (2, 2), 4),
            "x.scales": ("F16", (2, 16), 2),
            "x.bias": ("F16", (16,), 2),
        }
        header: dict[str, Any] = {}
        end = 0
        for name, (kind, dimensions, size) in parts.items():
            offsets = [end, end + size * math.prod(dimensions)]
            header[name] = {"dtype": kind, "shape": list(dimensions), "data_offsets": offsets}
            end = offsets[1]
        yield safetensors_bytes(header, bytes(end))


def gguf_seeds(folder: Path) -> Iterator[bytes]:
    del folder
    fields = {"a": 1, "b": "text", "c": [1, 2], "d": ["x", "y"], "e": 0.5, "f": True}
    fields |= {"g": Value(U8, [1, 2], True), "h": Value(BOOL, [1], True), "i": Value(F32, 1.0)}
    fields["general.alignment"] = 32
    tensors = {
        "f32": Tensor(bytes(256), (32, 2)),
        "f16": Tensor(bytes(64), (32,), type=1),
        "q4_0": Tensor(bytes(36), (32, 2), type=2),
        "q4_k": Tensor(bytes(144), (256,), type=12),
        "q6_k": Tensor(bytes(210), (256,), type=14),
        "bf16": Tensor(bytes(64), (32,), type=30),
    }
    yield gguf_bytes(fields, tensors)


def gguf_model_seeds(folder: Path) -> Iterator[bytes]:
    yield gguf_of_llama(write_tiny_model(folder / "hf", "llama", **SIZES))


def onnx_seeds(folder: Path) -> Iterator[bytes]:
    """Two folders as tools write them, which the inputs are put into."""
    hf = write_tiny_model(folder / "hf", "llama", **SIZES)
    torch_folder(hf, folder / "torch")
    yield (folder / "torch/model.onnx").read_bytes()
    options = GenaiOptions(is_embedding_quantized=True, has_zeros=True, block=16)
    genai_folder(hf, folder / "genai", options)
    yield (folder / "genai/model.onnx").read_bytes()


Reader = Callable[[Path, bytes], None]
Mutation = Callable[[bytes, random.Random], bytes]
Seeds = Callable[[Path], Iterator[bytes]]
TARGETS: dict[str, tuple[Reader, Mutation, Seeds]] = {
    "safetensors": (read_safetensors, mutate_safetensors, safetensors_seeds),
    "packed": (read_packed, mutate_packed, packed_seeds),
    "gguf": (read_gguf, mutate_bytes, gguf_seeds),
    "gguf_model": (read_gguf_model, mutate_bytes, gguf_model_seeds),
    "onnx": (read_onnx, mutate_onnx, onnx_seeds),
}


def instrument() -> None:
    """The readers' functions; an editable install has a finder that atheris' import hook is not."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(("edgellm.exporters.", "edgellm.models.")):
            owners = [module, *(one for one in vars(module).values() if isinstance(one, type))]
            for value in [value for owner in owners for value in vars(owner).values()]:
                if isinstance(value, FunctionType) and value.__module__ == name:
                    atheris.instrument_func(value)


def main() -> None:
    """Runs a target."""
    instrument()
    name, corpus, *options = sys.argv[1:]
    read, mutation, seeds = TARGETS[name]
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    Path(corpus).mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(folder)):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)

    def test(data: bytes) -> None:
        try:
            read(folder, data)
        except EdgeLLMError as error:
            if "\n" in str(error):
                raise ValueError(f"a message of two lines: {error}") from error

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        return mutation(data, random.Random(seed))[:max_size]

    atheris.Setup([sys.argv[0], corpus, *options], test, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
