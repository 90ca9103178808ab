"""What an evaluation is told and what it answers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from edgellm.eval.models import ReferenceEngine
from edgellm.eval.reference_file import DEFAULT_TOP
from edgellm.eval.statistics import Estimate

__all__ = [
    "Comparison",
    "Difference",
    "Divergence",
    "EvalOptions",
    "Evaluation",
    "ModelPath",
    "TextInfo",
]

ModelPath: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """How to evaluate.

    Attributes:
        text: A text file in UTF-8; None: that of the reference file, or the small one that comes
            with edgellm.
        tokens: Most tokens of the text; None: 16,384, or as many as the reference file has.
        context: Tokens of a window; None: 512, or as in the reference file.
        score: "all" or "half" of each window, see `edgellm.eval.windows`; None: "all", or as in
            the reference file.
        reference_engine: What runs models that are no `.edge` files.
        save_reference: Keep the reference's distributions in this file.
        reference_top: Of each distribution in it, the most probable tokens that are kept.
        threads: None: one per CPU this process may use.
        isa: Force an instruction set; None: the fastest.
        kv: Numbers of the KV cache of `.edge` files, "f16" or "int8"; None: what they say.
    """

    text: ModelPath | None = None
    tokens: int | None = None
    context: int | None = None
    score: str | None = None
    reference_engine: ReferenceEngine = "auto"
    save_reference: ModelPath | None = None
    reference_top: int = DEFAULT_TOP
    threads: int | None = None
    isa: str | None = None
    kv: str | None = None

    def __post_init__(self) -> None:
        if self.score not in (None, "all", "half"):
            raise ValueError(f"score is {self.score!r}; it must be 'all' or 'half'")
        for name, low in (("tokens", 1), ("context", 4), ("reference_top", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name} is {value}; it must be at least {low}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInfo:
    """What was evaluated on.

    Attributes:
        name: Of the text.
        sha256: Of the whole text in UTF-8.
        num_tokens: Tokens taken of it.
        num_scored: Tokens that counted.
        context: Tokens of a window.
        score: Which tokens of a window counted, "all" but the first or the second "half".
        bos_id: Token that began each window; None: the text's own.
    """

    name: str
    sha256: str
    num_tokens: int
    num_scored: int
    context: int
    score: str
    bos_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How far a model is from a reference; nats a token.

    Attributes:
        reference: Name of the reference.
        engine: What ran it.
        is_sampled: It came from a file that holds a sample of each distribution: the figures are
            estimates. Means are without bias, and their intervals hold the sampling's noise too;
            the noise of single tokens widens their spread, so quantiles lean outwards.
        kl: Mean of KL(reference || model) over the tokens.
        kl_median: Median.
        kl_p99: 99th percentile.
        top1: Share of tokens at which both hold the same next token for the most probable.
        perplexity: The reference's.
        perplexity_ratio: The model's perplexity by the reference's, token by token.
    """

    reference: str
    engine: str
    is_sampled: bool
    kl: Estimate
    kl_median: Estimate
    kl_p99: Estimate
    top1: Estimate
    perplexity: Estimate
    perplexity_ratio: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Figures of one model.

    Attributes:
        model: Its name.
        path: Its file.
        engine: What ran it.
        size_bytes: Of the whole file.
        bits_per_weight: Bits of the whole file by the number of weights.
        text: What it was evaluated on.
        perplexity: exp of the mean negative log-likelihood of a token.
        divergence: From the reference; None without one.
    """

    model: str
    path: str
    engine: str
    size_bytes: int
    bits_per_weight: float
    text: TextInfo
    perplexity: Estimate
    divergence: Divergence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """First model minus second, token by token.

    Attributes:
        first: Name of the first model.
        second: Name of the second.
        kl: Difference of the KL divergences, nats a token; None without a reference.
        perplexity_ratio: Perplexity of the first by that of the second.
    """

    first: str
    second: str
    kl: Estimate | None
    perplexity_ratio: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Figures of several models over the same tokens.

    Attributes:
        evaluations: One a model, in the order given.
        differences: Of each pair.
    """

    evaluations: tuple[Evaluation, ...]
    differences: tuple[Difference, ...]
