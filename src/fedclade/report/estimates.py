"""Means and intervals over the runs of a configuration, and the columns of comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fedclade.report.formats import duration, number, traffic
from fedclade.report.score import Score, Scored
from fedclade.tasks import mean_and_interval

BASELINES = ("fedavg", "local", "oracle")
"""Algorithms with which other algorithms are compared."""

CHOSEN = (
    "Chosen round: test score of the round that is best on validation data; all other numbers are "
    "those of the last round."
)
KEPT = (
    "Chosen round: the round that is best on validation data; if a run stores its models, all "
    "other numbers are those of this round, too."
)

SCORED = "A number such as (18 of 20) counts the clients with a score; it is undefined for the test data of the others."
"""Note on means over some of the clients."""


def _read_chosen_round(summary: Mapping[str, Any]) -> float | None:
    return summary["chosen"]["round"] if "chosen" in summary else None


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
"""Numbers in ``summary.json`` other than scores. The gap closed needs other runs."""


def note_of_chosen(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return a note on the round that is best on validation data; empty if no run has one."""
    chosen = [summary["chosen"] for summary in summaries if "chosen" in summary]
    if not chosen:
        return ""
    return KEPT if any(entry.get("kept") for entry in chosen) else CHOSEN


@dataclass(frozen=True)
class Estimate:
    """Values of a number in several runs, at least one; runs without it are left out."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Estimate | None:
        """Return the estimate from the values that are not None; None without any."""
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
    """Results of the runs of one configuration."""

    label: str
    algorithm: str
    data: str
    seeds: tuple[int, ...]
    scores: Mapping[str, Estimate | None]
    """Means over the clients by metric, the main one first; None if runs lack a metric."""
    worst10: Estimate | None
    """Mean score of the worst tenth of the clients."""
    ari: Estimate | None
    """Adjusted Rand index of the clusters found, if the true ones are known."""
    clusters: Estimate | None
    chosen: Estimate | None
    """Mean test score of the round that is best on validation data; None without such data."""
    chosen_round: Estimate | None
    gap_closed: Estimate | None
    """(method - FedAvg) / (oracle - FedAvg) for the same seed; see :class:`Comparison`."""
    rounds_to_target: Estimate | None
    """Rounds of the runs that reached the target, as are the bytes to it."""
    bytes_to_target: Estimate | None
    bytes: Estimate | None
    """Bytes sent and received by all clients."""
    seconds: Estimate | None
    honest: Estimate | None = None
    """Mean score of honest clients; None without adversaries, as ``attack_success``."""
    attack_success: Estimate | None = None
    scored: Mapping[str, Scored] = field(default_factory=dict[str, Scored])
    """Numbers of clients with and without a score in all runs, by metric."""

    @property
    def words(self) -> dict[str, str]:
        """Text columns in files."""
        return {"label": self.label, "algorithm": self.algorithm, "data": self.data}

    @property
    def estimates(self) -> dict[str, Estimate | None]:
        """All numbers by their names in files.

        Scores of a chosen round and of adversaries are included only if some runs have them.
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
        """Numbers of clients with and without a score, by their names in files."""
        counts: dict[str, int] = {}
        for name, scored in self.scored.items():
            if scored.without:
                counts[f"{name}_clients"] = scored.clients
                counts[f"{name}_without_score"] = scored.without
        return counts


def write_mean(estimate: Estimate | None, digits: int) -> str:
    """Write a mean with a number of decimals."""
    return number(_mean(estimate), digits)


def write_score(score: Score, estimate: Estimate | None) -> str:
    """Write a mean score without a unit, as in a column with the heading of its metric."""
    return score.digits(_mean(estimate))


def write_with_interval(score: Score, estimate: Estimate | None) -> str:
    """Write a mean score with its interval."""
    if estimate is None or estimate.half_width is None:
        return write_score(score, estimate)
    return (
        f"{score.digits(estimate.mean)} ± {score.digits(estimate.half_width, like=estimate.mean)}"
    )


def with_number(
    row: ComparisonRow, score: Score, write: Callable[[Score, Estimate | None], str]
) -> str:
    """Write a mean score, with the number of clients that have one if some have none."""
    scored = row.scored.get(score.name, Scored())
    return scored.after(write(score, row.scores[score.name]))


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _write_whole(estimate: Estimate | None) -> str:
    """Write a mean of whole numbers, without decimals if it is one itself."""
    is_whole = estimate is not None and estimate.mean.is_integer()
    return write_mean(estimate, 0 if is_whole else 1)


def _write_rounds_to_target(row: ComparisonRow) -> str:
    """Write the mean over the runs that reached the target, with their number if not all did."""
    estimate = row.rounds_to_target
    text = _write_whole(estimate)
    if estimate is None or len(estimate.values) == len(row.seeds):
        return text
    return f"{text} ({len(estimate.values)} of {len(row.seeds)})"


Columns: TypeAlias = Mapping[str, Callable[[ComparisonRow], str]]
"""Functions that write the cells of a row, by the heading of the column."""

WORDS: Columns = {
    "config": lambda row: row.label,
    "algorithm": lambda row: row.algorithm,
    "data": lambda row: row.data,
}
"""Columns of text, aligned at the left; numbers are aligned at the right."""

COLUMNS: Columns = {
    "ARI": lambda row: write_mean(row.ari, 2),
    "clusters": lambda row: _write_whole(row.clusters),
    "gap closed": lambda row: write_mean(row.gap_closed, 2),
    "rounds to target": _write_rounds_to_target,
    "traffic to target": lambda row: traffic(_mean(row.bytes_to_target)),
    "traffic": lambda row: traffic(_mean(row.bytes)),
    "time": lambda row: duration(_mean(row.seconds)),
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
"""Columns that are left out on a narrow terminal, in this order."""


def chosen_heading(score: Score) -> str:
    """Return the heading of test scores of the round that is best on validation data."""
    return "chosen round, %" if score.share else "chosen round"


def honest_heading(score: Score) -> str:
    """Return the heading of test scores of honest clients."""
    return "honest clients, %" if score.share else "honest clients"


def all_columns(scores: Sequence[Score]) -> Columns:
    """Return all columns of rows with some metrics, the main one first."""
    first, *others = scores
    columns: dict[str, Callable[[ComparisonRow], str]] = {
        **WORDS,
        "seeds": lambda row: str(len(row.seeds)),
        first.heading: _make_score_writer(first),
        chosen_heading(first): lambda row: write_with_interval(first, row.chosen),
        honest_heading(first): lambda row: write_with_interval(first, row.honest),
        "backdoor": lambda row: write_mean(row.attack_success, 2),
        "worst tenth, %" if first.share else "worst tenth": lambda row: write_score(
            first, row.worst10
        ),
    }
    for score in others:
        columns[score.heading] = _make_score_writer(score)
    columns.update(COLUMNS)
    return columns


def _make_score_writer(score: Score) -> Callable[[ComparisonRow], str]:
    return lambda row: with_number(row, score, write_with_interval)
