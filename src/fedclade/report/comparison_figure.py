"""The picture of a comparison: a dot for every configuration, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedclade.report import style
from fedclade.report.estimates import BASELINES, ComparisonRow, Estimate, write_with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def comparison_figure(rows: Sequence[ComparisonRow], title: str, data: str) -> Figure:
    """Draw the mean accuracy of every configuration with its interval, and every run as a small dot.

    Language models are drawn by perplexity.

    Parameters
    ----------
    rows
        The configurations, from top to bottom.
    title, data
        What is compared, and on which data.
    """
    language = all(row.perplexity is not None for row in rows)
    figure = style.new_figure(8.6, style.HEADER + 0.9 + 0.42 * len(rows))
    axes = figure.subplots()
    style.plain(axes)
    axes.grid(False, axis="y")
    for place, row in enumerate(rows):
        estimate = row.perplexity if language else row.accuracy
        if estimate is not None:
            color = style.MUTED if row.algorithm in BASELINES else style.ACCENT
            _draw(axes, place, estimate, color, write_with_interval(estimate, 1 if language else 100))
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if not language:
        style.percent_scale(axes, "x")
    what = "perplexity (lower is better)" if language else "accuracy"
    style.label(axes, x=f"test {what}, mean of the clients; 95 % interval over seeds")
    style.set_title(figure, title, data)
    return figure


def _draw(axes: Axes, place: int, estimate: Estimate, color: str, text: str) -> None:
    """Draw one configuration: its runs, their mean, the interval, and the numbers at the right."""
    runs, below = estimate.values, place + 0.22
    axes.plot(runs, [below] * len(runs), "o", markersize=4.5, color=color, alpha=0.4, markeredgewidth=0, gid="runs")
    mean, half_width = estimate.mean, estimate.half_width
    axes.errorbar(mean, place, xerr=half_width, fmt="o", markersize=8, color=color, elinewidth=1.8, capsize=4)
    style.note(axes, text, (1, place), y="data", shift=(8, 0), va="center", color=style.INK, gid="value")
