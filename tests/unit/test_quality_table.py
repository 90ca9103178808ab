"""The table of tests/tools/quality_table.py, on tiny models."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
import quality_table
from source_files import gguf_of_llama
from tiny_models import write_tiny_model

from edgellm.eval import EvalOptions, evaluate
from edgellm.exporters.export import ExportOptions, export_model


def test_files_of_both_kinds_stand_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    hf = write_tiny_model(tmp_path / "llama", "llama", rope_scaling=None)
    edge, gguf = tmp_path / "ours.edge", tmp_path / "float.gguf"
    export_model(hf, edge, ExportOptions())
    gguf.write_bytes(gguf_of_llama(hf))
    prose = tmp_path / "prose.txt"
    prose.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    code = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(code, "wt") as file:
        for number in range(60):
            solution = f"    return x + {number}\n"
            problem = {"prompt": "def f(x):\n", "canonical_solution": solution}
            file.write(json.dumps(problem) + "\n")
    arguments = ["", hf, edge, gguf, "--text", prose, "--text", code, "--tokens", 700]
    arguments += ["--engine", "numpy"]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])

    quality_table.main()

    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:8]]
    prose_rows, code_rows = rows[:3], rows[3:]
    assert [cells[1] for cells in prose_rows] == ["llama", edge.name, gguf.name]
    assert {cells[0] for cells in code_rows} == {"HumanEval.py"}
    expected = evaluate(edge, hf, EvalOptions(text=prose, tokens=700, reference_engine="numpy"))
    assert expected.divergence is not None
    assert prose_rows[1][4].startswith(f"{expected.divergence.kl.value:.4f} ± ")
    assert prose_rows[1][5].startswith(f"{expected.perplexity.value:.2f} ± ")
    # Between the bits of E4 and E8; float weights are the reference's own.
    assert 4.5 < float(prose_rows[1][2]) < 8.25
    assert [prose_rows[2][2], prose_rows[2][4][:6]] == ["32.000", "0.0000"]
    assert prose_rows[2][6].startswith("100.0 ±")
    # The tiny model begins no text with a token of its own.
    assert lines[9].endswith("windows of 512, the first of a window the text's own.")
