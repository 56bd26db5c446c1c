"""Figures of FedGroup's experiments, drawn from the data of an outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedclade.report import style
from fedclade_papers.cache import Settings
from fedclade_papers.drawing import MARKS, dots
from fedclade_papers.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_classes(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figure 1: accuracy and discrepancy over rounds, by the number of classes."""
    panels = len(outcome.series)
    figure = style.new_figure(3.0 * panels + 0.6, 3.4)
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    largest = max(value for found in outcome.series.values() for value in found["discrepancy"])
    for place, (left, (classes, found)) in enumerate(
        zip(axes, outcome.series.items(), strict=True)
    ):
        _plot(left, found["accuracy"], color=style.INK, linewidth=1)
        left.set_title(
            f"{classes} class{'es' if classes != '1' else ''} per client",
            fontsize=10,
            color=style.INK,
        )
        right = _discrepancy_axis(left)
        _plot(right, found["discrepancy"], color=style.ACCENT, linewidth=0.9)
        right.set_ylim(0, 1.05 * largest)
        left.set_ylim(0, 1)
        style.label(left, x="round", y="accuracy (black)" if place == 0 else "")
        right.tick_params(labelright=place == panels - 1)
        style.label(right, y="discrepancy (blue)" if place == panels - 1 else "")
    style.set_title(figure, "FedAvg by the number of classes per client", _of(settings))
    return figure


def draw_best(outcome: Outcome, settings: Settings) -> Figure:
    """Draw Table III: for each task the best accuracy of every method, ours and the paper's."""
    tasks: dict[str, list[tuple[str, float | None, float]]] = {}
    for row in outcome.rows:
        task, _, method = row.what.removesuffix(", best round").partition(" · ")
        tasks.setdefault(task, []).append((method, row.paper, row.ours))
    figure = style.new_figure(max(6.0, 3.4 * len(tasks) + 1.2), 3.4)
    axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for panel, (task, methods) in zip(axes, tasks.items(), strict=True):
        names, papers, ours = zip(*methods, strict=True)
        dots(panel, names, {"ours": ours, "paper": papers})
        panel.set_title(task, fontsize=10, color=style.INK)
        style.label(panel, x="best accuracy in %")
    _explain_marks(axes[-1])
    style.set_title(figure, "Best accuracy of all rounds", _of(settings))
    return figure


def draw_statistics(outcome: Outcome, settings: Settings) -> Figure:
    """Draw Table II: every count, ours and the paper's, on a logarithmic scale."""
    papers, ours = zip(*outcome.series.values(), strict=True)
    figure = style.new_figure(7.0, 1.4 + 0.3 * len(ours))
    axes = figure.subplots()
    dots(axes, list(outcome.series), {"ours": ours, "paper": papers})
    axes.set_xscale("log")
    style.label(axes, x="number")
    _explain_marks(axes)
    style.set_title(figure, "Clients, samples and parameters", "Duan et al. 2020, Table II")
    return figure


def draw_rounds(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figures 3 and 4, with one column for each task.

    Its panels show the baselines, the groups of FedGroup, and the groups of FedGrouProx.
    """
    tasks = list(outcome.series)
    figure = style.new_figure(4.2 * len(tasks) + 0.6, 7.6)
    axes = figure.subplots(3, len(tasks), sharex="col", sharey=True, squeeze=False)
    for column, task in enumerate(tasks):
        found = outcome.series[task]
        _draw_baselines(axes[0, column], found, last=column == len(tasks) - 1)
        axes[0, column].set_title(task, fontsize=10, color=style.INK)
        for row, method in ((1, "FedGroup"), (2, "FedGrouProx")):
            _draw_groups(axes[row, column], found[method])
            style.label(
                axes[row, column],
                x="round" if row == 2 else "",
                y=f"{method}, accuracy" if not column else "",
            )
        style.label(axes[0, column], y="FedAvg, FedProx, accuracy" if not column else "")
    style.set_title(
        figure, "Accuracy over rounds", f"thin: a group; dotted: discrepancy · {_of(settings)}"
    )
    return figure


def _draw_baselines(left: Axes, found: dict[str, Any], last: bool) -> None:
    right = _discrepancy_axis(left)
    for method, color in (("FedAvg", style.CLUSTERS[0]), ("FedProx", style.CLUSTERS[1])):
        _plot(left, found[method]["accuracy"], color=color, linewidth=1.2, label=method)
        _plot(right, found[method]["discrepancy"], color=color, linewidth=1, linestyle=":")
    style.label(right, y="discrepancy" if last else "")
    left.legend(frameon=False, fontsize=9, loc="lower right")


def _draw_groups(panel: Axes, found: dict[str, Any]) -> None:
    for color, accuracy in zip(style.CLUSTERS, found["groups"].values(), strict=False):
        _plot(
            panel, [float("nan") if a is None else a for a in accuracy], color=color, linewidth=0.7
        )
    _plot(panel, found["accuracy"], color=style.INK, linewidth=1.4)
    style.plain(panel)
    style.percent_scale(panel)


def draw_distances(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figure 5: for pairs of clients their distance in M over their distance in M'."""
    figure = style.new_figure(3.2 * len(outcome.series) + 0.6, 3.4)
    axes = figure.subplots(1, len(outcome.series), squeeze=False)[0]
    for place, (panel, (task, found)) in enumerate(zip(axes, outcome.series.items(), strict=True)):
        panel.plot(
            found["full"],
            found["ternary"],
            linestyle="",
            marker=".",
            markersize=4,
            color=style.ACCENT,
        )
        panel.set_title(task, fontsize=10, color=style.INK)
        style.plain(panel)
        style.label(
            panel,
            x="distance in M′ (all cosines)",
            y="distance in M (ternary)" if place == 0 else "",
        )
    style.set_title(figure, "Distances of pairs of clients", _of(settings))
    return figure


def _plot(axes: Axes, values: list[float], **look: Any) -> None:
    """Draw a line over the rounds."""
    axes.plot(range(1, len(values) + 1), values, **look)


def _discrepancy_axis(left: Axes) -> Axes:
    """Return axes at the right for the discrepancy; the left axes are for the accuracy."""
    right = left.twinx()
    style.plain(left, right)
    right.grid(False)
    style.percent_scale(left)
    return right


def _explain_marks(axes: Axes) -> None:
    style.legend_beside(axes, [style.handle(kind, MARKS[kind]) for kind in ("ours", "paper")], "")


def _of(settings: Settings) -> str:
    rounds, selected, epochs = (settings[key] for key in ("rounds", "selected", "epochs"))
    return f"Duan et al. 2020 measured again · T = {rounds}, K = {selected}, E = {epochs}"
