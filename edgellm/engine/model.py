"""An open model: its file, the C library's view of it, and its text parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgellm import devices
from edgellm._native import NativeModel, trim_heap
from edgellm.engine.memory import check_fit
from edgellm.engine.sampling import SamplingParams
from edgellm.engine.tuning import tune_threads
from edgellm.errors import FormatError, TemplateError, UnsupportedDeviceError
from edgellm.format import EdgeFile
from edgellm.text import ChatEncoder, Tokenizer, load_text

__all__ = ["DEFAULT_CONTEXT", "Message", "Model", "check_context"]

Message = dict[str, Any]
"""One message of a chat, as in {"role": "user", "content": "Hello"}."""

# Used when no context is asked for and the model could hold more: KV cache memory grows with it.
DEFAULT_CONTEXT = 8192


def check_context(context: int, longest: int) -> None:
    """Refuses a context, in tokens, that a model does not have.

    Raises:
        ValueError: It is not within 1 and `longest`.
    """
    if not 1 <= context <= longest:
        raise ValueError(f"context is {context}; this model takes 1 to {longest} tokens")


class Model:
    """What all sessions of one model share; safe to use from several threads."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None,
        isa: str | None,
        kv: str | None,
        device: str,
        cache: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self.device = devices.probe(device)
        if not self.device.is_available:
            raise UnsupportedDeviceError(f"device {device!r} cannot be used: {self.device.reason}")
        self.file = EdgeFile.open(self.path)
        try:
            self.native = NativeModel(self.path, threads=threads or 0, isa=isa, kv=kv)
        except BaseException:
            self.file.close()
            raise
        if threads is None and cache is not None:
            tune_threads(self.native, cache)
        self.info = self.native.info
        self.eos_ids = frozenset(self.file.meta["tokenizer"]["eos_ids"])
        self._text: tuple[Tokenizer, ChatEncoder | None] | None = None
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
    def chat(self) -> ChatEncoder:
        """What renders and tokenizes chats.

        Raises:
            TemplateError: if the model has no chat template.
        """
        encoder = self._load_text()[1]
        if encoder is None:
            raise TemplateError(
                f"{self.path.name} has no chat template: it continues a text instead"
                " (generate or stream; on the command line --raw)"
            )
        return encoder

    def _load_text(self) -> tuple[Tokenizer, ChatEncoder | None]:
        with self._lock:
            if self._text is None:
                self._text = load_text(self.file)
                trim_heap()
            return self._text

    def default_sampling(self) -> SamplingParams:
        """What the model's `generation_config.json` recommends; greedy without one."""
        try:
            return SamplingParams.from_generation_config(self.file.generation_config)
        except (ValueError, TypeError) as err:
            raise FormatError(f"{self.path}: section GENERATION_CONFIG: {err}") from err

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
        check_context(context, longest)
        check_fit(
            file_bytes=self.info.file_bytes,
            session_bytes=self.native.session_bytes,
            context=context,
            device=self.device,
        )
        return context

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, with the beginning-of-text token if the model wants one."""
        return self.tokenizer.encode(text)

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ValueError: it is empty, not valid Unicode, or has ids the model does not know.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
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
        return self.chat.encode(messages, tools=tools).ids
