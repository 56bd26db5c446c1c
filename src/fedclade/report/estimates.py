"""Numbers of several runs: their mean, their interval, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedclade.report.formats import NONE, number
from fedclade.tasks import mean_and_interval

BASELINES = ("fedavg", "local", "oracle")
"""Algorithms that others are measured by."""


@dataclass(frozen=True)
class Estimate:
    """A number of several runs.

    Parameters
    ----------
    values
        One for each run that has the number; at least one.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Estimate | None:
        """Return the estimate from the values that there are; None without any."""
        known = tuple(float(value) for value in values if value is not None)
        return cls(known) if known else None

    @property
    def mean(self) -> float:
        """The mean."""
        return mean_and_interval(self.values)[0]

    @property
    def half_width(self) -> float | None:
        """Half the width of the mean's 95 % interval (Student's t); None for a single value."""
        return mean_and_interval(self.values)[1]


@dataclass(frozen=True)
class ComparisonRow:
    """What the runs of one configuration come to.

    Parameters
    ----------
    label
        The configuration's name.
    algorithm
        The algorithm's name.
    data
        The data's description.
    seeds
        One for each run.
    accuracy
        Mean over the clients, in [0, 1].
    worst10
        Mean accuracy of the worst tenth of the clients.
    perplexity
        Mean over the clients, for language data.
    ari
        Adjusted Rand index of the clusters found, where the true ones are known.
    clusters
        How many clusters were found.
    gap_closed
        (accuracy − FedAvg) / (oracle − FedAvg), each with the runs of the same seed; see :class:`Comparison`.
    rounds_to_target
        Of those runs that reached the target.
    bytes_to_target
        Sent and received by all clients until then, of the same runs.
    bytes
        Sent and received by all clients.
    seconds
        Wall time.
    """

    label: str
    algorithm: str
    data: str
    seeds: tuple[int, ...]
    accuracy: Estimate | None
    worst10: Estimate | None
    perplexity: Estimate | None
    ari: Estimate | None
    clusters: Estimate | None
    gap_closed: Estimate | None
    rounds_to_target: Estimate | None
    bytes_to_target: Estimate | None
    bytes: Estimate | None
    seconds: Estimate | None


def write_mean(estimate: Estimate | None, digits: int, scale: float = 1.0) -> str:
    """Write a mean for people."""
    return NONE if estimate is None else number(scale * estimate.mean, digits)


def write_with_interval(estimate: Estimate | None, scale: float = 1.0) -> str:
    """Write a mean with its interval for people."""
    half_width = None if estimate is None else estimate.half_width
    interval = "" if half_width is None else f" ± {number(scale * half_width, 1)}"
    return f"{write_mean(estimate, 1, scale)}{interval}"
