"""Query for the gains of a network's client: how much better its model is than simpler models.

Each client compares the model that it uses after the run with the model of its cluster and with a
trivial predictor, on its own test rows. The test rows never leave the client, so the client itself
computes the scores, their confidence intervals and the gains, and reports only these numbers. They
reveal more than an evaluation, such as how often the most frequent label occurs, so clients with a
privacy budget refuse the query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedclade.core import DataSpec, LocalData, LocalStore, RowQuery, rng
from fedclade.runs import (
    CLUSTER,
    OWN,
    TRIVIAL,
    predict_in_parts,
    predict_trivially,
    without_unfit_baseline,
)
from fedclade.tasks import Interval
from fedclade.training import INTERVAL_KINDS, ClientRows

MOST_ROWS = 2**53
"""Largest number of test rows in a reply: float64 represents all integers up to it exactly."""

NUMBERS = 3
"""How many numbers of a reply describe one interval: the value, and the two ends."""


@dataclass(frozen=True, eq=False)
class GainQuery(RowQuery):
    """Query for the scores and gains of a client's models on its own test rows.

    A reply is a row of 17 float64 numbers: the number of test rows; the index of the kind of
    intervals in :data:`~fedclade.training.INTERVAL_KINDS`; and five intervals of three numbers, the
    value with the lower and the upper end. The first three intervals are the scores of the trivial
    predictor, of the model of the client's cluster and of the client's own model. The other two are
    the gains of the client's deployed model over the trivial predictor and over the model of its
    cluster. Unknown numbers are NaN.

    Parameters
    ----------
    model
        Shared model of the client's cluster, ``[S]`` with S entries.
    has_cluster_model
        Whether ``model`` is usable without personal parameters of the client.
    has_own_model
        Whether the client's deployed model is its own: a model that the client stores, or else
        ``model`` with the client's personal parameters.
    seed
        Seed of the run, by which test rows are assigned to the groups of the jackknife that
        estimates the intervals.
    """

    kind = "gains"
    mechanism = "none"
    discloses = "gains"
    reveals = "scores of several models on their test rows"
    dtype = torch.float64
    counts_as = "evaluations"
    needs_min_part = False

    model: Tensor
    has_cluster_model: bool
    has_own_model: bool
    seed: int

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        """Return the shape of a reply: one row of 17 numbers."""
        return (2 + NUMBERS * len(INTERVALS),)

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Return a client's reply: scores and gains of its models on its own test rows."""
        inputs, targets = data.test_examples
        spec = data.spec
        trivial = predict_trivially(
            spec.task, data.targets, targets, spec.outputs, scale=data.task.target_scale
        )
        outputs = {TRIVIAL: trivial}
        shared = data.load_model(self.model)
        if self.has_cluster_model:
            outputs[CLUSTER] = predict_in_parts(shared, inputs, inputs.device)
        if self.has_own_model:
            own = data.load_own_model()
            if own is None and not self.has_cluster_model:
                own = shared  # with the client's personal parameters
            if own is not None:
                outputs[OWN] = predict_in_parts(own, inputs, inputs.device)
        outputs = without_unfit_baseline(data.task, outputs)
        draw = rng.generator(self.seed, "groups of test rows", self.ids[0])
        rows = ClientRows(data.task, targets, outputs, draw)
        deployed = OWN if OWN in outputs else CLUSTER
        found: list[float] = [len(targets), INTERVAL_KINDS.index(rows.kind)]
        for is_gain, name in INTERVALS:
            if name not in outputs or (is_gain and (deployed not in outputs or name == deployed)):
                interval = Interval(math.nan)
            elif is_gain:
                interval = rows.gain(deployed, name)
            else:
                interval = rows.score(name)
            found += _numbers_of(interval)
        return torch.tensor(found, dtype=self.dtype)

    def is_valid(self, row: Tensor) -> bool:
        """Return whether a reply is plausible.

        The number of test rows and the index of the kind of intervals must be in their ranges, and
        each score and gain must lie within its confidence interval.
        """
        n_rows, kind, *rest = row.tolist()
        if not (n_rows.is_integer() and 0 <= n_rows <= MOST_ROWS):
            return False
        if kind not in range(len(INTERVAL_KINDS)):
            return False
        return all(_is_ordered(rest[at : at + NUMBERS]) for at in range(0, len(rest), NUMBERS))


INTERVALS: tuple[tuple[bool, str], ...] = (
    (False, TRIVIAL),
    (False, CLUSTER),
    (False, OWN),
    (True, TRIVIAL),
    (True, CLUSTER),
)
"""Intervals of a reply: whether the interval is a gain over a model, and the model's name."""


def _numbers_of(interval: Interval) -> list[float]:
    """Return the value and the two ends of an interval; NaN for unknown ends."""
    ends = (interval.low, interval.high)
    return [interval.value, *(math.nan if end is None else end for end in ends)]


def _is_ordered(numbers: Sequence[float]) -> bool:
    """Return whether a value lies within its confidence interval, or has none.

    Parameters
    ----------
    numbers
        The value, the lower end and the upper end of its interval; both ends are NaN if there is no
        interval. The result is False if any of the three is infinite.
    """
    value, low, high = numbers
    if any(math.isinf(number) for number in numbers):
        return False
    if math.isnan(low) or math.isnan(high):
        return math.isnan(low) and math.isnan(high)
    return low <= value <= high
