"""Several scenarios, each with a comparison of its own, in one report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from fedclade.core import ConfigError
from fedclade.report.comparison import Comparison, save_comparison
from fedclade.report.estimates import BASELINES, ComparisonRow, write_mean, write_with_interval
from fedclade.report.formats import number
from fedclade.report.suite_figure import all_labels, suite_figure
from fedclade.report.terminal import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERVIEW = "Accuracy in percent, mean of the clients and seeds; ARI where the true clusters are known"


@dataclass(frozen=True, eq=False)
class SuiteComparison:
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
        for label, rows in self._by_label().items():
            dim = next(row for row in rows if row is not None).algorithm in BASELINES
            cells = ["" if row is None else _accuracy_and_ari(row, write_mean(row.accuracy, 1, 100)) for row in rows]
            table.add_row(escape(label), *cells, style="dim" if dim else None)
        return table

    def markdown(self) -> str:
        """Return the overview and the table of every scenario as Markdown."""
        lines = [["config", *self.scenarios], [":--", *["--:"] * len(self.scenarios)]]
        for label, rows in self._by_label().items():
            cells = ["" if r is None else _accuracy_and_ari(r, write_with_interval(r.accuracy, 100)) for r in rows]
            lines.append([label.replace("|", "\\|"), *cells])
        overview = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        each = "\n".join(comparison.markdown() for comparison in self.scenarios.values())
        return f"**{OVERVIEW}**\n\n{overview}\n\n{each}"

    def csv(self) -> str:
        """Return one CSV table whose first column is the scenario; see :meth:`Comparison.csv` for the others."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for place, (name, comparison) in enumerate(self.scenarios.items()):
            header, *lines = csv.reader(io.StringIO(comparison.csv()))
            writer.writerows([["scenario", *header]] if place == 0 else [])
            writer.writerows([name, *line] for line in lines)
        return text.getvalue()

    def json(self) -> str:
        """Return the comparisons as JSON, by scenario; see :meth:`Comparison.json`."""
        scenarios = {name: json.loads(comparison.json()) for name, comparison in self.scenarios.items()}
        return json.dumps({"scenarios": scenarios}, indent=2) + "\n"

    def figure(self) -> Figure:
        """Draw a panel for each scenario; see :func:`suite_figure`."""
        return suite_figure({name: comparison.rows for name, comparison in self.scenarios.items()})

    def _by_label(self) -> dict[str, list[ComparisonRow | None]]:
        """Return for each configuration its row in every scenario; None where it has none."""
        rows = [{row.label: row for row in comparison.rows} for comparison in self.scenarios.values()]
        labels = all_labels(comparison.rows for comparison in self.scenarios.values())
        return {label: [each.get(label) for each in rows] for label in labels}

    def save(self, folder: str | Path, *, figure: bool = True) -> Path:
        """Write ``comparison.md``, ``.csv``, ``.json`` and the figure ``.png``; see :meth:`Comparison.save`."""
        texts = {"md": self.markdown(), "csv": self.csv(), "json": self.json()}
        return save_comparison(Path(folder), texts, self.figure() if figure else None)


def _accuracy_and_ari(row: ComparisonRow, accuracy: str) -> str:
    return accuracy if row.ari is None else f"{accuracy}  {number(row.ari.mean)}"
