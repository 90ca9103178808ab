"""Perplexity of models over a text, and their divergence from a reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.eval.distributions import FullRows, Rows, block_rows, log_softmax
from edgellm.eval.models import EdgeModel, LogitsModel, SourceModel, open_model, starts_with
from edgellm.eval.reference_file import (
    MAGIC,
    ReferenceFile,
    ReferenceHeader,
    ReferenceWriter,
    split_top,
)
from edgellm.eval.results import (
    Comparison,
    Difference,
    Divergence,
    EvalOptions,
    Evaluation,
    ModelPath,
    TextInfo,
)
from edgellm.eval.statistics import mean_estimate, proportion_estimate, quantile_estimate
from edgellm.eval.windows import Windows, cut, load_text_file

__all__ = ["compare", "evaluate"]

Progress: TypeAlias = Callable[[int, int], None]


def evaluate(
    model: ModelPath,
    reference: ModelPath | None = None,
    options: EvalOptions | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measures a model; arguments and errors as for `compare`.

    Returns:
        Its figures. The same files give the same figures.
    """
    return compare([model], reference, options, progress).evaluations[0]


def compare(
    models: Sequence[ModelPath],
    reference: ModelPath | None = None,
    options: EvalOptions | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measures models over the same tokens.

    Args:
        models: `.edge` files; a GGUF file or Hugging Face folder is run in float32.
        reference: Another of these, or a file that `save_reference` made; None: perplexity only.
        options: How to evaluate.
        progress: Called with the tokens that are done and their total.

    Returns:
        Their figures.

    Raises:
        EdgeLLMError: One of its kinds; says what is wrong with a file.
        ValueError: The models do not share a vocabulary, the text is too short, or an option does
            not fit the reference file.
    """
    options = options or EvalOptions()
    with contextlib.ExitStack() as stack:
        saved = _open_saved(reference, stack)
        context = options.context or (saved.header.context if saved else 512)

        def open_(path: ModelPath) -> LogitsModel:
            model = open_model(
                path,
                context=context,
                threads=options.threads,
                isa=options.isa,
                kv=options.kv,
                engine=options.reference_engine,
            )
            stack.callback(model.close)
            return model

        opened = [open_(path) for path in models]
        running = list(opened)
        windows, info = _windows(opened[0], saved, context, options)
        source: _Reference | None = None
        if saved is not None:
            source = _SavedReference(saved)
        elif reference is not None:
            running.append(open_(reference))
            source = _LiveReference(running[-1])
        _check_engines(running, options)
        _check_vocabulary(opened, source)
        writer = None
        if options.save_reference is not None:
            writer = stack.enter_context(_writer(source, windows, info, options))
        measured = _Measured(len(opened), windows, source is not None)
        measured.run(opened, source, writer, progress)
        if writer is not None:
            writer.finish()
        return _summarise(opened, source, info, measured)


class _LiveReference:
    """A reference that is run beside the models."""

    is_sampled = False

    def __init__(self, model: LogitsModel) -> None:
        self.model = model
        self.name, self.engine = model.name, model.engine
        self.vocabulary = model.vocabulary

    def start(self, ids: npt.NDArray[np.int32]) -> None:
        self.model.start(ids)

    def rows(self, start: int, stop: int) -> Rows:
        return FullRows(log_softmax(self.model.logits(start, stop)))


class _SavedReference:
    """A reference that was run before."""

    is_sampled = True

    def __init__(self, file: ReferenceFile) -> None:
        self._file = file
        self.name, self.engine = file.header.reference, file.header.engine
        self.vocabulary = file.header.vocabulary_sha256
        self._next = 0

    def start(self, ids: npt.NDArray[np.int32]) -> None:
        pass  # its rows lie in the order of the windows

    def rows(self, start: int, stop: int) -> Rows:
        first, self._next = self._next, self._next + stop - start
        return self._file.rows(first, stop - start)


_Reference: TypeAlias = _LiveReference | _SavedReference


class _Measured:
    """Figures of each scored token, of each model."""

    def __init__(self, num_models: int, windows: Windows, has_reference: bool) -> None:
        self.windows = windows
        self.blocks = windows.blocks()
        count = len(self.blocks)
        self.log_likelihood = np.empty((num_models, count))
        self.reference_log_likelihood = np.empty(count)
        self.kl = np.empty((num_models, count)) if has_reference else None
        self.is_same = np.empty((num_models, count), np.bool_)

    def run(
        self,
        models: Sequence[LogitsModel],
        reference: _Reference | None,
        writer: ReferenceWriter | None,
        progress: Progress | None,
    ) -> None:
        """Runs all models over all windows, block by block, so that memory stays small."""
        step = block_rows(models[0].num_tokens)
        done = 0
        for ids in self.windows:
            for runner in (*models, *((reference,) if reference else ())):
                runner.start(ids)
            last = len(ids) - 1
            for start in range(self.windows.first, last, step):
                stop = min(start + step, last)
                here = slice(done, done + stop - start)
                targets = ids[start + 1 : stop + 1].astype(np.int64)
                self._compare(models, reference, writer, start, stop, here, targets)
                done = here.stop
                if progress is not None:
                    progress(done, len(self.blocks))

    def _compare(
        self,
        models: Sequence[LogitsModel],
        reference: _Reference | None,
        writer: ReferenceWriter | None,
        start: int,
        stop: int,
        here: slice,
        targets: npt.NDArray[np.int64],
    ) -> None:
        expected = reference.rows(start, stop) if reference else None
        if expected is not None:
            self.reference_log_likelihood[here] = expected.target(targets)
        if writer is not None and isinstance(expected, FullRows):
            writer.add(expected.log_p, targets)
        for number, model in enumerate(models):
            found = FullRows(log_softmax(model.logits(start, stop)))
            self.log_likelihood[number, here] = found.target(targets)
            if expected is not None and self.kl is not None:
                self.kl[number, here] = expected.divergence(found.log_p)
                self.is_same[number, here] = expected.best() == found.best()


def _open_saved(reference: ModelPath | None, stack: contextlib.ExitStack) -> ReferenceFile | None:
    if reference is None or not starts_with(Path(reference), MAGIC):
        return None
    saved = ReferenceFile(reference)
    stack.callback(saved.close)
    return saved


def _windows(
    model: LogitsModel, saved: ReferenceFile | None, context: int, options: EvalOptions
) -> tuple[Windows, TextInfo]:
    """The tokens to run: the reference file's, or those of the text."""
    if saved is None:
        text = load_text_file(Path(options.text) if options.text is not None else None)
        windows = cut(
            text,
            model.tokenizer,
            tokens=options.tokens or 16384,
            context=context,
            score=options.score or "all",
        )
        return windows, _text_info(text.name, text.sha256, windows)
    header = saved.header
    fixed = {"tokens": header.num_ids, "context": header.context, "score": header.score}
    for name, value in fixed.items():
        if getattr(options, name) not in (None, value):
            raise ValueError(
                f"{saved.path} was made with {name} {value}, not {getattr(options, name)}: leave"
                f" --{name} out, or make another reference file"
            )
    if options.text is not None:
        text = load_text_file(Path(options.text))
        if text.sha256 != header.text_sha256:
            raise ValueError(
                f"{saved.path} was made on the text {header.text}, whose hash is not that of"
                f" {text.name}: leave --text out, or make another reference file"
            )
    return saved.windows, _text_info(header.text, header.text_sha256, saved.windows)


def _text_info(name: str, sha256: str, windows: Windows) -> TextInfo:
    return TextInfo(
        name=name,
        sha256=sha256,
        num_tokens=len(windows.ids),
        num_scored=windows.num_scored,
        context=windows.context,
        score=windows.score,
        bos_id=windows.bos_id,
    )


def _check_engines(running: Sequence[LogitsModel], options: EvalOptions) -> None:
    """Refuses options that none of the models has a use for."""
    for kind, what, names in (
        (EdgeModel, "an .edge file", ("isa", "kv")),
        (SourceModel, "a source model", ("reference_engine",)),
    ):
        if any(isinstance(model, kind) for model in running):
            continue
        for name in names:
            if getattr(options, name) not in (None, "auto"):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is for {what}, and none is run here: leave it out")


def _check_vocabulary(models: Sequence[LogitsModel], reference: _Reference | None) -> None:
    first = models[0]
    others = [(model.name, model.vocabulary) for model in models[1:]]
    if reference is not None:
        others.append((f"the reference {reference.name}", reference.vocabulary))
    for name, vocabulary in others:
        if vocabulary != first.vocabulary:
            raise ValueError(
                f"{name} and {first.name} do not have the same vocabulary: only files of one model"
                " can be compared"
            )


def _writer(
    reference: _Reference | None, windows: Windows, info: TextInfo, options: EvalOptions
) -> ReferenceWriter:
    assert options.save_reference is not None
    if not isinstance(reference, _LiveReference):
        raise ValueError(
            "a reference file is made while a reference runs: give --reference a model"
        )
    num_tokens = reference.model.num_tokens
    num_top, num_drawn = split_top(options.reference_top, num_tokens)
    header = ReferenceHeader(
        reference=reference.name,
        engine=reference.engine,
        text=info.name,
        text_sha256=info.sha256,
        vocabulary_sha256=reference.vocabulary,
        num_tokens=num_tokens,
        num_ids=len(windows.ids),
        context=windows.context,
        score=windows.score,
        bos_id=windows.bos_id,
        num_top=num_top,
        num_drawn=num_drawn,
    )
    return ReferenceWriter(options.save_reference, header, windows)


def _summarise(
    models: Sequence[LogitsModel],
    reference: _Reference | None,
    info: TextInfo,
    measured: _Measured,
) -> Comparison:
    blocks, loss = measured.blocks, -measured.log_likelihood
    evaluations = [
        Evaluation(
            model=model.name,
            path=str(model.path),
            engine=model.engine,
            size_bytes=model.size_bytes,
            bits_per_weight=8 * model.size_bytes / model.num_parameters,
            text=info,
            perplexity=mean_estimate(loss[number], blocks).map(math.exp),
            divergence=_divergence(reference, measured, number) if reference else None,
        )
        for number, model in enumerate(models)
    ]
    pairs = [(i, j) for i in range(len(models)) for j in range(i + 1, len(models))]
    differences = [
        Difference(
            first=models[i].name,
            second=models[j].name,
            kl=None
            if measured.kl is None
            else mean_estimate(measured.kl[i] - measured.kl[j], blocks),
            perplexity_ratio=mean_estimate(loss[i] - loss[j], blocks).map(math.exp),
        )
        for i, j in pairs
    ]
    return Comparison(evaluations=tuple(evaluations), differences=tuple(differences))


def _divergence(reference: _Reference, measured: _Measured, number: int) -> Divergence:
    assert measured.kl is not None
    blocks, kl = measured.blocks, measured.kl[number]
    loss, expected = -measured.log_likelihood[number], -measured.reference_log_likelihood
    return Divergence(
        reference=reference.name,
        engine=reference.engine,
        is_sampled=reference.is_sampled,
        kl=mean_estimate(kl, blocks),
        kl_median=quantile_estimate(kl, 0.5, blocks),
        kl_p99=quantile_estimate(kl, 0.99, blocks),
        top1=proportion_estimate(measured.is_same[number], blocks),
        perplexity=mean_estimate(expected, blocks).map(math.exp),
        perplexity_ratio=mean_estimate(loss - expected, blocks).map(math.exp),
    )
