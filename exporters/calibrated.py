"""Calibrated quantisation: the weights of a whole model, layer after layer.

First the float model is run over the calibration windows, which gives the mean square of every
channel of every matrix's input. From these follow the equalisation and, if there are bytes to
spend, how many bits each matrix gets. Then the quantised model is run over the same windows, the
float model beside it; each matrix is quantised for the inputs that the matrices before it,
quantised already, let through, and for the outputs that the float model has there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

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
from edgellm.exporters.error_feedback import Feedback, fit, quantize_matrix
from edgellm.exporters.float_pass import KINDS, run_float_model
from edgellm.exporters.moments import fitting_moments
from edgellm.exporters.plan import FileTensor, read_whole
from edgellm.exporters.sensitivity import (
    Candidate,
    Ends,
    measure_sensitivities,
    spend,
    try_formats,
)
from edgellm.exporters.source import ModelSource
from edgellm.exporters.workspace import Workspace
from edgellm.format.layout import dequantize
from edgellm.format.spec import tensor_bytes
from edgellm.models import fuse, fused_parts, unfuse
from edgellm.models._hadamard import (
    mean_squares,
    transform,
    transform_layer,
    transform_weights,
)
from edgellm.models._reference import ReferenceCache, ReferenceModel
from edgellm.types import Float32Array, TensorFormat

__all__ = ["Calibrator"]

_U8Array = npt.NDArray[np.uint8]
_Layer = dict[str, Float32Array]
_Windows = list[Float32Array]
_Pair = tuple[_Windows, _Windows]  # of the quantised model and of the float model
Advance = Callable[[], None]


class Calibrator:
    """Quantises a model.

    Args:
        source: The model.
        tensors: What becomes of each tensor.
        calibration: Token ids.
        workspace: Where finished work lies.
        alphas: How far inputs are equalised.
        has_hadamard: Whether inputs go through Hadamard transforms; their widths allow it.
        feedback: Steps beside the weighted fit.
        sensitivity_tokens: Of the first window, to measure on what each matrix costs in 4 bits.
        pool: Threads to use; the results do not depend on their number.
        advance: Called after every layer of every pass.

    Attributes:
        description: The model of the file: its embedding has a scale if it is equalised as a head,
            and the inputs of its matrices are transformed if they are to be.
    """

    def __init__(
        self,
        source: ModelSource,
        tensors: tuple[FileTensor, ...],
        calibration: Calibration,
        workspace: Workspace,
        *,
        alphas: Alphas,
        has_hadamard: bool = True,
        feedback: Feedback,
        sensitivity_tokens: int = 128,
        pool: Executor,
        advance: Advance,
    ) -> None:
        self._source = source
        self._plain = source.description
        is_scaled = self._plain.is_tied and alphas.head > 0
        self.description = replace(
            self._plain,
            has_embed_scale=is_scaled,
            has_hadamard=has_hadamard,
        )
        self._head = "embed" if self._plain.is_tied else "head"
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._calibration = calibration
        self._workspace = workspace
        self._alphas = alphas
        self._feedback = feedback
        self._sensitivity_tokens = sensitivity_tokens
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
            outside = {name: self._whole(name) for name in ("embed", "final_norm")}
            known = run_float_model(
                self._plain,
                outside,
                self._layer,
                self._calibration,
                self._pool,
                self._advance,
            )
            self._workspace.save("float", **known)
        self._float = known
        return known["hidden"]

    def choose(self, budget: int, is_head_free: bool) -> dict[str, TensorFormat]:
        """Formats of the matrices for at most `budget` bytes together.

        Args:
            budget: Bytes.
            is_head_free: Whether embedding and head are among the matrices, or keep their formats.
        """
        ratios: dict[str, Mapping[TensorFormat, float]] = {}

        def variants(number: int) -> Mapping[str, Mapping[str, Float32Array]]:
            # the equalised layer is the same function: layers may change one by one
            layer = self._equalised(f"layers.{number}")
            return {
                name: {**layer, **self._tried(name, layer, ratios)}
                for name in (f"layers.{number}.{kind}" for kind in KINDS)
            }

        ends = self._ends(ratios, is_head_free)
        found = measure_sensitivities(
            self._plain, ends, self._layer, variants, self._pool, self._advance
        )
        candidates = []
        for name, loss in found.items():
            tensor = self._tensors[name]
            sizes = {kind: tensor_bytes(kind, tensor.rows, tensor.cols) for kind in ratios[name]}
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
        windows = self._calibration.windows
        streams: _Pair = [model.embed(ids) for ids in windows], []
        if self._feedback.is_asymmetric:
            model = ReferenceModel(self._plain, {"embed": self._whole("embed")}.__getitem__)
            streams[1].extend(model.embed(ids) for ids in windows)
        del embedding, model, get, kept
        for number in range(self.description.num_layers):
            section = f"layers.{number}"
            layer = self._for_file(section)
            kept = self._workspace.load(section) or {}
            streams, made = self._pass_layer(number, layer, formats, streams, kept)
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

    def _pass_layer(
        self,
        number: int,
        layer: _Layer,
        formats: Mapping[str, TensorFormat],
        streams: _Pair,
        kept: Mapping[str, npt.NDArray[Any]],
    ) -> tuple[_Pair, dict[str, _U8Array]]:
        """Quantises a layer's matrices that are not `kept`.

        Returns:
            The streams after the layer, and the bytes of the matrices.
        """
        now = dict(layer)
        this = self.description
        model = ReferenceModel(this, now.__getitem__, activations="q8", kv="float16")
        exact = ReferenceModel(this, layer.__getitem__)
        positions = model.positions(0, self._calibration.windows.shape[1])
        made: dict[str, _U8Array] = {}

        def settle(kind: str, inputs: _Pair, added_to: _Pair | None = None) -> None:
            name = f"layers.{number}.{kind}"
            if not kept:
                weights = self._fused(name, now)
                found = fitting_moments(weights, *inputs, added_to, self._pool)
                made[name] = self._matrix(name, formats[name], weights, *found)
            get = self._parts_of(name, formats[name], kept[name] if kept else made[name])
            for part in self._parts[name]:
                now[part] = get(part)

        def both(step: Callable[..., Float32Array], *pairs: _Pair) -> _Pair:
            quantised, floats = zip(*pairs, strict=True)
            return (
                list(self._pool.map(partial(step, model), *quantised)),
                list(self._pool.map(partial(step, exact), *floats)),
            )

        inputs = both(lambda m, x: m.attention_input(x, number), streams)
        settle("qkv", inputs)
        inputs = both(lambda m, x: m.attend(x, number, positions, ReferenceCache(this)), inputs)
        settle("o", inputs, None if this.has_post_norms else streams)
        streams = both(lambda m, x, mixed: x + m.attention_output(mixed, number), streams, inputs)
        inputs = both(lambda m, x: m.ffn_input(x, number), streams)
        settle("gate_up", inputs)
        inputs = both(lambda m, x: m.ffn_hidden(x, number), inputs)
        settle("down", inputs, None if this.has_post_norms else streams)
        return both(lambda m, x, h: x + m.ffn_output(h, number), streams, inputs), made

    def _quantise_globals(self, formats: Mapping[str, TensorFormat]) -> dict[str, npt.NDArray[Any]]:
        """Embedding and head, the final norm and what undoes the embedding's factors."""
        weights, norm, factor = self._head_for_file()
        moments = self._float["moments"] / np.outer(factor, factor)
        if self.description.has_hadamard:
            moments = transform(transform(moments).T)
        made: dict[str, npt.NDArray[Any]] = {"final_norm": norm[None]}
        made[self._head] = self._matrix(self._head, formats[self._head], weights, moments)
        del weights
        if self.description.has_embed_scale:
            made["embed_scale"] = (1 / factor)[None]
        if "embed" not in made:
            weights, alike = self._whole("embed"), self._importance("embed")
            made["embed"] = fit(formats["embed"], weights, alike, self._pool)
        return made

    def _matrix(
        self,
        name: str,
        tensor_format: TensorFormat,
        weights: Float32Array,
        moments: Float32Array,
        missing: Float32Array | None = None,
    ) -> _U8Array:
        """Stored bytes of a matrix; for the arguments see `quantize_matrix`."""
        try:
            return quantize_matrix(
                tensor_format, weights, moments, missing, self._feedback, self._pool
            )
        except ValueError as error:
            raise FormatError(f"tensor {name}: {error}") from None

    def _tried(
        self,
        name: str,
        tensors: Mapping[str, Float32Array],
        ratios: dict[str, Mapping[TensorFormat, float]],
    ) -> _Layer:
        """Canonical tensors of a matrix in the smallest format; notes each format's error."""
        found, ratios[name] = self._try(name, self._fused(name, tensors))
        get = unfuse(self.description, {name: found}.__getitem__)
        return {part: get(part) for part in self._parts[name]}

    def _try(
        self, name: str, weights: Float32Array
    ) -> tuple[Float32Array, Mapping[TensorFormat, float]]:
        """Rows of a matrix that is not transformed, as `try_formats`."""
        importance = self._importance(name)
        if not self._is_transformed(name):
            return try_formats(weights, importance, self._pool)
        found, ratios = try_formats(transform_weights(weights), importance, self._pool)
        return transform(found, found), ratios

    def _ends(self, ratios: dict[str, Mapping[TensorFormat, float]], is_head_free: bool) -> Ends:
        """What lies outside the layers for the first window; notes each format's error."""
        head = self._whole(self._head)
        ids = self._calibration.windows[0, : self._sensitivity_tokens]
        known, at = np.unique(ids, return_inverse=True)
        rows = (head if self._head == "embed" else self._whole("embed"))[known]
        factors = {self._head: self._head_factor()}

        def quantised(name: str, values: Float32Array) -> Float32Array:
            factor = factors.get(name, np.float32(1))
            found, ratios[name] = self._try(name, values * factor)
            return found / factor

        def embedded(values: Float32Array) -> Float32Array:
            return ReferenceModel(self._plain, {"embed": values}.__getitem__).embed(at)

        starts = {"": embedded(rows)}
        if is_head_free:
            starts["embed"] = embedded(quantised("embed", rows))
        return Ends(
            embedded=starts,
            final_norm=self._whole("final_norm"),
            head=head,
            quantised=partial(quantised, self._head) if is_head_free else None,
        )

    def _for_file(self, section: str) -> _Layer:
        """Canonical tensors of a layer, equalised, for inputs as the file has them."""
        layer = self._equalised(section)
        return transform_layer(layer) if self.description.has_hadamard else layer

    def _equalised(self, section: str) -> _Layer:
        """Canonical tensors of a layer, equalised, by name."""
        prefix = f"{section}."
        whole = self._layer(int(section.rpartition(".")[2]))
        layer = {name.removeprefix(prefix): value for name, value in whole.items()}
        squares = {kind: self._float[prefix + kind] for kind in KINDS}
        layer |= equalize_attention(layer, squares, self._alphas, self._plain)
        layer |= equalize_ffn(layer, squares, self._alphas, self._plain)
        return {prefix + role: value for role, value in layer.items()}

    def _is_transformed(self, name: str) -> bool:
        """Whether a matrix's inputs are."""
        return self.description.has_hadamard and (name != "embed" or self._head == "embed")

    def _head_for_file(self) -> tuple[Float32Array, Float32Array, Float32Array]:
        """Head, as `_for_file`, final norm, and what the head's columns were multiplied by."""
        factor = self._head_factor()
        head = self._whole(self._head) * factor
        if self.description.has_hadamard:
            transform_weights(head, head)
        return head, self._whole("final_norm") / factor, factor

    def _head_factor(self) -> Float32Array:
        squares = self._float["moments"].diagonal()
        return equalizing_factors("head", squares, self._alphas, self._plain)

    def _importance(self, name: str) -> Float32Array:
        """Mean squares of a matrix's input, as the file has it."""
        kind = name.rpartition(".")[2]
        if name == self._head:
            kind, squares = "head", self._float["moments"].diagonal()
        elif name == "embed":
            return np.ones(self._plain.hidden_size, np.float32)
        else:
            squares = self._float[name]
        equal = squares / equalizing_factors(kind, squares, self._alphas, self._plain) ** 2
        return mean_squares(equal) if self._is_transformed(name) else equal

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

    def _layer(self, number: int) -> _Layer:
        prefix = f"layers.{number}."
        return {name: self._whole(name) for name in self._sources if name.startswith(prefix)}

    def _whole(self, name: str) -> Float32Array:
        return read_whole(self._source, self._sources[name])
