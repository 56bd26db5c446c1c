"""What a picture shows, whatever draws it: panels one above the other, marks in them, colours by name.

Pages draw it with Plotly (:mod:`fedclade.report.page.plot`), files with matplotlib (:mod:`fedclade.report.figures`).
Colours are those of :mod:`fedclade.report.colours`; with an opacity they are written ``@accent/0.25``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.report.style import FEW_ROUNDS

Dash = Literal["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
"""How a line is broken, in Plotly's words."""

DASHES: Mapping[str, Dash] = {
    **{"line": "solid", "dashed": "dash", "dotted": "dot"},
    **{"dashdotted": "dashdot", "long": "longdash", "longdotted": "longdashdot"},
}
"""By the shape of a legend's entry; the more lines there are, the further down."""


@dataclass(frozen=True)
class LegendEntry:
    """A colour, what it stands for, and its shape.

    That is one of :data:`DASHES`, or ``dot``, ``ring``, ``box``, ``diamond`` or ``cross``.
    """

    colour: str
    label: str
    shape: str = "line"

    @property
    def dash(self) -> Dash:
        """How its lines are broken."""
        return DASHES.get(self.shape, "solid")


@dataclass(frozen=True, kw_only=True)
class Marked:
    """What lines, dots and bars share."""

    x: Sequence[float | None]
    y: Sequence[float | None]
    name: str = ""
    hover: str = ""
    """What a page shows at a point: Plotly's template, in which ``{name}`` stands for the name."""


@dataclass(frozen=True, kw_only=True)
class Line(Marked):
    """A line through points, broken where there is no number."""

    colour: str
    width: float = 2
    dash: Dash = "solid"
    dots: bool = False
    steps: bool = False


@dataclass(frozen=True, kw_only=True)
class Dots(Marked):
    """Points; colour and size are one for all, or one for each."""

    colour: str | Sequence[str]
    size: float | Sequence[float]
    symbol: Literal["circle", "diamond", "square", "cross"] = "circle"
    ring: bool = False
    texts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Bars(Marked):
    """Bars, stacked on those of the marks before."""

    colour: str


@dataclass(frozen=True)
class Band:
    """The room between two lines."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: str


@dataclass(frozen=True)
class HeatMap:
    """A square matrix, cell (i, j) at x = j, y = i, in colours from -limit to limit."""

    values: NDArray[np.floating[Any]]
    names: Sequence[str]
    """Of rows and columns."""
    limit: float
    title: str


@dataclass(frozen=True)
class Rule:
    """A horizontal line through a panel, with words above its right end."""

    y: float
    label: str = ""
    dashed: bool = True


@dataclass(frozen=True)
class Box:
    """A filled rectangle; of no width or no height it is a line."""

    x0: float
    x1: float
    y0: float
    y1: float
    colour: str
    label: str = ""


Mark: TypeAlias = Line | Dots | Bars | Band | HeatMap | Rule | Box


@dataclass(frozen=True)
class Axis:
    """An axis: its title, how its numbers are written, and where it begins and ends, if not where data do."""

    title: str = ""
    form: Literal["number", "whole", "share"] = "number"
    log: bool = False
    range: tuple[float, float] | None = None
    from_zero: bool = False
    grid: bool = True
    ticks: Mapping[float, str] | None = None
    """Names at places, instead of numbers."""


@dataclass(frozen=True)
class Panel:
    """Marks over one y axis."""

    marks: Sequence[Mark]
    y: Axis
    share: float = 1.0
    """Of the height, against the other panels."""


@dataclass(frozen=True)
class Picture:
    """Panels over one x axis."""

    title: str
    panels: Sequence[Panel]
    x: Axis
    height: int
    """Pixels on a page."""
    legend: Sequence[LegendEntry] = ()
    uprights: Mapping[int, str] = field(default_factory=dict[int, str])
    """Vertical lines through all panels: their place, and what stands above them."""


def rounds_axis(rounds: int) -> Axis:
    """Return an axis of rounds, in whole numbers from 1."""
    margin = 0.5 if rounds <= FEW_ROUNDS else 0.012 * rounds
    return Axis("round", "whole", range=(1 - margin, rounds + margin))


def label_rows(picture: Picture, letter: float, rows: int = 3) -> list[tuple[int, str, int]]:
    """Return the labels of the vertical lines in rows in which they do not overlap: place, text, row from the bottom.

    ``letter`` is the width of a letter as a share of the picture's. Labels that no row has room for are left out.
    """
    _, end = picture.x.range or (0, 1)
    free_from = [-1.0] * rows
    found: list[tuple[int, str, int]] = []
    for x, text in picture.uprights.items():
        place, width = x / end, letter * len(text)
        row = next((row for row, free in enumerate(free_from) if place - width / 2 >= free), None)
        if row is not None:
            free_from[row] = place + width / 2
            found.append((x, text, row))
    return found
