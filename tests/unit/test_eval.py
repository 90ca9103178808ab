"""`edgellm eval`: figures are those of brute force, and a file of a reference stands for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_models import write_tiny_model

from edgellm.cli import cli
from edgellm.engine.model import Model
from edgellm.errors import EdgeLLMError, FormatError, ModelNotFoundError
from edgellm.eval import EvalOptions, compare, evaluate
from edgellm.eval.models import SourceModel
from edgellm.eval.tasks import TaskOptions, run_task
from edgellm.exporters.export import ExportOptions, export_model

QUICK = {"tokens": 700, "context": 128}
NUMPY = EvalOptions(reference_engine="numpy", **QUICK)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def hf(tiny_hf: Callable[[str], Path]) -> Path:
    return tiny_hf("llama")


@pytest.fixture(scope="module")
def edge(tiny_edge_of: Callable[[str], Path]) -> Path:
    return tiny_edge_of("llama")


@pytest.fixture(scope="module")
def saved(hf: Path, edge: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference file with the most probable 64 of 320 tokens and a sample of the others."""
    path = tmp_path_factory.mktemp("reference") / "ref"
    options = EvalOptions(
        save_reference=path,
        reference_top=64,
        reference_engine="numpy",
        **QUICK,  # type: ignore[arg-type]
    )
    evaluate(edge, hf, options)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["eval", *(str(argument) for argument in arguments)])


def losses(logits: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> list[float]:
    rows = logits.astype(np.float64)
    return [math.log(np.exp(row - row[t]).sum()) for row, t in zip(rows, targets, strict=True)]


def test_perplexity_is_that_of_brute_force(edge: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    found = evaluate(edge, options=EvalOptions(text=text, **QUICK))  # type: ignore[arg-type]
    expected: list[float] = []
    model = Model(edge, threads=None, isa=None, kv=None, device="cpu")
    ids = model.tokenizer.encode(text.read_text(), add_bos=False)[:700]
    for start in range(0, len(ids), 128):
        window = ids[start : start + 128]
        logits = model.native.create_session(128).prefill(window, len(window))
        known = logits[:-1, : model.info.num_tokens]
        expected += losses(known, np.array(window[1:]))
    model.close()
    assert found.text.num_scored == len(expected)
    assert math.log(found.perplexity.value) == pytest.approx(np.mean(expected), abs=1e-9)


def test_a_model_does_not_diverge_from_itself(edge: Path) -> None:
    divergence = evaluate(edge, edge, replace(NUMPY, reference_engine="auto")).divergence
    assert divergence is not None
    assert divergence.kl.value == pytest.approx(0, abs=1e-12)
    assert divergence.top1.value == 1
    assert divergence.top1.low > 0.99
    assert divergence.perplexity_ratio.value == pytest.approx(1, abs=1e-12)


def test_a_better_file_is_nearer_to_the_source(hf: Path, edge: Path, tmp_path: Path) -> None:
    export_model(hf, tmp_path / "e4.edge", ExportOptions(head="e4"))
    both = compare([edge, tmp_path / "e4.edge"], hf, NUMPY)
    q8, e4 = (one.divergence for one in both.evaluations)
    assert q8 is not None
    assert e4 is not None
    assert 0 < q8.kl.low < q8.kl.value < e4.kl.value < 0.5
    (difference,) = both.differences
    assert difference.kl is not None
    assert difference.kl.value == pytest.approx(q8.kl.value - e4.kl.value)
    # The same tokens: the difference is known better than each figure.
    assert difference.kl.high - difference.kl.low < e4.kl.high - e4.kl.low


def test_transformers_and_numpy_are_the_same_reference(hf: Path, edge: Path) -> None:
    pytest.importorskip("torch", reason="the oracle of the tests")
    pytest.importorskip("transformers", reason="the oracle of the tests")
    options = EvalOptions(reference_engine="transformers", **QUICK)  # type: ignore[arg-type]
    one, two = evaluate(edge, hf, options).divergence, evaluate(edge, hf, NUMPY).divergence
    assert one is not None
    assert two is not None
    assert one.engine.startswith("transformers")
    assert one.kl.value == pytest.approx(two.kl.value, rel=1e-4)


def test_an_onnx_model_is_a_reference_too(edge: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason='needs pip install "edgellm[onnx]"')
    from edgellm.exporters.to_onnx import export_onnx

    folder = export_onnx(edge, tmp_path / "onnx", "float").output
    found = evaluate(edge, folder, EvalOptions(**QUICK)).divergence  # type: ignore[arg-type]
    assert found is not None
    assert found.engine == "numpy, float32"
    assert 0 < found.kl.value < 1e-3
    assert SourceModel(folder, context=8).size_bytes > 1_000_000


# ---- a reference in a file -----------------------------------------------------------------------


def test_a_file_stands_for_the_reference(hf: Path, edge: Path, saved: Path) -> None:
    live = evaluate(edge, hf, NUMPY)
    kept = evaluate(edge, saved)
    assert kept.text == live.text
    assert kept.perplexity == live.perplexity
    assert kept.divergence is not None
    assert live.divergence is not None
    assert kept.divergence.is_sampled
    assert kept.divergence.top1 == live.divergence.top1
    assert kept.divergence.perplexity.value == pytest.approx(live.divergence.perplexity.value)
    assert kept.divergence.kl.value == pytest.approx(live.divergence.kl.value, rel=0.05)


def test_a_whole_file_is_exact_up_to_its_rounding(hf: Path, edge: Path, tmp_path: Path) -> None:
    options = EvalOptions(
        save_reference=tmp_path / "ref",
        reference_top=10**6,
        reference_engine="numpy",
        **QUICK,  # type: ignore[arg-type]
    )
    live = evaluate(edge, hf, options).divergence
    kept = evaluate(edge, tmp_path / "ref").divergence
    assert kept is not None
    assert live is not None
    assert kept.kl.value == pytest.approx(live.kl.value, abs=1e-5)


def test_what_the_file_fixes_cannot_be_changed(edge: Path, saved: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"tokens": 600}, "was made with tokens 700, not 600"),
        ({"context": 64}, "was made with context 128"),
        ({"score": "half"}, "was made with score all"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(edge, saved, EvalOptions(**options))  # type: ignore[arg-type]
    (tmp_path / "other.txt").write_text("other")
    with pytest.raises(ValueError, match="whose hash is not that of other"):
        evaluate(edge, saved, EvalOptions(text=tmp_path / "other.txt"))
    with pytest.raises(ValueError, match="made while a reference runs"):
        evaluate(edge, saved, EvalOptions(save_reference=tmp_path / "again"))
    assert not (tmp_path / "again").exists()


def test_another_vocabulary_is_refused(saved: Path, tmp_path: Path) -> None:
    hf = write_tiny_model(tmp_path / "hf", "llama", num_hidden_layers=1)
    content = json.loads((hf / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<|fin|>"
    content["model"]["vocab"]["<|fin|>"] = content["model"]["vocab"].pop("<|end|>")
    (hf / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="do not have the same vocabulary"):
        evaluate(hf, saved, EvalOptions(reference_engine="numpy"))


def test_options_that_no_model_has_a_use_for_are_refused(hf: Path, edge: Path) -> None:
    for option in (replace(NUMPY, kv="int8"), replace(NUMPY, isa="ref")):
        with pytest.raises(ValueError, match=r"is for an \.edge file, and none is run here"):
            evaluate(hf, options=option)
    with pytest.raises(ValueError, match="--reference-engine is for a source model, and none"):
        evaluate(edge, options=NUMPY)
    assert evaluate(hf, edge, replace(NUMPY, kv="int8")).divergence is not None


def test_no_window_is_longer_than_the_context(hf: Path, edge: Path) -> None:
    for model in (hf, edge):
        with pytest.raises(ValueError, match="context is 999999; this model takes 1 to"):
            evaluate(model, options=EvalOptions(context=999_999))


def test_a_damaged_file_is_refused_in_one_line(edge: Path, saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    path = tmp_path / "ref"
    cuts = [whole[:length] for length in (9, 16, 100, 2000, len(whole) - 1)]
    flips = [bytearray(whole) for _ in range(5)]
    for data, place in zip(flips, (9, 12, 40, 1500, len(whole) - 40), strict=True):
        data[place] ^= 0x20
    for data in (*cuts, *flips, whole + b"\0"):
        path.write_bytes(data)
        with pytest.raises(FormatError, match="reference file") as caught:
            evaluate(edge, path)
        assert "\n" not in str(caught.value)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_figures_with_intervals(edge: Path, saved: Path) -> None:
    result = run(edge, "--reference", saved)
    assert result.exit_code == 0, result.output
    for name in ("perplexity", "ratio of perplexities", "KL divergence", "same most probable"):
        assert name in result.output
    assert "95 % interval" in result.output
    assert "KL estimated" in result.output


def test_json_is_one_object(edge: Path, saved: Path) -> None:
    one = json.loads(run(edge, "--reference", saved, "--json").stdout)
    assert one["divergence"]["kl"]["low"] < one["divergence"]["kl"]["value"]
    both = json.loads(run(edge, edge, "--compare", "--reference", saved, "--json").stdout)
    assert both["evaluations"][0] == both["evaluations"][1] == one
    assert both["differences"][0]["kl"] == {"value": 0, "low": 0, "high": 0}


def test_a_plot_is_a_png(edge: Path, saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install "edgellm[eval]"')
    result = run(edge, "--reference", saved, "--plot", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "x.png"]
    result = run(edge, "--reference", saved, "--plot", tmp_path / "no/x.png")
    assert isinstance(result.exception, EdgeLLMError)


@pytest.mark.parametrize("option", ["--save-reference", "--plot"])
def test_what_is_read_is_not_replaced(option: str, edge: Path, hf: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='needs pip install "edgellm[eval]"')
    text = tmp_path / "text.txt"
    text.write_text("Rain fell on the old town all night.\n" * 200)
    for output in (edge, text, hf / "config.json"):
        before = output.read_bytes()
        result = run(edge, "--text", text, "--reference", hf, option, output)
        assert result.exit_code == 2
        assert "is read by this command: name another output" in result.output
        assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "several models are measured with --compare"),
        (["a", "--plot", "x.png"], "--plot goes with --reference"),
        (["a", "--save-reference", "x"], "--save-reference goes with --reference"),
        (["a", "--limit", "3"], "--limit goes with --task"),
        (["a", "--task", "gsm8k"], "needs its problems: --data"),
        (["a", "--task", "gsm8k", "--data", "x", "--compare"], "--compare goes with a text"),
        (["a", "--tokens", "0"], "Invalid value for '--tokens'"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--reference", "missing"], ModelNotFoundError),
        (["--text", "missing"], ModelNotFoundError),
        (["--tokens", "20"], ValueError),
        (["--context", "100000"], ValueError),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], error: type[Exception], edge: Path) -> None:
    result = run(edge, *arguments)
    assert isinstance(result.exception, error)
    assert "\n" not in str(result.exception)


# ---- tasks ---------------------------------------------------------------------------------------


def test_a_task_counts_what_is_right(edge: Path, tmp_path: Path) -> None:
    data = tmp_path / "x.jsonl"
    problem = {"question": "1 + 1?", "answer": "#### 2"}
    data.write_text("\n".join([json.dumps(problem)] * 3) + "\n\n")
    result = run_task("gsm8k", edge, data, TaskOptions(max_tokens=8, limit=2))
    assert len(result.answers) == 2
    assert result.prompt == "chat"
    assert result.score.low <= result.score.value <= result.score.high
    shown = run(edge, "--task", "gsm8k", "--data", data, "--max-tokens", 8)
    assert shown.exit_code == 0, shown.output
    assert "of 3, 95 % interval" in shown.output
    assert "did not fit" not in shown.output
    as_json = run(edge, "--task", "gsm8k", "--data", data, "--max-tokens", 8, "--json")
    assert len(json.loads(as_json.stdout)["answers"]) == 3


def test_a_problem_that_does_not_fit_is_not_the_end(edge: Path, tmp_path: Path) -> None:
    problems = [{"question": text, "answer": "2"} for text in ("1 + 1? " * 500, "1 + 1?")]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, problems)))
    result = run_task("gsm8k", edge, tmp_path / "x.jsonl", TaskOptions(max_tokens=4))
    assert [answer.num_tokens for answer in result.answers] == [0, 4]
    assert result.answers[0].reason == "did not fit the context"
    shown = run(edge, "--task", "gsm8k", "--data", tmp_path / "x.jsonl", "--max-tokens", 4)
    assert "1 did not fit the context" in shown.output


def test_humaneval_runs_programs(edge: Path, tmp_path: Path) -> None:
    problem = {
        "task_id": "0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "test": "def check(f): 1",
    }
    (tmp_path / "x.jsonl").write_text(json.dumps(problem))
    result = run_task("humaneval", edge, tmp_path / "x.jsonl", TaskOptions(max_tokens=4))
    assert result.metric == "pass@1"
    assert result.answers[0].reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no problems"),
        (b"nonsense", "line 1 is not JSON"),
        (b"[1]", "line 1 is not a JSON object"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"question": "x"}', "the text 'answer' is missing"),
        (b'{"question": "x", "answer": 5}', "the text 'answer' is missing"),
        (b"\x1f\x8b\x08\0\0\0\0\0nonsense", "compressed data is damaged"),
        (b"\x1f\x8b", "compressed data is damaged"),
    ],
)
def test_problems_that_are_none_are_named(
    content: bytes, message: str, edge: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        run_task("gsm8k", edge, tmp_path / "x.jsonl")
