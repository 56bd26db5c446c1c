"""Conversion of pictures (descriptions of figures) into Plotly's JSON for HTML pages.

The result consists of plain dictionaries and not of Plotly's own objects, which are slow to create:
the page of a run in progress is built often.
"""

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
    Panel,
    Picture,
    Rule,
    label_rows,
)

Figure = dict[str, Any]
"""Figure in Plotly's JSON, with the keys ``data`` and ``layout``.

Colours are names such as ``@ink``, which the script of the page replaces by colours.
"""

LONGEST = 500
"""Largest number of points of a line; of a longer line, a regular sample of points is drawn."""

LETTER = 0.024
"""Width of a letter in a label above a figure, as a share of the figure's width on a phone."""

LABEL_HEIGHT = 13
"""Height of a row of labels above a figure, in pixels."""

MOST_NAMES = 12
"""Largest number of names of clients that are written horizontally below a figure."""

MOST_CHARACTERS = 120
"""Largest number of characters of these names, with a gap of two characters after each."""

GAP = 0.09
"""Gap between two panels, as a share of the height of a figure."""

SCALE = [[0, "@low2"], [0.25, "@low1"], [0.5, "@middle"], [0.75, "@high1"], [1, "@high2"]]
"""Colour scale of heat maps."""

HIDDEN = {"visible": False, "type": "category", "constrain": "domain"}
"""Axis of a heat map, which is invisible: names of clients are shown only at the pointer."""

TRANSPARENT = "rgba(0,0,0,0)"

FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"


def draw(picture: Picture) -> Figure:
    """Convert a picture (description of a figure) into a Plotly figure."""
    traces: list[Figure] = []
    axes: dict[str, Figure] = {}
    shapes = [_vertical_line(x) for x in picture.uprights]
    labels = label_rows(picture, LETTER)
    notes: list[Figure] = []
    for x, text, row in labels:
        shift = 1 + LABEL_HEIGHT * row
        notes.append(note(text, x, 1, xref="x", yanchor="bottom", yshift=shift))
    domains = _place_panels(picture.panels)
    for i, (panel, domain) in enumerate(zip(picture.panels, domains, strict=True), start=1):
        name = "y" if i == 1 else f"y{i}"
        axes[name] = _convert_axis(panel.y)
        if len(picture.panels) > 1:
            axes[name]["domain"] = domain
        for mark in panel.marks:
            traces += [trace | {"yaxis": name} for trace in _convert_mark(mark)]
            shapes += _convert_to_shapes(mark, name)
            if isinstance(mark, Rule) and mark.label:
                notes.append(_label_rule(mark, panel.y, name))
    n_label_rows = 1 + max((row for *_, row in labels), default=-1)
    margin = {"l": 60, "r": 16, "t": 16 + LABEL_HEIGHT * n_label_rows, "b": 44}
    x_axis = _convert_axis(picture.x) | {"anchor": list(axes)[-1]}
    heat_map = _find_heat_map(picture)
    if heat_map is not None:
        margin = {"l": 8, "r": 56, "t": 16, "b": 36}
        x_axis = HIDDEN | {"range": picture.x.range}
        axes = {"y": HIDDEN | {"range": picture.panels[0].y.range, "scaleanchor": "x"}}
        notes += _write_names_below(picture, len(heat_map.names))
    layout: Figure = {"margin": margin, "xaxis": x_axis}
    for name, axis in axes.items():
        layout[f"yaxis{name[1:]}"] = axis
    if any(trace["type"] == "bar" for trace in traces):
        layout["barmode"] = "stack"
    return figure(traces, picture.height, shapes=shapes, annotations=notes, **layout)


def _label_rule(rule: Rule, axis: Axis, axis_name: str) -> Figure:
    """Return the label of a horizontal line as a Plotly annotation above its right end.

    Parameters
    ----------
    rule
        The horizontal line.
    axis
        The y axis of its panel.
    axis_name
        Plotly's name of this axis.
    """
    # Plotly expects the position of an annotation on a logarithmic axis as a logarithm.
    if axis.log:
        y = log10(max(rule.y, 1e-12))
    else:
        y = rule.y
    return note(rule.label, 1, y, yref=axis_name, xanchor="right", yanchor="bottom")


def _place_panels(panels: Sequence[Panel]) -> list[list[float]]:
    """Return the lower and upper end of each panel, as shares of the height of the figure.

    Panels are placed from top to bottom.
    """
    height = (1 - GAP * (len(panels) - 1)) / sum(panel.share for panel in panels)
    domains: list[list[float]] = []
    top = 1.0
    for panel in panels:
        bottom = top - panel.share * height
        domains.append([max(0.0, bottom), top])
        top = bottom - GAP
    return domains


def _find_heat_map(picture: Picture) -> HeatMap | None:
    """Return the heat map in a picture; None if it has no heat map."""
    for panel in picture.panels:
        for mark in panel.marks:
            if isinstance(mark, HeatMap):
                return mark
    return None


def figure(traces: Sequence[Figure], height: int, **layout: Any) -> Figure:
    """Return a Plotly figure in the common style.

    Parameters
    ----------
    traces
        Plotly's traces.
    height
        Height in pixels.
    **layout
        Entries of Plotly's layout, in addition to the common entries or in place of them.
    """
    common: Figure = {
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 16, "b": 44},
        "paper_bgcolor": TRANSPARENT,
        "plot_bgcolor": TRANSPARENT,
        "font": {"color": "@ink", "size": 12.5, "family": FONT},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "@panel",
            "bordercolor": "@muted",
            "font": {"color": "@ink"},
            "align": "left",
        },
    }
    return {"data": list(traces), "layout": common | layout}


def note(text: str, x: float, y: float, **changes: Any) -> Figure:
    """Return a Plotly annotation: a small text, by default placed at shares of the figure.

    Parameters
    ----------
    text
        The text.
    x, y
        Position, by default as shares of the figure's width and height.
    **changes
        Entries of the annotation that replace the default entries.
    """
    annotation: Figure = {
        "text": escaped(text),
        "x": x,
        "y": y,
        "showarrow": False,
        "font": {"size": 11, "color": "@muted"},
        "xref": "paper",
        "yref": "paper",
    }
    return annotation | changes


def escaped(text: str) -> str:
    """Escape a text for Plotly, which interprets some tags and ``%{`` in labels and hover texts."""
    html = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return html.replace("%{", "% {")


def _convert_axis(axis: Axis) -> Figure:
    """Convert the axis of a picture into a Plotly axis with a faint grid."""
    result: Figure = {
        "title": {"text": escaped(axis.title), "standoff": 8},
        "showgrid": axis.grid,
        "gridcolor": "@faint",
        "linecolor": "@muted",
        "zeroline": False,
        "automargin": True,
        "fixedrange": False,
    }
    if axis.form != "number":
        result["tickformat"] = {"share": ".1~%", "whole": "d"}[axis.form]
    if axis.range is not None:
        result["range"] = list(axis.range)
        if axis.form == "whole":
            result["nticks"] = 12
            if axis.range[1] < FEW_ROUNDS + 1:
                result |= {"tickmode": "linear", "tick0": 0, "dtick": 1}
    if axis.from_zero:
        result["rangemode"] = "tozero"
    if axis.log:
        # Without a format, Plotly writes 0.005 as a small 5; with more ticks, it labels them
        # 1, 2, ..., 9 without the power of ten.
        result.setdefault("tickformat", "~g")
        result |= {"type": "log", "nticks": 3}
    if axis.ticks is not None:
        names = [escaped(name) for name in axis.ticks.values()]
        result |= {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": names}
        characters = sum(len(name) + 2 for name in names)
        is_crowded = len(names) > MOST_NAMES or characters > MOST_CHARACTERS
        result["tickangle"] = -90 if is_crowded else 0
    return result


def _convert_mark(mark: Mark) -> list[Figure]:
    """Return the Plotly traces of a mark; empty for rules and boxes, which are shapes in Plotly."""
    match mark:
        case Line():
            return [_convert_line(mark)]
        case Dots():
            return [_convert_dots(mark)]
        case Bars():
            bars = {"type": "bar", "marker": {"color": mark.colour}}
            return [bars | {"x": list(mark.x), "y": list(mark.y)} | _convert_hover(mark)]
        case Band():
            return _convert_band(mark)
        case HeatMap():
            return [_convert_heat_map(mark)]
        case _:
            return []


def _convert_line(mark: Line) -> Figure:
    """Convert a line into a Plotly trace with the text that is shown at the mouse pointer."""
    trace = _line_trace(mark)
    if mark.dots:
        trace |= {"mode": "lines+markers", "marker": {"size": 5, "color": mark.colour}}
    return trace | _convert_hover(mark)


def _line_trace(mark: Line) -> Figure:
    """Convert a line into a Plotly trace without the text that is shown at the mouse pointer.

    Of a long line without gaps, only a regular sample of points is drawn.
    """
    n = len(mark.x)
    step = max(1, -(-n // LONGEST))
    if None in mark.x:
        step = 1  # a gap must not be skipped
    kept = []
    if n:
        kept = sorted({*range(0, n, step), n - 1})
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [mark.x[i] for i in kept],
        "y": [mark.y[i] for i in kept],
        "line": {
            "color": mark.colour,
            "width": mark.width,
            "dash": mark.dash,
            "shape": "hv" if mark.steps else "linear",
        },
    }


def _convert_dots(mark: Dots) -> Figure:
    """Convert points into a Plotly trace of markers."""
    marker: Figure = {"size": mark.size, "symbol": mark.symbol, "opacity": 1, "color": mark.colour}
    if mark.ring:
        marker |= {"color": TRANSPARENT, "line": {"color": mark.colour, "width": 1.5}}
    trace: Figure = {
        "type": "scatter",
        "mode": "markers",
        "marker": marker,
        "x": list(mark.x),
        "y": list(mark.y),
        "text": [escaped(text) for text in mark.texts],
    }
    return trace | _convert_hover(mark)


def _convert_band(mark: Band) -> list[Figure]:
    """Convert a band into two Plotly traces, its lower and its upper edge.

    Plotly fills the area from the first trace to the second.
    """
    low = _line_trace(Line(x=mark.x, y=mark.low, colour=mark.colour, width=0))
    high = _line_trace(Line(x=mark.x, y=mark.high, colour=mark.colour, width=0))
    high |= {"fill": "tonexty", "fillcolor": mark.colour}
    return [low | {"hoverinfo": "skip"}, high | {"hoverinfo": "skip"}]


def _convert_heat_map(mark: HeatMap) -> Figure:
    """Convert a heat map into a Plotly trace."""
    names = [escaped(name) for name in mark.names]
    return {
        "type": "heatmap",
        "z": [_round_row(row) for row in mark.values],
        "x": names,
        "y": names,
        "zmin": -mark.limit,
        "zmax": mark.limit,
        "colorscale": SCALE,
        "colorbar": {
            "title": {"text": mark.title, "side": "top"},
            "thickness": 12,
            "outlinewidth": 0,
            "len": 0.9,
        },
        "hovertemplate": "%{x} and %{y}<br>similarity %{z:.2f}<extra></extra>",
    }


def _round_row(row: Sequence[float]) -> list[float | None]:
    """Return the values of a matrix row with two decimals; None for NaN, which JSON lacks."""
    return [_round_value(value) for value in row]


def _round_value(value: float) -> float | None:
    """Return a value with two decimals; None for NaN, which JSON lacks."""
    if np.isnan(value):
        return None
    return round(float(value), 2)


def _convert_hover(mark: Marked) -> Figure:
    """Return the entries of a Plotly trace for its name and for the text at the mouse pointer."""
    name = escaped(mark.name)
    if not mark.hover:
        return {"name": name, "hoverinfo": "skip"}
    text = mark.hover.replace("{name}", name)
    return {"name": name, "hovertemplate": f"{text}<extra></extra>"}


def _convert_to_shapes(mark: Mark, axis: str) -> list[Figure]:
    """Return the Plotly shapes of a rule or box; empty for all other marks.

    Parameters
    ----------
    mark
        Element of a picture.
    axis
        Plotly's name of the y axis.
    """
    match mark:
        case Rule():
            dash = "dash" if mark.dashed else "solid"
            line = {"color": "@ink", "width": 1, "dash": dash}
            return [
                _make_shape("line", (0, 1), (mark.y, mark.y), xref="paper", yref=axis, line=line)
            ]
        case Box() if mark.x0 == mark.x1 or mark.y0 == mark.y1:
            xs = (mark.x0, mark.x1)
            ys = (mark.y0, mark.y1)
            line = {"color": mark.colour, "width": 2}
            return [_make_shape("line", xs, ys, xref="x", yref=axis, line=line)]
        case Box():
            xs = (mark.x0, mark.x1)
            ys = (mark.y0, mark.y1)
            rectangle = _make_shape("rect", xs, ys, xref="x", yref=axis, line={"width": 0})
            # The text is dark on light and on dark pages, as the colours of boxes are always pale.
            font = {"color": "#222222", "size": 11}
            label = {"text": escaped(mark.label), "font": font}
            return [rectangle | {"fillcolor": mark.colour, "label": label}]
        case _:
            return []


def _make_shape(kind: str, xs: tuple[float, float], ys: tuple[float, float], **look: Any) -> Figure:
    """Return a Plotly shape (line or rectangle) between two corners."""
    return {"type": kind, "x0": xs[0], "x1": xs[1], "y0": ys[0], "y1": ys[1], **look}


def _vertical_line(x: float) -> Figure:
    """Return a dotted vertical line through a whole figure as a Plotly shape."""
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return _make_shape("line", (x, x), (0, 1), xref="x", yref="paper", layer="below", line=line)


def _write_names_below(picture: Picture, n: int) -> list[Figure]:
    """Return the tick labels and the axis title below a heat map as Plotly annotations.

    The tick labels are the names of the clusters. The ticks of the Plotly axis cannot have them, as
    they belong to the clients, whose names are the categories of the axis.

    Parameters
    ----------
    picture
        Picture with the heat map.
    n
        Number of rows of the heat map.
    """
    place = {"xref": "x", "yref": "y", "yanchor": "top"}
    bottom = n - 0.5
    names = [
        note(name, x, bottom, yshift=-2, **place) for x, name in (picture.x.ticks or {}).items()
    ]
    title = note(picture.x.title, n / 2, bottom, yshift=-18, **place)
    return [*names, title]
