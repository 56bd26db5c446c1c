"""What others have printed of some scenarios, beside what came out here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import mean
from textwrap import fill
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedclade.config import Printed
from fedclade.report.comparison_files import markdown_table
from fedclade.report.formats import number
from fedclade.report.terminal import new_table


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
