"""How the next token is chosen."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm._native import Sampling

__all__ = ["SamplingParams"]

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen; the default is greedy.

    The order is: logit bias, penalties, temperature, top-k, top-p, min-p, then the draw.

    Attributes:
        temperature: 0 takes the most probable token, the lowest id in a tie; else >= 0.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens that holds this probability, 0 < top_p <= 1.
        min_p: drop tokens below this share of the best one's probability, 0 <= min_p <= 1.
        repetition_penalty: > 0; over the whole sequence; 1 is off.
        presence_penalty: subtracted from each token generated before.
        frequency_penalty: subtracted once for each time a token was generated.
        seed: 0 to 2^64 - 1; None draws one, which the statistics report.
        logit_bias: added to the logits of these token ids.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number")
        _require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or a count of tokens")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "> 0")
        if self.seed is not None:
            _require(0 <= self.seed <= _MAX_SEED, "seed", self.seed, "0 to 2^64 - 1")
        for token, bias in self.logit_bias.items():
            _require(0 <= token < 2**31, "logit_bias", token, "by token id")
            _require(math.isfinite(bias), f"logit_bias[{token}]", bias, "a finite number")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """What the model's makers recommend in `generation_config.json`.

        With "do_sample" false or absent the choice is greedy. Values the file leaves out are those
        of transformers: temperature 1, top-k 50, top-p 1.

        Args:
            config: the parsed file.

        Raises:
            ValueError: a value is out of its range.

        Source: transformers, GenerationConfig.
        """

        def value(name: str, default: float) -> float:
            found = config.get(name)
            return default if found is None else found

        penalty = float(value("repetition_penalty", 1.0))
        if not config.get("do_sample"):
            return cls(repetition_penalty=penalty)
        return cls(
            temperature=float(value("temperature", 1.0)),
            top_k=int(value("top_k", 50)),
            top_p=float(value("top_p", 1.0)),
            min_p=float(value("min_p", 0.0)),
            repetition_penalty=penalty,
        )

    def resolve(self) -> Sampling:
        """The parameters as the C library takes them, the seed drawn if there is none."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            # 32 bits: short enough to be typed again.
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            logit_bias=self.logit_bias,
        )


def _require(is_right: bool, name: str, value: object, range_: str) -> None:
    if not is_right:
        raise ValueError(f"{name} is {value}; it must be {range_}")
