"""The qualities of `edgellm export`: calibrates, and measures for the model card what it gave."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm._native import NativeModel, version
from edgellm.errors import FormatError
from edgellm.exporters.calibrated import Calibrator
from edgellm.exporters.calibration import (
    Calibration,
    digest,
    encode_windows,
    read_text,
    write_own_text,
)
from edgellm.exporters.equalize import ALPHAS, Alphas
from edgellm.exporters.error_feedback import Feedback
from edgellm.exporters.kv_gate import kl_sum, log_softmax
from edgellm.exporters.plan import FileTensor, read_whole
from edgellm.exporters.sensitivity import FORMATS
from edgellm.exporters.source import ModelSource
from edgellm.exporters.weights import Made, Progress
from edgellm.exporters.workers import workers
from edgellm.exporters.workspace import Workspace
from edgellm.format.spec import tensor_bytes
from edgellm.models import ModelDescription
from edgellm.models._hadamard import can_transform
from edgellm.text import Tokenizer
from edgellm.types import Float32Array, Int32Array, TensorFormat

__all__ = [
    "QUALITIES",
    "Calibrated",
    "Quality",
    "QualityName",
    "calibrate",
    "compare",
    "free_tensors",
    "measure_card",
    "refuse_budget",
]

QualityName: TypeAlias = Literal["best", "balanced", "fast"]

_WINDOW: Final = 512  # tokens
_NUM_HELD_OUT: Final = 2  # windows
_ROWS: Final = 64  # of logits at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What a quality costs.

    Attributes:
        windows: Most calibration windows, of 512 tokens.
        feedback: Steps beside the weighted fit.
        alphas: How far inputs are equalised that do not go through Hadamard transforms.
        has_hadamard: Whether they do, where the model's widths allow it.
        sensitivity_tokens: To measure on what each matrix costs in 4 bits, at most a window.
    """

    windows: int
    feedback: Feedback
    alphas: Alphas = ALPHAS
    has_hadamard: bool = True
    sensitivity_tokens: int = 128


QUALITIES: Final = {
    "balanced": Quality(windows=24, feedback=Feedback()),
    "best": Quality(windows=96, feedback=Feedback(sweeps=4), sensitivity_tokens=512),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A model whose layers are quantised.

    Attributes:
        description: The model of the file.
        tensors: What became of each tensor.
        made: For a section its tensors.
        held_out: (m, length) int32: windows that nothing was fitted to.
        hidden: What the float model's head multiplies there, (m * length, hidden).
        card: What META's "quantization" says of it.
    """

    description: ModelDescription
    tensors: tuple[FileTensor, ...]
    made: Made
    held_out: Int32Array
    hidden: Float32Array
    card: dict[str, Any]


@contextmanager
def calibrate(
    source: ModelSource,
    tokenizer: Tokenizer,
    tensors: tuple[FileTensor, ...],
    output: Path,
    *,
    quality: Literal["best", "balanced"],
    text: Path | None,
    bits: float | None,
    is_head_free: bool,
    threads: int,
    export_fast: Callable[[Path], object],
    progress: Progress | None,
) -> Iterator[Calibrated]:
    """Quantises a model's layers for the inputs they meet.

    The work lies beside the output until the file is whole, which is when this context ends
    without an error; after one, the same export goes on from it.

    Args:
        source: The model.
        tokenizer: Its tokenizer.
        tensors: What becomes of each tensor.
        output: The file to be.
        quality: How thoroughly.
        text: The user's calibration text, or None for ours and the model's own.
        bits: Bits a weight, over all weights, up to which matrices get more than 4.
        is_head_free: Whether `bits` decides about embedding and head too.
        threads: Threads to use.
        export_fast: Writes the model, quantised without calibration, to a path.
        progress: Called with layers done and their number, all passes together.

    Yields:
        The quantised layers.

    Raises:
        EdgeLLMError: One of its kinds; says what is wrong.
    """
    steps = _suited(QUALITIES[quality], source.description)
    content = read_text(text)
    text_hash = hashlib.sha256(content.encode()).hexdigest()
    task = [repr(steps), bits, is_head_free, text is None, text_hash]
    advance = _counter(progress, source.description.num_layers * (3 if bits else 2))
    with Workspace(output, _fingerprint(source, tensors, task)) as workspace:
        calibration = _gather(
            source, tokenizer, content, text, steps.windows, workspace, threads, export_fast
        )
        with workers(threads) as pool:
            worker = Calibrator(
                source,
                tensors,
                calibration,
                workspace,
                alphas=steps.alphas,
                has_hadamard=steps.has_hadamard,
                feedback=steps.feedback,
                sensitivity_tokens=steps.sensitivity_tokens,
                pool=pool,
                advance=advance,
            )
            hidden = worker.collect()
            if worker.description.has_embed_scale:
                tensors = (*tensors, _embed_scale(worker.description.hidden_size))
            if bits is not None:
                tensors = _spend(worker, tensors, bits, is_head_free, workspace)
            worker.quantise({tensor.name: tensor.format for tensor in tensors})
        used = {
            "origin": calibration.origin,
            "sha256": calibration.sha256,
            "tokens": int(calibration.windows.size),
        }
        yield Calibrated(
            description=worker.description,
            tensors=tensors,
            made=worker.load,
            held_out=calibration.held_out,
            hidden=hidden,
            card={"quality": quality, "calibration": used},
        )
        workspace.remove()


def _suited(steps: Quality, description: ModelDescription) -> Quality:
    """What is done of a quality: inputs that are transformed are not equalised."""
    if steps.has_hadamard and can_transform(description):
        return replace(steps, alphas=Alphas())
    return replace(steps, has_hadamard=False)


def _counter(progress: Progress | None, total: int) -> Callable[[], None]:
    """What is called after every layer of every pass."""
    done = itertools.count(1)

    def advance() -> None:
        if progress is not None:
            progress(next(done), total)

    return advance


def _fingerprint(
    source: ModelSource, tensors: tuple[FileTensor, ...], task: list[Any]
) -> dict[str, Any]:
    """What the work depends on."""
    # times of change too: those of modification can be set, as archives and packages do
    stats = [(file.name, file.stat()) for file in source.files]
    return {
        "source": [
            [name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            for name, stat in stats
        ],
        "formats": [[tensor.name, int(tensor.format)] for tensor in tensors],
        "task": task,
        "exporter": version(),
    }


def measure_card(
    source: ModelSource, calibrated: Calibrated, path: Path, threads: int
) -> dict[str, Any]:
    """KL divergence of the finished file from the float model, and both perplexities.

    Args:
        source: The model.
        calibrated: What `calibrate` made of it.
        path: The whole file.
        threads: Threads to use.

    Returns:
        "kl" in nats a token, "perplexity" of the file and "source_perplexity", over "tokens" of
        the held-out windows.
    """
    sums = compare(source, calibrated.held_out, calibrated.hidden, path, threads).sum(axis=0)
    tokens = calibrated.held_out.size
    predicted = tokens - len(calibrated.held_out)
    return {
        "kl": round(float(sums[0]) / tokens, 5),
        "perplexity": round(float(np.exp(sums[1] / predicted)), 4),
        "source_perplexity": round(float(np.exp(sums[2] / predicted)), 4),
        "tokens": int(tokens),
    }


def compare(
    source: ModelSource, windows: Int32Array, hidden: Float32Array, path: Path, threads: int
) -> npt.NDArray[np.float64]:
    """A file beside the float model it was made of.

    Args:
        source: The model.
        windows: (m, length) int32.
        hidden: What the float model's head multiplies there, (m * length, hidden).
        path: The whole file.
        threads: Threads to use.

    Returns:
        (n, 3) sums in nats over each run of at most 64 tokens: KL divergence, cross entropy of the
        file, that of the float model.
    """
    name = "embed" if source.description.is_tied else "head"
    wanted = source.spec.sources(source.kind, source.description)
    head = read_whole(source, next(item for item in wanted if item.canonical_name == name))
    known = source.description.num_tokens
    length = windows.shape[1]
    sums = []
    with NativeModel(path, threads=threads, kv="f16") as model:
        for number, ids in enumerate(windows):
            session = model.create_session(length)
            for first in range(0, length, _ROWS):
                rows = ids[first : first + _ROWS]
                start = number * length + first
                expected = (hidden[start : start + len(rows)] @ head.T)[:, :known]
                found = session.prefill(rows.tolist(), len(rows))[:, :known]
                following = ids[first + 1 : first + 1 + len(rows)]
                at = np.arange(len(following)), following
                losses = [-float(log_softmax(logits)[at].sum()) for logits in (found, expected)]
                sums.append([kl_sum(expected, found), *losses])
            session.close()
    return np.asarray(sums)


def _gather(
    source: ModelSource,
    tokenizer: Tokenizer,
    content: str,
    text: Path | None,
    count: int,
    workspace: Workspace,
    threads: int,
    export_fast: Callable[[Path], object],
) -> Calibration:
    """Calibration windows; where the user gave no text, the model writes as many as ours has."""
    known = workspace.load("windows")
    length = min(_WINDOW, source.description.max_context)
    bos = source.tokenizer.bos_id if source.tokenizer.add_bos else None
    if known is None:
        windows = encode_windows(tokenizer, content, bos, length)
        if len(windows) < 2 * _NUM_HELD_OUT:
            raise FormatError(
                f"the calibration text has {len(windows)} windows of {length} tokens; it needs "
                f"{2 * _NUM_HELD_OUT} or more"
            )
        held_out, windows = windows[:_NUM_HELD_OUT], windows[_NUM_HELD_OUT:]
        wanted = count if text is not None else count // 2
        spread = np.linspace(0, len(windows) - 1, min(wanted, len(windows))).astype(int)
        chosen = windows[spread]
        if text is None:
            path = workspace.path("fast.edge")
            export_fast(path)
            own = write_own_text(path, windows, len(chosen), length, bos, threads)
            path.unlink()
            chosen = np.concatenate([chosen, own])
        known = {"windows": chosen, "held_out": held_out}
        workspace.save("windows", **known)
    return Calibration(
        windows=known["windows"],
        held_out=known["held_out"],
        sha256=digest(known["windows"]),
        origin="own" if text is None else text.name,
    )


def free_tensors(tensors: tuple[FileTensor, ...], is_head_free: bool) -> frozenset[str]:
    """Names of the matrices whose format a budget decides."""
    return frozenset(
        tensor.name
        for tensor in tensors
        if tensor.format != TensorFormat.F32 and (is_head_free or tensor.section != "globals")
    )


def refuse_budget(tensors: tuple[FileTensor, ...], bits: float, is_head_free: bool) -> None:
    """Refuses a budget that the smallest formats exceed.

    Args:
        tensors: What becomes of each tensor.
        bits: Bits a weight, over all weights.
        is_head_free: Whether `bits` decides about embedding and head too.

    Raises:
        ValueError: It is too small; says what would do.
    """
    free = free_tensors(tensors, is_head_free)
    least = sum(
        tensor_bytes(FORMATS[0], tensor.rows, tensor.cols) if tensor.name in free else tensor.size
        for tensor in tensors
    )
    needed = 8 * least / sum(tensor.rows * tensor.cols for tensor in tensors)
    if bits < needed:
        raise ValueError(
            f"{bits:g} bits a weight are too few: with {FORMATS[0].name} wherever it may be, the "
            f"file has {math.ceil(100 * needed) / 100:.2f}"
        )


def _spend(
    worker: Calibrator,
    tensors: tuple[FileTensor, ...],
    bits: float,
    is_head_free: bool,
    workspace: Workspace,
) -> tuple[FileTensor, ...]:
    """The tensors with the formats that `bits` a weight allow."""
    known = workspace.load("formats")
    if known is None:
        free = free_tensors(tensors, is_head_free)
        num_weights = sum(tensor.rows * tensor.cols for tensor in tensors)
        fixed = sum(tensor.size for tensor in tensors if tensor.name not in free)
        chosen = worker.choose(int(bits * num_weights / 8) - fixed, is_head_free)
        known = {name: np.asarray(int(kind)) for name, kind in chosen.items()}
        workspace.save("formats", **known)
    formats = {name: TensorFormat(int(value)) for name, value in known.items()}
    return tuple(
        replace(tensor, format=formats.get(tensor.name, tensor.format)) for tensor in tensors
    )


def _embed_scale(hidden: int) -> FileTensor:
    return FileTensor(
        name="embed_scale",
        section="globals",
        format=TensorFormat.F32,
        rows=1,
        cols=hidden,
        parts=(),
        source_types=(),
    )
