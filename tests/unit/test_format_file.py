"""The writer and the Python reader of .edge files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_files import (
    CALIBRATED,
    META,
    TENSORS,
    VECTORS,
    Image,
    changed_meta,
    tensor_content,
    write_edge,
)

from edgellm.errors import EdgeLLMError, FormatError, ModelNotFoundError
from edgellm.format import EdgeFile, EdgeWriter, spec
from edgellm.format.meta import canonical_json, check_meta, check_test_vectors, parse_json
from edgellm.format.spec import SectionType, tensor_bytes
from edgellm.types import TensorFormat

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def edge(tmp_path: Path) -> Path:
    path = tmp_path / "model.edge"
    write_edge(path)
    return path


def test_what_is_written_is_read_back(edge: Path) -> None:
    with EdgeFile.open(edge, verify=True) as file:
        assert file.meta == META
        assert file.test_vectors == VECTORS
        assert file.tokenizer_json == '{"version":"1.0"}'
        assert file.chat_templates == {"default": "{{ messages }}"}
        assert file.generation_config == {"top_k": 40}
        assert file.size == edge.stat().st_size
        assert list(file.tensors) == sorted(name for name, *_ in TENSORS)
        for name, tensor_format, rows, cols, section in TENSORS:
            tensor = file.tensors[name]
            assert (tensor.format, tensor.rows, tensor.cols) == (tensor_format, rows, cols)
            assert file.sections[tensor.section].tag == section
            data = file.tensor_data(name)
            assert np.array_equal(data, tensor_content(name, tensor.size))
            assert not data.flags.writeable


def test_model_id_is_the_hash_of_the_section_table(edge: Path) -> None:
    data = edge.read_bytes()
    with EdgeFile.open(edge) as file:
        end = spec.SUPERBLOCK_BYTES + len(file.sections) * spec.SECTION_ENTRY_BYTES
        assert file.model_id == hashlib.sha256(data[spec.SUPERBLOCK_BYTES : end]).hexdigest()


def test_everything_is_aligned_for_mapping(edge: Path) -> None:
    with EdgeFile.open(edge) as file:
        for section in file.sections:
            assert section.offset % (65536 if section.type == SectionType.WEIGHTS else 8) == 0
        assert all(tensor.offset % 4096 == 0 for tensor in file.tensors.values())


def test_arrays_outlive_the_file(edge: Path) -> None:
    with EdgeFile.open(edge) as file:
        data = file.tensor_data("embed")
    assert np.array_equal(data, tensor_content("embed", data.size))


def test_same_input_gives_the_same_bytes_in_any_order_and_from_any_thread(
    edge: Path, tmp_path: Path
) -> None:
    path = tmp_path / "other.edge"
    with EdgeWriter(path) as writer:
        for name, tensor_format, rows, cols, section in TENSORS:
            writer.add_tensor(name, tensor_format, rows, cols, section=section)
        writer.add_section(SectionType.GENERATION_CONFIG, b'{"top_k": 40}')
        writer.add_section(SectionType.CHAT_TEMPLATE, b"{{ messages }}", "default")
        writer.allocate(late_sections=3)
        pieces = []
        for name, tensor_format, rows, cols, _ in TENSORS:
            data = tensor_content(name, tensor_bytes(tensor_format, rows, cols))
            pieces += [
                (name, start, data[start : start + 100]) for start in range(0, len(data), 100)
            ]
        random.Random(1).shuffle(pieces)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda p: writer.write_tensor(p[0], p[2], offset=p[1]), pieces))
        writer.add_section(SectionType.TEST_VECTORS, canonical_json(VECTORS))
        writer.add_section(SectionType.META, canonical_json(META))
        writer.add_section(SectionType.TOKENIZER, b'{"version":"1.0"}')
        writer.finish()
    assert path.read_bytes() == edge.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("x.gguf", b"GGUF\x03\0\0\0", "edgellm export"),
        ("x.edge", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("x.safetensors", (2).to_bytes(8, "little") + b"{}" + bytes(8), "safetensors"),
        ("x.onnx", b"\x08\x07\x12\x07pytorch", "ONNX"),
        ("x.bin", b"PK\x03\x04" + bytes(60), "safetensors instead"),
        ("x.edge", b"", "empty"),
        ("x.edge", b"hello", "not a .edge file"),
        ("x.edge", spec.MAGIC, "truncated"),
    ],
)
def test_a_foreign_file_is_named_and_the_way_out_too(
    tmp_path: Path, name: str, content: bytes, hint: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FormatError, match=hint) as caught:
        EdgeFile.open(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_a_missing_file_and_a_pipe_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="folder"):
        EdgeFile.open(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no such file"):
        EdgeFile.open(tmp_path / "none.edge")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        EdgeFile.open(tmp_path / "pipe")


def test_verify_finds_one_flipped_bit_of_any_weight_section(edge: Path) -> None:
    data = edge.read_bytes()
    with EdgeFile.open(edge) as file:
        places = [(s.label, s.offset + s.size - 1) for s in file.sections if s.type == 7]
    for label, place in places:
        broken = bytearray(data)
        broken[place] ^= 1
        edge.write_bytes(broken)
        EdgeFile.open(edge).close()
        with pytest.raises(FormatError, match=label):
            EdgeFile.open(edge, verify=True)


def test_verify_finds_bytes_between_tensors(edge: Path) -> None:
    image = Image(edge.read_bytes())
    embed_end = image.place(0)[0] + tensor_bytes(TensorFormat.E4, 40, 64)
    edge.write_bytes(image.put(embed_end, "B", 1).sealed())
    EdgeFile.open(edge).close()
    with pytest.raises(FormatError, match="before tensor final_norm"):
        EdgeFile.open(edge, verify=True)


def test_texts_that_are_not_utf8_or_json_are_format_errors(edge: Path) -> None:
    image = Image(edge.read_bytes())
    image.replace_section(SectionType.CHAT_TEMPLATE, b"\xff")
    image.replace_section(SectionType.GENERATION_CONFIG, b"[" * 60000)
    image.replace_section(SectionType.TEST_VECTORS, b"{}")
    edge.write_bytes(image.sealed())
    with EdgeFile.open(edge) as file:
        for read in (lambda: file.chat_templates, lambda: file.generation_config):
            with pytest.raises(FormatError):
                read()
        with pytest.raises(FormatError, match="texts is missing"):
            _ = file.test_vectors


# ---- META -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ...}, "model is missing"),
        ({"model__hidden_size": ...}, "model.hidden_size is missing"),
        ({"model__hidden_size": "64"}, "model.hidden_size is str"),
        ({"model__hidden_size": 64.0}, "model.hidden_size is float"),
        ({"model__hidden_size": True}, "model.hidden_size is bool"),
        ({"model__hidden_size": 0}, "model.hidden_size is 0"),
        ({"model__ffn_size": 2**40}, "model.ffn_size"),
        ({"model__head_dim": 24}, "multiple of 16"),
        ({"model__num_kv_heads": 3}, "multiple of model.num_kv_heads"),
        ({"model__num_tokens": 41}, "larger than model.vocab_size"),
        ({"model__norm_eps": 0}, "model.norm_eps"),
        ({"model__norm_eps": None}, "model.norm_eps is not a number"),
        ({"model__activation": "relu"}, "model.activation"),
        ({"model__architecture": ""}, "model.architecture"),
        ({"model__is_tied": 1}, "model.is_tied"),
        ({"model__num_layers": 3}, "model.layers has 2 entries, not 3"),
        ({"model__layers": [{"rope": 1, "window": 0}] * 2}, r"model.layers\[0\].rope is 1"),
        ({"model__layers": [{"rope": 0, "window": -1}] * 2}, r"model.layers\[0\].window is -1"),
        ({"model__layers": [1, 2]}, r"model.layers\[0\] is int"),
        ({"model__has_hadamard": 1}, "model.has_hadamard is int"),
        ({"model__has_hadamard": True, "model__ffn_size": 40}, "columns that 32 does not divide"),
        ({"tokenizer__bos_id": 38}, "tokenizer.bos_id is 38"),
        ({"tokenizer__bos_id": None}, "tokenizer.add_bos is set"),
        ({"tokenizer__eos_ids": 2}, "tokenizer.eos_ids is int"),
        ({"tokenizer__eos_ids": [-1]}, "tokenizer.eos_ids has id -1"),
        ({"tokenizer__special_tokens": {"a": None}}, "tokenizer.special_tokens.a"),
        ({"source__files": [{"name": "x", "sha256": "0"}]}, "sha256"),
        ({"quantization": ...}, "quantization is missing"),
        ({"quantization__quality": "best"}, "quantization.calibration is missing"),
        ({"quantization": CALIBRATED | {"quality": 1}}, "quantization.quality is int"),
        (
            {"quantization": CALIBRATED | {"calibration": {"origin": "own", "sha256": "x"}}},
            "quantization.calibration.sha256 is not 64",
        ),
        (
            {"quantization": CALIBRATED | {"measured": {"kl": "small"}}},
            "quantization.measured.kl is not a number",
        ),
        ({"rope": {}}, "rope is dict"),
        ({"exporter": 1}, "exporter is int"),
    ],
)
def test_meta_names_the_member_that_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_meta(changed_meta(**changes))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1,]",
        b'{"a":1,"a":2}',
        b'{"b":1,"a":2}',
        b"NaN",
        b"-Infinity",
        b"01",
        b"9223372036854775808",
        b"1" * 5000,
        b"0.123456789012345678",
        b"1e100",
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b'"\x00"',
        b"\xef\xbb\xbf1",
        b"[" * 33 + b"]" * 33,
        b"[" * 100_000,
    ],
)
def test_json_outside_the_limits_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError, match="META") as caught:
        parse_json(text, "META")
    assert len(str(caught.value)) < 200


def test_json_within_the_limits_is_read() -> None:
    text = b"[" * 32 + b"-1.5e-03" + b"]" * 32
    value = parse_json(text, "META")
    for _ in range(32):
        (value,) = value
    assert value == -0.0015
    assert parse_json(b" -9223372036854775808\n", "META") == -(2**63)
    assert parse_json('{"":1,"a":"☃","b":[]}'.encode(), "META") == {"": 1, "a": "☃", "b": []}


@pytest.mark.parametrize(
    "vectors",
    [
        {"texts": [], "chats": []},
        {**VECTORS, "texts": [{"text": "a", "ids": [38]}]},
        {**VECTORS, "texts": [{"text": 1, "ids": []}]},
        {**VECTORS, "greedy": [{"ids": [1]}]},
        {**VECTORS, "chats": [{"messages": [], "rendered": "", "ids": []}]},
    ],
)
def test_test_vectors_are_checked(vectors: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        check_test_vectors(vectors, META["model"]["num_tokens"])


# ---- writing ----------------------------------------------------------------------------------


def only_file(folder: Path) -> str:
    (name,) = [entry.name for entry in folder.iterdir()]
    return name


def begin(writer: EdgeWriter) -> None:
    writer.add_tensor("embed", TensorFormat.F32, 4, 4, section="globals")
    writer.allocate()


def test_the_writer_refuses_what_the_reader_would(tmp_path: Path) -> None:
    writer = EdgeWriter(tmp_path / "x.edge")
    with pytest.raises(ValueError, match="name"):
        writer.add_tensor("a b", TensorFormat.F32, 1, 1, section="globals")
    with pytest.raises(ValueError, match="shape"):
        writer.add_tensor("a", TensorFormat.F32, 0, 1, section="globals")
    with pytest.raises(ValueError, match="tag"):
        writer.add_tensor("a", TensorFormat.F32, 1, 1, section="Layers 0")
    with pytest.raises(FormatError, match="model is missing"):
        writer.add_section(SectionType.META, b"{}")
    with pytest.raises(FormatError, match="bytes"):
        writer.add_section(SectionType.TOKENIZER, b"")
    with pytest.raises(FormatError, match="UTF-8"):
        writer.add_section(SectionType.CHAT_TEMPLATE, b"\xff", "default")
    with pytest.raises(ValueError, match="tag"):
        writer.add_section(SectionType.CHAT_TEMPLATE, b"x")
    with pytest.raises(ValueError, match="after the tensors"):
        writer.allocate()
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_file_never_appears(edge: Path) -> None:
    before = edge.read_bytes()
    with EdgeWriter(edge) as writer:
        begin(writer)
        writer.write_tensor("embed", bytes(32))
        with pytest.raises(ValueError, match="32 of 64 bytes"):
            writer.finish()
        writer.write_tensor("embed", bytes(32), offset=32)
        with pytest.raises(ValueError, match="bytes 60"):
            writer.write_tensor("embed", bytes(8), offset=60)
        with pytest.raises(ValueError, match="META is missing"):
            writer.finish()
    with contextlib.suppress(KeyboardInterrupt), EdgeWriter(edge) as writer:
        begin(writer)
        raise KeyboardInterrupt
    assert only_file(edge.parent) == "model.edge"
    assert edge.read_bytes() == before


def test_a_completed_file_can_be_tried_out_and_sections_replaced(
    edge: Path, tmp_path: Path
) -> None:
    expected = edge.read_bytes()
    longer = {**META, "exporter": "a longer name, so that everything behind it moves by 51 bytes"}
    with EdgeWriter(edge) as writer:
        for name, tensor_format, rows, cols, section in TENSORS:
            writer.add_tensor(name, tensor_format, rows, cols, section=section)
        writer.add_section(SectionType.TOKENIZER, b'{"version":"1.0"}')
        writer.add_section(SectionType.CHAT_TEMPLATE, b"{{ messages }}", "default")
        writer.add_section(SectionType.GENERATION_CONFIG, b'{"top_k": 40}')
        writer.allocate()
        for name, tensor_format, rows, cols, _ in TENSORS:
            size = tensor_bytes(tensor_format, rows, cols)
            writer.write_tensor(name, tensor_content(name, size))
        writer.add_section(SectionType.META, canonical_json(longer))
        writer.add_section(SectionType.TEST_VECTORS, canonical_json(VECTORS))
        with EdgeFile.open(writer.complete(), verify=True) as file:
            assert file.meta == longer
        assert edge.read_bytes() == expected
        writer.add_section(SectionType.META, canonical_json(META), replace=True)
        writer.finish()
    assert edge.read_bytes() == expected


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "model.edge"
    link.symlink_to(tmp_path / "real" / "model.edge")
    write_edge(link)
    assert link.is_symlink()
    EdgeFile.open(tmp_path / "real" / "model.edge", verify=True).close()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with (
        EdgeWriter(tmp_path / "none" / "x.edge") as writer,
        pytest.raises(EdgeLLMError, match="no folder"),
    ):
        begin(writer)


def run_script(code: str, *arguments: Path) -> subprocess.Popen[str]:
    code = f"import sys; sys.path.insert(0, {str(TOOLS)!r})\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def test_a_full_disk_is_known_at_once_and_the_old_file_stays(edge: Path) -> None:
    before = edge.read_bytes()
    code = """
        import resource
        from edge_files import write_edge
        from edgellm.errors import EdgeLLMError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            write_edge(sys.argv[1])
        except EdgeLLMError as error:
            print(error)
    """
    output, _ = run_script(code, edge).communicate(timeout=60)
    assert "model.edge needs 2.3 MB, but" in output
    assert "MB free" in output
    assert output.count("\n") == 1
    assert only_file(edge.parent) == "model.edge"
    assert edge.read_bytes() == before


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_failing_system_call_leaves_the_old_file(
    edge: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = edge.read_bytes()
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(EdgeLLMError, match="No space left"):
        write_edge(edge)
    assert only_file(edge.parent) == "model.edge"
    assert edge.read_bytes() == before


def test_a_file_system_that_cannot_reserve_is_asked_for_its_free_space(
    edge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    before = edge.read_bytes()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    write_edge(edge)
    assert edge.read_bytes() == before
    full = os.statvfs(edge.parent)
    monkeypatch.setattr(os, "fstatvfs", lambda file: os.statvfs_result([*full[:4], 0, *full[5:]]))
    with pytest.raises(EdgeLLMError, match="No space left"):
        write_edge(edge)
    assert only_file(edge.parent) == "model.edge"


@pytest.fixture
def half_written(edge: Path) -> Callable[[], subprocess.Popen[str]]:
    """Starts a process that stops in the middle of writing `edge`."""
    code = """
        from edgellm.format import EdgeWriter
        from edgellm.types import TensorFormat
        with EdgeWriter(sys.argv[1]) as writer:
            writer.add_tensor("a", TensorFormat.F32, 512, 512, section="globals")
            writer.allocate()
            writer.write_tensor("a", bytes(1000))
            print("ready", flush=True)
            import time
            time.sleep(60)
    """

    def start() -> subprocess.Popen[str]:
        process = run_script(code, edge)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    return start


def test_sigkill_leaves_the_old_file_and_the_next_run_cleans_up(
    edge: Path, half_written: Callable[[], subprocess.Popen[str]]
) -> None:
    before = edge.read_bytes()
    process = half_written()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert edge.read_bytes() == before
    (left,) = [entry.name for entry in edge.parent.iterdir() if entry != edge]
    assert left.startswith(".model.edge.")
    write_edge(edge)
    assert only_file(edge.parent) == "model.edge"


def test_a_running_writer_keeps_its_temporary(
    edge: Path, half_written: Callable[[], subprocess.Popen[str]]
) -> None:
    process = half_written()
    try:
        write_edge(edge)
        assert len(list(edge.parent.iterdir())) == 2
    finally:
        process.kill()
        process.communicate()
