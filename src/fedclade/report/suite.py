"""Comparisons of several scenarios in one report: an overview, mean ranks, published figures."""

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
"""Headings of scenarios are broken at spaces beyond this number of characters."""

# Mean ranks over scenarios, with Friedman's test and Nemenyi's critical difference (Demšar 2006,
# "Statistical comparisons of classifiers over multiple data sets", sections 3.2.2 and 3.2.4).

MIN_SETS = 4
MIN_METHODS = 3
"""With fewer sets or methods, ranks are not meaningful."""

LEVEL = 0.05
"""Significance level of Nemenyi's test."""

LINE_HEIGHT = 0.5
BAR_HEIGHT = 0.3
"""Heights of a method and of a bar in the diagram, in units of its axes."""

INCHES_PER_UNIT = 0.55


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods over sets, a set being one seed of one scenario; 1 is the best.

    Parameters
    ----------
    mean
        Mean rank of each method, the best first.
    sets
        Number of sets.
    scenarios
        Number of scenarios.
    p_value
        p-value of Friedman's test that all methods are equal; None if they have the same scores
        everywhere.
    critical
        Smallest difference of two mean ranks that is significant, at a level of 5 %.
    """

    mean: Mapping[str, float]
    sets: int
    scenarios: int
    p_value: float | None
    critical: float

    def alike(self) -> list[tuple[str, str]]:
        """Return the maximal groups without a significant difference, as first and last method."""
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
        """Title of the table, with the numbers of scenarios and of runs."""
        scenarios = count(self.scenarios, "scenario")
        return f"Mean ranks over {scenarios}, {count(self.sets, 'run')} each"

    @property
    def note(self) -> str:
        """Explanation below the table."""
        p_value = NONE if self.p_value is None else f"{self.p_value:.1g}"
        return (
            f"1 is the best. Friedman's p = {p_value}; ranks that differ by less than "
            f"{self.critical:.2f} do not differ significantly (Nemenyi, 5 %)."
        )

    @property
    def rows(self) -> list[list[str]]:
        """Each method with its mean rank."""
        return [[method, f"{mean_rank:.1f}"] for method, mean_rank in self.mean.items()]

    def table(self) -> Group:
        """Return the ranks for the terminal; title and note are wider than the table."""
        table = new_table("")
        table.add_column("config", no_wrap=True)
        table.add_column("mean rank", justify="right")
        for method, mean_rank in self.rows:
            table.add_row(escape(method), mean_rank)
        return Group(Text(self.title, style="bold"), table, self.note)

    def markdown(self) -> str:
        """Return the ranks as Markdown, with a title and a note."""
        table = markdown_table(["config", "mean rank"], self.rows)
        return f"**{self.title}**\n\n{table}\n\n{self.note}"


Set = tuple[str, int]
"""Scenario and seed."""


def rank_methods(scores: Mapping[Set, Mapping[str, float]]) -> Ranks | None:
    """Rank methods that have all run in the same sets; None if too few have.

    Methods are added in the order of how many sets they have run in. Of all such choices of
    methods, with the sets in which all of them have run, the one with the most scenarios is
    ranked, and of these the one with the most methods.

    Parameters
    ----------
    scores
        Score of each method by scenario and seed; higher is better.
    """
    choices = _list_choices(scores)
    if not choices:
        return None
    from scipy import stats  # imported here because it takes long

    methods, sets = max(choices, key=lambda choice: (_count_scenarios(choice[1]), len(choice[0])))
    rows = [_select_scores(scores[key], methods) for key in sets]
    table = np.array(rows)
    n, k = table.shape
    mean_ranks = stats.rankdata(-table, axis=1).mean(0).tolist()
    quantile = stats.studentized_range.ppf(1 - LEVEL, k, np.inf) / np.sqrt(2)
    critical = quantile * np.sqrt(k * (k + 1) / (6 * n))
    with np.errstate(invalid="ignore"):  # equal scores everywhere have no p-value
        p_value = float(stats.friedmanchisquare(*table.T).pvalue)
    return Ranks(
        {method: rank for rank, method in sorted(zip(mean_ranks, methods, strict=True))},
        sets=n,
        scenarios=_count_scenarios(sets),
        p_value=p_value if np.isfinite(p_value) else None,
        critical=float(critical),
    )


def _list_choices(scores: Mapping[Set, Mapping[str, float]]) -> list[tuple[list[str], list[Set]]]:
    """Return all large enough choices of methods, with the sets in which all of them have run."""
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
    return len({scenario for scenario, _ in sets})


def _select_scores(by_method: Mapping[str, float], methods: Sequence[str]) -> list[float]:
    return [by_method[method] for method in methods]


def rank_figure(ranks: Ranks) -> Figure:
    """Draw the critical-difference diagram: methods on an axis of ranks, bars over similar ones."""
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
            _draw_method(axes, name, ranks.mean[name], y, low - margin, is_left=True)
        else:
            y = -top - LINE_HEIGHT * (len(names) - 1 - i)
            _draw_method(axes, name, ranks.mean[name], y, high + margin, is_left=False)
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
    axes: Axes, name: str, rank: float, y: float, end: float, *, is_left: bool
) -> None:
    """Draw the line from a method's place on the axis of ranks to its label."""
    axes.plot([rank, rank, end], [0, y, y], color=style.MUTED, lw=0.8, gid="method")
    text = f" {name}  {rank:.1f} " if is_left else f" {rank:.1f}  {name} "
    side = "right" if is_left else "left"
    axes.text(end, y, text, ha=side, va="center", fontsize=9.5, color=style.INK)


# Published figures of some scenarios, next to the results of this library.


@dataclass(frozen=True, eq=False)
class PublishedFigures:
    """Figures published by one source next to own results: means over each group of scenarios.

    A mean is given only if a configuration has run in all scenarios of the group.

    Parameters
    ----------
    groups
        Published figures of each group of scenarios.
    means
        Own score by configuration and scenario, in the unit of the published figures.
    """

    groups: Sequence[Printed]
    means: Mapping[str, Mapping[str, float]]

    @property
    def title(self) -> str:
        """Title of the table."""
        return f"Published by {self.groups[0].source}, and reproduced with fedclade"

    @property
    def columns(self) -> list[str]:
        """Headings of the table."""
        columns = ["config"]
        for group in self.groups:
            columns += [f"{group.name}, published", f"{group.name}, fedclade"]
        return columns

    @cached_property
    def rows(self) -> list[list[str]]:
        """Cells of each configuration that has a published figure or an own result."""
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
        """Return the table for the terminal."""
        table = new_table(self.title, collapse_padding=True)
        for name in self.columns:
            side = "left" if name == "config" else "right"
            table.add_column(wrap_heading(name, HEADING_WIDTH), justify=side, no_wrap=True)
        for label, *cells in self.rows:
            table.add_row(escape(label), *cells)
        return table

    def markdown(self) -> str:
        """Return the table as Markdown, with a title."""
        return f"**{self.title}**\n\n{markdown_table(self.columns, self.rows)}"

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the published figures of each group, and the own means as ``ours``."""
        return [{**asdict(group), "ours": self._group_means(group)} for group in self.groups]

    def _group_means(self, group: Printed) -> dict[str, float]:
        """Return the mean over a group of each configuration that has run in all of it."""
        means: dict[str, float] = {}
        for label, scores in self.means.items():
            if scores.keys() >= {*group.scenarios}:
                means[label] = mean(scores[name] for name in group.scenarios)
        return means


def _write_figure(figures: Mapping[str, float], label: str) -> str:
    return number(figures[label], 1) if label in figures else ""


ORACLE = "oracle"
"""Algorithm that is given the true clusters; it has no rank."""


@dataclass(frozen=True, eq=False)
class SuiteComparison(ComparisonFiles):
    """Comparison of algorithms in several scenarios, one below the other.

    Parameters
    ----------
    scenarios
        Comparison of each scenario, by its name.
    printed
        Published figures of some scenarios, for a table of these and the own results.

    Raises
    ------
    ConfigError
        If there is no scenario.
    """

    scenarios: Mapping[str, Comparison]
    printed: Sequence[Printed] = ()

    def __post_init__(self) -> None:
        if not self.scenarios:
            raise ConfigError("a suite should have at least 1 scenario, got 0")

    def table(self, width: int | None = None) -> Group:
        """Return the tables for the terminal: each scenario, overview, ranks, published figures.

        See :meth:`Comparison.table`.
        """
        parts: list[RenderableType] = []
        parts += [comparison.table(width) for comparison in self.scenarios.values()]
        parts += self.overview(width)
        if self.ranks is not None:
            parts.append(self.ranks.table())
        parts += [published.table() for published in self._published]
        return Group(*parts)

    def overview(self, width: int | None = None) -> list[Table]:
        """Return algorithms by scenarios for the terminal: mean scores, and ARI where known.

        Parameters
        ----------
        width
            Columns of the terminal; a wider overview is divided into several tables, one below
            the other. By default there is one table.
        """
        headings = [wrap_heading(name, HEADING_WIDTH) for name in self._headings]
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
        """Return the overview of the scenarios at the given positions."""
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
        """Cells of each column of the overview, by its heading."""
        cells = self._cells(write_with_interval)
        columns: dict[str, list[str]] = {"config": list(cells)}
        for place, heading in enumerate(self._headings):
            columns[heading] = [row[place] for row in cells.values()]
        return columns

    def frame(self) -> DataFrame:
        """Return the numbers of :meth:`csv` as a data frame; see :meth:`Comparison.frame`."""
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
        parts = [f"**{self.title}**", markdown_table(["config", *self._headings], rows)]
        if self.ranks is not None:
            parts.append(self.ranks.markdown())
        parts += [published.markdown() for published in self._published]
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
        """Return comparisons by scenario, ranks and published figures as JSON.

        See :meth:`Comparison.json`.
        """
        content: dict[str, Any] = {
            "scenarios": {
                name: json.loads(comparison.json()) for name, comparison in self.scenarios.items()
            }
        }
        if self.ranks is not None:
            content["ranks"] = asdict(self.ranks)
        groups: list[dict[str, Any]] = []
        for published in self._published:
            groups += published.as_dicts()
        if groups:
            content["printed"] = groups
        return json.dumps(content, indent=2) + "\n"

    def figure(self) -> Figure:
        """Draw a panel for each scenario; see `suite_figure`."""
        panels = {
            name: (self._score_of[name], comparison.rows)
            for name, comparison in self.scenarios.items()
        }
        return suite_figure(panels)

    def figures(self) -> dict[str, Figure]:
        """Draw the panels, and the diagram of mean ranks as ``ranks``, if there are any."""
        figures = super().figures()
        if self.ranks is not None:
            figures["ranks"] = rank_figure(self.ranks)
        return figures

    @cached_property
    def ranks(self) -> Ranks | None:
        """Mean ranks of all configurations except the oracle; None if too few can be ranked.

        A rank is that of one seed in one scenario, by the metric of the overview.
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
    def _published(self) -> list[PublishedFigures]:
        """Published figures with own results, one object for each source."""
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
        """Metric of each scenario: the first that all scenarios have, or else its own first."""
        comparisons = list(self.scenarios.values())
        shared = [
            score
            for score in comparisons[0].scores
            if all(score in comparison.scores for comparison in comparisons)
        ]
        return {
            name: (shared or comparison.scores)[0] for name, comparison in self.scenarios.items()
        }

    @property
    def title(self) -> str:
        """Title of the overview, with the metric if all scenarios have the same."""
        scores = set(self._score_of.values())
        subject = "Scores"
        if len(scores) == 1:
            score = scores.pop()
            subject = f"{score.title} in percent" if score.share else score.title
        return f"{subject}, mean of the clients and seeds; ARI where the true clusters are known"

    @property
    def _headings(self) -> list[str]:
        """Names of the scenarios, with their metrics if these differ."""
        scores = self._score_of
        if len(set(scores.values())) == 1:
            return list(scores)
        return [f"{name}: {score.heading}" for name, score in scores.items()]

    @cached_property
    def _by_label(self) -> dict[str, list[ComparisonRow | None]]:
        """Row of each configuration in every scenario; None where it has not run."""
        rows = [_index_rows(comparison) for comparison in self.scenarios.values()]
        labels = all_labels(comparison.rows for comparison in self.scenarios.values())
        by_label: dict[str, list[ComparisonRow | None]] = {}
        for label in labels:
            by_label[label] = [by_name.get(label) for by_name in rows]
        return by_label

    def _cells(self, write: Callable[[Score, Estimate | None], str]) -> dict[str, list[str]]:
        """Return the score of each configuration in every scenario, with its ARI if known."""
        scores = list(self._score_of.values())
        cells: dict[str, list[str]] = {}
        for label, rows in self._by_label.items():
            pairs = zip(scores, rows, strict=True)
            cells[label] = [_write_cell(score, row, write) for score, row in pairs]
        return cells


def _divide_columns(
    headings: Sequence[str], cells: Mapping[str, Sequence[str]], width: int | None
) -> list[list[int]]:
    """Divide the places of columns into blocks that fit into ``width``, the labels included."""
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

    None if the run has no score or is the oracle's.
    """
    if summary["algorithm"] == ORACLE or not score.is_of(summary):
        return None
    value = score.mean(summary)
    if value is None or not isfinite(value):
        return None
    return score.sign * value


def _index_rows(comparison: Comparison) -> dict[str, ComparisonRow]:
    return {row.label: row for row in comparison.rows}


def _write_cell(
    score: Score, row: ComparisonRow | None, write: Callable[[Score, Estimate | None], str]
) -> str:
    """Write a score, with the ARI if known; empty for a configuration that has not run."""
    if row is None:
        return ""
    text = with_number(row, score, write)
    return text if row.ari is None else f"{text}  {number(row.ari.mean)}"
