"""Figures as Plotly's JSON has them, from plain values: those of a run in progress are made often, and fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedclade.report.facts import Series
from fedclade.report.page.section import Figure

LONGEST = 500
"""So many points of a line are drawn; of more, every so many."""

FEW = 12
"""Up to so many rounds every one has a tick and a dot."""

LABEL_ROWS = 3
"""So many rows of labels may stand above a figure."""

LABEL_HEIGHT = 13
"""Pixels of each."""


def figure(traces: Sequence[Mapping[str, Any]], height: int, **layout: Any) -> Figure:
    """Return a figure with the look that all share.

    Parameters
    ----------
    traces
        What is drawn.
    height
        In pixels; the width is the page's.
    **layout
        Whatever differs from the common layout.
    """
    common = {
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 16, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "@ink", "size": 12.5, "family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "@panel", "bordercolor": "@muted", "font": {"color": "@ink"}, "align": "left"},
    }
    return {"data": list(traces), "layout": common | layout}


def axis(title: str = "", **changes: Any) -> dict[str, Any]:
    """Return an axis with a faint grid, and a title that is shown as it is."""
    look = {"gridcolor": "@faint", "linecolor": "@muted", "zeroline": False, "automargin": True, "fixedrange": False}
    return {"title": {"text": escaped(title), "standoff": 8}, **look, **changes}


def shares(title: str, **changes: Any) -> dict[str, Any]:
    """Return an axis of shares, written in per cent."""
    return axis(title, tickformat=".0%", **changes)


def rounds_axis(rounds: int, **changes: Any) -> dict[str, Any]:
    """Return an axis of rounds, in whole numbers from 1."""
    few = rounds <= FEW
    margin = 0.5 if few else 0.012 * rounds
    whole = {"tickmode": "linear", "tick0": 0, "dtick": 1} if few else {}
    return axis("round", range=[1 - margin, rounds + margin], tickformat="d", nticks=12, **whole, **changes)


def line(x: Sequence[float], y: Sequence[float | None], colour: str, **look: Any) -> dict[str, Any]:
    """Return a line; a long one with fewer points.

    Parameters
    ----------
    x, y
        Its points.
    colour
        Its colour.
    **look
        ``dashed``, ``width``, ``dots``, ``shape``, and whatever else Plotly's scatter takes.
    """
    dash, width = "dash" if look.pop("dashed", False) else "solid", look.pop("width", 2)
    step = -(-len(x) // LONGEST)
    kept = sorted({*range(0, len(x), max(1, step)), len(x) - 1}) if x else []
    shape = {"shape": look.pop("shape", "linear")}
    dots = {"mode": "lines+markers", "marker": {"size": 5, "color": colour}} if look.pop("dots", False) else {}
    return {
        "type": "scatter",
        "mode": "lines",
        **dots,
        "x": [x[i] for i in kept],
        "y": [y[i] for i in kept],
        "line": {"color": colour, "width": width, "dash": dash, **shape},
        **look,
    }


def course(values: Series, colour: str, hover: str, **look: Any) -> dict[str, Any]:
    """Return the line of a course over the rounds."""
    return line(values.rounds, values.values, colour, hovertemplate=f"{hover}<extra></extra>", **look)


def upright(x: float, colour: str = "@muted", dash: str = "dot") -> dict[str, Any]:
    """Return a vertical line through the whole figure."""
    return {
        **{"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "layer": "below"},
        "line": {"color": colour, "width": 1, "dash": dash},
    }


def level(y: float, axis: str = "y", colour: str = "@ink", dash: str = "dash") -> dict[str, Any]:
    """Return a horizontal line through a panel."""
    return {
        **{"type": "line", "xref": "paper", "yref": axis, "x0": 0, "x1": 1, "y0": y, "y1": y},
        "line": {"color": colour, "width": 1, "dash": dash},
    }


def note(text: str, x: float, y: float, **changes: Any) -> dict[str, Any]:
    """Return a small text in a figure as it is, in shares of its width and height if nothing else is said."""
    look = {"showarrow": False, "font": {"size": 11, "color": "@muted"}, "xref": "paper", "yref": "paper"}
    return {"text": escaped(text), "x": x, "y": y, **look, **changes}


def split_marks(splits: Mapping[int, Sequence[int]], rounds: int) -> tuple[list[Any], list[Any], int]:
    """Return a line at every split, a label above it, and the pixels that the labels take.

    Labels stand in rows so that they do not overlap on a phone.
    Where splits crowd, a line without a label still tells when.
    """
    free_from = [0.0] * LABEL_ROWS
    labels: list[Any] = []
    for number, nodes in splits.items():
        text = "split " + (", ".join(map(str, nodes)) if len(nodes) <= 2 else f"{len(nodes)} nodes")
        place, width = number / rounds, 0.024 * len(text)
        row = next((row for row, free in enumerate(free_from) if place - width / 2 >= free or free == 0.0), None)
        if row is not None:
            free_from[row] = place + width / 2
            shift = {"xref": "x", "yanchor": "bottom", "yshift": 1 + LABEL_HEIGHT * row}
            labels.append(note(text, number, 1, **shift))
    return [upright(number) for number in splits], labels, LABEL_HEIGHT * sum(free > 0 for free in free_from)


def escaped(text: str) -> str:
    """Return a text that Plotly shows as it is, in a label or a hover: it takes some tags for itself, and ``%{``."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")
