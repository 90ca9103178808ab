"""A progress bar on stderr; silent when stderr is no terminal."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import Self

from edgellm.cli._format import format_bytes

__all__ = ["Bar"]

_WIDTH = 30
_REDRAW_S = 0.1


class Bar:
    """Shows how many of `total` bytes are done, and the time left.

    Args:
        label: in front of the bar.
        total: bytes in all; what is done may turn out to be a little more or less.
    """

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = max(total, 1)
        self._started = monotonic()
        self._drawn = 0.0
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self.update(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_shown:
            if kind is None:
                self._draw(self._total)
            sys.stderr.write("\n")

    def update(self, done: int) -> None:
        """Sets how many bytes are done."""
        if self._is_shown and monotonic() - self._drawn >= _REDRAW_S:
            self._drawn = monotonic()
            self._draw(done)

    def _draw(self, done: int) -> None:
        share = min(done / self._total, 1.0)
        filled = int(share * _WIDTH)
        elapsed = monotonic() - self._started
        left = f"{elapsed * (1 - share) / share:4.0f} s left" if 0 < share < 1 else " " * 11
        sys.stderr.write(
            f"\r{self._label} [{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%} of"
            f" {format_bytes(self._total)} {left}"
        )
        sys.stderr.flush()
