"""What a generation returns: pieces of text while it runs, then the whole and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Completion", "Delta", "FinishReason", "Stats"]

# "stop": an end-of-text token or a stop string; "length": max_tokens or the context was reached.
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Figures of one generation.

    Attributes:
        prompt_tokens: of the whole prompt.
        cached_tokens: of these, already in the KV cache and not computed again.
        generated_tokens: sampled, the end-of-text token included.
        prefill_tok_s: prompt tokens computed per second; 0 if none were.
        decode_tok_s: tokens per second after the first; 0 if there was no second.
        first_token_ms: from the session's turn to the first sampled token; 0 if there was none.
        peak_memory_bytes: of this process since it started.
        kv_bytes: size of the session's KV cache.
        context: tokens the KV cache holds.
        seed: that gives this answer again.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_tok_s: float
    decode_tok_s: float
    first_token_ms: float
    peak_memory_bytes: int
    kv_bytes: int
    context: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The next piece of an answer; the last one has `finish_reason` and `stats`.

    Attributes:
        text: never ends within a character or within a stop string; may be empty in the last.
        ids: tokens sampled since the last delta.
    """

    text: str
    ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer.

    Attributes:
        text: without the stop string and what followed it.
        ids: every sampled token but the end-of-text token.
        finish_reason: why it ended.
        stats: its figures.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
