"""The sampler: samples follow the softmax, filters keep what they should, keys decide the draw."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm._native import Sampling, sample
from edgellm.errors import NativeError
from edgellm.types import Float32Array

LARGE = 49152


def logits_of(*values: float) -> Float32Array:
    return np.array(values, np.float32)


def softmax(logits: Float32Array, temperature: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    probabilities: np.ndarray = weights / weights.sum()
    return probabilities


def draws(logits: Float32Array, sampling: Sampling, count: int) -> np.ndarray:
    return np.array([sample(logits, sampling, position=p) for p in range(count)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = logits_of(1.0, 0.5, 0.0, -1.0, 2.0, -0.3)
    count = 20_000
    ids = draws(logits, Sampling(temperature=temperature, seed=1), count)
    expected = count * softmax(logits, temperature)
    chi_square = ((np.bincount(ids, minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_a_large_vocabulary_is_sampled_as_well() -> None:
    """Most Gumbel numbers are never computed; the frequencies must not show it."""
    logits = np.zeros(LARGE, np.float32)
    logits[::4] = 1.0
    count = 4000
    share = (draws(logits, Sampling(temperature=1.0), count) % 4 == 0).mean()
    expected = np.e / (np.e + 3)
    assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-9])
def test_temperature_zero_is_the_largest_logit(temperature: float) -> None:
    """B22: no division by zero, and the lowest id wins a tie."""
    assert sample(logits_of(1, 5, 5, 2), Sampling(temperature=temperature)) == 1


def test_repetition_penalty_lowers_negative_logits() -> None:
    """B23: -2 * 1.5 = -3 loses to -2.5; -2 / 1.5 would have won."""
    assert sample(logits_of(-2, -2.5), Sampling(repetition_penalty=1.5), history=[0]) == 1


@pytest.mark.parametrize("where", [0, 500, 999])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_logit_is_an_error(where: int, value: float) -> None:
    """B24: never laundered into a token."""
    logits = np.zeros(1000, np.float32)
    logits[where] = value
    with pytest.raises(NativeError, match=f"token {where} "):
        sample(logits, Sampling(temperature=1.0, top_k=5))


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(LARGE, -np.inf, np.float32)
    logits[[7, 40_000]] = -3.0
    assert set(draws(logits, Sampling(temperature=100.0), 200)) == {7, 40_000}
    logits[:] = -np.inf
    with pytest.raises(NativeError, match="masked"):
        sample(logits, Sampling())


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=50.0, top_k=3), {5, 6, 7}),
        (Sampling(temperature=1.0, top_p=0.6), {7}),
        (Sampling(temperature=1.0, top_p=0.64), {6, 7}),
        (Sampling(temperature=1.0, min_p=0.36), {6, 7}),
        (Sampling(temperature=2.0, min_p=0.36), {5, 6, 7}),
        (Sampling(temperature=1.0, top_k=2, top_p=0.74), {6, 7}),  # of 0.73 and 0.27
        (Sampling(temperature=1.0, top_k=2, top_p=0.72), {7}),
        (Sampling(temperature=1.0, top_k=1, top_p=0.01, min_p=1.0), {7}),
    ],
)
def test_filters_keep(sampling: Sampling, kept: set[int]) -> None:
    """Probabilities at temperature 1: 0.632, 0.233, 0.086, ..."""
    logits = np.arange(8, dtype=np.float32)
    assert set(draws(logits, sampling, 400)) == kept


def test_penalties_count_generated_tokens_only() -> None:
    logits = logits_of(3.0, 2.5)
    once = Sampling(presence_penalty=0.6)
    assert sample(logits, once, history=[0, 0], num_generated=0) == 0
    assert sample(logits, once, history=[0, 1, 0], num_generated=1) == 1
    often = Sampling(frequency_penalty=0.3)
    assert sample(logits, often, history=[0, 0], num_generated=1) == 0
    assert sample(logits, often, history=[0, 0], num_generated=2) == 1


def test_bias_comes_first() -> None:
    assert sample(logits_of(0, 1), Sampling(logit_bias={0: 2.0})) == 0
    assert sample(logits_of(0, 1), Sampling(logit_bias={1: -np.inf})) == 0


def test_the_draw_is_a_function_of_seed_and_position() -> None:
    logits = np.zeros(1000, np.float32)
    sampling = Sampling(temperature=1.0, seed=3)
    ids = draws(logits, sampling, 200)
    assert (ids == draws(logits, sampling, 200)).all()
    assert [sample(logits, sampling, history=[1, 2, 3], position=p) for p in range(200)] == list(
        ids
    )
    assert len(set(ids)) > 150
    assert (ids != draws(logits, Sampling(temperature=1.0, seed=4), 200)).mean() > 0.95


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        (Sampling(temperature=-1.0), "temperature"),
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(min_p=1.1), "min_p"),
        (Sampling(repetition_penalty=0.0), "repetition_penalty"),
        (Sampling(presence_penalty=float("inf")), "presence_penalty"),
        (Sampling(frequency_penalty=float("nan")), "frequency_penalty"),
        (Sampling(logit_bias={4: 1.0}), "token 4"),
        (Sampling(logit_bias={0: float("nan")}), "token 0"),
    ],
)
def test_a_bad_parameter_is_named(sampling: Sampling, word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        sample(np.zeros(4, np.float32), sampling)
    assert "\n" not in str(caught.value)


def test_ids_of_the_history_are_checked() -> None:
    with pytest.raises(ValueError, match="history token 1 is 4"):
        sample(np.zeros(4, np.float32), Sampling(), history=[0, 4])
