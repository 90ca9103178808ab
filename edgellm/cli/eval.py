"""`edgellm eval`."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from edgellm.cli import _store
from edgellm.cli._format import format_bytes, table
from edgellm.cli._progress import Bar
from edgellm.cli._usage import as_usage
from edgellm.errors import ModelNotFoundError

if TYPE_CHECKING:
    from edgellm.eval import Comparison, Estimate, Evaluation, TextInfo
    from edgellm.eval.tasks import TaskResult

__all__ = ["command"]

_OF_TEXT = (
    "text",
    "tokens",
    "context",
    "score",
    "reference",
    "reference_engine",
    "save_reference",
    "reference_top",
    "is_comparison",
    "plot",
)
_OF_TASK = ("data", "limit", "prompt", "max_tokens")


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--text", type=click.Path(path_type=Path), help="UTF-8; default: a small one of ours."
)
@click.option("--tokens", type=click.IntRange(1), help="Most tokens of it.  [default: 16384]")
@click.option("--context", type=click.IntRange(4), help="Tokens of a window.  [default: 512]")
@click.option(
    "--score",
    type=click.Choice(["all", "half"]),
    help="Score all tokens of a window but the first, or its second half.  [default: all]",
)
@click.option("--reference", help="Source model, other .edge file, or saved reference file.")
@click.option(
    "--reference-engine",
    type=click.Choice(["auto", "transformers", "numpy"]),
    default="auto",
    show_default=True,
    help="What runs a source model; auto is transformers where it is installed.",
)
@click.option("--save-reference", type=click.Path(path_type=Path), help="Keep it in this file.")
@click.option(
    "--reference-top",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Most probable tokens kept there of each distribution; of the rest a sample is.",
)
@click.option("--compare", "is_comparison", is_flag=True, help="Measure several MODELs.")
@click.option("--plot", type=click.Path(path_type=Path), help="PNG of KL divergence against size.")
@click.option("--task", type=click.Choice(["gsm8k", "humaneval"]), help="Solve problems instead.")
@click.option("--data", type=click.Path(path_type=Path), help="The problems, JSON Lines.")
@click.option("--limit", type=click.IntRange(1), help="Most problems.")
@click.option(
    "--prompt",
    type=click.Choice(["auto", "raw", "chat"]),
    default="auto",
    show_default=True,
    help="How to ask; auto is chat where the model has a template.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("-t", "--threads", type=click.IntRange(1), help="Default: CPUs of this process.")
@click.option("--isa", help="Force an instruction set; see: edgellm kernels.")
@_store.kv_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    models: tuple[str, ...], task: str | None, is_comparison: bool, as_json: bool, **options: Any
) -> None:
    """Measure how good a model file is: perplexity, KL divergence, tasks.

    Perplexity is that of the text's tokens in windows; with --reference also KL(reference ||
    model), agreement on the most probable token, and the ratio of perplexities. A MODEL may be a
    GGUF file, a Hugging Face folder or an ONNX model too, which is run in float32. Intervals are of
    95 %.

    --task humaneval runs programs that the model wrote, each in a process of its own with limits
    on time, memory, files and network; --task gsm8k compares numbers.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of transformers between our lines
    if task is None:
        _refuse(_OF_TASK, "--task")
    elif options["data"] is None:
        raise click.UsageError(f"--task {task} needs its problems: --data FILE.jsonl")
    else:
        _refuse(_OF_TEXT, "a text: leave out --task")
    if len(models) > 1 and not is_comparison:
        raise click.UsageError("several models are measured with --compare")
    if options["reference"] is None:
        _refuse(("save_reference", "plot"), "--reference")
    if options["save_reference"] is None:
        _refuse(("reference_top",), "--save-reference")
    if task is not None:
        _run_task(task, models[0], options, as_json)
    else:
        _run_text(models, is_comparison, options, as_json)


def _refuse(names: tuple[str, ...], needed: str) -> None:
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) != ParameterSource.DEFAULT:
            flag = {"is_comparison": "compare"}.get(name, name).replace("_", "-")
            raise click.UsageError(f"--{flag} goes with {needed}")


# ---- texts ---------------------------------------------------------------------------------------


def _run_text(
    models: tuple[str, ...], is_comparison: bool, options: dict[str, Any], as_json: bool
) -> None:
    from edgellm.eval import EvalOptions, compare
    from edgellm.eval.plot import check_plot, plot
    from edgellm.format.temporary import refuse_inputs

    if options["plot"] is not None:
        check_plot()
    reference = None if options["reference"] is None else _path(options["reference"])
    inputs = [
        path for path in (*map(_path, models), reference, options["text"]) if path is not None
    ]
    for output in (options["save_reference"], options["plot"]):
        if output is not None:
            with as_usage():
                refuse_inputs(output, inputs)
    names = {field.name for field in dataclasses.fields(EvalOptions)}
    with Bar("evaluating", lambda count: f"{count:,} tokens") as bar:
        result = compare(
            [_path(model) for model in models],
            reference,
            EvalOptions(**{name: options[name] for name in names}),
            bar.update,
        )
    if options["plot"] is not None:
        plot(result.evaluations, options["plot"])
    if as_json:
        whole = dataclasses.asdict(result if is_comparison else result.evaluations[0])
        click.echo(json.dumps(whole, ensure_ascii=False))
    else:
        show = _comparison_text if is_comparison else _single_text
        click.echo(show(result))
        for name in ("save_reference", "plot"):
            if options[name] is not None:
                click.echo(f"written: {options[name]}, {_size(options[name])}")


def _path(model: str) -> Path:
    """The file of a pulled model, or the path itself."""
    try:
        return _store.resolve(model)
    except ModelNotFoundError:
        if Path(model).is_dir():
            return Path(model)
        raise


def _size(path: Path) -> str:
    return format_bytes(path.stat().st_size)


def _single_text(result: Comparison) -> str:
    (one,) = result.evaluations
    lines = [
        f"model      {one.model}, {format_bytes(one.size_bytes)}, {one.bits_per_weight:.2f} bits a"
        f" weight, run by {one.engine}",
        *_text_lines(one),
        "",
    ]
    rows = [_row("perplexity", one.perplexity, 3)]
    found = one.divergence
    if found is not None:
        rows += [
            _row("perplexity of the reference", found.perplexity, 3),
            _row("ratio of perplexities", found.perplexity_ratio, 4),
            _row("KL divergence, nats a token", found.kl, 5),
            _row("- median", found.kl_median, 5),
            _row("- 99th percentile", found.kl_p99, 4),
            _row("same most probable token", found.top1, 2, "%"),
        ]
    lines.append(table(("figure", "value", "95 % interval"), rows, right=(1, 2)))
    return "\n".join(lines)


def _text_lines(one: Evaluation) -> list[str]:
    text = one.text
    lines = [f"text       {_describe(text)}"]
    if one.divergence is not None:
        lines.append(f"reference  {one.divergence.reference}, run by {one.divergence.engine}")
        if one.divergence.is_sampled:
            lines.append("           from a file with a sample of each distribution: KL estimated,")
            lines.append("           its median and 99th percentile with each token's noise")
    return lines


def _describe(text: TextInfo) -> str:
    from edgellm.eval.windows import OUR_TEXT

    which = "all but the first of" if text.score == "all" else "the second half of"
    line = f"{text.name}: {text.num_scored:,} tokens, {which} each window of {text.context}"
    if text.name == OUR_TEXT:
        line += "; it is small: name a longer one with --text"
    return line


def _row(name: str, estimate: Estimate, digits: int, unit: str = "") -> tuple[str, str, str]:
    value, low, high = (
        f"{number * (100 if unit else 1):.{digits}f}"
        for number in (estimate.value, estimate.low, estimate.high)
    )
    return (name, f"{value}{' ' if unit else ''}{unit}", f"{low} to {high}")


def _comparison_text(result: Comparison) -> str:
    head = ["model", "size", "bits/weight", "perplexity"]
    rows = [
        [
            one.model,
            format_bytes(one.size_bytes),
            f"{one.bits_per_weight:.2f}",
            _half(one.perplexity, 2),
        ]
        for one in result.evaluations
    ]
    first = result.evaluations[0]
    if first.divergence is not None:
        head += ["ratio", "KL divergence", "median", "99 %", "same top, %"]
        for row, one in zip(rows, result.evaluations, strict=True):
            found = one.divergence
            assert found is not None
            row += [
                _half(found.perplexity_ratio, 4),
                _half(found.kl, 5),
                f"{found.kl_median.value:.5f}",
                f"{found.kl_p99.value:.4f}",
                _half(found.top1.map(lambda share: 100 * share), 1),
            ]
    lines = [*_text_lines(first), "", table(head, rows, right=range(1, len(head)))]
    if result.differences:
        lines += ["", "differences, token by token (95 % intervals):"]
    for pair in result.differences:
        ratio = pair.perplexity_ratio
        line = f"{pair.first} - {pair.second}: "
        if pair.kl is not None:
            line += f"KL divergence {pair.kl.value:+.5f} ({pair.kl.low:+.5f} to"
            line += f" {pair.kl.high:+.5f}), "
        lines.append(f"{line}perplexity x {ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f})")
    return "\n".join(lines)


def _half(estimate: Estimate, digits: int) -> str:
    half = max(estimate.high - estimate.value, estimate.value - estimate.low)
    return f"{estimate.value:.{digits}f} ± {half:.{digits}f}"


# ---- tasks ---------------------------------------------------------------------------------------


def _run_task(task: str, model: str, options: dict[str, Any], as_json: bool) -> None:
    from edgellm.eval.tasks import TASKS, TaskOptions, has_chat_template, run_task

    path = _store.resolve(model)
    prompt: Literal["auto", "raw", "chat"] = options["prompt"]
    if not as_json:
        is_chat = prompt == "chat" or (prompt == "auto" and has_chat_template(path))
        click.echo(TASKS[task].about(is_chat=is_chat))
    names = [field.name for field in dataclasses.fields(TaskOptions)]
    with Bar(task, lambda count: f"{count} problems") as bar:
        result = run_task(
            task,
            path,
            options["data"],
            TaskOptions(**{name: options[name] for name in names}),
            bar.update,
        )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
    else:
        click.echo(_task_text(result))


def _task_text(result: TaskResult) -> str:
    from edgellm.eval.tasks import NO_ROOM

    right, score = sum(answer.is_right for answer in result.answers), result.score
    unasked = sum(answer.reason == NO_ROOM for answer in result.answers)
    return (
        f"{result.model}: {result.metric} {score.value:.1%}, {right} of {len(result.answers)}, 95 %"
        f" interval {score.low:.1%} to {score.high:.1%} (Wilson)"
        f"{f'; {unasked} {NO_ROOM}' if unasked else ''}"
    )
