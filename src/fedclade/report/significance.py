"""Paired tests between methods, and the correction of their p-values for the number of tests."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeVar

from rich.markup import escape
from rich.table import Table

from fedclade.report.formats import NONE, count
from fedclade.report.score import Score
from fedclade.report.tables import new_table

Name = TypeVar("Name", bound=Hashable)

ALPHA = 0.05
"""Significance level of paired tests, for all tests of a comparison together."""


@dataclass(frozen=True)
class Difference:
    """Difference of two methods' mean scores on the same data, over the seeds of both.

    A positive number means that the first method is better.
    """

    mean: float
    half_width: float | None
    """Half of the 95 % interval; None with fewer than two seeds, or if a score is not finite."""
    p_value: float | None
    """p-value of the hypothesis that the methods are equal; None where the interval is None."""


def corrected_difference(differences: Sequence[float], test_to_train: float = 0.0) -> Difference:
    """Return the mean of paired differences with the corrected resampled t-test.

    The variance of the mean of n differences is estimated as (1/n + test_to_train) times their
    variance (Nadeau and Bengio 2003, "Inference for the generalization error", section 4.3). With
    ``test_to_train = 0``, the test is the ordinary paired t-test, for which the seeds must be
    independent.

    Parameters
    ----------
    differences
        Difference of the two methods' scores for each seed, at least one.
    test_to_train
        Number of test rows as a multiple of training rows, if all seeds draw their test rows from
        the same rows; otherwise 0.
    """
    if not all(map(math.isfinite, differences)):  # a run diverged
        return Difference(math.nan, None, None)
    mean = fmean(differences)
    n = len(differences)
    if n < 2:
        return Difference(mean, None, None)
    from scipy.stats import t  # imported here because the import is slow

    error = stdev(differences) * math.sqrt(1 / n + test_to_train)
    half_width = float(t.ppf(0.975, n - 1)) * error
    if error == 0:
        return Difference(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return Difference(mean, half_width, 2 * float(t.sf(abs(mean) / error, n - 1)))


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Return p-values that are corrected for the number of tests by Holm's procedure.

    The smallest of n p-values is multiplied by n, the next one by n - 1, and so on; no corrected
    p-value is smaller than the one before, or larger than 1 (Holm 1979).

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[Name, float] = {}
    largest = 0.0
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    for place, (name, p_value) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - place) * p_value))
        corrected[name] = largest
    return corrected


@dataclass(frozen=True)
class PairedTest:
    """Test of two configurations on the seeds that both were run with."""

    first: str
    second: str
    seeds: int
    """Number of common seeds."""
    difference: Difference
    """How much better the first configuration is, with its 95 % interval and raw p-value."""
    p_value: float | None = None
    """p-value, corrected by Holm's procedure; None with fewer than two common seeds."""

    @property
    def better(self) -> str | None:
        """The significantly better configuration; None if the difference is not significant."""
        if self.p_value is None or self.p_value >= ALPHA:
            return None
        return self.first if self.difference.mean > 0 else self.second


@dataclass(frozen=True)
class PairedTests:
    """Paired tests between the configurations of a comparison.

    Parameters
    ----------
    score
        The metric.
    tests
        Tests of pairs of configurations. Their p-values are corrected together.
    test_to_train
        See :func:`corrected_difference`.
    """

    score: Score
    tests: Sequence[PairedTest]
    test_to_train: float = 0.0

    def __iter__(self) -> Iterator[PairedTest]:
        return iter(self.tests)

    def __len__(self) -> int:
        return len(self.tests)

    def winner(self, labels: Sequence[str]) -> str | None:
        """Return the configuration that is significantly better than all others of ``labels``.

        None if there is no such configuration, or if a pair of ``labels`` was not tested.
        """
        beaten: dict[str, set[str]] = {label: set() for label in labels}
        for test in self.tests:
            better = test.better
            if better in beaten:
                beaten[better].add(test.second if better == test.first else test.first)
        winners = [label for label in labels if beaten[label] >= {*labels} - {label}]
        return winners[0] if len(labels) > 1 and winners else None

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the numbers of each test, by column name."""
        return [
            {
                "first": test.first,
                "second": test.second,
                "seeds": test.seeds,
                "difference": test.difference.mean,
                "half_width": test.difference.half_width,
                "p_value": test.difference.p_value,
                "p_value_holm": test.p_value,
            }
            for test in self.tests
        ]

    @property
    def note(self) -> str:
        """Sentences that explain the tests."""
        if self.test_to_train:
            kind = f"corrected resampled t-test, test/train = {self.test_to_train:.3g}"
        else:
            kind = "paired t-test over seeds"
        return (
            f"Difference: how much better the first configuration is, ± its 95 % interval ({kind}). "
            f"p (Holm): two-sided p-value, corrected for {count(len(self.tests), 'test')}."
        )

    def table(self) -> Table:
        """Return the tests as a table for the terminal."""
        unit = f"{self.score.label}, points" if self.score.share else self.score.label
        table = new_table(f"Paired tests: {self.score.label}", caption=escape(self.note))
        for name in ("first", "second"):
            table.add_column(name, no_wrap=True, overflow="fold")
        for name in ("seeds", f"difference of {unit}", "p", "p (Holm)"):
            table.add_column(name, justify="right")
        for test in self.tests:
            table.add_row(
                escape(test.first),
                escape(test.second),
                str(test.seeds),
                self._write_difference(test.difference),
                _write_p_value(test.difference.p_value),
                _write_p_value(test.p_value),
            )
        return table

    def _write_difference(self, difference: Difference) -> str:
        """Return a difference as text with its sign, followed by half the width of its interval."""
        text = self.score.signed(difference.mean)
        if difference.half_width is None:
            return text
        half_width = self.score.digits(difference.half_width, like=difference.mean or None)
        return f"{text} ± {half_width}"


def _write_p_value(p_value: float | None) -> str:
    """Return a p-value as text; a dash if it is missing."""
    if p_value is None:
        return NONE
    if p_value < 0.001:
        return "< 0.001"
    return f"{p_value:.3f}"
