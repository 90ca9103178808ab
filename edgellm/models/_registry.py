"""All architectures: every file of this folder that has a SPEC."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

import edgellm.models
from edgellm.errors import UnsupportedModelError
from edgellm.models._spec import ModelSpec


@functools.cache
def specs() -> tuple[ModelSpec, ...]:
    """The SPECs, in the order of their files' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(edgellm.models.__path__))
    modules = [
        importlib.import_module(f"edgellm.models.{name}") for name in names if name[0] != "_"
    ]
    return tuple(module.SPEC for module in modules)


def find_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The SPEC for a Hugging Face config.

    Args:
        config: the content of `config.json`; its "architectures" decides.

    Raises:
        UnsupportedModelError: none is named, or none of those named is supported.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise UnsupportedModelError(
            "config.json: architectures is missing; it must name the model's class, such as "
            "LlamaForCausalLM"
        )
    for spec in specs():
        if names[0] in spec.hf_architectures:
            return spec
    supported = ", ".join(name for spec in specs() for name in spec.hf_architectures)
    raise UnsupportedModelError(
        f"config.json: the architecture {names[0]!r} is not supported; edgellm supports {supported}"
    )


def find_gguf(architecture: str) -> ModelSpec:
    """The SPEC for a GGUF's `general.architecture`.

    Args:
        architecture: the value of that key.

    Raises:
        UnsupportedModelError: it is not supported.
    """
    for spec in specs():
        if architecture in spec.gguf_architectures:
            return spec
    supported = ", ".join(name for spec in specs() for name in spec.gguf_architectures)
    raise UnsupportedModelError(
        f"GGUF metadata: general.architecture {architecture!r} is not supported; edgellm supports "
        f"{supported}"
    )
