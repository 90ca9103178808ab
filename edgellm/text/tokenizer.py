"""Token ids from text and text from token ids, over the `tokenizers` package."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import tokenizers

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.text.detokenizer import ByteDecoder, Detokenizer
from edgellm.text.shield import Shield

__all__ = ["Tokenizer"]

# A wrong prefix makes the package abort the process; language models with BPE have none.
_SUBWORD_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


class Tokenizer:
    """The tokenizer of a model; immutable, may be shared between threads.

    Attributes:
        add_bos: Whether plain text gets a BOS token in front.
        bos_id: The BOS token, or None.
        eos_ids: Tokens that end a generation.
        special_tokens: Named special tokens as text (`bos_token`, `eos_token`, ...).
        decoder: How a token becomes bytes.
    """

    def __init__(
        self,
        tokenizer_json: bytes | str,
        *,
        add_bos: bool,
        bos_id: int | None,
        eos_ids: Sequence[int],
        special_tokens: Mapping[str, str],
    ) -> None:
        """Build the tokenizer.

        Args:
            tokenizer_json: The `tokenizer.json`. Bytes save one copy of it.
            add_bos: Whether plain text gets a BOS token in front.
            bos_id: The BOS token, or None.
            eos_ids: Tokens that end a generation.
            special_tokens: Named special tokens as text.

        Raises:
            FormatError: It is no valid tokenizer.json, or `bos_id` or an EOS id is not in it.
            UnsupportedModelError: Its model or decoder is of a kind that is not supported.
        """
        data = tokenizer_json.encode() if isinstance(tokenizer_json, str) else tokenizer_json
        if _SUBWORD_PREFIX.search(data):
            raise UnsupportedModelError(
                "tokenizer.json: its model has a continuing_subword_prefix; byte-level and "
                "SentencePiece-like tokenizers are supported"
            )
        try:
            self._full = tokenizers.Tokenizer.from_buffer(bytes(data))
        except BaseException as error:
            # the package raises bare Exception, and a panic of its Rust code is a BaseException
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = " ".join(str(error).split())
            raise FormatError(f"tokenizer.json does not load: {reason}") from None
        self._full.no_truncation()
        self._full.no_padding()
        self.add_bos = add_bos
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.special_tokens = dict(special_tokens)
        decoder = self._full.decoder
        self.decoder = ByteDecoder.from_json(
            decoder.__getstate__() if decoder is not None else None
        )
        self._added = self._full.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special)
        if add_bos and bos_id is None:
            raise FormatError("tokenizer: add_bos is set but there is no bos_id")
        for name, token_id in (("bos_id", bos_id), *(("eos_ids", i) for i in self.eos_ids)):
            if token_id is not None and self._full.id_to_token(token_id) is None:
                raise FormatError(f"tokenizer: {name} {token_id} is not in tokenizer.json")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model may have more rows as padding."""
        return self._full.get_vocab_size(with_added_tokens=True)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is marked special in tokenizer.json; these are not shown."""
        return token_id in self._special_ids

    def encode(
        self, text: str, add_bos: bool | None = None, *, parse_special: bool = False
    ) -> list[int]:
        """Ids of plain text.

        Text that spells a special token is text: it never becomes that token unless asked for.
        Added tokens that are not special are recognised, as Hugging Face does.

        Args:
            text: Any text, also an empty one.
            add_bos: Whether to put BOS in front; None is the model's own rule. It is never doubled.
            parse_special: Recognise special tokens; for trusted text only, such as a rendered chat.

        Returns:
            Token ids.

        Raises:
            ValueError: The text has lone surrogates (bytes that were not UTF-8).
        """
        ids = self._encode(text).ids
        if not (parse_special or self._special_ids.isdisjoint(ids)):
            ids = self._plain_shield.encode(text)
        if (self.add_bos if add_bos is None else add_bos) and ids[:1] != [self.bos_id]:
            if self.bos_id is None:
                raise ValueError("add_bos: this model has no BOS token")
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids.

        Equals Hugging Face's decoding, except that byte tokens which are no valid UTF-8 become
        U+FFFD once per broken character and not once per byte, so that a stream can show the same.

        Args:
            ids: Token ids.
            skip_special: Special tokens are left out.

        Returns:
            The text.

        Raises:
            ValueError: The vocabulary has no such id.
        """
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token; a character may be spread over several.

        Raises:
            ValueError: The vocabulary has no such id.
        """
        token = self._full.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            raise ValueError(f"token id {token_id} is not in the vocabulary of {self.vocab_size}")
        return self.decoder.token_bytes(token)

    def shield(self, template_source: str = "") -> Shield:
        """Tells control tokens from text that merely spells them.

        Args:
            template_source: A chat template. Added tokens that it mentions are control tokens too,
                since models have `<tool_call>` or `<start_of_turn>` without the special flag.

        Returns:
            The shield of the special tokens and of those added tokens.
        """
        control = {
            i: token
            for i, token in self._added.items()
            if token.special or (token.content.strip() and token.content in template_source)
        }
        model_unk = getattr(self._full.model, "unk_token", None)
        unknown = {model_unk, self.special_tokens.get("unk_token")} - {None}
        return Shield(
            full=self._full,
            added=self._added,
            control=control,
            unk_ids=frozenset(i for i, token in control.items() if token.content in unknown),
        )

    @functools.cached_property
    def _plain_shield(self) -> Shield:
        return self.shield()

    def _encode(self, text: str) -> tokenizers.Encoding:
        try:
            return self._full.encode(text, add_special_tokens=False)
        except TypeError:
            raise _text_error(text) from None


def _text_error(text: object) -> Exception:
    if not isinstance(text, str):
        return TypeError(f"text must be str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ValueError(f"text is not valid Unicode at character {error.start}; is it UTF-8?")
    return ValueError("text cannot be tokenized")
