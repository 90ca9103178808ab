"""A progress bar on stderr; silent when stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

from edgellm.cli._format import format_bytes

__all__ = ["Bar"]

_WIDTH = 30
_REDRAW_S = 0.1


class Bar:
    """Shows how much is done of how much, and the time left.

    Args:
        label: in front of the bar.
        unit: writes an amount for people.
    """

    def __init__(self, label: str, unit: Callable[[int], str] = format_bytes) -> None:
        self._label = label
        self._unit = unit
        self._total = 1
        self._started = monotonic()
        self._drawn = 0.0
        self._is_shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
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

    def update(self, done: int, total: int) -> None:
        """Sets how much is done, and how much there is, which may be an estimate."""
        self._total = max(total, 1)
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
            f" {self._unit(self._total)} {left}"
        )
        sys.stderr.flush()
