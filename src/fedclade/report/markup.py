"""Elements of HTML for notebooks: cards, tables, trees and small charts.

The HTML needs no scripts or other files. It suits light and dark notebooks: text has the colour of
the surrounding text, and everything else is transparent grey or a colour that is visible on light
and dark backgrounds. All text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rich.text import Text
from rich.tree import Tree

from fedclade.report.colours import palette
from fedclade.report.page.section import Card
from fedclade.report.terminal import visible

SEEN = palette(night=True)
"""Colours, by name, that are visible on dark and on light pages."""

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
    """Join pieces of HTML into one element, and add the style sheet that they need."""
    style = _STYLE.replace("\n", "")
    return f'<div class="fedclade"><style>{style}</style>{"".join(parts)}</div>'


def escape_text(text: str) -> str:
    """Escape a text for HTML, and remove control characters and marks that change its direction."""
    return escape(visible(text))


def heading(title: str, more: str = "") -> str:
    """Return a title with a subtitle as HTML."""
    below = ""
    if more:
        below = f'<div class="fc-muted">{escape_text(more)}</div>'
    return f"<div><strong>{escape_text(title)}</strong>{below}</div>"


def cards(entries: Iterable[Card]) -> str:
    """Return cards (a main result each, in large type) in a row as HTML."""
    return f'<div class="fc-cards">{"".join(_render_card(card) for card in entries)}</div>'


def _render_card(card: Card) -> str:
    """Return one card as HTML: its label, its value in large type, and a note."""
    note = ""
    if card.note:
        note = f'<span class="fc-small fc-muted">{escape_text(card.note)}</span>'
    label = f'<span class="fc-small">{escape_text(card.label)}</span>'
    return f'<div class="fc-card">{label}<b>{escape_text(card.value)}</b>{note}</div>'


def table(
    columns: Mapping[str, Sequence[str]],
    words: Iterable[str],
    pale: Sequence[bool] = (),
    note: str = "",
) -> str:
    """Return a table as HTML.

    Parameters
    ----------
    columns
        Cells of each column, which are HTML already, by the column's heading in plain text.
    words
        Headings of the columns that are aligned at the left.
    pale
        Whether each row is drawn in pale text, as rows of baselines are.
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
    below = ""
    if note:
        below = f'<div class="fc-small fc-muted">{escape_text(note)}</div>'
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="fc-scroll"><table class="fc-table">{head}<tbody>{"".join(rows)}</tbody></table></div>{below}'


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Return a table without headings as HTML, from rows of cells that are HTML already."""
    html: list[str] = []
    for cells in rows:
        row = "".join(f'<td class="fc-word">{cell}</td>' for cell in cells)
        html.append(f"<tr>{row}</tr>")
    return f'<table class="fc-table">{"".join(html)}</table>'


def folded(title: str, inside: str) -> str:
    """Return HTML content that becomes visible after a click on its title."""
    return f"<details><summary>{escape_text(title)}</summary>{inside}</details>"


def tree(view: Tree) -> str:
    """Convert a tree of the library `rich` into nested HTML lists.

    The first line of each node is in normal type, and all further lines are in small type.
    """
    return f'<ul class="fc-tree">{_render_branch(view)}</ul>'


def _render_branch(view: Tree) -> str:
    """Return one node of a tree and all nodes below it as an HTML list item."""
    lines = [Text(str(view.label))]
    if isinstance(view.label, Text):
        lines = list(view.label.split("\n"))
    first, *below = lines
    # The id at the beginning has the style of the whole label, and all further text a span.
    end = min((span.start for span in first.spans), default=0)
    if view.children:
        colour = ""
    else:
        colour = f' style="color:{SEEN["accent"]}"'
    parts = [f"<b{colour}>{escape_text(first.plain[:end])}</b>{escape_text(first.plain[end:])}"]
    parts += [f'<div class="fc-small fc-muted">{escape_text(line.plain)}</div>' for line in below]
    if view.children:
        parts.append(f"<ul>{''.join(_render_branch(child) for child in view.children)}</ul>")
    return f"<li>{''.join(parts)}</li>"


def histogram(counts: Sequence[float], width: int = 6, height: int = 16) -> str:
    """Return a small bar chart as SVG, in which the highest bar is as high as a line of text.

    Parameters
    ----------
    counts
        Count of each bar.
    width
        Width of a bar and the gap next to it, in pixels.
    height
        Height of the highest bar, in pixels.
    """
    largest = max(counts, default=0) or 1
    path = ""
    for i, count in enumerate(counts):
        bar = round(height * count / largest, 1)
        if bar:
            path += f"M{width * i} {height}v-{bar:g}h{width - 1}v{bar:g}z"
    return _write_svg(width * len(counts), height, f'<path d="{path}" fill="{SEEN["accent"]}"/>')


def interval(low: float, middle: float, high: float, values: Iterable[float]) -> str:
    """Return a small picture, as SVG, of a mean with its interval and the single values.

    Parameters
    ----------
    low, middle, high
        Lower end, mean and upper end of the interval, in [0, 1] on the scale of the picture.
    values
        The single values, drawn as small dots, on the same scale.
    """
    colour = SEEN["accent"]
    shapes: list[str] = []
    if low < high:
        path = f"M{_convert_to_pixels(low):g} 8H{_convert_to_pixels(high):g}"
        shapes.append(f'<path d="{path}" stroke="{colour}" stroke-width="2"/>')
    for value in values:
        x = f"{6 + 128 * value:.1f}"
        dot = f'<circle cx="{x}" cy="8" r="2.5" fill="{colour}" fill-opacity=".45"/>'
        shapes.append(dot)
    shapes.append(f'<circle cx="{_convert_to_pixels(middle):g}" cy="8" r="4.5" fill="{colour}"/>')
    return _write_svg(140, 16, "".join(shapes))


def _convert_to_pixels(share: float) -> float:
    """Return the horizontal position, in pixels, of a share in [0, 1] in a picture of an interval.

    At both ends there is room for half a dot.
    """
    return round(6 + 128 * share, 1)


def _write_svg(width: int, height: int, inside: str) -> str:
    """Return an SVG element with the given width and height, in pixels, and content."""
    return f'<svg width="{width}" height="{height}" aria-hidden="true" style="vertical-align:middle">{inside}</svg>'
