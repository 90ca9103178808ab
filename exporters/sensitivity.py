"""Which matrices hurt most in few bits, by the KL divergence that each alone causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from edgellm.models import ModelDescription
from edgellm.models._reference import Positions, ReferenceCache, ReferenceModel
from edgellm.types import Float32Array, Int32Array, TensorFormat

__all__ = ["Candidate", "measure_sensitivities", "spend"]

Tensors = Mapping[str, Float32Array]
_ROWS = 64  # of logits at a time


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


def measure_sensitivities(
    description: ModelDescription,
    ids: Int32Array,
    globals_: Tensors,
    layer: Callable[[int], Tensors],
    variants: Callable[[str], Mapping[str, Tensors]],
    pool: Executor,
    advance: Callable[[], None],
) -> dict[str, float]:
    """KL divergence from the float model with one matrix quantised at a time.

    All variants go through the layers side by side, so that each layer is read once.

    Args:
        description: The model.
        ids: (n,) int32.
        globals_: Canonical tensors outside the layers.
        layer: Those of a layer, by its number.
        variants: For a section ("globals", "layers.0" ...) and each of its matrices the canonical
            tensors that replace the float ones.
        pool: Threads to use.
        advance: Called after every layer.

    Returns:
        Mean nats a token by the matrices' names, to second order: half the variance of the
        logits' changes under the float model's distribution.
    """
    model = ReferenceModel(description, globals_.__getitem__)
    positions = model.positions(0, len(ids))
    start = model.embed(ids)
    streams = {"": start}
    heads: dict[str, Float32Array] = {}
    head_name = "embed" if description.is_tied else "head"
    for name, changed in variants("globals").items():
        is_embed = "embed" in changed
        other = ReferenceModel(description, {**globals_, **changed}.__getitem__)
        streams[name] = other.embed(ids) if is_embed else start
        if head_name in changed:
            heads[name] = changed[head_name]
    for number in range(description.num_layers):
        own = layer(number)
        changed_here = variants(f"layers.{number}")
        before = streams[""]
        model = ReferenceModel(description, own.__getitem__)
        after = pool.map(partial(_step, model, number, positions), streams.values())
        streams = dict(zip(streams, after, strict=True))
        for name, changed in changed_here.items():
            other = ReferenceModel(description, {**own, **changed}.__getitem__)
            streams[name] = _step(other, number, positions, before)
        advance()
    model = ReferenceModel(description, globals_.__getitem__)
    expected = model.final(streams.pop(""))
    finals = {name: model.final(x) for name, x in streams.items()}
    return _divergences(expected, finals, globals_[head_name], heads, pool)


def _step(model: ReferenceModel, number: int, at: Positions, x: Float32Array) -> Float32Array:
    """One layer on one sequence."""
    cache = ReferenceCache(model.description)
    mixed = model.attend(model.attention_input(x, number), number, at, cache)
    x = x + model.attention_output(mixed, number)
    return x + model.ffn_output(model.ffn_hidden(model.ffn_input(x, number), number), number)


def _divergences(
    expected: Float32Array, finals: Tensors, head: Float32Array, heads: Tensors, pool: Executor
) -> dict[str, float]:
    """Half the variance of each variant's logit changes, mean over the tokens."""
    totals = dict.fromkeys(finals, 0.0)
    for first in range(0, len(expected), _ROWS):
        part = slice(first, first + _ROWS)
        logits = expected[part] @ head.T
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)

        def variance(name: str, part: slice = part, odds: Float32Array = odds) -> float:
            if name in heads:
                change = finals[name][part] @ heads[name].T - expected[part] @ head.T
            else:
                change = (finals[name][part] - expected[part]) @ head.T
            mean = np.einsum("nv,nv->n", odds, change)
            square = np.einsum("nv,nv->n", odds, np.square(change))
            return float((square - mean**2).sum(dtype=np.float64)) / 2

        for name, more in zip(finals, pool.map(variance, finals), strict=True):
            totals[name] += more
    return {name: total / len(expected) for name, total in totals.items()}


def spend(candidates: list[Candidate], budget: int) -> dict[str, TensorFormat]:
    """Formats that fit a budget: from the smallest up, the most nats a byte first.

    Args:
        candidates: All matrices there are.
        budget: Bytes for all of them together.

    Returns:
        A format for each; the smallest for all where the budget is not enough.
    """
    chosen = {item.name: min(item.sizes, key=lambda kind: item.sizes[kind]) for item in candidates}
    budget -= sum(item.sizes[chosen[item.name]] for item in candidates)
    while True:
        steps = []
        for item in candidates:
            now = chosen[item.name]
            for kind, size in item.sizes.items():
                cost, gain = size - item.sizes[now], item.losses[now] - item.losses[kind]
                if 0 < cost <= budget and gain > 0:
                    steps.append((gain / cost, item.name, kind, cost))
        if not steps:
            return chosen
        _, name, kind, cost = max(steps)
        chosen[name] = kind
        budget -= cost
