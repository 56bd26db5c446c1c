"""Comparisons as files: Markdown, CSV, JSON and a figure."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedclade.core import Displayed, RunError, checked, write_text
from fedclade.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ComparisonFiles(Displayed, ABC):
    """What can be written as text and drawn."""

    @abstractmethod
    def markdown(self) -> str:
        """Return the tables as Markdown, each with a title."""

    @abstractmethod
    def csv(self) -> str:
        """Return one table as CSV."""

    @abstractmethod
    def json(self) -> str:
        """Return everything as JSON."""

    @abstractmethod
    def figure(self) -> Figure:
        """Draw the means with their intervals."""

    def figures(self) -> dict[str, Figure]:
        """Draw everything, by the names of files."""
        return {"comparison": self.figure()}

    @checked()
    def save(self, folder: str | Path, *, figure: bool = True) -> Path:
        """Write ``comparison.md``, ``.csv``, ``.json`` and all figures as ``.png`` into a folder, made if need be.

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        RunError
            If the folder cannot be written.
        """
        target, drawn = Path(folder), self.figures() if figure else {}
        try:
            target.mkdir(parents=True, exist_ok=True)
            for suffix, text in {"md": self.markdown(), "csv": self.csv(), "json": self.json()}.items():
                write_text(target / f"comparison.{suffix}", text)
            for name, each in drawn.items():
                style.save(each, target / f"{name}.png")
        except OSError as error:
            raise RunError(f"cannot write the comparison to {target}: {error}") from error
        return target


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[str] = ("config",)) -> str:
    """Return a table as Markdown; columns of words stand at the left, those of numbers at the right."""
    rule = [":--" if name in words else "--:" for name in columns]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *cells])


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows by column as CSV; a column that a row lacks is empty there."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
