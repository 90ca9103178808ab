"""A text's tokens cut into windows, and which tokens count.

Window w holds tokens w x context to (w + 1) x context - 1 of the text; where the model wants a
beginning-of-text token, it replaces the window's first. A last, shorter window counts too. With
"all" each token but the first of a window is scored, given those before it in the window. With
"half" only those after the middle are: with whole windows these are the tokens, and the figures,
of llama.cpp's llama-perplexity.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from edgellm.errors import ModelNotFoundError
from edgellm.eval.statistics import BLOCK_TOKENS
from edgellm.text import Tokenizer
from edgellm.types import Int32Array

__all__ = [
    "MIN_SCORED",
    "OUR_TEXT",
    "Text",
    "Windows",
    "cut",
    "load_text_file",
    "vocabulary_sha256",
]

MIN_SCORED: Final = 4 * BLOCK_TOKENS
OUR_TEXT: Final = "edgellm's own text"
_CHARACTERS_A_TOKEN: Final = 8  # encoded at first; more if that gives too few tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to evaluate on.

    Attributes:
        name: For people.
        content: The text.
    """

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Of the text in UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def load_text_file(path: Path | None) -> Text:
    """Reads a text.

    Args:
        path: A file in UTF-8; None: the small text that comes with edgellm.

    Raises:
        ModelNotFoundError: There is no such file.
        ValueError: It is not UTF-8.
    """
    if path is None:
        resource = importlib.resources.files("edgellm.eval") / "text.txt"
        return Text(name=OUR_TEXT, content=resource.read_text("utf-8"))
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such text file")
    try:
        return Text(name=path.name, content=path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """A text's tokens and how they are cut.

    Attributes:
        ids: (n,) tokens of the text.
        context: Tokens of a window.
        score: "all" or "half".
        bos_id: Replaces the first token of each window; None for none.
    """

    ids: Int32Array
    context: int
    score: str
    bos_id: int | None

    def __iter__(self) -> Iterator[Int32Array]:
        for start in range(0, len(self.ids), self.context):
            window = self.ids[start : start + self.context].copy()
            if self.bos_id is not None:
                window[0] = self.bos_id
            if len(window) - 1 > self.first:
                yield window

    @property
    def first(self) -> int:
        """The row of a window whose logits are the first to count: they predict the next token."""
        return 0 if self.score == "all" else self.context // 2

    @property
    def num_scored(self) -> int:
        """Tokens that are scored."""
        return sum(len(window) - 1 - self.first for window in self)

    def blocks(self) -> npt.NDArray[np.int64]:
        """(num_scored,) number of each scored token's block; none spans two windows."""
        labels: list[npt.NDArray[np.int64]] = []
        base = 0
        for window in self:
            labels.append(base + np.arange(len(window) - 1 - self.first) // BLOCK_TOKENS)
            base = int(labels[-1][-1]) + 1
        return np.concatenate(labels)


def cut(text: Text, tokenizer: Tokenizer, *, tokens: int, context: int, score: str) -> Windows:
    """The first tokens of a text, in windows.

    Args:
        text: The text; what spells a control token is text.
        tokenizer: The model's.
        tokens: Most tokens to take.
        context: Tokens of a window.
        score: "all" or "half".

    Raises:
        ValueError: An argument is out of range, or the text is too short.
    """
    if score not in ("all", "half"):
        raise ValueError(f"score is {score!r}; it must be 'all' or 'half'")
    if tokens < 1 or context < 4:
        raise ValueError(f"{tokens} tokens in windows of {context}: at least 1 and 4 are needed")
    length = tokens * _CHARACTERS_A_TOKEN
    ids = tokenizer.encode(text.content[:length], add_bos=False)
    while len(ids) <= tokens and length < len(text.content):
        length *= 2
        ids = tokenizer.encode(text.content[:length], add_bos=False)
    windows = Windows(
        ids=np.array(ids[:tokens], np.int32),
        context=context,
        score=score,
        bos_id=tokenizer.bos_id if tokenizer.add_bos else None,
    )
    if windows.num_scored < MIN_SCORED:
        raise ValueError(
            f"text {text.name} gives {windows.num_scored} tokens to score, an interval needs"
            f" {MIN_SCORED}: give a longer one with --text, or more --tokens"
        )
    return windows


def vocabulary_sha256(tokenizer: Tokenizer, num_tokens: int) -> str:
    """Hash of the bytes of all tokens: equal for models whose token ids mean the same.

    Args:
        tokenizer: The model's.
        num_tokens: Tokens the model knows.
    """
    digest = hashlib.sha256()
    for token_id in range(num_tokens):
        try:
            token = tokenizer.token_bytes(token_id)
        except ValueError:  # an id without a token
            digest.update(b"\xff\xff\xff\xff")
            continue
        digest.update(len(token).to_bytes(4, "little") + token)
    return digest.hexdigest()
