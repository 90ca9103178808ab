"""The forward pass in plain numpy: what every other implementation is compared with.

Float32 and written for reading; it can imitate what the runtime rounds (int8 activations, float16
keys and values) to tell that apart from mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from edgellm.errors import FormatError
from edgellm.format import EdgeFile
from edgellm.format.layout import dequantize
from edgellm.format.spec import SUPERBLOCK_COLS
from edgellm.models._hadamard import transform
from edgellm.models._spec import ModelDescription, canonical_shapes
from edgellm.models._tensors import file_shapes, unfuse
from edgellm.types import Float32Array

_QUERY_BLOCK = 256


class ReferenceCache:
    """Keys (after RoPE) and values of the tokens computed so far, of every layer."""

    def __init__(self, description: ModelDescription) -> None:
        shape = (0, description.num_kv_heads, description.head_dim)
        empty = np.zeros(shape, dtype=np.float32)
        self._layers = [(empty, empty)] * description.num_layers
        self.num_tokens = 0

    def append(
        self, layer: int, keys: Float32Array, values: Float32Array
    ) -> tuple[Float32Array, Float32Array]:
        """Adds (n, kv heads, d) keys and values; returns all of the layer's, (m, kv heads, d)."""
        old_keys, old_values = self._layers[layer]
        both = (np.concatenate([old_keys, keys]), np.concatenate([old_values, values]))
        self._layers[layer] = both
        return both


class Positions(NamedTuple):
    """Positions of tokens, (n,), and for each RoPE their cosine and sine, (n, 1, d / 2)."""

    numbers: npt.NDArray[np.int_]
    rotations: tuple[tuple[Float32Array, Float32Array], ...]


class ReferenceModel:
    """A model's forward pass on canonical tensors.

    Args:
        description: the model.
        get: returns a canonical tensor, float32, (rows, cols) or (n,). It is called at every use,
            so that a model larger than memory can be read piece by piece; wrap it in
            `functools.cache` to keep the tensors.
        activations: "q8" rounds the input of every matrix product as the runtime does (int8, one
            scale per row and 256 columns).
        kv: "float16" rounds keys and values as the runtime's cache does.
    """

    def __init__(
        self,
        description: ModelDescription,
        get: Callable[[str], Float32Array],
        *,
        activations: Literal["float", "q8"] = "float",
        kv: Literal["float32", "float16"] = "float32",
    ) -> None:
        self.description = description
        self._get = get
        self._activations = activations
        self._kv = kv

    @classmethod
    def from_edge(
        cls,
        path: str | Path,
        *,
        activations: Literal["float", "q8"] = "float",
        kv: Literal["float32", "float16"] = "float32",
    ) -> ReferenceModel:
        """The model of an `.edge` file, its weights dequantised and kept in memory.

        Args:
            path: the file.
            activations: as for the class.
            kv: as for the class.

        Raises:
            FormatError: the file is broken.
        """
        with EdgeFile.open(path) as file:
            meta = file.meta

            def read(name: str) -> Float32Array:
                data, entry = file.tensor_data(name), file.tensors[name]
                return dequantize(data, entry.format, entry.rows, entry.cols)

            description = ModelDescription.from_meta(
                meta["model"],
                tuple(
                    read(f"rope.{number}.inv_freq")[0]
                    for number in range(meta["model"]["num_ropes"])
                ),
                tuple(meta["rope"]),
            )
            for name, shape in file_shapes(description).items():
                entry = file.tensors.get(name)
                if entry is None or (entry.rows, entry.cols) != shape:
                    raise FormatError(
                        f"{path}: tensor {name} is missing or not {shape}; export the model again"
                    )
            get = unfuse(description, read)
            tensors = {name: get(name) for name in canonical_shapes(description)}
        return cls(description, tensors.__getitem__, activations=activations, kv=kv)

    def rounding(
        self,
        *,
        activations: Literal["float", "q8"] = "float",
        kv: Literal["float32", "float16"] = "float32",
    ) -> ReferenceModel:
        """The same model, on the same tensors, with other roundings; arguments as for the class."""
        return ReferenceModel(self.description, self._get, activations=activations, kv=kv)

    def forward(
        self, ids: Sequence[int] | npt.NDArray[np.integer], past: ReferenceCache | None = None
    ) -> Float32Array:
        """Logits of a piece of a sequence.

        Args:
            ids: n token ids, at least one.
            past: the tokens before them; receives these as well. None: they are the first.

        Returns:
            (n, vocab_size) float32, padding rows of the vocabulary included.

        Raises:
            ValueError: there are no ids, or one is not in the vocabulary.
        """
        return self.logits(self.hidden(ids, past))

    def hidden(
        self, ids: Sequence[int] | npt.NDArray[np.integer], past: ReferenceCache | None = None
    ) -> Float32Array:
        """What the head sees: `forward` up to the final norm, (n, hidden_size) float32."""
        cache = past if past is not None else ReferenceCache(self.description)
        x = self.embed(ids)
        positions = self.positions(cache.num_tokens, len(x))
        for number in range(self.description.num_layers):
            mixed = self.attend(self.attention_input(x, number), number, positions, cache)
            x = x + self.attention_output(mixed, number)
            x = x + self.ffn_output(self.ffn_hidden(self.ffn_input(x, number), number), number)
        cache.num_tokens += len(x)
        return self.final(x)

    def embed(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> Float32Array:
        """The residual stream before the first layer, (n, hidden); errors as for `forward`."""
        ids = np.asarray(ids)
        if not ids.size or ids.min() < 0 or ids.max() >= self.description.vocab_size:
            raise ValueError(f"ids must be 0 to {self.description.vocab_size - 1}, one or more")
        rows = self._get("embed")[ids]
        if self.description.is_tied:  # transformed as a head: this undoes it
            rows = self._transformed(rows)
        scaled = rows * np.float32(self.description.embedding_scale)
        if self.description.has_embed_scale:
            scaled = scaled * self._get("embed_scale")
        return np.asarray(scaled, np.float32)

    def positions(self, first: int, count: int) -> Positions:
        """Positions `first` to `first + count - 1` with their rotations."""
        numbers = first + np.arange(count)
        tables = self.description.inv_freqs
        return Positions(numbers, tuple(_rotation(numbers, table) for table in tables))

    def logits(self, hidden: Float32Array) -> Float32Array:
        """The head.

        Args:
            hidden: (n, hidden_size) from `hidden`; give it in pieces where n x vocab_size numbers
                are too many.

        Returns:
            (n, vocab_size) float32.
        """
        return self._linear(hidden, "embed" if self.description.is_tied else "head")

    def attention_input(self, x: Float32Array, number: int) -> Float32Array:
        """What layer `number`'s q, k and v multiply: the residual stream (n, hidden), normed."""
        return self._transformed(self._norm(x, f"layers.{number}.attn_norm"))

    def attend(
        self, normed: Float32Array, number: int, positions: Positions, cache: ReferenceCache
    ) -> Float32Array:
        """What layer `number`'s o multiplies.

        Args:
            normed: (n, hidden) from `attention_input`.
            number: of the layer.
            positions: of the n tokens, from `positions`.
            cache: the tokens before them; receives these as well.

        Returns:
            (n, num_heads * head_dim) float32.
        """
        this = self.description
        layer = this.layers[number]
        name = f"layers.{number}."
        heads = {}
        for role in ("q", "k", "v"):
            y = self._linear(normed, name + role)
            if this.has_qkv_bias:
                y = y + self._get(f"{name}{role}_bias")
            heads[role] = y.reshape(len(normed), -1, this.head_dim)
        if this.has_qk_norm:
            heads["q"] = self._norm(heads["q"], name + "q_norm")
            heads["k"] = self._norm(heads["k"], name + "k_norm")
        rotation = positions.rotations[layer.rope]
        query = _rotate(heads["q"], rotation) * np.float32(this.attention_scale)
        fresh = _rotate(heads["k"], rotation), heads["v"]
        if self._kv == "float16":
            fresh = (
                fresh[0].astype(np.float16).astype(np.float32),
                fresh[1].astype(np.float16).astype(np.float32),
            )
        keys, values = cache.append(number, *fresh)
        mixed = np.concatenate(
            [
                _attend(query[start : start + _QUERY_BLOCK], keys, values, layer.window, first)
                for start, first in zip(
                    range(0, len(normed), _QUERY_BLOCK),
                    positions.numbers[::_QUERY_BLOCK],
                    strict=True,
                )
            ]
        )
        return self._transformed(mixed.reshape(len(normed), -1))

    def attention_output(self, mixed: Float32Array, number: int) -> Float32Array:
        """What attention adds to the residual stream, (n, hidden), of `attend`'s result."""
        out = self._linear(mixed, f"layers.{number}.o")
        this = self.description
        return self._norm(out, f"layers.{number}.post_attn_norm") if this.has_post_norms else out

    def ffn_input(self, x: Float32Array, number: int) -> Float32Array:
        """What layer `number`'s gate and up multiply: the residual stream (n, hidden), normed."""
        return self._transformed(self._norm(x, f"layers.{number}.ffn_norm"))

    def ffn_hidden(self, normed: Float32Array, number: int) -> Float32Array:
        """What layer `number`'s down multiplies, (n, ffn): activation(gate) x up."""
        name = f"layers.{number}."
        gate = self._linear(normed, name + "gate")
        activated = _silu(gate) if self.description.activation == "silu" else _gelu_tanh(gate)
        return self._transformed(activated * self._linear(normed, name + "up"))

    def ffn_output(self, hidden: Float32Array, number: int) -> Float32Array:
        """What the feed-forward part adds to the residual stream, (n, hidden)."""
        out = self._linear(hidden, f"layers.{number}.down")
        this = self.description
        return self._norm(out, f"layers.{number}.post_ffn_norm") if this.has_post_norms else out

    def final(self, x: Float32Array) -> Float32Array:
        """What the head multiplies: the residual stream (n, hidden), normed."""
        return self._transformed(self._norm(x, "final_norm"))

    def _transformed(self, x: Float32Array) -> Float32Array:
        """(n, cols) as a matrix of the file expects it."""
        return transform(x) if self.description.has_hadamard else x

    def _norm(self, x: Float32Array, name: str) -> Float32Array:
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        scale = np.float32(1) / np.sqrt(mean + np.float32(self.description.norm_eps))
        return np.asarray(x * scale * self._get(name), dtype=np.float32)

    def _linear(self, x: Float32Array, name: str) -> Float32Array:
        rounded = round_q8(x) if self._activations == "q8" else x
        return rounded @ self._get(name).T


def round_q8(x: Float32Array) -> Float32Array:
    """Activations as the runtime's int8 (one scale per row and 256 columns) can hold them.

    Args:
        x: (n, cols) float32.

    Returns:
        (n, cols) float32: the int8 codes times their scale.
    """
    out = np.empty_like(x)
    for start in range(0, x.shape[1], SUPERBLOCK_COLS):
        block = x[:, start : start + SUPERBLOCK_COLS]
        largest = np.abs(block).max(axis=1, keepdims=True)
        inverse = np.divide(
            np.float32(127), largest, out=np.zeros_like(largest), where=largest != 0
        )
        codes = np.rint(block * inverse)
        out[:, start : start + SUPERBLOCK_COLS] = codes * (largest / np.float32(127))
    return out


def _rotation(
    positions: npt.NDArray[np.int_], inv_freq: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """Cosine and sine, (n, 1, d / 2) float32; the angle in double as in the runtime."""
    angle = positions[:, None].astype(np.float64) * inv_freq.astype(np.float64)
    return (
        np.cos(angle).astype(np.float32)[:, None, :],
        np.sin(angle).astype(np.float32)[:, None, :],
    )


def _rotate(x: Float32Array, rotation: tuple[Float32Array, Float32Array]) -> Float32Array:
    """RoPE on pairs (i, i + d/2) of (n, heads, d)."""
    cos, sin = rotation
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(
    query: Float32Array, keys: Float32Array, values: Float32Array, window: int, first: int
) -> Float32Array:
    """Attention of scaled queries (n, heads, d) at positions `first`, `first` + 1, ...

    Args:
        query: (n, heads, d).
        keys: (m, kv heads, d), of positions 0 to m - 1; those after a query are not attended to.
        values: (m, kv heads, d).
        window: 0, or how many positions a query sees, its own included.
        first: position of the first query.

    Returns:
        (n, heads, d).
    """
    num, heads, dim = query.shape
    start = max(0, first - window + 1) if window else 0
    stop = first + num
    distance = (first + np.arange(num))[:, None] - np.arange(start, stop)
    is_seen = (distance >= 0) & ((distance < window) if window else True)
    groups = keys.shape[1]
    grouped = query.reshape(num, groups, heads // groups, dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys[start:stop].transpose(1, 2, 0)[:, None]
    scores = np.where(is_seen, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = weights @ values[start:stop].transpose(1, 0, 2)[:, None]
    result: Float32Array = mixed.transpose(2, 0, 1, 3).reshape(num, heads, dim)
    return result


def _silu(x: Float32Array) -> Float32Array:
    # exp(-x) is infinite below -88, and x / infinity the 0 that it should be.
    with np.errstate(over="ignore"):
        return np.asarray(x / (np.float32(1) + np.exp(-x)), dtype=np.float32)


def _gelu_tanh(x: Float32Array) -> Float32Array:
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.asarray(np.float32(0.5) * x * (np.float32(1) + np.tanh(inner)), dtype=np.float32)
