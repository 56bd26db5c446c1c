"""What the page is made of: cards, sections, tables. Templates draw them; nothing here knows HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedclade.report.page.palette import Key

Figure = dict[str, Any]
"""A figure as Plotly's JSON has it, ``data`` and ``layout``, with colours by name."""


@dataclass(frozen=True)
class Card:
    """A number that matters, in large type.

    Parameters
    ----------
    label, value
        What it is, and the number as it is written.
    note
        What else there is to say of it, in small type.
    trend
        Whether it is ``good`` or ``bad`` against a run that it is compared with, or neither.
    colour
        Of the run, on a page of several.
    """

    label: str
    value: str
    note: str = ""
    trend: str = ""
    colour: str = ""


@dataclass(frozen=True)
class Table:
    """Numbers in rows; all cells are text.

    Parameters
    ----------
    title
        Above it.
    columns
        Their names.
    rows
        As many cells in each as there are columns.
    note
        Below it, such as what was left out.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page under a title.

    Parameters
    ----------
    id
        Its place in links.
    title
        What it is about.
    caption
        What the picture shows, for those who see it and those who do not.
    figures
        By what to call each; of several, one is shown at a time. Heights are in ``layout``.
    legend
        What the colours stand for.
    tables
        The numbers, folded away below a picture.
    trees
        Parameter trees, by the name of their run.
    texts
        What is shown letter by letter, such as a config, by its title.
    open_tables
        Tables that stand for themselves.
    links
        To other pages, by what to call them.
    """

    id: str
    title: str
    caption: str
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    legend: Sequence[Key] = ()
    tables: Sequence[Table] = ()
    trees: Mapping[str, Any] = field(default_factory=dict[str, Any])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    open_tables: Sequence[Table] = ()
    links: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Page:
    """All that a page says.

    Parameters
    ----------
    title, subtitle
        At its head.
    cards
        Numbers first.
    sections
        Then pictures.
    """

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures of the page by the id of their place, ``SECTION-NUMBER``."""
        return {f"{s.id}-{i}": figure for s in self.sections for i, figure in enumerate(s.figures.values())}


def as_json(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers with five digits, and None for what is none.

    >>> as_json({"a": (1, 0.1234567, float("nan"))})
    {'a': [1, 0.12346, None]}
    """
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return value
