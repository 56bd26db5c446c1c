"""Functions that draw the figures of the FL+HC experiments from stored outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedclade.report import style
from fedclade_papers.cache import Settings
from fedclade_papers.drawing import MARKS, dots
from fedclade_papers.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"paper": "FL+HC, paper", "averaged": "FL, ours", "ours": "FL+HC, ours"}


def draw_cells(outcome: Outcome, settings: Settings) -> Figure:
    """Draw a table as two panels: final accuracy, and share of clients at the target accuracy.

    Each line is a cell of the table, with markers for our FL+HC, our FL, and the paper's FL+HC.
    """
    cells = outcome.series["cells"]
    figure = style.new_figure(9.0, 1.6 + 0.28 * len(cells))
    axes = figure.subplots(1, 2, sharey=True)
    for column, what in enumerate(("accuracy", "clients at the target")):
        panel = axes[column]
        values: dict[str, list[float]] = {}
        for kind in KINDS:
            values[kind] = [cell[kind][column] for cell in cells.values()]
        dots(panel, list(cells), values)
        style.label(panel, x=f"{what} at the end, %")
    style.legend_beside(
        axes[1], [style.handle(name, MARKS[kind]) for kind, name in KINDS.items()], ""
    )
    subtitle = f"Briggs et al. 2020 measured again · {settings['clients']} clients, {settings['rounds']} rounds"
    style.set_title(figure, f"FL+HC, {settings['setting']}", subtitle)
    return figure


def draw_curves(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figures 1 to 6: accuracy and share of clients at the target accuracy over the rounds.

    A vertical line in each panel marks the clustering step.
    """
    panels = max(1, len(outcome.series))
    figure = style.new_figure(3.3 * panels + 0.6, 5.6)
    axes = figure.subplots(2, panels, sharex="col", sharey="row", squeeze=False)
    for column, (name, found) in enumerate(outcome.series.items()):
        for panel, key in zip(axes[:, column], ("accuracy", "reached"), strict=True):
            for method, color in (("FL", style.CLUSTERS[1]), ("FL+HC", style.ACCENT)):
                panel.plot(
                    found[method]["rounds"],
                    found[method][key],
                    color=color,
                    label=method,
                    linewidth=1.3,
                )
            panel.axvline(found["rounds_before"], color=style.INK, linewidth=0.8)
            style.plain(panel)
            style.percent_scale(panel)
        axes[0, column].set_title(
            f"{name}: {found['setting']}, {found['how']}", fontsize=9.5, color=style.INK
        )
        style.label(axes[1, column], x="round")
    style.label(axes[0, 0], y="accuracy")
    style.label(axes[1, 0], y="clients at the target")
    if outcome.series:
        axes[0, 0].legend(frameon=False, fontsize=9, loc="lower right")
    subtitle = f"Briggs et al. 2020 measured again · seed {settings['seeds'][0]}"
    style.set_title(figure, "FL+HC and FL over rounds", subtitle)
    return figure


def draw_heights(outcome: Outcome, settings: Settings) -> Figure:
    """Draw the distances at which clusters of IID clients merge.

    There is a line for each number of rounds before clustering. A horizontal line marks the
    threshold T, at which merging stops.
    """
    figure = style.new_figure(7.0, 4.2)
    axes = figure.subplots()
    for color, (name, heights) in zip(
        style.CLUSTERS, outcome.series["heights"].items(), strict=False
    ):
        left = range(len(heights), 0, -1)  # clusters that are left after each merge
        axes.plot(left, heights, color=color, label=name.replace("n ", "n = "), linewidth=1.6)
    axes.axhline(
        outcome.series["threshold"], color=style.INK, linewidth=0.9, linestyle="--", label="T"
    )
    axes.invert_xaxis()
    style.plain(axes)
    style.label(axes, x="clusters left", y="distance at which two merge")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    subtitle = f"Briggs et al. 2020, section III · {settings['clients']} clients, l2 distance, Ward's linkage"
    style.set_title(figure, "IID clients merge below the threshold, but for n = 1", subtitle)
    return figure
