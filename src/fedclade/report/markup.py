"""Small parts of a notebook's page as HTML, which needs no script, no other file, and stands on light and dark ground.

Text has the colour of the page around it; all else is see-through grey or a colour that is seen on both. Whatever a
text holds, it is shown as it is.
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
"""Colours that stand out from a dark ground, and do so from a light one as well."""

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
    """Return parts as one, with the style that they need."""
    style = _STYLE.replace("\n", "")
    return f'<div class="fedclade"><style>{style}</style>{"".join(parts)}</div>'


def shown_as_is(text: str) -> str:
    """Return a text as HTML that shows it, without characters that turn the direction of what follows."""
    return escape(visible(text))


def heading(title: str, more: str = "") -> str:
    """Return a title, and what else there is to say in smaller letters."""
    below = f'<div class="fc-muted">{shown_as_is(more)}</div>' if more else ""
    return f"<div><strong>{shown_as_is(title)}</strong>{below}</div>"


def cards(found: Iterable[Card]) -> str:
    """Return numbers that matter, beside each other."""
    return f'<div class="fc-cards">{"".join(map(_card, found))}</div>'


def _card(card: Card) -> str:
    note = f'<span class="fc-small fc-muted">{shown_as_is(card.note)}</span>' if card.note else ""
    label = f'<span class="fc-small">{shown_as_is(card.label)}</span>'
    return f'<div class="fc-card">{label}<b>{shown_as_is(card.value)}</b>{note}</div>'


def table(columns: Mapping[str, Sequence[str]], words: Iterable[str], pale: Sequence[bool] = (), note: str = "") -> str:
    """Return a table of cells that are HTML already.

    Parameters
    ----------
    columns
        The cells of each column, by its name, which is not HTML yet.
    words
        Columns that stand at the left.
    pale
        Of each row, whether it is of less interest.
    note
        What stands below, as a text.
    """
    words = set(words)
    kinds = {name: ' class="fc-word"' if name in words else "" for name in columns}
    head = "".join(f"<th{kinds[name]}>{shown_as_is(name)}</th>" for name in columns)
    rows: list[str] = []
    for i, cells in enumerate(zip(*columns.values(), strict=True)):
        kind = ' class="fc-base"' if i < len(pale) and pale[i] else ""
        cells = (f"<td{kinds[name]}>{cell}</td>" for name, cell in zip(columns, cells, strict=True))
        rows.append(f"<tr{kind}>{''.join(cells)}</tr>")
    below = f'<div class="fc-small fc-muted">{shown_as_is(note)}</div>' if note else ""
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="fc-scroll"><table class="fc-table">{head}<tbody>{"".join(rows)}</tbody></table></div>{below}'


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells that are HTML already, without names of the columns."""
    written = ("".join(f'<td class="fc-word">{cell}</td>' for cell in cells) for cells in rows)
    return f'<table class="fc-table">{"".join(f"<tr>{row}</tr>" for row in written)}</table>'


def folded(title: str, inside: str) -> str:
    """Return something that is seen once its title is clicked."""
    return f"<details><summary>{shown_as_is(title)}</summary>{inside}</details>"


def tree(view: Tree) -> str:
    """Return a tree as for the terminal as nested lists; what it says below a node in smaller letters."""
    return f'<ul class="fc-tree">{_branch(view)}</ul>'


def _branch(view: Tree) -> str:
    name, *below = view.label.split("\n") if isinstance(view.label, Text) else [Text(str(view.label))]
    end = min((span.start for span in name.spans), default=0)
    colour = "" if view.children else f' style="color:{SEEN["accent"]}"'
    label = f"<b{colour}>{shown_as_is(name.plain[:end])}</b>{shown_as_is(name.plain[end:])}"
    label += "".join(f'<div class="fc-small fc-muted">{shown_as_is(line.plain)}</div>' for line in below)
    inside = f"<ul>{''.join(map(_branch, view.children))}</ul>" if view.children else ""
    return f"<li>{label}{inside}</li>"


def histogram(counts: Sequence[float], width: int = 6, height: int = 16) -> str:
    """Return bars, the highest as high as the line."""
    most = max(counts, default=0) or 1
    heights = [round(height * count / most, 1) for count in counts]
    bars = "".join(f"M{width * i} {height}v-{tall:g}h{width - 1}v{tall:g}z" for i, tall in enumerate(heights) if tall)
    return _svg(width * len(counts), height, f'<path d="{bars}" fill="{SEEN["accent"]}"/>')


def interval(low: float, middle: float, high: float, values: Iterable[float]) -> str:
    """Return a mean with its interval and what it is the mean of, all in [0, 1], as a line with dots."""
    at = [round(6 + 128 * x, 1) for x in (low, middle, high)]
    drawn = f'<path d="M{at[0]:g} 8H{at[2]:g}" stroke="{SEEN["accent"]}" stroke-width="2"/>' if low < high else ""
    drawn += "".join(
        f'<circle cx="{6 + 128 * x:.1f}" cy="8" r="2.5" fill="{SEEN["accent"]}" fill-opacity=".45"/>' for x in values
    )
    return _svg(140, 16, f'{drawn}<circle cx="{at[1]:g}" cy="8" r="4.5" fill="{SEEN["accent"]}"/>')


def _svg(width: int, height: int, inside: str) -> str:
    return f'<svg width="{width}" height="{height}" aria-hidden="true" style="vertical-align:middle">{inside}</svg>'
