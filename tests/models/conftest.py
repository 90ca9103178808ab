"""Tiny random models, each with its transformers model and our description of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgellm.models import ModelDescription, apply_rewrite, find_hf
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A transformers model and what we read from the folder it was saved to."""

    model: Any
    config: dict[str, Any]
    description: ModelDescription
    tensors: dict[str, Float32Array]

    def reference(self, **options: Any) -> ReferenceModel:
        return ReferenceModel(self.description, self.tensors.__getitem__, **options)

    def oracle(self, ids: npt.NDArray[np.int_]) -> Float32Array:
        """Logits (n, vocab) of transformers."""
        import torch

        with torch.no_grad():
            logits: Float32Array = self.model(torch.tensor(ids)[None]).logits[0].numpy()
        return logits


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Makes a pair: `make_pair("Qwen2", hidden_size=56)`; the options are those of the config."""
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    safetensors = pytest.importorskip("safetensors.numpy", reason="to read what it saved")

    def make(family: str, **options: Any) -> Pair:
        config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
        config = getattr(transformers, config_name)(**{**SIZES, **options})
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        # As transformers starts them, norms and biases are constant and weights tiny: a mistake
        # in them would not show.
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                spread = 0.2 if tensor.ndim == 1 else 1.5 / tensor.shape[-1] ** 0.5
                centre = 0.0 if tensor.ndim == 2 or family == "Gemma3" else 1.0
                tensor.normal_(0.0 if name.endswith("bias") else centre, spread)
        folder: Path = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        spec = find_hf(saved)
        description = spec.model_from_hf(saved)
        stored = safetensors.load_file(folder / "model.safetensors")
        sources = spec.sources("hf", description)
        assert {one.source_name: one.shape for one in sources} == {
            name: array.shape for name, array in stored.items()
        }
        tensors = {
            one.canonical_name: apply_rewrite(one.rewrite, stored[one.source_name], description)
            for one in sources
        }
        return Pair(model=model, config=saved, description=description, tensors=tensors)

    return make


@pytest.fixture(scope="session")
def ids() -> npt.NDArray[np.int_]:
    """40 token ids of the tiny vocabulary."""
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], 40)
