"""Numbers of several runs: their mean and interval, those of one configuration in a row, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fedclade.report.formats import duration, number, traffic
from fedclade.report.score import Score, Scored
from fedclade.tasks import mean_and_interval

BASELINES = ("fedavg", "local", "oracle")
"""Algorithms that others are measured by."""

CHOSEN = "Chosen round: the test score of the round that is best on validation data; all else is of the last round."
KEPT = "Chosen round: the round that is best on validation data; where runs keep its models, all else is of it as well."

SCORED = "(18 of 20), say: the clients with a score; it is undefined for the test data of the others."
"""What a table says of means over some of the clients."""

NUMBERS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "ari": lambda s: s["clusters"]["ari"],
    "clusters": lambda s: s["clusters"]["found"],
    "attack_success": lambda s: s.get("adversary", {}).get("attack_success"),
    "chosen_round": lambda s: s["chosen"]["round"] if "chosen" in s else None,
    "rounds_to_target": lambda s: s["target"]["rounds_to_target"],
    "bytes_to_target": lambda s: s["target"]["bytes_to_target"],
    "bytes": lambda s: s["bytes_up"] + s["bytes_down"],
    "seconds": lambda s: s["seconds"]["total"],
}
"""Where numbers of a row besides scores stand in ``summary.json``. The gap closed is not: it takes other runs."""


def note_of_chosen(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return what a table says of the round that validation data chose; nothing where no run has one."""
    chosen = [summary["chosen"] for summary in summaries if "chosen" in summary]
    if not chosen:
        return ""
    return KEPT if any(each.get("kept") for each in chosen) else CHOSEN


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
    """What the runs of one configuration come to."""

    label: str
    algorithm: str
    data: str
    seeds: tuple[int, ...]
    scores: Mapping[str, Estimate | None]
    """Means over the clients by metric, the one that counts first; None of one that the runs do not have."""
    worst10: Estimate | None
    """Mean score of the worst tenth of the clients."""
    ari: Estimate | None
    """Adjusted Rand index of the clusters found, where the true ones are known."""
    clusters: Estimate | None
    chosen: Estimate | None
    """Mean test score of the round with the best mean score on validation data; None where that was not measured."""
    chosen_round: Estimate | None
    gap_closed: Estimate | None
    """(method - FedAvg) / (oracle - FedAvg), each with the runs of the same seed; see :class:`Comparison`."""
    rounds_to_target: Estimate | None
    """Of those runs that reached the target, as are the bytes to it."""
    bytes_to_target: Estimate | None
    bytes: Estimate | None
    """Sent and received by all clients."""
    seconds: Estimate | None
    honest: Estimate | None = None
    """Mean score of honest clients; None without adversaries, as is the success of a backdoor."""
    attack_success: Estimate | None = None
    scored: Mapping[str, Scored] = field(default_factory=dict[str, Scored])
    """By metric: how many clients have a score, and how many have none, of all runs together."""

    @property
    def words(self) -> dict[str, str]:
        """What files call it."""
        return {"label": self.label, "algorithm": self.algorithm, "data": self.data}

    @property
    def estimates(self) -> dict[str, Estimate | None]:
        """All numbers, as files call them; those of a chosen round and of adversaries only where there are some."""
        (first, score), *others = self.scores.items()
        numbers: dict[str, Estimate | None] = {first: score, "worst10": self.worst10, **dict(others)}
        names = [*NUMBERS, "gap_closed", "chosen", "honest"]
        there = {"chosen": self.chosen, "chosen_round": self.chosen}
        there |= {"honest": self.honest, "attack_success": self.attack_success}
        kept = [name for name in names if name not in there or there[name] is not None]
        return numbers | {name: getattr(self, name) for name in kept}

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of clients with and without a score, as files call them, where some have none."""
        found: dict[str, int] = {}
        for name, scored in self.scored.items():
            if scored.without:
                found |= {f"{name}_clients": scored.clients, f"{name}_without_score": scored.without}
        return found


def write_mean(estimate: Estimate | None, digits: int) -> str:
    """Write a mean for people."""
    return number(_mean(estimate), digits)


def write_score(score: Score, estimate: Estimate | None) -> str:
    """Write a mean score for people, as under the heading of its metric."""
    return score.digits(_mean(estimate))


def write_with_interval(score: Score, estimate: Estimate | None) -> str:
    """Write a mean score with its interval for people."""
    if estimate is None or estimate.half_width is None:
        return write_score(score, estimate)
    return f"{score.digits(estimate.mean)} ± {score.digits(estimate.half_width, like=estimate.mean)}"


def with_number(row: ComparisonRow, score: Score, write: Callable[[Score, Estimate | None], str]) -> str:
    """Write a mean score, with the number of clients that have one if others have none."""
    return row.scored.get(score.name, Scored()).after(write(score, row.scores[score.name]))


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


Columns: TypeAlias = Mapping[str, Callable[[ComparisonRow], str]]
"""What is written of a row for people, by the name of the column."""

WORDS: Columns = {"config": lambda row: row.label, "algorithm": lambda row: row.algorithm, "data": lambda row: row.data}
"""Columns of words, which stand at the left; numbers stand at the right."""

COLUMNS: Columns = {
    "ARI": lambda row: write_mean(row.ari, 2),
    "clusters": lambda row: _whole(row.clusters),
    "gap closed": lambda row: write_mean(row.gap_closed, 2),
    "rounds to target": _rounds_to_target,
    "traffic to target": lambda row: traffic(_mean(row.bytes_to_target)),
    "traffic": lambda row: traffic(_mean(row.bytes)),
    "time": lambda row: duration(_mean(row.seconds)),
}
"""Columns of numbers besides scores."""

DISPENSABLE = (
    *("time", "traffic", "traffic to target", "rounds to target"),
    *("worst tenth, %", "worst tenth", "data", "algorithm"),
)
"""Columns that a narrow terminal does without, in this order."""


def chosen_heading(score: Score) -> str:
    """Return what stands over test scores of the round that validation data chose."""
    return "chosen round, %" if score.share else "chosen round"


def honest_heading(score: Score) -> str:
    """Return what stands over test scores of honest clients."""
    return "honest, %" if score.share else "honest"


def all_columns(scores: Sequence[Score]) -> Columns:
    """Return the columns of rows with some metrics, of which the first counts."""

    def written(score: Score) -> Callable[[ComparisonRow], str]:
        return lambda row: with_number(row, score, write_with_interval)

    first, *others = scores
    return {
        **WORDS,
        "seeds": lambda row: str(len(row.seeds)),
        first.heading: written(first),
        chosen_heading(first): lambda row: write_with_interval(first, row.chosen),
        honest_heading(first): lambda row: write_with_interval(first, row.honest),
        "backdoor": lambda row: write_mean(row.attack_success, 2),
        "worst tenth, %" if first.share else "worst tenth": lambda row: write_score(first, row.worst10),
        **{score.heading: written(score) for score in others},
        **COLUMNS,
    }
