"""Pictures as Plotly's own figures, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedclade.core import import_extra
from fedclade.report import queries
from fedclade.report.colours import palette
from fedclade.report.curves import score_picture
from fedclade.report.estimates import BASELINES, ComparisonRow, write_with_interval
from fedclade.report.page.plot import draw, escaped
from fedclade.report.picture import Axis, Dots, LegendEntry, Line, Panel, Picture
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TITLE = 60
"""Pixels for a title of two lines."""


def plot_of(run: Run) -> Figure:
    """Return the score of every cluster over the rounds; see `score_picture`."""
    return figure_of(score_picture(RunView(run)), queries.heading(run))


def comparison_plot(score: Score, rows: Sequence[ComparisonRow], title: str, data: str) -> Figure:
    """Return the mean score of every configuration with its interval, and every run as a small dot."""
    marks: list[Line | Dots] = []
    for place, row in enumerate(rows):
        if (estimate := row.scores[score.name]) is None:
            continue
        colour = "@muted" if row.algorithm in BASELINES else "@accent"
        hover = f"{{name}}<br>{score.label} {score.hover('x')}"
        if half := estimate.half_width:
            ends = [estimate.mean - half, estimate.mean + half]
            marks.append(Line(x=ends, y=[place, place], colour=colour, width=2.5))
        seeds = [f"seed {seed}" for seed in row.seeds] if len(row.seeds) == len(estimate.values) else []
        if len(estimate.values) > 1:
            below = [place + 0.2] * len(estimate.values)
            dots = Dots(x=estimate.values, y=below, colour=f"{colour}/0.5", size=6, name=row.label, texts=seeds)
            marks.append(replace(dots, hover=f"{hover} (%{{text}})" if seeds else hover))
        text = escaped(write_with_interval(score, estimate))
        mean = f"{{name}}<br>{score.label} {text}"
        marks.append(Dots(x=[estimate.mean], y=[place], colour=colour, size=12, name=row.label, hover=mean))
    names: dict[float, str] = {place: row.label for place, row in enumerate(rows)}
    y_axis = Axis(ticks=names, range=(len(rows) - 0.5, -0.5), grid=False)
    x_axis = score.axis("mean test")
    if not x_axis.log and (ends := [x for mark in marks for x in mark.x if x is not None]):
        room = 0.06 * (max(ends) - min(ends)) or 0.02
        x_axis = replace(x_axis, range=(min(ends) - room, max(ends) + room))
    picture = Picture(title, [Panel(marks, y_axis)], x_axis, 150 + 44 * len(rows))
    figure = figure_of(picture, f"{data}; lines: 95 % intervals over seeds" if data else "")
    return figure.update_yaxes(tickangle=0)


def figure_of(picture: Picture, subtitle: str) -> Figure:
    """Return a picture as Plotly's figure, with a title and a legend.

    Its colours are those of a light page; of a dark one where Plotly's default template is a dark one.

    Raises
    ------
    MissingExtraError
        If plotly is not installed.
    """
    purpose = "a figure in a notebook"
    objects = import_extra("plotly.graph_objects", "plotly", "notebook", purpose)
    night = "dark" in str(import_extra("plotly.io", "plotly", "notebook", purpose).templates.default)
    drawn = draw(picture)
    layout: dict[str, Any] = drawn["layout"]
    layout["margin"] = {**layout["margin"], "t": layout["margin"]["t"] + TITLE}
    layout["height"] += TITLE
    words = f"{escaped(picture.title)}<br><sub>{escaped(subtitle)}</sub>"
    layout["title"] = {"text": words, "x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top"}
    layout["title"] |= {"pad": {"t": 18}, "font": {"size": 16}}
    layout |= {"paper_bgcolor": "@panel", "plot_bgcolor": "@panel", "template": "none"}
    traces = [trace | {"showlegend": False} for trace in drawn["data"]]
    if picture.legend:
        layout["showlegend"] = True
        traces += [_entry(entry) for entry in picture.legend]
    colours = palette(night=night)
    return objects.Figure(coloured(traces, colours), coloured(layout, colours))


def coloured(value: Any, colours: Mapping[str, str]) -> Any:
    """Return a figure with colours in place of their names, ``@ink`` or ``@accent/0.25`` with an opacity.

    >>> coloured({"color": ["@ink", "@ink/0.5"]}, {"ink": "#102030"})
    {'color': ['#102030', 'rgba(16,32,48,0.5)']}
    """
    if isinstance(value, Mapping):
        return {key: coloured(entry, colours) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [coloured(entry, colours) for entry in value]
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    name, _, opacity = value[1:].partition("/")
    if name not in colours:  # a name of something else, that begins like one
        return value
    if not opacity:
        return colours[name]
    channels = (str(int(colours[name][at : at + 2], 16)) for at in (1, 3, 5))
    return f"rgba({','.join(channels)},{opacity})"


def _entry(entry: LegendEntry) -> dict[str, Any]:
    """Return a trace that is nowhere to be seen but in the legend."""
    line = {"color": entry.colour, "width": 2, "dash": entry.dash}
    shape = {"type": "scatter", "x": [None], "y": [None], "mode": "lines", "line": line}
    return {**shape, "name": escaped(entry.label), "hoverinfo": "skip"}
