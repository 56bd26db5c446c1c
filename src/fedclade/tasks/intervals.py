"""Confidence intervals of scores on test rows, and of differences between models on these rows.

All intervals are 95 % confidence intervals. They describe the uncertainty due to the number of test
rows, not the uncertainty due to the random draws of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedclade.tasks.metrics import mean_and_interval

Floats = NDArray[np.float64]

Z = 1.959963984540054
"""Quantile of the normal distribution for a 95 % interval."""

GROUPS = 10
"""Largest number of groups of rows that the jackknife leaves out, one at a time."""

ROUNDING = 1e-12
"""Largest half width, as a share of the number, that may be due to rounding of equal values."""


@dataclass(frozen=True)
class Interval:
    """Number with its 95 % confidence interval.

    Both ends (``low`` and ``high``) are None if there is no interval.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval is above 0 or below 0; false without an interval."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0

    @property
    def trend(self) -> str:
        """Direction of a gain: ``good`` if the whole interval is above 0, ``bad`` if it is below 0.

        The text is empty if the interval contains 0, or if there is no interval.
        """
        if not self.excludes_zero:
            return ""
        return "good" if self.value > 0 else "bad"


def share_interval(successes: float, n: int) -> Interval:
    """Return the share of successes among n rows, with Wilson's score interval.

    In contrast to the normal interval, Wilson's interval is accurate for few rows, and for shares
    near 0 and 1 (Wilson, JASA 1927).

    >>> interval = share_interval(9, 10)
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.596, 0.982)
    """
    share = successes / n
    center = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    # At a share of 0 or 1 an end equals the share, and rounding must not put it on the wrong side.
    low = min(share, center - half)
    high = max(share, center + half)
    return Interval(share, max(0.0, low), min(1.0, high))


def paired_share_interval(first: Floats, second: Floats) -> Interval:
    """Return the difference between the shares of two models on the same n rows, with its interval.

    The interval is the normal interval after half a row is added to each cell of the 2 × 2 table of
    the two models' results. This keeps the confidence level correct for few rows (Agresti and Min,
    Statistics in Medicine 2005).

    Parameters
    ----------
    first, second
        1 for each row that a model predicts correctly, else 0, ``[n]``.
    """
    n = len(first)
    only_first = float(np.sum((first == 1) & (second == 0))) + 0.5
    only_second = float(np.sum((first == 0) & (second == 1))) + 0.5
    difference = (only_first - only_second) / (n + 2)
    spread = (only_first + only_second) - (only_first - only_second) ** 2 / (n + 2)
    half = Z * math.sqrt(spread) / (n + 2)
    return Interval(float(np.mean(first - second)), difference - half, difference + half)


def mean_interval(values: Sequence[float] | Floats) -> Interval:
    """Return the mean of values with its interval by Student's t.

    There is no interval for fewer than two values. There is none either if all values are equal,
    since equal values do not prove that the mean is certain. Values that are all 0 are an
    exception: both ends of the interval are then 0.
    """
    mean, half = mean_and_interval(np.asarray(values, dtype=np.float64).tolist())
    if half is None or not math.isfinite(half):
        return Interval(mean)
    if mean != 0 and half <= ROUNDING * abs(mean):
        return Interval(mean)
    return Interval(mean, mean - half, mean + half)


def jackknife_interval(value: float, without_groups: Floats) -> Interval:
    """Return a score with its interval by the jackknife.

    The jackknife computes the score without one group of rows at a time. The interval is symmetric,
    by Student's t with g − 1 degrees of freedom for g groups.

    Parameters
    ----------
    value
        The score on all rows.
    without_groups
        The score without each of g groups of rows of about equal size, ``[g]``; NaN where the score
        is undefined.

    Returns
    -------
    Interval
        The score with its interval. There is no interval for fewer than two groups, if the score is
        undefined without some group, or if it is the same without each group: rows that do not vary
        do not prove that the score is certain.
    """
    groups = len(without_groups)
    if groups < 2 or not math.isfinite(value) or not bool(np.isfinite(without_groups).all()):
        return Interval(value)
    from scipy.stats import t

    deviations = without_groups - without_groups.mean()
    error = math.sqrt((groups - 1) / groups * float(np.sum(deviations**2)))
    if error <= ROUNDING * abs(value):
        return Interval(value)
    half = float(t.ppf(0.975, groups - 1)) * error
    return Interval(value, value - half, value + half)
