"""Functions that draw the figures of the CFL experiments from stored outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedclade.report import style
from fedclade_papers.cache import Settings
from fedclade_papers.cfl import gaps, norms, series, splits, toys
from fedclade_papers.cfl.theory import bounds, largest_noise
from fedclade_papers.drawing import head, legend, mean_lines, panels
from fedclade_papers.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_xor(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figure 1: points of two clusters, and borders of one model and of two models."""
    title = "No single model fits both clusters; each cluster by itself is easy"
    subtitle = (
        f"after Sattler et al. 2019, figure 1 · {settings['clients']} clients, "
        f"{settings['rounds']} rounds"
    )
    figure, axes = panels(2, title, subtitle)
    colors = {
        "one model for all": style.INK,
        "cluster 1": style.CLUSTERS[0],
        "cluster 2": style.CLUSTERS[1],
    }
    dashes = {name: "dashed" if name == "one model for all" else "solid" for name in colors}
    for panel, case in zip(axes, ("xor", "opposed"), strict=True):
        for cluster, points in enumerate(outcome.series[case]["points"]):
            x = np.asarray(points["x"])
            y = np.asarray(points["y"])
            for label, marker in ((0, "o"), (1, "+")):
                panel.scatter(
                    *x[y == label].T,
                    color=style.CLUSTERS[cluster],
                    marker=marker,
                    s=26,
                    linewidths=1,
                )
        grid = toys.plane(-toys.SIDE, toys.SIDE)
        for name, chances in outcome.series[case]["opinions"].items():
            look: dict[str, Any] = {"colors": [colors[name]], "linestyles": [dashes[name]]}
            panel.contour(grid[..., 0], grid[..., 1], chances, [0.5], **look)
        head(panel, toys.CASES[case][0])
    handles = [
        style.handle(name, {"color": color, "linestyle": dashes[name]})
        for name, color in colors.items()
    ]
    axes[0].legend(handles=handles, frameon=False, fontsize=8.5, loc="center left")
    return figure


def draw_paths(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figure 2: paths of a model over the contours of two clients' risks, and update norms."""
    title = "Gradient norms tell incongruent clients from congruent ones"
    figure, axes = panels(
        2, title, "after Sattler et al. 2019, figure 2 · two clients, two weights", rows=2
    )
    for column, (kind, shown) in enumerate(outcome.series.items()):
        _draw_path(axes[column], shown, settings)
        head(axes[column], kind)
        rounds = range(1, len(shown["max_norm"]) + 1)
        below = axes[column + 2]
        below.plot(rounds, shown["max_norm"], color=style.CLUSTERS[1], label="largest of a client")
        below.plot(rounds, shown["mean_norm"], color=style.INK, label="of the mean")
        style.log_scale(below)
        style.label(below, x="round", y="norm of the update" if column == 0 else "")
    legend(axes[2])
    return figure


def _draw_path(axes: Axes, shown: dict[str, Any], settings: Settings) -> None:
    grid = toys.plane(*settings["window"])
    path = np.asarray(shown["path"])
    for client, values in enumerate(shown["risks"]):
        levels = np.quantile(values, [0.02, 0.1, 0.25, 0.5, 0.75])
        axes.contour(
            grid[..., 0],
            grid[..., 1],
            values,
            levels,
            colors=[style.CLUSTERS[client]],
            linewidths=0.8,
        )
    axes.plot(path[:, 0], path[:, 1], color=style.INK, marker=".", ms=4, linewidth=1)
    axes.plot(*path[-1], color=style.INK, marker="*", ms=12)
    style.label(axes, x="θ₁", y="θ₂")


def draw_theory(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figure 3: how often random gradients are split correctly, and the bounds of Theorem 1.

    The panels show the share of correct splits over the number of distributions k and the noise γ,
    with the border that Theorem 1 guarantees; this share over the dimension d; and the highest
    similarities across splits, with their upper bound.
    """
    figure, (area, over_d, below) = panels(
        3,
        "How much noise a split can bear",
        f"after Sattler et al. 2019, figure 3 · d = {settings['d']}, m = "
        f"{settings['clients_each']}k",
    )
    cells = outcome.series["cells"]
    ks = settings["ks"]
    gammas = settings["gammas"]
    share = np.array([cell["gap_positive"] for cell in cells]).reshape(len(ks), len(gammas))
    shown = area.contourf(ks, gammas, share.T, levels=np.linspace(0, 1, 11), cmap="Blues")
    dense = np.linspace(min(ks), max(ks), 200)
    area.fill_between(
        dense, [largest_noise(k) for k in dense], color=style.CLUSTERS[2], alpha=0.8, linewidth=0
    )
    area.set_ylim(0, max(gammas))
    figure.colorbar(shown, ax=area).set_label("P[g(α) > 0]", fontsize=9)
    style.label(area, x="distributions k", y="noise γ")
    head(area, "green: promised by Theorem 1")
    fixed = settings["over_d"]
    shares = [cell["gap_positive"] for cell in outcome.series["over_d"]]
    over_d.semilogx(fixed["ds"], shares, marker="o", color=style.ACCENT)
    style.label(over_d, x="dimensions d", y="P[g(α) > 0]")
    head(over_d, f"k = {fixed['k']}, γ = {fixed['gamma']:g}")
    noise = np.linspace(0, 1, 100, endpoint=False)
    for color, k in zip(style.CLUSTERS, settings["bounds_of"], strict=False):
        mine = [cell for cell in cells if cell["k"] == k and cell["gamma"] < 1]
        below.plot(noise, [bounds(k, gamma)[0] for gamma in noise], color=color, label=f"k = {k}")
        below.scatter(
            [cell["gamma"] for cell in mine],
            [cell["highest_cross"] for cell in mine],
            color=color,
            s=14,
        )
    style.label(below, x="noise γ", y="largest similarity across the split")
    below.set_ylim(-1.1, 1.8)
    head(below, "lines: eq. 19, dots: highest samples")
    legend(below, loc="upper left", ncols=2)
    return figure


def draw_gaps(outcome: Outcome, settings: Settings, *, figure: int, unit: str) -> Figure:
    """Draw the separation gaps of weight updates and of gradients, a panel for each data set.

    A positive gap guarantees a correct split. ``figure`` is the number of the figure in the paper,
    and ``unit`` the label of the horizontal axis.
    """
    subtitle = (
        f"after Sattler et al. 2019, figure {figure} · {settings['clients']} clients, "
        f"{settings['clusters']} label swaps"
    )
    picture, axes = panels(len(outcome.series), f"Separation gap against {unit}", subtitle)
    for panel, (name, shown) in zip(axes, outcome.series.items(), strict=True):
        mean_lines(
            panel, shown["x"], {of_kind: shown[kind] for kind, of_kind in gaps.KINDS.items()}
        )
        panel.axhline(0, color=style.MUTED, linewidth=0.9)
        style.label(panel, x=unit, y="separation gap g(α)")
        head(panel, name)
    legend(axes[0])
    return picture


draw_data = partial(draw_gaps, figure=5, unit="data points of a client")
draw_rounds = partial(draw_gaps, figure=6, unit="communication rounds")


def draw_norms(outcome: Outcome, settings: Settings) -> Figure:
    """Draw figure 7: norm of the mean update and largest norm over the rounds.

    Incongruent clients, for which no single model is good, are at the left, congruent clients at
    the right.
    """
    title = "The largest norm of an update tells whether one model suits both clients"
    figure, axes = panels(
        2, title, f"after Sattler et al. 2019, figure 7 · {settings['data']}, two clients"
    )
    for axis, kind in zip(axes, norms.KINDS, strict=True):
        _draw_norm_lines(axis, outcome.series[kind], outcome.series["rounds"])
        style.label(axis, x="communication rounds", y="norm of the update")
        head(axis, kind)
    style.log_scale(axes[0])
    style.log_scale(axes[1])
    legend(axes[1])
    return figure


def _draw_norm_lines(axes: Axes, shown: Mapping[str, list[float]], rounds: int) -> None:
    """Draw the norm of the mean update and the largest norm over the rounds in a panel."""
    colors = {"mean_norm": style.INK, "max_norm": style.CLUSTERS[1]}
    for norm, name in norms.NORMS.items():
        values = shown[norm]
        numbers = np.linspace(1, rounds, len(values))
        axes.plot(numbers, values, color=colors[norm], label=name)


def draw_steps(outcome: Outcome, settings: Settings) -> Figure:
    """Draw norm of the mean update and largest norm over the rounds, a row for each step size.

    Incongruent clients, for which no single model is good, are at the left, congruent clients at
    the right.
    """
    steps = outcome.series["steps"]
    title = "With whole-data batches the step size decides whether the mean update vanishes"
    subtitle = f"after Sattler et al. 2019, figure 7 · {settings['data']}, two clients"
    figure, axes = panels(2, title, subtitle, rows=len(steps))
    places = [(step, kind) for step in steps for kind in norms.KINDS]
    for axis, (step, kind) in zip(axes, places, strict=True):
        _draw_norm_lines(axis, steps[step][kind], outcome.series["rounds"])
        style.label(axis, x="communication rounds", y="norm of the update")
        head(axis, f"{kind}, η = {step}")
        style.log_scale(axis)
    legend(axes[1])
    return figure


def draw_splits(outcome: Outcome, settings: Settings, *, place: str, score: str) -> Figure:
    """Draw scores, separation gaps and similarities over the rounds, a column for each method.

    The top row has the score of each true cluster and the mean score of FL, the middle row the
    separation gap of each cluster, and the bottom row the similarities of pairs of clients, as in
    figure 3 of the workshop paper, for methods whose runs stored similarities. Vertical lines mark
    splits.
    """
    title = "Federated learning stagnates; after the splits every cluster goes on"
    methods = [method for method in splits.METHODS if method != "fl" and method in outcome.series]
    columns = len(methods)
    if columns == 1:
        title = "FL stagnates; after the splits clusters go on"  # fits the width of one panel
    subtitle = f"after Sattler et al. 2019, {place} · {settings['clients']} clients"
    figure, axes = panels(columns, title, subtitle, rows=3)
    # Axes are shared before anything is drawn, so that their limits include all lines.
    for row in range(3):
        for panel in axes[row * columns + 1 : (row + 1) * columns]:
            panel.sharey(axes[row * columns])
    fl = outcome.series["fl"]
    for column, method in enumerate(methods):
        series = outcome.series[method]
        (above, middle, below) = axes[column::columns]
        for color, line in zip(style.CLUSTERS, series["by_cluster"], strict=False):
            above.plot(series["rounds"], line, color=color)
        above.plot(fl["rounds"], fl["scores"], color=style.INK, linestyle=":", label="FL, mean")
        for color, line in zip(style.CLUSTERS, series["gaps"].values(), strict=False):
            middle.plot(*np.asarray(line).T, color=color)
        middle.axhline(0, color=style.MUTED, linewidth=0.9)
        if "pairs" in series:
            _draw_pairs(below, series["pairs"])
        else:
            below.set_axis_off()
        for panel in (above, middle, below):
            panel.set_xlim(1, settings["rounds"])
            if not panel.axison:
                continue
            for number in series["splits"]:
                panel.axvline(number, color=style.MUTED, linewidth=0.9, linestyle=(0, (1, 2)))
        head(above, f"{splits.METHODS[method]}: true clusters")
        style.label(below, x="communication rounds")
        if column == 0:
            style.label(above, y=score)
            style.label(middle, y="separation gap g(α)")
            style.label(below, y="similarity of pairs of clients")
    legend(axes[0])
    below = axes[2 * columns]
    # The last panel is empty if its method has no similarities, as rcfl.
    legend(
        axes[-1],
        loc="upper right" if axes[-1].axison else "center left",
        title="pairs of clients of",
        handles=below.get_legend_handles_labels()[0],
    )
    return figure


draw_cifar = partial(
    draw_splits, place="figure 8; 2019 workshop, figure 3", score="test accuracy, %"
)
draw_agnews = partial(draw_splits, place="figure 9", score="test perplexity")


def _draw_pairs(axes: Axes, pairs: series.Pairs) -> None:
    """Draw the mean similarity of each kind of pairs, with a band from minimum to maximum."""
    colors = dict(
        zip(series.KINDS, (style.CLUSTERS[0], style.CLUSTERS[1], style.MUTED), strict=True)
    )
    for kind, rows in pairs.items():
        if rows:
            # A row of NaN interrupts the line where rounds without such pairs lie in between.
            missing = 1 + np.flatnonzero(np.diff([row[0] for row in rows]) > 1)
            number, low, mean, high = np.insert(np.asarray(rows), missing, np.nan, axis=0).T
            axes.fill_between(number, low, high, color=colors[kind], alpha=0.25, linewidth=0)
            axes.plot(number, mean, color=colors[kind], label=series.KINDS[kind])
    axes.axhline(0, color=style.MUTED, linewidth=0.9)
