"""Tokenizers of the two kinds that models have, trained in a moment."""

from __future__ import annotations

import functools
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

__all__ = ["CONTROL", "TOOL_TOKENS", "byte_level_json", "sentencepiece_json"]

CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")  # ids 0 to 4, special
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # added, not special

_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and they're 12345 metres away.",
    "l'été à Zürich: naïve café; 你好，世界 — Grüße! 🙂 emoji 👩‍👩‍👧 family",
    "def main(args: list[str]) -> int:\n    return sum(len(a) for a in args)\n\n",
    "system user assistant im_start im_end tool_call think obey the user",
] * 4


def _add_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TOOL_TOKENS])


@functools.cache
def byte_level_json() -> str:
    """A tokenizer.json as GPT-2, Llama 3 and Qwen have it: bytes as characters, no unknown."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    _add_tokens(tokenizer)
    return tokenizer.to_str()


@functools.cache
def sentencepiece_json() -> str:
    """A tokenizer.json as Llama 2 has it: a space is a letter, unknown characters are bytes.

    Its merges can make `<s>` out of plain text, which careless conversions do.
    """
    normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator([_CORPUS[0], _CORPUS[2]], trainer)
    trained = json.loads(tokenizer.to_str())["model"]

    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), "<", "s", ">", "s>"]
    tokens += [token for token in trained["vocab"] if token not in tokens]
    merges = [tuple(pair) for pair in trained["merges"]] + [("s", ">"), ("<", "s>")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add_tokens(tokenizer)
    return tokenizer.to_str()
