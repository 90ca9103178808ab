"""Chat templates: messages to text, as `transformers` renders them."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from edgellm.errors import TemplateError

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["ChatTemplate", "plain_data", "plain_messages"]

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One Jinja chat template, verbatim from the model.

    jinja2 is imported when the template is first compiled. May be shared between threads.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        name: str = "default",
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Keep the template; it is parsed by `compile` or by the first `render`.

        Args:
            source: Jinja source.
            special_tokens: What the template can refer to: `bos_token`, `eos_token` and so on.
            name: Used in error messages.
            clock: What `strftime_now` asks for the time. Fix it where text must not change daily.
        """
        self.source = source
        self.name = name
        self._special_tokens = {"bos_token": "", "eos_token": "", **special_tokens}
        self._clock = clock

    def compile(self) -> None:
        """Parse the template now.

        Raises:
            TemplateError: It does not parse; the message names the line.
        """
        _ = self._template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **extra: Any,
    ) -> str:
        """Text of a conversation.

        As in `transformers`, keys of a message whose value is None are dropped, and the reasoning
        of a message is known under all of its usual names.

        Args:
            messages: Objects with `role`, `content` and whatever else the template reads.
            tools: JSON schemas of tools the model may call.
            documents: Objects with `title` and `text`.
            add_generation_prompt: End with the start of an assistant message.
            **extra: Further variables, for example `enable_thinking`.

        Returns:
            The rendered text; control tokens are spelled out in it.

        Raises:
            TemplateError: The template refused the messages, failed, or used up its budget.
            TypeError: Something in the messages is no JSON value.
            ValueError: Text is no valid Unicode, or nested too deeply.
        """
        variables = {
            **self._special_tokens,
            **plain_data(extra, "template variables"),
            "messages": plain_messages(messages),
            "tools": plain_data(tools, "tools"),
            "documents": plain_data(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._template
        from edgellm.text.sandbox import MAX_TEXT, start_budget

        start_budget()
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                if length > MAX_TEXT:
                    raise OverflowError(f"its text is longer than {MAX_TEXT >> 20} MiB")
                pieces.append(piece)
        except (Exception, RecursionError) as error:
            self._fail(error)
        return "".join(pieces)

    @functools.cached_property
    def _template(self) -> Template:
        from edgellm.text.sandbox import create_environment, start_budget

        start_budget()
        try:
            return create_environment(self._clock).from_string(self.source)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        from edgellm.text.sandbox import RaisedByTemplateError

        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, RaisedByTemplateError):
            raise TemplateError(
                f"chat template {self.name!r} refused the messages: {text}"
            ) from None
        line = getattr(error, "lineno", None)
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == "<template>":
                line = frame.lineno
        where = f", line {line}" if line else ""
        raise TemplateError(f"chat template {self.name!r}{where}: {text}") from None


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a template sees them: plain data, no None, reasoning under all its names.

    Args:
        messages: Any conversation.

    Returns:
        A copy.

    Raises:
        TypeError: A message is no mapping, or has a value that is no JSON.
        ValueError: Text is no valid Unicode, or nested too deeply.
    """
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}] must be a mapping, not {type(message).__name__}")
        where = f"messages[{index}]"
        plain = {k: v for k, v in plain_data(message, where).items() if v is not None}
        reasoning = next((plain[k] for k in _REASONING_KEYS if k in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        result.append(plain)
    return result


def plain_data(value: Any, where: str) -> Any:
    """`value` rebuilt of exact JSON types, so that a template can reach no other object.

    Args:
        value: Text, number, bool, None, or sequences and mappings of them.
        where: What it is, for the message.

    Raises:
        TypeError: It has another kind of object.
        ValueError: Text is no valid Unicode, or nested too deeply.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str.__str__(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: text is not valid Unicode at character {error.start}; is it UTF-8?"
            ) from None
        return text
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise TypeError(f"{where}: {type(value).__name__} is no JSON value; pass text or plain data")
