"""Comparisons as files: Markdown, CSV, JSON and figures."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedclade.core import Displayed, RunError, checked, write_text
from fedclade.report import style
from fedclade.report.estimates import (
    BASELINES,
    ComparisonRow,
    Estimate,
    write_score,
    write_with_interval,
)
from fedclade.report.formats import count
from fedclade.report.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLUMNS = 4
"""Number of panels in a row."""


def comparison_figure(score: Score, rows: Sequence[ComparisonRow], title: str, data: str) -> Figure:
    """Draw the mean of every configuration with its interval, and every run as a small dot."""
    figure = style.new_figure(8.6, style.HEADER + 0.9 + 0.42 * len(rows))
    axes = figure.subplots()
    _prepare_axes(axes, [row.label for row in rows])
    for place, row in enumerate(rows):
        estimate = row.scores[score.name]
        if estimate is None:
            continue
        below = [place + 0.22] * len(estimate.values)
        dots: dict[str, Any] = {"ms": 4.5, "alpha": 0.4, "mew": 0, "gid": "runs"}
        axes.plot(estimate.values, below, "o", color=_choose_colour(row), **dots)
        look: dict[str, Any] = {"fmt": "o", "ms": 8, "capsize": 4, "elinewidth": 1.8}
        axes.errorbar(estimate.mean, place, **look, **_interval(row, score, estimate))
        text = write_with_interval(score, estimate)
        note: dict[str, Any] = {"y": "data", "va": "center", "color": style.INK, "gid": "value"}
        style.note(axes, text, (1, place), shift=(8, 0), **note)
    if score.share:
        style.percent_scale(axes, "x")
    label = f"test {_name_with_direction(score)}, mean of the clients; 95 % interval over seeds"
    style.label(axes, x=label)
    style.set_title(figure, title, data)
    return figure


def suite_figure(scenarios: Mapping[str, tuple[Score, Sequence[ComparisonRow]]]) -> Figure:
    """Draw the mean score of every algorithm with its interval, in a panel for each scenario.

    An algorithm is on the same line in all panels. They share a scale if they share a metric.
    """
    scores = list(dict.fromkeys(score for score, _ in scenarios.values()))
    labels = all_labels(rows for _, rows in scenarios.values())
    n_columns = min(COLUMNS, len(scenarios))
    n_rows = -(-len(scenarios) // n_columns)
    width = 1.6 + 2.6 * max(n_columns, 2)
    height = style.HEADER + n_rows * (0.75 + 0.23 * len(labels))
    figure = style.new_figure(width, height)
    share_x = len(scores) == 1
    grid = figure.subplots(n_rows, n_columns, sharex=share_x, sharey=True, squeeze=False)
    for axes, (name, (score, rows)) in zip(grid.flat, scenarios.items(), strict=False):
        _prepare_axes(axes, labels)
        axes.set_title(name, fontsize=10.5, color=style.INK, loc="left")
        for row in rows:
            _draw_row(axes, row, score, labels.index(row.label))
        if score.share:
            style.percent_scale(axes, "x")
        if len(scores) > 1:
            style.label(axes, x=_name_with_direction(score))
    for axes in grid.flat[len(scenarios) :]:
        axes.set_axis_off()
    for column in range(n_columns):
        # The lowest panel of a column has tick labels; it need not be in the last row.
        lowest = grid[(len(scenarios) - 1 - column) // n_columns, column]
        lowest.tick_params(labelbottom=True)
    metric = _name_with_direction(scores[0]) if len(scores) == 1 else "scores"
    title = f"{count(len(labels), 'algorithm')} in {count(len(scenarios), 'scenario')}"
    explanation = "mean of the clients; 95 % interval over seeds; grey: baselines"
    style.set_title(figure, title, f"test {metric}, {explanation}")
    return figure


def _draw_row(axes: Axes, row: ComparisonRow, score: Score, place: int) -> None:
    """Draw the mean of a configuration with its interval, and its value at the right."""
    estimate = row.scores[score.name]
    if estimate is None:
        return
    look: dict[str, Any] = {"fmt": "o", "ms": 5, "capsize": 3, "elinewidth": 1.4}
    axes.errorbar(estimate.mean, place, **look, **_interval(row, score, estimate))
    text = write_score(score, estimate)
    note: dict[str, Any] = {"y": "data", "va": "center", "fontsize": 8, "color": style.INK}
    style.note(axes, text, (1, place), shift=(3, 0), **note)


def all_labels(scenarios: Iterable[Sequence[ComparisonRow]]) -> list[str]:
    """Return the labels of all scenarios, ordered as in the one with the most.

    Scenarios without an oracle have the same order, with a gap.
    """
    longest_first = sorted(scenarios, key=len, reverse=True)
    return list(dict.fromkeys(row.label for rows in longest_first for row in rows))


def _prepare_axes(axes: Axes, labels: Sequence[str]) -> None:
    """Set up a line for each label, from top to bottom."""
    style.plain(axes)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _name_with_direction(score: Score) -> str:
    return score.label if score.sign > 0 else f"{score.label} (lower is better)"


def _choose_colour(row: ComparisonRow) -> str:
    return style.MUTED if row.algorithm in BASELINES else style.ACCENT


def _interval(row: ComparisonRow, score: Score, estimate: Estimate) -> dict[str, Any]:
    """Return the interval for ``errorbar``, for shares only as far as it lies between 0 and 1."""
    width = estimate.half_width
    mean = estimate.mean
    colour = _choose_colour(row)
    if width is None or not score.share:
        return {"xerr": width, "color": colour}
    return {"xerr": [[min(width, mean)], [min(width, 1 - mean)]], "color": colour}


class ComparisonFiles(Displayed, ABC):
    """Base of comparisons: their output as text and figures."""

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
        """Draw all figures, by the names of their files."""
        return {"comparison": self.figure()}

    @checked()
    def save(self, folder: str | Path, *, figure: bool = True) -> Path:
        """Write ``comparison.md``, ``.csv`` and ``.json``, and all figures as ``.png``.

        Parameters
        ----------
        folder
            Output folder; it is created if necessary.
        figure
            Whether to draw figures.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        RunError
            If the folder cannot be written.
        """
        target = Path(folder)
        figures = self.figures() if figure else {}
        texts = {"md": self.markdown(), "csv": self.csv(), "json": self.json()}
        try:
            target.mkdir(parents=True, exist_ok=True)
            for suffix, text in texts.items():
                write_text(target / f"comparison.{suffix}", text)
            for name, drawn in figures.items():
                style.save(drawn, target / f"{name}.png")
        except OSError as error:
            raise RunError(f"cannot write the comparison to {target}: {error}") from error
        return target


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[str] = ("config",)
) -> str:
    """Return a table as Markdown.

    Parameters
    ----------
    columns
        Headings.
    rows
        Cells of each row.
    words
        Headings of the columns that are aligned at the left; others are aligned at the right.
    """
    left_aligned = set(words)
    rule = [":--" if name in left_aligned else "--:" for name in columns]
    lines = [list(columns), rule]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV; a column that a row lacks is empty there."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
