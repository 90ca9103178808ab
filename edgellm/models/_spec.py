"""What a model is, in a form the exporter, the reference and the runtime share.

A `ModelSpec` is the declaration of one architecture: how its options are read from a Hugging Face
`config.json` or from GGUF metadata, and which source tensor becomes which canonical tensor. A
`ModelDescription` is one model: META's "model" fields and the RoPE tables.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from edgellm.errors import UnsupportedModelError
from edgellm.format.spec import (
    MAX_CONTEXT,
    MAX_FFN_SIZE,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
)
from edgellm.models._options import Options, shortest_float
from edgellm.models._rope import Rope, inverse_frequencies
from edgellm.types import Float32Array

# An ONNX model's weights have Hugging Face's names and are what the graph computes with.
SourceKind: TypeAlias = Literal["hf", "gguf", "onnx"]


class Rewrite(enum.Enum):
    """A constant rewrite on the way from a source tensor to a canonical one."""

    NONE = "none"
    ADD_ONE = "add one"  # Gemma stores the norm weight w of a norm that multiplies by 1 + w
    UNPERMUTE = "unpermute"  # GGUF's Llama stores q and k rows for interleaved RoPE


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """One tensor of a source model.

    `shape` is the shape it must have: (rows, cols) of a matrix, (n,) of a vector.
    """

    source_name: str
    canonical_name: str
    rewrite: Rewrite
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What differs between the layers of a model.

    `rope` is the number of its RoPE table; with `window` W, position i attends to j where
    0 <= i - j < W; 0 is no limit.
    """

    rope: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """One model: exactly META's "model" fields, and the RoPE tables with what they were read from.

    `inv_freqs` has `num_ropes` float32 arrays of (head_dim / 2,). `num_tokens` equals `vocab_size`
    until the exporter has counted the tokenizer's ids and replaced it. With `has_embed_scale` the
    exporter has multiplied the embedding's columns, and the tensor "embed_scale" undoes it. With
    `has_hadamard` it has transformed the columns of all matrices but an embedding that is no head
    (`_hadamard.transform_weights`), so that their inputs are transformed before they are rounded.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    num_tokens: int
    max_context: int
    norm_eps: float
    activation: str
    attention_scale: float
    embedding_scale: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    has_post_norms: bool
    num_ropes: int
    layers: tuple[Layer, ...]
    inv_freqs: tuple[Float32Array, ...] = field(compare=False)
    rope: tuple[dict[str, Any], ...] = ()
    kv_format: str = "f16"
    has_embed_scale: bool = False
    has_hadamard: bool = False

    def to_meta(self) -> dict[str, Any]:
        """The "model" object of META."""
        meta: dict[str, Any] = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name not in ("inv_freqs", "rope", "layers")
        }
        for flag in ("has_embed_scale", "has_hadamard"):  # absent is false
            if not meta[flag]:
                del meta[flag]
        meta["layers"] = [{"rope": layer.rope, "window": layer.window} for layer in self.layers]
        return meta

    @classmethod
    def from_meta(
        cls,
        model: Mapping[str, Any],
        inv_freqs: tuple[Float32Array, ...],
        rope: tuple[dict[str, Any], ...] = (),
    ) -> ModelDescription:
        """The description of an `.edge` file: META's "model" and "rope", and its RoPE tables."""
        layers = tuple(Layer(rope=one["rope"], window=one["window"]) for one in model["layers"])
        return cls(**{**model, "layers": layers}, inv_freqs=inv_freqs, rope=rope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """How positions are treated: the RoPE tables, and each layer's table and window."""

    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensors:
    """What a GGUF's tensors can tell about the model: their shapes, and small tables."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Float32Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The declaration of one architecture.

    Names are maps from a canonical role ("embed", "q", "attn_norm") to a source name, in which
    `{i}` is the number of the layer. An option that is absent (or null) in `config.json` takes its
    value from `hf_defaults`, which repeats the documented default of the Hugging Face config class;
    an option without one is required. `hf_require` and `gguf_require` list the only values with
    which an option is supported; absent is fine. GGUF keys are written without the architecture.
    """

    architecture: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    activation: str
    hf_names: Mapping[str, str]
    gguf_names: Mapping[str, str]
    hf_defaults: Mapping[str, Any]
    hf_attention: Callable[[Options, int], Attention]  # int: number of layers
    gguf_attention: Callable[[Options, int, GgufTensors], Attention]
    hf_require: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    gguf_require: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    hf_rewrites: Mapping[str, Rewrite] = field(default_factory=dict)
    gguf_rewrites: Mapping[str, Rewrite] = field(default_factory=dict)
    gguf_ignorable: tuple[str, ...] = ()  # tensors that gguf_attention has read
    hf_query_scalar: str | None = None  # attention is scaled by 1 / sqrt(this option)
    gguf_query_scalar: Callable[[Options, int], int] | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    is_embedding_scaled: bool = False

    def model_from_hf(self, config: Mapping[str, Any]) -> ModelDescription:
        """Reads a Hugging Face config.

        Args:
            config: the content of `config.json`, written by any version of transformers.

        Returns:
            The description; `num_tokens` equals `vocab_size`.

        Raises:
            UnsupportedModelError: a required option is missing, or one is not supported.
        """
        options = Options(config, where="config.json", defaults=self.hf_defaults)
        options.require({"quantization_config": (), **self.hf_require})
        num_heads = options.count("num_attention_heads", maximum=MAX_HEADS)
        hidden_size = options.count("hidden_size", maximum=MAX_HIDDEN_SIZE)
        head_dim = options.count("head_dim", hidden_size // num_heads, maximum=MAX_HEAD_DIM)
        num_layers = options.count("num_hidden_layers", maximum=MAX_LAYERS)
        scalar = options.number(self.hf_query_scalar) if self.hf_query_scalar else head_dim
        vocab_size = options.count("vocab_size", maximum=MAX_VOCAB_SIZE)
        return self._describe(
            attention=self.hf_attention(options, num_layers),
            query_scalar=scalar,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads
            if options.is_null("num_key_value_heads")
            else options.count("num_key_value_heads", num_heads, maximum=num_heads),
            head_dim=head_dim,
            ffn_size=options.count("intermediate_size", maximum=MAX_FFN_SIZE),
            vocab_size=vocab_size,
            num_tokens=vocab_size,
            max_context=options.count("max_position_embeddings", maximum=MAX_CONTEXT),
            norm_eps=options.number("rms_norm_eps"),
            is_tied=options.flag("tie_word_embeddings"),
        )

    def model_from_gguf(
        self,
        fields: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Float32Array],
    ) -> ModelDescription:
        """Reads GGUF metadata.

        Args:
            fields: metadata, full key to plain Python value (int, float, bool, str, list).
            shapes: every tensor's shape as numpy has it, (rows, cols) or (n,).
            read: returns a tensor as float32; called for small tables only (`rope_freqs.weight`).

        Returns:
            The description; `num_tokens` is the number of the tokenizer's tokens, at most
            `vocab_size`.

        Raises:
            UnsupportedModelError: a required key or tensor is missing, or one is not supported.

        Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for keys and defaults.
        """
        architecture = str(fields.get("general.architecture"))
        options = Options(fields, where="GGUF metadata", prefix=f"{architecture}.")
        options.require({"expert_count": (0,), "attention.causal": (True,), **self.gguf_require})
        num_heads = options.count("attention.head_count", maximum=MAX_HEADS)
        hidden_size = options.count("embedding_length", maximum=MAX_HIDDEN_SIZE)
        head_dim = options.count(
            "attention.key_length", hidden_size // num_heads, maximum=MAX_HEAD_DIM
        )
        # Partial rotary embedding and a value size of its own are not supported.
        options.require(
            {"rope.dimension_count": (head_dim,), "attention.value_length": (head_dim,)}
        )
        embed = self.gguf_names["embed"]
        if len(shapes.get(embed, ())) != 2:
            raise UnsupportedModelError(
                f"the GGUF has no matrix {embed!r}; is it a vocabulary without a model?"
            )
        vocab_size = shapes[embed][0]
        tokens = fields.get("tokenizer.ggml.tokens")
        num_layers = options.count("block_count", maximum=MAX_LAYERS)
        query_scalar = (
            self.gguf_query_scalar(options, head_dim) if self.gguf_query_scalar else head_dim
        )
        return self._describe(
            attention=self.gguf_attention(
                options, num_layers, GgufTensors(shapes=shapes, read=read)
            ),
            query_scalar=query_scalar,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=options.count("attention.head_count_kv", num_heads, maximum=num_heads),
            head_dim=head_dim,
            ffn_size=options.count("feed_forward_length", maximum=MAX_FFN_SIZE),
            vocab_size=vocab_size,
            num_tokens=min(len(tokens), vocab_size) if isinstance(tokens, list) else vocab_size,
            max_context=options.count("context_length", maximum=MAX_CONTEXT),
            norm_eps=options.number("attention.layer_norm_rms_epsilon"),
            is_tied=self.gguf_names["head"] not in shapes,
        )

    def _describe(
        self, *, attention: Attention, query_scalar: float, norm_eps: float, **sizes: Any
    ) -> ModelDescription:
        head_dim, num_heads = sizes["head_dim"], sizes["num_heads"]
        if head_dim % 16:
            raise UnsupportedModelError(f"head size {head_dim} is not a multiple of 16")
        if num_heads % sizes["num_kv_heads"]:
            raise UnsupportedModelError(
                f"{num_heads} heads do not share {sizes['num_kv_heads']} key/value heads evenly"
            )
        scale = math.sqrt(sizes["hidden_size"]) if self.is_embedding_scaled else 1
        return ModelDescription(
            architecture=self.architecture,
            activation=self.activation,
            norm_eps=shortest_float(norm_eps),
            attention_scale=shortest_float(1 / math.sqrt(query_scalar)),
            embedding_scale=shortest_float(scale),
            has_qkv_bias=self.has_qkv_bias,
            has_qk_norm=self.has_qk_norm,
            has_post_norms=self.has_post_norms,
            num_ropes=len(attention.ropes),
            layers=attention.layers,
            inv_freqs=tuple(inverse_frequencies(rope, head_dim) for rope in attention.ropes),
            rope=tuple(rope.to_meta() for rope in attention.ropes),
            **sizes,
        )

    def sources(self, kind: SourceKind, description: ModelDescription) -> list[SourceTensor]:
        """Every tensor a source of this model has, in the order of the canonical names.

        Args:
            kind: "hf", "gguf" or "onnx".
            description: from `model_from_hf` or `model_from_gguf`.

        Returns:
            One entry for each canonical tensor.
        """
        names = self.gguf_names if kind == "gguf" else self.hf_names
        rewrites = {"hf": self.hf_rewrites, "gguf": self.gguf_rewrites}.get(kind, {})
        result = []
        for canonical, shape in canonical_shapes(description).items():
            role, layer = split_name(canonical)
            result.append(
                SourceTensor(
                    source_name=names[role].format(i=layer),
                    canonical_name=canonical,
                    rewrite=rewrites.get(role, Rewrite.NONE),
                    shape=shape,
                )
            )
        return result

    def ignorable(self, kind: SourceKind) -> tuple[str, ...]:
        """Patterns (fnmatch) of source tensors that hold nothing the description does not have.

        Old checkpoints carry the RoPE table as a buffer; a GGUF's scaled one is in `inv_freqs`.
        """
        ignorable = {"hf": ("model.*rotary_emb.inv_freq",), "gguf": self.gguf_ignorable}
        return ignorable.get(kind, ())

    def copies(self, kind: SourceKind, description: ModelDescription) -> dict[str, str]:
        """Source tensors that may be there as a copy: name to the tensor it must equal.

        A tied model's file may hold the head a second time; if it differs, the model is not tied.
        """
        if kind != "gguf" and description.is_tied:
            return {self.hf_names["head"]: self.hf_names["embed"]}
        return {}


def split_name(canonical: str) -> tuple[str, int]:
    """Role and layer of a canonical name: "layers.3.q" is ("q", 3), "embed" is ("embed", 0)."""
    parts = canonical.split(".")
    return (parts[2], int(parts[1])) if parts[0] == "layers" else (canonical, 0)


def canonical_shapes(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Canonical (unfused) tensors of a model: name to (rows, cols) or (n,)."""
    hidden, ffn, head = description.hidden_size, description.ffn_size, description.head_dim
    num_q, num_kv = description.num_heads * head, description.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (num_q, hidden),
        "k": (num_kv, hidden),
        "v": (num_kv, hidden),
    }
    if description.has_qkv_bias:
        layer |= {"q_bias": (num_q,), "k_bias": (num_kv,), "v_bias": (num_kv,)}
    if description.has_qk_norm:
        layer |= {"q_norm": (head,), "k_norm": (head,)}
    layer["o"] = (hidden, num_q)
    if description.has_post_norms:
        layer["post_attn_norm"] = (hidden,)
    layer |= {"ffn_norm": (hidden,), "gate": (ffn, hidden), "up": (ffn, hidden)}
    layer["down"] = (hidden, ffn)
    if description.has_post_norms:
        layer["post_ffn_norm"] = (hidden,)
    shapes: dict[str, tuple[int, ...]] = {"embed": (description.vocab_size, hidden)}
    if description.has_embed_scale:
        shapes["embed_scale"] = (hidden,)
    for i in range(description.num_layers):
        shapes |= {f"layers.{i}.{role}": shape for role, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not description.is_tied:
        shapes["head"] = (description.vocab_size, hidden)
    return shapes
