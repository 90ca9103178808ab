"""The command: what it prints where, its exit codes, and one line for every failure."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from edge_files import CALIBRATED, write_requantized

from edgellm import cli
from edgellm.format import EdgeFile
from edgellm.types import TensorFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "data/edgellm/models"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def run(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls the entry point in this process; stdin is a pipe."""

    def call(*arguments: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["edgellm", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        output = capsys.readouterr()
        return Result(code=int(exit_.value.code or 0), out=output.out, err=output.err)

    return call


@pytest.fixture(scope="module")
def path(tiny_edge_of: Callable[[str], Path]) -> Path:
    return tiny_edge_of("llama")


def assert_one_line(result: Result, *parts: str) -> None:
    assert result.code == 1
    assert result.err.startswith("edgellm: ")
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


def test_help_names_every_command_and_imports_no_engine() -> None:
    code = "import sys; sys.argv = ['edgellm', '-h']; from edgellm import cli\ntry: cli.main()\n"
    code += "except SystemExit: print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    for name in ("bench", "export", "kernels", "list", "pull", "rm", "run", "show", "verify"):
        assert f"\n  {name} " in output
    modules = set(output.splitlines()[-1].split())
    assert modules & {"numpy", "tokenizers", "jinja2", "edgellm.engine", "ctypes"} == set()


@pytest.mark.parametrize("arguments", [["nonsense"], ["run"], ["run", "x", "--top-k", "many"]])
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert "Usage: edgellm" in result.err


def test_an_answer_goes_to_stdout_and_its_figures_to_stderr(run: Run, path: Path) -> None:
    result = run("run", path, "Hello", "-n", 4)
    assert result.code == 0
    assert result.err.startswith("[prompt ")
    for part in ("tok/s", "generated", "first token", "memory"):
        assert part in result.err
    assert "seed" not in result.err
    assert "tok/s" not in result.out


def test_json_is_one_object_and_repeats_with_its_seed(run: Run, path: Path) -> None:
    options = ("run", path, "Hello", "--json", "--temperature", 2, "--max-tokens", 6)
    first = json.loads(run(*options).out)
    assert first["stats"]["generated_tokens"] <= 6
    assert first["finish_reason"] in ("stop", "length")
    again = json.loads(run(*options, "--seed", first["stats"]["seed"]).out)
    assert (again["text"], again["ids"]) == (first["text"], first["ids"])


def test_a_prompt_comes_through_a_pipe(run: Run, path: Path) -> None:
    given = json.loads(run("run", path, "Hello you", "--json", "-n", 4).out)
    for arguments in ((), ("-",)):
        piped = json.loads(run("run", path, *arguments, "--json", "-n", 4, stdin=b"Hello you").out)
        assert piped["ids"] == given["ids"]


def test_raw_text_is_not_a_chat(run: Run, path: Path) -> None:
    chat = json.loads(run("run", path, "Hello", "--json", "-n", 1).out)
    raw = json.loads(run("run", path, "Hello", "--raw", "--json", "-n", 1).out)
    assert raw["stats"]["prompt_tokens"] < chat["stats"]["prompt_tokens"]
    system = json.loads(run("run", path, "Hello", "--system", "Be brief", "--json", "-n", 1).out)
    assert system["stats"]["prompt_tokens"] > chat["stats"]["prompt_tokens"]
    assert run("run", path, "Hello", "--raw", "--system", "Be brief").code == 2


def test_a_model_may_be_a_pulled_name(run: Run, path: Path, store: Path) -> None:
    (store / "tiny.edge").symlink_to(path)
    assert run("run", "tiny", "Hello", "-n", 1).code == 0
    listed = {row["name"]: row for row in json.loads(run("list", "--json").out)}
    assert listed["tiny"]["size_bytes"] == path.stat().st_size
    assert listed["smollm2"]["size_bytes"] is None
    assert "edgellm pull smollm2" in run("list").out
    assert "deleted tiny" in run("rm", "tiny").out
    assert not (store / "tiny.edge").exists()
    assert path.exists()


def test_failures_are_one_line_that_says_what_to_do(
    run: Run, path: Path, store: Path, tmp_path: Path
) -> None:
    assert_one_line(run("run", "smollm2", "Hi"), "edgellm pull smollm2")
    assert_one_line(run("run", "nonsense", "Hi"), "nonsense", "smollm2")
    assert_one_line(run("run", tmp_path / "no.edge", "Hi"), "no.edge", "no such file")
    assert_one_line(run("rm", "nonsense"), "nonsense")
    assert_one_line(run("rm", path), "has not been pulled")
    assert_one_line(run("run", path, "Hi", "--temperature", "-1"), "temperature")
    assert_one_line(run("run", path, "Hi", "--isa", "sse9"), "sse9")
    assert_one_line(run("run", path, "Hi", "-c", "100000"), "100000", "512")
    assert_one_line(run("run", path, "Hi " * 600), "512")
    assert_one_line(run("run", path, "a\udcffb"), "Unicode")
    assert_one_line(run("run", path, stdin=b"a\xffb"), "UTF-8", "byte 1")
    assert_one_line(run("bench", path, "-p", "600"), "512")
    assert_one_line(run("show", path, "--board", "abacus"), "raspberry-pi-5-8gb")
    assert run("pull", "nonsense").code == 2
    assert run("run", path, "--raw", stdin=b"Hi").code == 0


@pytest.mark.parametrize("command", ["run", "show", "verify", "bench"])
def test_what_is_no_edge_file_is_named_with_the_way_to_one(
    run: Run, tmp_path: Path, command: str
) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    assert_one_line(run(command, gguf), f"edgellm export {gguf} ")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert_one_line(run(command, folder), f"edgellm export {folder} ")


def test_show_tells_what_a_file_is_and_needs(run: Run, path: Path) -> None:
    text = run("show", path, "--board", "raspberry-pi-5-8gb").out
    for part in ("llama", "512 tokens", "KV cache", "Raspberry Pi 5", "default"):
        assert part in text
    card = json.loads(run("show", path, "--json").out)
    assert card["file_bytes"] == path.stat().st_size
    assert card["memory"][-1]["context"] == card["model"]["max_context"]
    assert card["num_parameters"] == 329 * 288 + 288 + 3 * (
        2 * 288 + 256 * 288 + 288 * 128 + 2 * 328 * 288 + 288 * 328
    )
    assert "layers.2.gate_up" in run("show", path, "--tensors").out
    assert "attention" in run("show", path, "--plan").out
    assert run("show", path, "--plan", "--json").code == 2


def test_show_has_the_card_of_a_calibrated_file(run: Run, path: Path, tmp_path: Path) -> None:
    plain = run("show", path).out
    assert "calibration  " not in plain
    assert "measured  " not in plain
    made = tmp_path / "made.edge"
    formats = (TensorFormat.E8, TensorFormat.E4, TensorFormat.E5, TensorFormat.E5)
    write_requantized(path, made, formats, CALIBRATED)
    lines = {
        name: value.strip()
        for name, _, value in (line.partition("  ") for line in run("show", made).out.splitlines())
    }
    assert lines["quantisation"] == "test, head e4"
    assert lines["quality"] == "balanced"
    assert lines["calibration"] == (
        "edgellm's text and the model's own; 16,384 tokens, SHA-256 0123456789ab..."
    )
    assert lines["measured"] == (
        "KL divergence 0.0457 nats a token, perplexity 25.50 -> 26.10, over 1,024 tokens of the "
        "same kind"
    )
    card = json.loads(run("show", made, "--json").out)
    assert card["quantization"] == CALIBRATED
    with EdgeFile.open(made) as file:
        matrices = [tensor for tensor in file.tensors.values() if tensor.format]
        assert card["formats"] == {tensor.name: tensor.format.name for tensor in matrices}
        bits = 8 * sum(tensor.size for tensor in file.tensors.values())
        num_weights = sum(tensor.rows * tensor.cols for tensor in file.tensors.values())
    assert lines["bits"] == f"{card['bits_per_weight']:.2f} a weight"
    assert card["bits_per_weight"] == bits / num_weights
    counts = [lines[f"- {kind}"] for kind in ("embed", "qkv", "o", "gate_up", "down")]
    assert counts[0] == "1 x E8"
    assert sum(int(part.split()[0]) for count in counts for part in count.split(",")) == 13


def test_verify_says_what_it_checked(run: Run, path: Path) -> None:
    result = run("verify", path)
    assert result.code == 0
    for part in ("hashes", "texts", "chats", "continuations", "is right"):
        assert part in result.out


def test_verify_names_what_differs(run: Run, path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.edge"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data)
    assert_one_line(run("verify", broken), "broken.edge", "section")


def test_verify_names_a_vector_that_is_not_met(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellm.format import EdgeFile

    real = EdgeFile.open(path).test_vectors
    for key, change, part in (
        ("texts", lambda v: v["ids"].append(3), "text 0: ids"),
        ("chats", lambda v: v.update(rendered="?"), "chat 0: rendered"),
        (
            "greedy",
            lambda v: v["continuation"].__setitem__(2, 0),
            "continuation 0: ids differ at 2",
        ),
    ):
        vectors = json.loads(json.dumps(real))
        change(vectors[key][0])
        monkeypatch.setattr(EdgeFile, "test_vectors", vectors)
        assert_one_line(run("verify", path), part)


def test_bench_has_the_columns_and_names_of_llama_bench(run: Run, path: Path) -> None:
    options = ("bench", path, "-p", 32, "-n", 4, "-r", 2, "-t", 1, "--isa", "ref")
    text = run(*options).out
    assert [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")] == [
        *("model", "size", "params", "backend", "threads", "test", "t/s")
    ]
    assert "| pp32 |" in text
    assert "|  tg4 |" in text
    output = run(*options, "--json", "-d", 5).out
    assert output.count("\n") == 1
    result = json.loads(output)
    assert (result["isa"], result["threads"], result["n_depth"]) == ("ref", 1, 5)
    for key in (
        *("prefill_tok_s", "decode_tok_s", "ttft_ms", "peak_rss_bytes", "bytes_per_token"),
        *("decode_gb_s", "probe_gb_s", "decode_share"),
        *("prefill_gop_s", "int8_peak_gop_s", "prefill_share"),
    ):
        assert result[key] > 0


def test_counts_of_threads_are_measured_once_and_printed(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellm.engine import tuning

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "candidates", lambda threads, cores: [threads, 1])
    monkeypatch.setattr(tuning, "choose", lambda *_: {"decode": 1, "prefill": 1})
    assert run("show", path, "--plan").out.startswith("threads: 1 decode, 1 prefill\n")
    (record,) = (tmp_path / "edgellm").iterdir()
    monkeypatch.delattr(tuning, "choose")  # the record is used
    result = json.loads(run("bench", path, "-p", 8, "-n", 2, "-r", 1, "--json").out)
    assert (result["decode_threads"], result["prefill_threads"]) == (1, 1)
    assert run("run", path, "a", "-n", 1).code == 0
    assert [record] == list((tmp_path / "edgellm").iterdir())


def test_verify_cost_is_measured_for_16_columns_and_kept_for_the_device(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ("bench", path, "--verify-cost", "-r", 1, "-t", 1)
    text = run(*options).out
    assert text.count("\n|") == 18
    result = json.loads(run(*options, "--json").out)
    assert result["relative"][0] == 1
    assert len(result["relative"]) == 16
    assert all(seconds > 0 for seconds in result["seconds"])
    (stored,) = (tmp_path / "edgellm").iterdir()  # the second run replaced the first
    record = json.loads(stored.read_text())
    assert record["seconds"] == result["seconds"]
    assert record["model_id"] == result["model_id"]
    (other,) = {"f16", "int8"} - {record["kv_format"]}
    run(*options, "--kv", other)  # another way of running it has a record of its own
    assert len(list((tmp_path / "edgellm").iterdir())) == 2
    refused = run(*options, "-p", 64)
    assert refused.code == 2
    assert "leave out -p" in refused.err


def test_kernels_says_what_this_cpu_gets_and_why_not_the_rest(run: Run) -> None:
    rows = json.loads(run("kernels", "--json").out)
    text = run("kernels").out
    assert len(text.splitlines()) == len(rows) + 2
    for row in rows:
        assert row["name"] in text
        assert row["reason"] in text


def test_a_closed_pipe_is_quiet(path: Path) -> None:
    code = "from edgellm.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "show", str(path), "--tensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert err == b""
