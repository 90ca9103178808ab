"""The JSON sections of a `.edge` file: META and TEST_VECTORS, read strictly and checked.

The C reader (`native/src/format/json.c`, `meta.c`) accepts and refuses the same JSON and the same
`model` object; the rest of META is read from Python only.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from edgellm.errors import FormatError
from edgellm.format import spec

__all__ = ["canonical_json", "check_meta", "check_test_vectors", "parse_json"]

_FLOAT = re.compile(r"-?(\d+)(?:\.(\d+))?(?:[eE][+-]?\d{1,2})?")
_NAME = re.compile(r"[a-z0-9_]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")

# bounds are inclusive
_MODEL_INTEGERS = {
    "hidden_size": (1, spec.MAX_HIDDEN_SIZE),
    "num_layers": (1, spec.MAX_LAYERS),
    "num_heads": (1, spec.MAX_HEADS),
    "num_kv_heads": (1, spec.MAX_HEADS),
    "head_dim": (spec.HEAD_DIM_MULTIPLE, spec.MAX_HEAD_DIM),
    "ffn_size": (1, spec.MAX_FFN_SIZE),
    "vocab_size": (1, spec.MAX_VOCAB_SIZE),
    "num_tokens": (1, spec.MAX_VOCAB_SIZE),
    "max_context": (1, spec.MAX_CONTEXT),
    "num_ropes": (1, spec.MAX_ROPES),
}
_MODEL_NUMBERS = {
    "norm_eps": (1e-12, 1.0),
    "attention_scale": (1e-6, 1e6),
    "embedding_scale": (1e-6, 1e6),
}
_MODEL_FLAGS = ("is_tied", "has_qkv_bias", "has_qk_norm", "has_post_norms")
_OPTIONAL_FLAGS = ("has_embed_scale", "has_hadamard")  # absent is false
_ACTIVATIONS = ("silu", "gelu_tanh")
_KV_FORMATS = ("f16", "int8")


def canonical_json(value: Any) -> bytes:
    """`value` as the one JSON text that stands for it: sorted keys, no white space, UTF-8."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def parse_json(data: bytes, where: str) -> Any:
    """Reads strict JSON: UTF-8, keys in rising order (so none twice), bounded depth and numbers.

    Args:
        data: the text.
        where: what messages call it.

    Returns:
        The value, of dict, list, str, int, float, bool and None.

    Raises:
        FormatError: not such a text.
    """

    def fail(what: str) -> NoReturn:
        raise FormatError(f"{where}: {what}; export the model again")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        for (before, _), (after, _) in itertools.pairwise(items):
            if before >= after:
                fail(f"JSON key {after!r} is out of order or repeated")
        return dict(items)

    def integer(text: str) -> int:
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            fail(f"JSON integer {text[:24]} does not fit 64 bits")
        return int(text)

    def decimal(text: str) -> float:
        match = _FLOAT.fullmatch(text)
        if match is None or len(match[1] + (match[2] or "")) > spec.MAX_JSON_DIGITS:
            fail(f"JSON number {text[:24]} has too many digits")
        return float(text)

    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=decimal,
            parse_constant=lambda text: fail(f"JSON has no number {text}"),
        )
        canonical_json(value)  # a lone surrogate has no UTF-8
    except UnicodeError:
        fail("JSON is not UTF-8")
    except RecursionError:
        fail(f"JSON is nested deeper than {spec.MAX_JSON_DEPTH}")
    except json.JSONDecodeError as error:
        fail(f"JSON is broken at character {error.pos} ({error.msg})")
    level = [value]
    for _ in range(spec.MAX_JSON_DEPTH):
        level = [child for item in level for child in _children(item)]
    if any(isinstance(item, list | dict) for item in level):
        fail(f"JSON is nested deeper than {spec.MAX_JSON_DEPTH}")
    return value


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


class _Checker:
    """Reads members of JSON objects, or fails with the path of what is wrong."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, what: str) -> NoReturn:
        raise FormatError(f"{self.where}: {what}; export the model again")

    def member(self, parent: Mapping[str, Any], key: str, kind: type, path: str) -> Any:
        if key not in parent:
            self.fail(f"{path}{key} is missing")
        return self.typed(parent[key], kind, path + key)

    def typed(self, value: Any, kind: type, path: str) -> Any:
        if type(value) is not kind:
            self.fail(f"{path} is {type(value).__name__}, not {kind.__name__}")
        return value

    def integer(
        self, parent: Mapping[str, Any], key: str, low: int, high: int, path: str = ""
    ) -> int:
        value: int = self.member(parent, key, int, path)
        if not low <= value <= high:
            self.fail(f"{path}{key} is {value}, not within {low}..{high}")
        return value

    def number(self, parent: Mapping[str, Any], key: str, path: str) -> float:
        value = parent.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(f"{path}{key} is not a number")
        return value

    def sha256(self, parent: Mapping[str, Any], path: str) -> None:
        if not _SHA256.fullmatch(self.member(parent, "sha256", str, path)):
            self.fail(f"{path}sha256 is not 64 hexadecimal digits")

    def ids(self, value: Any, num_tokens: int, path: str) -> None:
        for item in self.typed(value, list, path):
            if not 0 <= self.typed(item, int, path) < num_tokens:
                self.fail(f"{path} has id {item}, not within 0..{num_tokens - 1}")

    def objects(
        self, parent: Mapping[str, Any], key: str, path: str = ""
    ) -> list[tuple[str, dict[str, Any]]]:
        items = self.member(parent, key, list, path)
        named = [(f"{path}{key}[{index}]", item) for index, item in enumerate(items)]
        return [(f"{name}.", self.typed(item, dict, name)) for name, item in named]


def check_meta(meta: Any, where: str = "META") -> None:
    """Checks that META has every required member, of the right type, in range and consistent.

    Raises:
        FormatError: it names the member.
    """
    check = _Checker(where)
    check.typed(meta, dict, "the JSON value")
    model = check.member(meta, "model", dict, "")
    _check_model(check, model)
    check.member(meta, "rope", list, "")
    tokenizer = check.member(meta, "tokenizer", dict, "")
    _check_tokenizer(check, tokenizer, model["num_tokens"])
    quantization = check.member(meta, "quantization", dict, "")
    check.member(quantization, "recipe", str, "quantization.")
    check.member(quantization, "head", str, "quantization.")
    check.member(quantization, "tensors", dict, "quantization.")
    if "quality" in quantization:
        _check_calibration(check, quantization)
    check.member(meta, "kv", dict, "")
    source = check.member(meta, "source", dict, "")
    check.member(source, "kind", str, "source.")
    for path, item in check.objects(source, "files", "source."):
        check.member(item, "name", str, path)
        check.sha256(item, path)
    check.member(meta, "exporter", str, "")


def _check_calibration(check: _Checker, quantization: dict[str, Any]) -> None:
    check.member(quantization, "quality", str, "quantization.")
    path = "quantization.calibration."
    used = check.member(quantization, "calibration", dict, "quantization.")
    check.member(used, "origin", str, path)
    check.sha256(used, path)
    check.integer(used, "tokens", 1, 2**62, path)
    path = "quantization.measured."
    found = check.member(quantization, "measured", dict, "quantization.")
    for key in ("kl", "perplexity", "source_perplexity"):
        check.number(found, key, path)
    check.integer(found, "tokens", 1, 2**62, path)


def _check_model(check: _Checker, model: dict[str, Any]) -> None:
    path = "model."
    architecture = check.member(model, "architecture", str, path)
    if len(architecture) > spec.MAX_ARCHITECTURE_BYTES or not _NAME.fullmatch(architecture):
        check.fail(f"model.architecture {architecture[:40]!r} is not a name")
    for key, (low, high) in _MODEL_INTEGERS.items():
        check.integer(model, key, low, high, path)
    for key, (least, most) in _MODEL_NUMBERS.items():
        value = check.number(model, key, path)
        if not least <= value <= most:
            check.fail(f"model.{key} is {value}, not within {least}..{most}")
    for key in _MODEL_FLAGS:
        check.member(model, key, bool, path)
    for key in _OPTIONAL_FLAGS:
        check.typed(model.get(key, False), bool, path + key)
    if check.member(model, "activation", str, path) not in _ACTIVATIONS:
        check.fail(f"model.activation {model['activation']!r} is not one of {_ACTIVATIONS}")
    if check.member(model, "kv_format", str, path) not in _KV_FORMATS:
        check.fail(f"model.kv_format {model['kv_format']!r} is not one of {_KV_FORMATS}")
    if model["head_dim"] % spec.HEAD_DIM_MULTIPLE:
        check.fail(f"model.head_dim {model['head_dim']} is not a multiple of 16")
    if model["num_heads"] % model["num_kv_heads"]:
        check.fail("model.num_heads is not a multiple of model.num_kv_heads")
    widths = (model["hidden_size"], model["ffn_size"], model["num_heads"] * model["head_dim"])
    if model.get("has_hadamard", False) and any(width % spec.GROUP_COLS for width in widths):
        check.fail("model.has_hadamard is set, and a matrix has columns that 32 does not divide")
    if model["num_tokens"] > model["vocab_size"]:
        check.fail("model.num_tokens is larger than model.vocab_size")
    layers = check.objects(model, "layers", path)
    if len(layers) != model["num_layers"]:
        check.fail(f"model.layers has {len(layers)} entries, not {model['num_layers']}")
    for name, layer in layers:
        check.integer(layer, "rope", 0, model["num_ropes"] - 1, name)
        check.integer(layer, "window", 0, spec.MAX_CONTEXT, name)


def _check_tokenizer(check: _Checker, tokenizer: dict[str, Any], num_tokens: int) -> None:
    path = "tokenizer."
    add_bos = check.member(tokenizer, "add_bos", bool, path)
    if "bos_id" not in tokenizer:
        check.fail("tokenizer.bos_id is missing")
    if tokenizer["bos_id"] is not None:
        check.integer(tokenizer, "bos_id", 0, num_tokens - 1, path)
    elif add_bos:
        check.fail("tokenizer.add_bos is set, but there is no tokenizer.bos_id")
    check.ids(tokenizer.get("eos_ids"), num_tokens, "tokenizer.eos_ids")
    check.member(tokenizer, "is_synthesised", bool, path)
    for key in check.member(tokenizer, "special_tokens", dict, path):
        check.member(tokenizer["special_tokens"], key, str, "tokenizer.special_tokens.")


def check_test_vectors(vectors: Any, num_tokens: int, where: str = "TEST_VECTORS") -> None:
    """Checks the structure of TEST_VECTORS and that its ids exist.

    Raises:
        FormatError: it names the member.
    """
    check = _Checker(where)
    check.typed(vectors, dict, "the JSON value")
    readers: dict[str, Callable[[str, dict[str, Any]], None]] = {
        "texts": lambda path, item: _check_members(check, path, item, {"text": str}),
        "chats": lambda path, item: _check_members(
            check, path, item, {"messages": list, "add_generation_prompt": bool, "rendered": str}
        ),
        "greedy": lambda path, item: check.ids(
            item.get("continuation"), num_tokens, f"{path}continuation"
        ),
    }
    for key, read in readers.items():
        for path, item in check.objects(vectors, key):
            check.ids(item.get("ids"), num_tokens, f"{path}ids")
            read(path, item)


def _check_members(
    check: _Checker, path: str, item: dict[str, Any], kinds: Mapping[str, type]
) -> None:
    for key, kind in kinds.items():
        check.member(item, key, kind, path)
