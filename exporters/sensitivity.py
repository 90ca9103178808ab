"""Which matrices hurt most in few bits, by the KL divergence that each alone causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from edgellm.exporters.error_feedback import fit
from edgellm.exporters.moments import output_error
from edgellm.format.layout import dequantize
from edgellm.models import ModelDescription
from edgellm.models._reference import Positions, ReferenceCache, ReferenceModel
from edgellm.types import Float32Array, TensorFormat

__all__ = ["FORMATS", "Candidate", "Ends", "measure_sensitivities", "spend", "try_formats"]

# What a budget may choose, the smallest first.
FORMATS: Final = (TensorFormat.E4, TensorFormat.E5, TensorFormat.E8)

Tensors = Mapping[str, Float32Array]
_Ratios = dict[TensorFormat, float]

_ROWS: Final = 64  # of logits at a time
_LIKELIEST: Final = 512  # tokens of each distribution that divergences are summed over
_UNITS: Final = 1 << 15  # that a budget is spent in
_SAMPLE: Final = 256  # rows of a matrix that formats are compared on


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a matrix costs in each format.

    Attributes:
        name: Its name in the file.
        sizes: Bytes, by format.
        losses: Nats a token, by format.
    """

    name: str
    sizes: Mapping[TensorFormat, int]
    losses: Mapping[TensorFormat, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The float model before its first layer and after its last.

    Attributes:
        embedded: (n, hidden) the streams before the first layer: "" of the float model, and by its
            name that of the embedding, quantised, if it may be.
        final_norm: (hidden,).
        head: (vocab, hidden).
        quantised: Gives some of the head's rows, quantised; None if it may not be.
    """

    embedded: Tensors
    final_norm: Float32Array
    head: Float32Array
    quantised: Callable[[Float32Array], Float32Array] | None


def try_formats(
    weights: Float32Array, importance: Float32Array, pool: Executor
) -> tuple[Float32Array, _Ratios]:
    """Fits a matrix in the smallest format, and a sample of its rows in all.

    Args:
        weights: (rows, cols).
        importance: (cols,) mean square of each column's input.
        pool: Threads to use.

    Returns:
        The matrix, dequantised, and each format's error relative to the smallest one's.
    """
    sample = np.ascontiguousarray(weights[:: max(1, len(weights) // _SAMPLE)])

    def rounded(kind: TensorFormat, values: Float32Array) -> Float32Array:
        return dequantize(fit(kind, values, importance, pool), kind, *values.shape)

    errors = {kind: output_error(sample, rounded(kind, sample), importance) for kind in FORMATS}
    least = max(errors[FORMATS[0]], 1e-30)
    return rounded(FORMATS[0], weights), {kind: value / least for kind, value in errors.items()}


def measure_sensitivities(
    description: ModelDescription,
    ends: Ends,
    layer: Callable[[int], Tensors],
    variants: Callable[[int], Mapping[str, Tensors]],
    pool: Executor,
    advance: Callable[[], None],
) -> dict[str, float]:
    """KL divergence from the float model with one matrix quantised at a time.

    All variants go through the layers side by side, so that each layer is read once.

    Args:
        description: The model.
        ends: What lies outside the layers.
        layer: Canonical tensors of a layer, by its number.
        variants: For a layer's number and each of its matrices the canonical tensors that replace
            the float ones.
        pool: Threads to use.
        advance: Called after every layer.

    Returns:
        Mean nats a token by the matrices' names, to second order: half the variance of the
        logits' changes under the float model's distribution, over its likeliest tokens.
    """
    streams = dict(ends.embedded)
    model = ReferenceModel(description, {"final_norm": ends.final_norm}.__getitem__)
    positions = model.positions(0, len(streams[""]))
    for number in range(description.num_layers):
        own = layer(number)
        changed_here = variants(number)
        before = streams[""]
        exact = ReferenceModel(description, own.__getitem__)
        after = pool.map(partial(_step, exact, number, positions), streams.values())
        streams = dict(zip(streams, after, strict=True))
        for name, changed in changed_here.items():
            other = ReferenceModel(description, {**own, **changed}.__getitem__)
            streams[name] = _step(other, number, positions, before)
        advance()
    finals = {name: model.final(x) for name, x in streams.items()}
    if ends.quantised is not None and not description.is_tied:
        finals["head"] = finals[""]
    return _divergences(finals, ends, "embed" if description.is_tied else "head", description)


def _step(model: ReferenceModel, number: int, at: Positions, x: Float32Array) -> Float32Array:
    """One layer on one sequence."""
    cache = ReferenceCache(model.description)
    mixed = model.attend(model.attention_input(x, number), number, at, cache)
    x = x + model.attention_output(mixed, number)
    return x + model.ffn_output(model.ffn_hidden(model.ffn_input(x, number), number), number)


def _divergences(
    finals: Tensors, ends: Ends, head_name: str, description: ModelDescription
) -> dict[str, float]:
    """Half the variance of each variant's logit changes, mean over the tokens."""
    expected = finals[""]
    count = min(_LIKELIEST, description.num_tokens)
    likely = np.empty((len(expected), count), np.intp)
    for first in range(0, len(expected), _ROWS):
        part = slice(first, first + _ROWS)
        logits = (expected[part] @ ends.head.T)[:, : description.num_tokens]
        likely[part] = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    known, at = np.unique(likely, return_inverse=True)
    at = at.reshape(likely.shape)
    head = ends.head[known]
    quantised = None if ends.quantised is None else ends.quantised(head)
    names = [name for name in finals if name]
    changes = np.stack([finals[name] - expected for name in names], axis=1)
    totals = np.zeros(len(names))
    for token, rows in enumerate(at):
        logits = head[rows] @ expected[token]
        odds = np.exp(logits - logits.max())
        odds /= odds.sum()
        moved = head[rows] @ changes[token].T
        if quantised is not None:
            hidden = finals[head_name][token]
            moved[:, names.index(head_name)] += (quantised[rows] - head[rows]) @ hidden
        totals += odds @ np.square(moved) - np.square(odds @ moved)
    return dict(zip(names, (totals / (2 * len(expected))).tolist(), strict=True))


def spend(candidates: list[Candidate], budget: int) -> dict[str, TensorFormat]:
    """The formats within a budget that lose least, all losses added up.

    By dynamic programming, over what is left beyond the smallest formats: the matrix with the most
    nats a byte first would leave out a large one, such as the embedding, that no longer fits.

    Args:
        candidates: All matrices there are.
        budget: Bytes for all of them together.

    Returns:
        A format for each; the smallest for all where the budget is not enough.
    """
    smallest = [min(item.sizes, key=lambda kind: item.sizes[kind]) for item in candidates]
    spare = budget - sum(item.sizes[kind] for item, kind in zip(candidates, smallest, strict=True))
    unit = max(1, -(-spare // _UNITS))  # bytes
    units = max(0, spare) // unit
    best = np.zeros(units + 1)  # nats saved by what is spent, at most so many units
    steps = []
    for item, least in zip(candidates, smallest, strict=True):
        before, kinds = best.copy(), list(item.sizes)
        chosen = np.full(len(best), kinds.index(least), np.int8)
        costs = [-(-(item.sizes[kind] - item.sizes[least]) // unit) for kind in kinds]
        for number, (kind, cost) in enumerate(zip(kinds, costs, strict=True)):
            if cost > units:
                continue
            saved = before[: len(before) - cost] + (item.losses[least] - item.losses[kind])
            is_better = saved > best[cost:]
            best[cost:][is_better] = saved[is_better]
            chosen[cost:][is_better] = number
        steps.append((item.name, kinds, costs, chosen))
    formats = {}
    for name, kinds, costs, chosen in reversed(steps):
        number = chosen[units]
        formats[name] = kinds[number]
        units -= costs[number]
    return formats
