"""The exporter: every weight once, the same bytes each time, and nothing left behind."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from source_files import gguf_of_llama
from tiny_models import ARCHITECTURES, write_tiny_model

from edgellm.cli import cli
from edgellm.errors import (
    FormatError,
    ModelNotFoundError,
    TemplateError,
    UnsupportedModelError,
)
from edgellm.exporters.export import ExportOptions, export_model, plan_export
from edgellm.exporters.open_source import open_source
from edgellm.exporters.plan import CHUNK_WEIGHTS, chunks, read_chunk
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize
from edgellm.format.spec import SectionType
from edgellm.models import apply_rewrite, find_hf, fuse, fused_parts
from edgellm.types import TensorFormat

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "small", "llama", **SMALL)


def export(source: Path, output: Path, **options: Any) -> Any:
    return export_model(source, output, ExportOptions(**options))


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def change_weights(folder: Path, update: Callable[[dict[str, npt.NDArray[Any]]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    update(tensors)
    save_file(tensors, folder / "model.safetensors")


def expected_tensors(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The file's tensors in float32, made from the folder without the exporter."""
    config = json.loads((folder / "config.json").read_text())
    spec = find_hf(config)
    description = spec.model_from_hf(config)
    source = load_file(folder / "model.safetensors")
    canonical = {
        item.canonical_name: apply_rewrite(item.rewrite, source[item.source_name], description)
        for item in spec.sources("hf", description)
    }
    wanted = {
        name: fuse(name, [canonical[part] for part in parts])
        for name, parts in fused_parts(description).items()
    }
    for number, table in enumerate(description.inv_freqs):
        wanted[f"rope.{number}.inv_freq"] = table.reshape(1, -1)
    return wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_the_file_is_its_source_s(
    architecture: str, tiny_hf: Callable[[str], Path], tiny_edge_of: Callable[[str], Path]
) -> None:
    wanted = expected_tensors(tiny_hf(architecture))
    with EdgeFile.open(tiny_edge_of(architecture), verify=True) as file:
        assert set(file.tensors) == set(wanted)
        for name, tensor in file.tensors.items():
            found = dequantize(file.tensor_data(name), tensor.format, tensor.rows, tensor.cols)
            if tensor.format == TensorFormat.F32:
                assert np.array_equal(found, wanted[name]), name
                continue
            error = np.sqrt(np.mean((found - wanted[name]) ** 2) / np.mean(wanted[name] ** 2))
            assert error < {TensorFormat.E4: 0.09, TensorFormat.E8: 0.01}[tensor.format], name


def test_norms_biases_and_tables_stay_float32_and_the_rest_is_int4(
    tiny_edge_of: Callable[[str], Path],
) -> None:
    with EdgeFile.open(tiny_edge_of("qwen2")) as file:
        formats = {name.rpartition(".")[2]: t.format for name, t in file.tensors.items()}
    assert formats == {
        "embed": TensorFormat.E8,
        "head": TensorFormat.E8,
        "final_norm": TensorFormat.F32,
        "inv_freq": TensorFormat.F32,
        "attn_norm": TensorFormat.F32,
        "qkv": TensorFormat.E4,
        "qkv_bias": TensorFormat.F32,
        "o": TensorFormat.E4,
        "ffn_norm": TensorFormat.F32,
        "gate_up": TensorFormat.E4,
        "down": TensorFormat.E4,
    }


def test_bytes_do_not_depend_on_threads_or_on_the_run(
    tiny_hf: Callable[[str], Path], tmp_path: Path
) -> None:
    digests = set()
    for number, threads in enumerate((1, 2, 5, None)):
        output = tmp_path / f"{number}.edge"
        export(tiny_hf("gemma3"), output, threads=threads)
        digests.add(hashlib.sha256(output.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_tensor_is_read_in_pieces_of_whole_heads_and_panels(
    tiny_hf: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_export(tiny_hf("llama"))
    head_dim = plan.source.description.head_dim
    whole = {
        tensor.name: [read_chunk(plan.source, chunk) for chunk in chunks(tensor, head_dim)]
        for tensor in plan.tensors
        if tensor.format != TensorFormat.F32
    }
    monkeypatch.setattr("edgellm.exporters.plan.CHUNK_WEIGHTS", 20_000)
    for tensor in plan.tensors:
        if tensor.name not in whole:
            continue
        pieces = list(chunks(tensor, head_dim))
        assert len(pieces) > len(whole[tensor.name])
        assert all(piece.first_row % 16 == 0 for piece in pieces)
        assert sum(piece.num_rows for piece in pieces) == tensor.rows
        joined = np.concatenate([read_chunk(plan.source, piece) for piece in pieces])
        assert np.array_equal(joined, np.concatenate(whole[tensor.name]))


def test_a_large_tensor_is_never_whole_in_memory(small: Path) -> None:
    plan = plan_export(small)
    largest = max(plan.tensors, key=lambda tensor: tensor.rows * tensor.cols)
    assert CHUNK_WEIGHTS * 4 <= 16 << 20
    for chunk in chunks(largest, plan.source.description.head_dim):
        assert chunk.num_rows * largest.cols <= CHUNK_WEIGHTS


@pytest.mark.parametrize(("head", "wanted"), [("e4", 1), ("q8", 2), ("auto", 2)])
def test_the_head_s_format_is_as_asked(small: Path, tmp_path: Path, head: Any, wanted: int) -> None:
    export(small, tmp_path / "x.edge", head=head)
    with EdgeFile.open(tmp_path / "x.edge") as file:
        assert file.tensors["embed"].format == wanted
        assert file.meta["quantization"]["head"] == {1: "e4", 2: "q8"}[wanted]


def test_gguf_and_folder_of_one_model_give_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    folder = write_tiny_model(tmp_path / "m", "llama", rope_scaling=None, num_hidden_layers=2)
    (tmp_path / "m.gguf").write_bytes(gguf_of_llama(folder))
    export(folder, tmp_path / "hf.edge")
    report = export(tmp_path / "m.gguf", tmp_path / "gguf.edge")
    assert report.plan.source.kind == "gguf"
    with EdgeFile.open(tmp_path / "hf.edge") as hf, EdgeFile.open(tmp_path / "gguf.edge") as gguf:
        assert set(hf.tensors) == set(gguf.tensors)
        for name in hf.tensors:
            assert np.array_equal(hf.tensor_data(name), gguf.tensor_data(name)), name
        assert hf.meta["model"] == gguf.meta["model"]
        assert hf.test_vectors["greedy"][-1] == gguf.test_vectors["greedy"][-1]


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_precision_sources_are_read(small: Path, tmp_path: Path, dtype: str) -> None:
    def halve(tensors: dict[str, npt.NDArray[Any]]) -> None:
        for name, array in tensors.items():
            tensors[name] = array.astype(np.float16)

    if dtype == "F16":
        change_weights(small, halve)
    else:
        torch = pytest.importorskip("torch", reason="writes the bfloat16 file")
        from safetensors.torch import save_file as save_torch

        tensors = load_file(small / "model.safetensors")
        save_torch(
            {name: torch.from_numpy(array).bfloat16() for name, array in tensors.items()},
            small / "model.safetensors",
        )
    report = export(small, tmp_path / "x.edge")
    assert {kind for t in report.plan.tensors for kind in t.source_types} == {dtype}
    with EdgeFile.open(tmp_path / "x.edge", verify=True) as file:
        assert file.meta["quantization"]["tensors"]["embed"] == dtype


@pytest.mark.parametrize("cols", [16, 33, 100])
def test_odd_sizes_are_padded(tmp_path: Path, cols: int) -> None:
    changes = {**SMALL, "hidden_size": cols, "intermediate_size": cols - 15}
    folder = write_tiny_model(tmp_path / "m", "llama", **changes)
    export(folder, tmp_path / "x.edge")
    wanted = expected_tensors(folder)
    with EdgeFile.open(tmp_path / "x.edge", verify=True) as file:
        for name, tensor in file.tensors.items():
            assert (tensor.rows, tensor.cols) == wanted[name].shape
            found = dequantize(file.tensor_data(name), tensor.format, tensor.rows, tensor.cols)
            assert np.abs(found - wanted[name]).max() < 0.1 * np.abs(wanted[name]).max() + 1e-6


def test_all_strays_are_named_in_one_error(small: Path, tmp_path: Path) -> None:
    def update(tensors: dict[str, npt.NDArray[Any]]) -> None:
        norm = tensors.pop("model.norm.weight")
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = norm
        tensors["model.extra"] = norm
        tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros((3, 64), np.float32)

    change_weights(small, update)
    with pytest.raises(FormatError) as caught:
        export(small, tmp_path / "x.edge")
    message = str(caught.value)
    assert "missing: model.layers.0.mlp.up_proj.weight, model.norm.weight;" in message
    assert "model.layers.0.mlp.gate_proj.weight (3, 64) instead of (40, 64);" in message
    assert "left over: model.extra, model.layers.0.self_attn.q_proj.bias" in message
    assert not (tmp_path / "x.edge").exists()


def test_a_head_size_that_does_not_fit_the_weights_is_refused(small: Path) -> None:
    change_json(small / "config.json", head_dim=32)
    with pytest.raises(FormatError, match=r"q_proj\.weight \(32, 64\) instead of \(64, 64\)"):
        plan_export(small)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(small: Path, tmp_path: Path) -> None:
    change_weights(
        small, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0})
    )
    export(small, tmp_path / "x.edge")
    change_weights(small, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * 2}))
    with pytest.raises(FormatError, match=r"'lm_head\.weight' differs"):
        export(small, tmp_path / "x.edge")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named_and_the_old_file_stays(
    small: Path, tmp_path: Path, name: str, value: float
) -> None:
    output = tmp_path / "x.edge"
    output.write_bytes(b"old")

    def spoil(tensors: dict[str, npt.NDArray[Any]]) -> None:
        tensors[name].reshape(-1)[7] = value

    change_weights(small, spoil)
    with pytest.raises(FormatError, match=f"{name}' holds NaN or infinity"):
        export(small, output)
    assert output.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_source_is_never_overwritten(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    folder = write_tiny_model(tmp_path / "m", "llama", **SMALL, rope_scaling=None)
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf_of_llama(folder))
    before = source.read_bytes()
    with pytest.raises(ValueError, match="is read by this command"):
        export(source, source)
    assert source.read_bytes() == before


def test_progress_only_grows_and_ends_at_the_total(small: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = export_model(
        small, tmp_path / "x.edge", progress=lambda done, total: calls.append((done, total))
    )
    assert {total for _, total in calls} == {report.plan.weight_bytes}
    done = [value for value, _ in calls]
    assert done == sorted(done)
    assert done[-1] == report.plan.weight_bytes


def test_meta_tells_where_the_model_comes_from(small: Path, tmp_path: Path) -> None:
    export(small, tmp_path / "x.edge")
    with EdgeFile.open(tmp_path / "x.edge") as file:
        meta = file.meta
        assert file.section_bytes(SectionType.TOKENIZER) == (small / "tokenizer.json").read_bytes()
        config = file.section_bytes(SectionType.GENERATION_CONFIG)
        assert config == (small / "generation_config.json").read_bytes()
    assert meta["source"]["kind"] == "hf"
    for entry in meta["source"]["files"]:
        digest = hashlib.sha256((small / entry["name"]).read_bytes()).hexdigest()
        assert entry["sha256"] == digest
    assert meta["tokenizer"]["eos_ids"] == [2, 0]
    assert meta["model"]["num_tokens"] == meta["model"]["vocab_size"] - 9
    assert str(tmp_path) not in json.dumps(meta)


def test_vectors_are_complete(small: Path, tmp_path: Path) -> None:
    report = export(small, tmp_path / "x.edge")
    with EdgeFile.open(tmp_path / "x.edge") as file:
        vectors = file.test_vectors
        num_tokens = file.meta["model"]["num_tokens"]
    assert len(vectors["texts"]) >= 32
    assert len({entry["text"] for entry in vectors["texts"]}) == len(vectors["texts"])
    assert len(vectors["chats"]) == 8
    assert [len(entry["continuation"]) for entry in vectors["greedy"]] == [16] * 4
    assert all(i < num_tokens for entry in vectors["greedy"] for i in entry["continuation"])
    assert report.notes == ("9 rows of the vocabulary have no token; they are never sampled",)


def test_chats_that_the_template_refuses_are_reported(small: Path, tmp_path: Path) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    change_json(small / "tokenizer_config.json", chat_template=template)
    report = export(small, tmp_path / "x.edge")
    refused = [note for note in report.notes if "no system" in note]
    assert len(refused) == 2
    with EdgeFile.open(tmp_path / "x.edge") as file:
        assert len(file.test_vectors["chats"]) == 6


def test_chats_that_depend_on_the_date_are_left_out(small: Path, tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    change_json(small / "tokenizer_config.json", chat_template=template)
    report = export(small, tmp_path / "x.edge")
    assert sum("depends on the date" in note for note in report.notes) == 8
    with EdgeFile.open(tmp_path / "x.edge") as file:
        assert file.test_vectors["chats"] == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("line one\n{% if %}", "line 2"),
        ("{{ .Messages }}", "line 1"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ '\\ud800' }}", "chat template 'default'"),
    ],
)
def test_a_template_that_never_works_is_an_error(
    small: Path, tmp_path: Path, template: str, message: str
) -> None:
    change_json(small / "tokenizer_config.json", chat_template=template)
    with pytest.raises(TemplateError, match=message):
        export(small, tmp_path / "x.edge")
    assert not (tmp_path / "x.edge").exists()


def test_a_template_s_name_must_be_one_the_file_can_hold(small: Path, tmp_path: Path) -> None:
    templates = [{"name": "Tool Use", "template": "x"}]
    change_json(small / "tokenizer_config.json", chat_template=templates)
    with pytest.raises(UnsupportedModelError, match="'Tool Use'"):
        export(small, tmp_path / "x.edge")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.edge", b"\x89EDGE\r\n\x1a", "an .edge file already"),
        ("a.safetensors", b"\0" * 16, "holds weights only"),
        ("a.bin", b"\x80\x02", "a pickle"),
        ("a.pt", b"PK\3\4", "a pickle"),
        ("a.gguf", b"", "no GGUF file, ONNX model or"),
    ],
)
def test_what_is_no_model_says_so(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        open_source(path)


def test_a_missing_source_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_source(tmp_path / "nothing")


@pytest.mark.parametrize("options", [{"head": "q4"}, {"threads": 0}, {"threads": 5000}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"head is|threads is"):
        ExportOptions(**options)


# ---- the command -------------------------------------------------------------------------------


def test_the_command_needs_nothing_but_the_source(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["export", str(small)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "small-int4.edge").exists()
    assert result.stdout.startswith("small-int4.edge: ")
    assert result.stdout.count("\n") == 1
    assert CliRunner().invoke(cli, ["verify", "small-int4.edge"]).exit_code == 0


def test_a_dry_run_shows_everything_and_writes_nothing(small: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    output = tmp_path / "x.edge"
    result = CliRunner().invoke(cli, ["export", str(small), "-o", str(output), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert sorted(tmp_path.rglob("*")) == before
    for wanted in (
        "EOS          2 b'<|stop|>', 0 b'<|end|>'",
        "| layers.*.gate_up   |     1 |  96 x 64 | F32      | E4, E5, E8 |",
        "| rope.0.inv_freq    |     1 |",
        "<|start|>user\nHello!<|stop|>\n",
    ):
        assert wanted in result.stdout


def test_a_dry_run_of_fast_knows_every_format(small: Path) -> None:
    arguments = ["export", str(small), "--quality", "fast", "--dry-run"]
    result = CliRunner().invoke(cli, arguments)
    assert "| layers.*.gate_up   |     1 |  96 x 64 | F32      | E4  |" in result.stdout


@pytest.mark.parametrize("is_dry", [False, True])
def test_what_cannot_be_done_is_wrong_usage(small: Path, is_dry: bool) -> None:
    before = {path: path.read_bytes() for path in small.iterdir()}
    dry = ["--dry-run"] if is_dry else []
    for arguments, reason in (
        (["-o", str(small / "config.json")], "config.json is read by this command"),
        (["--head", "q8", "--bits", "4.5"], "4.5 bits a weight are too few: with E4 wherever"),
    ):
        result = CliRunner().invoke(cli, ["export", str(small), *arguments, *dry])
        assert (result.exit_code, reason in result.stderr) == (2, True), result.output
    assert {path: path.read_bytes() for path in small.iterdir()} == before


def test_quiet_prints_nothing(small: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "x.edge")
    result = CliRunner().invoke(cli, ["export", str(small), "-o", output, "--quiet"])
    assert (result.exit_code, result.output) == (0, "")


def test_wrong_usage_is_exit_code_2(small: Path) -> None:
    assert CliRunner().invoke(cli, ["export"]).exit_code == 2
    assert CliRunner().invoke(cli, ["export", str(small), "--head", "q2"]).exit_code == 2
    assert CliRunner().invoke(cli, ["export", str(small), "--threads", "0"]).exit_code == 2


def test_exporting_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, edgellm.exporters.export, edgellm.cli.export;"
        "print({'torch', 'transformers', 'gguf', 'jinja2'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
