"""GSM8K: word problems whose answer is a number.

Source: Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

__all__ = ["Gsm8k"]

_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_REQUEST: Final = (
    "{question}\n\nThink step by step. Then write the answer as a number on a line of its own,"
    " after ####."
)
_EXAMPLES: Final = """\
Question: A shelf holds 14 jars. Ben brings 3 boxes with 6 jars each, and then 5 jars break. How \
many jars are whole?
Answer: Ben brings 3 * 6 = 18 jars. With those on the shelf there are 14 + 18 = 32. After 5 break, \
32 - 5 = 27 are left.
#### 27

Question: A ferry ticket costs $8 for adults and half of that for children. How much do 2 adults \
and 5 children pay?
Answer: A child pays 8 / 2 = $4. The adults pay 2 * 8 = $16 and the children 5 * 4 = $20. Together \
they pay 16 + 20 = $36.
#### 36

Question: Lena reads 12 pages on Monday and 50% more on Tuesday. Her book has 90 pages. How many \
are left?
Answer: On Tuesday she reads 12 * 1.5 = 18 pages. So far she has read 12 + 18 = 30. That leaves \
90 - 30 = 60 pages.
#### 60

Question: A tank of 240 litres is filled at 15 litres a minute while 3 litres a minute leak out. \
How many minutes does it take to fill it?
Answer: Each minute 15 - 3 = 12 litres stay in the tank. It takes 240 / 12 = 20 minutes.
#### 20

Question: {question}
Answer:"""


class Gsm8k:
    """The task; see `edgellm.eval.tasks.Task`."""

    metric = "exact match"
    fields: Sequence[str] = ("question", "answer")
    stops: Sequence[str] = ("\nQuestion:",)

    def about(self, *, is_chat: bool) -> str:
        """How the model is asked and judged."""
        asked = (
            "the question is a chat message that asks for steps and a last line with the number"
            if is_chat
            else "four solved examples, then the question"
        )
        return f"{asked}; greedy; the last number of the answer must be the right one"

    def prompt(self, problem: dict[str, str], *, is_chat: bool) -> str:
        """The question, with a request or behind examples."""
        template = _REQUEST if is_chat else _EXAMPLES
        return template.format(question=problem["question"])

    def judge(self, problem: dict[str, str], answer: str, *, is_chat: bool) -> tuple[bool, str]:
        """Compares the last numbers."""
        del is_chat
        found, wanted = _last_number(answer), _last_number(problem["answer"])
        return found is not None and found == wanted, f"{found}, wanted {wanted}"


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
