"""Rows of next-token distributions, compared in float64."""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.types import Float32Array

__all__ = ["FullRows", "Rows", "SampledRows", "block_rows", "log_softmax"]

Float64Array: TypeAlias = npt.NDArray[np.float64]
IdArray: TypeAlias = npt.NDArray[np.int64]

# Numbers of one array of log-probabilities: 64 MB.
_BLOCK_NUMBERS: Final = 1 << 23


def block_rows(num_tokens: int) -> int:
    """Rows that are compared at a time, for a vocabulary of `num_tokens`."""
    return max(1, _BLOCK_NUMBERS // num_tokens)


def log_softmax(logits: Float32Array) -> Float64Array:
    """Log-probabilities in float64.

    Args:
        logits: (n, tokens) float32.

    Returns:
        (n, tokens) float64.
    """
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


class Rows(Protocol):
    """Distributions of a reference; the other side of a comparison is whole."""

    def target(self, targets: IdArray) -> Float64Array:
        """(n,) log-probability of the token that came, for each row."""
        ...

    def best(self) -> IdArray:
        """(n,) the most probable token of each row, the lowest id in a tie."""
        ...

    def divergence(self, other: Float64Array) -> Float64Array:
        """(n,) KL(this || other) in nats; `other` is (n, tokens) log-probabilities."""
        ...


class FullRows:
    """Whole distributions.

    Args:
        log_p: (n, tokens) log-probabilities.
    """

    def __init__(self, log_p: Float64Array) -> None:
        self.log_p = log_p

    def target(self, targets: IdArray) -> Float64Array:
        """As `Rows.target`."""
        found: Float64Array = np.take_along_axis(self.log_p, targets[:, None], 1)[:, 0]
        return found

    def best(self) -> IdArray:
        """As `Rows.best`."""
        return np.asarray(np.argmax(self.log_p, axis=1), np.int64)

    def divergence(self, other: Float64Array) -> Float64Array:
        """As `Rows.divergence`, exact."""
        divergence: Float64Array = np.einsum("ij,ij->i", np.exp(self.log_p), self.log_p - other)
        return divergence


class SampledRows:
    """Distributions of which the most probable tokens are known, and some of the others.

    Args:
        ids: (n, k + s): the k most probable tokens, falling, then s of the others, drawn with
            replacement in proportion to their probability.
        log_p: (n, k + s) their log-probabilities.
        num_top: k.
        log_rest: (n,) log of the probability of all but the first k together; -infinity: none.
        log_target: (n,) log-probability of the token that came.
    """

    def __init__(
        self,
        *,
        ids: IdArray,
        log_p: Float64Array,
        num_top: int,
        log_rest: Float64Array,
        log_target: Float64Array,
    ) -> None:
        self._ids, self._log_target = ids, log_target
        self._log_p = log_p
        self._weights = np.exp(log_p)
        num_drawn = ids.shape[1] - num_top
        if num_drawn:
            self._weights[:, num_top:] = np.exp(log_rest)[:, None] / num_drawn

    def target(self, targets: IdArray) -> Float64Array:
        """As `Rows.target`; the tokens are those it was made for."""
        del targets
        return self._log_target

    def best(self) -> IdArray:
        """As `Rows.best`."""
        return self._ids[:, 0]

    def divergence(self, other: Float64Array) -> Float64Array:
        """As `Rows.divergence`, an estimate without bias; that of a single row may be negative.

        The sum over the most probable tokens is exact; that over the others is estimated by the
        mean over those that were drawn.
        """
        log_q = np.take_along_axis(other, self._ids, 1)
        estimate: Float64Array = np.einsum("ij,ij->i", self._weights, self._log_p - log_q)
        return estimate
