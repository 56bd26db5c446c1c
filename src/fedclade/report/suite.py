"""Several scenarios, each with a comparison of its own, in one report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from textwrap import fill
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from fedclade.core import ConfigError
from fedclade.report.comparison import Comparison
from fedclade.report.comparison_figures import all_labels, suite_figure
from fedclade.report.comparison_files import ComparisonFiles, csv_table, markdown_table
from fedclade.report.estimates import BASELINES, ComparisonRow, Estimate, write_mean, write_with_interval
from fedclade.report.formats import number
from fedclade.report.terminal import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERVIEW = "Accuracy in percent, mean of the clients and seeds; ARI where the true clusters are known"


@dataclass(frozen=True, eq=False)
class SuiteComparison(ComparisonFiles):
    """Algorithms by scenarios: the comparison of each scenario, one below the other.

    Parameters
    ----------
    scenarios
        By the scenario's name.

    Raises
    ------
    ConfigError
        If there is none.
    """

    scenarios: Mapping[str, Comparison]

    def __post_init__(self) -> None:
        if not self.scenarios:
            raise ConfigError("a suite should have at least 1 scenario, got 0")

    def table(self, width: int | None = None) -> Group:
        """Return the table of every scenario for the terminal, and the overview last; see :meth:`Comparison.table`."""
        return Group(*(comparison.table(width) for comparison in self.scenarios.values()), self.overview())

    def overview(self) -> Table:
        """Return algorithms by scenarios for the terminal: mean accuracy in percent, and ARI where it is known."""
        table = new_table(OVERVIEW, collapse_padding=True)
        table.add_column("config", no_wrap=True)
        for name in self.scenarios:
            table.add_column(fill(name, 9, break_long_words=False), justify="right", no_wrap=True)
        cells = self._cells(lambda accuracy: write_mean(accuracy, 1, 100))
        for label, rows in self._by_label.items():
            dim = next(row for row in rows if row is not None).algorithm in BASELINES
            table.add_row(escape(label), *cells[label], style="dim" if dim else None)
        return table

    def markdown(self) -> str:
        """Return the overview and the table of every scenario as Markdown."""
        cells = self._cells(lambda accuracy: write_with_interval(accuracy, 100))
        overview = markdown_table(["config", *self.scenarios], [[label, *row] for label, row in cells.items()])
        each = "\n".join(comparison.markdown() for comparison in self.scenarios.values())
        return f"**{OVERVIEW}**\n\n{overview}\n\n{each}"

    def csv(self) -> str:
        """Return one CSV table whose first column is the scenario; see :meth:`Comparison.csv` for the others."""
        tables = {name: list(csv.reader(io.StringIO(each.csv()))) for name, each in self.scenarios.items()}
        header = ["scenario", *next(iter(tables.values()))[0]]
        return csv_table([header, *([name, *line] for name, lines in tables.items() for line in lines[1:])])

    def json(self) -> str:
        """Return the comparisons as JSON, by scenario; see :meth:`Comparison.json`."""
        scenarios = {name: json.loads(comparison.json()) for name, comparison in self.scenarios.items()}
        return json.dumps({"scenarios": scenarios}, indent=2) + "\n"

    def figure(self) -> Figure:
        """Draw a panel for each scenario; see `suite_figure`."""
        return suite_figure({name: comparison.rows for name, comparison in self.scenarios.items()})

    @cached_property
    def _by_label(self) -> dict[str, list[ComparisonRow | None]]:
        """For each configuration its row in every scenario; None where it has none."""
        rows = [{row.label: row for row in comparison.rows} for comparison in self.scenarios.values()]
        labels = all_labels(comparison.rows for comparison in self.scenarios.values())
        return {label: [each.get(label) for each in rows] for label in labels}

    def _cells(self, written: Callable[[Estimate | None], str]) -> dict[str, list[str]]:
        """Return for each configuration its accuracy in every scenario and, where it is known, its ARI."""

        def cell(row: ComparisonRow | None) -> str:
            if row is None:
                return ""
            return written(row.accuracy) + ("" if row.ari is None else f"  {number(row.ari.mean)}")

        return {label: [cell(row) for row in rows] for label, rows in self._by_label.items()}
