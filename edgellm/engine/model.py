"""An open model: its file, the C library's view of it, and its text parts, loaded when first used."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgellm import devices
from edgellm._native import NativeModel
from edgellm.engine.memory import check_fit
from edgellm.engine.sampling import SamplingParams
from edgellm.errors import FormatError, ModelNotFoundError, TemplateError, UnsupportedDeviceError
from edgellm.format import EdgeFile
from edgellm.text import ChatTemplate, Tokenizer, load_text

__all__ = ["DEFAULT_CONTEXT", "Message", "Model"]

Message = dict[str, Any]
"""One message of a chat, as in {"role": "user", "content": "Hello"}."""

# Used when no context is asked for and the model could hold more: KV cache memory grows with it.
DEFAULT_CONTEXT = 8192


class Model:
    """What all sessions of one model share; safe to use from several threads."""

    def __init__(
        self, path: str | os.PathLike[str], *, threads: int | None, isa: str | None, device: str
    ) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise ModelNotFoundError(f"{self.path}: no such file")
        self.device = devices.probe(device)
        if not self.device.is_available:
            raise UnsupportedDeviceError(f"device {device!r} cannot be used: {self.device.reason}")
        self.file = EdgeFile.open(self.path)
        try:
            self.native = NativeModel(self.path, threads=threads or 0, isa=isa)
        except BaseException:
            self.file.close()
            raise
        self.info = self.native.info
        self.eos_ids = frozenset(self.file.meta["tokenizer"]["eos_ids"])
        self._text: tuple[Tokenizer, ChatTemplate | None] | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Frees the model and its sessions."""
        self.native.close()
        self.file.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._load_text()[0]

    @property
    def template(self) -> ChatTemplate:
        """The default chat template.

        Raises:
            TemplateError: if the model has none.
        """
        template = self._load_text()[1]
        if template is None:
            raise TemplateError(
                f"{self.path.name} has no chat template: it completes text, give it a prompt"
            )
        return template

    def _load_text(self) -> tuple[Tokenizer, ChatTemplate | None]:
        with self._lock:
            if self._text is None:
                self._text = load_text(self.file)
            return self._text

    def default_sampling(self) -> SamplingParams:
        """What the model's `generation_config.json` recommends; greedy without one."""
        source = self.file.generation_config
        if source is None:
            return SamplingParams()
        try:
            config = json.loads(source) if isinstance(source, bytes | str) else source
            return SamplingParams.from_generation_config(config)
        except (ValueError, TypeError, AttributeError) as err:
            raise FormatError(f"{self.path.name}: GENERATION_CONFIG: {err}") from err

    def choose_context(self, context: int | None) -> int:
        """Checks a context length and that a session of it fits the memory.

        Args:
            context: tokens; None: the model's longest, at most DEFAULT_CONTEXT.

        Returns:
            The context, tokens.
        """
        longest = self.info.max_context
        if context is None:
            context = min(longest, DEFAULT_CONTEXT)
        if not 1 <= context <= longest:
            raise ValueError(f"context is {context}; this model takes 1 to {longest} tokens")
        check_fit(
            file_bytes=self.info.file_bytes,
            session_bytes=self.native.session_bytes,
            context=context,
            device=self.device,
        )
        return context

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, with the beginning-of-text token if the model wants one."""
        return self.tokenizer.encode(check_text(text, "the text"))

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ValueError: it is empty, not valid Unicode, or has ids the model does not know.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(check_text(prompt, "the prompt"))
        elif isinstance(prompt, bytes):
            raise TypeError('the prompt is bytes; decode it first: prompt.decode("utf-8")')
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise ValueError("the prompt is empty: give it at least one token")
        wrong = next((token for token in ids if not 0 <= token < self.info.num_tokens), None)
        if wrong is not None:
            raise ValueError(
                f"the prompt has token id {wrong}; this model has ids 0 to"
                f" {self.info.num_tokens - 1}"
            )
        return ids

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> list[int]:
        """Token ids of a rendered chat, ready for the answer.

        Raises:
            TemplateError: the model has no template or it refuses the messages.
        """
        if not messages:
            raise ValueError("there are no messages: give at least one")
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or "role" not in message:
                raise ValueError(f"message {number} must be a dict with a role and a content")
            if isinstance(message.get("content"), str):
                check_text(message["content"], f"message {number}")
        return self.template.encode(self.tokenizer, messages, tools=tools)


def check_text(text: str, what: str) -> str:
    """Returns `text` if it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise ValueError(
            f"{what} is not valid Unicode: a lone surrogate at character {err.start};"
            " read it as UTF-8"
        ) from err
    return text
