"""Repeated tests: e-values of ranks, their running sum, and the level that p-values and the sum share."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from fedclade.clustering import repeated_test
from fedclade.clustering.repeated_test import (
    ENOUGH,
    LEAST,
    MOST_SHUFFLES,
    RepeatedTest,
    compute_largest_e_value,
    compute_least_share,
    compute_rank_e_value,
    draw_e_value,
    find_smallest_group,
    get_weight,
    is_due,
)


@pytest.mark.parametrize("shuffles", [1, 7, 99, 100, 3333, 10_000])
def test_e_values_of_equally_likely_ranks_have_a_mean_of_at_most_one_and_fall(shuffles):
    e_values = [compute_rank_e_value(rank, shuffles) for rank in range(1, shuffles + 2)]
    assert np.mean(e_values) <= 1 + 1e-12
    assert all(one >= other for one, other in pairwise(e_values))
    assert min(e_values) >= LEAST
    if shuffles <= 99:  # no rank is cut off, and nothing is given away
        assert np.mean(e_values) == pytest.approx(1)


@pytest.mark.parametrize("enough", [1, 2, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_drawn_e_values_have_a_mean_of_at_most_one_with_ties_and_early_stops(
    monkeypatch, enough, batch
):
    """All outcomes of a statistic in the true order and in four shuffles: three values, one of them twice as likely."""
    monkeypatch.setattr(repeated_test, "ENOUGH", enough)
    total, shuffles = 0.0, 4
    outcomes = list(product([0.0, 1.0, 1.0, 2.0], repeat=shuffles + 1))
    for observed, *others in outcomes:
        left = iter(others)
        total += draw_e_value(
            observed,
            lambda count, left=left: np.array([next(left) for _ in range(count)]),
            4,
            batch,
        )
    assert total / len(outcomes) <= 1 + 1e-12


def test_drawing_stops_once_the_rank_is_large_and_goes_on_where_it_is_not():
    drawn: list[int] = []

    def sample(value: float):
        def draw(count: int) -> np.ndarray:
            drawn.append(count)
            return np.full(count, value)

        return draw

    assert draw_e_value(0.0, sample(1.0), 10_000, 10_000) == LEAST
    assert sum(drawn) == ENOUGH
    drawn.clear()
    assert draw_e_value(1.0, sample(0.0), 10_000, 3000) == compute_rank_e_value(1, 10_000)
    assert sum(drawn) == 10_000
    assert max(drawn) <= 3000
    drawn.clear()
    # a difference by rounding only
    assert draw_e_value(1.0, sample(1.0 - 1e-14), 10_000, 10_000) == LEAST


def test_weights_add_up_to_one_and_fall():
    weights = [get_weight(number) for number in range(1, 5001)]
    assert all(one > other > 0 for one, other in pairwise(weights))
    assert sum(weights) == pytest.approx(1 - 1 / np.log2(5002))
    assert weights[15] == pytest.approx(4.8e-3, rel=0.01)
    assert weights[4999] == pytest.approx(1.9e-6, rel=0.05)


def test_occasions_are_due_at_doubling_intervals():
    assert [occasion for occasion in range(1, 100) if is_due(occasion)] == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    ]
    assert sum(map(is_due, range(1, 5001))) == 24


@pytest.mark.parametrize("level", [0.5, 0.01, 0.0025, 1e-4, 1e-7])
@pytest.mark.parametrize("views", [1, 2])
def test_the_levels_of_first_tests_and_of_the_sum_add_up_to_the_level(level, views):
    test = RepeatedTest(level, views=views)
    spent = 0.0
    for _ in range(test.first_tests):
        assert test.is_by_p_value
        # the least p-value is small enough
        assert views / (test.shuffles + 1) <= test.next_level
        spent += test.next_level
        test = test.count()
        assert test.level_left == pytest.approx(level - spent)
    assert not test.is_by_p_value
    assert spent + test.next_level == pytest.approx(level)
    assert test.level_left == pytest.approx(test.next_level)
    later = test.count()
    assert later.next_level == test.next_level
    assert later.level_left == pytest.approx(test.next_level * (1 - get_weight(1)))


def test_as_many_first_tests_use_p_values_as_shuffles_resolve_and_three_at_most():
    assert [RepeatedTest(level).first_tests for level in (0.05, 0.0025, 3e-4, 1e-4)] == [3, 3, 1, 0]
    assert RepeatedTest(0.0025, views=2).first_tests == 2
    assert RepeatedTest(0.0025, views=2).shuffles == MOST_SHUFFLES // 2


def test_the_running_sum_adds_and_multiplies_as_written():
    test = RepeatedTest(1e-7)  # no first tests
    added = test.add(10.0).add(4.0)
    assert added.total == pytest.approx(get_weight(1) * 10 + get_weight(2) * 4)
    assert added.tests == 2
    fresh = test.add(10.0, fresh=True).add(4.0, fresh=True)
    assert fresh.total == pytest.approx((get_weight(1) * 10 + get_weight(2)) * 4)
    again = added.restart()
    assert (again.total, again.tests) == (0.0, 2)
    assert added.anytime_p_value == pytest.approx(1 / added.total)
    assert again.anytime_p_value == 1.0
    assert test.add(1e308, fresh=True).add(1e308, fresh=True).total == 1e300


@pytest.mark.parametrize("fresh", [False, True])
def test_a_sum_reaches_its_threshold_as_seldom_as_the_level_says(fresh):
    """Uniform ranks, three in each check, 40,000 runs of 60 checks; at level 0.05 with four standard errors."""
    draw, runs, level, shuffles = np.random.default_rng(0), 40_000, 0.05, 333
    table = np.array([compute_rank_e_value(rank, shuffles) for rank in range(1, shuffles + 2)])
    total, largest = np.zeros(runs), np.zeros(runs)
    for number in range(1, 61):
        e_value = np.zeros(runs)
        for _ in range(3):
            e_value = (e_value + 1 / 3) * table[draw.integers(0, shuffles + 1, runs)]
        weight = get_weight(number)
        total = (total + weight) * e_value if fresh else total + weight * e_value
        largest = np.maximum(largest, total)
    share = (largest >= 1 / level).mean()
    assert 0 < share <= level + 4 * (level * (1 - level) / runs) ** 0.5


def test_the_smallest_group_that_can_be_found():
    assert compute_least_share(20, 2) == 1 / 190
    assert compute_least_share(4, 2) == 2 / 6
    first = RepeatedTest(0.0025)

    def by_p_value(size: int) -> bool:
        return first.can_find(p_value=compute_least_share(20, size), e_value=0.0)

    assert find_smallest_group(20, by_p_value) == 3  # 1/1140 is below the level 1/800
    late = RepeatedTest(0.0025, tests=40)

    def by_e_value(size: int) -> bool:
        e_value = compute_largest_e_value(compute_least_share(20, size), 4)
        return late.can_find(p_value=0.0, e_value=e_value)

    assert find_smallest_group(20, by_e_value) == 3  # a pair has q of about 900
    assert find_smallest_group(20, lambda size: False) is None
    assert find_smallest_group(1, lambda size: True) is None


def test_a_test_that_can_find_nothing_any_more_is_known():
    with_halves = compute_largest_e_value(0.0, 2)
    test = RepeatedTest(0.0025, tests=3)
    assert test.can_ever_find(with_halves)
    assert not RepeatedTest(0.0025, tests=10).can_ever_find(with_halves)
    assert RepeatedTest(0.0025, tests=10, total=1e4).can_ever_find(with_halves)
    assert RepeatedTest(0.0025, tests=5000).can_ever_find(compute_largest_e_value(0.0, 4))
