"""What the page is made of: cards, sections, tables. Templates draw them; nothing here knows HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedclade.report.formats import NONE, count
from fedclade.report.page.plot import Figure, draw
from fedclade.report.picture import LegendEntry, Picture


@dataclass(frozen=True)
class Card:
    """A number that matters, in large type, and in small type what else there is to say of it."""

    label: str
    value: str
    note: str = ""
    trend: str = ""
    """``good`` or ``bad`` against a run that it is compared with, or neither."""
    colour: str = ""
    """Of the run, on a page of several."""


@dataclass(frozen=True)
class Table:
    """Numbers in rows, as text; the note stands below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @classmethod
    def first(cls, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], limit: int, noun: str) -> Table:
        """Return a table of the first rows, and of the others only their number."""
        left_out = f"{count(len(rows) - limit, noun)} not listed." if len(rows) > limit else ""
        return cls(title, columns, rows[:limit], left_out)


@dataclass(frozen=True)
class Section:
    """A part of the page under a title; its id is for links."""

    id: str
    title: str
    caption: str
    """What the picture shows, for those who see it and those who do not."""
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    """By name; of several, one is shown at a time. Heights are in ``layout``."""
    legend: Sequence[LegendEntry] = ()
    tables: Sequence[Table] = ()
    """The numbers, folded away below a picture."""
    trees: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Parameter trees, by the name of their run."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is shown letter by letter, such as a config, by its title."""
    open_tables: Sequence[Table] = ()
    """Tables that stand for themselves."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """To other pages, by name."""

    @classmethod
    def of(cls, id_: str, caption: str, picture: Picture, tables: Sequence[Table]) -> Section:
        """Return a section with one picture, under its title."""
        return cls(id_, picture.title, caption, {"": draw(picture)}, picture.legend, tables)


@dataclass(frozen=True)
class Page:
    """All that a page says: cards first, then sections."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures of the page by the id of their place, ``SECTION-NUMBER``."""
        return {f"{s.id}-{i}": figure for s in self.sections for i, figure in enumerate(s.figures.values())}


def table_by_round(
    title: str,
    columns: Mapping[str, Mapping[int, float]],
    written: Callable[[float], str],
    longest: int,
    more: str = "",
) -> Table:
    """Return numbers by round, one column each, in at most about so many rounds."""
    rounds = sorted({at for column in columns.values() for at in column})
    step = max(1, -(-len(rounds) // longest))
    kept = [at for i, at in enumerate(rounds) if i % step == 0 or at == rounds[-1]]
    rows = [[str(at), *(written(each[at]) if at in each else NONE for each in columns.values())] for at in kept]
    every = f"Every {step} rounds." if step > 1 else ""
    return Table(title, ["round", *columns], rows, f"{every} {more}".strip())


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
