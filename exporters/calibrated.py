"""Calibrated quantisation: the weights of a whole model, layer after layer.

First the float model is run over the calibration windows, which gives the mean square of every
channel of every matrix's input. From these follow the equalisation and, if there are bytes to
spend, how many bits each matrix gets. Then the quantised model is run over the same windows; each
matrix is quantised for the inputs that the matrices before it, quantised already, let through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError
from edgellm.exporters.calibration import Calibration
from edgellm.exporters.equalize import (
    Alphas,
    equalize_attention,
    equalize_ffn,
    equalizing_factors,
)
from edgellm.exporters.error_feedback import Feedback, fit, quantize_grouped
from edgellm.exporters.plan import FileTensor, read_whole
from edgellm.exporters.sensitivity import Candidate, measure_sensitivities, spend
from edgellm.exporters.source import ModelSource
from edgellm.exporters.workspace import Workspace
from edgellm.format.layout import dequantize
from edgellm.format.spec import tensor_bytes
from edgellm.models import ModelDescription, fuse, fused_parts, unfuse
from edgellm.models._reference import Positions, ReferenceCache, ReferenceModel, round_q8
from edgellm.types import Float32Array, TensorFormat

__all__ = ["KINDS", "Calibrator"]

KINDS: Final = ("qkv", "o", "gate_up", "down")  # of matrices, in the order of their use
_FORMATS: Final = (TensorFormat.E4, TensorFormat.E5, TensorFormat.E8)
_OUTLIER: Final = 10.0  # times the median energy: tokens beyond it count as much as one at it
_SENSITIVITY_TOKENS: Final = 256
_MOMENT_COLS: Final = 128

_U8Array = npt.NDArray[np.uint8]
_Layer = dict[str, Float32Array]
Advance = Callable[[], None]


class Calibrator:
    """Quantises a model.

    Args:
        source: The model.
        tensors: What becomes of each tensor.
        calibration: Token ids.
        workspace: Where finished work lies.
        alphas: How far inputs are equalised.
        feedback: Steps after the weighted fit.
        pool: Threads to use; the results do not depend on their number.
        advance: Called after every layer of every pass.

    Attributes:
        description: The model of the file: its embedding has a scale if it is equalised as a head.
    """

    def __init__(
        self,
        source: ModelSource,
        tensors: tuple[FileTensor, ...],
        calibration: Calibration,
        workspace: Workspace,
        *,
        alphas: Alphas,
        feedback: Feedback,
        pool: Executor,
        advance: Advance,
    ) -> None:
        self._source = source
        self._plain = source.description
        is_scaled = self._plain.is_tied and alphas.head > 0
        self.description = replace(self._plain, has_embed_scale=is_scaled)
        self._head = "embed" if self._plain.is_tied else "head"
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._calibration = calibration
        self._workspace = workspace
        self._alphas = alphas
        self._feedback = feedback
        self._pool = pool
        self._advance = advance
        wanted = source.spec.sources(source.kind, source.description)
        self._sources = {item.canonical_name: item for item in wanted}
        self._parts = fused_parts(self.description)
        self._float: Mapping[str, Float32Array] = {}

    def collect(self) -> Float32Array:
        """Runs the float model and keeps the mean squares of its channels.

        Returns:
            What the head multiplies for the held-out windows, (tokens, hidden) float32.
        """
        known = self._workspace.load("float")
        if known is None:
            known = self._collect()
            self._workspace.save("float", **known)
        self._float = known
        return known["hidden"]

    def choose(self, budget: int, is_head_free: bool) -> dict[str, TensorFormat]:
        """Formats of the matrices for at most `budget` bytes together.

        Args:
            budget: Bytes.
            is_head_free: Whether embedding and head are among the matrices, or keep their formats.
        """
        candidates: list[Candidate] = []
        ratios: dict[str, dict[TensorFormat, float]] = {}

        def variants(section: str) -> Mapping[str, Mapping[str, Float32Array]]:
            changed = {}
            if section != "globals":
                # the equalised layer is the same function: layers may change one by one
                layer = self._equalised(section)
                for kind in KINDS:
                    name = f"{section}.{kind}"
                    whole, ratios[name] = self._trial(name, layer)
                    changed[name] = {**layer, **whole}
            elif is_head_free:
                tensors, factor = self._equalised_globals()
                for name in dict.fromkeys(("embed", self._head)):
                    whole, ratios[name] = self._trial(name, tensors)
                    back = factor if name == self._head else np.float32(1)
                    changed[name] = {name: whole[name] / back}
            return changed

        globals_ = {name: self._whole(name) for name in ("embed", "final_norm", self._head)}
        found = measure_sensitivities(
            self._plain,
            self._calibration.windows[0, :_SENSITIVITY_TOKENS],
            globals_,
            lambda number: {name: self._whole(name) for name in self._names(f"layers.{number}")},
            variants,
            self._pool,
            self._advance,
        )
        for name, loss in found.items():
            tensor = self._tensors[name]
            sizes = {kind: tensor_bytes(kind, tensor.rows, tensor.cols) for kind in _FORMATS}
            losses = {kind: loss * ratio for kind, ratio in ratios[name].items()}
            candidates.append(Candidate(name=name, sizes=sizes, losses=losses))
        return spend(candidates, budget)

    def quantise(self, formats: Mapping[str, TensorFormat]) -> None:
        """Quantises everything; `load` has the results afterwards.

        Args:
            formats: Of the matrices.
        """
        kept = self._workspace.load("globals")
        if kept is None:
            kept = self._quantise_globals(formats)
            self._workspace.save("globals", **kept)
        get = self._parts_of("embed", formats["embed"], kept["embed"])
        embedding = {"embed": get("embed")}
        if self.description.has_embed_scale:
            embedding["embed_scale"] = kept["embed_scale"][0]
        model = ReferenceModel(self.description, embedding.__getitem__)
        stream = [model.embed(ids) for ids in self._calibration.windows]
        del embedding, model
        for number in range(self.description.num_layers):
            section = f"layers.{number}"
            layer = self._equalised(section)
            kept = self._workspace.load(section) or {}
            made = self._pass_layer(number, layer, formats, stream, kept)
            if not kept:
                vectors = {
                    name: fuse(name, [layer[part] for part in parts])
                    for name, parts in self._parts.items()
                    if name.startswith(f"{section}.") and name not in made
                }
                self._workspace.save(section, **made, **vectors)
            self._advance()

    def load(self, section: str) -> dict[str, npt.NDArray[Any]]:
        """The matrices' stored bytes and the F32 tensors of a section, by name."""
        found = self._workspace.load(section)
        if found is None:
            raise FormatError(f"{self._workspace.folder} was changed meanwhile: export again")
        return found

    def _collect(self) -> _Layer:
        held, windows = self._calibration.held_out, self._calibration.windows
        globals_ = {name: self._whole(name) for name in ("embed", "final_norm")}
        outside = ReferenceModel(self._plain, globals_.__getitem__)
        stream = [outside.embed(ids) for ids in (*held, *windows)]
        positions = outside.positions(0, windows.shape[1])
        del globals_["embed"]
        kept: _Layer = {}
        for number in range(self._plain.num_layers):
            layer = {name: self._whole(name) for name in self._names(f"layers.{number}")}
            stage = _FloatLayer(self._plain, layer, number, positions)
            passed = list(self._pool.map(stage.run, stream))
            stream = [x for x, _ in passed]
            for kind in KINDS:
                energies = [squares[kind] for _, squares in passed[len(held) :]]
                mean = np.mean(energies, axis=0, dtype=np.float64)
                kept[f"layers.{number}.{kind}"] = np.asarray(mean, np.float32)
            self._advance()
        finals = [outside.final(x) for x in stream]
        kept["hidden"] = np.concatenate(finals[: len(held)])
        kept["moments"] = self._moments(finals[len(held) :])
        return kept

    def _pass_layer(
        self,
        number: int,
        layer: _Layer,
        formats: Mapping[str, TensorFormat],
        stream: list[Float32Array],
        kept: Mapping[str, npt.NDArray[Any]],
    ) -> dict[str, _U8Array]:
        """Takes the stream through a layer, quantising its matrices that are not `kept`."""
        now = dict(layer)
        model = ReferenceModel(self.description, now.__getitem__, activations="q8", kv="float16")
        positions = model.positions(0, self._calibration.windows.shape[1])
        made: dict[str, _U8Array] = {}

        def settle(kind: str, inputs: list[Float32Array]) -> None:
            name = f"layers.{number}.{kind}"
            if not kept:
                moments = self._moments(list(self._pool.map(round_q8, inputs)))
                made[name] = self._matrix(name, formats[name], self._fused(name, now), moments)
            get = self._parts_of(name, formats[name], kept[name] if kept else made[name])
            for part in self._parts[name]:
                now[part] = get(part)

        each = self._pool.map
        inputs = list(each(lambda x: model.attention_input(x, number), stream))
        settle("qkv", inputs)
        cache = ReferenceCache
        inputs = list(
            each(lambda h: model.attend(h, number, positions, cache(self.description)), inputs)
        )
        settle("o", inputs)
        added = each(lambda mixed: model.attention_output(mixed, number), inputs)
        stream[:] = [x + more for x, more in zip(stream, added, strict=True)]
        inputs = list(each(lambda x: model.ffn_input(x, number), stream))
        settle("gate_up", inputs)
        inputs = list(each(lambda h: model.ffn_hidden(h, number), inputs))
        settle("down", inputs)
        added = each(lambda hidden: model.ffn_output(hidden, number), inputs)
        stream[:] = [x + more for x, more in zip(stream, added, strict=True)]
        return made

    def _quantise_globals(self, formats: Mapping[str, TensorFormat]) -> dict[str, npt.NDArray[Any]]:
        """Embedding and head, the final norm and what undoes the embedding's factors."""
        tensors, factor = self._equalised_globals()
        moments = self._float["moments"] / np.outer(factor, factor)
        made: dict[str, npt.NDArray[Any]] = {"final_norm": tensors["final_norm"][None]}
        made[self._head] = self._matrix(
            self._head, formats[self._head], tensors[self._head], moments
        )
        if self.description.has_embed_scale:
            made["embed_scale"] = (1 / factor)[None]
        if "embed" not in made:
            alike = np.ones(tensors["embed"].shape[1], np.float32)
            made["embed"] = fit(formats["embed"], tensors["embed"], alike, self._pool)
        return made

    def _matrix(
        self,
        name: str,
        tensor_format: TensorFormat,
        weights: Float32Array,
        moments: Float32Array,
    ) -> _U8Array:
        """Stored bytes of a matrix, quantised for inputs of these second moments."""
        try:
            if tensor_format == TensorFormat.E8:
                return fit(tensor_format, weights, moments.diagonal(), self._pool)
            return quantize_grouped(tensor_format, weights, moments, self._feedback, self._pool)
        except ValueError as error:
            raise FormatError(f"tensor {name}: {error}") from None

    def _trial(
        self, name: str, tensors: Mapping[str, Float32Array]
    ) -> tuple[_Layer, dict[TensorFormat, float]]:
        """Fits a matrix in every format, each superblock alone.

        Returns:
            Its canonical tensors in the smallest format, and each format's error relative to it.
        """
        weights, importance = self._fused(name, tensors), self._importance(name)
        parts: _Layer = {}
        errors = {}
        for kind in _FORMATS:
            data = fit(kind, weights, importance, self._pool)
            found = dequantize(data, kind, *weights.shape)
            if not parts:
                get = unfuse(self.description, {name: found}.__getitem__)
                parts = {part: get(part) for part in self._parts[name]}
            per_column = np.square(weights - found).sum(axis=0, dtype=np.float64)
            errors[kind] = float(per_column @ importance)
        least = max(errors[_FORMATS[0]], 1e-30)
        return parts, {kind: error / least for kind, error in errors.items()}

    def _equalised(self, section: str) -> _Layer:
        """Canonical tensors of a layer, equalised, by name."""
        prefix = f"{section}."
        layer = {name.removeprefix(prefix): self._whole(name) for name in self._names(section)}
        squares = {kind: self._float[prefix + kind] for kind in KINDS}
        layer |= equalize_attention(layer, squares, self._alphas, self._plain)
        layer |= equalize_ffn(layer, squares, self._alphas, self._plain)
        return {prefix + role: value for role, value in layer.items()}

    def _equalised_globals(self) -> tuple[_Layer, Float32Array]:
        """Canonical tensors outside the layers, and what the head's columns were multiplied by."""
        squares = self._float["moments"].diagonal()
        factor = equalizing_factors("head", squares, self._alphas, self._plain)
        names = {"embed", "final_norm", self._head}
        tensors = {name: self._whole(name) for name in names}
        tensors["final_norm"] = tensors["final_norm"] / factor
        tensors[self._head] = tensors[self._head] * factor
        return tensors, factor

    def _importance(self, name: str) -> Float32Array:
        """Mean squares of a matrix's input after equalisation."""
        kind = name.rpartition(".")[2]
        if name == self._head:
            kind, squares = "head", self._float["moments"].diagonal()
        elif name == "embed":
            return np.ones(self._plain.hidden_size, np.float32)
        else:
            squares = self._float[name]
        return squares / equalizing_factors(kind, squares, self._alphas, self._plain) ** 2

    def _fused(self, name: str, tensors: Mapping[str, Float32Array]) -> Float32Array:
        parts = [tensors[part] for part in self._parts[name]]
        return np.ascontiguousarray(fuse(name, parts), np.float32)

    def _parts_of(
        self, name: str, tensor_format: TensorFormat, data: _U8Array
    ) -> Callable[[str], Float32Array]:
        """Canonical tensors of a quantised matrix, dequantised."""
        tensor = self._tensors[name]
        whole = dequantize(data, tensor_format, tensor.rows, tensor.cols)
        return unfuse(self.description, {name: whole}.__getitem__)

    def _moments(self, inputs: list[Float32Array]) -> Float32Array:
        """Mean of x^T x over the tokens x of (n, cols) inputs, (cols, cols)."""
        whole = np.concatenate([_weighed(value) for value in inputs])
        firsts = range(0, whole.shape[1], _MOMENT_COLS)
        parts = [whole[:, first : first + _MOMENT_COLS] for first in firsts]
        rows = list(self._pool.map(lambda part: part.T @ whole, parts))
        return np.asarray(np.concatenate(rows) / np.float32(len(whole)), np.float32)

    def _names(self, section: str) -> list[str]:
        return [name for name in self._sources if name.startswith(f"{section}.")]

    def _whole(self, name: str) -> Float32Array:
        return read_whole(self._source, self._sources[name])


class _FloatLayer:
    """A layer of the float model, and what its matrices meet."""

    def __init__(
        self, description: ModelDescription, layer: _Layer, number: int, positions: Positions
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
        return x, {kind: np.square(_weighed(value)).mean(axis=0) for kind, value in inputs}


def _weighed(inputs: Float32Array) -> Float32Array:
    """(n, cols) inputs; a token that towers over the others (an attention sink) is made smaller."""
    energy = np.square(inputs).sum(axis=1, dtype=np.float64)
    limit = _OUTLIER * float(np.median(energy))
    scale = np.sqrt(np.minimum(1.0, limit / np.maximum(energy, 1e-30)))
    return np.asarray(inputs * scale[:, None].astype(np.float32), np.float32)
