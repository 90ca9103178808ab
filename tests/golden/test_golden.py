"""What may not change unnoticed: the plan of each architecture, and the bits it computes.

`pytest --update-golden tests/golden` writes the files anew; their diff then shows the change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES

from edgellm import LLM

PROMPT = list(range(3, 60))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_plan_is_the_golden_one(
    architecture: str, tiny_edge_of: Callable[[str], Path], golden: Callable[[str, str], None]
) -> None:
    with LLM(tiny_edge_of(architecture), isa="ref", threads=1) as llm:
        golden(f"plan_{architecture}", llm.plan())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_ids_are_the_golden_ones_on_every_machine(
    architecture: str, tiny_edge_of: Callable[[str], Path], golden: Callable[[str, str], None]
) -> None:
    with LLM(tiny_edge_of(architecture)) as llm:
        logits = hashlib.sha256(llm.logits(PROMPT).tobytes()).hexdigest()
        ids = llm.generate(PROMPT, max_tokens=16).ids
    golden(f"ids_{architecture}", f"logits {logits}\ngreedy {' '.join(map(str, ids))}\n")
