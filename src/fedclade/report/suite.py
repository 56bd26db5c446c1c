"""Several scenarios, each with a comparison of its own, in one report."""

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
from textwrap import fill
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
from fedclade.report.comparison_files import ComparisonFiles, all_labels, csv_table, markdown_table, suite_figure
from fedclade.report.estimates import BASELINES, ComparisonRow, Estimate, with_number, write_score, write_with_interval
from fedclade.report.formats import NONE, count, number
from fedclade.report.score import Score
from fedclade.report.tables import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


# Who ranks where over several scenarios: mean ranks, which cannot be told apart, and the picture of
# both.
#
# Friedman's test, and Nemenyi's critical difference (Demšar 2006, "Statistical comparisons of
# classifiers over multiple data sets", sections 3.2.2 and 3.2.4).

FEWEST_SETS, FEWEST_METHODS = 4, 3
"""Below these ranks say nothing."""

LEVEL = 0.05
"""Of mean ranks that are told apart."""

LINE, BAR, INCHES = 0.5, 0.3, 0.55
"""Heights of a method and of a bar in the picture, in units of its axes, and how many inches a unit has."""


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods over sets, a set being one seed of one scenario; 1 is the best.

    Parameters
    ----------
    mean
        By method, the best first.
    sets
        How many there are.
    scenarios
        Of how many scenarios.
    p_value
        Of Friedman's test that all are alike; None if they have the same scores everywhere.
    critical
        By how much mean ranks must differ at least to be told apart, at 5 %.
    """

    mean: Mapping[str, float]
    sets: int
    scenarios: int
    p_value: float | None
    critical: float

    def alike(self) -> list[tuple[str, str]]:
        """Return the longest runs of methods that cannot be told apart, as the first and the last of each."""
        names = list(self.mean)
        last = [max(j for j, b in enumerate(names) if self.mean[b] - self.mean[a] < self.critical) for a in names]
        return [(names[i], names[j]) for i, j in enumerate(last) if j > i and (i == 0 or j > last[i - 1])]

    @property
    def title(self) -> str:
        """Over what they are."""
        return f"Mean ranks over {count(self.scenarios, 'scenario')}, {count(self.sets, 'run')} each"

    @property
    def note(self) -> str:
        """What they tell."""
        p_value = NONE if self.p_value is None else f"{self.p_value:.1g}"
        return (
            f"1 is the best. Friedman's p = {p_value}; ranks that differ by less than {self.critical:.2f} are not told "
            "apart (Nemenyi, 5 %)."
        )

    @property
    def rows(self) -> list[list[str]]:
        """Each method with its mean rank."""
        return [[method, f"{mean:.1f}"] for method, mean in self.mean.items()]

    def table(self) -> Group:
        """Return them for the terminal; what is said of them is wider than the table."""
        table = new_table("")
        table.add_column("config", no_wrap=True)
        table.add_column("mean rank", justify="right")
        for method, mean_rank in self.rows:
            table.add_row(escape(method), mean_rank)
        return Group(Text(self.title, style="bold"), table, self.note)

    def markdown(self) -> str:
        """Return them as Markdown, with a title and a note."""
        return f"**{self.title}**\n\n{markdown_table(['config', 'mean rank'], self.rows)}\n\n{self.note}"


def ranks_of(scores: Mapping[tuple[str, int], Mapping[str, float]]) -> Ranks | None:
    """Return the ranks of methods that have all run in the same sets; None if these are too few.

    Of all choices of methods and sets without a gap, by how many sets a method has run in, that of the most scenarios,
    and of these that of the most methods.

    Parameters
    ----------
    scores
        By scenario and seed: the score of each method, of which more is better.
    """
    ran = {method: sum(method in each for each in scores.values()) for each in scores.values() for method in each}
    ordered = sorted(ran, key=lambda method: (-ran[method], method))
    choices: list[tuple[list[str], list[tuple[str, int]]]] = []
    for k in range(FEWEST_METHODS, len(ordered) + 1):
        whole = [key for key, each in scores.items() if {*ordered[:k]} <= each.keys()]
        if len(whole) >= FEWEST_SETS:
            choices.append((ordered[:k], whole))
    if not choices:
        return None
    from scipy import stats  # imported late, since it takes long

    methods, keys = max(choices, key=lambda choice: (len({scenario for scenario, _ in choice[1]}), len(choice[0])))
    table = np.array([[scores[key][method] for method in methods] for key in keys])
    means = stats.rankdata(-table, axis=1).mean(0).tolist()
    n, k = table.shape
    critical = stats.studentized_range.ppf(1 - LEVEL, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n))
    with np.errstate(invalid="ignore"):
        p_value = float(stats.friedmanchisquare(*table.T).pvalue)
    return Ranks(
        {method: mean for mean, method in sorted(zip(means, methods, strict=True))},
        sets=n,
        scenarios=len({scenario for scenario, _ in keys}),
        p_value=p_value if np.isfinite(p_value) else None,
        critical=float(critical),
    )


def rank_figure(ranks: Ranks) -> Figure:
    """Draw the critical-difference diagram: methods on an axis of ranks, and bars over those not told apart."""
    names, bars = list(ranks.mean), ranks.alike()
    half = (len(names) + 1) // 2
    low, high = 1, len(names)
    top = BAR * (len(bars) + 1)
    bottom, margin = -top - LINE * half, 0.03 * (high - low)
    figure = style.new_figure(9.6, style.HEADER + INCHES * (1.2 - bottom))
    axes = figure.subplots()
    axes.set_xlim(low - 7 * margin, high + 7 * margin)
    axes.set_ylim(bottom, 1.2)
    axes.set_axis_off()
    axes.plot([low, high], [0, 0], color=style.INK, lw=1, gid="axis")
    for tick in range(low, high + 1):
        axes.plot([tick, tick], [0, 0.12], color=style.INK, lw=1)
        axes.text(tick, 0.2, f"{tick}", ha="center", va="bottom", fontsize=9.5, color=style.INK)
    for place, name in enumerate(names):
        left = place < half
        y = -top - LINE * (place if left else len(names) - 1 - place)
        end = low - margin if left else high + margin
        axes.plot([ranks.mean[name], ranks.mean[name], end], [0, y, y], color=style.MUTED, lw=0.8, gid="method")
        text = f"{name}  {ranks.mean[name]:.1f}" if left else f"{ranks.mean[name]:.1f}  {name}"
        axes.text(end, y, f" {text} ", ha="right" if left else "left", va="center", fontsize=9.5, color=style.INK)
    for row, (first, last) in enumerate(bars):
        span = [ranks.mean[first] - margin / 3, ranks.mean[last] + margin / 3]
        axes.plot(span, [-BAR * (row + 1)] * 2, color=style.ACCENT, lw=3, solid_capstyle="round", gid="alike")
    axes.plot([low, low + ranks.critical], [0.9, 0.9], color=style.ACCENT, lw=3, solid_capstyle="round")
    told = f"  critical difference {ranks.critical:.2f}"
    axes.text(low + ranks.critical, 0.9, told, va="center", fontsize=9.5, color=style.INK)
    style.set_title(
        figure, ranks.title, "the best at the left; a bar joins those that are not told apart (Nemenyi, 5 %)"
    )
    return figure


# What others have printed of some scenarios, beside what came out here.


@dataclass(frozen=True, eq=False)
class BesidePrinted:
    """The figures of one source, and ours: means over the scenarios of each of its groups, where all have run.

    Parameters
    ----------
    groups
        What is printed of each group.
    means
        By configuration and scenario: our scores, in the unit of what is printed.
    """

    groups: Sequence[Printed]
    means: Mapping[str, Mapping[str, float]]

    @property
    def title(self) -> str:
        """What is in the table."""
        return f"Printed by {self.groups[0].source}, and ours"

    @property
    def columns(self) -> list[str]:
        """The headings."""
        return ["config", *(f"{each.name}, {whose}" for each in self.groups for whose in ("theirs", "ours"))]

    @cached_property
    def rows(self) -> list[list[str]]:
        """The cells of each configuration of which there is something."""
        labels = dict.fromkeys([*self.means, *(label for each in self.groups for label in each.figures)])
        ours = [self._ours(each) for each in self.groups]
        rows = [
            [
                label,
                *(
                    number(of[label], 1) if label in of else ""
                    for each, mine in zip(self.groups, ours, strict=True)
                    for of in (each.figures, mine)
                ),
            ]
            for label in labels
        ]
        return [row for row in rows if any(row[1:])]

    def table(self) -> Table:
        """Return it for the terminal."""
        table = new_table(self.title, collapse_padding=True)
        for name in self.columns:
            words = name == "config"
            table.add_column(fill(name, 9, break_long_words=False), justify="left" if words else "right", no_wrap=True)
        for label, *cells in self.rows:
            table.add_row(escape(label), *cells)
        return table

    def markdown(self) -> str:
        """Return it as Markdown, with a title."""
        return f"**{self.title}**\n\n{markdown_table(self.columns, self.rows)}"

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return what is printed of each group, with ours."""
        return [{**asdict(each), "ours": self._ours(each)} for each in self.groups]

    def _ours(self, group: Printed) -> dict[str, float]:
        """Return the mean over a group of each configuration that has run in all of it."""
        return {
            label: mean(scores[name] for name in group.scenarios)
            for label, scores in self.means.items()
            if scores.keys() >= {*group.scenarios}
        }


ORACLE = "oracle"
"""It is told the true clusters, and has no rank."""


@dataclass(frozen=True, eq=False)
class SuiteComparison(ComparisonFiles):
    """Algorithms by scenarios: the comparison of each scenario, one below the other.

    Parameters
    ----------
    scenarios
        By the scenario's name.
    printed
        What others have printed of some of them, for a table of theirs and ours.

    Raises
    ------
    ConfigError
        If there is none.
    """

    scenarios: Mapping[str, Comparison]
    printed: Sequence[Printed] = ()

    def __post_init__(self) -> None:
        if not self.scenarios:
            raise ConfigError("a suite should have at least 1 scenario, got 0")

    def table(self, width: int | None = None) -> Group:
        """Return the table of every scenario for the terminal, the overview, mean ranks, and printed figures.

        See :meth:`Comparison.table`.
        """
        last: list[RenderableType] = [] if self.ranks is None else [self.ranks.table()]
        last += [each.table() for each in self._beside_printed]
        return Group(*(each.table(width) for each in self.scenarios.values()), *self.overview(width), *last)

    def overview(self, width: int | None = None) -> list[Table]:
        """Return algorithms by scenarios for the terminal: mean scores, and ARI where it is known.

        In as many tables, one below the other, as it takes for each to fit into ``width`` columns; by default in one.
        """
        headings = [fill(name, 9, break_long_words=False) for name in self._headings]
        cells = self._cells(write_score)
        wide = [
            max(map(len, [*heading.split("\n"), *(row[place] for row in cells.values())]))
            for place, heading in enumerate(headings)
        ]
        label, blocks = max(map(len, ["config", *cells])), list[list[int]]()
        for place in range(len(headings)):
            together = sum(2 + wide[other] for other in [*(blocks[-1] if blocks else ()), place])
            if not blocks or (width is not None and 2 + label + together > width):
                blocks.append([])
            blocks[-1].append(place)
        return [self._block(self.title if block is blocks[0] else "", headings, cells, block) for block in blocks]

    def _block(
        self, title: str, headings: Sequence[str], cells: Mapping[str, Sequence[str]], places: Sequence[int]
    ) -> Table:
        """Return the overview of some of the scenarios."""
        table = new_table(title, collapse_padding=True)
        table.add_column("config", no_wrap=True)
        for place in places:
            table.add_column(headings[place], justify="right", no_wrap=True)
        for label, rows in self._by_label.items():
            if any(cells[label][place] for place in places):
                dim = next(row for row in rows if row is not None).algorithm in BASELINES
                table.add_row(escape(label), *(cells[label][place] for place in places), style="dim" if dim else None)
        return table

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """The overview for people: the cells of each column, by its name."""
        cells = self._cells(write_with_interval)
        columns = zip(*cells.values(), strict=True)
        return {"config": [*cells], **dict(zip(self._headings, map(list, columns), strict=True))}

    def frame(self) -> DataFrame:
        """Return the numbers of :meth:`csv` as a pandas data frame; see :meth:`Comparison.frame`."""
        each = [comparison.frame().assign(scenario=name) for name, comparison in self.scenarios.items()]
        pandas = import_extra("pandas", "pandas", "notebook", "SuiteComparison.frame")
        found = pandas.concat(each, ignore_index=True)
        return found[["scenario", *found.columns.drop("scenario")]]

    def __repr__(self) -> str:
        return f"SuiteComparison({', '.join(self.scenarios)})"

    def markdown(self) -> str:
        """Return the overview and the table of every scenario as Markdown."""
        cells = self._cells(write_with_interval)
        overview = markdown_table(["config", *self._headings], [[label, *row] for label, row in cells.items()])
        tables = "\n".join(comparison.markdown() for comparison in self.scenarios.values())
        ranks = "" if self.ranks is None else f"{self.ranks.markdown()}\n\n"
        printed = "".join(f"{each.markdown()}\n\n" for each in self._beside_printed)
        return f"**{self.title}**\n\n{overview}\n\n{ranks}{printed}{tables}"

    def csv(self) -> str:
        """Return one CSV table whose first column is the scenario; see :meth:`Comparison.csv` for the others."""
        tables = {name: csv.DictReader(io.StringIO(each.csv())) for name, each in self.scenarios.items()}
        return csv_table([{"scenario": name, **row} for name, rows in tables.items() for row in rows])

    def json(self) -> str:
        """Return the comparisons as JSON, by scenario, mean ranks, and printed figures; see :meth:`Comparison.json`."""
        scenarios = {name: json.loads(comparison.json()) for name, comparison in self.scenarios.items()}
        ranks = {} if self.ranks is None else {"ranks": asdict(self.ranks)}
        groups = [each for source in self._beside_printed for each in source.as_dicts()]
        printed = {"printed": groups} if groups else {}
        return json.dumps({"scenarios": scenarios, **ranks, **printed}, indent=2) + "\n"

    def figure(self) -> Figure:
        """Draw a panel for each scenario; see `suite_figure`."""
        return suite_figure({name: (self._score_of[name], each.rows) for name, each in self.scenarios.items()})

    def figures(self) -> dict[str, Figure]:
        """Draw the panels, and the diagram of mean ranks as ``ranks``, if there are any."""
        ranks = {} if self.ranks is None else {"ranks": rank_figure(self.ranks)}
        return {**super().figures(), **ranks}

    @cached_property
    def ranks(self) -> Ranks | None:
        """Mean ranks of all configurations that need not know the truth; None if too few have run in too few scenarios.

        A rank is of one seed of one scenario, by the metric that the overview shows.
        """
        scores: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for name, comparison in self.scenarios.items():
            score = self._score_of[name]
            for label, runs in comparison.runs.items():
                for summary in (run.summary for run in runs):
                    mean = score.mean(summary) if score.is_of(summary) else None
                    if summary["algorithm"] != ORACLE and mean is not None and isfinite(mean):
                        scores[name, summary["seed"]][label] = score.sign * mean
        return ranks_of(scores)

    @cached_property
    def _beside_printed(self) -> list[BesidePrinted]:
        """What is printed, and ours, by where it stands."""
        means: dict[str, dict[str, float]] = defaultdict(dict)
        for name, comparison in self.scenarios.items():
            score = self._score_of[name]
            for row in comparison.rows:
                if (estimate := row.scores[score.name]) is not None:
                    means[row.label][name] = estimate.mean * (100 if score.share else 1)
        sources = dict.fromkeys(each.source for each in self.printed)
        return [BesidePrinted([p for p in self.printed if p.source == source], means) for source in sources]

    @cached_property
    def _score_of(self) -> dict[str, Score]:
        """The metric of each scenario: the first that all have, or else the one that counts in it."""
        first, *others = self.scenarios.values()
        shared = [score for score in first.scores if all(score in each.scores for each in others)]
        return {name: (shared or each.scores)[0] for name, each in self.scenarios.items()}

    @property
    def title(self) -> str:
        """What the overview shows."""
        score, *others = dict.fromkeys(self._score_of.values())
        what = "Scores" if others else f"{score.title} in percent" if score.share else score.title
        return f"{what}, mean of the clients and seeds; ARI where the true clusters are known"

    @property
    def _headings(self) -> list[str]:
        """The scenarios, with their metrics if they have not the same."""
        scores = self._score_of
        if len(set(scores.values())) == 1:
            return list(scores)
        return [f"{name}: {score.heading}" for name, score in scores.items()]

    @cached_property
    def _by_label(self) -> dict[str, list[ComparisonRow | None]]:
        """For each configuration its row in every scenario; None where it has none."""
        rows = [{row.label: row for row in comparison.rows} for comparison in self.scenarios.values()]
        labels = all_labels(comparison.rows for comparison in self.scenarios.values())
        return {label: [each.get(label) for each in rows] for label in labels}

    def _cells(self, written: Callable[[Score, Estimate | None], str]) -> dict[str, list[str]]:
        """Return for each configuration its score in every scenario and, where it is known, its ARI."""

        def cell(score: Score, row: ComparisonRow | None) -> str:
            if row is None:
                return ""
            return with_number(row, score, written) + ("" if row.ari is None else f"  {number(row.ari.mean)}")

        scores = list(self._score_of.values())
        return {label: [*map(cell, scores, rows)] for label, rows in self._by_label.items()}
