"""ONNX Runtime as a witness: logits of an exported folder, computed without any code of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm._native import ModelInfo, NativeModel
from edgellm.errors import EdgeLLMError
from edgellm.exporters.kv_gate import log_softmax
from edgellm.exporters.to_onnx import MODEL_NAME, export_onnx, load_package
from edgellm.format import EdgeFile
from edgellm.models._reference import ReferenceCache, ReferenceModel
from edgellm.types import Float32Array

__all__ = ["Agreement", "OnnxModel", "compare"]

_Forward: TypeAlias = Callable[[list[int]], Float32Array]  # logits of a sequence's next piece

# Mean nats a token. ONNX Runtime computes in float32; what the runtime rounds, activations to int8
# and keys and values to float16, may cost this much of any model, and of one that it costs more as
# much as it costs our reference, with room: the two round at different places.
_MAX_MEAN_KL: Final = 0.003
_ROOM: Final = 2.0
_MAX_TOKENS: Final = 512
_LOGITS: Final = 1 << 25  # held at a time, 128 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The runtime's logits against ONNX Runtime's.

    Attributes:
        witness: ONNX Runtime's name and version.
        num_tokens: Positions compared.
        mean_kl: KL(ONNX Runtime || edgellm), nats a token.
        allowed_kl: What it may be.
        max_kl: The largest of a position.
        top1: Share of positions with the same most probable token.
        greedy: For each greedy continuation of the file, how many of its tokens ONNX Runtime gives
            before the first other one, and how many there are.
    """

    witness: str
    num_tokens: int
    mean_kl: float
    allowed_kl: float
    max_kl: float
    top1: float
    greedy: tuple[tuple[int, int], ...]


class OnnxModel:
    """An ONNX folder open in ONNX Runtime, on the CPU.

    Args:
        folder: as `export_onnx` writes it.
        threads: None: as many as ONNX Runtime likes.

    Raises:
        EdgeLLMError: ONNX Runtime refuses the model.
        MissingExtraError: onnxruntime is not installed.
    """

    def __init__(self, folder: Path, *, threads: int | None = None) -> None:
        runtime = load_package("onnxruntime")
        self.version: str = runtime.__version__
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # what it would print is in the exception as well
        options.intra_op_num_threads = threads or 0
        # Repacked copies of the weights would take their size again and gain little here.
        options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self._session = runtime.InferenceSession(
                str(folder / MODEL_NAME), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exceptions have no common base
            raise EdgeLLMError(f"{folder / MODEL_NAME}: ONNX Runtime: {error}") from None
        self._empty = {
            value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
            for value in self._session.get_inputs()
            if value.name.startswith("past_key_values.")
        }

    def logits(self, ids: Sequence[int], past: dict[str, Float32Array]) -> Float32Array:
        """Logits of a piece of a sequence.

        Args:
            ids: n token ids.
            past: keys and values of the tokens before them, empty for the first; receives these.

        Returns:
            (n, vocab) float32, padding rows of the vocabulary included.
        """
        before = past or self._empty
        start = next(iter(before.values())).shape[2]
        inputs: dict[str, Any] = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, start + len(ids)), np.int64),
            "position_ids": start + np.arange(len(ids))[None],
        }
        names = [name.replace("past_key_values", "present") for name in before]
        logits, *present = self._session.run(["logits", *names], inputs | before)
        past.update(zip(before, present, strict=True))
        found: Float32Array = logits[0]
        return found


def compare(path: Path, native: NativeModel, *, threads: int | None = None) -> Agreement:
    """Exports a model to a temporary folder and runs it there, in ONNX Runtime.

    The folder takes about 1.3 times the file on the disk (set TMPDIR for another place). ONNX
    Runtime needs that in memory, and the largest matrix, head or embedding, in float32. Where the
    runtime differs by more than 0.003 nats a token, our reference runs over the same tokens, with
    the runtime's roundings and without, its weights in float32.

    Args:
        path: the `.edge` file.
        native: the same file in the runtime.
        threads: as for OnnxModel.

    Raises:
        EdgeLLMError: as `export_onnx` and OnnxModel.
    """
    with EdgeFile.open(path) as file:
        vectors = file.test_vectors
    ids = _sequence(vectors, native.info.max_context)
    load_package("onnxruntime")  # before the work
    session = native.create_session(len(ids))
    with TemporaryDirectory(prefix="edgellm-") as folder:
        output = Path(folder) / "onnx"
        export_onnx(path, output, "int4")
        model = OnnxModel(output, threads=threads)
        past: dict[str, Float32Array] = {}
        kl, is_same = _divergence(
            lambda piece: model.logits(piece, past),
            lambda piece: session.prefill(piece, len(piece)),
            ids,
            native.info,
        )
        greedy = tuple(_follow(model, vector, native.info) for vector in vectors["greedy"])
        witness = f"ONNX Runtime {model.version}"
    session.close()
    mean_kl, allowed_kl = float(kl.mean()), _MAX_MEAN_KL
    if mean_kl > allowed_kl:
        del model
        allowed_kl = max(allowed_kl, _ROOM * _rounding_kl(path, ids, native.info))
    return Agreement(
        witness=witness,
        num_tokens=len(ids),
        mean_kl=mean_kl,
        allowed_kl=allowed_kl,
        max_kl=float(kl.max()),
        top1=float(is_same.mean()),
        greedy=greedy,
    )


def _rounding_kl(path: Path, ids: list[int], info: ModelInfo) -> float:
    """What the runtime's roundings cost our reference, mean nats a token."""
    exact = ReferenceModel.from_edge(path)
    rounded = exact.rounding(activations="q8", kv="float16")
    caches = ReferenceCache(exact.description), ReferenceCache(exact.description)
    kl, _ = _divergence(
        lambda piece: exact.forward(piece, caches[0]),
        lambda piece: rounded.forward(piece, caches[1]),
        ids,
        info,
    )
    return float(kl.mean())


def _sequence(vectors: dict[str, Any], limit: int) -> list[int]:
    """The file's chats as one sequence, or its texts where it has no template."""
    for kind in ("chats", "texts"):
        ids: list[int] = [i for vector in vectors[kind] for i in vector["ids"]]
        if ids:
            return ids[: min(_MAX_TOKENS, limit)]
    raise EdgeLLMError("verify: the file has neither chats nor texts to compare on")


def _divergence(
    expect: _Forward, find: _Forward, ids: list[int], info: ModelInfo
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """KL(expected || found) at each position, and whether both choose the same token.

    The sequence goes through both caches in pieces.
    """
    known = info.num_tokens  # the rest are padding
    at_once = max(1, _LOGITS // info.vocab_size)
    kl, is_same = np.empty(len(ids)), np.empty(len(ids), np.bool_)
    for start in range(0, len(ids), at_once):
        piece = ids[start : start + at_once]
        expected, found = expect(piece)[:, :known], find(piece)[:, :known]
        is_same[start : start + at_once] = expected.argmax(axis=1) == found.argmax(axis=1)
        for row, pair in enumerate(zip(expected, found, strict=True), start):
            p, q = (log_softmax(logits) for logits in pair)
            kl[row] = np.exp(p) @ (p - q)
    return kl, is_same


def _follow(model: OnnxModel, vector: dict[str, Any], info: ModelInfo) -> tuple[int, int]:
    """One pass over prompt and continuation tells what greedy decoding would have chosen."""
    prompt, wanted = vector["ids"], vector["continuation"]
    logits = model.logits(prompt + wanted[:-1], {})[len(prompt) - 1 :, : info.num_tokens]
    differs = np.flatnonzero(logits.argmax(axis=1) != np.array(wanted))
    return int(differs[0]) if differs.size else len(wanted), len(wanted)
