"""HumanEval: a function is written from its documentation, and its tests are run.

Source: Chen et al., Evaluating Large Language Models Trained on Code, 2021; its stop strings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from edgellm.eval.sandbox import describe, run_program

__all__ = ["HumanEval"]

_BLOCK: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_REQUEST: Final = (
    "Complete this Python function. Answer with the whole function in one code block, without"
    " tests.\n\n```python\n{prompt}```"
)


class HumanEval:
    """The task; see `edgellm.eval.tasks.Task`."""

    metric = "pass@1"
    fields: Sequence[str] = ("task_id", "prompt", "entry_point", "test")
    stops: Sequence[str] = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")

    def about(self, *, is_chat: bool) -> str:
        """How the model is asked and judged."""
        asked = (
            "the function's beginning is a chat message, the first code block the answer"
            if is_chat
            else "the function's beginning is continued as plain text"
        )
        return f"{asked}; greedy; {describe()}"

    def prompt(self, problem: dict[str, str], *, is_chat: bool) -> str:
        """The function's beginning, in a chat with a request."""
        return _REQUEST.format(prompt=problem["prompt"]) if is_chat else problem["prompt"]

    def judge(self, problem: dict[str, str], answer: str, *, is_chat: bool) -> tuple[bool, str]:
        """Runs the tests."""
        outcome = run_program(_program(problem, answer, is_chat))
        return outcome.is_passed, outcome.reason


def _program(problem: dict[str, str], answer: str, is_chat: bool) -> str:
    """The function and its tests."""
    code = answer
    if is_chat:
        block = _BLOCK.search(answer)
        code = block.group(1) if block else answer
        if re.search(rf"^\s*def {re.escape(problem['entry_point'])}\b", code, re.MULTILINE):
            code = f"\n\n{code}"  # a second definition; the first has its documentation as body
    return f"{problem['prompt']}{code}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
