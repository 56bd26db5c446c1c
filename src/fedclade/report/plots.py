"""Plotly figures of runs and comparisons for notebooks."""

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
"""Height of a figure's title of two lines, in pixels."""


def plot_of(run: Run) -> Figure:
    """Return a Plotly figure of the score of every cluster over the rounds; see `score_picture`.

    Raises
    ------
    MissingExtraError
        If plotly is not installed.
    """
    return figure_of(score_picture(RunView(run)), queries.heading(run))


def comparison_plot(score: Score, rows: Sequence[ComparisonRow], title: str, data: str) -> Figure:
    """Return a Plotly figure of each mean score with its interval, and of each run as a small dot.

    Parameters
    ----------
    score
        Metric that is drawn.
    rows
        Results of each configuration, drawn from top to bottom.
    title, data
        Title of the figure, and description of the data for the subtitle.

    Raises
    ------
    MissingExtraError
        If plotly is not installed.
    """
    marks: list[Line | Dots] = []
    for place, row in enumerate(rows):
        marks += _draw_row(score, row, place)
    names: dict[float, str] = {place: row.label for place, row in enumerate(rows)}
    y_axis = Axis(ticks=names, range=(len(rows) - 0.5, -0.5), grid=False)
    x_axis = score.axis("mean test")
    ends: list[float] = []
    for mark in marks:
        ends += [x for x in mark.x if x is not None]
    if ends and not x_axis.log:
        margin = 0.06 * (max(ends) - min(ends)) or 0.02
        x_axis = replace(x_axis, range=(min(ends) - margin, max(ends) + margin))
    picture = Picture(title, [Panel(marks, y_axis)], x_axis, height=150 + 44 * len(rows))
    subtitle = ""
    if data:
        subtitle = f"{data}; lines: 95 % intervals over seeds"
    return figure_of(picture, subtitle).update_yaxes(tickangle=0)


def _draw_row(score: Score, row: ComparisonRow, place: int) -> list[Line | Dots]:
    """Return a configuration's marks in a plot: its interval, its runs and its mean score.

    Empty if the configuration has no score. ``place`` is the vertical position.
    """
    estimate = row.scores[score.name]
    if estimate is None:
        return []
    marks: list[Line | Dots] = []
    colour = "@muted" if row.algorithm in BASELINES else "@accent"
    label = f"{{name}}<br>{score.label}"
    if half := estimate.half_width:
        ends = [estimate.mean - half, estimate.mean + half]
        marks.append(Line(x=ends, y=[place, place], colour=colour, width=2.5))
    n_values = len(estimate.values)
    if n_values > 1:
        # If a run has no score, it is unknown which seed each value belongs to.
        is_complete = n_values == len(row.seeds)
        hover = f"{label} {score.hover('x')}"
        dots = Dots(
            x=estimate.values,
            y=[place + 0.2] * n_values,
            colour=f"{colour}/0.5",
            size=6,
            name=row.label,
            texts=[f"seed {seed}" for seed in row.seeds] if is_complete else [],
            hover=f"{hover} (%{{text}})" if is_complete else hover,
        )
        marks.append(dots)
    mean = Dots(
        x=[estimate.mean],
        y=[place],
        colour=colour,
        size=12,
        name=row.label,
        hover=f"{label} {escaped(write_with_interval(score, estimate))}",
    )
    return [*marks, mean]


def figure_of(picture: Picture, subtitle: str) -> Figure:
    """Convert a picture into a Plotly figure with a title, a subtitle and a legend.

    The figure has the colours of a light page, or of a dark page if Plotly's default template is
    dark.

    Raises
    ------
    MissingExtraError
        If plotly is not installed.
    """
    purpose = "a figure in a notebook"
    objects = import_extra("plotly.graph_objects", "plotly", "notebook", purpose)
    templates = import_extra("plotly.io", "plotly", "notebook", purpose).templates
    is_dark = "dark" in str(templates.default)
    drawn = draw(picture)
    layout: dict[str, Any] = drawn["layout"]
    layout["margin"] = {**layout["margin"], "t": layout["margin"]["t"] + TITLE}
    layout["height"] += TITLE
    layout["title"] = {
        "text": f"{escaped(picture.title)}<br><sub>{escaped(subtitle)}</sub>",
        "x": 0,
        "xref": "paper",
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "pad": {"t": 18},
        "font": {"size": 16},
    }
    layout |= {"paper_bgcolor": "@panel", "plot_bgcolor": "@panel", "template": "none"}
    traces = [trace | {"showlegend": False} for trace in drawn["data"]]
    if picture.legend:
        layout["showlegend"] = True
        traces += [_legend_trace(entry) for entry in picture.legend]
    colours = palette(night=is_dark)
    return objects.Figure(coloured(traces, colours), coloured(layout, colours))


def coloured(value: Any, colours: Mapping[str, str]) -> Any:
    """Replace the colour names in a Plotly figure, such as ``@ink``, by colours.

    A name may be followed by an opacity: ``@accent/0.25``.

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
    if name not in colours:  # a text that begins with @ and is not a colour name
        return value
    if not opacity:
        return colours[name]
    channels = [str(int(colours[name][start : start + 2], 16)) for start in (1, 3, 5)]
    return f"rgba({','.join(channels)},{opacity})"


def _legend_trace(entry: LegendEntry) -> dict[str, Any]:
    """Return a Plotly trace without points, which only adds an entry to the legend."""
    if entry.shape == "box":
        marker = {"color": entry.colour, "size": 12, "symbol": "square"}
        look: dict[str, Any] = {"mode": "markers", "marker": marker}
    else:
        line = {"color": entry.colour, "width": 2, "dash": entry.dash}
        look = {"mode": "lines", "line": line}
    return {
        "type": "scatter",
        "x": [None],
        "y": [None],
        **look,
        "name": escaped(entry.label),
        "hoverinfo": "skip",
    }
