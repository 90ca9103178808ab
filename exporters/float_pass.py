"""The float model over calibration windows: how large the channels of each matrix's input are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Final

import numpy as np

from edgellm.exporters.calibration import Calibration
from edgellm.exporters.moments import second_moments, token_scales
from edgellm.models import ModelDescription
from edgellm.models._reference import Positions, ReferenceCache, ReferenceModel
from edgellm.types import Float32Array

__all__ = ["KINDS", "run_float_model"]

KINDS: Final = ("qkv", "o", "gate_up", "down")  # of matrices, in the order of their use

_STRIDE: Final = 2  # every second window is enough for mean squares

_Tensors = Mapping[str, Float32Array]


def run_float_model(
    description: ModelDescription,
    globals_: _Tensors,
    layer: Callable[[int], _Tensors],
    calibration: Calibration,
    pool: Executor,
    advance: Callable[[], None],
) -> dict[str, Float32Array]:
    """Runs the model, a layer at a time over all windows.

    Args:
        description: The model.
        globals_: Its canonical tensors "embed" and "final_norm".
        layer: Those of a layer, by its number.
        calibration: The windows.
        pool: Threads to use.
        advance: Called after every layer.

    Returns:
        For each matrix of a layer ("layers.0.qkv" ...) the mean square of each channel of its
        input, (cols,); "moments", the second moments of the head's input, (hidden, hidden);
        "hidden", what the head multiplies for the held-out windows, (tokens, hidden).
    """
    held, windows = calibration.held_out, calibration.windows[::_STRIDE]
    outside = ReferenceModel(description, globals_.__getitem__)
    stream = [outside.embed(ids) for ids in (*held, *windows)]
    positions = outside.positions(0, windows.shape[1])
    kept: dict[str, Float32Array] = {}
    for number in range(description.num_layers):
        stage = _FloatLayer(description, layer(number), number, positions)
        passed = list(pool.map(stage.run, stream))
        stream = [x for x, _ in passed]
        for kind in KINDS:
            energies = [squares[kind] for _, squares in passed[len(held) :]]
            mean = np.mean(energies, axis=0, dtype=np.float64)
            kept[f"layers.{number}.{kind}"] = np.asarray(mean, np.float32)
        advance()
    finals = [outside.final(x) for x in stream]
    kept["hidden"] = np.concatenate(finals[: len(held)])
    seen = [x * token_scales(x) for x in finals[len(held) :]]
    kept["moments"] = second_moments(seen, pool)
    return kept


class _FloatLayer:
    """A layer, and what its matrices meet."""

    def __init__(
        self, description: ModelDescription, layer: _Tensors, number: int, positions: Positions
    ) -> None:
        self._model = ReferenceModel(description, layer.__getitem__)
        self._number = number
        self._positions = positions

    def run(self, x: Float32Array) -> tuple[Float32Array, dict[str, Float32Array]]:
        """The stream after the layer, and by kind the mean squares of the inputs' channels."""
        model, number = self._model, self._number
        attended = model.attention_input(x, number)
        cache = ReferenceCache(model.description)
        mixed = model.attend(attended, number, self._positions, cache)
        x = x + model.attention_output(mixed, number)
        normed = model.ffn_input(x, number)
        hidden = model.ffn_hidden(normed, number)
        x = x + model.ffn_output(hidden, number)
        inputs = zip(KINDS, (attended, mixed, normed, hidden), strict=True)
        return x, {
            kind: np.square(value * token_scales(value)).mean(axis=0) for kind, value in inputs
        }
