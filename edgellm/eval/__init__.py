"""How good a model file is: perplexity, divergence from a reference, tasks.

`evaluate("model.edge", reference="source.gguf")` returns what `edgellm eval` prints.
"""

from __future__ import annotations

from edgellm.eval.evaluation import compare, evaluate
from edgellm.eval.results import (
    Comparison,
    Difference,
    Divergence,
    EvalOptions,
    Evaluation,
    TextInfo,
)
from edgellm.eval.statistics import Estimate

__all__ = [
    "Comparison",
    "Difference",
    "Divergence",
    "Estimate",
    "EvalOptions",
    "Evaluation",
    "TextInfo",
    "compare",
    "evaluate",
]
