"""Intervals, tests and estimators against published values, other formulas and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fbt_megatron.evaluation.statistics import mcnemar_test, pass_at_k, ratio_error, wilson_interval


@pytest.mark.parametrize(("share", "count"), [(0.5, 10), (0.1, 30), (0.679, 1319), (0.02, 50)])
def test_the_ends_of_an_interval_solve_their_equation(share: float, count: int) -> None:
    """Each end p is a share from which the one found is exactly 1.96 standard deviations away."""
    low, high = wilson_interval(share, count)
    assert 0 < low < share < high < 1
    for end in (low, high):
        assert abs(share - end) / math.sqrt(end * (1 - end) / count) == pytest.approx(1.959964, rel=1e-6)


def test_intervals_of_none_and_all() -> None:
    """Rule of three with another constant: z^2 / (n + z^2)."""
    low, high = wilson_interval(0.0, 20)
    assert (low, high) == (0.0, pytest.approx(3.8414588 / 23.8414588))
    assert wilson_interval(1.0, 20) == (pytest.approx(1 - high), 1.0)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draws = np.random.default_rng(0).binomial(40, 0.3, size=4000)
    intervals = [wilson_interval(count / 40, 40) for count in draws.tolist()]
    assert np.mean([low <= 0.3 <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (3, 3), (1, 7), (12, 4)])
def test_mcnemar_counts_all_outcomes(first: int, second: int) -> None:
    """Of all ways in which the differing cases could have fallen, those at least as lopsided."""
    outcomes = [abs(2 * sum(sides) - first - second) for sides in itertools.product((0, 1), repeat=first + second)]
    expected = sum(outcome >= abs(first - second) for outcome in outcomes) / len(outcomes)
    assert mcnemar_test(first, second) == pytest.approx(expected)
    assert mcnemar_test(second, first) == mcnemar_test(first, second)


def test_mcnemar_of_many() -> None:
    assert mcnemar_test(700, 800) == pytest.approx(math.erfc(99 / math.sqrt(1500) / math.sqrt(2)), rel=1e-2)
    assert mcnemar_test(2000, 0) < 1e-300


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(1, 0, 1), (1, 1, 1), (5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 3, 2)]
)
def test_pass_at_k_counts_all_choices(samples: int, correct: int, k: int) -> None:
    choices = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_the_error_of_a_ratio_is_its_spread() -> None:
    """Groups of unequal size whose sums vary together with it; 2000 samples of 200 groups."""
    draw = np.random.default_rng(1)
    sizes = draw.integers(1, 50, size=(2000, 200)).astype(float)
    totals = sizes * draw.normal(2.0, 0.5, size=sizes.shape)
    ratios = totals.sum(axis=1) / sizes.sum(axis=1)
    errors = [ratio_error(total, size) for total, size in zip(totals, sizes, strict=True)]
    assert np.mean(errors) == pytest.approx(ratios.std(), rel=0.05)
    assert ratio_error([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(ratio_error([1.0], [2.0]))
