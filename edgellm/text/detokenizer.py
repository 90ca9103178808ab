"""Text from token ids, one id at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.errors import UnsupportedModelError

if TYPE_CHECKING:
    from edgellm.text.tokenizer import Tokenizer

__all__ = ["ByteDecoder", "Detokenizer"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100.

    Source: GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteDecoder:
    """The `decoder` of a tokenizer.json as a function of single tokens.

    Attributes:
        num_stripped: Leading spaces to take off the whole text.
        is_first_bare: The first token loses its spaces (Metaspace).
        is_byte_level: Characters stand for bytes.
        has_byte_pieces: `<0x41>` stands for a byte.
        replacements: (pattern, replacement) of every Replace step, in order.
    """

    num_stripped: int = 0
    is_first_bare: bool = False
    is_byte_level: bool = False
    has_byte_pieces: bool = False
    replacements: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_json(cls, state: str | bytes | None) -> ByteDecoder:
        """Read the `decoder` object of a tokenizer.json.

        Raises:
            UnsupportedModelError: A step needs more than one token at a time.
        """
        spec: dict[str, Any] = json.loads(state) if state else {"type": "none"}
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        fields: dict[str, Any] = {"replacements": ()}
        is_fused = False
        for step in steps:
            kind = step["type"]
            if kind == "ByteLevel":
                fields["is_byte_level"] = True
            elif kind == "ByteFallback":
                fields["has_byte_pieces"] = True
            elif kind == "Fuse":
                is_fused = True
            elif kind == "Replace" and "String" in step["pattern"]:
                fields["replacements"] += ((step["pattern"]["String"], step["content"]),)
            elif kind == "Metaspace":
                fields["replacements"] += ((step["replacement"], " "),)
                fields["is_first_bare"] = step.get("prepend_scheme", "always") != "never"
            elif kind == "Strip" and is_fused and step["content"] == " " and not step["stop"]:
                fields["num_stripped"] = step["start"]
            else:
                raise UnsupportedModelError(
                    f"tokenizer.json: decoder step {kind!r} cannot be streamed; "
                    "byte-level and SentencePiece-like decoders are supported"
                )
        return cls(**fields)

    def token_bytes(self, token: str) -> bytes:
        """UTF-8 bytes that `token` contributes; a character may be spread over several tokens."""
        if self.has_byte_pieces and (match := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        if self.is_byte_level:
            # an added token is text, not bytes: it has characters outside the alphabet
            values = [_BYTE_LEVEL.get(character, -1) for character in token]
            if -1 not in values:
                return bytes(values)
        return token.encode()


class Detokenizer:
    """Turns a stream of ids into text that never splits a character.

    The deltas and the flushed tail together are `Tokenizer.decode` of all ids, whatever the ids:
    bytes that are no UTF-8 become U+FFFD as soon as that is certain, a truncated character at the
    end becomes one U+FFFD in `flush`. A step costs the length of its token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        """Prepare for one stream.

        Args:
            tokenizer: Where the ids come from.
            skip_special: Special tokens are left out.
        """
        self._token_bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._is_skipped: Callable[[int], bool] = (
            tokenizer.is_special if skip_special else lambda token_id: False
        )
        self._is_first_bare = tokenizer.decoder.is_first_bare
        self._num_to_strip = tokenizer.decoder.num_stripped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take the next id.

        Args:
            token_id: An id of the vocabulary.

        Returns:
            The characters completed by this id, perhaps none.

        Raises:
            ValueError: The vocabulary has no such id.
        """
        if self._is_skipped(token_id):
            return ""
        piece = self._token_bytes(token_id)
        if self._is_first_bare:
            piece = piece.replace(b" ", b"")
            self._is_first_bare = False
        while piece and self._num_to_strip:
            is_space = piece.startswith(b" ")
            piece = piece[is_space:]
            self._num_to_strip = self._num_to_strip - 1 if is_space else 0
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """End the stream.

        Returns:
            U+FFFD if the last character is incomplete, else nothing.
        """
        return self._utf8.decode(b"", final=True)
