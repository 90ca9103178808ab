"""GGUF files: what is read is right, and a broken file is one line that says so."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    GGML_F32,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Tensor,
    Value,
    gguf_bytes,
    gguf_of_llama,
    gguf_string,
)
from tiny_models import write_tiny_model

from edgellm.errors import EdgeLLMError, FormatError, MissingExtraError, UnsupportedModelError
from edgellm.exporters.gguf import GGUFFile
from edgellm.exporters.gguf_model import load_gguf

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

ROW = np.arange(64, dtype="<f4").tobytes()
HUGE = 2**64 - 1


def write(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_model(
        folder,
        "llama",
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_scaling=None,
    )
    return gguf_of_llama(folder)


def test_fields_of_all_types_are_read(tmp_path: Path) -> None:
    values: dict[str, tuple[Any, Any]] = {
        "u8": (Value(U8, 255), 255),
        "i8": (Value(I8, -1), -1),
        "u16": (Value(U16, 65535), 65535),
        "i16": (Value(I16, -2), -2),
        "u32": (Value(U32, 2**32 - 1), 2**32 - 1),
        "i32": (Value(I32, -3), -3),
        "f32": (Value(F32, 0.5), 0.5),
        "bool": (Value(BOOL, 1), True),
        "string": (Value(STRING, "grüß 你好"), "grüß 你好"),
        "u64": (Value(U64, HUGE), HUGE),
        "i64": (Value(I64, -(2**63)), -(2**63)),
        "f64": (Value(F64, 1e-300), 1e-300),
        "strings": (["a", "", "b"], ["a", "", "b"]),
        "bools": (Value(BOOL, [0, 1], True), [False, True]),
        "ints": (Value(I16, [-1, 2], True), [-1, 2]),
        "none": (Value(F32, [], True), []),
    }
    path = write(tmp_path, gguf_bytes({key: value for key, (value, _) in values.items()}))
    assert GGUFFile(path).fields == {key: wanted for key, (_, wanted) in values.items()}


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rows_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    weights = np.random.default_rng(1).standard_normal((7, 96)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(weights, number)
    path = write(tmp_path, gguf_bytes({}, {"w": Tensor(packed.tobytes(), (96, 7), number.value)}))
    file = GGUFFile(path)
    assert file.dtype("w") == kind
    wanted = gguf.quants.dequantize(packed, number)
    assert np.array_equal(file.rows("w", 0, 7), wanted)
    assert np.array_equal(file.rows("w", 2, 3), wanted[2:5])


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes({}, {"w": Tensor(b"\0" * 64, (64, 1), 24)}))
    with pytest.raises(UnsupportedModelError, match="'w' is of type I8"):
        GGUFFile(path).rows("w", 0, 1)


def tensor(**changes: Any) -> list[tuple[str, Tensor]]:
    return [("w", Tensor(**{"data": ROW, "dims": (64,), **changes}))]


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "another file": (b"PK\3\4" + b"\0" * 100, "not a GGUF file"),
    "Git-LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
        "git lfs pull",
    ),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (gguf_bytes({}, version=1), "version 1"),
    "version 4": (gguf_bytes({}, version=4), "version 4"),
    "2^64 - 1 tensors": (gguf_bytes({}, num_tensors=HUGE), "tensors claimed"),
    "2^64 - 1 fields": (gguf_bytes({}, num_fields=HUGE), "fields claimed"),
    "one field too many": (gguf_bytes({"a": 1}, num_fields=2), "a field has no name"),
    "one tensor too many": (gguf_bytes({}, num_tensors=1), "truncated"),
    "name of 2^64 - 1 bytes": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE),
        "field name is 18446744073709551615 bytes",
    ),
    "string of 2^64 - 1 bytes": (
        gguf_bytes({"a": struct.pack("<IQ", STRING, HUGE)}),
        "field 'a' is 18446744073709551615 bytes",
    ),
    "string past the end": (gguf_bytes({"a": struct.pack("<IQ", STRING, 1 << 20)}), "truncated"),
    "array of 2^64 - 1": (gguf_bytes({"a": struct.pack("<IIQ", ARRAY, U8, HUGE)}), "items"),
    "array past the end": (
        gguf_bytes({"a": struct.pack("<IIQ", ARRAY, F64, 1 << 20)}),
        "truncated",
    ),
    "array of strings past the end": (
        gguf_bytes({"a": struct.pack("<IIQ", ARRAY, STRING, 1 << 24)}),
        "more than the file holds",
    ),
    "array of arrays": (
        gguf_bytes({"a": struct.pack("<IIQIIQ", ARRAY, ARRAY, 1, U8, 0, 0)}),
        "unknown type 9",
    ),
    "unknown field type": (gguf_bytes({"a": struct.pack("<IQ", 13, 0)}), "unknown type 13"),
    "bool of 2": (gguf_bytes({"a": struct.pack("<IB", BOOL, 2)}), "neither 0 nor 1"),
    "field twice": (gguf_bytes([("a", 1), ("a", 2)]), "occurs twice"),
    "field without a name": (gguf_bytes({"": 1}), "no name"),
    "not UTF-8": (gguf_bytes({"a": struct.pack("<IQ", STRING, 2) + b"\xc3\x28"}), "not UTF-8"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}), "not a power of two"),
    "alignment 24": (gguf_bytes({"general.alignment": 24}), "not a power of two"),
    "alignment 2^31": (gguf_bytes({"general.alignment": 2**31}), "not a power of two"),
    "alignment of text": (gguf_bytes({"general.alignment": "32"}), "is str, int expected"),
    "no dimensions": (gguf_bytes({}, tensor(dims=())), "0 dimensions"),
    "5 dimensions": (gguf_bytes({}, tensor(dims=(64, 1, 1, 1, 1))), "5 dimensions"),
    "2^32 - 1 dimensions": (gguf_bytes({}, tensor(num_dims=2**32 - 1)), "4294967295 dimensions"),
    "dimension 0": (gguf_bytes({}, tensor(dims=(64, 0))), "impossible shape"),
    "dimension 2^31": (gguf_bytes({}, tensor(dims=(2**31,))), "impossible shape"),
    "dimension 2^64 - 1": (gguf_bytes({}, tensor(dims=(HUGE,))), "impossible shape"),
    "product of 2^92": (gguf_bytes({}, tensor(dims=(2**30, 2**30, 2**30, 4))), "truncated"),
    "half a block": (gguf_bytes({}, tensor(dims=(40,), type=8)), "impossible shape"),
    "unknown tensor type": (gguf_bytes({}, tensor(type=9999)), "unknown type 9999"),
    "tensor twice": (gguf_bytes({}, tensor() * 2), "occurs twice"),
    "misaligned": (gguf_bytes({}, tensor(offset=1)), "not aligned"),
    "past the end": (gguf_bytes({}, tensor(offset=1 << 40)), "truncated"),
    "offset 2^64 - 32": (gguf_bytes({}, tensor(offset=2**64 - 32)), "truncated"),
    "overlap": (
        gguf_bytes({}, [("a", Tensor(ROW, (64,))), ("b", Tensor(ROW, (64,), offset=32))]),
        "overlap",
    ),
    "data cut short": (gguf_bytes({}, tensor(data=ROW[:-1])), "truncated"),
    "long tensor name": (gguf_bytes({}, [("w" * 2000, Tensor(ROW, (64,)))]), "at most 1024"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line_that_says_what(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    path = write(tmp_path, data)
    with pytest.raises(FormatError, match=message) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_every_truncation_is_found(tmp_path: Path, tiny_gguf: bytes) -> None:
    lengths = {*range(0, 600), *range(600, len(tiny_gguf), 997), len(tiny_gguf) - 1}
    for length in sorted(lengths):
        with pytest.raises(FormatError):
            GGUFFile(write(tmp_path, tiny_gguf[:length]))


def test_flipped_bits_never_end_in_another_error(tmp_path: Path, tiny_gguf: bytes) -> None:
    head = tiny_gguf.index(gguf_string("output_norm.weight"))
    source = random.Random(1)
    messages: list[str] = []
    for _ in range(300):
        data = bytearray(tiny_gguf)
        for _ in range(source.randint(1, 3)):
            data[source.randrange(head)] ^= 1 << source.randrange(8)
        try:
            load_gguf(write(tmp_path, bytes(data)))
        except EdgeLLMError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert not any("\n" in message for message in messages)


KEYS = (
    "general.architecture",
    "llama.block_count",
    "llama.context_length",
    "llama.attention.head_count",
    "llama.rope.freq_base",
    "llama.attention.layer_norm_rms_epsilon",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
)
WRONG = {
    "u64": Value(U64, HUGE),
    "negative": Value(I32, -1),
    "float": Value(F32, 0.25),
    "not a number": Value(F32, float("nan")),
    "text": Value(STRING, "x"),
    "list of bytes": Value(U8, [1, 2], True),
    "list of texts": Value(STRING, ["x"], True),
    "list of floats": Value(F32, [1.0], True),
    "empty list": Value(STRING, [], True),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", WRONG)
def test_a_field_of_a_wrong_type_is_refused(
    tmp_path: Path, tiny_gguf: bytes, key: str, kind: str
) -> None:
    file = GGUFFile(write(tmp_path, tiny_gguf))
    fields = dict(file.fields)
    tensors = {
        name: Tensor(tiny_gguf[t.offset : t.offset + t.size], t.shape[::-1], GGML_F32)
        for name, t in file.tensors.items()
    }
    fields["tokenizer.ggml.token_type"] = Value(I32, fields["tokenizer.ggml.token_type"], True)
    right = (key, kind) in {
        ("llama.rope.freq_base", "float"),
        ("llama.rope.freq_base", "u64"),
        ("llama.attention.layer_norm_rms_epsilon", "float"),
        ("llama.attention.layer_norm_rms_epsilon", "u64"),
        ("tokenizer.chat_template", "text"),
        ("tokenizer.ggml.merges", "empty list"),
    }
    path = write(tmp_path, gguf_bytes({**fields, key: WRONG[kind]}, tensors))
    if right:
        load_gguf(path)
        return
    with pytest.raises((FormatError, UnsupportedModelError)) as caught:
        load_gguf(path)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_a_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, gguf_bytes({"general.architecture": "llama"}))
    with pytest.raises(FormatError, match="vocabulary without a model"):
        load_gguf(path)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    fields = {"general.architecture": "llama", "split.count": Value(U16, 3)}
    with pytest.raises(UnsupportedModelError, match="one of 3 parts"):
        load_gguf(write(tmp_path, gguf_bytes(fields, tensor())))


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    fields = {"general.architecture": "mamba"}
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported"):
        load_gguf(write(tmp_path, gguf_bytes(fields, tensor())))


def test_without_the_gguf_package_the_command_to_get_it_is_named(
    tmp_path: Path, tiny_gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(MissingExtraError, match=r'pip install "edgellm\[export\]"'):
        GGUFFile(write(tmp_path, tiny_gguf))
