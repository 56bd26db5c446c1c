"""Comparison of several configurations, each of which was run with one or more seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from rich.markup import escape
from rich.table import Table

from fedclade.core import ConfigError, checked, require, shown, unknown
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
    ORACLE,
    SCORED,
    WORDS,
    ComparisonRow,
    Estimate,
    all_columns,
    chosen_heading,
    honest_heading,
    note_of_chosen,
    write_with_interval,
    write_with_std,
)
from fedclade.report.formats import count
from fedclade.report.latex import latex_table
from fedclade.report.plots import comparison_plot
from fedclade.report.score import Score, Scored, compared_by, in_common
from fedclade.report.significance import PairedTest, PairedTests, corrected_difference, holm
from fedclade.report.tables import new_table, wrap_heading
from fedclade.runs import Run, data_frame
from fedclade.tasks import gap_closed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from plotly.graph_objects import Figure as PlotlyFigure

HEADING_WIDTH = 9
"""Number of characters beyond which the heading of a column is broken at spaces."""


@checked()
@dataclass(frozen=True, eq=False)
class Comparison(ComparisonFiles):
    """Table of configurations, with the means of their runs and 95 % intervals over seeds.

    The column "gap closed" gives (method - FedAvg) / (oracle - FedAvg) for a run, where FedAvg and
    the oracle, which knows the true clusters, were run with the same seed, data and model. If
    several configurations contain such runs, the runs of the first configuration are used. The gap
    is undefined without a FedAvg run or an oracle run, or if the oracle is not better than FedAvg.

    Parameters
    ----------
    runs
        Runs of each configuration by its label; one run for each seed.
    name
        Name of the data or the scenario, for the title.

    Raises
    ------
    ConfigError
        If there is no configuration, a configuration has no runs, or a configuration has
        several runs with the same seed and data.
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
        """All metrics of the runs, first the metrics that all runs have.

        The first metric is the main metric of the comparison.
        """
        return compared_by(self._run_summaries)

    @cached_property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """One row of results per configuration, in the order of ``runs``."""
        rows: list[ComparisonRow] = []
        for label, runs in self.runs.items():
            rows.append(self._make_row(label, [run.summary for run in runs]))
        return tuple(rows)

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Texts of each column of the table, by the column's heading."""
        return {name: self._write_cells(write) for name, write in self._columns.items()}

    def _write_cells(self, write: Callable[[ComparisonRow], str]) -> list[str]:
        """Return the cells of a column; ``write`` makes a configuration's cell from its row."""
        return [write(row) for row in self.rows]

    def frame(self) -> DataFrame:
        """Return the numbers of :meth:`csv` as a pandas data frame, one row per configuration.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        return data_frame([self._as_csv(row) for row in self.rows], "Comparison.frame")

    def plot(self) -> PlotlyFigure:
        """Return a Plotly figure of the mean scores with intervals and of each run as a small dot.

        Raises
        ------
        ConfigError
            If the runs have no metric in common.
        MissingExtraError
            If plotly is not installed.
        """
        return comparison_plot(in_common(self._run_summaries), self.rows, self.title, self._data)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.runs)})"

    @checked()
    def table(self, width: int | None = None) -> Table:
        """Return the comparison as a table for the terminal.

        Parameters
        ----------
        width
            Number of characters in a line of the terminal. Columns that do not fit are left
            out, the least important first. By default, all columns are included.
        """
        title = self.title
        columns = dict(self._columns)
        numbers_of_seeds = {len(row.seeds) for row in self.rows}
        if len(numbers_of_seeds) == 1:  # stated in the title, it leaves room for other columns
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
            # Numbers are never broken over lines, and names only if they are wider than the table.
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

    @checked()
    def latex(
        self,
        *,
        spread: Literal["std", "interval"] = "std",
        bold: Literal["significant", "best", "none"] = "significant",
        columns: Sequence[str] | None = None,
        label: str = "tab:comparison",
    ) -> str:
        r"""Return the comparison as a table for a paper, in LaTeX with the package booktabs.

        All special characters of labels and names are escaped. Numbers have the same decimals as in
        :meth:`table`.

        Parameters
        ----------
        spread
            Number after ±: the standard deviation over the seeds (n − 1 in the denominator), or
            half the width of the mean's 95 % interval.
        bold
            ``significant``: the best mean of the main metric is bold only if it is better than all
            others by :meth:`paired_tests`, at a level of 5 % for all tests together. ``best``: the
            best mean is bold, without a test. A mean over fewer values than another mean is then
            not bold, even if it is the best. ``none``: nothing is bold. The oracle, which is given
            the true clusters, is never bold, and need not be beaten.
        columns
            Headings of the columns to write, in this order, as in :attr:`columns`, such as
            ``["config", "accuracy, %", "ARI"]``; all columns by default.
        label
            Label of the table for ``\ref``.

        Raises
        ------
        ConfigError
            If an option is not one of its choices, a column is unknown, or the label has other
            characters than letters, digits and ``: . / + - _``.
        """
        is_label = re.fullmatch(r"[\w:./+-]+", label, re.ASCII) is not None
        spreads, choices = ("std", "interval"), ("significant", "best", "none")
        require(
            ("spread", spread, spread in spreads, f"one of {', '.join(spreads)}"),
            ("bold", bold, bold in choices, f"one of {', '.join(choices)}"),
            ("label", label, is_label, "letters, digits and the characters : . / + - _"),
        )
        writers = self._choose_columns(write_with_std if spread == "std" else write_with_interval)
        if columns is None:
            if len({len(row.seeds) for row in self.rows}) == 1:  # stated in the caption
                del writers["seeds"]
        else:
            for name in columns:
                if name not in writers:
                    raise ConfigError(unknown("column", name, writers))
            writers = {name: writers[name] for name in columns}
        cells = [self._write_cells(write) for write in writers.values()]
        winner = self._find_bold(bold)
        heading = self.scores[0].heading
        return latex_table(
            list(writers),
            list(zip(*cells, strict=True)),
            caption=self._caption(spread, bold),
            label=label,
            left=tuple(WORDS),
            bold=[(i, heading) for i, row in enumerate(self.rows) if row.label == winner],
        )

    def _find_bold(self, bold: str) -> str | None:
        """Return the label of the configuration whose score is bold, if any; see :meth:`latex`."""
        estimates = self._find_candidates()
        if bold == "none" or not estimates:
            return None
        if bold == "significant":
            return self.paired_tests().winner(list(estimates))
        most = max(len(estimate.values) for estimate in estimates.values())
        sign = self.scores[0].sign
        means = {
            label: sign * estimate.mean
            for label, estimate in estimates.items()
            if len(estimate.values) == most
        }
        return max(means, key=lambda label: means[label])

    def _find_candidates(self) -> dict[str, Estimate]:
        """Return the main scores of the configurations that may be bold in LaTeX, by label."""
        estimates: dict[str, Estimate] = {}
        for row in self.rows:
            estimate = row.scores[self.scores[0].name]
            if row.algorithm != ORACLE and estimate is not None and isfinite(estimate.mean):
                estimates[row.label] = estimate
        return estimates

    def _caption(self, spread: str, bold: str) -> str:
        """Return the caption of the table in LaTeX: data, seeds, and what ± and bold mean."""
        numbers = [len(row.seeds) for row in self.rows]
        seeds = count(max(numbers), "seed")
        if min(numbers) < max(numbers):
            seeds = f"{min(numbers)} to {seeds}"
        what = "standard deviation" if spread == "std" else "95 % interval of the mean"
        sentences = [f"{self._data}.", f"Mean ± {what} over {seeds}."]
        if bold == "significant":
            sentences.append(
                "Bold: significantly better than all others (paired t-test over seeds, p < 0.05 "
                "after Holm's correction)."
            )
        elif bold == "best":
            values = [len(each.values) for each in self._find_candidates().values()]
            means = "mean"
            if values and min(values) < max(values):
                means = f"mean over {count(max(values), 'seed')}"
            sentences.append(f"Bold: best {means}, without a test.")
        if "gap closed" in self._columns and any(row.gap_closed for row in self.rows):
            sentences.append("Gap closed: 0 is FedAvg, 1 the oracle.")
        return " ".join(sentences)

    @checked()
    def paired_tests(self, against: str | None = None, test_to_train: float = 0.0) -> PairedTests:
        """Test which configurations differ in the main metric, by their runs with the same seeds.

        Two configurations are compared by the differences of their scores for each seed that both
        were run with, on the same data: by the two-sided paired t-test, whose p-values are
        corrected for the number of tests by Holm's procedure. Pairs with fewer than two common
        seeds have no p-value, and are not counted. With few seeds, only large differences are
        significant. The tests generalize over seeds, not over data sets.

        Parameters
        ----------
        against
            Label of a configuration, with which all others are compared. By default, each pair of
            configurations is tested.
        test_to_train
            Number of test rows as a multiple of training rows, such as 0.25, for seeds that split
            the same rows in different ways. Their scores are not independent, so the test is then
            the corrected resampled t-test (Nadeau and Bengio 2003). With 0, seeds count as
            independent, as in the intervals of the table.

        Returns
        -------
        PairedTests
            The tests, with ``.table()`` and ``.as_dicts()``.

        Raises
        ------
        ConfigError
            If no configuration has the label ``against``, or ``test_to_train`` is negative.
        """
        require(("test_to_train", test_to_train, test_to_train >= 0, "at least 0"))
        labels = list(self.runs)
        if against is None:
            pairs = list(combinations(labels, 2))
        elif against in labels:
            pairs = [(against, label) for label in labels if label != against]
        else:
            raise ConfigError(unknown("configuration", against, labels))
        score = self.scores[0]
        tests: list[PairedTest] = []
        p_values: dict[tuple[str, str], float] = {}
        for first, second in pairs:
            own, others = self._scores_by_seed(first), self._scores_by_seed(second)
            values = [score.sign * (own[key] - others[key]) for key in own if key in others]
            if not values:
                continue
            difference = corrected_difference(values, test_to_train)
            tests.append(PairedTest(first, second, len(values), difference))
            if difference.p_value is not None:
                p_values[first, second] = difference.p_value
        corrected = holm(p_values)
        tests = [replace(test, p_value=corrected.get((test.first, test.second))) for test in tests]
        return PairedTests(score, tests, test_to_train)

    def _scores_by_seed(self, label: str) -> dict[tuple[Any, ...], float]:
        """Return the main scores of a configuration's runs, by seed and data."""
        score = self.scores[0]
        scores: dict[tuple[Any, ...], float] = {}
        for run in self.runs[label]:
            mean = score.mean(run.summary) if score.is_of(run.summary) else None
            if mean is not None:
                scores[run.summary["seed"], run.summary["data"]] = mean
        return scores

    def csv(self) -> str:
        """Return the mean results as CSV, one line for each configuration.

        Each metric has a second column with half the width of its 95 % interval. Shares are in [0,
        1]; missing numbers are empty.
        """
        return csv_table([self._as_csv(row) for row in self.rows])

    def _as_csv(self, row: ComparisonRow) -> dict[str, Any]:
        """Return the CSV line of a configuration, as values by column name."""
        entries: dict[str, Any] = {**row.words, "seeds": len(row.seeds)}
        for name, estimate in row.estimates.items():
            entries[name] = None if estimate is None else estimate.mean
        for name, estimate in row.scores.items():
            entries[f"{name}_half_width"] = None if estimate is None else estimate.half_width
        reached = row.rounds_to_target
        if reached is None:
            entries["runs_at_target"] = 0
        else:
            entries["runs_at_target"] = len(reached.values)
        return entries | row.counts

    def json(self) -> str:
        """Return the comparison as JSON: each number with mean, interval half-width and values."""
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
            If the runs have no metric in common.
        MissingExtraError
            If matplotlib is not installed.
        """
        return comparison_figure(in_common(self._run_summaries), self.rows, self.title, self._data)

    @property
    def _run_summaries(self) -> list[Mapping[str, Any]]:
        """Summaries (contents of ``summary.json``) of all runs of all configurations."""
        summaries: list[Mapping[str, Any]] = []
        for runs in self.runs.values():
            summaries += [run.summary for run in runs]
        return summaries

    @cached_property
    def _baseline_summaries(self) -> dict[tuple[Any, ...], Mapping[str, Any]]:
        """Summary of the first run for each combination of algorithm, seed, data and model.

        The number "gap closed" of a run is computed from these summaries of FedAvg and of the
        oracle.
        """
        baselines: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for summary in self._run_summaries:
            baselines.setdefault((summary["algorithm"], *_shared_setting(summary)), summary)
        return baselines

    def _gap_closed(self, summary: Mapping[str, Any]) -> float | None:
        """Return (method - FedAvg) / (oracle - FedAvg) for one run, by the main metric.

        None if the run with FedAvg or the oracle, or one of the three scores, is missing, or if the
        oracle is not better than FedAvg.
        """
        fedavg = self._baseline_summaries.get(("fedavg", *_shared_setting(summary)))
        oracle = self._baseline_summaries.get(("oracle", *_shared_setting(summary)))
        if fedavg is None or oracle is None:
            return None
        score = self.scores[0]
        if not score.is_of(summary, fedavg, oracle):
            return None
        means = [score.mean(entry) for entry in (summary, fedavg, oracle)]
        known = [score.sign * mean for mean in means if mean is not None]
        if len(known) != len(means):
            return None
        return gap_closed(*known)

    def _make_row(self, label: str, summaries: Sequence[Mapping[str, Any]]) -> ComparisonRow:
        """Compute the row of a configuration from the summaries of its runs.

        Parameters
        ----------
        label
            Label of the configuration.
        summaries
            Content of ``summary.json`` of each run.
        """
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
        """Functions that write the cells of each shown column, by heading."""
        return self._choose_columns(write_with_interval)

    def _choose_columns(
        self, write: Callable[[Score, Estimate | None], str]
    ) -> dict[str, Callable[[ComparisonRow], str]]:
        """Return functions that write the cells of each shown column, by heading.

        Columns without information are left out, such as the data if all rows have the same data.
        ``write`` writes a mean score with its spread over seeds.
        """
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
        columns = all_columns(self.scores, write)
        return {name: each for name, each in columns.items() if not is_superfluous.get(name, False)}

    @property
    def _data(self) -> str:
        """Descriptions of the configurations' data without repetitions, separated by semicolons."""
        return _join_distinct((row.data for row in self.rows), "; ")

    @property
    def title(self) -> str:
        """Title of the comparison, with its name, if any, and the number of configurations."""
        title = f"Comparison of {count(len(self.rows), 'configuration')}"
        if self.name:
            return f"{self.name}: {title.lower()}"
        return title

    @property
    def note(self) -> str:
        """Note below the table: the data, and explanations of intervals and columns."""
        sentences = [
            f"{self._data}.",
            "±: 95 % interval of the mean over seeds.",
            "Gap closed: 0 is FedAvg, 1 the oracle.",
        ]
        if chosen := note_of_chosen(self._run_summaries):
            sentences.append(chosen)
        if any(row.counts for row in self.rows):
            sentences.append(SCORED)
        return " ".join(sentences)


def _check_seeds(label: str, runs: Sequence[Run]) -> None:
    """Check that no two runs of a configuration have the same seed and data.

    Such runs would be identical, and their result would count twice in the mean.

    Raises
    ------
    ConfigError
        If two runs have the same seed and data.
    """
    seeds = [(run.summary["seed"], run.summary["data"]) for run in runs]
    for seed, data in seeds:
        if seeds.count((seed, data)) > 1:
            raise ConfigError(
                f"the runs of configuration {shown(label)} should have distinct seeds, got seed "
                f"{seed} on {data} more than once"
            )


def _shared_setting(summary: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the seed, data and model that a run and its baselines must have in common."""
    return summary["seed"], summary["data"], summary["model"]


def _join_distinct(words: Iterable[str], separator: str = ", ") -> str:
    """Join texts without repetitions, in the order in which they first occur."""
    return separator.join(dict.fromkeys(words))


def _as_json(estimate: Estimate | None) -> dict[str, Any] | None:
    """Return an estimate as a dictionary for JSON; None if the estimate is missing."""
    if estimate is None:
        return None
    return {
        "mean": estimate.mean,
        "half_width": estimate.half_width,
        "values": list(estimate.values),
    }


def _measure_width(cells: Mapping[str, Sequence[str]]) -> int:
    """Return the width of a table in characters: the widest entry of each column, plus padding."""
    width = 0
    for name, column in cells.items():
        width += 2 + max(len(text) for text in (*name.splitlines(), *column))
    return width


def _find_common_suffix(labels: Sequence[str]) -> str:
    """Return the common end of all labels, from a hyphen on, such as ``-mnist-label-swap``.

    The table states this common part once, in its title, and shortens the labels. Empty if there is
    no common part or only a single label.
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
