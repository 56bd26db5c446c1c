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
from fedclade.report.estimates import BASELINES, ComparisonRow, Estimate, write_score, write_with_interval
from fedclade.report.formats import count
from fedclade.report.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Comparisons as pictures: a dot for every configuration with its interval, in a panel for each
# scenario.

COLUMNS = 4
"""Panels beside each other."""


def comparison_figure(score: Score, rows: Sequence[ComparisonRow], title: str, data: str) -> Figure:
    """Draw the mean score of every configuration with its interval, and every run as a small dot."""
    figure = style.new_figure(8.6, style.HEADER + 0.9 + 0.42 * len(rows))
    axes = figure.subplots()
    _set_up(axes, [row.label for row in rows])
    for place, row in enumerate(rows):
        estimate = row.scores[score.name]
        if estimate is not None:
            below = [place + 0.22] * len(estimate.values)
            axes.plot(estimate.values, below, "o", ms=4.5, color=_colour(row), alpha=0.4, mew=0, gid="runs")
            axes.errorbar(
                estimate.mean, place, fmt="o", ms=8, capsize=4, elinewidth=1.8, **_interval(row, score, estimate)
            )
            text = write_with_interval(score, estimate)
            style.note(axes, text, (1, place), y="data", shift=(8, 0), va="center", color=style.INK, gid="value")
    if score.share:
        style.percent_scale(axes, "x")
    style.label(axes, x=f"test {_named(score)}, mean of the clients; 95 % interval over seeds")
    style.set_title(figure, title, data)
    return figure


def suite_figure(scenarios: Mapping[str, tuple[Score, Sequence[ComparisonRow]]]) -> Figure:
    """Draw the mean score of every algorithm with its interval, in a panel for each scenario.

    An algorithm is on the same line in all panels. They have one scale if the scores are by one metric.
    """
    scores = list(dict.fromkeys(score for score, _ in scenarios.values()))
    labels = all_labels(rows for _, rows in scenarios.values())
    columns = min(COLUMNS, len(scenarios))
    lines = -(-len(scenarios) // columns)
    height = style.HEADER + lines * (0.75 + 0.23 * len(labels))
    figure = style.new_figure(1.6 + 2.6 * max(columns, 2), height)
    grid = figure.subplots(lines, columns, sharex=len(scores) == 1, sharey=True, squeeze=False)
    for axes, (name, (score, rows)) in zip(grid.flat, scenarios.items(), strict=False):
        _set_up(axes, labels)
        axes.set_title(name, fontsize=10.5, color=style.INK, loc="left")
        for row in rows:
            if (estimate := row.scores[score.name]) is None:
                continue
            place, interval = labels.index(row.label), _interval(row, score, estimate)
            axes.errorbar(estimate.mean, place, fmt="o", ms=5, capsize=3, elinewidth=1.4, **interval)
            text = write_score(score, estimate)
            style.note(axes, text, (1, place), y="data", shift=(3, 0), va="center", fontsize=8, color=style.INK)
        if score.share:
            style.percent_scale(axes, "x")
        if len(scores) > 1:
            style.label(axes, x=_named(score))
    for axes in grid.flat[len(scenarios) :]:
        axes.set_axis_off()
    for column in range(columns):  # the lowest panel of each column, which need not be in the last line
        lowest = grid[(len(scenarios) - 1 - column) // columns, column]
        lowest.tick_params(labelbottom=True)
    what = _named(scores[0]) if len(scores) == 1 else "scores"
    title = f"{count(len(labels), 'algorithm')} in {count(len(scenarios), 'scenario')}"
    style.set_title(figure, title, f"test {what}, mean of the clients; 95 % interval over seeds; grey: baselines")
    return figure


def all_labels(scenarios: Iterable[Sequence[ComparisonRow]]) -> list[str]:
    """Return every label that a scenario has, in the order of the longest: others leave the oracle out, amid them."""
    longest_first = sorted(scenarios, key=len, reverse=True)
    return list(dict.fromkeys(row.label for rows in longest_first for row in rows))


def _set_up(axes: Axes, labels: Sequence[str]) -> None:
    """Make room for a line for each label, from top to bottom."""
    style.plain(axes)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)


def _named(score: Score) -> str:
    return score.label if score.sign > 0 else f"{score.label} (lower is better)"


def _colour(row: ComparisonRow) -> str:
    return style.MUTED if row.algorithm in BASELINES else style.ACCENT


def _interval(row: ComparisonRow, score: Score, estimate: Estimate) -> dict[str, Any]:
    """Return how an interval is drawn: as far as there are scores, which end at 0 and 1 if they are shares."""
    width, mean = estimate.half_width, estimate.mean
    if width is None or not score.share:
        return {"xerr": width, "color": _colour(row)}
    return {"xerr": [[min(width, mean)], [min(width, 1 - mean)]], "color": _colour(row)}


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
