"""Figures and intervals are those of the books, and of brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgellm.eval.distributions import FullRows, SampledRows, log_softmax
from edgellm.eval.gsm8k import Gsm8k
from edgellm.eval.reference_file import _keep
from edgellm.eval.statistics import (
    _student,
    mean_estimate,
    proportion_estimate,
    quantile_estimate,
    wilson,
)
from edgellm.eval.windows import Windows


def test_wilson_s_interval_is_the_published_one() -> None:
    # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3.
    for (right, trials), (low, high) in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        found = wilson(right, trials)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)
        assert found.value == right / trials
    assert wilson(20, 20).high == 1


def test_student_s_quantile() -> None:
    for freedom, quantile in {3: 3.182, 5: 2.571, 10: 2.228, 31: 2.040, 1000: 1.962}.items():
        assert _student(freedom) == pytest.approx(quantile, rel=0.01)


def test_independent_tokens_have_the_plain_standard_error() -> None:
    values = np.random.default_rng(0).exponential(size=100)
    found = mean_estimate(values, np.arange(100))
    half = _student(99) * values.std(ddof=1) / math.sqrt(100)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half)
    assert found.value - found.low == pytest.approx(half)


def test_blocks_of_equal_tokens_are_worth_one_token_each() -> None:
    blocks = np.repeat(np.arange(20), 64)
    one = np.random.default_rng(1).normal(size=20)
    found = mean_estimate(one[blocks], blocks)
    alone = mean_estimate(one, np.arange(20))
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))
    flags = one > 0
    share = proportion_estimate(flags[blocks], blocks)
    # Sample variances divide by one less than the number of blocks: 19 instead of 20 are counted.
    expected = wilson(flags.mean() * 19, 19)
    assert (share.low, share.high) == pytest.approx((expected.low, expected.high))


def test_an_interval_of_correlated_tokens_holds_the_truth_as_often_as_it_says() -> None:
    source, covered = np.random.default_rng(2), np.zeros(3)
    blocks = np.arange(2048) // 64
    truths = 0, 0, 2.3263479 * math.sqrt(8)
    for _ in range(400):
        noise = source.normal(size=2048 + 7)
        values = np.convolve(noise, np.ones(8), mode="valid")  # neighbours share 7 of 8 terms
        found = (
            mean_estimate(values, blocks),
            quantile_estimate(values, 0.5, blocks),
            quantile_estimate(values, 0.99, blocks),
        )
        covered += [one.low <= truth <= one.high for one, truth in zip(found, truths, strict=True)]
    assert (covered / 400 > 0.90).all()
    assert (covered / 400 < 0.99).all()


def test_quantiles_lie_between_order_statistics() -> None:
    values = np.arange(1001.0)
    found = quantile_estimate(np.random.default_rng(3).permutation(values), 0.5, np.arange(1001))
    assert found.value == 500
    assert (found.low, found.high) == (468.0, 532.0)
    edge = quantile_estimate(values[:5], 0.99, np.arange(5))
    assert edge.low <= edge.value <= edge.high == 4


def test_divergence_is_exact() -> None:
    logits = np.random.default_rng(4).normal(scale=4, size=(2, 5, 50)).astype(np.float32)
    p, q = (log_softmax(one) for one in logits)
    assert np.exp(p).sum(axis=1) == pytest.approx(np.ones(5))
    expected = [
        sum(math.exp(a) * (a - b) for a, b in zip(*rows, strict=True))
        for rows in zip(p, q, strict=True)
    ]
    assert FullRows(p).divergence(q) == pytest.approx(expected)
    assert FullRows(p).divergence(p) == pytest.approx(np.zeros(5), abs=1e-15)


def test_large_logits_neither_overflow_nor_lose_the_sum() -> None:
    rows = log_softmax(np.array([[1e30, 0, 0], [-1e30, -1e30, -1e30]], np.float32))
    assert rows[0, 0] == 0
    assert rows[1] == pytest.approx(-math.log(3))


def test_a_sample_of_the_rest_estimates_without_bias() -> None:
    source = np.random.default_rng(5)
    p = log_softmax(source.normal(scale=3, size=(1, 400)).astype(np.float32))
    q = log_softmax((p + source.normal(scale=0.5, size=p.shape)).astype(np.float32))
    exact = FullRows(p).divergence(q)[0]
    found = []
    for offset in (np.arange(500) + 0.5) / 500:
        ids, rest = _keep(p[0], 16, 8, offset)
        rows = SampledRows(
            ids=ids[None],
            log_p=p[:, ids],
            num_top=16,
            log_rest=np.array([rest]),
            log_target=np.zeros(1),
        )
        assert rows.best() == FullRows(p).best()
        found.append(rows.divergence(q)[0])
    assert np.mean(found) == pytest.approx(exact, rel=0.01)
    assert np.std(found) > 0


def test_windows_score_each_token_once_and_blocks_end_with_them() -> None:
    windows = Windows(ids=np.arange(1000, dtype=np.int32), context=300, score="all", bos_id=None)
    assert [len(window) for window in windows] == [300, 300, 300, 100]
    assert windows.num_scored == 996
    blocks = windows.blocks()
    assert len(blocks) == 996
    assert (np.diff(blocks) >= 0).all()
    assert np.bincount(blocks).max() == 64
    assert blocks[298] != blocks[299]
    half = Windows(ids=windows.ids, context=300, score="half", bos_id=7)
    assert half.num_scored == 3 * 149
    assert all(window[0] == 7 for window in half)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("so 5 + 13 = 18\n#### 18", True),
        ("She makes $18.00", True),
        ("18", True),
        ("1,018", False),
        ("18 dollars for 9 eggs", False),
        ("-18", False),
        ("no number", False),
        ("", False),
    ],
)
def test_gsm8k_compares_the_last_number(answer: str, is_right: bool) -> None:
    problem = {"question": "?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}
    assert Gsm8k().judge(problem, answer, is_chat=True)[0] is is_right


def test_gsm8k_s_thousands_have_commas() -> None:
    problem = {"question": "?", "answer": "#### 70,000"}
    assert Gsm8k().judge(problem, "$70000.", is_chat=False)[0]
