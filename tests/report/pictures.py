"""What tests look for in pictures."""

from collections.abc import Sequence
from typing import TypeVar

from fedclade.report.picture import Line, Panel, Picture

M = TypeVar("M")


def marks(panel: Panel, kind: type[M]) -> list[M]:
    """Return the marks of one kind."""
    return [mark for mark in panel.marks if isinstance(mark, kind)]


def lines(panel: Panel) -> dict[str, Sequence[tuple[float, float]]]:
    """Return the points of the lines by their name."""
    found = marks(panel, Line)
    return {
        line.name: [(x, round(y, 9)) for x, y in zip(line.x, line.y, strict=True)] for line in found
    }


def labels(picture: Picture) -> list[str]:
    """Return what the legend says."""
    return [entry.label for entry in picture.legend]
