"""One answer while it is made: its text, its end, and its clock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType

from edgellm.engine.memory import peak_memory_bytes
from edgellm.engine.model import Model
from edgellm.engine.results import FinishReason, Stats
from edgellm.errors import EdgeLLMError
from edgellm.text import Detokenizer, StopMatcher

__all__ = ["Answer", "Clock", "Turn"]


class Answer:
    """Turns sampled tokens into text, up to an end-of-text token or a stop string."""

    def __init__(self, model: Model, stops: Sequence[str]) -> None:
        self._eos_ids = model.eos_ids
        self._detokenizer = Detokenizer(model.tokenizer)
        self._matcher = StopMatcher(stops)
        self._ids: list[int] = []
        self.finish: FinishReason | None = None

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that can be shown now."""
        text = ""
        for token in tokens:
            if token in self._eos_ids:
                self.finish = "stop"
                break
            self._ids.append(token)
            text += self._match(self._detokenizer.push(token))
            if self.finish:
                break
        return text

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        return self._match(self._detokenizer.flush()) + self._matcher.flush()

    def take_ids(self) -> tuple[int, ...]:
        """Tokens pushed since the last call."""
        ids, self._ids = tuple(self._ids), []
        return ids

    def _match(self, text: str) -> str:
        shown, is_stopped = self._matcher.push(text)
        if is_stopped:
            self.finish = "stop"
        return shown


class Clock:
    """Times of one answer; what the reader of a stream does in between is not counted."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.num_cached = 0
        self.num_generated = 0
        self._started = perf_counter()
        self._prefill_s = 0.0
        self._first_s = 0.0
        self._last_s = 0.0
        self._paused_s = 0.0
        self._paused_at = 0.0

    def prefilled(self) -> None:
        """The prompt has been computed."""
        self._prefill_s = self._now()

    def generated(self, count: int) -> None:
        """A step has returned `count` tokens."""
        self._last_s = self._now()
        if not self.num_generated:
            self._first_s = self._last_s
        self.num_generated += count

    def pause(self) -> None:
        """The reader of the stream takes over."""
        self._paused_at = self._now()

    def resume(self) -> None:
        """The reader of the stream asks for more."""
        self._paused_s += self._now() - self._paused_at

    def stats(self, *, kv_bytes: int, context: int, seed: int) -> Stats:
        """The figures so far."""
        decode_s = self._last_s - self._first_s
        num_computed = self.num_prompt - self.num_cached
        return Stats(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            generated_tokens=self.num_generated,
            prefill_tok_s=num_computed / self._prefill_s if self._prefill_s else 0.0,
            decode_tok_s=(self.num_generated - 1) / decode_s if decode_s > 0 else 0.0,
            first_token_ms=self._first_s * 1e3,
            peak_memory_bytes=peak_memory_bytes(),
            kv_bytes=kv_bytes,
            context=context,
            seed=seed,
        )

    def _now(self) -> float:
        return perf_counter() - self._started - self._paused_s


class Turn:
    """Lets one caller at a time use a session; others wait.

    A stream holds it until it ends, is closed or collected. Within one thread a second call could
    only wait for itself, so that it is an error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise EdgeLLMError(
                "this session is in the middle of a stream: read it to its end or close() it,"
                " or use another session"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owner = None
        self._lock.release()
