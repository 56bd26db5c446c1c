"""Output of comparisons to files: Markdown, CSV, JSON and figures."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import RenderableType

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
from fedclade.report.terminal import Terminal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLUMNS = 4
"""Largest number of panels in a row of a figure of several scenarios."""


def comparison_figure(score: Score, rows: Sequence[ComparisonRow], title: str, data: str) -> Figure:
    """Draw each configuration's mean score with its interval, and every run as a small dot.

    Parameters
    ----------
    score
        Metric that is drawn.
    rows
        Results of each configuration, drawn from top to bottom.
    title, data
        Title of the figure, and description of the data as subtitle.
    """
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
        axes.errorbar(estimate.mean, place, **look, **_interval_entries(row, score, estimate))
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
    """Draw the mean score of every algorithm with its interval, in one panel per scenario.

    An algorithm is on the same line in all panels. The panels have the same scale if all scenarios
    use the same metric.

    Parameters
    ----------
    scenarios
        Metric and rows of results of each scenario, by the scenario's name.
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
    if len(scores) == 1:
        metric = _name_with_direction(scores[0])
    else:
        metric = "scores"
    title = f"{count(len(labels), 'algorithm')} in {count(len(scenarios), 'scenario')}"
    explanation = "mean of the clients; 95 % interval over seeds; grey: baselines"
    style.set_title(figure, title, f"test {metric}, {explanation}")
    return figure


def _draw_row(axes: Axes, row: ComparisonRow, score: Score, place: int) -> None:
    """Draw a configuration's mean score with its interval, and its value at the right."""
    estimate = row.scores[score.name]
    if estimate is None:
        return
    look: dict[str, Any] = {"fmt": "o", "ms": 5, "capsize": 3, "elinewidth": 1.4}
    axes.errorbar(estimate.mean, place, **look, **_interval_entries(row, score, estimate))
    text = write_score(score, estimate)
    note: dict[str, Any] = {"y": "data", "va": "center", "fontsize": 8, "color": style.INK}
    style.note(axes, text, (1, place), shift=(3, 0), **note)


def all_labels(scenarios: Iterable[Sequence[ComparisonRow]]) -> list[str]:
    """Return the labels of the rows of all scenarios, without repetitions.

    The labels are in the order of the scenario with the most rows, so that a scenario without some
    of the configurations, such as the oracle, does not change the order.
    """
    longest_first = sorted(scenarios, key=len, reverse=True)
    return list(dict.fromkeys(row.label for rows in longest_first for row in rows))


def _prepare_axes(axes: Axes, labels: Sequence[str]) -> None:
    """Set up a panel with one line for each label, from top to bottom."""
    style.plain(axes)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _name_with_direction(score: Score) -> str:
    """Return the name of a metric, followed by "(lower is better)" if lower scores are better."""
    if score.sign > 0:
        return score.label
    return f"{score.label} (lower is better)"


def _choose_colour(row: ComparisonRow) -> str:
    """Return grey for baselines such as FedAvg and the accent colour for all other algorithms."""
    return style.MUTED if row.algorithm in BASELINES else style.ACCENT


def _interval_entries(row: ComparisonRow, score: Score, estimate: Estimate) -> dict[str, Any]:
    """Return the keyword arguments of ``Axes.errorbar`` for an interval and its colour.

    The interval of a share is cut off at 0 and 1.
    """
    width = estimate.half_width
    mean = estimate.mean
    colour = _choose_colour(row)
    if width is None or not score.share:
        return {"xerr": width, "color": colour}
    return {"xerr": [[min(width, mean)], [min(width, 1 - mean)]], "color": colour}


class ComparisonFiles(Displayed, ABC):
    """Base class of comparisons: output as Markdown, CSV, JSON and figures."""

    @abstractmethod
    def table(self, width: int | None = None) -> RenderableType:
        """Return the tables of the comparison for a terminal of ``width`` characters."""

    def __str__(self) -> str:
        """Return the tables as text, as wide as the terminal: ``print(comparison)`` shows them."""
        console = Terminal(file=io.StringIO(), color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(self.table(console.width))
        lines = [line.rstrip() for line in captured.get().strip("\n").splitlines()]
        return "\n".join(lines)

    @abstractmethod
    def markdown(self) -> str:
        """Return the tables of the comparison as Markdown, each with a title."""

    @abstractmethod
    def csv(self) -> str:
        """Return the numbers of the comparison as one CSV table."""

    @abstractmethod
    def json(self) -> str:
        """Return all numbers of the comparison as JSON."""

    @abstractmethod
    def figure(self) -> Figure:
        """Draw the mean scores of the comparison with their intervals."""

    def figures(self) -> dict[str, Figure]:
        """Draw all figures of the comparison, by file name without ending."""
        return {"comparison": self.figure()}

    @checked()
    def save_figures(self, folder: str | Path, form: Literal["png", "pdf"] = "pdf") -> list[Path]:
        """Draw the figures of the comparison to files, by default as PDF for papers.

        Parameters
        ----------
        folder
            Output folder; it is created if necessary.
        form
            Format of the files: ``png``, or ``pdf`` with embedded fonts.

        Returns
        -------
        list of Path
            The written files.

        Raises
        ------
        ConfigError
            If the runs have no metric in common.
        MissingExtraError
            If matplotlib is not installed.
        """
        figures = self.figures()
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        return [style.save(drawn, target / f"{name}.{form}") for name, drawn in figures.items()]

    @checked()
    def save(self, folder: str | Path, *, figure: bool = True) -> Path:
        """Write the tables to ``comparison.md``, ``.csv`` and ``.json``, and figures as ``.png``.

        Parameters
        ----------
        folder
            Output folder; it is created if necessary.
        figure
            Whether to draw figures.

        Returns
        -------
        Path
            The output folder.

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
        Headings of the columns.
    rows
        Cells of each row.
    words
        Headings of the columns that are aligned at the left; all other columns are aligned at
        the right.
    """
    left_aligned = set(words)
    rule = [":--" if name in left_aligned else "--:" for name in columns]
    lines = [list(columns), rule]
    lines += [_escape_bars(row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape_bars(row: Sequence[str]) -> list[str]:
    """Escape the vertical bars in the cells of a row, which would end a cell in Markdown."""
    return [cell.replace("|", "\\|") for cell in row]


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a CSV table; the cell of a column that a row does not have is empty."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
