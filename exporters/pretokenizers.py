"""How byte-level BPE vocabularies split text before merging, by `tokenizer.ggml.pre`.

A GGUF file only names the split; the expressions are those of the models' own `tokenizer.json`.
Text is cut by the expressions one after the other, each match and each gap becoming a piece.

Source: `llm_tokenizer_bpe` of llama.cpp's llama-vocab.cpp, which quotes the originals, and the
tokenizer classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How text is split.

    Attributes:
        patterns: Regular expressions, applied in order.
        is_nfc: Text is first brought to Unicode form NFC.
        ignores_merges: A piece that is a token is taken whole, even if no merges lead to it.
        adds_bos: BOS begins a prompt when the file does not say.
    """

    patterns: tuple[str, ...]
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD: Final = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """The expression of the GPT-4 family with its rule for runs of digits."""
    return rf"{_SUFFIX}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased(digits: str, suffix: str) -> str:
    """The expression that also cuts between lower and upper case."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


_GPT2_PLAIN = PreTokenizer(patterns=(_GPT2,))
_GPT2_DIGITS = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer(patterns=(_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_LLAMA3_MERGES = PreTokenizer(patterns=_LLAMA3.patterns)
_QWEN2 = PreTokenizer(patterns=(_words(r"\p{N}"),), is_nfc=True)
_QWEN2_RAW = PreTokenizer(patterns=_QWEN2.patterns)
_GPT4O = PreTokenizer(patterns=(_cased(r"\p{N}{1,3}", f"{_SUFFIX}?"),))
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-"
    "ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-"
    "ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "gpt-2": _GPT2_PLAIN,
    "phi-2": _GPT2_PLAIN,
    "mpt": _GPT2_PLAIN,
    "olmo": _GPT2_PLAIN,
    "trillion": _GPT2_PLAIN,
    "granite-docling": _GPT2_PLAIN,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "codeshell": _GPT2_DIGITS,
    "minerva-7b": _GPT2_DIGITS,
    "command-r": PreTokenizer(patterns=_GPT2_DIGITS.patterns, is_nfc=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _LLAMA3_MERGES,
    "smaug-bpe": _LLAMA3_MERGES,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2_RAW,
    "kormo": _QWEN2_RAW,
    "megrez": _QWEN2_RAW,
    "stablelm2": _QWEN2_RAW,
    "qwen35": PreTokenizer(
        patterns=(
            rf"{_SUFFIX}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",
        ),
        is_nfc=True,
    ),
    "seed-coder": PreTokenizer(
        patterns=(rf"{_SUFFIX}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",)
    ),
    "tekken": PreTokenizer(patterns=(_cased(r"\p{N}", ""),), ignores_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-llm": PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
    ),
    "deepseek-v3": PreTokenizer(
        patterns=(
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
        )
    ),
    "falcon": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom": PreTokenizer(patterns=(_BLOOM,)),
    "gpt3-finnish": PreTokenizer(patterns=(_BLOOM,)),
    "poro-chat": PreTokenizer(patterns=(_BLOOM,)),
    "viking": PreTokenizer(patterns=(_BLOOM, r"\p{N}")),
}
