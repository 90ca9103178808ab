"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["StopMatcher"]


class StopMatcher:
    """Cuts a stream of text before the first stop string, wherever the pieces are split.

    The stop string that is complete first wins, the longest if several end together, so that the
    result does not depend on the pieces. Only a suffix that may become a stop string is held back.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Prepare for one stream.

        Args:
            stops: Texts that end the stream; they are not emitted themselves.

        Raises:
            ValueError: A stop string is empty.
        """
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise ValueError("stop strings must not be empty; leave the list empty for none")
        self._prefixes = frozenset(s[:n] for s in self._stops for n in range(1, len(s)))
        self._max_held = max((len(s) - 1 for s in self._stops), default=0)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece of the stream.

        Args:
            text: The piece; may be empty.

        Returns:
            Text that is safe to show, and whether the stream has ended in a stop string; from then
            on nothing is emitted.
        """
        if self._is_stopped:
            return "", True
        text = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._is_stopped, self._held = True, ""
            return text[: min(found)[1]], True
        longest = min(self._max_held, len(text))
        num_held = next((n for n in range(longest, 0, -1) if text[-n:] in self._prefixes), 0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """End the stream.

        Returns:
            What was held back and did not become a stop string.
        """
        held, self._held = self._held, ""
        return held
