"""Analysis of a comparison of tuned methods: differences, tests, ranks and costs.

Seeds of a data set draw different test rows of the same clients, so that the runs with different
seeds are not independent. Differences between two methods in one data set are therefore tested by
the corrected resampled t-test (Nadeau and Bengio 2003, "Inference for the generalization error",
section 4.3). The data sets are independent of each other. Mean ranks over data sets are tested as in
Demšar 2006, "Statistical comparisons of classifiers over multiple data sets": by Friedman's test and
Nemenyi's critical difference (section 3.2.2), and against the best method by Holm's procedure
(section 3.2.3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table

from fedclade.core import ConfigError
from fedclade.report import (
    LEVEL,
    Difference,
    Ranks,
    corrected_difference,
    holm,
    new_table,
    rank_methods,
)
from fedclade.sweeps.tuned import TunedRun

BASELINE = "fedavg"
"""Method whose costs are the unit of the other methods' costs."""

TEST_TO_TRAIN = 0.2 / 0.64
"""Number of test rows as a multiple of training rows, which all seeds of a data set share.

A fifth of a client's rows is test data, and a fifth of the rest is validation data.
"""


@dataclass(frozen=True, eq=False)
class SetResults:
    """Results of all methods on one data set.

    Parameters
    ----------
    name
        Name of the data set.
    runs
        All runs on the data set.
    """

    name: str
    runs: Sequence[TunedRun]

    @cached_property
    def tests(self) -> Mapping[str, Mapping[int, TunedRun]]:
        """The runs to compare, by method and seed; the methods in the order of their first run."""
        found: dict[str, dict[int, TunedRun]] = {run.method: {} for run in self.runs}
        for run in self.runs:
            if run.purpose == "test":
                found[run.method][run.seed] = run
        return {method: runs for method, runs in found.items() if runs}

    @cached_property
    def costs(self) -> Mapping[str, TunedRun]:
        """The run that measures the costs of each method; failed runs are left out."""
        found = {run.method: run for run in self.runs if run.purpose == "cost"}
        return {method: run for method, run in found.items() if not run.failure}

    @cached_property
    def failures(self) -> Mapping[str, Sequence[TunedRun]]:
        """Failed runs of each method, trials included."""
        found: dict[str, list[TunedRun]] = defaultdict(list)
        for run in self.runs:
            if run.failure:
                found[run.method].append(run)
        return found

    @property
    def metric(self) -> str:
        """Name of the metric."""
        return next((run.metric for run in self.runs if run.metric), "")

    @property
    def sign(self) -> int:
        """1 if higher scores are better, otherwise -1."""
        finished = [run for run in self.runs if run.metric]
        return 1 if not finished or finished[0].higher_is_better else -1

    @property
    def clients(self) -> int:
        """Number of clients."""
        return max(run.clients for run in self.runs)

    @property
    def seeds(self) -> list[int]:
        """Seeds of the runs to compare."""
        return sorted({seed for runs in self.tests.values() for seed in runs})

    def scores(self, method: str) -> dict[int, float]:
        """Return the scores of a method by seed, without missing scores."""
        found = {seed: run.score for seed, run in self.tests.get(method, {}).items()}
        return {seed: score for seed, score in found.items() if score is not None}

    @cached_property
    def complete(self) -> list[str]:
        """Methods with a score for every seed, the best mean score first."""
        methods = [method for method in self.tests if set(self.scores(method)) == set(self.seeds)]
        return sorted(methods, key=lambda method: -self.sign * self.mean(method))

    def mean(self, method: str) -> float:
        """Return the mean score of a method over its seeds."""
        return fmean(self.scores(method).values())

    def difference(self, method: str, other: str) -> Difference | None:
        """Return how much better a method is than another one; None if they share no seed."""
        own, others = self.scores(method), self.scores(other)
        pairs = [self.sign * (own[seed] - others[seed]) for seed in sorted(own.keys() & others)]
        return corrected_difference(pairs, TEST_TO_TRAIN) if pairs else None

    @cached_property
    def p_values(self) -> Mapping[str, float]:
        """Holm-corrected p-values of the differences between the best method and all others.

        The best method is not contained. Only methods with a score for every seed are tested.
        """
        if not self.complete:
            return {}
        best = self.complete[0]
        raw: dict[str, float] = {}
        for method in self.complete[1:]:
            difference = self.difference(best, method)
            if difference is not None and difference.p_value is not None:
                raw[method] = difference.p_value
        return holm(raw)

    @property
    def sole_best(self) -> str | None:
        """The best method, if it is significantly better than all others; otherwise None."""
        others = self.p_values
        is_first = len(others) == len(self.tests) - 1 > 0 and max(others.values()) < LEVEL
        return self.complete[0] if is_first else None

    def steps(self, method: str) -> float | None:
        """Return the training steps of a method as a multiple of FedAvg's."""
        return self._multiple(method, "steps")

    def bytes_up(self, method: str) -> float | None:
        """Return the bytes that clients send, as a multiple of FedAvg's."""
        return self._multiple(method, "bytes_up")

    def bytes_down(self, method: str) -> float | None:
        """Return the bytes that clients receive, as a multiple of FedAvg's."""
        return self._multiple(method, "bytes_down")

    def _multiple(self, method: str, number: str) -> float | None:
        own, unit = self.costs.get(method), self.costs.get(BASELINE)
        if own is None or unit is None:
            return None
        numerator, denominator = getattr(own, number), getattr(unit, number)
        return numerator / denominator if numerator is not None and denominator else None

    def rounds(self, method: str) -> float | None:
        """Return the mean number of rounds to the best score on validation data.

        It is a multiple of FedAvg's mean number of rounds.
        """
        own, unit = self._best_rounds(method), self._best_rounds(BASELINE)
        return fmean(own) / fmean(unit) if own and unit else None

    def _best_rounds(self, method: str) -> list[int]:
        runs = self.tests.get(method, {}).values()
        return [run.best_round for run in runs if run.best_round is not None]


@dataclass(frozen=True, eq=False)
class TunedResults:
    """Results of a comparison of tuned methods.

    Parameters
    ----------
    runs
        Results of all runs.
    """

    runs: Sequence[TunedRun]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("a comparison should have at least 1 run, got 0")

    @cached_property
    def sets(self) -> list[SetResults]:
        """Results of each data set that has runs to compare."""
        names = dict.fromkeys(run.set for run in self.runs)
        found = [SetResults(name, [run for run in self.runs if run.set == name]) for name in names]
        return [each for each in found if each.tests]

    @cached_property
    def methods(self) -> list[str]:
        """All methods, in the order of their first run."""
        return list(dict.fromkeys(run.method for run in self.runs))

    @cached_property
    def ranks(self) -> Ranks | None:
        """Mean ranks of the methods over the data sets, by their mean scores over the seeds.

        A method that lacks the score of a seed, because its training failed, has the last rank in
        this data set. None with fewer than three methods or four data sets.
        """
        scores: dict[tuple[str, int], dict[str, float]] = {}
        for each in self.sets:
            by_method: dict[str, float] = {}
            for method in each.tests:
                is_complete = method in each.complete
                by_method[method] = each.sign * each.mean(method) if is_complete else -math.inf
            scores[each.name, 0] = by_method
        return rank_methods(scores)

    @cached_property
    def p_values(self) -> Mapping[str, float]:
        """Holm-corrected p-values of the difference between the best mean rank and each other one.

        The statistic is the difference of mean ranks over the square root of k (k + 1) / 6 N, for k
        methods and N data sets, which is about normal (Demšar 2006, section 3.2.3).
        """
        ranks = self.ranks
        if ranks is None:
            return {}
        from scipy.stats import norm  # imported here because the import is slow

        k = len(ranks.mean)
        error = math.sqrt(k * (k + 1) / (6 * ranks.sets))
        best, *others = ranks.mean
        raw = {
            method: 2 * float(norm.sf((ranks.mean[method] - ranks.mean[best]) / error))
            for method in others
        }
        return holm(raw)

    @property
    def sole_best(self) -> str | None:
        """The method with the best mean rank, if significantly better than all; otherwise None."""
        others = self.p_values
        ranks = self.ranks
        if ranks is None or not others or max(others.values()) >= LEVEL:
            return None
        return next(iter(ranks.mean))

    def mean_cost(self, method: str, name: str) -> float | None:
        """Return the geometric mean of a method's cost over the data sets.

        Parameters
        ----------
        method
            The method.
        name
            The cost, as a multiple of FedAvg's: ``steps``, ``bytes_up``, ``bytes_down`` or
            ``rounds``.

        Returns
        -------
        float or None
            0 if the method has no such cost; None if the cost is unknown in a data set.
        """
        costs = [getattr(each, name)(method) for each in self.sets]
        if any(cost is None for cost in costs):
            return None
        if min(costs) == 0:
            return 0.0
        return math.exp(fmean(math.log(cost) for cost in costs))

    def table(self) -> Group:
        """Return all tables for the terminal: one for each data set, and the mean ranks."""
        parts: list[RenderableType] = [_set_table(each) for each in self.sets]
        if self.ranks is not None:
            parts.append(self.ranks.table())
        return Group(*parts)


HEADINGS = (
    "method",
    "score",
    "difference to fedavg",
    "p (Holm)",
    "steps",
    "bytes up",
    "bytes down",
    "rounds",
)
"""Headings of the table of a data set; see :func:`set_rows`."""


def set_rows(results: SetResults) -> list[list[str]]:
    """Return the rows of the table of a data set, the best method first.

    Differences have 95 % intervals; costs are multiples of FedAvg's.
    """
    incomplete = [method for method in results.tests if method not in results.complete]
    return [_set_row(results, method) for method in [*results.complete, *incomplete]]


def _set_row(results: SetResults, method: str) -> list[str]:
    scores = results.scores(method)
    score = "failed"
    if scores:
        score = write_score(results, fmean(scores.values()))
        if missing := len(results.seeds) - len(scores):
            score += f" ({missing} of {len(results.seeds)} failed)"
    p_value = results.p_values.get(method)
    costs = (
        results.steps(method),
        results.bytes_up(method),
        results.bytes_down(method),
        results.rounds(method),
    )
    return [
        method,
        score,
        "" if method == BASELINE else _write_difference(results, method),
        "" if p_value is None else write_p_value(p_value),
        *("" if cost is None else f"{cost:.2f}" for cost in costs),
    ]


def _write_difference(results: SetResults, method: str) -> str:
    """Return the difference between a method and FedAvg, with its interval."""
    difference = results.difference(method, BASELINE)
    if difference is None:
        return ""
    text = write_score(results, results.sign * difference.mean, signed=True)
    if difference.half_width is None:
        return text
    return f"{text} ± {write_score(results, difference.half_width)}"


def write_score(results: SetResults, score: float, *, signed: bool = False) -> str:
    """Return a score or a difference as text: shares in percent, errors as they are.

    Errors have three significant digits of the data set's smallest mean score.
    """
    sign = "+" if signed else ""
    if results.sign > 0:
        text = f"{100 * score:{sign}.1f}"
    else:
        least = min((results.mean(method) for method in results.complete), default=1.0)
        digits = max(0, 2 - math.floor(math.log10(least))) if least > 0 else 3
        text = f"{score:{sign}.{digits}f}"
    return text.replace("-", "−")


def write_p_value(p_value: float) -> str:
    """Return a p-value as text, with two digits or as a bound."""
    return "< 0.01" if p_value < 0.01 else f"{p_value:.2f}"


def _set_table(results: SetResults) -> Table:
    """Return the table of a data set for the terminal."""
    seeds = ", ".join(map(str, results.seeds))
    title = f"{results.name}: {results.metric} of {results.clients} clients, seeds {seeds}"
    table = new_table(title, collapse_padding=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in set_rows(results):
        table.add_row(*row)
    return table
