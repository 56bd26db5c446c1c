"""Parts of a page: cards, sections and tables; and pages as HTML, rendered with templates."""

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
    """A main result in large type, with a note in small type."""

    label: str
    value: str
    note: str = ""
    trend: str = ""
    """``good`` or ``bad`` compared with another run, or empty."""
    colour: str = ""
    """Colour of the run on a page of several runs."""


@dataclass(frozen=True)
class Table:
    """A table of text, with a note below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @classmethod
    def first(
        cls,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        limit: int,
        noun: str,
    ) -> Table:
        """Return a table of the first ``limit`` rows, with the number of the others in a note."""
        note = f"{count(len(rows) - limit, noun)} not listed." if len(rows) > limit else ""
        return cls(title, columns, rows[:limit], note)


@dataclass(frozen=True)
class Section:
    """A part of a page with a title; links refer to its id."""

    id: str
    title: str
    caption: str
    """Description of the content, also for screen readers."""
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    """Figures by name; of several, one is shown at a time. Heights are in ``layout``."""
    legend: Sequence[LegendEntry] = ()
    tables: Sequence[Table] = ()
    """Tables below a picture, shown after a click."""
    trees: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Parameter trees by the label of their run."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Preformatted texts, such as a config, by their titles."""
    open_tables: Sequence[Table] = ()
    """Tables that are always shown."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Links to other pages, by name."""

    @classmethod
    def of(cls, id_: str, caption: str, picture: Picture, tables: Sequence[Table]) -> Section:
        """Return a section with one picture and the title of that picture."""
        figures = {"": draw(picture)}
        return cls(id_, picture.title, caption, figures, legend=picture.legend, tables=tables)


@dataclass(frozen=True)
class Page:
    """Content of a page: cards first, then sections."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures of the page by the id of their element, ``SECTION-NUMBER``."""
        figures: dict[str, Figure] = {}
        for section in self.sections:
            for i, figure in enumerate(section.figures.values()):
                figures[f"{section.id}-{i}"] = figure
        return figures


def table_by_round(
    title: str,
    columns: Mapping[str, Mapping[int, float]],
    write: Callable[[float], str],
    *,
    longest: int,
    more: str = "",
) -> Table:
    """Return a table of numbers by round.

    Parameters
    ----------
    title
        Title of the table.
    columns
        Numbers by round, by the heading of their column.
    write
        Writes a number.
    longest
        Approximate number of rows; of more rounds, a regular sample is listed.
    more
        Further text of the note.
    """
    rounds: set[int] = set()
    for column in columns.values():
        rounds.update(column)
    ordered = sorted(rounds)
    step = max(1, -(-len(ordered) // longest))
    rows: list[list[str]] = []
    for i, round_number in enumerate(ordered):
        if i % step == 0 or round_number == ordered[-1]:
            values = [column.get(round_number) for column in columns.values()]
            cells = [NONE if value is None else write(value) for value in values]
            rows.append([str(round_number), *cells])
    every = f"Every {step} rounds." if step > 1 else ""
    return Table(title, ["round", *columns], rows, f"{every} {more}".strip())


def as_json(value: Any) -> Any:
    """Return a value for JSON: numbers with five digits, and None for NaN and infinity.

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


# Pages as HTML: one file that needs neither other files nor a network nor a server.

PURPOSE = "the report page"


def page_html(page: Page, *, live: bool = False) -> str:
    """Return a page as one HTML document that includes Plotly's script.

    A ``live`` page polls its server for updates.

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
    """Return the sections as HTML and the figures of a page as JSON, to update a live page."""
    sections = [{"id": section.id, "html": section_html(section)} for section in page.sections]
    state = {"subtitle": page.subtitle, "sections": sections, "figures": page.figures}
    try:
        return json.dumps(state, allow_nan=False)
    except ValueError:  # NaN or infinity, which is rare: the slow conversion is done only then
        return json.dumps(as_json(state), allow_nan=False)


def section_html(section: Section) -> str:
    """Render a section as HTML."""
    return _parts().section(section)


def cards_html(cards: Sequence[Card]) -> str:
    """Render cards as HTML."""
    return _parts().cards(cards)


def write_page(page: Page, path: Path) -> Path:
    """Write a page to a file; an existing one is replaced atomically.

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
    """Return a value as JSON that is safe in an HTML script, whatever strings it contains."""
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
    """Return the macros of the template ``parts.html.jinja``."""
    return _environment().get_template("parts.html.jinja").module


@cache
def _plotly_script() -> str:
    script: str = import_extra("plotly.offline", "plotly", "report", PURPOSE).get_plotlyjs()
    return script.replace("</script", "<\\/script")
