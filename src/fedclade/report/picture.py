"""Library-independent description of pictures: panels with marks, and colours by name.

Pages draw pictures with Plotly (:mod:`fedclade.report.page.plot`), files with matplotlib
(:mod:`fedclade.report.figures`). The names of colours are defined in
:mod:`fedclade.report.colours`; with an opacity they are written ``@accent/0.25``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.report.style import FEW_ROUNDS

Dash = Literal["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
"""Dashes of a line, by Plotly's names."""

DASHES: Mapping[str, Dash] = {
    "line": "solid",
    "dashed": "dash",
    "dotted": "dot",
    "dashdotted": "dashdot",
    "long": "longdash",
    "longdotted": "longdashdot",
}
"""Dashes by the shape of a legend entry, in the order in which lines use them."""


@dataclass(frozen=True)
class LegendEntry:
    """A colour with its label and shape.

    The shape is one of :data:`DASHES`, or ``dot``, ``ring``, ``box``, ``diamond`` or ``cross``.
    """

    colour: str
    label: str
    shape: str = "line"

    @property
    def dash(self) -> Dash:
        """Dashes of its lines."""
        return DASHES.get(self.shape, "solid")


@dataclass(frozen=True, kw_only=True)
class Marked:
    """Base of lines, dots and bars."""

    x: Sequence[float | None]
    y: Sequence[float | None]
    name: str = ""
    hover: str = ""
    """Text at the pointer on a page, as Plotly's template; ``{name}`` is replaced by the name."""


@dataclass(frozen=True, kw_only=True)
class Line(Marked):
    """A line through points, interrupted at None."""

    colour: str
    width: float = 2
    dash: Dash = "solid"
    dots: bool = False
    steps: bool = False


@dataclass(frozen=True, kw_only=True)
class Dots(Marked):
    """Points; colour and size are common or one for each."""

    colour: str | Sequence[str]
    size: float | Sequence[float]
    symbol: Literal["circle", "diamond", "square", "cross"] = "circle"
    ring: bool = False
    texts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Bars(Marked):
    """Bars, stacked on the bars of earlier marks."""

    colour: str


@dataclass(frozen=True)
class Band:
    """The area between two lines."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: str


@dataclass(frozen=True)
class HeatMap:
    """A square matrix, cell (i, j) at x = j, y = i, in colours from -limit to limit."""

    values: NDArray[np.floating[Any]]
    names: Sequence[str]
    """Names of the rows, and also of the columns."""
    limit: float
    title: str


@dataclass(frozen=True)
class Rule:
    """A horizontal line through a panel, with a label above its right end."""

    y: float
    label: str = ""
    dashed: bool = True


@dataclass(frozen=True)
class Box:
    """A filled rectangle; without width or height it is a line."""

    x0: float
    x1: float
    y0: float
    y1: float
    colour: str
    label: str = ""


Mark: TypeAlias = Line | Dots | Bars | Band | HeatMap | Rule | Box


@dataclass(frozen=True)
class Axis:
    """An axis: its title, the format of its numbers, and its range, by default that of the data."""

    title: str = ""
    form: Literal["number", "whole", "share"] = "number"
    log: bool = False
    range: tuple[float, float] | None = None
    from_zero: bool = False
    grid: bool = True
    ticks: Mapping[float, str] | None = None
    """Labels at places, in place of numbers."""


@dataclass(frozen=True)
class Panel:
    """Marks with a common y axis."""

    marks: Sequence[Mark]
    y: Axis
    share: float = 1.0
    """Share of the height, relative to the other panels."""


@dataclass(frozen=True)
class Picture:
    """Panels with a common x axis, one above the other."""

    title: str
    panels: Sequence[Panel]
    x: Axis
    height: int
    """Height on a page in pixels."""
    legend: Sequence[LegendEntry] = ()
    uprights: Mapping[int, str] = field(default_factory=dict[int, str])
    """Labels of vertical lines through all panels, by their place."""


def rounds_axis(rounds: int) -> Axis:
    """Return an axis of rounds, in whole numbers from 1."""
    margin = 0.5 if rounds <= FEW_ROUNDS else 0.012 * rounds
    return Axis("round", "whole", range=(1 - margin, rounds + margin))


def label_rows(picture: Picture, letter: float, rows: int = 3) -> list[tuple[int, str, int]]:
    """Arrange the labels of vertical lines in rows without overlaps.

    Labels without room in any row are left out.

    Parameters
    ----------
    picture
        Picture with the lines.
    letter
        Width of a letter, as a share of the picture's width.
    rows
        Number of rows.

    Returns
    -------
    list of tuple
        Place, text, and row from the bottom.
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
