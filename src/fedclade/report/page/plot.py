"""Pictures as Plotly's JSON, from plain values: those of a run in progress are made often, and fast."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import Any

import numpy as np

from fedclade.report.picture import (
    FEW_ROUNDS,
    Axis,
    Band,
    Bars,
    Box,
    Dots,
    HeatMap,
    Line,
    Mark,
    Marked,
    Picture,
    Rule,
    label_rows,
)

Figure = dict[str, Any]
"""A figure as Plotly's JSON has it, ``data`` and ``layout``, with colours by name."""

LONGEST = 500
"""So many points of a line are drawn; of more, every so many."""

LETTER, LABEL_HEIGHT = 0.024, 13
"""Width of a letter above a figure as a share of a phone's, and height of a row of labels in pixels."""

GAP = 0.09
"""Between two panels, as a share of the height."""

SCALE = [[0, "@low2"], [0.25, "@low1"], [0.5, "@middle"], [0.75, "@high1"], [1, "@high2"]]

HIDDEN = {"visible": False, "type": "category", "constrain": "domain"}
"""An axis of a heat map: its categories are the names of clients, which are shown at the pointer alone."""


def draw(picture: Picture) -> Figure:
    """Return a picture as Plotly draws it."""
    traces: list[Figure] = []
    shapes = [_upright(x) for x in picture.uprights]
    labels = label_rows(picture, LETTER)
    notes = [note(text, x, 1, xref="x", yanchor="bottom", yshift=1 + LABEL_HEIGHT * row) for x, text, row in labels]
    axes: dict[str, Figure] = {}
    top, heights = 1.0, (1 - GAP * (len(picture.panels) - 1)) / sum(panel.share for panel in picture.panels)
    for i, panel in enumerate(picture.panels, start=1):
        name, bottom = "y" if i == 1 else f"y{i}", top - panel.share * heights
        axes[name] = _axis(panel.y) | ({"domain": [max(0.0, bottom), top]} if len(picture.panels) > 1 else {})
        top = bottom - GAP
        for mark in panel.marks:
            traces += [trace | {"yaxis": name} for trace in _traces(mark)]
            shapes += _shapes(mark, name)
            if isinstance(mark, Rule) and mark.label:
                y = log10(max(mark.y, 1e-12)) if panel.y.log else mark.y  # as annotations want it
                notes.append(note(mark.label, 1, y, yref=name, xanchor="right", yanchor="bottom"))
    room = LABEL_HEIGHT * (1 + max((row for *_, row in labels), default=-1))
    x_axis = _axis(picture.x) | {"anchor": list(axes)[-1]}
    layout: Figure = {"margin": {"l": 60, "r": 16, "t": 16 + room, "b": 44}}
    if heat := next((mark for panel in picture.panels for mark in panel.marks if isinstance(mark, HeatMap)), None):
        x_axis = HIDDEN | {"range": picture.x.range}
        axes = {"y": HIDDEN | {"range": picture.panels[0].y.range, "scaleanchor": "x"}}
        layout["margin"] = {"l": 8, "r": 56, "t": 16, "b": 36}
        notes += _names_below(picture, len(heat.names))
    layout |= {"xaxis": x_axis, **{f"yaxis{name[1:]}": axis for name, axis in axes.items()}}
    if any(trace["type"] == "bar" for trace in traces):
        layout["barmode"] = "stack"
    return figure(traces, picture.height, shapes=shapes, annotations=notes, **layout)


def figure(traces: Sequence[Figure], height: int, **layout: Any) -> Figure:
    """Return a figure of so many pixels with the look that all share."""
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


def note(text: str, x: float, y: float, **changes: Any) -> Figure:
    """Return a small text in a figure as it is, in shares of its width and height if nothing else is said."""
    look = {"showarrow": False, "font": {"size": 11, "color": "@muted"}, "xref": "paper", "yref": "paper"}
    return {"text": escaped(text), "x": x, "y": y, **look, **changes}


def escaped(text: str) -> str:
    """Return a text that Plotly shows as it is, in a label or a hover: it takes some tags for itself, and ``%{``."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")


def _axis(axis: Axis) -> Figure:
    """Return an axis with a faint grid, and a title that is shown as it is."""
    drawn: Figure = {"title": {"text": escaped(axis.title), "standoff": 8}, "showgrid": axis.grid}
    drawn |= {"gridcolor": "@faint", "linecolor": "@muted", "zeroline": False, "automargin": True, "fixedrange": False}
    if axis.form != "number":
        drawn["tickformat"] = {"share": ".1~%", "whole": "d"}[axis.form]
    if axis.range is not None:
        drawn["range"] = list(axis.range)
        if axis.form == "whole":
            few = axis.range[1] < FEW_ROUNDS + 1
            drawn |= {"nticks": 12} | ({"tickmode": "linear", "tick0": 0, "dtick": 1} if few else {})
    if axis.from_zero:
        drawn["rangemode"] = "tozero"
    if axis.log:
        # Without a format Plotly writes 0.005 as a small 5; with more ticks it writes all of 1, 2, ... 9.
        drawn |= {"tickformat": "~g"} | drawn | {"type": "log", "nticks": 3}
    if axis.ticks is not None:
        names = [escaped(name) for name in axis.ticks.values()]
        drawn |= {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": names}
        drawn["tickangle"] = -90 if len(names) > 12 else 0
    return drawn


def _traces(mark: Mark) -> list[Figure]:
    match mark:
        case Line():
            dots = {"mode": "lines+markers", "marker": {"size": 5, "color": mark.colour}} if mark.dots else {}
            return [_line(mark) | dots | _hover(mark)]
        case Dots():
            colour = {"color": "rgba(0,0,0,0)", "line": {"color": mark.colour, "width": 1.5}}
            marker = {"size": mark.size, "symbol": mark.symbol, "opacity": 1, "color": mark.colour}
            marker |= colour if mark.ring else {}
            points = {"x": list(mark.x), "y": list(mark.y), "text": [escaped(text) for text in mark.texts]}
            return [{"type": "scatter", "mode": "markers", "marker": marker} | points | _hover(mark)]
        case Bars():
            points = {"x": list(mark.x), "y": list(mark.y)}
            return [{"type": "bar", "marker": {"color": mark.colour}} | points | _hover(mark)]
        case Band():
            edges = [_line(Line(x=mark.x, y=y, colour=mark.colour, width=0)) for y in (mark.low, mark.high)]
            edges[1] |= {"fill": "tonexty", "fillcolor": f"{mark.colour}/0.25"}
            return [edge | {"hoverinfo": "skip"} for edge in edges]
        case HeatMap():
            names = [escaped(name) for name in mark.names]
            return [
                {
                    "type": "heatmap",
                    "z": [[None if np.isnan(v) else round(float(v), 2) for v in row] for row in mark.values],
                    "x": names,
                    "y": names,
                    "zmin": -mark.limit,
                    "zmax": mark.limit,
                    "colorscale": SCALE,
                    "colorbar": {
                        "title": {"text": mark.title, "side": "top"},
                        **{"thickness": 12, "outlinewidth": 0, "len": 0.9},
                    },
                    "hovertemplate": "%{x} and %{y}<br>similarity %{z:.2f}<extra></extra>",
                }
            ]
        case _:
            return []


def _line(mark: Line) -> Figure:
    """Return a line; a long one without gaps with fewer points."""
    n = len(mark.x)
    step = 1 if None in mark.x else max(1, -(-n // LONGEST))
    kept = sorted({*range(0, n, step), n - 1}) if n else []
    line = {"color": mark.colour, "width": mark.width, "dash": mark.dash}
    line["shape"] = "hv" if mark.steps else "linear"
    points = {"x": [mark.x[i] for i in kept], "y": [mark.y[i] for i in kept]}
    return {"type": "scatter", "mode": "lines", **points, "line": line}


def _hover(mark: Marked) -> Figure:
    """Return the name of a mark, and what is shown at the pointer."""
    name = escaped(mark.name)
    shown = {"hovertemplate": f"{mark.hover.replace('{name}', name)}<extra></extra>"} if mark.hover else {}
    return {"name": name, **(shown or {"hoverinfo": "skip"})}


def _shapes(mark: Mark, axis: str) -> list[Figure]:
    match mark:
        case Rule():
            place = {"xref": "paper", "yref": axis, "x0": 0, "x1": 1, "y0": mark.y, "y1": mark.y}
            dash = "dash" if mark.dashed else "solid"
            return [{"type": "line", **place, "line": {"color": "@ink", "width": 1, "dash": dash}}]
        case Box():
            place = {"x0": mark.x0, "x1": mark.x1, "y0": mark.y0, "y1": mark.y1, "xref": "x", "yref": axis}
            if mark.x0 == mark.x1 or mark.y0 == mark.y1:
                return [{"type": "line", "line": {"color": mark.colour, "width": 2}, **place}]
            label = {"label": {"text": escaped(mark.label), "font": {"color": "#222222", "size": 11}}}
            return [{"type": "rect", "fillcolor": mark.colour, "line": {"width": 0}, **place} | label]
        case _:
            return []


def _upright(x: float) -> Figure:
    place = {"xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "layer": "below"}
    return {"type": "line", **place, "line": {"color": "@muted", "width": 1, "dash": "dot"}}


def _names_below(picture: Picture, n: int) -> list[Figure]:
    """Return the names of places below a heat map: its axis has the names of clients."""
    place = {"xref": "x", "yref": "y", "yanchor": "top"}
    names = [note(name, x, n - 0.5, yshift=-2, **place) for x, name in (picture.x.ticks or {}).items()]
    return [*names, note(picture.x.title, n / 2, n - 0.5, yshift=-18, **place)]
