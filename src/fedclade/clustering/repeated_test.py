"""Repeated tests for clusters: p-values for the first tests, then a running sum of e-values.

A run that tests its clients in many rounds shares one significance level α′ among all tests. Tests
by p-values soon become too expensive: the j-th test would have the level α′/(j(j + 1)), and a
p-value as small as this level needs at least j(j + 1)/α′ shuffles. So only the first J tests (at
most :data:`FIRST_TESTS`) compare a p-value with their part of the level. All later tests (checks)
share the level α″ = α′/(J + 1): they compare a running sum of e-values with 1/α″. Each test takes
at most :data:`MOST_SHUFFLES` shuffles.

*E-values.* An e-value is a non-negative statistic with a mean of at most 1 under the null
hypothesis that all clients have one distribution. The rank k of a statistic among itself and B
shuffles is uniform under that hypothesis (ties make the rank larger), so a decreasing function of k
with mean 1 is an e-value (:func:`compute_rank_e_value`).

*One check* has an e-value q, which may be a product of several e-values, and so be far larger than
the number of shuffles (:mod:`fedclade.clustering.parts_in_turn`).

*All checks.* The t-th check adds w_t·q to a running sum R, with weights w_t that add up to 1
(:func:`get_weight`). Under the null hypothesis R has a mean of at most 1, whatever the dependence
between the checks. This also holds if R is multiplied by e-values of data that had not been tested
before. By Markov's and Ville's inequalities, the probability that R ever reaches 1/α″ is at most
α″.

The proof with its assumptions is in ``docs/rcfl.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

MOST_SHUFFLES = 10_000
"""Largest number of shuffles (random orders of clients) in one test of all clients."""

FIRST_TESTS = 3
"""Largest number J of tests that use p-values."""

ENOUGH = 100
"""Largest rank whose e-value is above the smallest one; no more shuffles are drawn beyond it."""

LEAST = 0.2
"""E-value of all ranks above :data:`ENOUGH`.

It is not 0, so that a single part of the data cannot make a product of e-values vanish.
"""

POWER = -1.5
"""Exponent of the rank in the e-value, so that e-values fall with the rank."""

LARGEST_SUM = 1e300
"""Largest running sum: far above every threshold, and small enough not to overflow."""

ROUNDING = 1e-12
"""Difference of statistics that may be rounding."""


# E-values, their running sum, and the level that repeated tests share.


def compute_rank_e_value(rank: int, shuffles: int) -> float:
    """Compute the e-value of the rank of a statistic among itself and its shuffles.

    The e-value is 0.2 + 0.8 · (B + 1) · k^−1.5 / Σ_{i ≤ B + 1} i^−1.5 for ranks k up to 100, and
    0.2 for larger ranks, which need not be known exactly. Its mean over equally likely ranks is at
    most 1. Since the e-value never grows with the rank, its mean is also at most 1 if equal values
    make ranks larger.

    Parameters
    ----------
    rank
        Rank k: 1 + the number of shuffles in which the statistic is at least as large.
    shuffles
        Number B of shuffles that are drawn unless the rank exceeds 100 before.
    """
    if rank > ENOUGH:
        return LEAST
    return LEAST + (1 - LEAST) * (shuffles + 1) * rank**POWER / _sum_powers(shuffles + 1)


@cache
def _sum_powers(count: int) -> float:
    """Return Σ i^−1.5 over i from 1 to ``count``, the normalization of e-values."""
    return float((np.arange(1, count + 1, dtype=np.float64) ** POWER).sum())


def draw_e_value(
    observed: float, sample: Callable[[int], NDArray[np.float64]], shuffles: int, batch: int
) -> float:
    """Compute the e-value of a statistic by shuffling the clients.

    No more shuffles are drawn once the rank of the statistic exceeds 100.

    Parameters
    ----------
    observed
        The statistic in the true order of clients.
    sample
        Function of a number of shuffles that returns the statistic in as many random orders.
    shuffles
        Largest number B of shuffles.
    batch
        Largest number of shuffles that are drawn at a time.
    """
    rank = 1
    drawn = 0
    while drawn < shuffles and rank <= ENOUGH:
        # Small batches first: if there are no clusters, a few hundred shuffles usually suffice.
        count = min(batch, max(drawn, ENOUGH), shuffles - drawn)
        # A shuffle that differs by rounding only counts as equal, so that e is not too large.
        rank += int((sample(count) >= observed - ROUNDING).sum())
        drawn += count
    return compute_rank_e_value(rank, shuffles)


def get_weight(number: int) -> float:
    """Return the weight w_t with which the e-value of the t-th check is added to the running sum.

    It is w_t = 1/log₂(t + 1) − 1/log₂(t + 2), where ``number`` is t, counted from 1. All weights
    add up to 1. They fall more slowly than 1/t², so that late checks can still find clusters.
    """
    return 1 / math.log2(number + 1) - 1 / math.log2(number + 2)


def is_due(occasion: int) -> bool:
    """Return whether to test for clusters at an occasion, counted from 1 since data last changed.

    Tests take place at the occasions 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, and so become rarer:
    each test uses up a part of the level, and repeated tests of the same data find little new.
    """
    power_of_two = 1 << (occasion.bit_length() - 1)
    return occasion == power_of_two or 2 * occasion == 3 * power_of_two


@dataclass(frozen=True)
class RepeatedTest:
    """State of a series of tests that share one significance level.

    Parameters
    ----------
    level
        Significance level α′ of all tests of the series together.
    tests
        Number of tests so far.
    total
        Running sum R of weighted e-values since the clusters last changed.
    views
        Number of p-values in one test, which share the level of the test.
    """

    level: float
    tests: int = 0
    total: float = 0.0
    views: int = 1

    @property
    def shuffles(self) -> int:
        """Largest number of shuffles for each p-value of a test."""
        return MOST_SHUFFLES // self.views

    @property
    def first_tests(self) -> int:
        """Number J of first tests that use p-values.

        A test uses p-values if :attr:`shuffles` shuffles can give a p-value as small as the level
        of the test. At most :data:`FIRST_TESTS` tests use p-values.
        """
        number = 0
        while number < FIRST_TESTS and self._resolves(number + 1):
            number += 1
        return number

    def _resolves(self, number: int) -> bool:
        """Return whether the shuffles can give a p-value as small as a test's level.

        Parameters
        ----------
        number
            Number j of the test, from 1.
        """
        return self.views / (self.shuffles + 1) <= self.level / (number * (number + 1))

    @property
    def is_by_p_value(self) -> bool:
        """Whether the next test compares a p-value with its level; otherwise it uses e-values."""
        return self.tests < self.first_tests

    @property
    def next_level(self) -> float:
        """Level of the next test.

        The j-th test has the level α′/(j(j + 1)) if it uses p-values, where α′ is the level of the
        whole series. All tests that use e-values share the level α′/(J + 1), where J is the number
        of tests that use p-values.
        """
        if self.is_by_p_value:
            return self.level / ((self.tests + 1) * (self.tests + 2))
        return self.level / (self.first_tests + 1)

    @property
    def level_left(self) -> float:
        """Part of the level α′ of the whole series that remains for later tests."""
        if self.is_by_p_value:
            return self.level / (self.tests + 1)
        by_e_value = self.tests - self.first_tests
        return self.level / (self.first_tests + 1) / math.log2(by_e_value + 2)

    @property
    def anytime_p_value(self) -> float:
        """Anytime-valid p-value of all checks by e-values: 1/R, at most 1.

        R is the running sum of e-values, α′ the level of the whole series, and J the number of
        tests that use p-values. If all clients have one distribution, the probability that this
        p-value is below α′/(J + 1) in any of the checks is at most α′/(J + 1).
        """
        return min(1.0, 1 / self.total) if self.total > 0 else 1.0

    def count(self) -> RepeatedTest:
        """Return the state after one more test, which adds nothing to the running sum."""
        return replace(self, tests=self.tests + 1)

    def add(self, e_value: float, *, fresh: bool = False) -> RepeatedTest:
        """Return the state after a check, with its e-value q in the running sum R.

        The new sum is R + w_t·q, or (R + w_t)·q for data that no earlier check has tested. The
        weight w_t of the t-th check is given by :func:`get_weight`.

        Parameters
        ----------
        e_value
            E-value q of the check, which has a mean of at most 1 under the null hypothesis.
        fresh
            Whether no earlier check has tested the data, so that the mean of q is at most 1
            whatever earlier checks found. Only then may the sum be multiplied: if the same data are
            only divided into parts again, their random deviations repeat.
        """
        weight = get_weight(self.tests + 1 - self.first_tests)
        total = (self.total + weight) * e_value if fresh else self.total + weight * e_value
        return replace(self, tests=self.tests + 1, total=min(total, LARGEST_SUM))

    def restart(self) -> RepeatedTest:
        """Return the state after the clusters have changed.

        The running sum starts again from 0. The number of tests, which determines the weight of
        the next e-value, does not change.
        """
        return replace(self, total=0.0)

    def can_find(self, *, p_value: float, e_value: float, fresh: bool = False) -> bool:
        """Return whether the next test could reject the null hypothesis.

        Parameters
        ----------
        p_value
            Smallest p-value that the test could have.
        e_value
            Largest e-value that the test could have.
        fresh
            Whether no earlier check has tested the data; see :meth:`add`.
        """
        if self.is_by_p_value:
            return p_value <= self.next_level
        return self.add(e_value, fresh=fresh).anytime_p_value <= self.next_level

    def can_ever_find(self, e_value: float) -> bool:
        """Return whether the running sum can still reach its threshold.

        Parameters
        ----------
        e_value
            E-value that all later checks are assumed to have.
        """
        next_number = max(self.tests - self.first_tests, 0) + 1
        weights_left = 1 / math.log2(next_number + 1)
        return self.total + weights_left * e_value >= (self.first_tests + 1) / self.level


# The smallest group that a test can find.


def find_smallest_group(clients: int, can_find: Callable[[int], bool]) -> int | None:
    """Return the size of the smallest group of clients that a test could separate.

    The result is None if the test could not separate a group of any size.

    Parameters
    ----------
    clients
        Number n of clients. At most half of them are in the group; the other clients are one
        cluster.
    can_find
        Function of a group's size that returns whether the test could find a perfectly separate
        group of this size.
    """
    for size in range(1, clients // 2 + 1):
        if can_find(size):
            return size
    return None


def compute_least_share(members: int, group: int) -> float:
    """Return the share of random orders of n members that leave a separate group together.

    No p-value of a permutation test for the group can be smaller. If the group has half of the
    members, orders in which both halves change places count as well.

    Parameters
    ----------
    members
        Number of members.
    group
        Number of members in the separate group.
    """
    orders = math.comb(members, group)
    return (2 if 2 * group == members else 1) / orders


def compute_largest_e_value(share: float, parts: int, shuffles: int = MOST_SHUFFLES) -> float:
    """Estimate the largest e-value q that a check by parts of the clients' data can have.

    Parameters
    ----------
    share
        Share of orders that are as good as the true order (:func:`compute_least_share`).
    parts
        Number r of parts of each client's data.
    shuffles
        Largest number of shuffles in all r − 1 steps of the check together.
    """
    steps = parts - 1
    each = shuffles // steps
    largest = compute_rank_e_value(1 + math.floor(each * share), each)
    e_value = 0.0
    for _ in range(steps):
        e_value = (e_value + 1 / steps) * largest
    return e_value
