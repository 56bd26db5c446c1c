"""Comparison of several configurations, each run with several seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from fedclade.core import ConfigError, checked, shown
from fedclade.report.comparison_files import (
    ComparisonFiles,
    comparison_figure,
    csv_table,
    markdown_table,
)
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
from fedclade.report.tables import new_table, wrap_heading
from fedclade.runs import Run, data_frame
from fedclade.tasks import gap_closed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from plotly.graph_objects import Figure as PlotlyFigure

HEADING_WIDTH = 9
"""Headings are broken at spaces beyond this number of characters."""


@checked()
@dataclass(frozen=True, eq=False)
class Comparison(ComparisonFiles):
    """Configurations in a table, with 95 % intervals over seeds.

    The gap closed by a run is measured between the FedAvg run and the oracle run with the same
    seed, data and model. If several configurations have such runs, the first one counts. Without
    FedAvg or oracle run, or if the oracle is not better, there is no gap.

    Parameters
    ----------
    runs
        Runs of each configuration, by its name; one for each seed.
    name
        Name of the data or the scenario, for the title.

    Raises
    ------
    ConfigError
        If there is no configuration, or one has no runs, or several with the same seed.
    """

    runs: Mapping[str, Sequence[Run]]
    name: str = ""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("a comparison should have at least 1 configuration, got 0")
        if empty := [label for label, runs in self.runs.items() if not runs]:
            raise ConfigError(
                "a comparison should have at least 1 run of each configuration, got none of "
                f"{empty}"
            )
        for label, runs in self.runs.items():
            _check_seeds(label, runs)

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """Metrics of the runs; the first, main one is one that all runs have, if possible."""
        return compared_by(self._summaries)

    @cached_property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """One row for each configuration, in the order given."""
        rows: list[ComparisonRow] = []
        for label, runs in self.runs.items():
            rows.append(self._row(label, [run.summary for run in runs]))
        return tuple(rows)

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Cells of each column, by its heading."""
        return {name: self._write_cells(write) for name, write in self._columns.items()}

    def _write_cells(self, write: Callable[[ComparisonRow], str]) -> list[str]:
        return [write(row) for row in self.rows]

    def frame(self) -> DataFrame:
        """Return the numbers of :meth:`csv` as a pandas data frame.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame([self._as_csv(row) for row in self.rows], "Comparison.frame")

    def plot(self) -> PlotlyFigure:
        """Return a Plotly figure of the means with their intervals, and every run as a small dot.

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
            Columns of the terminal. Columns of the table that do not fit are left out, the least
            important first.
        """
        title = self.title
        columns = dict(self._columns)
        numbers_of_seeds = {len(row.seeds) for row in self.rows}
        if len(numbers_of_seeds) == 1:  # in the title it leaves room for other columns
            title += f", {count(numbers_of_seeds.pop(), 'seed')} each"
            del columns["seeds"]
        suffix = _find_common_suffix([row.label for row in self.rows])
        if suffix:
            title += f", {suffix.removeprefix('-')}"
        columns["config"] = lambda row: row.label.removesuffix(suffix)
        cells: dict[str, list[str]] = {}
        for name, write in columns.items():
            heading = wrap_heading(name, HEADING_WIDTH)
            cells[heading] = [escape(cell) for cell in self._write_cells(write)]
        for name in DISPENSABLE:
            if width is not None and _measure_width(cells) > width:
                cells.pop(wrap_heading(name, HEADING_WIDTH), None)
        table = new_table(title, caption=escape(self.note), collapse_padding=True)
        for name in cells:
            side = "left" if name in WORDS else "right"
            # A number must not be broken, and a name only if it is very long.
            table.add_column(name, justify=side, no_wrap=True, overflow="fold")
        for row, line in zip(self.rows, zip(*cells.values(), strict=True), strict=True):
            table.add_row(*line, style="dim" if row.algorithm in BASELINES else None)
        return table

    def markdown(self) -> str:
        """Return the comparison as a Markdown table with a title and a note."""
        columns = self.columns
        rows = list(zip(*columns.values(), strict=True))
        table = markdown_table(list(columns), rows, WORDS)
        return f"**{self.title}**\n\n{table}\n\n{self.note}\n"

    def csv(self) -> str:
        """Return the means as CSV, one line for each configuration.

        Metrics also have half the width of the interval. Shares are in [0, 1]; missing numbers are
        empty.
        """
        return csv_table([self._as_csv(row) for row in self.rows])

    def _as_csv(self, row: ComparisonRow) -> dict[str, Any]:
        entries: dict[str, Any] = {**row.words, "seeds": len(row.seeds)}
        for name, estimate in row.estimates.items():
            entries[name] = None if estimate is None else estimate.mean
        for name, estimate in row.scores.items():
            entries[f"{name}_half_width"] = None if estimate is None else estimate.half_width
        reached = row.rounds_to_target
        entries["runs_at_target"] = 0 if reached is None else len(reached.values)
        return entries | row.counts

    def json(self) -> str:
        """Return the mean, half the width of the interval and the values of each number as JSON."""
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            estimates = {name: _as_json(estimate) for name, estimate in row.estimates.items()}
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
        summaries: list[Mapping[str, Any]] = []
        for runs in self.runs.values():
            summaries += [run.summary for run in runs]
        return summaries

    @cached_property
    def _baselines(self) -> dict[tuple[Any, ...], Mapping[str, Any]]:
        """Summary of the first run of each algorithm with a seed, data and model."""
        baselines: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for summary in self._summaries:
            baselines.setdefault((summary["algorithm"], *_setting(summary)), summary)
        return baselines

    def _gap_closed(self, summary: Mapping[str, Any]) -> float | None:
        """Return (method - FedAvg) / (oracle - FedAvg) of a run; None if one of them is missing."""
        fedavg = self._baselines.get(("fedavg", *_setting(summary)))
        oracle = self._baselines.get(("oracle", *_setting(summary)))
        if fedavg is None or oracle is None:
            return None
        score = self.scores[0]
        if not score.is_of(summary, fedavg, oracle):
            return None
        means = [score.mean(entry) for entry in (summary, fedavg, oracle)]
        known = [score.sign * mean for mean in means if mean is not None]
        return gap_closed(*known) if len(known) == len(means) else None

    def _row(self, label: str, summaries: Sequence[Mapping[str, Any]]) -> ComparisonRow:
        """Return the row of a configuration from the summaries of its runs."""
        main = self.scores[0]
        with_main = [summary for summary in summaries if main.is_of(summary)]
        scores: dict[str, Estimate | None] = {}
        scored: dict[str, Scored] = {}
        for score in self.scores:
            with_score = [summary for summary in summaries if score.is_of(summary)]
            scores[score.name] = Estimate.of(score.mean(summary) for summary in with_score)
            clients = [score.clients(summary) for summary in with_score]
            scored[score.name] = sum(clients, start=Scored())
        numbers: dict[str, Estimate | None] = {}
        for name, read in NUMBERS.items():
            numbers[name] = Estimate.of(read(summary) for summary in summaries)
        return ComparisonRow(
            label=label,
            algorithm=_join_distinct(summary["algorithm"] for summary in summaries),
            data=_join_distinct(summary["data"] for summary in summaries),
            seeds=tuple(summary["seed"] for summary in summaries),
            scores=scores,
            worst10=Estimate.of(main.worst_tenth(summary) for summary in with_main),
            honest=Estimate.of(main.of_honest(summary) for summary in summaries),
            chosen=Estimate.of(main.of_chosen(summary) for summary in summaries),
            gap_closed=Estimate.of(self._gap_closed(summary) for summary in summaries),
            **numbers,
            scored=scored,
        )

    @cached_property
    def _columns(self) -> dict[str, Callable[[ComparisonRow], str]]:
        """Functions that write the cells, by heading, without columns that carry no information."""
        rows = self.rows
        is_superfluous = {
            "algorithm": all(row.label.startswith(row.algorithm) for row in rows),
            "data": len({row.data for row in rows}) == 1,
            chosen_heading(self.scores[0]): all(row.chosen is None for row in rows),
            honest_heading(self.scores[0]): all(row.honest is None for row in rows),
            "backdoor": all(row.attack_success is None for row in rows),
            "rounds to target": all(row.rounds_to_target is None for row in rows),
            "traffic to target": all(row.bytes_to_target is None for row in rows),
        }
        columns = all_columns(self.scores)
        return {
            name: write for name, write in columns.items() if not is_superfluous.get(name, False)
        }

    @property
    def _data(self) -> str:
        return _join_distinct((row.data for row in self.rows), "; ")

    @property
    def title(self) -> str:
        """Title with the name and the number of configurations."""
        title = f"Comparison of {count(len(self.rows), 'configuration')}"
        return f"{self.name}: {title.lower()}" if self.name else title

    @property
    def note(self) -> str:
        """Note below the table: data and explanations."""
        sentences = [
            f"{self._data}.",
            "±: 95 % interval of the mean over seeds.",
            "Gap closed: 0 is FedAvg, 1 the oracle.",
        ]
        if chosen := note_of_chosen(self._summaries):
            sentences.append(chosen)
        if any(row.counts for row in self.rows):
            sentences.append(SCORED)
        return " ".join(sentences)


def _check_seeds(label: str, runs: Sequence[Run]) -> None:
    """Check that the runs of a configuration differ in seed or data: one would count twice."""
    seeds = [(run.summary["seed"], run.summary["data"]) for run in runs]
    for seed, data in seeds:
        if seeds.count((seed, data)) > 1:
            raise ConfigError(
                f"the runs of {shown(label)} should have different seeds, got seed {seed} on "
                f"{data} more than once"
            )


def _setting(summary: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the seed, data and model that a run must share with its baselines."""
    return summary["seed"], summary["data"], summary["model"]


def _join_distinct(words: Iterable[str], separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(words))


def _as_json(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {
        "mean": estimate.mean,
        "half_width": estimate.half_width,
        "values": list(estimate.values),
    }


def _measure_width(cells: Mapping[str, Sequence[str]]) -> int:
    """Return the width of a table: that of the widest entry of each column, and two more each."""
    width = 0
    for name, column in cells.items():
        width += 2 + max(len(text) for text in (*name.splitlines(), *column))
    return width


def _find_common_suffix(labels: Sequence[str]) -> str:
    """Return the common end of all labels, from a hyphen on: ``-mnist-label-swap``.

    It is empty for a single label.
    """
    if len(labels) < 2:
        return ""
    reversed_ends = [label.split("-")[:0:-1] for label in labels]
    shared: list[str] = []
    for parts in zip(*reversed_ends, strict=False):
        if len(set(parts)) > 1:
            break
        shared.insert(0, parts[0])
    return "".join(f"-{part}" for part in shared)
