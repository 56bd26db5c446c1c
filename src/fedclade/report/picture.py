"""Library-independent description of plots: a picture has panels, and a panel has marks.

A picture is one figure with a title, one or more panels below each other, and a legend. A panel is
a pair of axes with its marks: lines, dots, bars, bands, heat maps, rules (horizontal lines) and
boxes. Pages draw pictures with Plotly (:mod:`fedclade.report.page.plot`), files with matplotlib
(:mod:`fedclade.report.figures`). Colours have names, such as ``@accent``, which are defined in
:mod:`fedclade.report.colours`; ``@accent/0.25`` adds an opacity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.report.style import FEW_ROUNDS

Dash = Literal["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
"""Dash pattern of a line, by Plotly's name."""

DASHES: Mapping[str, Dash] = {
    "line": "solid",
    "dashed": "dash",
    "dotted": "dot",
    "dashdotted": "dashdot",
    "long": "longdash",
    "longdotted": "longdashdot",
}
"""Dash patterns by the shape of a legend entry, in the order in which lines use them."""


@dataclass(frozen=True)
class LegendEntry:
    """Entry of a legend: a colour with its label and shape.

    The shape is a key of :data:`DASHES`, or ``dot``, ``ring``, ``box``, ``diamond`` or ``cross``.
    """

    colour: str
    label: str
    shape: str = "line"

    @property
    def dash(self) -> Dash:
        """Dash pattern of the lines that this legend entry stands for."""
        return DASHES.get(self.shape, "solid")


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Base class of lines, dots and bars in a picture: points with a name."""

    x: Sequence[float | None]
    y: Sequence[float | None]
    name: str = ""
    hover: str = ""
    """Text at the pointer on a page, as Plotly's template; ``{name}`` stands for the name."""


@dataclass(frozen=True, kw_only=True)
class Line(Marked):
    """Line through points in a picture, interrupted where a coordinate is None."""

    colour: str
    width: float = 2
    dash: Dash = "solid"
    dots: bool = False
    """Whether to draw a dot at each point."""
    steps: bool = False
    """Whether to connect points by horizontal and vertical steps."""


@dataclass(frozen=True, kw_only=True)
class Dots(Marked):
    """Points in a picture; colour and size are common to all points or given for each point."""

    colour: str | Sequence[str]
    size: float | Sequence[float]
    symbol: Literal["circle", "diamond", "square", "cross"] = "circle"
    ring: bool = False
    """Whether to draw rings in place of filled symbols."""
    texts: Sequence[str] = ()
    """Text of each point, for ``%{text}`` in the template of ``hover``."""


@dataclass(frozen=True, kw_only=True)
class Bars(Marked):
    """Bars in a picture, stacked on the bars of earlier marks in the same panel."""

    colour: str


@dataclass(frozen=True)
class Band:
    """Area between a lower and an upper line in a picture."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: str


@dataclass(frozen=True)
class HeatMap:
    """Square matrix in a picture, with a colour scale from ``-limit`` to ``limit``.

    Cell (i, j) is drawn at x = j and y = i.
    """

    values: NDArray[np.floating[Any]]
    names: Sequence[str]
    """Names of the rows, which are also the names of the columns."""
    limit: float
    title: str
    """Title of the colour scale."""


@dataclass(frozen=True)
class Rule:
    """Horizontal line through a whole panel of a picture, with a label above its right end."""

    y: float
    label: str = ""
    dashed: bool = True


@dataclass(frozen=True)
class Box:
    """Filled rectangle in a picture; a line if its width or its height is 0."""

    x0: float
    x1: float
    y0: float
    y1: float
    colour: str
    label: str = ""


Mark: TypeAlias = Line | Dots | Bars | Band | HeatMap | Rule | Box
"""Element of a panel."""


@dataclass(frozen=True)
class Axis:
    """Axis of a picture: its title, number format, range and ticks.

    Without a range, the axis covers the data.
    """

    title: str = ""
    form: Literal["number", "whole", "share"] = "number"
    log: bool = False
    range: tuple[float, float] | None = None
    from_zero: bool = False
    grid: bool = True
    ticks: Mapping[float, str] | None = None
    """Labels by their positions on the axis, in place of numbers."""


@dataclass(frozen=True)
class Panel:
    """Marks of a picture that have a common y axis."""

    marks: Sequence[Mark]
    y: Axis
    share: float = 1.0
    """Height of the panel, relative to the other panels of the picture."""


@dataclass(frozen=True)
class Picture:
    """Description of a figure: panels with a common x axis, one above the other."""

    title: str
    panels: Sequence[Panel]
    x: Axis
    height: int
    """Height on an HTML page in pixels."""
    legend: Sequence[LegendEntry] = ()
    uprights: Mapping[int, str] = field(default_factory=dict[int, str])
    """Labels of vertical lines through all panels, by the x coordinates of the lines."""


def rounds_axis(rounds: int) -> Axis:
    """Return the axis for a number of rounds, with whole numbers from 1."""
    if rounds <= FEW_ROUNDS:
        margin = 0.5
    else:
        margin = 0.012 * rounds
    return Axis("round", "whole", range=(1 - margin, rounds + margin))


def label_rows(picture: Picture, letter: float, rows: int = 3) -> list[tuple[int, str, int]]:
    """Arrange the labels of a picture's vertical lines in rows above the panels, without overlaps.

    A label that fits into no row is left out.

    Parameters
    ----------
    picture
        Picture with the vertical lines.
    letter
        Width of a letter, as a share of the picture's width.
    rows
        Number of rows.

    Returns
    -------
    list of tuple
        For each label its x coordinate, its text, and its row, counted from the bottom.
    """
    _, end = picture.x.range or (0, 1)
    free_from = [-1.0] * rows
    labels: list[tuple[int, str, int]] = []
    for x, text in picture.uprights.items():
        place = x / end
        width = letter * len(text)
        for row, free in enumerate(free_from):
            if place - width / 2 >= free:
                free_from[row] = place + width / 2
                labels.append((x, text, row))
                break
    return labels
