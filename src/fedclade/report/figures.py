"""Figures of a run as files, drawn with matplotlib.

Each figure is drawn from the same description (:class:`fedclade.report.picture.Picture`) as on HTML
pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedclade.report import queries, style
from fedclade.report.colours import palette
from fedclade.report.curves import (
    clustering_step,
    dendrogram_picture,
    norms_picture,
    score_picture,
    similarity_pictures,
)
from fedclade.report.formats import count
from fedclade.report.picture import (
    Axis,
    Band,
    Box,
    Dash,
    HeatMap,
    LegendEntry,
    Line,
    Mark,
    Panel,
    Picture,
    Rule,
    label_rows,
)
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PIXELS = 84
"""Number of pixels on a page that correspond to one inch of a figure in a file."""

SHOWN = 13
"""Largest number of heat maps in a figure; the heat map of the root is the first."""

SIDE = 5.2
"""Side of the root's heat map, and height of the grid of all other heat maps, in inches."""

WORDS = 0.55
"""Height of the text above or below a heat map, in inches."""

GAP = 0.35
"""Gap between two heat maps, in inches."""

LETTER = 0.0095
"""Width of a letter above a panel, as a share of the panel's width."""

COLOURS = palette(night=False)


def save_figures(run: Run, folder: str | Path, form: Literal["png", "pdf"] = "png") -> list[Path]:
    """Draw the scores of a run and, if recorded, its norms, similarities and dendrogram to files.

    The figure of the scores is named after the metric, such as ``accuracy.png``; the other files
    are ``norms.png``, ``similarity.png`` and ``dendrogram.png``.

    Parameters
    ----------
    run
        Finished run.
    folder
        Output folder; it is created if necessary.
    form
        Format of the files: ``png``, or ``pdf`` with embedded fonts, for papers.

    Returns
    -------
    list of Path
        The written files.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figures = {
        Score.of_run(run).file: score_figure(run),
        "norms": norms_figure(run),
        "similarity": similarity_figure(run),
        "dendrogram": dendrogram_figure(run),
    }
    if run.has_diverged:  # clusters of diverged models carry no information
        figures |= {"similarity": None, "dendrogram": None}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(style.save(figure, target / f"{name}.{form}"))
    return written


def score_figure(run: Run) -> Figure:
    """Draw the scores of all clusters over the rounds, with the separation gap g(α) below."""
    return draw(score_picture(RunView(run)), queries.heading(run))


def norms_figure(run: Run) -> Figure | None:
    """Draw the two update norms of CFL over the rounds; None for a run without recorded norms."""
    picture = norms_picture(RunView(run))
    if picture is None:
        return None
    return draw(picture, queries.heading(run))


def dendrogram_figure(run: Run) -> Figure | None:
    """Draw the dendrogram of a run's last clustering step (FL+HC); None without such a step."""
    last_step = clustering_step(run)
    if last_step is None:
        return None
    round_number, step = last_step
    return draw(dendrogram_picture(RunView(run), round_number, step), queries.heading(run))


def similarity_figure(run: Run) -> Figure | None:
    """Draw heat maps of the cosine similarities of the last updates in every cluster.

    The heat map of the root is larger than all other heat maps. The colour scale is common to all
    heat maps and symmetric around 0. None for a run without recorded similarities.
    """
    matrices = sorted(run.similarities, key=lambda matrix: matrix.node)
    if not matrices:
        return None
    pictures = similarity_pictures(RunView(run), matrices[:SHOWN], side=1000)
    n_large = 1 if matrices[0].node == 0 else 0
    figure, panels, bar = _heat_map_grid(n_large, len(pictures) - n_large)
    for i, (axes, picture) in enumerate(zip(panels, pictures, strict=True)):
        _draw_heat_map(axes, picture, is_large=i < n_large or not n_large)
    style.color_bar(bar, panels[0].images[0], "cosine similarity α of two updates")
    subtitle = queries.heading(run)
    n_hidden = len(matrices) - len(pictures)
    if n_hidden:
        subtitle += f"  ({count(n_hidden, 'more cluster')} not shown)"
    style.set_title(figure, "Similarity of the clients’ updates in every cluster", subtitle)
    return figure


def draw(picture: Picture, subtitle: str) -> Figure:
    """Draw a picture with matplotlib, with its title, a subtitle and its legend."""
    figure = style.new_figure(9.6, style.HEADER + picture.height / PIXELS)
    shares = [panel.share for panel in picture.panels]
    panels = list(
        figure.subplots(len(shares), 1, sharex=True, height_ratios=shares, squeeze=False)[:, 0]
    )
    style.plain(*panels)
    for axes, panel in zip(panels, picture.panels, strict=True):
        _draw_panel(axes, panel)
    _scale_x(panels[-1], picture.x)
    _draw_uprights(panels, picture)
    if picture.legend:
        style.legend_beside(panels[0], [_make_handle(entry) for entry in picture.legend], "")
    style.set_title(figure, picture.title, subtitle)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw all marks (lines, boxes, ...) of a panel and set up its y axis."""
    for mark in panel.marks:
        _draw_mark(axes, mark)
    style.label(axes, y=panel.y.title)
    if panel.y.range is not None:
        axes.set_ylim(*panel.y.range)
    if panel.y.log:
        style.log_scale(axes)
    if panel.y.form == "share":
        style.percent_scale(axes)


_DASHES: Mapping[Dash, Any] = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "longdash": (0, (9, 3)),
    "longdashdot": (0, (9, 3, 2, 3)),
}
"""Matplotlib's line style for each dash pattern of a picture."""


def _draw_mark(axes: Axes, mark: Mark) -> None:
    """Draw one mark (a line, band, heat map, rule or box) into matplotlib axes.

    Raises
    ------
    TypeError
        If the mark is of another kind: dots and bars are supported on HTML pages only.
    """
    match mark:
        case Line():
            _draw_line(axes, mark)
        case Band():
            colour = _resolve_colour(mark.colour)
            axes.fill_between(mark.x, mark.low, mark.high, color=colour, linewidth=0)
        case HeatMap():
            scale: dict[str, Any] = {"vmin": -mark.limit, "vmax": mark.limit}
            axes.imshow(mark.values, cmap=style.diverging_map(), aspect="auto", **scale)
        case Rule():
            dash = "--" if mark.dashed else "-"
            axes.axhline(mark.y, color=style.INK, linewidth=1.0, linestyle=dash, gid="rule")
            place: dict[str, Any] = {"y": "data", "shift": (-2, 2), "ha": "right"}
            style.note(axes, mark.label, (1, mark.y), gid="rule label", **place)
        case Box() if mark.x0 == mark.x1 or mark.y0 == mark.y1:
            xs = [mark.x0, mark.x1]
            ys = [mark.y0, mark.y1]
            axes.plot(xs, ys, color=_resolve_colour(mark.colour), linewidth=1.5, gid="line")
        case Box():
            _draw_box(axes, mark)
        case _:
            raise TypeError(
                "a mark of a figure in a file should be a line, band, heat map, rule or box, got "
                f"{type(mark).__name__}, which only HTML pages support"
            )


def _draw_line(axes: Axes, mark: Line) -> None:
    """Draw a line through points into matplotlib axes."""
    x = np.array(mark.x, dtype=float)
    y = np.array(mark.y, dtype=float)
    look: dict[str, Any] = {"linewidth": 0.9 * mark.width, "linestyle": _DASHES[mark.dash]}
    if mark.dots:
        look |= {"marker": "o", "markersize": 4}
    axes.plot(x, y, color=_resolve_colour(mark.colour), gid=mark.name, **look)


def _draw_box(axes: Axes, mark: Box) -> None:
    """Draw a filled rectangle with its label into matplotlib axes."""
    x = (mark.x0 + mark.x1) / 2
    y = (mark.y0 + mark.y1) / 2
    width = mark.x1 - mark.x0
    height = mark.y1 - mark.y0
    axes.bar(x, height, width, bottom=mark.y0, color=_resolve_colour(mark.colour), gid="box")
    axes.text(x, y, mark.label, ha="center", va="center", fontsize=9.5, color=style.INK)


def _draw_uprights(panels: Sequence[Axes], picture: Picture) -> None:
    """Draw a picture's vertical lines through all panels, with labels above the first panel."""
    for x in picture.uprights:
        for axes in panels:
            axes.axvline(
                x, color=style.MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1, gid="upright"
            )
    for x, text, row in label_rows(picture, LETTER):
        style.note(
            panels[0],
            text,
            (x, 1),
            x="data",
            shift=(0, 3 + 12 * row),
            ha="center",
            gid="upright label",
        )


def _scale_x(axes: Axes, axis: Axis) -> None:
    """Set the title, the range and the ticks of the x axis."""
    style.label(axes, x=axis.title)
    assert axis.range is not None
    if axis.range[0] != axis.range[1]:  # equal in a run without rounds
        axes.set_xlim(*axis.range)
    axes.grid(visible=axis.grid, axis="x")
    if axis.ticks is not None:
        rotation = 90 if len(axis.ticks) > 12 else 0
        axes.set_xticks(list(axis.ticks), list(axis.ticks.values()), rotation=rotation)
        axes.tick_params(axis="x", length=0, labelsize=8.5)
    else:
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def _heat_map_grid(n_large: int, n_small: int) -> tuple[Figure, list[Axes], Axes]:
    """Lay out a figure of heat maps: a large square for the root, a grid, and a colour bar.

    Parameters
    ----------
    n_large
        Number of large heat maps: 1 if the root has one, else 0.
    n_small
        Number of heat maps in the grid.

    Returns
    -------
    tuple
        The figure, the axes of the heat maps (the large one first), and the axes of the colour bar.
    """
    columns = math.ceil(math.sqrt(n_small))
    rows = 1
    if n_small:
        rows = math.ceil(n_small / columns)
    side = (SIDE - (rows - 1) * WORDS) / rows  # makes the grid as high as the square
    widths = [SIDE] * n_large + [side] * columns
    figure = style.new_figure(
        sum(widths) + GAP * len(widths) + 1.3, style.HEADER + SIDE + 2 * WORDS
    )
    grid = figure.add_gridspec(rows, len(widths) + 1, width_ratios=[*widths, 0.16])
    large = [figure.add_subplot(grid[:, 0]) for _ in range(n_large)]
    small = [figure.add_subplot(grid[i // columns, n_large + i % columns]) for i in range(n_small)]
    return figure, [*large, *small], figure.add_subplot(grid[:, -1])


def _draw_heat_map(axes: Axes, picture: Picture, *, is_large: bool) -> None:
    """Draw a heat map into matplotlib axes.

    The x axis and the y axis have titles only if the heat map is large.
    """
    _draw_panel(axes, picture.panels[0])
    _scale_x(axes, picture.x)
    if not is_large:
        axes.set(xlabel="", ylabel="")
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_title(picture.title, fontsize=11 if is_large else 9.5, color=style.INK, loc="left")


def _make_handle(entry: LegendEntry) -> Line2D:
    """Return an entry of a legend as a line of matplotlib, with its colour and dash pattern.

    The line of a box is so wide that it looks like one.
    """
    look: dict[str, Any] = {
        "color": _resolve_colour(entry.colour),
        "linestyle": _DASHES[entry.dash],
    }
    if entry.shape == "box":
        look["linewidth"] = 8
    return style.handle(entry.label, look)


def _resolve_colour(name: str) -> str | tuple[str, float]:
    """Convert the name of a colour, such as ``@ink``, to the form ``#RRGGBB`` for matplotlib.

    If an opacity follows the name, as in ``@accent/0.25``, the result is a pair with the opacity.
    """
    name, _, opacity = name.removeprefix("@").partition("/")
    if opacity:
        return COLOURS[name], float(opacity)
    return COLOURS[name]
