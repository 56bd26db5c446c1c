"""HTML for notebooks: cards, tables, trees and small charts, without scripts or other files.

It suits light and dark pages: text has the colour of the page around it, and everything else is
transparent grey or a colour that is visible on both. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rich.text import Text
from rich.tree import Tree

from fedclade.report.colours import palette
from fedclade.report.page.section import Card
from fedclade.report.tables import visible

SEEN = palette(night=True)
"""Colours that are visible on dark and on light pages."""

_STYLE = """
.fedclade{font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;max-width:64em;margin:.3em 0}
.fedclade .fc-muted{opacity:.68}
.fedclade .fc-cards{display:flex;flex-wrap:wrap;gap:.4em .5em;margin:.6em 0}
.fedclade .fc-card{border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:.35em .75em;min-width:6.5em}
.fedclade .fc-card b{display:block;font-size:1.35em;font-weight:600;line-height:1.3}
.fedclade .fc-small{font-size:.88em}
.fedclade .fc-scroll{overflow-x:auto}
.fedclade table.fc-table{border-collapse:collapse;margin:.5em 0;font-size:1em;color:inherit;border:0}
.fedclade table.fc-table th,.fedclade table.fc-table td{padding:.25em .8em .25em 0;text-align:right;color:inherit;
background:none;border:0;border-bottom:1px solid rgba(128,128,128,.25);white-space:nowrap;vertical-align:middle}
.fedclade table.fc-table th.fc-word,.fedclade table.fc-table td.fc-word{text-align:left}
.fedclade table.fc-table tr{background:none}
.fedclade table.fc-table tr.fc-base{opacity:.68}
.fedclade ul.fc-tree{list-style:none;margin:.2em 0 0;padding:0}
.fedclade ul.fc-tree ul{list-style:none;margin:0 0 0 .35em;padding:0 0 0 1em;border-left:2px solid rgba(128,128,128,.3)}
.fedclade ul.fc-tree li{margin:.25em 0;padding:0}
.fedclade summary{cursor:pointer}
"""


def whole(*parts: str) -> str:
    """Join parts, with the style sheet that they need."""
    style = _STYLE.replace("\n", "")
    return f'<div class="fedclade"><style>{style}</style>{"".join(parts)}</div>'


def escape_text(text: str) -> str:
    """Escape a text for HTML, without control characters and changes of direction."""
    return escape(visible(text))


def heading(title: str, more: str = "") -> str:
    """Return a title with a subtitle."""
    below = f'<div class="fc-muted">{escape_text(more)}</div>' if more else ""
    return f"<div><strong>{escape_text(title)}</strong>{below}</div>"


def cards(entries: Iterable[Card]) -> str:
    """Return cards in a row."""
    return f'<div class="fc-cards">{"".join(_render_card(card) for card in entries)}</div>'


def _render_card(card: Card) -> str:
    note = f'<span class="fc-small fc-muted">{escape_text(card.note)}</span>' if card.note else ""
    label = f'<span class="fc-small">{escape_text(card.label)}</span>'
    return f'<div class="fc-card">{label}<b>{escape_text(card.value)}</b>{note}</div>'


def table(
    columns: Mapping[str, Sequence[str]],
    words: Iterable[str],
    pale: Sequence[bool] = (),
    note: str = "",
) -> str:
    """Return a table of cells that are HTML already.

    Parameters
    ----------
    columns
        Cells of each column in HTML, by its heading in plain text.
    words
        Headings of the columns that are aligned at the left.
    pale
        Whether each row is drawn in pale text, as are baselines.
    note
        Plain text below the table.
    """
    left_aligned = set(words)
    kinds = [' class="fc-word"' if name in left_aligned else "" for name in columns]
    headings = zip(columns, kinds, strict=True)
    head = "".join(f"<th{kind}>{escape_text(name)}</th>" for name, kind in headings)
    rows: list[str] = []
    for i, cells in enumerate(zip(*columns.values(), strict=True)):
        row = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(cells, kinds, strict=True))
        is_pale = i < len(pale) and pale[i]
        rows.append(f'<tr class="fc-base">{row}</tr>' if is_pale else f"<tr>{row}</tr>")
    below = f'<div class="fc-small fc-muted">{escape_text(note)}</div>' if note else ""
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="fc-scroll"><table class="fc-table">{head}<tbody>{"".join(rows)}</tbody></table></div>{below}'


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Return a table without headings; cells are HTML."""
    html: list[str] = []
    for cells in rows:
        row = "".join(f'<td class="fc-word">{cell}</td>' for cell in cells)
        html.append(f"<tr>{row}</tr>")
    return f'<table class="fc-table">{"".join(html)}</table>'


def folded(title: str, inside: str) -> str:
    """Return content that is shown after a click on its title."""
    return f"<details><summary>{escape_text(title)}</summary>{inside}</details>"


def tree(view: Tree) -> str:
    """Return a tree of the terminal as nested lists, with further lines in small print."""
    return f'<ul class="fc-tree">{_render_branch(view)}</ul>'


def _render_branch(view: Tree) -> str:
    lines = [Text(str(view.label))]
    if isinstance(view.label, Text):
        lines = list(view.label.split("\n"))
    first, *below = lines
    end = min((span.start for span in first.spans), default=0)  # the id has the label's own style
    colour = "" if view.children else f' style="color:{SEEN["accent"]}"'
    parts = [f"<b{colour}>{escape_text(first.plain[:end])}</b>{escape_text(first.plain[end:])}"]
    parts += [f'<div class="fc-small fc-muted">{escape_text(line.plain)}</div>' for line in below]
    if view.children:
        parts.append(f"<ul>{''.join(_render_branch(child) for child in view.children)}</ul>")
    return f"<li>{''.join(parts)}</li>"


def histogram(counts: Sequence[float], width: int = 6, height: int = 16) -> str:
    """Return a bar chart, whose largest bar has the height of a line of text."""
    largest = max(counts, default=0) or 1
    path = ""
    for i, count in enumerate(counts):
        bar = round(height * count / largest, 1)
        if bar:
            path += f"M{width * i} {height}v-{bar:g}h{width - 1}v{bar:g}z"
    return _svg(width * len(counts), height, f'<path d="{path}" fill="{SEEN["accent"]}"/>')


def interval(low: float, middle: float, high: float, values: Iterable[float]) -> str:
    """Return a mean with its interval and the values, all in [0, 1], as a line with dots."""
    colour = SEEN["accent"]
    shapes: list[str] = []
    if low < high:
        path = f"M{_scale(low):g} 8H{_scale(high):g}"
        shapes.append(f'<path d="{path}" stroke="{colour}" stroke-width="2"/>')
    for value in values:
        x = f"{6 + 128 * value:.1f}"
        dot = f'<circle cx="{x}" cy="8" r="2.5" fill="{colour}" fill-opacity=".45"/>'
        shapes.append(dot)
    shapes.append(f'<circle cx="{_scale(middle):g}" cy="8" r="4.5" fill="{colour}"/>')
    return _svg(140, 16, "".join(shapes))


def _scale(share: float) -> float:
    """Return the place of a share on a line with room for the dots at its ends, in pixels."""
    return round(6 + 128 * share, 1)


def _svg(width: int, height: int, inside: str) -> str:
    return f'<svg width="{width}" height="{height}" aria-hidden="true" style="vertical-align:middle">{inside}</svg>'
