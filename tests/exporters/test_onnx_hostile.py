"""An ONNX model is not trusted: neither its bytes, nor the places it says its weights lie at."""

from __future__ import annotations

import os
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_model

from edgellm.errors import EdgeLLMError, FormatError, UnsupportedModelError
from edgellm.exporters.onnx_file import parse_model
from edgellm.exporters.open_source import open_source

REASON = 'needs pip install "edgellm[onnx]"'
onnx = pytest.importorskip("onnx", reason=REASON)
decoders = pytest.importorskip("onnx_decoders", reason=REASON)

DATA = "model.onnx_data"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"num_hidden_layers": 1, "rope_scaling": None}
    hf = write_tiny_model(tmp_path / "hf", "llama", **sizes)
    return decoders.torch_folder(hf, tmp_path / "model")  # type: ignore[no-any-return]


def refused(folder: Path) -> str:
    """The one line that says why."""
    with pytest.raises(EdgeLLMError) as caught:
        open_source(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


# ---- where the weights lie -----------------------------------------------------------------------


def change_place(folder: Path, key: str, value: str | None, number: int = 0) -> None:
    """Rewrites an entry of external_data of the `number`th tensor that has any."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = [one for one in model.graph.initializer if one.external_data][number]
    entries = {entry.key: entry.value for entry in tensor.external_data}
    entries |= {key: value}
    del tensor.external_data[:]
    for name, content in entries.items():
        if content is not None:
            tensor.external_data.add(key=name, value=content)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    "place",
    ["../secret", "sub/../../secret", "/etc/passwd", "", ".", "..", "a//b", "./model.onnx_data",
     "C:\\secret", "..\\secret", "model.onnx_data/"],
)  # fmt: skip
def test_data_is_in_the_folder(folder: Path, place: str) -> None:
    (folder.parent / "secret").write_bytes(bytes(1 << 20))
    change_place(folder, "location", place)
    assert "not a file in the model's folder" in refused(folder)


def test_a_nul_in_a_place_is_refused(folder: Path) -> None:
    change_place(folder, "location", "model.onnx_data\0.png")
    assert "not a file in the model's folder" in refused(folder)


def test_a_folder_below_is_fine(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / DATA).rename(folder / "sub/data")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "sub/data" if entry.key == "location" else entry.value
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    assert folder / "sub/data" in open_source(folder).files


def test_links_are_not_followed(folder: Path) -> None:
    outside = folder.parent / "outside"
    (folder / DATA).rename(outside)
    (folder / DATA).symlink_to(outside)
    assert "symbolic link" in refused(folder)
    (folder / DATA).unlink()
    os.link(outside, folder / DATA)
    assert "hard links" in refused(folder)
    outside.unlink()
    open_source(folder)


def test_a_linked_folder_below_is_not_entered(folder: Path) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / DATA).rename(outside / "data")
    (folder / "sub").symlink_to(outside)
    change_place(folder, "location", "sub/data")
    assert "symbolic link" in refused(folder)


def test_what_is_no_file_is_not_opened(folder: Path) -> None:
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)  # to open it would wait for a writer
    assert "is not a file" in refused(folder)
    (folder / DATA).unlink()
    (folder / DATA).mkdir()
    assert "is not a file" in refused(folder)


def test_data_that_is_missing_or_only_a_pointer_is_named(folder: Path) -> None:
    data = (folder / DATA).read_bytes()
    for content, message in (
        (POINTER, "run git lfs pull"),
        (b"", "is empty: download it again"),
        (data[:-1], "truncated, download it again"),
    ):
        (folder / DATA).write_bytes(content)
        assert message in refused(folder)
    (folder / DATA).unlink()
    assert f"{DATA} is missing" in refused(folder)
    (folder / "model.onnx").write_bytes(POINTER)
    assert "run git lfs pull" in refused(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("offset", "-1", "impossible place"),
        ("offset", "0x10", "impossible place"),
        ("offset", "\u0663", "impossible place"),
        ("offset", "9" * 5000, "a name of 5000 bytes"),
        ("offset", "9" * 19, "truncated"),
        ("offset", "1000000000", "truncated"),
        ("length", "9" * 19, "truncated"),
        ("length", "4", "its shape"),
        ("length", "", "impossible place"),
        ("length", None, "its shape"),
    ],
)
def test_places_that_cannot_be_are_refused(
    folder: Path, key: str, value: str | None, message: str
) -> None:
    change_place(folder, key, value)
    assert message in refused(folder)


def test_tensors_do_not_overlap(folder: Path) -> None:
    change_place(folder, "offset", "4096", number=1)
    assert "overlap" in refused(folder)


# ---- the protobuf --------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])


def block(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


OPSET = block(8, varint(2 << 3) + varint(18))


def graph_of(*fields: bytes) -> bytes:
    return OPSET + block(7, b"".join(fields))


def tensor_of(*fields: bytes, name: bytes = b"w", kind: int = 1) -> bytes:
    return graph_of(block(5, block(8, name) + varint(2 << 3) + varint(kind) + b"".join(fields)))


def dims(*sizes: int) -> bytes:
    return block(1, b"".join(varint(size % 2**64) for size in sizes))


BROKEN: dict[str, tuple[bytes, str]] = {
    "another file": (b"GGUF\3\0\0\0" + bytes(64), "not an ONNX model"),
    "a pickle": (b"\x80\x02ctorch._utils" + b"\0" * 100, "not an ONNX model"),
    "no graph": (OPSET, "not an ONNX model"),
    "no opset": (block(7, b""), "not an ONNX model"),
    "two graphs": (graph_of() + block(7, b""), "two graphs"),
    "a field of 2^60 bytes": (b"\x3a" + varint(2**60), "claims 1152921504606846976 bytes"),
    "a varint of 11 bytes": (b"\x08" + b"\xff" * 11 + b"\x01", "damaged"),
    "a group": (b"\x0b", "damaged"),
    "9 dimensions": (tensor_of(dims(*[1] * 9)), "more than 8 dimensions"),
    "70000 dimensions": (tensor_of(dims(*[1] * 70_000)), "too long"),
    "dimension -1": (tensor_of(dims(-1)), "impossible shape"),
    "product of 2^160": (tensor_of(dims(2**40, 2**40, 2**40, 2**40)), "impossible shape"),
    "zero times 2^62": (tensor_of(dims(0, 2**62), block(9, b"")), "impossible shape"),
    "too few bytes": (tensor_of(dims(3), block(9, bytes(8))), "takes 12"),
    "too many bytes": (tensor_of(dims(1), block(9, bytes(8))), "takes 4"),
    "number by number": (tensor_of(dims(2), (varint(4 << 3 | 5) + bytes(4)) * 2), "number by"),
    "two initialisers": (graph_of(*[block(5, block(8, b"w"))] * 2), "two initialisers"),
    "no name": (graph_of(block(5, dims(1))), "two initialisers"),
    "a name of 1 MB": (tensor_of(name=b"w" * 10**6), "a name of 1000000 bytes"),
    "a name that is not UTF-8": (tensor_of(name=b"\xc3\x28"), "not UTF-8"),
    "segments": (tensor_of(block(3, b"")), "in segments"),
    "both here and there": (
        tensor_of(dims(1), block(9, bytes(4)), varint(14 << 3) + varint(1)),
        "both here and in another file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_one_line_that_says_what(case: str, folder: Path) -> None:
    data, message = BROKEN[case]
    (folder / "model.onnx").write_bytes(data)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (graph_of(block(1, b"") * 262_145), "more than 262144 nodes"),
        (graph_of(*(block(5, block(8, b"%d" % i)) for i in range(65_537))), "initialisers"),
        (graph_of(block(1, block(5, block(8, b"\1" * 65_537)))), "too long"),
        (graph_of(block(12, b"") * 65_537), "inputs or outputs"),
        (b"\x50\0" * 4_000_001, "more than 4000000 protobuf fields"),
    ],
)
def test_what_would_fill_memory_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_model(data, "x.onnx")


def test_graphs_within_graphs_are_not_entered() -> None:
    inner = b""
    for _ in range(5000):
        inner = block(1, block(5, block(6, inner)))
    model = parse_model(graph_of(inner), "x.onnx")
    assert len(model.nodes) == 1


def test_a_tensor_without_numbers_is_refused_where_it_is_used(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(one for one in model.graph.initializer if one.name == "epsilon")
    tensor.ClearField("raw_data")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    assert "'epsilon' has no data" in refused(folder)


# ---- graphs that are no decoder we know ----------------------------------------------------------


def save(model: Any, folder: Path) -> None:
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def nodes_of(model: Any, op: str) -> list[Any]:
    return [node for node in model.graph.node if node.op_type == op]


def embedding_of(model: Any) -> Any:
    return next(n for n in model.graph.node if n.input[:1] == ["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.opset_import[0], "version", 7), "operator set 7; edgellm reads 11"),
        (lambda m: setattr(m.opset_import[0], "version", 99), "operator set 99"),
        (lambda m: setattr(nodes_of(m, "Sigmoid")[0], "op_type", "Relu"), "Relu .* not supported"),
        (lambda m: setattr(nodes_of(m, "Sigmoid")[0], "domain", "x"), "Sigmoid .* not supported"),
        (lambda m: m.graph.node.pop(20), "which nothing before it makes"),
        (lambda m: m.graph.node.append(m.graph.node[5]), "a second time"),
        (lambda m: m.graph.output.pop(), "does not return the logits"),
        (lambda m: m.graph.ClearField("node"), "no embedding of"),
        (lambda m: m.functions.add(name="f"), "inline_local_functions"),
        (lambda m: m.training_info.add(), "training graph"),
        (lambda m: m.graph.sparse_initializer.add(), "sparse initialisers"),
        (lambda m: setattr(embedding_of(m), "op_type", "If"), "a merged decoder keeps it in If"),
    ],
)
def test_other_graphs_are_refused_in_one_line(
    change: Callable[[Any], object], message: str, folder: Path
) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    save(model, folder)
    assert re.search(message, refused(folder))


def test_other_quantisations_are_named(folder: Path, tmp_path: Path) -> None:
    folder = decoders.genai_folder(tmp_path / "hf", tmp_path / "onnx", decoders.GenaiOptions())
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    nodes_of(model, "MatMulNBits")[0].op_type = "MatMulBnb4"
    save(model, folder)
    with pytest.raises(UnsupportedModelError, match=r"MatMulBnb4.*on the way of the weights"):
        open_source(folder)


# ---- damage --------------------------------------------------------------------------------------


def mutate(data: bytearray, source: random.Random) -> None:
    for _ in range(source.randint(1, 3)):
        place = source.randrange(len(data))
        kind = source.randrange(3)
        if kind == 0:
            data[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            data[place : place + source.randrange(9)] = b""
        else:
            data[place : place + 4] = struct.pack("<I", source.getrandbits(32))


@pytest.mark.parametrize("make", ["torch", "genai"])
def test_damage_never_ends_in_another_error(make: str, folder: Path, tmp_path: Path) -> None:
    if make == "genai":
        options = decoders.GenaiOptions(is_embedding_quantized=True)
        folder = decoders.genai_folder(tmp_path / "hf", tmp_path / "genai", options)
    whole = (folder / "model.onnx").read_bytes()
    source = random.Random(3)
    read: Callable[[Path], Any] = open_source
    messages: list[str] = []
    for _ in range(300):
        data = bytearray(whole)
        mutate(data, source)
        (folder / "model.onnx").write_bytes(data)
        try:
            read(folder)
        except EdgeLLMError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert not any("\n" in message for message in messages)
