"""Parts of an HTML page (cards, sections and tables), and the rendering of pages with templates."""

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
    """Card with a main result in large type, with a label and a note in small type."""

    label: str
    value: str
    note: str = ""
    trend: str = ""
    """``good`` or ``bad`` in comparison with another run or model, or empty."""
    colour: str = ""
    """Colour of the run on a page that compares several runs."""


@dataclass(frozen=True)
class Cell:
    """Table cell with a trend, which decides its colour: ``good``, ``bad``, or empty."""

    text: str
    trend: str = ""


@dataclass(frozen=True)
class Table:
    """Table of texts on a page, with a note below; the reader can sort it if it is ``sortable``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""
    sortable: bool = False

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
        """Return a table of the first rows; its note is the number of rows that are not listed.

        Parameters
        ----------
        title, columns, rows
            Title, headings and cells of the complete table.
        limit
            Largest number of rows of the result.
        noun
            Noun for the rows that are not listed, such as ``more client``.
        """
        note = ""
        if len(rows) > limit:
            note = f"{count(len(rows) - limit, noun)} not listed."
        return cls(title, columns, rows[:limit], note)


@dataclass(frozen=True)
class Section:
    """Part of a page with a title, a description, and figures, tables, trees or texts."""

    id: str
    title: str
    caption: str
    """Description of the content, which screen readers also read for the figures."""
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    """Figures by name; a reader selects one of several. Their heights are in ``layout``."""
    legend: Sequence[LegendEntry] = ()
    tables: Sequence[Table] = ()
    """Tables below the figures, which are visible after a click."""
    trees: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Pictures of parameter trees by the label of their run."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Preformatted texts by title, such as a config."""
    open_tables: Sequence[Table] = ()
    """Tables that are always visible."""
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    """Links to other pages, by name."""
    choice: str = "Cluster"
    """Label of the menu in which a reader selects one of several figures by its name."""

    @classmethod
    def of(cls, id_: str, caption: str, picture: Picture, tables: Sequence[Table]) -> Section:
        """Return a section with one picture and with the title of this picture."""
        figures = {"": draw(picture)}
        return cls(id_, picture.title, caption, figures, legend=picture.legend, tables=tables)


@dataclass(frozen=True)
class Page:
    """Content of an HTML page: title, cards with the main results, and sections."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures of the page by the id of their HTML element, ``SECTION-NUMBER``."""
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
    """Return a table of numbers with one row for each round.

    Parameters
    ----------
    title
        Title of the table.
    columns
        Numbers of each column by round, by the heading of the column.
    write
        Function that returns a number as text.
    longest
        Approximate largest number of rows. If there are more rounds, only every second (third, ...)
        round and the last round are listed.
    more
        Further text of the note below the table.
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
    every = ""
    if step > 1:
        every = f"Every {step} rounds."
    return Table(title, ["round", *columns], rows, f"{every} {more}".strip())


def as_json(value: Any) -> Any:
    """Return a value in a form that JSON allows: None in place of NaN and infinity.

    Numbers are rounded to five significant digits.

    >>> as_json({"a": (1, 0.1234567, float("nan"))})
    {'a': [1, 0.12346, None]}
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return value


# Pages as HTML: one file that needs neither other files nor a network nor a server.

PURPOSE = "the report page"
"""Purpose of jinja2 and plotly, for the error if one of them is not installed."""


def page_html(page: Page, *, live: bool = False) -> str:
    """Return a page as one HTML document.

    Plotly's script of 5 MB is included if the page has figures or is a live page, whose updates may
    have figures.

    Parameters
    ----------
    page
        Content of the page.
    live
        Whether the page requests updates from the server from which it was loaded.

    Raises
    ------
    MissingExtraError
        If jinja2 is not installed, or plotly for a page with figures.
    """
    template = _environment().get_template("page.html.jinja")
    plotly = ""
    if page.figures or live:
        plotly = _plotly_script()
    return template.render(
        page=page,
        live=live,
        figures=script_json(page.figures),
        day=palette(night=False),
        night=palette(night=True),
        plotly=plotly,
    )


def state_json(page: Page) -> str:
    """Return the content of a page as JSON, to update a live page in the browser.

    The sections are rendered as HTML; the figures are Plotly's JSON.
    """
    sections = [{"id": section.id, "html": section_html(section)} for section in page.sections]
    state = {"subtitle": page.subtitle, "sections": sections, "figures": page.figures}
    try:
        return json.dumps(state, allow_nan=False)
    except ValueError:  # NaN or infinity: these are rare, so only then is the slow conversion done
        return json.dumps(as_json(state), allow_nan=False)


def section_html(section: Section) -> str:
    """Render a section of a page as HTML."""
    return _parts().section(section)


def cards_html(cards: Sequence[Card]) -> str:
    """Render the cards of a page as HTML."""
    return _parts().cards(cards)


def write_page(page: Page, path: Path) -> Path:
    """Write a page to an HTML file; an existing file is replaced atomically.

    Raises
    ------
    MissingExtraError
        If jinja2 is not installed, or plotly for a page with figures.
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
    """Return a value as JSON that is safe inside an HTML script element, for any strings."""
    text = json.dumps(as_json(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _environment() -> Any:
    """Return the jinja2 environment of the page templates, in which all text is escaped.

    It is created once, as templates are compiled.
    """
    jinja2 = import_extra("jinja2", "jinja2", "report", PURPOSE)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedclade.report.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["css"] = _write_colour
    return environment


@cache
def _parts() -> Any:
    """Return the macros of the template ``parts.html.jinja``, which render sections and cards."""
    return _environment().get_template("parts.html.jinja").module


@cache
def _plotly_script() -> str:
    """Return Plotly's JavaScript in a form that is safe inside an HTML script element."""
    script: str = import_extra("plotly.offline", "plotly", "report", PURPOSE).get_plotlyjs()
    return script.replace("</script", "<\\/script")


def _write_colour(name: str) -> str:
    """Return the name of a colour, such as ``@ink`` or ``@accent/0.25``, as a value for CSS."""
    name, _, opacity = name.removeprefix("@").partition("/")
    if not opacity:
        return f"var(--{name})"
    return f"color-mix(in srgb, var(--{name}) {float(opacity):.0%}, transparent)"
