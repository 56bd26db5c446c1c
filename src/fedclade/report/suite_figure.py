"""The picture of a suite: a panel for every scenario, a line for every algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fedclade.report import style
from fedclade.report.estimates import BASELINES, ComparisonRow, write_mean
from fedclade.report.formats import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
"""Panels beside each other."""


def suite_figure(scenarios: Mapping[str, Sequence[ComparisonRow]]) -> Figure:
    """Draw the mean accuracy of every algorithm with its interval, in a panel for each scenario.

    Scenarios of language models, too, are drawn by accuracy, so that all panels have one scale.

    Parameters
    ----------
    scenarios
        By the scenario's name: its rows. An algorithm is on the same line in all panels.
    """
    labels = all_labels(scenarios.values())
    columns = min(COLUMNS, len(scenarios))
    lines = -(-len(scenarios) // columns)
    height = style.HEADER + lines * (0.75 + 0.23 * len(labels))
    figure = style.new_figure(1.6 + 2.6 * max(columns, 2), height)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, rows) in zip(grid.flat, scenarios.items(), strict=False):
        _draw(axes, name, rows, labels)
    for axes in grid.flat[len(scenarios) :]:
        axes.set_axis_off()
    for column in range(columns):  # the lowest panel of each column, which need not be in the last line
        lowest = grid[(len(scenarios) - 1 - column) // columns, column]
        lowest.tick_params(labelbottom=True)
    grid[0, 0].set_yticks(range(len(labels)), labels)
    grid[0, 0].set_ylim(len(labels) - 0.5, -0.5)
    style.percent_scale(grid[0, 0], "x")
    title = f"{count(len(labels), 'algorithm')} in {count(len(scenarios), 'scenario')}"
    style.set_title(figure, title, "test accuracy, mean of the clients; 95 % interval over seeds; grey: baselines")
    return figure


def all_labels(scenarios: Iterable[Sequence[ComparisonRow]]) -> list[str]:
    """Return every label that a scenario has, in the order of the longest: others leave the oracle out, amid them."""
    longest_first = sorted(scenarios, key=len, reverse=True)
    return list(dict.fromkeys(row.label for rows in longest_first for row in rows))


def _draw(axes: Axes, name: str, rows: Sequence[ComparisonRow], labels: Sequence[str]) -> None:
    """Draw one scenario: the mean of every algorithm, its interval, and the number at the right."""
    style.plain(axes)
    axes.grid(False, axis="y")
    axes.set_title(name, fontsize=10.5, color=style.INK, loc="left")
    for row in rows:
        if row.accuracy is None:
            continue
        place, mean = labels.index(row.label), row.accuracy.mean
        color = style.MUTED if row.algorithm in BASELINES else style.ACCENT
        axes.errorbar(
            mean, place, xerr=row.accuracy.half_width, fmt="o", markersize=5, color=color, elinewidth=1.4, capsize=3
        )
        text = write_mean(row.accuracy, 1, 100)
        style.note(axes, text, (1, place), y="data", shift=(3, 0), va="center", fontsize=8, color=style.INK)
