"""What an ONNX decoder tells about itself: a Hugging Face config made of it, or checks against one.

A folder made by ONNX Runtime GenAI has a genai_config.json instead of a config.json. What that does
not say is in the graph: norm epsilon, windows, scales, and the base of RoPE in its caches.

Source: onnxruntime-genai, src/python/py/models/builders/base.py, make_genai_config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgellm.errors import FormatError, UnsupportedModelError
from edgellm.exporters.onnx_data import OnnxModelFile
from edgellm.exporters.onnx_match import Decoder
from edgellm.exporters.onnx_rope import rope_base
from edgellm.exporters.onnx_walk import Attention
from edgellm.exporters.onnx_weights import Dense
from edgellm.exporters.source import read_json
from edgellm.models import ModelDescription, ModelSpec, specs
from edgellm.models._options import shortest_float

_HF_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


class GenaiConfig:
    """A genai_config.json."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Args:
            path: The genai_config.json.

        Raises:
            FormatError: It is broken.
        """
        self.path = path
        model = read_json(path).get("model")
        if not isinstance(model, dict) or not isinstance(model.get("decoder"), dict):
            raise FormatError(f"{path} describes no decoder: only text models can be exported")
        self._model: dict[str, Any] = model
        self._decoder: dict[str, Any] = model["decoder"]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._count(self._model, "vocab_size")

    @property
    def hidden_size(self) -> int:
        """Columns of the embedding."""
        return self._count(self._decoder, "hidden_size")

    @property
    def eos_ids(self) -> object:
        """eos_token_id, as it is."""
        return self._model.get("eos_token_id")

    def spec(self) -> tuple[str, ModelSpec]:
        """Hugging Face's name of the architecture, and its declaration."""
        kind = str(self._model.get("type"))
        for spec in specs():
            for name in spec.hf_architectures:
                if name.partition("For")[0].lower() == kind.removesuffix("_text"):
                    return name, spec
        raise UnsupportedModelError(f"{self.path}: the model type {kind[:80]!r} is not supported")

    def hf_config(self, file: OnnxModelFile, decoder: Decoder, *, is_tied: bool) -> dict[str, Any]:
        """The config.json that the model was made from, as far as edgellm reads it.

        Args:
            file: The model.
            decoder: What its graph holds.
            is_tied: Embedding and head are one.

        Returns:
            The config.

        Raises:
            FormatError: Something that is needed is said nowhere.
        """
        name, spec = self.spec()
        gate = decoder.layers[0].sites["gate"] if decoder.layers else None
        norm_eps = decoder.final_norm.epsilon
        if gate is None or gate.weight is None or norm_eps is None:
            raise self.missing("rms_norm_eps, nor can it be found in the graph")
        activation = _HF_ACTIVATIONS.get(str(gate.activation), str(gate.activation))
        config: dict[str, Any] = {
            "architectures": [name],
            "hidden_size": self.hidden_size,
            "intermediate_size": gate.weight.shape[0],
            "num_hidden_layers": self._count(self._decoder, "num_hidden_layers"),
            "num_attention_heads": self._count(self._decoder, "num_attention_heads"),
            "num_key_value_heads": self._count(self._decoder, "num_key_value_heads"),
            "head_dim": self._count(self._decoder, "head_size"),
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self._count(self._model, "context_length"),
            "rms_norm_eps": norm_eps,
            "hidden_act": activation,
            "hidden_activation": activation,
            "tie_word_embeddings": is_tied,
            "eos_token_id": self.eos_ids,
        }
        config |= self._attention(file, decoder, spec)
        return config

    def missing(self, what: str) -> FormatError:
        """The error that the folder does not say something."""
        return FormatError(
            f"{self.path} does not say {what}: put the config.json of the model it was made from "
            "beside it"
        )

    def _attention(self, file: OnnxModelFile, decoder: Decoder, spec: ModelSpec) -> dict[str, Any]:
        """RoPE, windows and scale, from the attentions of the graph."""
        windows = [_window(layer.attention) for layer in decoder.layers]
        limits = {window for window in windows if window}
        if len(limits) > 1:
            raise self.missing("which of several windows the layers have")
        config: dict[str, Any] = {
            "use_sliding_window": bool(limits),
            "sliding_window": next(iter(limits), None),
        }
        if "layer_types" not in spec.hf_require:
            config["layer_types"] = [
                "sliding_attention" if window else "full_attention" for window in windows
            ]
        bases = {
            bool(window): self._theta(file, layer.attention)
            for window, layer in zip(windows, decoder.layers, strict=True)
        }
        config["rope_theta"] = bases.get(False, bases.get(True))
        if "rope_local_base_freq" in spec.hf_defaults and True in bases:
            config["rope_local_base_freq"] = bases[True]
        if spec.hf_query_scalar:
            config[spec.hf_query_scalar] = round(1 / self._scale(decoder.layers[0].attention) ** 2)
        return config

    def _scale(self, attention: Attention) -> float:
        scale = attention.options.get("scale")
        if not isinstance(scale, float) or not 1e-3 < scale < 1e3:
            raise self.missing("how attention is scaled, nor does the graph")
        return scale

    def _theta(self, file: OnnxModelFile, attention: Attention) -> float:
        if attention.rope is None:
            raise self.missing("rope_theta, and the graph has no caches of RoPE")
        tables = []
        for cache in attention.rope:
            if len(cache.shape) != 2 or cache.shape != attention.rope[0].shape:
                raise FormatError(f"{file.path}: a cache of RoPE is of shape {cache.shape}")
            table = Dense(file=file, tensor=cache.tensor, shape=cache.shape, stored=cache.shape)
            tables.append(table.rows(0, cache.shape[0]))
        theta = rope_base(tables[0], tables[1], is_half=attention.rope[0].tensor.type != 1)
        if theta is None:
            raise self.missing("how RoPE is scaled")
        return theta

    def _count(self, table: Mapping[str, Any], key: str) -> int:
        value = table.get(key)
        if type(value) is not int or value < 1:
            raise self.missing(key)
        return value


def check_decoder(decoder: Decoder, description: ModelDescription, where: str) -> None:
    """Compares what the graph says about itself with what the configuration says.

    Args:
        decoder: What the graph holds.
        description: The configuration's model.
        where: The model file's name, for messages.

    Raises:
        FormatError: They differ.
    """
    for what, of_graph, of_config in _facts(decoder, description):
        # a float16 graph has an epsilon rounded to one or two digits, a bfloat16 one the number
        # of the embedding to two or three
        tolerance = 0.1 if "epsilon" in what else 5e-3 if "embedding" in what else 1e-3
        if of_graph != of_config and not (
            float in (type(of_graph), type(of_config))
            and math.isclose(of_graph, of_config, rel_tol=tolerance)
        ):
            raise FormatError(
                f"{where}: the graph has {what} {of_graph}, its configuration says {of_config}: "
                "they do not belong together"
            )


def _facts(decoder: Decoder, description: ModelDescription) -> Iterator[tuple[str, Any, Any]]:
    """What, the graph's value and the configuration's, for everything that both may say."""
    yield "layers", len(decoder.layers), description.num_layers
    if decoder.embed.scale is not None:
        yield "an embedding multiplied by", decoder.embed.scale, description.embedding_scale
    for name, site in decoder.roles().items():
        if site.epsilon is not None:
            epsilon = shortest_float(site.epsilon)
            yield f"{name} with an epsilon of", epsilon, description.norm_eps
        if name.endswith(".gate"):
            yield f"{name} with the activation", site.activation, description.activation
    for i, (layer, described) in enumerate(zip(decoder.layers, description.layers, strict=True)):
        options = layer.attention.options
        for key, value in (
            ("num_heads", description.num_heads),
            ("q_num_heads", description.num_heads),
            ("kv_num_heads", description.num_kv_heads),
        ):
            if key in options:
                yield f"in layer {i} {key}", options[key], value
        if layer.attention.scale is not None:
            yield f"in layer {i} scale", layer.attention.scale, description.attention_scale
        if options.get("scale"):
            scale = shortest_float(options["scale"])
            yield f"in layer {i} scale", scale, description.attention_scale
        if "local_window_size" in options:
            yield f"in layer {i} a window of", _window(layer.attention), described.window


def _window(attention: Attention) -> int:
    """The window of a fused attention, 0 if it has none."""
    window = attention.options.get("local_window_size", -1)
    return window if isinstance(window, int) and window > 0 else 0
