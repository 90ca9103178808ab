"""LLM and sessions: limits, ends, the cache that changes nothing, threads, interruption."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM, Delta, SamplingParams, Session
from edgellm.errors import (
    ContextFullError,
    EdgeLLMError,
    FormatError,
    ModelNotFoundError,
    UnsupportedDeviceError,
)

PROMPT = [5, 9, 17, 30, 3, 41, 8, 11, 60, 4]
CHAT = [{"role": "user", "content": "The quick brown fox"}]


@pytest.fixture(scope="module")
def path(tiny_edge_of: Callable[[str], Path]) -> Path:
    return tiny_edge_of("llama")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1) as llm:
        yield llm


def never_ending(llm: LLM) -> SamplingParams:
    """Greedy, without the tokens that end an answer."""
    return SamplingParams(logit_bias=dict.fromkeys(llm.eos_ids, -1e9))


def only(token: int) -> SamplingParams:
    return SamplingParams(logit_bias={token: 1e9})


def test_an_answer_is_the_largest_logits_one_after_the_other(llm: LLM) -> None:
    answer = llm.generate(PROMPT, never_ending(llm), max_tokens=6)
    with llm.session() as other:
        logits = other.logits(PROMPT + list(answer.ids))
    for token in llm.eos_ids:
        logits[:, token] = -np.inf
    expected = logits[len(PROMPT) - 1 : -1].argmax(axis=1)
    assert answer.ids == tuple(expected)
    assert answer.finish_reason == "length"
    assert answer.text == llm.detokenize(answer.ids)


def test_the_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate(PROMPT, never_ending(llm), max_tokens=20)
    deltas = list(llm.stream(PROMPT, never_ending(llm), max_tokens=20))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(i for delta in deltas for i in delta.ids) == whole.ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stats is None) == ("length", False)


def test_every_end_of_text_token_of_the_list_ends_the_answer(llm: LLM) -> None:
    assert llm.eos_ids
    for token in llm.eos_ids:
        answer = llm.generate(PROMPT, only(token), max_tokens=5)
        assert (answer.text, answer.ids, answer.finish_reason) == ("", (), "stop")
        assert answer.stats.generated_tokens == 1


def test_max_tokens_zero_is_an_empty_answer(llm: LLM) -> None:
    answer = llm.generate(PROMPT, max_tokens=0)
    assert (answer.text, answer.ids, answer.finish_reason) == ("", (), "length")


def test_generation_runs_to_the_context_and_says_length(llm: LLM) -> None:
    with llm.session(context=16) as session:
        answer = session.generate(PROMPT, never_ending(llm), max_tokens=1024)
        assert (len(answer.ids), answer.finish_reason) == (16 - len(PROMPT), "length")
        assert answer.stats.context == 16


@pytest.mark.parametrize("length", [16, 17, 40])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(llm: LLM, length: int) -> None:
    with llm.session(context=16) as session:
        with pytest.raises(ContextFullError, match=rf"{length} tokens.*16"):
            session.generate([3] * length)
        assert session.generate([3] * 15, never_ending(llm)).finish_reason == "length"


@pytest.mark.parametrize("context", [0, -1, 513, 2**40])
def test_a_context_the_model_cannot_hold_is_refused(llm: LLM, context: int) -> None:
    with pytest.raises(ValueError, match="512"):
        llm.session(context)


def test_bad_prompts_are_one_line_errors(llm: LLM) -> None:
    for prompt, kind, match in (
        ([], ValueError, "empty"),
        ([1, -1], ValueError, "-1"),
        ([1, llm.info.num_tokens], ValueError, str(llm.info.num_tokens)),
        ("a\ud800b", ValueError, "Unicode"),
        (b"bytes", TypeError, "decode"),
    ):
        with pytest.raises(kind, match=match) as error:
            llm.generate(prompt)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="max_tokens"):
        llm.generate(PROMPT, max_tokens=-1)
    with pytest.raises(ValueError, match="empty"):
        llm.generate(PROMPT, stop="")
    with pytest.raises(ValueError, match="no messages"):
        llm.chat([])


def test_a_stop_string_is_cut_and_nothing_of_it_shown(llm: LLM) -> None:
    whole = llm.generate(PROMPT, never_ending(llm), max_tokens=40).text
    stop = whole[5:9]
    deltas = list(llm.stream(PROMPT, never_ending(llm), max_tokens=40, stop=stop))
    assert "".join(delta.text for delta in deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    unmet = llm.generate(PROMPT, never_ending(llm), max_tokens=40, stop=["\0unmet", whole + "?"])
    assert (unmet.text, unmet.finish_reason) == (whole, "length")


def test_the_cache_changes_no_answer_and_is_counted(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.5, seed=11)
    cold = [
        session.generate(ids, sampling, max_tokens=12)
        for ids in (PROMPT, PROMPT, [*PROMPT, 7], [*PROMPT[:4], 8, 9], [33])
        for session in [llm.session()]
    ]
    with llm.session() as session:
        warm = [
            session.generate(ids, sampling, max_tokens=12)
            for ids in (PROMPT, PROMPT, [*PROMPT, 7], [*PROMPT[:4], 8, 9], [33])
        ]
    assert [a.ids for a in warm] == [a.ids for a in cold]
    assert [a.stats.cached_tokens for a in cold] == [0] * 5
    assert [a.stats.cached_tokens for a in warm] == [0, 9, 10, 4, 0]


def test_a_chat_goes_on_where_it_was(llm: LLM) -> None:
    with llm.session() as session:
        first = session.chat(CHAT, never_ending(llm), max_tokens=8)
        longer = [
            *CHAT,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "and on"},
        ]
        second = session.chat(longer, never_ending(llm), max_tokens=8)
        assert second.stats.cached_tokens >= first.stats.prompt_tokens
    with llm.session() as session:
        again = session.chat(longer, never_ending(llm), max_tokens=8)
    assert again.ids == second.ids
    assert again.stats.cached_tokens == 0


def test_logits_are_the_same_bits_whatever_came_before(llm: LLM, path: Path) -> None:
    expected = llm.logits(PROMPT)
    assert expected.shape == (len(PROMPT), llm.info.vocab_size)
    llm.generate(PROMPT[:5], never_ending(llm), max_tokens=3)
    assert llm.logits(PROMPT).tobytes() == expected.tobytes()
    with LLM(path, threads=2, isa="ref", context=64) as other:
        assert other.logits(PROMPT).tobytes() == expected.tobytes()
    assert np.isneginf(expected[:, llm.info.num_tokens :]).all()


def test_the_seed_gives_the_answer_again(llm: LLM) -> None:
    drawn = llm.generate(PROMPT, SamplingParams(temperature=2.0), max_tokens=12)
    again = llm.generate(
        PROMPT, SamplingParams(temperature=2.0, seed=drawn.stats.seed), max_tokens=12
    )
    assert again.ids == drawn.ids


def test_sessions_run_side_by_side_with_the_same_answers(llm: LLM) -> None:
    prompts = [[i + 3, *PROMPT] for i in range(6)]

    def answer(ids: list[int]) -> tuple[int, ...]:
        with llm.session() as session:
            return session.generate(ids, never_ending(llm), max_tokens=12).ids

    alone = [answer(ids) for ids in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(answer, prompts)) == alone


def test_threads_take_turns_on_the_default_session(llm: LLM) -> None:
    prompts = [[i + 3, *PROMPT] for i in range(6)]

    def answer(ids: list[int]) -> tuple[int, ...]:
        return llm.generate(ids, never_ending(llm), max_tokens=12).ids

    alone = [answer(ids) for ids in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(answer, prompts)) == alone


def test_a_second_call_within_a_stream_is_an_error_and_not_a_deadlock(llm: LLM) -> None:
    with llm.session() as session:
        stream = session.stream(PROMPT, never_ending(llm))
        next(stream)
        with pytest.raises(EdgeLLMError, match="middle of a stream"):
            session.generate(PROMPT)
        stream.close()
        assert session.generate(PROMPT, never_ending(llm), max_tokens=2).ids


def test_another_thread_waits_for_the_stream(llm: LLM) -> None:
    with llm.session() as session:
        stream = session.stream(PROMPT, never_ending(llm), max_tokens=6)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(session.generate, PROMPT, never_ending(llm), max_tokens=6)
            rest = list(stream)
            assert other.result(timeout=30).finish_reason == "length"
        assert rest[-1].finish_reason == "length"


def test_an_interruption_leaves_a_session_that_answers_as_before(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llm.session() as session:
        expected = session.generate(PROMPT, never_ending(llm), max_tokens=8).ids
    for stop_at in range(1, 6):
        with llm.session() as session:
            native = session._open()
            calls = iter(range(100))
            real_step = native.step

            def step(struct: object, real_step=real_step, calls=calls, stop_at=stop_at):
                tokens = real_step(struct)
                if next(calls) == stop_at:
                    raise KeyboardInterrupt
                return tokens

            monkeypatch.setattr(native, "step", step)
            with pytest.raises(KeyboardInterrupt):
                session.generate(PROMPT, never_ending(llm), max_tokens=8)
            monkeypatch.setattr(native, "step", real_step)
            assert session.generate(PROMPT, never_ending(llm), max_tokens=8).ids == expected


def test_a_long_prompt_is_computed_in_chunks_so_that_signals_are_seen(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llm.session() as session:
        native = session._open()
        chunk = native.info().chunk_length
        lengths: list[int] = []
        real = native.prefill
        monkeypatch.setattr(
            native, "prefill", lambda ids, n=0: (lengths.append(len(ids)), real(ids, n))[1]
        )
        session.generate([3] * 500, max_tokens=1)
        assert sum(lengths) == 500
        assert max(lengths) <= chunk


def test_a_closed_model_and_session_say_so(path: Path) -> None:
    llm = LLM(path, threads=1)
    session = llm.session()
    session.close()
    with pytest.raises(ValueError, match="closed"):
        session.generate(PROMPT)
    other = llm.session()
    other.generate(PROMPT, max_tokens=1)
    llm.close()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        other.generate(PROMPT)
    with pytest.raises(ValueError, match="closed"):
        llm.generate(PROMPT)


def test_closing_while_another_thread_generates_ends_it_cleanly(path: Path) -> None:
    llm = LLM(path, threads=1)
    started = threading.Event()
    failures: list[BaseException] = []

    def work(session: Session) -> None:
        try:
            for _ in session.stream(PROMPT, never_ending(llm)):
                started.set()
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=work, args=(llm.session(),))
    thread.start()
    started.wait(30)
    llm.close()
    thread.join(30)
    assert not thread.is_alive()
    assert all("closed" in str(error) for error in failures)


def test_statistics_are_those_of_the_answer(llm: LLM) -> None:
    with llm.session() as session:
        stats = session.generate(PROMPT, never_ending(llm), max_tokens=4).stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (len(PROMPT), 4)
    assert min(stats.prefill_tok_s, stats.decode_tok_s, stats.first_token_ms) > 0
    assert stats.peak_memory_bytes > stats.kv_bytes > 0


def test_the_time_of_a_slow_reader_is_not_counted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("edgellm.engine.answer.perf_counter", lambda: now[0])
    deltas: list[Delta] = []
    for delta in llm.stream(PROMPT, never_ending(llm), max_tokens=5):
        now[0] += 100.0
        deltas.append(delta)
    stats = deltas[-1].stats
    assert stats is not None
    assert (stats.decode_tok_s, stats.first_token_ms) == (0.0, 0.0)


def test_what_is_not_there_or_not_an_edge_file_is_said(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        LLM(tmp_path / "nothing.edge")
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(FormatError, match="edgellm export"):
        LLM(gguf)
    with pytest.raises(UnsupportedDeviceError, match="fake"):
        LLM(path, device="fake")
    with pytest.raises(UnsupportedDeviceError, match="cpu, fake"):
        LLM(path, device="cuda")
