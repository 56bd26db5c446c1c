"""What the page is made of: cards, sections, tables. Templates draw them; nothing here knows HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedclade.core import RunError, import_extra, write_text
from fedclade.report.colours import palette
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


# Pages as HTML: one file that needs nothing else, neither a network nor a server.

PURPOSE = "the report page"


def page_html(page: Page, *, live: bool = False) -> str:
    """Return a page as one HTML document, with Plotly's script in it; a live one polls its server for news.

    Raises
    ------
    MissingExtraError
        If jinja2 or plotly is not installed.
    """
    template = _environment().get_template("page.html.jinja")
    return template.render(
        page=page,
        live=live,
        figures=script_json(page.figures),
        day=palette(night=False),
        night=palette(night=True),
        plotly=_plotly_script(),
    )


def state_json(page: Page) -> str:
    """Return what a live page must know to bring itself up to date, as JSON: its parts as HTML, and its figures."""
    sections = [{"id": section.id, "html": section_html(section)} for section in page.sections]
    state = {"subtitle": page.subtitle, "sections": sections, "figures": page.figures}
    try:
        return json.dumps(state, allow_nan=False)
    except ValueError:  # a number that is none, which is rare, and looked for only then
        return json.dumps(as_json(state), allow_nan=False)


def section_html(section: Section) -> str:
    """Return one section as HTML."""
    return _parts().section(section)


def cards_html(cards: Sequence[Card]) -> str:
    """Return some cards as HTML."""
    return _parts().cards(cards)


def write_page(page: Page, path: Path) -> Path:
    """Write a page to a file; one that is there is replaced in one go.

    Raises
    ------
    MissingExtraError
        If jinja2 or plotly is not installed.
    RunError
        If the file cannot be written.
    """
    html = page_html(page)
    try:
        write_text(path, html)
    except OSError as error:
        raise RunError(f"cannot write the report {path}: {error}") from error
    return path


def script_json(value: Any) -> str:
    """Return a value as JSON that can stand in an HTML script, whatever strings are in it."""
    text = json.dumps(as_json(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _environment() -> Any:
    jinja2 = import_extra("jinja2", "jinja2", "report", PURPOSE)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedclade.report.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["css"] = lambda name: f"var(--{name.removeprefix('@')})"
    return environment


@cache
def _parts() -> Any:
    """Return the macros of the parts of a page."""
    return _environment().get_template("parts.html.jinja").module


@cache
def _plotly_script() -> str:
    script: str = import_extra("plotly.offline", "plotly", "report", PURPOSE).get_plotlyjs()
    return script.replace("</script", "<\\/script")
