"""Functions that draw the figures of the FedGroup experiments from stored outcomes."""

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
    """Draw figure 1: accuracy and discrepancy over rounds, a panel for each number of classes."""
    panels = len(outcome.series)
    figure = style.new_figure(3.0 * panels + 0.6, 3.4)
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    largest = max(value for found in outcome.series.values() for value in found["discrepancy"])
    for place, (left, (classes, found)) in enumerate(
        zip(axes, outcome.series.items(), strict=True)
    ):
        _plot_rounds(left, found["accuracy"], color=style.INK, linewidth=1)
        noun = "class" if classes == "1" else "classes"
        left.set_title(f"{classes} {noun} per client", fontsize=10, color=style.INK)
        right = _discrepancy_axis(left)
        _plot_rounds(right, found["discrepancy"], color=style.ACCENT, linewidth=0.9)
        right.set_ylim(0, 1.05 * largest)
        left.set_ylim(0, 1)
        style.label(left, x="round", y="accuracy (black)" if place == 0 else "")
        right.tick_params(labelright=place == panels - 1)
        style.label(right, y="discrepancy (blue)" if place == panels - 1 else "")
    style.set_title(figure, "FedAvg by the number of classes per client", _write_subtitle(settings))
    return figure


def draw_best(outcome: Outcome, settings: Settings) -> Figure:
    """Draw Table III: our and the paper's best accuracy of every method, a panel for each task."""
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
    style.set_title(figure, "Best accuracy of all rounds", _write_subtitle(settings))
    return figure


def draw_statistics(outcome: Outcome, settings: Settings) -> Figure:
    """Draw Table II: our and the paper's numbers, on a logarithmic scale."""
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
    """Draw figures 3 and 4: accuracy over rounds, with one column of panels for each task.

    The panels of a column show FedAvg and FedProx, the groups of FedGroup, and the groups of
    FedGrouProx.
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
        style.label(axes[2, column], x="round")
    style.label(axes[0, 0], y="FedAvg, FedProx, accuracy")
    style.label(axes[1, 0], y="FedGroup, accuracy")
    style.label(axes[2, 0], y="FedGrouProx, accuracy")
    style.set_title(
        figure,
        "Accuracy over rounds",
        f"thin: a group; dotted: discrepancy · {_write_subtitle(settings)}",
    )
    return figure


def _draw_baselines(left: Axes, found: dict[str, Any], last: bool) -> None:
    right = _discrepancy_axis(left)
    for method, color in (("FedAvg", style.CLUSTERS[0]), ("FedProx", style.CLUSTERS[1])):
        _plot_rounds(left, found[method]["accuracy"], color=color, linewidth=1.2, label=method)
        _plot_rounds(right, found[method]["discrepancy"], color=color, linewidth=1, linestyle=":")
    style.label(right, y="discrepancy" if last else "")
    left.legend(frameon=False, fontsize=9, loc="lower right")


def _draw_groups(panel: Axes, found: dict[str, Any]) -> None:
    for color, accuracy in zip(style.CLUSTERS, found["groups"].values(), strict=False):
        # NaN leaves a gap in the line where the group has no members.
        values = [float("nan") if value is None else value for value in accuracy]
        _plot_rounds(panel, values, color=color, linewidth=0.7)
    _plot_rounds(panel, found["accuracy"], color=style.INK, linewidth=1.4)
    style.plain(panel)
    style.percent_scale(panel)


def draw_distances(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figure 5: the ternary distance of pairs of clients over their distance by cosines."""
    figure = style.new_figure(3.2 * len(outcome.series) + 0.6, 3.4)
    axes = figure.subplots(1, len(outcome.series), squeeze=False)[0]
    for panel, (task, found) in zip(axes, outcome.series.items(), strict=True):
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
        style.label(panel, x="distance in M′ (all cosines)")
    style.label(axes[0], y="distance in M (ternary)")
    style.set_title(figure, "Distances of pairs of clients", _write_subtitle(settings))
    return figure


def _plot_rounds(axes: Axes, values: list[float], **look: Any) -> None:
    """Draw a line with one value for each round, from round 1."""
    axes.plot(range(1, len(values) + 1), values, **look)


def _discrepancy_axis(left: Axes) -> Axes:
    """Add a second axis for the discrepancy at the right of a panel that shows the accuracy."""
    right = left.twinx()
    style.plain(left, right)
    right.grid(False)
    style.percent_scale(left)
    return right


def _explain_marks(axes: Axes) -> None:
    style.legend_beside(axes, [style.handle(kind, MARKS[kind]) for kind in ("ours", "paper")], "")


def _write_subtitle(settings: Settings) -> str:
    rounds, selected, epochs = (settings[key] for key in ("rounds", "selected", "epochs"))
    return f"Duan et al. 2020 measured again · T = {rounds}, K = {selected}, E = {epochs}"
