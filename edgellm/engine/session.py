"""One sequence of tokens: prompt in, answer out, the common beginning of two prompts kept."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from edgellm._native import NativeSession, Sampling
from edgellm.engine.answer import Answer, Clock, Turn
from edgellm.engine.model import Message, Model
from edgellm.engine.results import Completion, Delta
from edgellm.engine.sampling import SamplingParams
from edgellm.errors import ContextFullError
from edgellm.types import Float32Array

__all__ = ["Session"]


class Session:
    """One sequence of tokens and its KV cache; made by `LLM.session`.

    It keeps its tokens: of a prompt that begins like the last one with its answer, only the rest is
    computed, so that a chat goes on where it was. This never changes a result. Calls from several
    threads take turns; sessions of one model run side by side.
    """

    def __init__(self, model: Model, context: int | None = None) -> None:
        self._model = model
        self.context = model.choose_context(context)
        self._turn = Turn()
        self._is_closed = False
        self._native: NativeSession | None = None
        self._ids: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the KV cache; the session cannot be used any more."""
        self._is_closed = True
        if self._native is not None:
            self._native.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Completion:
        """Continues a text.

        Args:
            prompt: plain text, in which control tokens have no meaning, or token ids.
            sampling: None: what the model's makers recommend, or greedy.
            max_tokens: most tokens to generate; None: until the context is full.
            stop: strings that end the answer and are not part of it.

        Returns:
            The answer; `finish_reason` is "stop" or "length".

        Raises:
            ContextFullError: the prompt leaves no room for an answer.
            ValueError: an argument is out of range.
        """
        return _collect(self.stream(prompt, sampling, max_tokens=max_tokens, stop=stop))

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Generator[Delta]:
        """Like `generate`, piece by piece; the last delta has the finish reason and statistics."""
        ids = self._model.encode_prompt(prompt)
        return self._start(ids, sampling, max_tokens, stop)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        tools: Sequence[Message] | None = None,
    ) -> Completion:
        """Answers a chat, rendered with the model's own template.

        Args:
            messages: for example [{"role": "user", "content": "Hello"}].
            sampling: None: what the model's makers recommend, or greedy.
            max_tokens: most tokens to generate; None: until the context is full.
            stop: strings that end the answer and are not part of it.
            tools: function descriptions for templates that take them.

        Raises:
            TemplateError: the model has no template or it refuses the messages.
            ContextFullError: the chat leaves no room for an answer.
        """
        return _collect(
            self.stream_chat(messages, sampling, max_tokens=max_tokens, stop=stop, tools=tools)
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        tools: Sequence[Message] | None = None,
    ) -> Generator[Delta]:
        """Like `chat`, piece by piece; the last delta has the finish reason and statistics."""
        ids = self._model.encode_chat(messages, tools)
        return self._start(ids, sampling, max_tokens, stop)

    def logits(self, ids: Sequence[int]) -> Float32Array:
        """Logits after each token of a sequence.

        Args:
            ids: (n,) token ids, n at most the context.

        Returns:
            (n, vocab) float32; ids the tokenizer does not know have -infinity.
        """
        tokens = self._model.encode_prompt(ids)
        if len(tokens) > self.context:
            raise ContextFullError(f"{len(tokens)} tokens do not fit the context of {self.context}")
        out = np.empty((len(tokens), self._model.info.vocab_size), np.float32)
        with self._turn:
            native = self._open()
            self._keep_common(native, [])
            for start, chunk in self._append(native, tokens):
                out[start : start + len(chunk)] = native.prefill(chunk, len(chunk))
        return out

    def _start(
        self,
        ids: list[int],
        sampling: SamplingParams | None,
        max_tokens: int | None,
        stop: str | Sequence[str],
    ) -> Generator[Delta]:
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 0")
        answer = Answer(self._model, [stop] if isinstance(stop, str) else stop)
        if len(ids) >= self.context:
            longest = self._model.info.max_context
            advice = (
                f"; the model can hold {longest}: open it with a larger context"
                if self.context < longest
                else ""
            )
            raise ContextFullError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context} and must"
                f" leave room for an answer{advice}"
            )
        room = self.context - len(ids)
        limit = room if max_tokens is None else min(max_tokens, room)
        chosen = self._model.default_sampling() if sampling is None else sampling
        return self._generate(ids, chosen.resolve(), limit, answer)

    def _generate(
        self, ids: list[int], sampling: Sampling, limit: int, answer: Answer
    ) -> Generator[Delta]:
        text = ""
        with self._turn:
            native = self._open()
            clock = Clock(len(ids))
            if limit:
                clock.num_cached = self._keep_common(native, ids)
                for _, chunk in self._append(native, ids[clock.num_cached :]):
                    native.prefill(chunk)
                clock.prefilled()
            struct = sampling.to_struct()
            while answer.finish is None and clock.num_generated < limit:
                tokens = native.step(struct)[: limit - clock.num_generated]
                self._ids += tokens
                clock.generated(len(tokens))
                text += answer.push(tokens)
                if text and answer.finish is None:
                    clock.pause()
                    yield Delta(text=text, ids=answer.take_ids())
                    clock.resume()
                    text = ""
        text += answer.flush()
        yield Delta(
            text=text,
            ids=answer.take_ids(),
            finish_reason=answer.finish or "length",
            stats=clock.stats(
                kv_bytes=self._info.kv_bytes, context=self.context, seed=sampling.seed
            ),
        )

    def _open(self) -> NativeSession:
        """The native session, created when first needed."""
        if self._is_closed:
            raise ValueError("the session is closed")
        if self._native is None:
            self._native = self._model.native.create_session(self.context)
            self._info = self._native.info()
        return self._native

    def _keep_common(self, native: NativeSession, ids: list[int]) -> int:
        """Drops all tokens after the common beginning; the last of `ids` is always computed.

        After an interruption either side may be a token ahead: the shorter one counts.
        """
        limit = max(0, min(len(self._ids), native.info().num_tokens, len(ids) - 1))
        common = next((i for i in range(limit) if self._ids[i] != ids[i]), limit)
        native.truncate(common)
        del self._ids[common:]
        return common

    def _append(self, native: NativeSession, ids: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Cuts `ids` into chunks of one pass each, so that signals are seen between them."""
        length = self._info.chunk_length
        for start in range(0, len(ids), length):
            chunk = ids[start : start + length]
            self._ids += chunk
            yield start, chunk


def _collect(deltas: Iterator[Delta]) -> Completion:
    text = ""
    ids: list[int] = []
    for delta in deltas:
        text += delta.text
        ids += delta.ids
    assert delta.finish_reason is not None
    assert delta.stats is not None
    return Completion(
        text=text, ids=tuple(ids), finish_reason=delta.finish_reason, stats=delta.stats
    )
