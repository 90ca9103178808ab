"""Conversations to token ids, with control tokens from the template only."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.errors import TemplateError
from edgellm.text.chat_template import ChatTemplate, plain_data, plain_messages
from edgellm.text.shield import Shield
from edgellm.text.tokenizer import Tokenizer

__all__ = ["ChatEncoder", "EncodedChat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChat:
    """A rendered conversation.

    Attributes:
        text: What the template made of it.
        ids: Its token ids. BOS is there if the template writes it, as in Hugging Face.
    """

    text: str
    ids: list[int]


class ChatEncoder:
    """Renders and tokenizes conversations for one model.

    As long as no string of the conversation spells a control token, the ids are those of Hugging
    Face: the rendered text, tokenized with control tokens recognised. Otherwise what was spelled is
    hidden from the template under a secret name; the template's own control tokens are then the
    only ones in its text, and the spelled ones come back as plain text. Merges across the seam are
    those of the whole text either way.

    Control tokens are the special ones, and added tokens that the template mentions. The latter are
    allowed in assistant messages (`<think>`, `<tool_call>`): the model wrote those itself.
    """

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate]) -> None:
        """Prepare for a model.

        Args:
            tokenizer: Of the same model.
            templates: By name; the usual ones are `default` and `tool_use`.
        """
        self._tokenizer = tokenizer
        self._templates = dict(templates)
        self._shields: dict[str, Shield] = {}

    def template(self, name: str | None = None, *, has_tools: bool = False) -> ChatTemplate:
        """The template for a conversation.

        Args:
            name: Which one; None chooses `tool_use` for tools if there is one, else `default`.
            has_tools: Whether tools are offered to the model.

        Returns:
            The template.

        Raises:
            TemplateError: The model has no such template.
        """
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            known = ", ".join(sorted(self._templates)) or "none"
            raise TemplateError(f"this model has no chat template {name!r}; it has: {known}")
        return self._templates[name]

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **extra: Any,
    ) -> EncodedChat:
        """Render and tokenize a conversation.

        Args:
            messages: See `ChatTemplate.render`, also for the other arguments.
            tools: JSON schemas of tools the model may call.
            documents: Objects with `title` and `text`.
            add_generation_prompt: End with the start of an assistant message.
            template: Name of the template.
            **extra: Further variables of the template.

        Returns:
            Text and ids.

        Raises:
            TemplateError: There is no such template, or it refused the messages or failed.
            TypeError: Something in the messages is no JSON value.
            ValueError: Text is no valid Unicode.
        """
        chosen = self.template(template, has_tools=bool(tools))
        if chosen.name not in self._shields:
            self._shields[chosen.name] = self._tokenizer.shield(chosen.source)
        shield = self._shields[chosen.name]
        cover = _Cover(shield, self._tokenizer.is_special)
        covered = [
            cover.hide(message, is_model=message.get("role") == "assistant")
            for message in plain_messages(messages)
        ]
        rendered = chosen.render(
            covered,
            tools=cover.hide(plain_data(tools, "tools")),
            documents=cover.hide(plain_data(documents, "documents")),
            add_generation_prompt=add_generation_prompt,
            **cover.hide(plain_data(extra, "template variables")),
        )
        if not cover.hidden:
            ids = self._tokenizer.encode(rendered, add_bos=False, parse_special=True)
            return EncodedChat(text=rendered, ids=ids)
        ids = shield.encode(cover.restore(shield.mark(rendered)))
        return EncodedChat(text=cover.restore(rendered), ids=ids)


class _Cover:
    """Secret names for what a conversation must not say as a control token."""

    def __init__(self, shield: Shield, is_special: Callable[[int], bool]) -> None:
        self._shield = shield
        self._is_special = is_special
        self._nonce = secrets.token_hex(16)
        self._name = re.compile(rf"y{self._nonce}(\d+)y")
        self.hidden: list[str] = []

    def hide(self, value: Any, *, is_model: bool = False) -> Any:
        """`value` with spelled control tokens replaced in every string and key.

        Args:
            value: Plain data.
            is_model: The model wrote it: only special tokens are replaced.
        """
        if isinstance(value, str):
            return self._hide_text(value, is_model)
        if isinstance(value, dict):
            return {
                self.hide(k, is_model=is_model): self.hide(v, is_model=is_model)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self.hide(item, is_model=is_model) for item in value]
        return value

    def restore(self, text: str) -> str:
        """`text` with the names replaced by what they stand for."""
        return self._name.sub(lambda match: self.hidden[int(match[1])], text)

    def _hide_text(self, text: str, is_model: bool) -> str:
        pieces, end = [], 0
        for span in self._shield.spans(text):
            if is_model and not self._is_special(span.token_id):
                continue
            pieces += [text[end : span.start], self._hidden(text[span.start : span.stop])]
            end = span.stop
        pieces.append(text[end:])
        if self._shield.is_open(pieces[-1]):
            # "<|im_" and "end|>" in two strings could meet in the rendered text: an empty name
            # between them keeps them apart
            pieces.append(self._hidden(""))
        return "".join(pieces)

    def _hidden(self, text: str) -> str:
        self.hidden.append(text)
        return f"y{self._nonce}{len(self.hidden) - 1}y"
