"""The reference of an `.edge` file computes with exactly the weights the file stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edge_files import VECTORS, changed_meta, write_edge

from edgellm.errors import FormatError
from edgellm.format import EdgeWriter, SectionType
from edgellm.format.layout import dequantize, pack_e8
from edgellm.format.meta import canonical_json
from edgellm.models import ModelDescription, file_shapes, find_hf, unfuse
from edgellm.models._reference import ReferenceModel
from edgellm.types import Float32Array, TensorFormat

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 40,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": False,
}


def write_model(path: Path, model: ModelDescription) -> dict[str, Float32Array]:
    """Writes a file of random int8 weights; returns what its tensors stand for."""
    random = np.random.default_rng(0)
    tensors: dict[str, Float32Array] = {}
    meta = changed_meta(model=model.to_meta(), rope=list(model.rope))
    with EdgeWriter(path) as writer:
        stored = {}
        for name, (rows, cols) in file_shapes(model).items():
            kind = TensorFormat.F32 if rows == 1 else TensorFormat.E8
            if name.startswith("rope."):
                data = model.inv_freqs[int(name.split(".")[1])].view(np.uint8)
            elif kind == TensorFormat.F32:
                data = random.standard_normal(cols).astype(np.float32).view(np.uint8)
            else:
                codes = random.integers(-127, 128, (rows, cols), dtype=np.int8)
                scales = random.uniform(0.0005, 0.001, (rows, -(-cols // 256)))
                data = pack_e8(codes, scales.astype(np.float32))
            stored[name] = data
            tensors[name] = dequantize(data, kind, rows, cols)
            parts = name.split(".")
            section = ".".join(parts[:2]) if parts[0] == "layers" else "globals"
            writer.add_tensor(name, kind, rows, cols, section=section)
        writer.add_section(SectionType.META, canonical_json(meta))
        writer.add_section(SectionType.TOKENIZER, b'{"version":"1.0"}')
        writer.allocate()
        for name, data in stored.items():
            writer.write_tensor(name, data)
        writer.add_section(SectionType.TEST_VECTORS, canonical_json(VECTORS))
        writer.finish()
    return tensors


def test_the_reference_of_a_file_is_that_of_its_dequantised_tensors(tmp_path: Path) -> None:
    model = find_hf(CONFIG).model_from_hf(CONFIG)
    tensors = write_model(tmp_path / "tiny.edge", model)
    reference = ReferenceModel.from_edge(tmp_path / "tiny.edge")
    assert reference.description == model
    ids = np.arange(20)
    expected = ReferenceModel(model, unfuse(model, tensors.__getitem__)).forward(ids)
    assert (reference.forward(ids) == expected).all()


def test_a_file_without_all_tensors_of_its_model_is_refused(tmp_path: Path) -> None:
    write_edge(tmp_path / "few.edge")
    with pytest.raises(FormatError, match=r"tensor rope\.0\.inv_freq"):
        ReferenceModel.from_edge(tmp_path / "few.edge")


def test_a_file_whose_tensor_has_another_shape_is_refused(tmp_path: Path) -> None:
    model = find_hf(CONFIG).model_from_hf(CONFIG)
    write_model(tmp_path / "tiny.edge", model)
    other = find_hf(CONFIG).model_from_hf({**CONFIG, "intermediate_size": 90})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDescription, "from_meta", classmethod(lambda *_: other))
        with pytest.raises(FormatError, match=r"layers\.0\.gate_up is missing or not \(192, 96\)"):
            ReferenceModel.from_edge(tmp_path / "tiny.edge")
