"""Detokenizer and stop strings: what is shown does not depend on how the stream is cut."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_json, sentencepiece_json

from edgellm.text import Detokenizer, StopMatcher, Tokenizer

SOURCES = {"byte-level": byte_level_json(), "sentencepiece": sentencepiece_json()}
TOKENIZERS = {
    name: Tokenizer(source, add_bos=False, bos_id=1, eos_ids=[2], special_tokens={})
    for name, source in SOURCES.items()
}
ORACLES = {name: tokenizers.Tokenizer.from_str(source) for name, source in SOURCES.items()}
kinds = pytest.mark.parametrize("kind", SOURCES)


def stream(kind: str, ids: list[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(TOKENIZERS[kind])
    return [detokenizer.push(i) for i in ids], detokenizer.flush()


@kinds
@pytest.mark.parametrize("text", ["Dear [Name], I hope 🙂", " 你好，世界", "  é  ", "👩‍👩‍👧"])
def test_deltas_are_the_text(kind: str, text: str) -> None:
    """B04: spaces, and characters over several tokens."""
    ids = TOKENIZERS[kind].encode(text)
    deltas, tail = stream(kind, ids)
    assert "".join(deltas) == text == ORACLES[kind].decode(ids)
    assert tail == ""


@kinds
def test_no_replacement_character_within_a_stream_and_one_at_a_cut(kind: str) -> None:
    """B03: F0 9F | 99 82."""
    ids = TOKENIZERS[kind].encode("a🙂")
    for cut in range(len(ids) + 1):
        deltas, tail = stream(kind, ids[:cut])
        assert "\ufffd" not in "".join(deltas)
        assert tail in ("", "\ufffd")
        assert "".join(deltas) + tail == TOKENIZERS[kind].decode(ids[:cut])
    assert stream(kind, ids[:-1])[1] == "\ufffd"
    assert stream(kind, ids) == ([*stream(kind, ids[:-1])[0], "🙂"], "")


@given(st.lists(st.integers(0, 399), max_size=24))
def test_a_byte_level_stream_of_any_ids_is_the_decoded_text(ids: list[int]) -> None:
    ids = [i % TOKENIZERS["byte-level"].vocab_size for i in ids]
    deltas, tail = stream("byte-level", ids)
    assert "".join(deltas) + tail == ORACLES["byte-level"].decode(ids)


@given(st.lists(st.integers(0, 10_000), max_size=24))
def test_a_sentencepiece_stream_of_any_ids_is_the_decoded_text(ids: list[int]) -> None:
    """Where bytes are no UTF-8 the package has one U+FFFD per byte, we have one per character."""
    ids = [i % TOKENIZERS["sentencepiece"].vocab_size for i in ids]
    deltas, tail = stream("sentencepiece", ids)
    expected = ORACLES["sentencepiece"].decode(ids)
    if "\ufffd" not in expected:
        assert "".join(deltas) + tail == expected
    assert "".join(deltas) + tail == TOKENIZERS["sentencepiece"].decode(ids)


@given(st.text(max_size=20), st.sampled_from(list(SOURCES)))
def test_any_text_survives_the_round_trip(text: str, kind: str) -> None:
    deltas, tail = stream(kind, TOKENIZERS[kind].encode(text))
    assert ("".join(deltas), tail) == (text.replace("\u2581", " "), "") or (
        kind == "byte-level" and ("".join(deltas), tail) == (text, "")
    )


def test_special_tokens_do_not_break_a_character() -> None:
    ids = TOKENIZERS["byte-level"].encode("🙂")
    assert "".join(stream("byte-level", [1, ids[0], 3, *ids[1:], 2])[0]) == "🙂"


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool, list[str]]:
    """All text shown, whether it stopped, and what each push showed."""
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return "".join(text for text, _ in shown) + matcher.flush(), shown[-1][1], [t for t, _ in shown]


def test_a_stop_string_over_several_tokens_is_cut_cleanly() -> None:
    """B17."""
    text, is_stopped, shown = run(["beta gamma"], ["alpha", " beta", " gam", "ma", " delta"])
    assert (text, is_stopped) == ("alpha ", True)
    assert shown == ["alpha", " ", "", "", ""]


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    text, is_stopped, shown = run(["beta gamma"], ["alpha be", "st"])
    assert (text, is_stopped, shown) == ("alpha best", False, ["alpha ", "best"])
    assert run(["aab"], ["aaa", "c"])[2] == ["a", "aac"]


def test_text_in_front_of_a_stop_string_is_delivered() -> None:
    """B18."""
    assert run(["\n"], ["why", "?\n"])[:2] == ("why?", True)


def test_what_is_held_back_at_the_end_is_delivered() -> None:
    assert run(["###"], ["so##"]) == ("so##", False, ["so"])


def test_without_stop_strings_everything_passes() -> None:
    assert run([], ["a", "", "b"]) == ("ab", False, ["a", "", "b"])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["x", ""])


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 24), max_size=6),
)
def test_the_result_does_not_depend_on_the_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    shown, is_stopped, _ = run(stops, pieces)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (shown, is_stopped) == (text, False)
    else:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert (shown, is_stopped) == (text[: ends[0] - longest], True)
