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
# Escaped, since some of these letters are others after normalisation, which editors may apply.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-"
    "\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-"
    "\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
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
