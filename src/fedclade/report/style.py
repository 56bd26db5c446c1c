"""Common style of matplotlib figures: colours, axes, titles and legends.

This is the only module of :mod:`fedclade.report` that imports matplotlib at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedclade.core import MissingExtraError, appear

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D

__all__ = [
    "ACCENT",
    "CLUSTERS",
    "DPI",
    "FAINT",
    "FEW_ROUNDS",
    "HEADER",
    "INK",
    "MUTED",
    "TRUTH",
    "color_bar",
    "diverging_map",
    "handle",
    "label",
    "legend_beside",
    "log_scale",
    "new_figure",
    "note",
    "percent_scale",
    "plain",
    "save",
    "set_title",
]

INK = "#222222"
MUTED = "#6B6B6B"
FAINT = "#DADADA"
"""Colours: ``INK`` of text, ``MUTED`` of secondary text and split clusters, ``FAINT`` of grids."""

ACCENT = "#0072B2"
"""Colour of marks in figures that need only one colour."""

CLUSTERS = (
    *("#0072B2", "#D55E00", "#44AA99", "#882255", "#E0A800"),
    *("#56B4E9", "#661100", "#332288", "#117733", "#CC6677"),
)
"""Colours of clusters, after Okabe and Ito and after Tol.

The colours are distinct for people with deuteranopia and protanopia, too.
"""

TRUTH = (
    "#BBCCEE",
    "#CCDDAA",
    "#EEEEBB",
    "#FFCCCC",
    "#DDCCEE",
    "#CCEEFF",
    "#E8D3B9",
    "#DDDDDD",
    "#B9DCD2",
    "#F4D6E4",
)
"""Colours of true clusters, which are pale to distinguish them from the clusters of a run."""

DPI = 150
"""Resolution of figures in files, in dots per inch."""

FEW_ROUNDS = 12
"""Largest number of rounds with a tick and a dot for each round."""

HEADER = 0.64
"""Height of the room for a figure's title above its panels, in inches."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure of ``width`` by ``height`` inches.

    The figure is not registered with pyplot, so it opens no window and changes no global state of
    matplotlib. The layout leaves room above the panels for the text of :func:`set_title`.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report", "drawing figures") from error
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.06, rect=(0, 0, 1, 1 - HEADER / height))
    return Figure(figsize=(width, height), dpi=DPI, layout=layout, facecolor="white")


def diverging_map() -> Colormap:
    """Return a symmetric colour map from blue over white to red, with grey for missing values."""
    from matplotlib import colormaps

    return colormaps["RdBu_r"].with_extremes(bad="#E4E4E4")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a file; an existing file is replaced atomically.

    The ending of the path decides the format: ``.png``, or ``.pdf`` with embedded fonts.
    """
    from matplotlib import rc_context

    # TrueType fonts (42) are embedded as fonts; publishers refuse the default, Type 3. Without a
    # date, equal figures are equal files.
    settings: dict[Any, Any] = {"pdf.fonttype": 42}
    form = path.suffix.removeprefix(".")
    metadata = {"CreationDate": None} if form == "pdf" else None
    with rc_context(settings):
        appear(path, lambda beside: figure.savefig(beside, dpi=DPI, format=form, metadata=metadata))
    return path


def set_title(figure: Figure, title: str, subtitle: str) -> None:
    """Write a title and a subtitle above the panels of a figure, at the left."""
    height = figure.get_figheight()
    figure.text(
        0.012,
        1 - 0.12 / height,
        title,
        fontsize=13,
        fontweight="bold",
        color=INK,
        va="top",
        parse_math=False,
    )
    figure.text(
        0.012, 1 - 0.40 / height, subtitle, fontsize=9.5, color=MUTED, va="top", parse_math=False
    )


def plain(*panels: Axes) -> None:
    """Draw axes in the common style: only the left and the bottom side, and a faint grid."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(labelsize=9.5, color=FAINT, labelcolor=INK)
        axes.tick_params(which="minor", length=0)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)


def label(axes: Axes, *, x: str = "", y: str = "") -> None:
    """Set the titles of the x and y axis of a panel."""
    if x:
        axes.set_xlabel(x, fontsize=10, color=INK)
    if y:
        axes.set_ylabel(y, fontsize=10, color=INK)


def percent_scale(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """Write the shares on an axis of a panel in per cent."""
    from matplotlib.ticker import FuncFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def log_scale(*panels: Axes) -> None:
    """Make the y axis that panels share logarithmic, with plain numbers at its ticks.

    If the smallest value is not above zero, or all values are equal, the axis is not changed.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low = min(axes.dataLim.ymin for axes in panels)
    high = max(axes.dataLim.ymax for axes in panels)
    if not 0 < low < high:
        return
    axes = panels[0]
    axes.set_yscale("log")
    if high > 10 * low:
        steps = (1, 2, 5)
    else:
        steps = (1, 1.5, 2, 3, 4, 5, 7)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def note(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    *,
    x: str = "axes fraction",
    y: str = "axes fraction",
    shift: tuple[float, float] = (0, 0),
    **look: Any,
) -> None:
    """Write a small text into or next to a panel.

    Parameters
    ----------
    axes, text
        The panel, and the text.
    place
        Position of the text, in the coordinates that ``x`` and ``y`` specify.
    x, y
        Coordinates of the position: ``data``, or ``axes fraction`` for shares of the panel.
    shift
        Distance from the position, in points.
    **look
        Further options of ``Axes.annotate``.
    """
    look = {"fontsize": 9, "color": MUTED, "va": "bottom", **look}
    axes.annotate(
        text, place, shift, xycoords=(x, y), textcoords="offset points", parse_math=False, **look
    )


def handle(label: str, look: Mapping[str, Any]) -> Line2D:
    """Return a line of matplotlib that serves as a legend entry with this label and look."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def legend_beside(axes: Axes, handles: Sequence[Line2D], title: str) -> None:
    """Draw the legend to the right of a panel, so that it covers no data."""
    legend = axes.legend(
        handles=handles,
        title=title,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        alignment="left",
        fontsize=9.5,
        title_fontsize=9.5,
        labelcolor=INK,
    )
    legend.get_title().set_color(MUTED)


def color_bar(axes: Axes, image: AxesImage, name: str) -> None:
    """Fill narrow axes with the colour scale of an image, such as a heat map."""
    figure = image.get_figure(root=True)
    # The image has been drawn in a figure, so this only excludes None for the type checker.
    assert figure is not None
    bar = figure.colorbar(image, cax=axes)
    axes.spines[:].set_visible(False)
    axes.tick_params(labelsize=9.5, color=FAINT, labelcolor=INK)
    bar.set_label(name, fontsize=10, color=INK)
