"""Means and intervals over the runs of a configuration, and the columns of comparison tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import stdev
from typing import Any, TypeAlias

from fedclade.report.formats import duration, number, traffic
from fedclade.report.score import Score, Scored
from fedclade.tasks import mean_and_interval

BASELINES = ("fedavg", "local", "oracle")
"""Algorithms that serve as references for all other algorithms in a comparison."""

ORACLE = "oracle"
"""Algorithm that is given the true clusters, and is therefore neither ranked nor tested."""

CHOSEN = (
    "Chosen round: test score of the round that is best on validation data; all other numbers are "
    "from the last round."
)
KEPT = (
    "Chosen round: the round that is best on validation data; if a run stores the models of this "
    "round, all other numbers are from this round, too."
)

SCORED = (
    "A number such as (18 of 20) counts the clients with a score; it is undefined for the test "
    "data of all other clients."
)
"""Note below tables with means over clients of which some have no score."""


def _read_chosen_round(summary: Mapping[str, Any]) -> float | None:
    """Return the round chosen on validation data, from a run's summary; None if there is none."""
    if "chosen" not in summary:
        return None
    return summary["chosen"]["round"]


NUMBERS: Mapping[str, Callable[[Mapping[str, Any]], float | None]] = {
    "ari": lambda s: s["clusters"]["ari"],
    "clusters": lambda s: s["clusters"]["found"],
    "attack_success": lambda s: s.get("adversary", {}).get("attack_success"),
    "chosen_round": _read_chosen_round,
    "rounds_to_target": lambda s: s["target"]["rounds_to_target"],
    "bytes_to_target": lambda s: s["target"]["bytes_to_target"],
    "bytes": lambda s: s["bytes_up"] + s["bytes_down"],
    "seconds": lambda s: s["seconds"]["total"],
}
"""Functions that read the numbers other than scores from ``summary.json``, by name.

The gap closed is not among them, as it also depends on other runs.
"""


def note_of_chosen(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return the note that explains the round that is best on validation data.

    Empty if no run has validation data.
    """
    chosen = [summary["chosen"] for summary in summaries if "chosen" in summary]
    if not chosen:
        return ""
    return KEPT if any(entry.get("kept") for entry in chosen) else CHOSEN


@dataclass(frozen=True)
class Estimate:
    """Values of one number in several runs (at least one value), with mean and 95 % interval.

    Runs in which the number is undefined have no value.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Estimate | None:
        """Return the estimate from those values that are not None; None if all values are None."""
        known = tuple(float(value) for value in values if value is not None)
        if not known:
            return None
        return cls(known)

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return mean_and_interval(self.values)[0]

    @property
    def half_width(self) -> float | None:
        """Half the width of the mean's 95 % interval (Student's t); None for a single value."""
        return mean_and_interval(self.values)[1]

    @property
    def std(self) -> float | None:
        """Standard deviation of the values (n − 1 in the denominator).

        None for a single value, or if a value is not finite, as after a run that diverged.
        """
        if len(self.values) < 2 or not all(map(isfinite, self.values)):
            return None
        return stdev(self.values)


@dataclass(frozen=True)
class ComparisonRow:
    """Results of the runs of one configuration, in one row of a comparison."""

    label: str
    algorithm: str
    data: str
    seeds: tuple[int, ...]
    scores: Mapping[str, Estimate | None]
    """Mean score over the clients by metric, the main metric first; None for a missing metric."""
    worst10: Estimate | None
    """Mean score of the tenth of the clients with the worst scores."""
    ari: Estimate | None
    """Adjusted Rand index of the clusters found; None if the true clusters are unknown."""
    clusters: Estimate | None
    chosen: Estimate | None
    """Mean test score of the round that is best on validation data; None without such a round."""
    chosen_round: Estimate | None
    gap_closed: Estimate | None
    """(method - FedAvg) / (oracle - FedAvg) for the same seed; see :class:`Comparison`."""
    rounds_to_target: Estimate | None
    """Rounds until the target score was reached, of the runs that reached it."""
    bytes_to_target: Estimate | None
    """Bytes transferred until the target score was reached, of the runs that reached it."""
    bytes: Estimate | None
    """Bytes sent and received by all clients."""
    seconds: Estimate | None
    honest: Estimate | None = None
    """Mean score of honest clients; None without adversaries."""
    attack_success: Estimate | None = None
    """Success rate of the backdoor attack; None without such an attack."""
    scored: Mapping[str, Scored] = field(default_factory=dict[str, Scored])
    """Numbers of clients with and without a score in all runs, by metric."""

    @property
    def words(self) -> dict[str, str]:
        """Texts of the row (label, algorithm, data), by column name in files."""
        return {"label": self.label, "algorithm": self.algorithm, "data": self.data}

    @property
    def estimates(self) -> dict[str, Estimate | None]:
        """All numbers of the row, by column name in files.

        Scores of the round chosen on validation data, and scores under attacks, are included only
        if some of the runs have them.
        """
        (first, score), *others = self.scores.items()
        numbers: dict[str, Estimate | None] = {first: score, "worst10": self.worst10}
        numbers.update(others)
        required_by = {
            "chosen": self.chosen,
            "chosen_round": self.chosen,
            "honest": self.honest,
            "attack_success": self.attack_success,
        }
        for name in [*NUMBERS, "gap_closed", "chosen", "honest"]:
            is_left_out = name in required_by and required_by[name] is None
            if not is_left_out:
                numbers[name] = getattr(self, name)
        return numbers

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of clients with and without a score, by column name in files.

        Empty if all clients have a score.
        """
        counts: dict[str, int] = {}
        for name, scored in self.scored.items():
            if scored.without:
                counts[f"{name}_clients"] = scored.clients
                counts[f"{name}_without_score"] = scored.without
        return counts


def write_mean(estimate: Estimate | None, digits: int) -> str:
    """Return the mean of an estimate as text, with the given number of decimals."""
    return number(_get_mean(estimate), digits)


def write_score(score: Score, estimate: Estimate | None) -> str:
    """Return a mean score as text without a unit.

    It is for table columns, whose heading contains the metric and the unit.
    """
    return score.digits(_get_mean(estimate))


def write_with_interval(score: Score, estimate: Estimate | None) -> str:
    """Return a mean score as text, followed by half the width of its interval: ``78.5 ± 1.2``."""
    return _write_with_spread(score, estimate, None if estimate is None else estimate.half_width)


def write_with_std(score: Score, estimate: Estimate | None) -> str:
    """Return a mean score as text, followed by its standard deviation over seeds: ``78.5 ± 0.9``."""
    return _write_with_spread(score, estimate, None if estimate is None else estimate.std)


def _write_with_spread(score: Score, estimate: Estimate | None, spread: float | None) -> str:
    """Return a mean score as text, followed by ``spread`` with as many decimals, if it is known."""
    if estimate is None or spread is None:
        return write_score(score, estimate)
    return f"{score.digits(estimate.mean)} ± {score.digits(spread, like=estimate.mean)}"


def with_number(
    row: ComparisonRow, score: Score, write: Callable[[Score, Estimate | None], str]
) -> str:
    """Return a mean score as text; if some clients have no score, with the number that have one.

    Parameters
    ----------
    row
        Results of the configuration.
    score
        The metric.
    write
        Writes the mean score, such as :func:`write_score`.
    """
    scored = row.scored.get(score.name, Scored())
    return scored.after(write(score, row.scores[score.name]))


def _get_mean(estimate: Estimate | None) -> float | None:
    """Return the mean of an estimate; None if the estimate is missing."""
    return None if estimate is None else estimate.mean


def _write_whole(estimate: Estimate | None) -> str:
    """Return the mean of an estimate as text: without decimals if it is whole, else with one.

    It is for numbers that are whole in each run, such as numbers of clusters.
    """
    is_whole = estimate is not None and estimate.mean.is_integer()
    return write_mean(estimate, 0 if is_whole else 1)


def _write_rounds_to_target(row: ComparisonRow) -> str:
    """Return the mean number of rounds until the target was reached, as text.

    If only some of the runs reached the target, their number follows: ``12.5 (2 of 3)``.
    """
    estimate = row.rounds_to_target
    text = _write_whole(estimate)
    if estimate is None or len(estimate.values) == len(row.seeds):
        return text
    return f"{text} ({len(estimate.values)} of {len(row.seeds)})"


Columns: TypeAlias = Mapping[str, Callable[[ComparisonRow], str]]
"""Columns of a table: functions that write the cell of a row, by the heading of the column."""

WORDS: Columns = {
    "config": lambda row: row.label,
    "algorithm": lambda row: row.algorithm,
    "data": lambda row: row.data,
}
"""Columns of text, which are aligned at the left; all other columns are aligned at the right."""

COLUMNS: Columns = {
    "ARI": lambda row: write_mean(row.ari, 2),
    "clusters": lambda row: _write_whole(row.clusters),
    "gap closed": lambda row: write_mean(row.gap_closed, 2),
    "rounds to target": _write_rounds_to_target,
    "traffic to target": lambda row: traffic(_get_mean(row.bytes_to_target)),
    "traffic": lambda row: traffic(_get_mean(row.bytes)),
    "time": lambda row: duration(_get_mean(row.seconds)),
}
"""Columns of numbers other than scores."""

DISPENSABLE = (
    "time",
    "traffic",
    "traffic to target",
    "rounds to target",
    "worst tenth, %",
    "worst tenth",
    "data",
    "algorithm",
)
"""Headings of the columns that are left out on a narrow terminal, the first ones first."""


def chosen_heading(score: Score) -> str:
    """Return the heading of the column of test scores in the round chosen on validation data."""
    return "chosen round, %" if score.share else "chosen round"


def honest_heading(score: Score) -> str:
    """Return the heading of the column of test scores of honest clients."""
    return "honest clients, %" if score.share else "honest clients"


def _head_worst_tenth(score: Score) -> str:
    """Return the heading of the column of mean scores of the worst tenth of the clients."""
    return "worst tenth, %" if score.share else "worst tenth"


def all_columns(
    scores: Sequence[Score], write: Callable[[Score, Estimate | None], str] = write_with_interval
) -> Columns:
    """Return all columns of a comparison table with these metrics, the main metric first.

    ``write`` writes a mean score with its spread over seeds.
    """
    first, *others = scores
    columns: dict[str, Callable[[ComparisonRow], str]] = {
        **WORDS,
        "seeds": lambda row: str(len(row.seeds)),
        first.heading: _make_score_writer(first, write),
        chosen_heading(first): lambda row: write(first, row.chosen),
        honest_heading(first): lambda row: write(first, row.honest),
        "backdoor": lambda row: write_mean(row.attack_success, 2),
        _head_worst_tenth(first): lambda row: write_score(first, row.worst10),
    }
    for score in others:
        columns[score.heading] = _make_score_writer(score, write)
    columns.update(COLUMNS)
    return columns


def _make_score_writer(
    score: Score, write: Callable[[Score, Estimate | None], str]
) -> Callable[[ComparisonRow], str]:
    """Return a function that writes the mean score of a row by one metric, with its spread."""
    return lambda row: with_number(row, score, write)
