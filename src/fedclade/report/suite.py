"""Comparisons of algorithms in several scenarios: overview, mean ranks and published figures.

A scenario is a combination of data, model and settings in which all algorithms are run; a suite is
a set of scenarios.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedclade.config import Printed
from fedclade.core import ConfigError, import_extra
from fedclade.report import style
from fedclade.report.comparison import Comparison
from fedclade.report.comparison_files import (
    ComparisonFiles,
    all_labels,
    csv_table,
    markdown_table,
    suite_figure,
)
from fedclade.report.estimates import (
    BASELINES,
    ORACLE,
    ComparisonRow,
    Estimate,
    with_number,
    write_score,
    write_with_interval,
)
from fedclade.report.formats import NONE, count, number
from fedclade.report.score import Score
from fedclade.report.tables import new_table, wrap_heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

HEADING_WIDTH = 9
"""Number of characters beyond which the heading of a scenario is broken at spaces."""

# Mean ranks over scenarios, with Friedman's test and Nemenyi's critical difference (Demšar 2006,
# "Statistical comparisons of classifiers over multiple data sets", sections 3.2.2 and 3.2.4).

MIN_SETS = 4
MIN_METHODS = 3
"""Smallest numbers of sets (runs per method) and of methods for which ranks are meaningful."""

LEVEL = 0.05
"""Significance level of Nemenyi's test."""

LINE_HEIGHT = 0.5
BAR_HEIGHT = 0.3
"""Heights of a method's line and of a bar in the diagram of mean ranks, in units of its axes."""

INCHES_PER_UNIT = 0.55
"""Height of one unit of the axes of the diagram of mean ranks, in inches."""


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods over sets; rank 1 is the best. A set is one seed of one scenario.

    Parameters
    ----------
    mean
        Mean rank of each method, the best method first.
    sets
        Number of sets.
    scenarios
        Number of scenarios.
    p_value
        p-value of Friedman's test of the hypothesis that all methods are equal; None if all
        methods have the same scores in all sets.
    critical
        Smallest difference of two mean ranks that is significant at a level of 5 % (Nemenyi's
        critical difference).
    """

    mean: Mapping[str, float]
    sets: int
    scenarios: int
    p_value: float | None
    critical: float

    def alike(self) -> list[tuple[str, str]]:
        """Return the maximal groups of methods without a significant difference of mean ranks.

        Returns
        -------
        list of tuple
            The best and the worst method of each group.
        """
        names = list(self.mean)
        last_alike: list[int] = []
        for name in names:
            alike = [
                i
                for i, other in enumerate(names)
                if self.mean[other] - self.mean[name] < self.critical
            ]
            last_alike.append(max(alike))
        groups: list[tuple[str, str]] = []
        for i, last in enumerate(last_alike):
            is_contained = i > 0 and last <= last_alike[i - 1]
            if last > i and not is_contained:
                groups.append((names[i], names[last]))
        return groups

    @property
    def title(self) -> str:
        """Title of the table of mean ranks, with the numbers of scenarios and runs per method."""
        scenarios = count(self.scenarios, "scenario")
        if self.sets == self.scenarios:
            return f"Mean ranks over {scenarios}"
        return f"Mean ranks over {scenarios}, {count(self.sets, 'run')} each"

    @property
    def note(self) -> str:
        """Note below the table of mean ranks, with results of Friedman's and Nemenyi's tests."""
        if self.p_value is None:
            p_value = NONE
        else:
            p_value = f"{self.p_value:.1g}"
        return (
            f"1 is the best. Friedman's p = {p_value}; ranks that differ by less than "
            f"{self.critical:.2f} do not differ significantly (Nemenyi, 5 %)."
        )

    @property
    def rows(self) -> list[list[str]]:
        """Rows of the table of mean ranks: each method with its mean rank as text."""
        return [[method, f"{mean_rank:.1f}"] for method, mean_rank in self.mean.items()]

    def table(self) -> Group:
        """Return the mean ranks for the terminal: title, table and note.

        Title and note are separate from the table, as they are wider.
        """
        table = new_table("")
        table.add_column("config", no_wrap=True)
        table.add_column("mean rank", justify="right")
        for method, mean_rank in self.rows:
            table.add_row(escape(method), mean_rank)
        return Group(Text(self.title, style="bold"), table, self.note)

    def markdown(self) -> str:
        """Return the mean ranks as a Markdown table with a title and a note."""
        table = markdown_table(["config", "mean rank"], self.rows)
        return f"**{self.title}**\n\n{table}\n\n{self.note}"


Set = tuple[str, int]
"""Scenario and seed: one run of each method, in which the methods are ranked."""


def rank_methods(scores: Mapping[Set, Mapping[str, float]]) -> Ranks | None:
    """Rank methods by their scores in several sets, and test whether they differ.

    Ranking needs sets in which all ranked methods have been run, so methods with few runs may be
    left out. Methods are sorted by the number of sets in which they have been run, the largest
    number first. For every number k, the k first methods can be ranked in the sets in which all k
    have been run. Among these possible rankings, the one with the most scenarios is returned; among
    rankings with the same number of scenarios, the one with the most methods.

    Parameters
    ----------
    scores
        Score of each method by set (scenario and seed); higher is better.

    Returns
    -------
    Ranks or None
        None if fewer than ``MIN_METHODS`` methods have been run in ``MIN_SETS`` common sets.
    """
    choices = _list_choices(scores)
    if not choices:
        return None
    from scipy import stats  # imported here because the import is slow

    methods, sets = max(choices, key=lambda choice: (_count_scenarios(choice[1]), len(choice[0])))
    rows = [_select_scores(scores[key], methods) for key in sets]
    table = np.array(rows)
    n, k = table.shape
    mean_ranks = stats.rankdata(-table, axis=1).mean(0).tolist()
    quantile = stats.studentized_range.ppf(1 - LEVEL, k, np.inf) / np.sqrt(2)
    critical = quantile * np.sqrt(k * (k + 1) / (6 * n))
    with np.errstate(invalid="ignore"):  # the p-value of equal scores in all sets is 0 / 0
        p_value = float(stats.friedmanchisquare(*table.T).pvalue)
    if not np.isfinite(p_value):
        p_value = None
    return Ranks(
        {method: rank for rank, method in sorted(zip(mean_ranks, methods, strict=True))},
        sets=n,
        scenarios=_count_scenarios(sets),
        p_value=p_value,
        critical=float(critical),
    )


def _list_choices(scores: Mapping[Set, Mapping[str, float]]) -> list[tuple[list[str], list[Set]]]:
    """Return the selections of methods that can be ranked, each with its sets.

    A set is one seed of one scenario. The sets of a selection are those in which all its methods
    have been run. A selection has at least ``MIN_METHODS`` methods and ``MIN_SETS`` sets.
    """
    n_sets: dict[str, int] = defaultdict(int)
    for by_method in scores.values():
        for method in by_method:
            n_sets[method] += 1
    ordered = sorted(n_sets, key=lambda method: (-n_sets[method], method))
    choices: list[tuple[list[str], list[Set]]] = []
    for k in range(MIN_METHODS, len(ordered) + 1):
        methods = ordered[:k]
        complete = [key for key, by_method in scores.items() if by_method.keys() >= {*methods}]
        if len(complete) >= MIN_SETS:
            choices.append((methods, complete))
    return choices


def _count_scenarios(sets: Sequence[Set]) -> int:
    """Return the number of different scenarios among sets of scenario and seed."""
    return len({scenario for scenario, _ in sets})


def _select_scores(by_method: Mapping[str, float], methods: Sequence[str]) -> list[float]:
    """Return the scores of the given methods in one set, in the order of the methods."""
    return [by_method[method] for method in methods]


def rank_figure(ranks: Ranks) -> Figure:
    """Draw the critical-difference diagram of mean ranks (Demšar 2006).

    Methods are marked on an axis of ranks; a bar joins methods without a significant difference.
    """
    names = list(ranks.mean)
    bars = ranks.alike()
    n_left = (len(names) + 1) // 2  # methods whose labels are at the left
    top = BAR_HEIGHT * (len(bars) + 1)
    bottom = -top - LINE_HEIGHT * n_left
    low = 1
    high = len(names)
    margin = 0.03 * (high - low)
    figure = style.new_figure(9.6, style.HEADER + INCHES_PER_UNIT * (1.2 - bottom))
    axes = figure.subplots()
    axes.set_xlim(low - 7 * margin, high + 7 * margin)
    axes.set_ylim(bottom, 1.2)
    axes.set_axis_off()
    axes.plot([low, high], [0, 0], color=style.INK, lw=1, gid="axis")
    for tick in range(low, high + 1):
        axes.plot([tick, tick], [0, 0.12], color=style.INK, lw=1)
        axes.text(tick, 0.2, f"{tick}", ha="center", va="bottom", fontsize=9.5, color=style.INK)
    for i, name in enumerate(names):
        if i < n_left:
            y = -top - LINE_HEIGHT * i
            end = low - margin
        else:
            y = -top - LINE_HEIGHT * (len(names) - 1 - i)
            end = high + margin
        _draw_method(axes, name, rank=ranks.mean[name], y=y, end=end, is_left=i < n_left)
    for row, (first, last) in enumerate(bars, start=1):
        ends = [ranks.mean[first] - margin / 3, ranks.mean[last] + margin / 3]
        height = -BAR_HEIGHT * row
        bar_look: dict[str, Any] = {"lw": 3, "solid_capstyle": "round", "gid": "alike"}
        axes.plot(ends, [height, height], color=style.ACCENT, **bar_look)
    end = low + ranks.critical
    axes.plot([low, end], [0.9, 0.9], color=style.ACCENT, lw=3, solid_capstyle="round")
    text = f"  critical difference {ranks.critical:.2f}"
    axes.text(end, 0.9, text, va="center", fontsize=9.5, color=style.INK)
    explanation = "the best at the left; a bar joins methods without a significant difference"
    style.set_title(figure, ranks.title, f"{explanation} (Nemenyi, 5 %)")
    return figure


def _draw_method(
    axes: Axes, name: str, *, rank: float, y: float, end: float, is_left: bool
) -> None:
    """Draw the line from a method's position on the axis of ranks to its label.

    Parameters
    ----------
    axes
        Axes of the diagram.
    name
        Name of the method.
    rank
        Mean rank of the method.
    y
        Height of the label.
    end
        Horizontal position of the label.
    is_left
        Whether the label is at the left of the diagram.
    """
    axes.plot([rank, rank, end], [0, y, y], color=style.MUTED, lw=0.8, gid="method")
    if is_left:
        text = f" {name}  {rank:.1f} "
        side = "right"
    else:
        text = f" {rank:.1f}  {name} "
        side = "left"
    axes.text(end, y, text, ha=side, va="center", fontsize=9.5, color=style.INK)


# Published results of some scenarios, next to the results of this library.


@dataclass(frozen=True, eq=False)
class PublishedFigures:
    """Table of results published by one source, next to results of this library.

    Each number is a mean over a group of scenarios. The result of this library is given only if a
    configuration has been run in all scenarios of the group.

    Parameters
    ----------
    groups
        Published results of each group of scenarios.
    means
        Score of this library by configuration and scenario, in the unit of the published results.
    """

    groups: Sequence[Printed]
    means: Mapping[str, Mapping[str, float]]

    @property
    def title(self) -> str:
        """Title of the table of published and reproduced results, with the source."""
        return f"Published by {self.groups[0].source}, and reproduced with fedclade"

    @property
    def columns(self) -> list[str]:
        """Headings of the table of published and reproduced results."""
        columns = ["config"]
        for group in self.groups:
            columns += [f"{group.name}, published", f"{group.name}, fedclade"]
        return columns

    @cached_property
    def rows(self) -> list[list[str]]:
        """Cells of each configuration that has a published or a reproduced result."""
        labels = dict.fromkeys(self.means)
        for group in self.groups:
            labels.update(dict.fromkeys(group.figures))
        results = [self._group_means(group) for group in self.groups]
        rows: list[list[str]] = []
        for label in labels:
            cells: list[str] = []
            for group, own in zip(self.groups, results, strict=True):
                cells += [_write_figure(group.figures, label), _write_figure(own, label)]
            if any(cells):
                rows.append([label, *cells])
        return rows

    def table(self) -> Table:
        """Return the published and reproduced results as a table for the terminal."""
        table = new_table(self.title, collapse_padding=True)
        for name in self.columns:
            side = "left" if name == "config" else "right"
            table.add_column(wrap_heading(name, HEADING_WIDTH), justify=side, no_wrap=True)
        for label, *cells in self.rows:
            table.add_row(escape(label), *cells)
        return table

    def markdown(self) -> str:
        """Return the published and reproduced results as a Markdown table with a title."""
        return f"**{self.title}**\n\n{markdown_table(self.columns, self.rows)}"

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return a dictionary for each group, with published results and our means (``ours``)."""
        return [{**asdict(group), "ours": self._group_means(group)} for group in self.groups]

    def _group_means(self, group: Printed) -> dict[str, float]:
        """Return each configuration's mean score over the scenarios of a group.

        Only configurations that have been run in all scenarios of the group are included.
        """
        means: dict[str, float] = {}
        for label, scores in self.means.items():
            if scores.keys() >= {*group.scenarios}:
                means[label] = mean(scores[name] for name in group.scenarios)
        return means


def _write_figure(figures: Mapping[str, float], label: str) -> str:
    """Return a configuration's result as text; empty if the configuration has no result."""
    if label not in figures:
        return ""
    return number(figures[label], 1)


@dataclass(frozen=True, eq=False)
class SuiteComparison(ComparisonFiles):
    """Comparison of algorithms in several scenarios.

    Parameters
    ----------
    scenarios
        Comparison of the algorithms in each scenario, by the scenario's name.
    printed
        Published results in some of the scenarios, which are shown next to results of this library.

    Raises
    ------
    ConfigError
        If there is no scenario.
    """

    scenarios: Mapping[str, Comparison]
    printed: Sequence[Printed] = ()

    def __post_init__(self) -> None:
        if not self.scenarios:
            raise ConfigError("a comparison of scenarios should have at least 1 scenario, got 0")

    def table(self, width: int | None = None) -> Group:
        """Return all tables for the terminal: scenarios, overview, mean ranks, published results.

        Parameters
        ----------
        width
            Number of characters in a line of the terminal; see :meth:`Comparison.table`.
        """
        parts: list[RenderableType] = []
        parts += [comparison.table(width) for comparison in self.scenarios.values()]
        parts += self.overview(width)
        if self.ranks is not None:
            parts.append(self.ranks.table())
        parts += [published.table() for published in self._published_tables]
        return Group(*parts)

    def overview(self, width: int | None = None) -> list[Table]:
        """Return tables of algorithms by scenarios for the terminal, with mean scores and ARI.

        The ARI (adjusted Rand index of the clusters) is given where the true clusters are known.

        Parameters
        ----------
        width
            Number of characters in a line of the terminal. A wider overview is divided into
            several tables, one below the other. By default there is one table.
        """
        headings = [wrap_heading(name, HEADING_WIDTH) for name in self._scenario_headings]
        cells = self._cells(write_score)
        blocks = _divide_columns(headings, cells, width)
        tables: list[Table] = []
        for i, block in enumerate(blocks):
            title = self.title if i == 0 else ""
            tables.append(self._overview_table(title, headings, cells, block))
        return tables

    def _overview_table(
        self,
        title: str,
        headings: Sequence[str],
        cells: Mapping[str, Sequence[str]],
        places: Sequence[int],
    ) -> Table:
        """Return the part of the overview with the scenarios at the given positions.

        Parameters
        ----------
        title
            Title of the table; may be empty.
        headings
            Headings of all scenarios.
        cells
            Texts of all scenarios, by the label of a configuration.
        places
            Positions of the included scenarios.
        """
        table = new_table(title, collapse_padding=True)
        table.add_column("config", no_wrap=True)
        for place in places:
            table.add_column(headings[place], justify="right", no_wrap=True)
        for label, rows in self._by_label.items():
            texts = [cells[label][place] for place in places]
            if any(texts):
                row = next(row for row in rows if row is not None)
                is_baseline = row.algorithm in BASELINES
                table.add_row(escape(label), *texts, style="dim" if is_baseline else None)
        return table

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Texts of the overview, by the heading of a column: for each scenario, a text per config."""
        cells = self._cells(write_with_interval)
        columns: dict[str, list[str]] = {"config": list(cells)}
        for place, heading in enumerate(self._scenario_headings):
            columns[heading] = [row[place] for row in cells.values()]
        return columns

    def frame(self) -> DataFrame:
        """Return the numbers of :meth:`csv` as a pandas data frame, one row per configuration.

        See :meth:`Comparison.frame`.
        """
        frames = [
            comparison.frame().assign(scenario=name) for name, comparison in self.scenarios.items()
        ]
        pandas = import_extra("pandas", "pandas", "notebook", "SuiteComparison.frame")
        frame = pandas.concat(frames, ignore_index=True)
        return frame[["scenario", *frame.columns.drop("scenario")]]

    def __repr__(self) -> str:
        return f"SuiteComparison({', '.join(self.scenarios)})"

    def markdown(self) -> str:
        """Return the overview and the table of every scenario as Markdown."""
        cells = self._cells(write_with_interval)
        rows = [[label, *row] for label, row in cells.items()]
        parts = [f"**{self.title}**", markdown_table(["config", *self._scenario_headings], rows)]
        if self.ranks is not None:
            parts.append(self.ranks.markdown())
        parts += [published.markdown() for published in self._published_tables]
        parts.append("\n".join(comparison.markdown() for comparison in self.scenarios.values()))
        return "\n\n".join(parts)

    def csv(self) -> str:
        """Return one CSV table with the scenario as first column; see :meth:`Comparison.csv`."""
        rows: list[dict[str, Any]] = []
        for name, comparison in self.scenarios.items():
            table = csv.DictReader(io.StringIO(comparison.csv()))
            rows += [{"scenario": name, **row} for row in table]
        return csv_table(rows)

    def json(self) -> str:
        """Return the comparisons by scenario, mean ranks and published results as JSON.

        See :meth:`Comparison.json`.
        """
        scenarios = {
            name: json.loads(comparison.json()) for name, comparison in self.scenarios.items()
        }
        content: dict[str, Any] = {"scenarios": scenarios}
        if self.ranks is not None:
            content["ranks"] = asdict(self.ranks)
        groups: list[dict[str, Any]] = []
        for published in self._published_tables:
            groups += published.as_dicts()
        if groups:
            content["printed"] = groups
        return json.dumps(content, indent=2) + "\n"

    def figure(self) -> Figure:
        """Draw the mean scores in a panel for each scenario; see `suite_figure`."""
        panels = {
            name: (self._score_of[name], comparison.rows)
            for name, comparison in self.scenarios.items()
        }
        return suite_figure(panels)

    def figures(self) -> dict[str, Figure]:
        """Draw the panels of scenarios and, if methods are ranked, the diagram of mean ranks.

        Returns
        -------
        dict
            Figures by file name without ending: ``comparison`` and ``ranks``.
        """
        figures = super().figures()
        if self.ranks is not None:
            figures["ranks"] = rank_figure(self.ranks)
        return figures

    @cached_property
    def ranks(self) -> Ranks | None:
        """Mean ranks of all configurations except the oracle; None if too few can be ranked.

        Configurations are ranked in each run (seed and scenario), by the metric of the overview.
        """
        scores: dict[Set, dict[str, float]] = defaultdict(dict)
        for name, comparison in self.scenarios.items():
            score = self._score_of[name]
            for label, runs in comparison.runs.items():
                for run in runs:
                    value = _rankable_score(score, run.summary)
                    if value is not None:
                        scores[name, run.summary["seed"]][label] = value
        return rank_methods(scores)

    @cached_property
    def _published_tables(self) -> list[PublishedFigures]:
        """Tables that compare published results with our results, one table for each source."""
        means: dict[str, dict[str, float]] = defaultdict(dict)
        for name, comparison in self.scenarios.items():
            score = self._score_of[name]
            unit = 100 if score.share else 1
            for row in comparison.rows:
                estimate = row.scores[score.name]
                if estimate is not None:
                    means[row.label][name] = estimate.mean * unit
        by_source: dict[str, list[Printed]] = {}
        for printed in self.printed:
            by_source.setdefault(printed.source, []).append(printed)
        return [PublishedFigures(groups, means) for groups in by_source.values()]

    @cached_property
    def _score_of(self) -> dict[str, Score]:
        """Metric of each scenario, by the scenario's name.

        It is the first metric that all scenarios have or, without such a metric, the main metric of
        each scenario.
        """
        comparisons = list(self.scenarios.values())
        shared = list(comparisons[0].scores)
        for comparison in comparisons[1:]:
            shared = [score for score in shared if score in comparison.scores]
        return {
            name: (shared or comparison.scores)[0] for name, comparison in self.scenarios.items()
        }

    @property
    def title(self) -> str:
        """Title of the overview; it names the metric if all scenarios have the same metric."""
        scores = set(self._score_of.values())
        subject = "Scores"
        if len(scores) == 1:
            score = scores.pop()
            if score.share:
                subject = f"{score.title} in percent"
            else:
                subject = score.title
        return f"{subject}, mean of the clients and seeds; ARI where the true clusters are known"

    @property
    def _scenario_headings(self) -> list[str]:
        """Headings of the overview: names of the scenarios, with their metrics if these differ."""
        scores = self._score_of
        if len(set(scores.values())) == 1:
            return list(scores)
        return [f"{name}: {score.heading}" for name, score in scores.items()]

    @cached_property
    def _by_label(self) -> dict[str, list[ComparisonRow | None]]:
        """Row of each configuration in every scenario; None where the configuration was not run."""
        rows = [_index_rows(comparison) for comparison in self.scenarios.values()]
        labels = all_labels(comparison.rows for comparison in self.scenarios.values())
        by_label: dict[str, list[ComparisonRow | None]] = {}
        for label in labels:
            by_label[label] = [by_name.get(label) for by_name in rows]
        return by_label

    def _cells(self, write: Callable[[Score, Estimate | None], str]) -> dict[str, list[str]]:
        """Return the text of each configuration in every scenario: its score and ARI, if known.

        ``write`` makes the text of a score from the metric and its estimate.
        """
        scores = list(self._score_of.values())
        cells: dict[str, list[str]] = {}
        for label, rows in self._by_label.items():
            pairs = zip(scores, rows, strict=True)
            cells[label] = [_write_cell(score, row, write) for score, row in pairs]
        return cells


def _divide_columns(
    headings: Sequence[str], cells: Mapping[str, Sequence[str]], width: int | None
) -> list[list[int]]:
    """Divide the columns of a table into blocks, so that each block fits into a terminal.

    Parameters
    ----------
    headings
        Headings of the columns.
    cells
        Texts of all columns, by the label of a row.
    width
        Number of characters in a line; each block also needs a column of labels.

    Returns
    -------
    list of list
        Positions of the columns in each block.
    """
    label_width = max(len(label) for label in ["config", *cells])
    blocks: list[list[int]] = []
    used = 0
    for place, heading in enumerate(headings):
        texts = [*heading.split("\n"), *(row[place] for row in cells.values())]
        needed = 2 + max(len(text) for text in texts)
        fits = width is None or 2 + label_width + used + needed <= width
        if not blocks or not fits:
            blocks.append([])
            used = 0
        blocks[-1].append(place)
        used += needed
    return blocks


def _rankable_score(score: Score, summary: Mapping[str, Any]) -> float | None:
    """Return a run's mean score, negated if lower scores are better.

    None if the score is missing or not finite, or if the run is an oracle's.
    """
    if summary["algorithm"] == ORACLE or not score.is_of(summary):
        return None
    value = score.mean(summary)
    if value is None or not isfinite(value):
        return None
    return score.sign * value


def _index_rows(comparison: Comparison) -> dict[str, ComparisonRow]:
    """Return the rows of a comparison by the labels of their configurations."""
    return {row.label: row for row in comparison.rows}


def _write_cell(
    score: Score, row: ComparisonRow | None, write: Callable[[Score, Estimate | None], str]
) -> str:
    """Return a score and, if known, the ARI as text; empty if the configuration has not been run.

    ``write`` makes the text of the score from the metric and its estimate.
    """
    if row is None:
        return ""
    text = with_number(row, score, write)
    if row.ari is None:
        return text
    return f"{text}  {number(row.ari.mean)}"
