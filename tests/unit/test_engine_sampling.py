"""Sampling parameters say no to what makes no sense, and read the makers' recommendation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgellm import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: float("nan")}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


def test_the_default_is_greedy() -> None:
    assert SamplingParams().resolve().temperature == 0


def test_without_a_seed_each_answer_draws_one() -> None:
    seeds = {SamplingParams().resolve().seed for _ in range(8)}
    assert len(seeds) > 1
    assert SamplingParams(seed=2**64 - 1).resolve().seed == 2**64 - 1


def test_parameters_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.7}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, SamplingParams()),
        ({"repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
        ({"do_sample": True}, SamplingParams(temperature=1.0, top_k=50)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None},
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        ),
    ],
)
def test_the_generation_config_is_followed(
    config: dict[str, Any], expected: SamplingParams
) -> None:
    assert SamplingParams.from_generation_config(config) == expected
