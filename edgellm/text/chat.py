"""Conversations to token ids, with control tokens from the template only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    Face: the rendered text, tokenized with control tokens recognised. Otherwise the template gets a
    placeholder for what was spelled; its own control tokens are then the only ones in its text, and
    the spelled ones come back as plain text. Merges across the seam are those of the whole text
    either way.

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
        conversation = plain_messages(messages)
        data = {
            **plain_data(extra, "template variables"),
            "tools": plain_data(tools, "tools"),
            "documents": plain_data(documents, "documents"),
        }
        cover = _Cover(shield, self._tokenizer.is_special, [conversation, data, chosen.source])
        covered = [cover.hide(m, is_model=m.get("role") == "assistant") for m in conversation]
        rendered = chosen.render(
            covered, add_generation_prompt=add_generation_prompt, **cover.hide(data)
        )
        if not cover.has_placeholders:
            ids = self._tokenizer.encode(rendered, add_bos=False, parse_special=True)
            return EncodedChat(text=rendered, ids=ids)
        ids = shield.encode(cover.restore(shield.mark(rendered)))
        return EncodedChat(text=cover.restore(rendered), ids=ids)


class _Cover:
    """Placeholders for what a conversation must not say as a control token.

    A placeholder is one private-use character that is nowhere else in the conversation, so that
    trimming, splitting and JSON in the template leave it whole.
    """

    def __init__(self, shield: Shield, is_special: Callable[[int], bool], everything: Any) -> None:
        self._shield = shield
        self._is_special = is_special
        self._free = _free_characters(everything)
        self._placeholders: dict[str, str] = {}

    @property
    def has_placeholders(self) -> bool:
        """Whether anything has been replaced."""
        return bool(self._placeholders)

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
        """`text` with the placeholders replaced by what they stand for."""
        return text.translate({ord(c): hidden for hidden, c in self._placeholders.items()})

    def _hide_text(self, text: str, is_model: bool) -> str:
        pieces, end = [], 0
        for span in self._shield.spans(text):
            if is_model and not self._is_special(span.token_id):
                continue
            pieces += [text[end : span.start], self._placeholder(text[span.start : span.stop])]
            end = span.stop
        pieces.append(text[end:])
        if self._shield.is_open(pieces[-1]):
            # "<|im_" and "end|>" in two strings could meet in the rendered text: a placeholder for
            # nothing keeps them apart
            pieces.append(self._placeholder(""))
        return "".join(pieces)

    def _placeholder(self, hidden: str) -> str:
        if hidden not in self._placeholders:
            self._placeholders[hidden] = next(self._free)
        return self._placeholders[hidden]


def _free_characters(everything: Any) -> Iterator[str]:
    """Private-use characters that plain data does not have."""
    used = set(json.dumps(everything, ensure_ascii=False))
    for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)):
        if chr(code) not in used:
            yield chr(code)
    raise ValueError("the conversation uses up the private-use characters of Unicode")
