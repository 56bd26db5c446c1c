"""Figures of a run as files, drawn with matplotlib from the pictures that pages also use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""Pixels of a page in an inch of a figure."""

SHOWN = 13
"""Number of heat maps that are drawn, that of the root first."""

SIDE = 5.2
"""Side of the first heat map and height of the grid next to it, in inches."""

WORDS = 0.55
"""Inches for the text above or below a heat map."""

GAP = 0.35
"""Inches between heat maps."""

LETTER = 0.0095
"""Width of a letter above a panel, as a share of the panel's width."""

COLOURS = palette(night=False)


def save_figures(run: Run, folder: str | Path) -> list[Path]:
    """Draw the scores of a run and, if it has them, norms, similarities and the dendrogram.

    The scores are in a file with the name of the metric, such as ``accuracy.png``, the others in
    ``norms.png``, ``similarity.png`` and ``dendrogram.png``.

    Parameters
    ----------
    run
        Finished run.
    folder
        Output folder; it is created if necessary.

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
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(style.save(figure, target / f"{name}.png"))
    return written


def score_figure(run: Run) -> Figure:
    """Draw the scores of all clusters over the rounds, and the separation gap g(α) below."""
    return draw(score_picture(RunView(run)), queries.heading(run))


def norms_figure(run: Run) -> Figure | None:
    """Draw the two norms of CFL over the rounds; None for a run without norms."""
    picture = norms_picture(RunView(run))
    return None if picture is None else draw(picture, queries.heading(run))


def dendrogram_figure(run: Run) -> Figure | None:
    """Draw the dendrogram of a run's last clustering step (FL+HC); None for a run without one."""
    last_step = clustering_step(run)
    if last_step is None:
        return None
    round_number, step = last_step
    return draw(dendrogram_picture(RunView(run), round_number, step), queries.heading(run))


def similarity_figure(run: Run) -> Figure | None:
    """Draw the cosine similarities of the last updates in every cluster, the root large.

    All have one colour scale, symmetric around 0. None for a run without similarities.
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
    """Draw a picture with its title and its legend."""
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
"""Line styles of Matplotlib."""


def _draw_mark(axes: Axes, mark: Mark) -> None:
    """Draw a mark; dots and bars are on pages only."""
    match mark:
        case Line():
            _draw_line(axes, mark)
        case Band():
            look: dict[str, Any] = {"alpha": 0.25, "linewidth": 0}
            axes.fill_between(mark.x, mark.low, mark.high, color=_colour(mark.colour), **look)
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
            axes.plot(xs, ys, color=_colour(mark.colour), linewidth=1.5, gid="line")
        case Box():
            _draw_box(axes, mark)
        case _:
            raise TypeError(f"files have no {type(mark).__name__}")


def _draw_line(axes: Axes, mark: Line) -> None:
    x = np.array(mark.x, dtype=float)
    y = np.array(mark.y, dtype=float)
    look: dict[str, Any] = {"linewidth": 0.9 * mark.width, "linestyle": _DASHES[mark.dash]}
    if mark.dots:
        look |= {"marker": "o", "markersize": 4}
    axes.plot(x, y, color=_colour(mark.colour), gid=mark.name, **look)


def _draw_box(axes: Axes, mark: Box) -> None:
    x = (mark.x0 + mark.x1) / 2
    y = (mark.y0 + mark.y1) / 2
    width = mark.x1 - mark.x0
    height = mark.y1 - mark.y0
    axes.bar(x, height, width, bottom=mark.y0, color=_colour(mark.colour), gid="box")
    axes.text(x, y, mark.label, ha="center", va="center", fontsize=9.5, color=style.INK)


def _draw_uprights(panels: Sequence[Axes], picture: Picture) -> None:
    """Draw the vertical lines through all panels, and their labels above the first."""
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
    """Set the title, range and ticks of the x axis."""
    style.label(axes, x=axis.title)
    assert axis.range is not None
    axes.set_xlim(*axis.range)
    axes.grid(visible=axis.grid, axis="x")
    if axis.ticks is not None:
        axes.set_xticks(
            list(axis.ticks), list(axis.ticks.values()), rotation=90 if len(axis.ticks) > 12 else 0
        )
        axes.tick_params(axis="x", length=0, labelsize=8.5)
    else:
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)


def _heat_map_grid(n_large: int, n_small: int) -> tuple[Figure, list[Axes], Axes]:
    """Lay out a square for the root, if any, a grid for the other clusters, and a colour bar."""
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
    """Draw one of several heat maps; a small one without the names of its axes."""
    _draw_panel(axes, picture.panels[0])
    _scale_x(axes, picture.x)
    if not is_large:
        axes.set(xlabel="", ylabel="")
    axes.spines[:].set_visible(False)
    axes.set_yticks([])
    axes.set_title(picture.title, fontsize=11 if is_large else 9.5, color=style.INK, loc="left")


def _make_handle(entry: LegendEntry) -> Line2D:
    return style.handle(
        entry.label, {"color": _colour(entry.colour), "linestyle": _DASHES[entry.dash]}
    )


def _colour(name: str) -> str:
    return COLOURS[name.removeprefix("@")]
