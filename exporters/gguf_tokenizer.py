"""Turns a GGUF file's `tokenizer.ggml.*` fields into a `tokenizer.json`.

GGUF keeps the vocabulary and the name of a way to split text, not the tokenizer itself. Two kinds
are read: byte-level BPE ("gpt2") and SentencePiece ("llama"), whose merges are recovered from the
vocabulary and its scores.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.gguf import GGUFFile
from edgellm.exporters.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from edgellm.exporters.source import TokenizerInfo

# Values of tokenizer.ggml.token_type.
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5

SPACE = "▁"  # SentencePiece's mark for a space

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the specification
    "mask_token": "mask_token_id",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """Token texts and types by id, without the padding at the end."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    unk_id: int | None


def synthesise_tokenizer(gguf: GGUFFile) -> tuple[bytes, TokenizerInfo, int]:
    """Makes a `tokenizer.json` of a GGUF file's fields.

    Args:
        gguf: The open file.

    Returns:
        tokenizer.json, the same bytes for the same fields; what goes with it; and the number of
        tokens.

    Raises:
        FormatError: A field is missing or broken.
        UnsupportedModelError: The tokenizer is of another kind, or splits text in an unknown way.

    Source: the vocabulary loader of llama.cpp, whose ids this reproduces.
    """
    model = gguf.field("tokenizer.ggml.model", str)
    if model is None:
        raise FormatError(f"{gguf.path}: the file holds no tokenizer (no tokenizer.ggml.model)")
    vocabulary = _read_vocabulary(gguf)
    if model == "gpt2":
        pre = _pre_tokenizer(gguf)
        parts, adds_bos = _byte_level(gguf, vocabulary, pre), pre.adds_bos
    elif model == "llama":
        parts, adds_bos = _sentencepiece(gguf, vocabulary), True
    else:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer {model!r} is not supported, 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece) are; export from the Hugging Face folder instead"
        )
    info = _tokenizer_info(gguf, vocabulary, adds_bos)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        **parts,
        "post_processor": _post_processor(gguf, vocabulary, info),
    }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode(), info, len(vocabulary.tokens)


def _read_vocabulary(gguf: GGUFFile) -> _Vocabulary:
    tokens = gguf.array("tokenizer.ggml.tokens", str)
    if not tokens:
        raise FormatError(f"{gguf.path}: the file holds no tokenizer.ggml.tokens")
    count = len(tokens)
    types = gguf.array("tokenizer.ggml.token_type", int, count) or [1] * count
    scores = gguf.array("tokenizer.ggml.scores", float, count) or [0.0] * count
    # The converter fills the embedding's surplus rows with tokens of this name.
    while count > 1 and types[count - 1] == UNUSED and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    unk_id = gguf.field("tokenizer.ggml.unknown_token_id", int)
    if unk_id is None:
        unk_id = next((i for i, kind in enumerate(types[:count]) if kind == UNKNOWN), None)
    elif unk_id >= count:
        raise FormatError(f"{gguf.path}: unknown_token_id {unk_id} is not one of {count} tokens")
    return _Vocabulary(
        tokens=tokens[:count], types=types[:count], scores=scores[:count], unk_id=unk_id
    )


def _pre_tokenizer(gguf: GGUFFile) -> PreTokenizer:
    name = gguf.field("tokenizer.ggml.pre", str)
    if name is not None and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    what = "does not say how text is split" if name is None else f"splits text as {name!r}"
    raise UnsupportedModelError(
        f"{gguf.path}: the tokenizer {what} (tokenizer.ggml.pre), which edgellm does not know "
        "and will not guess; export from the Hugging Face folder instead"
    )


def _byte_level(gguf: GGUFFile, vocabulary: _Vocabulary, pre: PreTokenizer) -> dict[str, Any]:
    lines = gguf.array("tokenizer.ggml.merges", str)
    if lines is None:
        raise FormatError(f"{gguf.path}: the tokenizer has no tokenizer.ggml.merges")
    vocab = _index(gguf, vocabulary.tokens)
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(f"{gguf.path}: merge {line!r} is not of two tokens into a third")
        merges.append([left, right])
    splits = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in pre.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "normalizer": {"type": "NFC"} if pre.is_nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**byte_level, "use_regex": False}],
        },
        "decoder": {**byte_level, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre.ignores_merges),
    }


def _sentencepiece(gguf: GGUFFile, vocabulary: _Vocabulary) -> dict[str, Any]:
    if "tokenizer.ggml.scores" not in gguf.fields:
        raise FormatError(f"{gguf.path}: the tokenizer has no tokenizer.ggml.scores")
    tokens = [_with_marks(token) for token in vocabulary.tokens]
    vocab = _index(gguf, tokens)
    unk = None if vocabulary.unk_id is None else tokens[vocabulary.unk_id]
    adds_space = gguf.field("tokenizer.ggml.add_space_prefix", bool) is not False
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = mark
    if adds_space:
        prepend = {"type": "Prepend", "prepend": SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prepend, mark]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocab, _merges(vocab, vocabulary), unk=unk, fuse_unk=True, byte_fallback=True
        ),
    }


def _with_marks(token: str) -> str:
    """GGUF writes a user-defined token of spaces with plain spaces; the model sees marks."""
    return SPACE * len(token) if token and not token.strip(" ") else token


def _merges(vocab: dict[str, int], vocabulary: _Vocabulary) -> list[list[str]]:
    """The merges that a SentencePiece vocabulary implies.

    SentencePiece joins the pair whose union has the best score; so every way to cut a token in two
    tokens is a merge of that token's rank. User-defined tokens carry no score of their own: they
    come first, in the order of their ids.
    """
    ranked = []
    for token, index in vocab.items():
        kind = vocabulary.types[index]
        if len(token) < 2 or kind in (CONTROL, UNKNOWN):
            continue
        score = float("inf") if kind == USER_DEFINED else vocabulary.scores[index]
        cuts = [
            (vocab[left], vocab[right], left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in vocab and (right := token[at:]) in vocab
        ]
        if cuts:
            ranked.append((-score, index, sorted(cuts)))
    ranked.sort(key=lambda entry: entry[:2])
    return [[left, right] for _, _, cuts in ranked for _, _, left, right in cuts]


def _bpe(
    vocab: dict[str, int],
    merges: list[list[str]],
    *,
    unk: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _index(gguf: GGUFFile, tokens: Sequence[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if vocab.setdefault(token, index) != index:
            raise FormatError(f"{gguf.path}: tokens {vocab[token]} and {index} are both {token!r}")
    return vocab


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """Tokens matched whole in the text, before anything else: control and user-defined ones."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == CONTROL
        or index == vocabulary.unk_id
        or (kind == USER_DEFINED and _with_marks(token) == token)
    ]


def _tokenizer_info(gguf: GGUFFile, vocabulary: _Vocabulary, adds_bos: bool) -> TokenizerInfo:
    count = len(vocabulary.tokens)
    ids: dict[str, int] = {}
    for key in {*_SPECIAL_KEYS.values(), *_EOS_KEYS}:
        value = gguf.field(f"tokenizer.ggml.{key}", int)
        if value is None:
            continue
        if not 0 <= value < count:
            raise FormatError(f"{gguf.path}: {key} {value} is not one of {count} tokens")
        ids[key] = value
    eos_ids = tuple(dict.fromkeys(ids[key] for key in _EOS_KEYS if key in ids))
    if not eos_ids:
        raise FormatError(
            f"{gguf.path}: the file does not say which token ends an answer "
            "(tokenizer.ggml.eos_token_id)"
        )
    add_bos = gguf.field("tokenizer.ggml.add_bos_token", bool)
    add_bos = adds_bos if add_bos is None else add_bos
    if add_bos and "bos_token_id" not in ids:
        raise FormatError(f"{gguf.path}: prompts begin with BOS, but there is no bos_token_id")
    return TokenizerInfo(
        add_bos=add_bos,
        bos_id=ids.get("bos_token_id"),
        eos_ids=eos_ids,
        is_synthesised=True,
        special_tokens={
            name: vocabulary.tokens[ids[key]] for name, key in _SPECIAL_KEYS.items() if key in ids
        },
    )


def _post_processor(
    gguf: GGUFFile, vocabulary: _Vocabulary, info: TokenizerInfo
) -> dict[str, Any] | None:
    """What tokenizer.json adds around a text, for other readers; edgellm adds BOS by META."""
    adds_eos = gguf.field("tokenizer.ggml.add_eos_token", bool) is True
    first = [info.bos_id] if info.add_bos and info.bos_id is not None else []
    last = [info.eos_ids[0]] if adds_eos else []
    if not first and not last:
        return None

    def special(index: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": vocabulary.tokens[index], "type_id": 0}}

    def sequence(name: str) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": 0}}

    before, after = [special(i) for i in first], [special(i) for i in last]
    return {
        "type": "TemplateProcessing",
        "single": [*before, sequence("A"), *after],
        "pair": [*before, sequence("A"), *after, *before, sequence("B"), *after],
        "special_tokens": {
            vocabulary.tokens[i]: {
                "id": vocabulary.tokens[i],
                "ids": [i],
                "tokens": [vocabulary.tokens[i]],
            }
            for i in dict.fromkeys(first + last)
        },
    }
