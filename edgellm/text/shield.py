"""Keeps text that spells a control token from becoming that token.

The `tokenizers` package recognises added tokens wherever they are spelled. A shield has a second
tokenizer over the same model object (the vocabulary is shared, not copied) in which the control
tokens bear secret names. What is to be a control token is written by its secret name, everything
else is text, and a single pass over the whole keeps merges, stripping and normalisation the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import tokenizers

__all__ = ["Shield", "Span"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A control token found in a text: characters start..stop."""

    start: int
    stop: int
    token_id: int


class Shield:
    """One set of control tokens of one tokenizer."""

    def __init__(
        self,
        *,
        full: tokenizers.Tokenizer,
        added: Mapping[int, tokenizers.AddedToken],
        control: Mapping[int, tokenizers.AddedToken],
        unk_ids: frozenset[int],
    ) -> None:
        """Prepare; the second tokenizer is built when first needed.

        Args:
            full: The tokenizer as it is in the file.
            added: All added tokens by id.
            control: Those that text must not become.
            unk_ids: Control tokens that the model also uses for unknown characters.
        """
        self._full = full
        self._added = added
        self._control = control
        self._unk_ids = unk_ids
        self._nonce = secrets.token_hex(16)

    def spans(self, text: str) -> list[Span]:
        """Control tokens that the tokenizer sees in `text`, in order."""
        encoding = self._full.encode(text, add_special_tokens=False)
        return [
            Span(start=start, stop=stop, token_id=token_id)
            for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
            if self._is_control(token_id, text[start:stop])
        ]

    def is_open(self, text: str) -> bool:
        """Whether `text` ends in the beginning of a control token, to be completed by the next."""
        return any(text[-n:] in self._prefixes for n in range(1, self._max_prefix + 1))

    def mark(self, text: str) -> str:
        """`text` with its control tokens replaced by their secret names."""
        pieces, end = [], 0
        for span in self.spans(text):
            pieces += [text[end : span.start], self._name(span.token_id)]
            end = span.stop
        return "".join([*pieces, text[end:]])

    def encode(self, marked: str) -> list[int]:
        """Ids of a text in which only secret names are control tokens.

        Args:
            marked: Text, with control tokens as `mark` writes them.

        Returns:
            Token ids.
        """
        tokenizer, own_ids = self._renamed
        encoding = tokenizer.encode(marked, add_special_tokens=False)
        ids: list[int] = []
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in own_ids:
                ids.append(own_ids[token_id])
            elif self._is_control(token_id, marked[start:stop]):
                ids += self._spelled(token_id)
            else:
                ids.append(token_id)
        return ids

    def _is_control(self, token_id: int, text: str) -> bool:
        if token_id not in self._control:
            return False
        is_unknown = token_id in self._unk_ids and text.strip() != self._control[token_id].content
        return not is_unknown

    def _name(self, token_id: int) -> str:
        # letters and digits only: no normaliser changes them; "x" is no hexadecimal digit, so that
        # names cannot overlap
        return f"x{self._nonce}{token_id:08x}x"

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        contents = (token.content for token in self._control.values())
        return frozenset(c[:n] for c in contents for n in range(1, len(c)))

    @cached_property
    def _max_prefix(self) -> int:
        return max(map(len, self._prefixes), default=0)

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The second tokenizer, and what its own ids of added tokens stand for."""
        renamed = tokenizers.Tokenizer(self._full.model)
        if self._full.normalizer is not None:
            renamed.normalizer = self._full.normalizer
        if self._full.pre_tokenizer is not None:
            renamed.pre_tokenizer = self._full.pre_tokenizer
        own_ids = {}
        tokens = []
        for token_id, token in self._added.items():
            name = self._name(token_id) if token_id in self._control else token.content
            tokens.append(
                tokenizers.AddedToken(
                    name,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
            )
        renamed.add_tokens(tokens)
        for token_id, token in zip(self._added, tokens, strict=True):
            own_id = renamed.token_to_id(token.content)
            if own_id is not None:
                own_ids[own_id] = token_id
        return renamed, own_ids

    def _spelled(self, token_id: int) -> list[int]:
        """A control token that the model makes out of plain text, character by character."""
        content = self._control[token_id].content
        ids = [self._full.token_to_id(character) for character in content]
        if None in ids:
            raise ValueError(
                f"text spells the control token {content!r}, and this tokenizer has no other way "
                "to write it; remove it from the text"
            )
        return [i for i in ids if i is not None]
