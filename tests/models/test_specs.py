"""What a source says is what the description has; what edgellm cannot run is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgellm.errors import UnsupportedModelError
from edgellm.models import (
    Layer,
    ModelDescription,
    Rewrite,
    apply_rewrite,
    canonical_shapes,
    find_gguf,
    find_hf,
    specs,
)
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 32,
    "sliding_window": 8,
    "num_hidden_layers": 7,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 72,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 512,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.freq_base": 10_000.0,
}
EMBED = {"token_embd.weight": (131, 64)}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def from_hf(config: dict[str, Any], **changes: Any) -> ModelDescription:
    config = {**config, **changes}
    return find_hf(config).model_from_hf(config)


def from_gguf(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> ModelDescription:
    def read(name: str) -> Float32Array:
        raise AssertionError(f"{name} need not be read")

    spec = find_gguf(fields["general.architecture"])
    return spec.model_from_gguf(fields, shapes, read)


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def test_every_architecture_is_found_by_the_names_it_lists() -> None:
    for spec in specs():
        for name in spec.hf_architectures:
            assert find_hf({"architectures": [name]}) is spec
        for name in spec.gguf_architectures:
            assert find_gguf(name) is spec
    assert {spec.architecture for spec in specs()} == {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3",
    }


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3"):
        find_hf({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnsupportedModelError, match=r"mamba.*gemma3, llama"):
        find_gguf("mamba")
    with pytest.raises(UnsupportedModelError, match="architectures is missing"):
        find_hf({"model_type": "llama"})


def test_meta_has_the_models_fields_and_comes_back() -> None:
    model = from_hf(GEMMA)
    meta = json.loads(json.dumps(model.to_meta()))
    assert list(meta) == [
        "architecture",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_size",
        "vocab_size",
        "num_tokens",
        "max_context",
        "norm_eps",
        "activation",
        "attention_scale",
        "embedding_scale",
        "is_tied",
        "has_qkv_bias",
        "has_qk_norm",
        "has_post_norms",
        "num_ropes",
        "kv_format",
        "layers",
    ]
    assert ModelDescription.from_meta(meta, model.inv_freqs, model.rope) == model


def test_numbers_in_meta_are_the_shortest_decimals_of_float32() -> None:
    model = from_hf(LLAMA, rms_norm_eps=float(np.float32(1e-5)), head_dim=48)
    assert model.norm_eps == 1e-5
    assert json.dumps(model.attention_scale) == "0.14433756"
    assert json.dumps(from_hf(GEMMA, hidden_size=640).embedding_scale) == "25.298222"
    assert json.dumps(model.embedding_scale) == "1"


def test_head_size_is_read_and_else_what_the_config_class_documents() -> None:
    assert from_hf(LLAMA).head_dim == 16
    assert from_hf(LLAMA, head_dim=None).head_dim == 16
    assert from_hf(LLAMA, head_dim=32).head_dim == 32
    assert from_hf({**GEMMA, "head_dim": None}).head_dim == 256
    assert from_hf({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


def test_a_smaller_key_value_head_count_is_read_and_never_assumed() -> None:
    assert from_hf(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4
    assert from_hf(LLAMA, num_key_value_heads=None).num_kv_heads == 4
    assert from_gguf(without(GGUF, "llama.attention.head_count_kv"), EMBED).num_kv_heads == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}},
            {**LLAMA3, "rope_theta": 5e5, "rope_type": "llama3"},
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_both_generations_of_config_say_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    first, second = from_hf(LLAMA, **old), from_hf(LLAMA, rope_parameters=new)
    assert first == second
    assert (first.inv_freqs[0] == second.inv_freqs[0]).all()


def test_both_generations_of_gemma_config_say_the_same() -> None:
    old = from_hf(
        GEMMA,
        rope_theta=2e6,
        rope_local_base_freq=3e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
    )
    kinds = ["sliding_attention" if (i + 1) % 3 else "full_attention" for i in range(7)]
    new = from_hf(
        GEMMA,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
        layer_types=kinds,
    )
    assert old == new
    assert [layer.rope for layer in new.layers] == [1, 1, 0, 1, 1, 0, 1]
    assert [layer.window for layer in new.layers] == [8, 8, 0, 8, 8, 0, 8]
    assert [rope["theta"] for rope in new.rope] == [2_000_000, 30_000]
    for ours, theirs in zip(old.inv_freqs, new.inv_freqs, strict=True):
        assert (ours == theirs).all()


def test_windows_are_those_the_config_asks_for() -> None:
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert from_hf(qwen).layers == (Layer(),) * 3
    upper = from_hf(qwen, use_sliding_window=True, max_window_layers=2)
    assert [layer.window for layer in upper.layers] == [0, 0, 8]
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert from_hf(mistral, sliding_window=8).layers == (Layer(window=8),) * 3
    assert from_hf(mistral, sliding_window=None).layers == (Layer(),) * 3


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'.*'silu'"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "only models without it"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*llama3"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "type": "llama3", "high_freq_factor": 1}}, "above"),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "kind of layer"),
        (LLAMA, {"rope_parameters": "default"}, "not an object"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size is '64', not a whole number"),
        (LLAMA, {"hidden_size": True}, "hidden_size is True"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA, {"num_attention_heads": 1000}, "head_dim is 0"),
        (LLAMA, {"num_key_value_heads": 3}, "4 heads do not share 3"),
        (LLAMA, {"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        (LLAMA, {"head_dim": 40}, "head size 40 is not a multiple of 16"),
        (LLAMA, {"head_dim": 2**30}, "head_dim"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (LLAMA, {"rope_theta": -1}, "rope_theta is -1"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA, {"layer_types": ["full_attention"]}, "7 names out of"),
        (GEMMA, {"layer_types": [["full_attention"]] * 7}, "7 names out of"),
        (GEMMA, {"layer_types": ["chunked_attention"] * 7}, "7 names out of"),
        (GEMMA, {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is not known"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        from_hf(base, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_size_that_is_missing_is_not_guessed(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} is missing"):
        from_hf(without(LLAMA, key))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("llama.expert_count", 8, "expert_count is 8"),
        ("llama.attention.causal", False, "causal"),
        ("llama.attention.sliding_window", 4096, "sliding_window"),
        ("llama.rope.dimension_count", 8, "dimension_count is 8.*16"),
        ("llama.attention.value_length", 32, "value_length"),
        ("llama.rope.scaling.type", "yarn", "'yarn'"),
        ("llama.attention.head_count", [4, 4, 2], "head_count"),
        ("llama.block_count", 2**31, "block_count"),
    ],
)
def test_a_gguf_key_that_cannot_be_honoured_is_refused_by_name(
    key: str, value: Any, named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        from_gguf({**GGUF, key: value}, EMBED)


def test_a_gguf_without_weights_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="vocabulary without a model"):
        from_gguf(GGUF, {})


def test_gguf_sizes_come_from_the_tensors() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a"] * 120}
    model = from_gguf({**GGUF, **tokens}, EMBED)
    assert (model.vocab_size, model.num_tokens, model.is_tied) == (131, 120, True)
    assert not from_gguf(GGUF, {**EMBED, "output.weight": (131, 64)}).is_tied


def test_gguf_and_hf_describe_the_same_model() -> None:
    assert from_gguf(GGUF, EMBED) == from_hf(LLAMA, tie_word_embeddings=True)


def test_a_gguf_scaling_factor_without_a_type_is_linear() -> None:
    scaling = {"type": "linear", "factor": 2.0}
    hf = from_hf(LLAMA, rope_scaling=scaling, tie_word_embeddings=True)
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        gguf = from_gguf({**GGUF, f"llama.{key}": 2.0}, EMBED)
        assert (gguf.inv_freqs[0] == hf.inv_freqs[0]).all()
    off = from_gguf(
        {**GGUF, "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, EMBED
    )
    assert off.rope[0]["kind"] == "default"


def test_gemma_27b_scales_its_queries_by_hidden_over_heads() -> None:
    fields = {key.replace("llama", "gemma3"): value for key, value in GGUF.items()} | {
        "general.architecture": "gemma3",
        "gemma3.block_count": 62,
        "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.head_count_kv": 16,
        "gemma3.attention.key_length": 128,
        "gemma3.attention.sliding_window": 1024,
    }
    shapes = {"token_embd.weight": (131, 5376)}
    assert from_gguf(fields, shapes).attention_scale == float(str(np.float32(168**-0.5)))
    small = from_gguf({**fields, "gemma3.block_count": 18}, shapes)
    assert small.attention_scale == float(str(np.float32(128**-0.5)))
    assert [layer.window for layer in small.layers[:7]] == [1024] * 5 + [0, 1024]


def permute(array: Float32Array, heads: int) -> Float32Array:
    """What llama.cpp's converter does to q and k of a Llama."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def test_a_llama_gguf_gives_the_logits_of_the_model_it_was_made_of(
    make_pair: Callable[..., Any], ids: npt.NDArray[np.int_]
) -> None:
    """Rows of q and k permuted, Llama 3's scaling as a table of factors."""
    scaling = {**LLAMA3, "rope_type": "llama3", "rope_theta": 10_000.0}
    pair = make_pair("Llama", rope_parameters=scaling, tie_word_embeddings=True)
    hf = pair.description
    spec = find_gguf("llama")
    plain = from_gguf(GGUF, EMBED).inv_freqs[0]
    stored = {"rope_freqs.weight": plain / hf.inv_freqs[0]}
    for source in spec.sources("gguf", hf):
        array = pair.tensors[source.canonical_name]
        if source.rewrite is Rewrite.UNPERMUTE:
            array = permute(array, array.shape[0] // hf.head_dim)
        stored[source.source_name] = array
    shapes = {name: array.shape for name, array in stored.items()}
    fields = {**GGUF, "llama.attention.layer_norm_rms_epsilon": 1e-6}
    gguf = spec.model_from_gguf(fields, shapes, stored.__getitem__)
    sources = {source.canonical_name: source for source in spec.sources("gguf", gguf)}
    used = {source.source_name for source in sources.values()}
    assert set(stored) - used == set(spec.ignorable("gguf"))

    def get(name: str) -> Float32Array:
        return apply_rewrite(sources[name].rewrite, stored[sources[name].source_name], gguf)

    for name in ("layers.0.q", "layers.2.k"):
        assert (get(name) == pair.tensors[name]).all()
    np.testing.assert_allclose(gguf.inv_freqs[0], hf.inv_freqs[0], rtol=2e-7)
    ours = ReferenceModel(gguf, get).forward(ids)
    np.testing.assert_allclose(ours, pair.oracle(ids), atol=1e-4)


def test_only_llama_reads_the_table_of_rope_factors() -> None:
    assert find_gguf("llama").ignorable("gguf") == ("rope_freqs.weight",)
    assert find_gguf("qwen2").ignorable("gguf") == ()


def test_gemmas_norms_are_stored_without_their_one_by_hf_and_with_it_by_gguf() -> None:
    model = from_hf(GEMMA)
    spec = find_gguf("gemma3")
    shapes = canonical_shapes(model)
    for source in spec.sources("hf", model):
        is_norm = "norm" in source.canonical_name
        assert source.rewrite is (Rewrite.ADD_ONE if is_norm else Rewrite.NONE)
        assert source.shape == shapes[source.canonical_name]
    assert {source.rewrite for source in spec.sources("gguf", model)} == {Rewrite.NONE}
    ones = apply_rewrite(Rewrite.ADD_ONE, np.zeros(4, dtype=np.float32), model)
    assert (ones == 1).all()


def test_a_tied_models_second_head_is_a_copy_and_an_untied_ones_is_not() -> None:
    spec = find_hf(LLAMA)
    tied = from_hf(LLAMA, tie_word_embeddings=True)
    assert spec.copies("hf", tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    untied = from_hf(LLAMA)
    assert spec.copies("hf", untied) == {}
    assert "lm_head.weight" in {source.source_name for source in spec.sources("hf", untied)}
