"""Tokenizers made of GGUF fields give the ids that the model was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from source_files import F32, I32, STRING, Value, bpe_fields, gguf_bytes
from tiny_models import tiny_tokenizer
from tokenizers import Tokenizer

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.gguf import GGUFFile
from edgellm.exporters.gguf_tokenizer import synthesise_tokenizer
from edgellm.exporters.pretokenizers import PRE_TOKENIZERS
from edgellm.exporters.source import TokenizerInfo

pytest.importorskip("gguf", reason="the gguf package is not installed")

VECTORS = Path(__file__).parents[3] / "shared/data/tokenizer_vectors"


def synthesise(folder: Path, fields: dict[str, Any]) -> tuple[Tokenizer, TokenizerInfo, int]:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(fields))
    data, info, num_tokens = synthesise_tokenizer(GGUFFile(path))
    assert synthesise_tokenizer(GGUFFile(path))[0] == data
    return Tokenizer.from_buffer(data), info, num_tokens


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    fields = bpe_fields(json.loads(tiny_tokenizer().to_str()))
    return {**fields, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def spm_fields(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: specials, all bytes, characters, words by falling score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(tokens)
    words = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world", "▁▁"]
    characters = sorted({char for word in words for char in word})
    for rank, token in enumerate(words + characters):
        tokens.append(token)
        types.append(1)
        scores.append(-float(rank))
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": Value(I32, types, True),
        "scores": Value(F32, scores, True),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


@pytest.mark.skipif(not VECTORS.is_dir(), reason="shared data is not here")
@pytest.mark.parametrize("name", ["falcon", "gpt-2", "llama-spm", "phi-3"])
def test_published_vectors_come_out(name: str) -> None:
    stem = VECTORS / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.from_buffer(synthesise_tokenizer(GGUFFile(stem))[0])
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().split("\n")
    wanted = [[int(number) for number in line.split()] for line in lines]
    assert len(texts) == len(wanted) > 40
    assert [tokenizer.encode(text, add_special_tokens=False).ids for text in texts] == wanted


def test_byte_level_ids_are_those_of_the_tokenizer_it_came_from(tmp_path: Path) -> None:
    original = tiny_tokenizer()
    tokenizer, info, num_tokens = synthesise(tmp_path, byte_level_fields())
    assert num_tokens == original.get_vocab_size() == tokenizer.get_vocab_size()
    assert (info.add_bos, info.bos_id, info.eos_ids) == (False, 1, (2,))
    assert info.is_synthesised
    assert info.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|stop|>"}
    for text in ("The quick", "l'été 你好 🙂", "  x\n\n y", "<|stop|>a<|start|>", ""):
        assert tokenizer.encode(text).ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_split_loads_and_loses_nothing(tmp_path: Path, name: str) -> None:
    tokenizer, _, _ = synthesise(tmp_path, byte_level_fields(pre=name))
    text = "They're 12345 things:\r\n\n\tif (x) { été } 你好 🙂 ½  \n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["a", " 1234", "'s", "  ", " b"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "'s", "  ", " b"]),
        ("llama-bpe", ["a", " ", "123", "4", "'s", "  ", " b"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "'s", "  ", " b"]),
        ("tekken", ["a", " ", "1", "2", "3", "4", "'s", "  ", " b"]),
        ("deepseek-coder", ["a", " ", "1", "2", "3", "4", "'", "s", "  ", " b"]),
    ],
)
def test_text_is_split_as_named(tmp_path: Path, name: str, pieces: list[str]) -> None:
    tokenizer, _, _ = synthesise(tmp_path, byte_level_fields(pre=name))
    text = "a 1234's   b"
    assert tokenizer.pre_tokenizer is not None
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces


def test_an_unknown_split_is_an_error_and_never_a_default(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="splits text as 'new-bpe'"):
        synthesise(tmp_path, byte_level_fields(pre="new-bpe"))
    with pytest.raises(UnsupportedModelError, match="splits text as 'default'"):
        synthesise(tmp_path, byte_level_fields(pre="default"))
    fields = byte_level_fields()
    del fields["tokenizer.ggml.pre"]
    with pytest.raises(UnsupportedModelError, match="does not say how text is split"):
        synthesise(tmp_path, fields)


def test_an_unknown_kind_of_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="tokenizer 'bert' is not supported"):
        synthesise(tmp_path, byte_level_fields(model="bert"))


def test_sentencepiece_merges_by_score_with_bytes_for_the_rest(tmp_path: Path) -> None:
    tokenizer, info, _ = synthesise(tmp_path, spm_fields())
    assert info.add_bos
    encoding = tokenizer.encode("hello world", add_special_tokens=False)
    assert encoding.tokens == ["▁hello", "▁world"]
    assert tokenizer.encode(" hello", add_special_tokens=False).tokens == ["▁", "▁hello"]
    assert tokenizer.encode("🙂", add_special_tokens=False).tokens == [
        "▁", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"
    ]  # fmt: skip
    for text in ("hello world", "  hello", "🙂 hello", "hello\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_add_space_prefix_is_obeyed(tmp_path: Path) -> None:
    tokenizer, _, _ = synthesise(tmp_path, spm_fields(add_space_prefix=False))
    assert tokenizer.encode("hello world", add_special_tokens=False).tokens == ["hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode("hello").ids) == "hello"


def test_bos_is_in_tokenizer_json_as_the_fields_say(tmp_path: Path) -> None:
    with_bos, _, _ = synthesise(tmp_path, spm_fields(add_eos_token=True))
    assert with_bos.encode("hello").tokens == ["<s>", "▁hello", "</s>"]
    without, info, _ = synthesise(tmp_path, spm_fields(add_bos_token=False))
    assert without.encode("hello").tokens == ["▁hello"]
    assert not info.add_bos
    llama, info, _ = synthesise(tmp_path, byte_level_fields(pre="llama-bpe"))
    assert info.add_bos
    assert llama.encode("x").ids[0] == info.bos_id == 1


def test_user_defined_tokens_are_whole_and_not_special(tmp_path: Path) -> None:
    fields = spm_fields()
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"].value
    changed = spm_fields(
        tokens=[*tokens, "<think>", "    "],
        token_type=Value(I32, [*types, 4, 4], True),
        scores=Value(F32, [*fields["tokenizer.ggml.scores"].value, -1000.0, -1000.0], True),
    )
    tokenizer, _, _ = synthesise(tmp_path, changed)
    encoding = tokenizer.encode("hello<think>", add_special_tokens=False)
    assert encoding.tokens[-1] == "<think>"
    added = tokenizer.get_added_tokens_decoder()
    assert {token.content: token.special for token in added.values()} == {
        "<unk>": True, "<s>": True, "</s>": True, "<think>": False
    }  # fmt: skip
    # a token of spaces is written with marks, and merged like other text
    assert tokenizer.token_to_id("▁▁▁▁") == len(tokens) + 1


def test_every_end_token_is_read(tmp_path: Path) -> None:
    _, info, _ = synthesise(tmp_path, byte_level_fields(eot_token_id=0, eom_token_id=2))
    assert info.eos_ids == (2, 0)


def test_end_token_zero_is_a_token(tmp_path: Path) -> None:
    _, info, _ = synthesise(tmp_path, byte_level_fields(eos_token_id=0))
    assert info.eos_ids == (0,)


def test_padding_tokens_at_the_end_are_not_tokens(tmp_path: Path) -> None:
    fields = byte_level_fields()
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"].value
    count = len(tokens)
    padded = byte_level_fields(
        tokens=[*tokens, f"[PAD{count}]", f"[PAD{count + 1}]"],
        token_type=Value(I32, [*types, 5, 5], True),
    )
    tokenizer, _, num_tokens = synthesise(tmp_path, padded)
    assert num_tokens == count == tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": Value(STRING, [], True)}, "no tokenizer.ggml.tokens"),
        ({"token_type": Value(I32, [1], True)}, "has 1 items"),
        ({"tokens": ["a", "a"], "token_type": Value(I32, [1, 1], True)}, "are both 'a'"),
        ({"merges": ["T xyz"]}, "merge 'T xyz'"),
        ({"merges": ["T"]}, "merge 'T'"),
        ({"eos_token_id": 99_999}, "eos_token_id 99999 is not one of"),
        ({"bos_token_id": 99_999}, "bos_token_id 99999 is not one of"),
        ({"unknown_token_id": 99_999}, "unknown_token_id 99999 is not one of"),
        ({"eos_token_id": "</s>"}, "is str, int expected"),
    ],
)
def test_broken_fields_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        synthesise(tmp_path, byte_level_fields(**changes))


@pytest.mark.parametrize("missing", ["merges", "eos_token_id", "model"])
def test_missing_fields_are_named(tmp_path: Path, missing: str) -> None:
    fields = byte_level_fields()
    del fields[f"tokenizer.ggml.{missing}"]
    with pytest.raises(FormatError, match=missing):
        synthesise(tmp_path, fields)


def test_sentencepiece_without_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no tokenizer\.ggml\.scores"):
        synthesise(tmp_path, spm_fields(scores=None))
