"""Several configurations, each run with several seeds, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from fedclade.core import ConfigError, checked, shown
from fedclade.report.comparison_files import ComparisonFiles, comparison_figure, csv_table, markdown_table
from fedclade.report.estimates import (
    BASELINES,
    DISPENSABLE,
    NUMBERS,
    SCORED,
    WORDS,
    ComparisonRow,
    Estimate,
    all_columns,
    chosen_heading,
    honest_heading,
    note_of_chosen,
)
from fedclade.report.formats import count
from fedclade.report.plots import comparison_plot
from fedclade.report.score import Score, Scored, compared_by, in_common
from fedclade.report.tables import new_table
from fedclade.runs import Run, data_frame
from fedclade.tasks import gap_closed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from plotly.graph_objects import Figure as PlotlyFigure


@checked()
@dataclass(frozen=True, eq=False)
class Comparison(ComparisonFiles):
    """Configurations side by side, with 95 % intervals over seeds.

    The gap closed of a run is measured between the FedAvg and the oracle run with the same seed, data and model: those
    of the first configurations that have them. Where either is missing, or the oracle is no better, there is no gap.

    Parameters
    ----------
    runs
        By the configuration's name: its runs, one for each seed.
    name
        Of what they are compared on, such as a scenario's; it goes into the title.

    Raises
    ------
    ConfigError
        If there is nothing to compare, or a configuration has no runs, or several with one seed.
    """

    runs: Mapping[str, Sequence[Run]]
    name: str = ""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("a comparison should have at least 1 configuration, got 0")
        if empty := [label for label, runs in self.runs.items() if not runs]:
            raise ConfigError(f"a comparison should have at least 1 run of each configuration, got none of {empty}")
        for label, runs in self.runs.items():
            _check_seeds(label, runs)

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """The metrics of the runs; the first counts, which all runs have if there is one that all have."""
        return compared_by(self._summaries)

    @cached_property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """One row for each configuration, in the order given."""
        return tuple(self._row(label, [run.summary for run in runs]) for label, runs in self.runs.items())

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """The comparison for people: the cells of each column, by its name."""
        return {name: [cell(row) for row in self.rows] for name, cell in self._columns.items()}

    def frame(self) -> DataFrame:
        """Return the numbers of :meth:`csv` as a pandas data frame.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame([self._as_csv(row) for row in self.rows], "Comparison.frame")

    def plot(self) -> PlotlyFigure:
        """Return the means with their intervals as a Plotly figure, and every run as a small dot.

        Raises
        ------
        ConfigError
            If the configurations have no metric in common.
        MissingExtraError
            If plotly is not installed.
        """
        return comparison_plot(in_common(self._summaries), self.rows, self.title, self._data)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.runs)})"

    @checked()
    def table(self, width: int | None = None) -> Table:
        """Return the comparison for the terminal.

        Parameters
        ----------
        width
            Columns of the terminal; what does not fit is left out, the least important first.
        """
        title, columns = self.title, dict(self._columns)
        if len(numbers := {len(row.seeds) for row in self.rows}) == 1:  # said once, to leave room for the rest
            title += f", {count(numbers.pop(), 'seed')} each"
            del columns["seeds"]
        suffix = _common_suffix([row.label for row in self.rows])
        title += f", {suffix.removeprefix('-')}" if suffix else ""
        columns["config"] = lambda row: row.label.removesuffix(suffix)
        cells = {
            fill(name, 9, break_long_words=False): [escape(cell(row)) for row in self.rows]
            for name, cell in columns.items()
        }
        for name in DISPENSABLE:
            if width is not None and _width(cells) > width:
                cells.pop(fill(name, 9), None)
        table = new_table(title, caption=escape(self.note), collapse_padding=True)
        for name in cells:
            # A number must not be broken, and a name only if it is very long.
            table.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True, overflow="fold")
        for row, line in zip(self.rows, zip(*cells.values(), strict=True), strict=True):
            table.add_row(*line, style="dim" if row.algorithm in BASELINES else None)
        return table

    def markdown(self) -> str:
        """Return the comparison as a Markdown table with a title and a note."""
        rows = ([cell(row) for cell in self._columns.values()] for row in self.rows)
        return f"**{self.title}**\n\n{markdown_table(list(self._columns), rows, WORDS)}\n\n{self.note}\n"

    def csv(self) -> str:
        """Return the means as CSV, one line for each configuration; for metrics also half the width of the interval.

        Shares are in [0, 1]; what there is no number for is left empty.
        """
        return csv_table([self._as_csv(row) for row in self.rows])

    def _as_csv(self, row: ComparisonRow) -> dict[str, Any]:
        means = {name: None if each is None else each.mean for name, each in row.estimates.items()}
        widths = {f"{name}_half_width": None if s is None else s.half_width for name, s in row.scores.items()}
        reached = 0 if row.rounds_to_target is None else len(row.rounds_to_target.values)
        return {**row.words, "seeds": len(row.seeds), **means, **widths, "runs_at_target": reached, **row.counts}

    def json(self) -> str:
        """Return the comparison as JSON: for each number its mean, half the width of its interval, and its values."""
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            estimates = {name: _as_json(each) for name, each in row.estimates.items()}
            rows.append({**row.words, "seeds": list(row.seeds), **estimates, **row.counts})
        return json.dumps({"rows": rows}, indent=2) + "\n"

    def figure(self) -> Figure:
        """Draw the mean score of every configuration with its interval; see `comparison_figure`.

        Raises
        ------
        ConfigError
            If the configurations have no metric in common.
        """
        return comparison_figure(in_common(self._summaries), self.rows, self.title, self._data)

    @property
    def _summaries(self) -> list[Mapping[str, Any]]:
        return [run.summary for runs in self.runs.values() for run in runs]

    @cached_property
    def _baselines(self) -> dict[tuple[Any, ...], Mapping[str, Any]]:
        """The summaries of the FedAvg and oracle runs, by algorithm and what a run must share with them."""
        found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for summary in self._summaries:
            found.setdefault((summary["algorithm"], *_setting(summary)), summary)
        return found

    def _gap_closed(self, summary: Mapping[str, Any]) -> float | None:
        fedavg, oracle = (self._baselines.get((name, *_setting(summary))) for name in ("fedavg", "oracle"))
        if fedavg is None or oracle is None:
            return None
        score = self.scores[0]
        if not score.is_of(summary, fedavg, oracle):
            return None
        means = [score.mean(s) for s in (summary, fedavg, oracle)]
        known = [score.sign * mean for mean in means if mean is not None]
        return gap_closed(*known) if len(known) == len(means) else None

    def _row(self, label: str, summaries: Sequence[Mapping[str, Any]]) -> ComparisonRow:
        return ComparisonRow(
            label=label,
            algorithm=_joined(s["algorithm"] for s in summaries),
            data=_joined(s["data"] for s in summaries),
            seeds=tuple(s["seed"] for s in summaries),
            scores={
                score.name: Estimate.of(score.mean(s) for s in summaries if score.is_of(s)) for score in self.scores
            },
            worst10=Estimate.of(self.scores[0].worst_tenth(s) for s in summaries if self.scores[0].is_of(s)),
            honest=Estimate.of(self.scores[0].of_honest(s) for s in summaries),
            chosen=Estimate.of(self.scores[0].of_chosen(s) for s in summaries),
            gap_closed=Estimate.of(self._gap_closed(s) for s in summaries),
            **{name: Estimate.of(get(s) for s in summaries) for name, get in NUMBERS.items()},
            scored={score.name: _scored(score, summaries) for score in self.scores},
        )

    @cached_property
    def _columns(self) -> dict[str, Callable[[ComparisonRow], str]]:
        """The columns for people: those that every comparison has, and those that this one needs."""
        superfluous = {
            "algorithm": all(row.label.startswith(row.algorithm) for row in self.rows),
            "data": len({row.data for row in self.rows}) == 1,
            chosen_heading(self.scores[0]): all(row.chosen is None for row in self.rows),
            honest_heading(self.scores[0]): all(row.honest is None for row in self.rows),
            "backdoor": all(row.attack_success is None for row in self.rows),
            "rounds to target": all(row.rounds_to_target is None for row in self.rows),
            "traffic to target": all(row.bytes_to_target is None for row in self.rows),
        }
        return {name: cell for name, cell in all_columns(self.scores).items() if not superfluous.get(name, False)}

    @property
    def _data(self) -> str:
        return _joined((row.data for row in self.rows), "; ")

    @property
    def title(self) -> str:
        """How many configurations are compared, and on what."""
        title = f"Comparison of {count(len(self.rows), 'configuration')}"
        return f"{self.name}: {title.lower()}" if self.name else title

    @property
    def note(self) -> str:
        """What stands below the table."""
        note = f"{self._data}. ±: 95 % interval of the mean over seeds. Gap closed: 0 is FedAvg, 1 the oracle."
        note = f"{note} {note_of_chosen(self._summaries)}".rstrip()
        if any(row.counts for row in self.rows):
            note += f" {SCORED}"
        return note


def _scored(score: Score, summaries: Sequence[Mapping[str, Any]]) -> Scored:
    """Return how many clients of some runs have a score, in those runs that have the metric."""
    return sum((score.clients(s) for s in summaries if score.is_of(s)), Scored())


def _check_seeds(label: str, runs: Sequence[Run]) -> None:
    """Check that no two runs of a configuration have one seed and one kind of data: one run would count twice."""
    seeds = [(run.summary["seed"], run.summary["data"]) for run in runs]
    for seed, data in seeds:
        if seeds.count((seed, data)) > 1:
            raise ConfigError(
                f"the runs of {shown(label)} should have different seeds, got seed {seed} on {data} more than once"
            )


def _setting(summary: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what two runs must share for one to be measured by the other."""
    return summary["seed"], summary["data"], summary["model"]


def _joined(words: Iterable[str], separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(words))


def _as_json(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {"mean": estimate.mean, "half_width": estimate.half_width, "values": list(estimate.values)}


def _width(cells: Mapping[str, Sequence[str]]) -> int:
    """Return the columns that a table takes: each of its own is as wide as its widest entry, and two more."""
    return sum(max(map(len, (*name.splitlines(), *column))) + 2 for name, column in cells.items())


def _common_suffix(labels: Sequence[str]) -> str:
    """Return what all labels end in, from a hyphen on: ``-mnist-label-swap``; nothing for a single label."""
    if len(labels) < 2:
        return ""
    ends = [label.split("-")[1:] for label in labels]
    shared: list[str] = []
    for parts in zip(*(reversed(end) for end in ends), strict=False):
        if len(set(parts)) > 1:
            break
        shared.insert(0, parts[0])
    return "".join(f"-{part}" for part in shared)
