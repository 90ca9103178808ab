"""Makes an `.edge` file of a foreign model.

Weights stream: a piece of a few million is read, rewritten, quantised and written at a time, on all
cores; the bytes do not depend on how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from edgellm._native import version
from edgellm.errors import UnsupportedModelError
from edgellm.exporters.carry import summarise
from edgellm.exporters.kv_gate import choose_kv, measure_int8
from edgellm.exporters.open_source import open_source
from edgellm.exporters.plan import FileTensor, HeadFormat, plan_tensors
from edgellm.exporters.quality import (
    QUALITIES,
    Calibrated,
    QualityName,
    calibrate,
    measure_card,
    refuse_budget,
)
from edgellm.exporters.source import ModelSource
from edgellm.exporters.vectors import (
    chat_vectors,
    greedy_vectors,
    make_templates,
    make_tokenizer,
    text_vectors,
)
from edgellm.exporters.weights import Progress, write_weights
from edgellm.format import EdgeWriter, SectionType
from edgellm.format.meta import canonical_json
from edgellm.format.temporary import refuse_inputs
from edgellm.text import Tokenizer
from edgellm.types import TensorFormat

__all__ = [
    "DEFAULT_BITS",
    "DEFAULT_HEAD",
    "ExportOptions",
    "ExportPlan",
    "ExportReport",
    "check_plan",
    "export_model",
    "plan_export",
]

# What --head auto means without calibration. Measured (KL divergence of the engine's logits from
# the float32 forward pass with the source's weights, nats a token, first 1,024/512/384 tokens of a
# wikitext-2 excerpt):
#            SmolLM2-135M   Gemma 3 270M   Qwen2.5-Coder-0.5B
#     q8     0.031          0.130          0.058
#     e4     0.102          0.176          0.067
DEFAULT_HEAD: Final[HeadFormat] = "q8"
DEFAULT_BITS: Final = 5.0  # a weight, of a calibrated export with --head auto
RECIPE: Final = "e4 fitted without calibration"
CALIBRATED_RECIPE: Final = "e4 with error feedback on calibration text"

_HEAD_NAMES: Final = {TensorFormat.E4: "e4", TensorFormat.E5: "e5", TensorFormat.E8: "q8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to export.

    Attributes:
        head: Format of embedding and head: "e4" (4.5 bits), "q8" (8.1 bits), "auto": as `bits`
            decides, `DEFAULT_HEAD` with quality "fast".
        threads: Threads to use; None is one per CPU this process may use.
        quality: "fast" rounds the weights as they are; "balanced" and "best" calibrate.
        calibration: A text to calibrate on; None is ours and one that the model writes.
        bits: Bits a weight, over the whole file, up to which the matrices that hurt most in 4 bits
            get 5 or 8, embedding and head too if `head` is "auto"; None is `DEFAULT_BITS` if
            `head` is "auto", else no matrix gets more.
    """

    head: Literal["e4", "q8", "auto"] = "auto"
    threads: int | None = None
    quality: QualityName = "fast"
    calibration: Path | None = None
    bits: float | None = None

    @property
    def budget(self) -> float | None:
        """Bits a weight to spend, None if none are."""
        if self.quality == "fast" or self.bits is not None:
            return self.bits
        return DEFAULT_BITS if self.head == "auto" else None

    @property
    def is_head_free(self) -> bool:
        """Whether `budget` decides about embedding and head too."""
        return self.head == "auto"

    def __post_init__(self) -> None:
        if self.head not in ("e4", "q8", "auto"):
            raise ValueError(f"head is {self.head!r}, not 'e4', 'q8' or 'auto'")
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ValueError(f"threads is {self.threads}, not within 1..1024")
        if self.quality not in ("fast", *QUALITIES):
            raise ValueError(f"quality is {self.quality!r}, not 'best', 'balanced' or 'fast'")
        if self.quality == "fast" and (self.calibration is not None or self.bits is not None):
            raise ValueError("calibration and bits go with quality 'balanced' or 'best'")
        if self.bits is not None and not 4.5 <= self.bits <= 8.2:
            raise ValueError(f"bits is {self.bits}, not within 4.5..8.2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPlan:
    """What an export will do; nothing has been written.

    Attributes:
        source: The model.
        tokenizer: Its tokenizer, loaded.
        tensors: What each tensor becomes.
        head: Format of embedding and head.
        notes: What the user should know.
    """

    source: ModelSource
    tokenizer: Tokenizer
    tensors: tuple[FileTensor, ...]
    head: HeadFormat
    notes: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def num_weights(self) -> int:
        """Weights of all tensors."""
        return sum(tensor.rows * tensor.cols for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export did.

    Attributes:
        output: The file.
        model_id: SHA-256 of its section table, hexadecimal.
        file_bytes: Its size.
        plan: What was done.
        notes: What the user should know, such as test conversations that the template refused.
        rounding: For each number type of a quantised source, the relative RMS error of rounding
            "qkv", "o", "gate_up", "down", "embed" and "head" again; 0 if carried over exactly.
            Empty if weights were calibrated, or were not quantised.
    """

    output: Path
    model_id: str
    file_bytes: int
    plan: ExportPlan
    notes: tuple[str, ...]
    rounding: Mapping[str, Mapping[str, float]]


def plan_export(source: str | os.PathLike[str], options: ExportOptions | None = None) -> ExportPlan:
    """Reads everything but the weights and decides what becomes of each tensor.

    Args:
        source: A Hugging Face folder or a GGUF file.
        options: How to export.

    Returns:
        The plan.

    Raises:
        ModelNotFoundError: There is nothing of that name.
        FormatError: It is broken, or its tensors are not those of the architecture.
        UnsupportedModelError: Something in it is not supported.
        TemplateError: A chat template does not parse.
    """
    options = options or ExportOptions()
    model = open_source(source)
    head = DEFAULT_HEAD if options.head == "auto" else options.head
    tensors = tuple(plan_tensors(model, head))
    _check_readable(model, tensors)
    tokenizer = make_tokenizer(model)
    make_templates(model)
    notes = list(model.notes)
    padding = model.description.vocab_size - model.description.num_tokens
    if padding:
        notes.append(f"{padding} rows of the vocabulary have no token; they are never sampled")
    unreachable = tokenizer.vocab_size - model.description.num_tokens
    if unreachable > 0:
        notes.append(f"{unreachable} added tokens have no row in the embedding; they are not used")
    if not model.chat_templates:
        notes.append("the model has no chat template: it continues text, it does not chat")
    return ExportPlan(
        source=model, tokenizer=tokenizer, tensors=tensors, head=head, notes=tuple(notes)
    )


def check_plan(plan: ExportPlan, output: Path, options: ExportOptions) -> None:
    """Refuses what cannot be done.

    Args:
        plan: The plan.
        output: The file to write.
        options: How to export.

    Raises:
        ValueError: The output would overwrite the source or the calibration text, or the bits a
            weight are too few.
    """
    text = () if options.calibration is None else (options.calibration,)
    refuse_inputs(output, (*plan.source.files, *text))
    if options.bits is not None:
        refuse_budget(plan.tensors, options.bits, options.is_head_free)


def export_model(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Exports a model to an `.edge` file.

    The file appears under its name when it is whole and has been run once; until then an older file
    of that name stays as it is. The same model gives the same bytes.

    Args:
        source: A Hugging Face folder or a GGUF file.
        output: The file to write.
        options: How to export.
        progress: Called with the bytes of weights written and their total, in this thread.

    Returns:
        What was done.

    Raises:
        EdgeLLMError: One of its kinds; says what is wrong with the model or the disk.
        ValueError: As for `check_plan`.
    """
    return run_plan(plan_export(source, options), output, options, progress)


def run_plan(
    plan: ExportPlan,
    output: str | os.PathLike[str],
    options: ExportOptions | None = None,
    progress: Progress | None = None,
    calibrating: Progress | None = None,
) -> ExportReport:
    """Does what `plan_export` planned; arguments and errors as for `export_model`.

    `calibrating` is called with the layers calibrated and their total.
    """
    options = options or ExportOptions()
    output, model = Path(output), plan.source
    check_plan(plan, output, options)
    threads = options.threads or _num_cpus()
    if options.quality == "fast":
        return _write(plan, output, threads, progress)
    with calibrate(
        model,
        plan.tokenizer,
        plan.tensors,
        output,
        quality=options.quality,
        text=options.calibration,
        bits=options.budget,
        is_head_free=options.is_head_free,
        threads=threads,
        export_fast=lambda path: _write(plan, path, threads),
        progress=calibrating,
    ) as calibrated:
        made = replace(plan, tensors=calibrated.tensors)
        return _write(made, output, threads, progress, calibrated)


def _write(
    plan: ExportPlan,
    output: Path,
    threads: int,
    progress: Progress | None = None,
    calibrated: Calibrated | None = None,
) -> ExportReport:
    """Writes the file, with what was calibrated or the weights as they are."""
    model = plan.source
    chats, skipped = chat_vectors(model, plan.tokenizer)
    vectors: dict[str, Any] = {"texts": text_vectors(plan.tokenizer), "chats": chats, "greedy": []}
    with EdgeWriter(output) as writer:
        for tensor in plan.tensors:
            writer.add_tensor(
                tensor.name, tensor.format, tensor.rows, tensor.cols, section=tensor.section
            )
        _add_texts(writer, model)
        writer.allocate()
        made = None if calibrated is None else calibrated.made
        written = write_weights(writer, model, plan.tensors, threads, progress, made)
        meta = _meta(plan, written.digests)
        rounding = summarise(written.roundings)
        if rounding:
            meta["quantization"]["rounding"] = rounding
        if calibrated is not None:
            meta["model"] = calibrated.description.to_meta()
        writer.add_section(SectionType.META, canonical_json(meta))
        writer.add_section(SectionType.TEST_VECTORS, canonical_json(vectors))
        whole = writer.complete()
        meta |= choose_kv(meta["model"], measure_int8(whole, plan.tokenizer, threads))
        if calibrated is not None:
            measured = measure_card(model, calibrated, whole, threads)
            inputs = "transformed" if calibrated.description.has_hadamard else "equalised"
            recipe = f"inputs {inputs}, {CALIBRATED_RECIPE}"
            card = calibrated.card | {"recipe": recipe, "measured": measured}
            meta["quantization"] |= card
        writer.add_section(SectionType.META, canonical_json(meta), replace=True)
        vectors["greedy"] = greedy_vectors(
            whole, plan.tokenizer, chats, threads, kv=meta["model"]["kv_format"]
        )
        writer.add_section(SectionType.TEST_VECTORS, canonical_json(vectors), replace=True)
        model_id = writer.finish()
    return ExportReport(
        output=output,
        model_id=model_id,
        file_bytes=output.stat().st_size,
        plan=plan,
        notes=(*plan.notes, *skipped),
        rounding=rounding,
    )


def _check_readable(model: ModelSource, tensors: tuple[FileTensor, ...]) -> None:
    """Reads one row of each number type, so that one that cannot be read is known at once."""
    samples = {
        kind: part.source_name
        for tensor in tensors
        for part, kind in zip(tensor.parts, tensor.source_types, strict=True)
    }
    for name in samples.values():
        model.tensors.rows(name, 0, 1)


def _add_texts(writer: EdgeWriter, model: ModelSource) -> None:
    writer.add_section(SectionType.TOKENIZER, model.tokenizer_json)
    for name, template in model.chat_templates.items():
        try:
            writer.add_section(SectionType.CHAT_TEMPLATE, template.encode(), name)
        except ValueError:
            raise UnsupportedModelError(
                f"chat template {name!r}: the name is not of a-z, 0-9, dot and underscore, at "
                "most 32: rename it in the source"
            ) from None
    if model.generation_config is not None:
        writer.add_section(SectionType.GENERATION_CONFIG, model.generation_config)


def _meta(plan: ExportPlan, digests: list[str]) -> dict[str, Any]:
    source = plan.source
    folder = source.files[0].parent
    head = next(tensor for tensor in reversed(plan.tensors) if tensor.name in ("embed", "head"))
    return {
        "model": source.description.to_meta(),
        "rope": list(source.description.rope),
        "tokenizer": source.tokenizer.to_meta(),
        "quantization": {
            "recipe": RECIPE,
            "head": _HEAD_NAMES[head.format],
            "tensors": {
                tensor.name: " ".join(dict.fromkeys(tensor.source_types))
                for tensor in plan.tensors
                if tensor.parts
            },
        },
        "kv": {},
        "source": {
            "kind": source.kind,
            "files": [
                {"name": file.relative_to(folder).as_posix(), "sha256": digest}
                for file, digest in zip(source.files, digests, strict=True)
            ],
        },
        "exporter": f"edgellm {version()}",
    }


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
