"""Several scenarios, each with a comparison of its own, in one report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group

from fedclade.errors import ConfigError
from fedclade.report.comparison import Comparison, save_comparison
from fedclade.report.suite_figure import suite_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        """Return the table of every scenario for the terminal; see :meth:`Comparison.table`."""
        return Group(*(comparison.table(width) for comparison in self.scenarios.values()))

    def markdown(self) -> str:
        """Return the Markdown table of every scenario."""
        return "\n".join(comparison.markdown() for comparison in self.scenarios.values())

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

    def save(self, folder: str | Path, *, figure: bool = True) -> Path:
        """Write ``comparison.md``, ``.csv``, ``.json`` and the figure ``.png``; see :meth:`Comparison.save`."""
        texts = {"md": self.markdown(), "csv": self.csv(), "json": self.json()}
        return save_comparison(Path(folder), texts, self.figure() if figure else None)
