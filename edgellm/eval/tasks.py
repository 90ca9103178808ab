"""Problems that a model solves greedily, and the share it gets right."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

from edgellm.engine import LLM, SamplingParams
from edgellm.errors import ContextFullError, FormatError, ModelNotFoundError, TemplateError
from edgellm.eval.gsm8k import Gsm8k
from edgellm.eval.humaneval import HumanEval
from edgellm.eval.results import ModelPath
from edgellm.eval.statistics import Estimate, wilson
from edgellm.format import EdgeFile

__all__ = [
    "NO_ROOM",
    "TASKS",
    "Answer",
    "TaskOptions",
    "TaskResult",
    "has_chat_template",
    "run_task",
]

Progress: TypeAlias = Callable[[int, int], None]
NO_ROOM: Final = "did not fit the context"  # the reason of an answer that could not be begun


class Task(Protocol):
    """A kind of problem.

    Attributes:
        metric: Name of its figure.
        fields: Texts each problem has.
        stops: Strings that end an answer to a raw prompt.
    """

    metric: str
    fields: Sequence[str]
    stops: Sequence[str]

    def about(self, *, is_chat: bool) -> str:
        """How the model is asked and judged, for people."""
        ...

    def prompt(self, problem: dict[str, str], *, is_chat: bool) -> str:
        """The user's message of a chat, or the text to be continued."""
        ...

    def judge(self, problem: dict[str, str], answer: str, *, is_chat: bool) -> tuple[bool, str]:
        """Whether an answer is right, and why, in a few words."""
        ...


TASKS: dict[str, Task] = {"gsm8k": Gsm8k(), "humaneval": HumanEval()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """How to ask.

    Attributes:
        limit: Most problems, from the first on; None: all.
        prompt: "chat" asks in a chat, "raw" has a text continued; "auto": chat where the model has
            a template.
        max_tokens: Most tokens of an answer.
        threads: None: one per CPU this process may use.
        isa: Force an instruction set; None: the fastest.
        kv: Numbers of the KV cache; None: what the file says.
    """

    limit: int | None = None
    prompt: Literal["auto", "raw", "chat"] = "auto"
    max_tokens: int = 512
    threads: int | None = None
    isa: str | None = None
    kv: str | None = None

    def __post_init__(self) -> None:
        if self.prompt not in ("auto", "raw", "chat"):
            raise ValueError(f"prompt is {self.prompt!r}; it must be 'auto', 'raw' or 'chat'")
        if self.max_tokens < 1 or (self.limit is not None and self.limit < 1):
            raise ValueError("max_tokens and limit must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One problem's answer.

    Attributes:
        is_right: Whether it is right.
        reason: Why, in a few words.
        text: What the model wrote.
        num_tokens: Tokens it wrote.
    """

    is_right: bool
    reason: str
    text: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """A model's share of right answers.

    Attributes:
        task: Name of the task.
        model: Name of the model.
        metric: Name of the figure, such as "pass@1".
        prompt: "raw" or "chat".
        score: Share of right answers, with Wilson's interval.
        answers: One a problem.
    """

    task: str
    model: str
    metric: str
    prompt: str
    score: Estimate
    answers: tuple[Answer, ...]


def run_task(
    name: str,
    model: ModelPath,
    data: ModelPath,
    options: TaskOptions | None = None,
    progress: Progress | None = None,
) -> TaskResult:
    """Has a model solve problems, greedily. HumanEval runs the programs it writes.

    Args:
        name: Of `TASKS`.
        model: An `.edge` file.
        data: The problems, JSON Lines, may be compressed with gzip.
        options: How to ask.
        progress: Called with the problems that are done and their total.

    Returns:
        What it got right. The same files give the same result.

    Raises:
        FormatError: A problem is not what the task has.
        TemplateError: A chat was asked for and the model has no template.
        EdgeLLMError: As `LLM`.
    """
    options = options or TaskOptions()
    task = TASKS[name]
    problems = list(_read(Path(data), task.fields, options.limit))
    has_template = has_chat_template(model)
    if options.prompt == "chat" and not has_template:
        raise TemplateError(f"{model} has no chat template: ask with the raw prompt")
    greedy = SamplingParams()
    answers = []
    with LLM(model, threads=options.threads, isa=options.isa, kv=options.kv) as llm:
        is_chat = options.prompt != "raw" and has_template
        for number, problem in enumerate(problems, 1):
            prompt = task.prompt(problem, is_chat=is_chat)
            try:
                if is_chat:
                    messages = [{"role": "user", "content": prompt}]
                    done = llm.chat(messages, greedy, max_tokens=options.max_tokens)
                else:
                    done = llm.generate(
                        prompt, greedy, max_tokens=options.max_tokens, stop=task.stops
                    )
                is_right, reason = task.judge(problem, done.text, is_chat=is_chat)
                answer = Answer(
                    is_right=is_right, reason=reason, text=done.text, num_tokens=len(done.ids)
                )
            except ContextFullError:
                answer = Answer(is_right=False, reason=NO_ROOM, text="", num_tokens=0)
            answers.append(answer)
            if progress is not None:
                progress(number, len(problems))
    return TaskResult(
        task=name,
        model=Path(model).stem,
        metric=task.metric,
        prompt="chat" if is_chat else "raw",
        score=wilson(sum(answer.is_right for answer in answers), len(answers)),
        answers=tuple(answers),
    )


def has_chat_template(model: ModelPath) -> bool:
    """Whether an `.edge` file has a chat template."""
    with EdgeFile.open(model) as file:
        return "default" in file.chat_templates


def _read(path: Path, fields: Sequence[str], limit: int | None) -> Iterator[dict[str, str]]:
    """The problems of a file: those of its texts that the task needs."""
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file")
    with path.open("rb") as raw:
        is_packed = raw.read(2) == b"\x1f\x8b"
    count = 0
    try:
        with gzip.open(path) if is_packed else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                yield _problem(line, f"{path}: line {number}", fields)
                count += 1
                if count == limit:
                    return
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise FormatError(f"{path}: its compressed data is damaged") from None
    if not count:
        raise FormatError(f"{path} holds no problems")


def _problem(line: bytes, where: str, fields: Sequence[str]) -> dict[str, str]:
    try:
        problem: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError(f"{where} is not JSON") from None
    if not isinstance(problem, dict):
        raise FormatError(f"{where} is not a JSON object")
    wrong = [name for name in fields if not isinstance(problem.get(name), str)]
    if wrong:
        raise FormatError(f"{where}: the text {wrong[0]!r} is missing; is it another task's file?")
    return {name: problem[name] for name in fields}
