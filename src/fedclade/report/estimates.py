"""Numbers of several runs: their mean and interval, those of one configuration in a row, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedclade.report.formats import NONE, duration, number, traffic
from fedclade.tasks import mean_and_interval

BASELINES = ("fedavg", "local", "oracle")
"""Algorithms that others are measured by."""

NUMBERS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "accuracy": lambda s: s["accuracy"]["mean"],
    "worst10": lambda s: s["accuracy"]["worst10_mean"],
    "perplexity": lambda s: s["perplexity"]["mean"] if "perplexity" in s else None,
    "ari": lambda s: s["clusters"]["ari"],
    "clusters": lambda s: s["clusters"]["found"],
    "rounds_to_target": lambda s: s["target"]["rounds_to_target"],
    "bytes_to_target": lambda s: s["target"]["bytes_to_target"],
    "bytes": lambda s: s["bytes_up"] + s["bytes_down"],
    "seconds": lambda s: s["seconds"]["total"],
}
"""Where each number of a row stands in ``summary.json``. The gap closed is not there: it takes other runs."""


@dataclass(frozen=True)
class Estimate:
    """A number of several runs: a value for each run that has it, at least one."""

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
    """What the runs of one configuration come to; accuracies are means over the clients, in [0, 1]."""

    label: str
    algorithm: str
    data: str
    seeds: tuple[int, ...]
    accuracy: Estimate | None
    worst10: Estimate | None
    """Mean accuracy of the worst tenth of the clients."""
    perplexity: Estimate | None
    ari: Estimate | None
    """Adjusted Rand index of the clusters found, where the true ones are known."""
    clusters: Estimate | None
    gap_closed: Estimate | None
    """(accuracy - FedAvg) / (oracle - FedAvg), each with the runs of the same seed; see :class:`Comparison`."""
    rounds_to_target: Estimate | None
    """Of those runs that reached the target, as are the bytes to it."""
    bytes_to_target: Estimate | None
    bytes: Estimate | None
    """Sent and received by all clients."""
    seconds: Estimate | None


def write_mean(estimate: Estimate | None, digits: int, scale: float = 1.0) -> str:
    """Write a mean for people."""
    return NONE if estimate is None else number(scale * estimate.mean, digits)


def write_with_interval(estimate: Estimate | None, scale: float = 1.0) -> str:
    """Write a mean with its interval for people."""
    half_width = None if estimate is None else estimate.half_width
    interval = "" if half_width is None else f" ± {number(scale * half_width, 1)}"
    return f"{write_mean(estimate, 1, scale)}{interval}"


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _whole(estimate: Estimate | None) -> str:
    """Write a mean of whole numbers: without decimals if it is one itself."""
    return write_mean(estimate, 0 if estimate is not None and estimate.mean.is_integer() else 1)


def _rounds_to_target(row: ComparisonRow) -> str:
    """Write the mean over the runs that reached the target, and how many did if not all."""
    estimate = row.rounds_to_target
    if estimate is None or len(estimate.values) == len(row.seeds):
        return _whole(estimate)
    return f"{_whole(estimate)} ({len(estimate.values)} of {len(row.seeds)})"


COLUMNS: Mapping[str, Callable[[ComparisonRow], str]] = {
    "config": lambda row: row.label,
    "algorithm": lambda row: row.algorithm,
    "data": lambda row: row.data,
    "seeds": lambda row: str(len(row.seeds)),
    "accuracy, %": lambda row: write_with_interval(row.accuracy, 100),
    "worst tenth, %": lambda row: write_mean(row.worst10, 1, 100),
    "perplexity": lambda row: write_with_interval(row.perplexity),
    "ARI": lambda row: write_mean(row.ari, 2),
    "clusters": lambda row: _whole(row.clusters),
    "gap closed": lambda row: write_mean(row.gap_closed, 2),
    "rounds to target": _rounds_to_target,
    "traffic to target": lambda row: traffic(_mean(row.bytes_to_target)),
    "traffic": lambda row: traffic(_mean(row.bytes)),
    "time": lambda row: duration(_mean(row.seconds)),
}
"""What is written of a row for people, by the name of the column."""

WORDS = ("config", "algorithm", "data")
"""Columns of words, which stand at the left; numbers stand at the right."""

DISPENSABLE = ("time", "traffic", "traffic to target", "rounds to target", "worst tenth, %", "data", "algorithm")
"""Columns that a narrow terminal does without, in this order."""
