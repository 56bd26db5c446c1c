"""Scores of several models on the same rows of one client, with confidence intervals.

A report compares the models on each client's test rows, and its intervals show which differences
may be due to the small number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.tasks import (
    GROUPS,
    FittedTask,
    Interval,
    jackknife_interval,
    mean_interval,
    paired_share_interval,
    share_interval,
)
from fedclade.training.evaluation import like_targets, score

SHARES = "shares"
MEANS = "means"
JACKKNIFE = "jackknife"
INTERVAL_KINDS = (SHARES, MEANS, JACKKNIFE)
"""Kinds of confidence intervals: for shares of rows, for means over rows, and for other scores.

The jackknife interval of other scores is computed from the scores without each group of rows.
"""


class ClientRows:
    """Rows of one client, with the outputs of several models and their scores by the first metric.

    Parameters
    ----------
    task
        The task of the run.
    targets
        Targets of the n rows, ``[n, ...]``.
    outputs
        Outputs of each model for these rows, ``[n, ...]``, by name of the model.
    draw
        Random generator that divides the rows into the groups of the jackknife.
    """

    def __init__(
        self,
        task: FittedTask,
        targets: Tensor,
        outputs: Mapping[str, Tensor],
        draw: np.random.Generator,
    ) -> None:
        self._metric = task.metrics[0]
        self._task = task
        self._targets = targets
        self._outputs = {name: like_targets(task, out, targets) for name, out in outputs.items()}
        self._terms: dict[str, NDArray[np.float64]] = {}
        n = len(targets)
        self._counts = np.ones(n)
        if self._metric.whole is None:
            for name, values in self._outputs.items():
                rows = score(task, values, torch.arange(n), targets)
                self._terms[name] = rows[0].double().cpu().numpy()
                self._counts = rows[-1].double().cpu().numpy()
        order = draw.permutation(n)
        self._groups = np.array_split(order, min(n, GROUPS))
        self._without_groups: dict[str, NDArray[np.float64]] = {}

    @property
    def kind(self) -> str:
        """Kind of the confidence intervals, one of :data:`INTERVAL_KINDS`."""
        is_mean = self._metric.whole is None and self._metric.final is None
        if not is_mean or bool((self._counts != 1).any()):
            return JACKKNIFE
        is_share = self._metric.share and all(
            bool(np.isin(terms, (0, 1)).all()) for terms in self._terms.values()
        )
        return SHARES if is_share else MEANS

    def score(self, name: str) -> Interval:
        """Return the score of a model, with its confidence interval.

        The score is NaN, without an interval, if the metric is undefined for these rows.
        """
        value = self._score_rows(name, np.arange(len(self._targets)))
        kind = self.kind
        if not math.isfinite(value):
            return Interval(value)
        if kind == SHARES:
            return share_interval(float(self._terms[name].sum()), len(self._targets))
        if kind == MEANS:
            return mean_interval(self._terms[name])
        found = jackknife_interval(value, self._score_without_groups(name))
        if self._metric.share and found.low is not None and found.high is not None:
            return Interval(found.value, max(0.0, found.low), min(1.0, found.high))
        return found

    def gain(self, name: str, over: str) -> Interval:
        """Return how much better a model is than the model ``over``, with a confidence interval.

        The gain is in the unit of the metric, and is above 0 if the model is better, also for
        metrics of which lower scores are better.
        """
        if torch.equal(self._outputs[name], self._outputs[over]):
            return Interval(0.0, 0.0, 0.0)
        sign = 1 if self._metric.higher_is_better else -1
        rows = np.arange(len(self._targets))
        value = sign * (self._score_rows(name, rows) - self._score_rows(over, rows))
        kind = self.kind
        if not math.isfinite(value):
            return Interval(value)
        if kind == SHARES:
            return paired_share_interval(self._terms[name], self._terms[over])
        if kind == MEANS:
            return mean_interval(sign * (self._terms[name] - self._terms[over]))
        without = self._score_without_groups(name) - self._score_without_groups(over)
        return jackknife_interval(value, sign * without)

    def _score_without_groups(self, name: str) -> NDArray[np.float64]:
        """Return a model's scores for the jackknife, ``[groups]``.

        For each group of rows, the score is computed on all rows except for this group.
        """
        if name not in self._without_groups:
            n = len(self._targets)
            found = [self._score_rows(name, _leave_out(group, n)) for group in self._groups]
            self._without_groups[name] = np.array(found)
        return self._without_groups[name]

    def _score_rows(self, name: str, rows: NDArray[np.int64]) -> float:
        """Return a model's score on some rows; NaN if the metric is undefined for these rows."""
        metric = self._metric
        if len(rows) == 0:
            return math.nan
        if metric.whole is not None:
            outputs = self._outputs[name][rows]
            if not bool(outputs.isfinite().all()):
                return metric.worst
            # Copies, since a user's own metric may work in place.
            found = metric.whole(outputs.clone(), self._targets[rows].clone())
            if found is None:  # pyright: ignore[reportUnnecessaryComparison]  (of users)
                return math.nan
            return float(found)
        counted = float(self._counts[rows].sum())
        if counted == 0:
            return math.nan
        mean = float(self._terms[name][rows].sum()) / counted
        if math.isnan(mean):
            return metric.worst
        if metric.final is None:
            return mean
        return metric.final(mean)


def _leave_out(group: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """Return the row numbers from 0 to n − 1 that are not in a group."""
    return np.setdiff1d(np.arange(n), group)
