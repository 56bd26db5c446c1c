"""Functions that draw panels, markers, lines and legends for the figures of several experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedclade.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_WIDTH = 4.2
PANEL_HEIGHT = 3.2
"""Height of a panel of a figure in inches; ``PANEL_WIDTH`` is the width of a panel in inches."""

LEAST_WIDTH = 6.4
"""Smallest width of a figure in inches, so that its title fits."""

MARKS: Mapping[str, dict[str, Any]] = {
    "paper": {
        "marker": "D",
        "linestyle": "",
        "markerfacecolor": "white",
        "color": style.INK,
        "markersize": 6,
    },
    "averaged": {
        "marker": "|",
        "linestyle": "",
        "color": style.CLUSTERS[1],
        "markersize": 9,
        "markeredgewidth": 2,
    },
    "ours": {"marker": "o", "linestyle": "", "color": style.ACCENT, "markersize": 6},
}
"""Looks of the markers for values of the paper, of plain federated averaging, and of our runs."""


def panels(columns: int, title: str, subtitle: str, *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Create a figure of equally large panels, and return the figure and its panels row by row.

    ``title`` and ``subtitle`` are drawn above the panels.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figure = style.new_figure(
        max(LEAST_WIDTH, PANEL_WIDTH * columns), style.HEADER + PANEL_HEIGHT * rows
    )
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    style.plain(*axes)
    style.set_title(figure, title, subtitle)
    return figure, axes


def head(axes: Axes, text: str) -> None:
    """Write the title of a panel above the panel, aligned to the left."""
    axes.set_title(text, fontsize=10.5, color=style.INK, loc="left")


def dots(axes: Axes, names: Sequence[str], values: Mapping[str, Sequence[float | None]]) -> None:
    """Draw the values of each name as markers in one line, with the first name at the top.

    ``values`` has a list for each kind of marker in :data:`MARKS`, with one value for each name.
    Values that are None are omitted.
    """
    for kind, numbers in values.items():
        shown = [(value, place) for place, value in enumerate(numbers) if value is not None]
        axes.plot([value for value, _ in shown], [place for _, place in shown], **MARKS[kind])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    style.plain(axes)


def mean_lines(
    axes: Axes, x: Sequence[float], lines: Mapping[str, Sequence[Sequence[float]]]
) -> None:
    """Draw a line for each name: the mean over the seeds, with a band from minimum to maximum.

    ``lines`` has for each name a list of values for each seed, with one value for each entry of
    ``x``.
    """
    for color, (name, seeds) in zip(style.CLUSTERS, lines.items(), strict=False):
        values = np.asarray(seeds, dtype=np.float64)
        axes.plot(
            x,
            values.mean(0),
            color=color,
            label=name,
            marker="o" if len(x) <= style.FEW_ROUNDS else None,
            ms=4,
        )
        if len(values) > 1:
            axes.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)


def legend(axes: Axes, **where: Any) -> None:
    """Draw a legend inside the panel."""
    axes.legend(frameon=False, fontsize=9, labelcolor=style.INK, **where)
