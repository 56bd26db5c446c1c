"""Intervals of scores and of paired differences, against their formulas and their level."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from fedclade.tasks import (
    Interval,
    jackknife_interval,
    mean_interval,
    paired_share_interval,
    share_interval,
)


@pytest.mark.parametrize(("successes", "n"), [(0, 7), (3, 7), (7, 7), (180, 200)])
def test_a_share_has_wilson_s_interval(successes, n):
    found = share_interval(successes, n)
    wilson = binomtest(successes, n).proportion_ci(method="wilson")
    assert found.value == successes / n
    assert (found.low, found.high) == pytest.approx((wilson.low, wilson.high), abs=1e-9)


def test_paired_shares_have_the_interval_of_agresti_and_min():
    # 10 rows: 4 are right by the first model only, 1 by the second only.
    first = np.array([1.0] * 4 + [0] + [1] * 3 + [0] * 2)
    second = np.array([0.0] * 4 + [1] + [1] * 3 + [0] * 2)
    found = paired_share_interval(first, second)
    only_first, only_second, n = 4.5, 1.5, 12
    centre = (only_first - only_second) / n
    half = 1.959964 * math.sqrt(only_first + only_second - (only_first - only_second) ** 2 / n) / n
    assert found.value == pytest.approx(0.3)
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_models_that_are_right_on_the_same_few_rows_are_not_certain_to_be_equal():
    found = paired_share_interval(np.ones(6), np.ones(6))
    assert found.value == 0
    assert found.low < -0.2
    assert found.high > 0.2


def test_the_interval_of_paired_shares_keeps_its_level_for_few_rows():
    draw = np.random.default_rng(0)
    chances = [0.15, 0.05, 0.6, 0.2]  # only first, only second, both, none
    cells = draw.multinomial(1, chances, size=(2000, 15)).argmax(-1)
    first = np.isin(cells, (0, 2)).astype(float)
    second = np.isin(cells, (1, 2)).astype(float)
    found = [paired_share_interval(one, other) for one, other in zip(first, second, strict=True)]
    covered = np.mean([interval.low <= 0.1 <= interval.high for interval in found])
    assert covered > 0.93


def test_a_mean_has_student_s_interval_and_none_for_a_single_value():
    values = [0.1, 0.4, 0.3, 0.8]
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    found = mean_interval(values)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert mean_interval([0.4]) == Interval(0.4)


@pytest.mark.parametrize("values", [[0.05, 0.05], [0.1 + 0.2, 0.3], [-4.0] * 5])
def test_equal_values_have_no_interval_unless_they_are_zero(values):
    found = mean_interval(values)
    assert (found.value, found.low, found.high) == (pytest.approx(values[0]), None, None)
    assert found.trend == ""
    assert mean_interval([0.0, 0.0]) == Interval(0.0, 0.0, 0.0)


def test_the_jackknife_of_a_mean_is_student_s_interval_of_its_groups():
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0])
    without = (values.sum() - values) / 4
    found = jackknife_interval(values.mean(), without)
    expected = mean_interval(values)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(
    ("value", "without"),
    [
        (0.5, [0.5, 0.5, 0.5]),  # no variation
        (0.5, [0.4, math.nan, 0.6]),  # undefined without a group
        (0.5, [0.5]),
        (math.nan, [0.4, 0.6]),
    ],
)
def test_rows_that_do_not_vary_or_are_too_few_give_no_interval(value, without):
    found = jackknife_interval(value, np.array(without))
    assert found.low is None
    assert found.high is None
    assert not found.excludes_zero


@pytest.mark.parametrize(
    ("interval", "trend"),
    [
        (Interval(1.0, 0.1, 2.0), "good"),
        (Interval(-1.0, -2.0, -0.1), "bad"),
        (Interval(1.0, 0.0, 2.0), ""),
        (Interval(1.0), ""),
    ],
)
def test_only_an_interval_beside_zero_is_clear(interval, trend):
    assert interval.excludes_zero is bool(trend)
    assert interval.trend == trend


@pytest.mark.parametrize("missed", [0, 1])
def test_an_interval_of_a_share_contains_it_whatever_the_rounding(missed: int):
    for n in range(1, 500):
        for successes in (missed, n - missed):
            interval = share_interval(successes, n)
            assert interval.low <= interval.value <= interval.high
