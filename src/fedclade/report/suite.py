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
from textwrap import fill
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from fedclade.config import Printed
from fedclade.core import ConfigError, import_extra
from fedclade.report.comparison import Comparison
from fedclade.report.comparison_figures import all_labels, suite_figure
from fedclade.report.comparison_files import ComparisonFiles, csv_table, markdown_table
from fedclade.report.estimates import BASELINES, ComparisonRow, Estimate, with_number, write_score, write_with_interval
from fedclade.report.formats import number
from fedclade.report.printed import BesidePrinted
from fedclade.report.ranks import Ranks, rank_figure, ranks_of
from fedclade.report.score import Score
from fedclade.report.terminal import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

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
