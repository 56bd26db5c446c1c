"""Pages as HTML: one file that needs nothing else, neither a network nor a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedclade.core import RunError, import_extra, write_text
from fedclade.report.colours import palette
from fedclade.report.page.section import Card, Page, Section, as_json

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
