"""What the README and the header promise of the Python API, on the real SmolLM2 where it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgellm
from edgellm import LLM, Message, SamplingParams, errors

QUESTION: list[Message] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]


def test_the_public_names_are_these() -> None:
    assert set(edgellm.__all__) == {
        *("LLM", "Completion", "Delta", "EdgeLLMError", "Message", "SamplingParams"),
        *("Session", "Stats", "__version__"),
    }
    for name in edgellm.__all__:
        assert getattr(edgellm, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = edgellm.nonsense


def test_every_error_is_below_one_root() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), edgellm.EdgeLLMError)


@pytest.fixture(scope="module")
def llm(smollm2_edge: Path) -> Iterator[LLM]:
    with LLM(smollm2_edge, context=1024) as llm:
        yield llm


def test_a_real_model_answers_sensibly(llm: LLM) -> None:
    answer = llm.chat(QUESTION, SamplingParams(), max_tokens=32)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_real_logits_have_the_same_bits_on_the_reference_kernels(llm: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. It was the best of times."
    ids = llm.tokenize(text)
    assert llm.detokenize(ids) == text
    expected = llm.logits(ids)
    with LLM(llm._model.path, context=64, threads=1, isa="ref") as other:
        assert other.logits(ids[:4]).tobytes() == expected[:4].tobytes()


def test_a_run_takes_no_more_than_file_cache_and_60_mb(smollm2_edge: Path) -> None:
    output = subprocess.run(
        [
            *(sys.executable, "-m", "edgellm", "run", str(smollm2_edge), "Hello", "--json"),
            *("-n", "16", "-c", "2048"),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    stats = json.loads(output)["stats"]
    limit = smollm2_edge.stat().st_size + stats["kv_bytes"] + 60_000_000
    assert stats["peak_memory_bytes"] <= limit
