"""The course of a run: scores and separation gaps as in figure 8 of the CFL paper, norms as in its figure 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedclade.core import Node
from fedclade.report import facts, style
from fedclade.report.dendrogram import dendrogram_figure
from fedclade.report.facts import Series
from fedclade.report.formats import count
from fedclade.report.heat_maps import ALONE, similarity_figure
from fedclade.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEGEND_LIMIT = 10
"""Up to so many clusters each have a colour and a line in the legend; more are drawn alike, with their mean."""

MANY_ROUNDS = 200
"""From so many rounds on lines are thin."""

PALE: dict[str, Any] = {"color": style.ACCENT, "linewidth": 0.9, "zorder": 2}
"""The line of one of many clusters."""

MEAN: dict[str, Any] = {"color": style.CLUSTERS[1], "linewidth": 2.0, "zorder": 4}
"""The line of the mean over many clusters."""


def save_figures(run: Run, folder: str | Path) -> list[Path]:
    """Draw a run: ``accuracy.png``, ``norms.png``, ``similarity.png`` and, if it has one, ``dendrogram.png``.

    Parameters
    ----------
    run
        Finished.
    folder
        Is made if it does not exist.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    drawn = {"accuracy": accuracy_figure(run), "norms": norms_figure(run), "similarity": similarity_figure(run)}
    if (dendrogram := dendrogram_figure(run)) is not None:
        drawn["dendrogram"] = dendrogram
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    return [style.save(figure, target / f"{name}.png") for name, figure in drawn.items()]


def accuracy_figure(run: Run) -> Figure:
    """Draw the score of every cluster over the rounds, and below it the separation gap g(α) (CFL figure 8).

    Language models are scored by perplexity. Where the true clusters are not known there is no gap, and α_cross^max is
    drawn instead.
    """
    lines = _Lines(run)
    figure = style.new_figure(9.6, 6.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 1])
    style.plain(top, bottom)
    language = facts.is_language(run)
    what = "perplexity" if language else "accuracy"
    lines.draw(top, facts.score_courses(run), forked=True)
    style.label(top, y=f"test {what}, mean of the clients")
    if language:
        style.log_scale(top)
    else:
        style.percent_scale(top)
    lines.legend(top)
    _draw_similarity_course(bottom, lines, run)
    lines.finish(figure, [top, bottom], f"{what.capitalize()} of every cluster")
    return figure


def norms_figure(run: Run) -> Figure:
    """Draw the two norms that CFL splits by (eqs. 32 and 33), over the rounds for every cluster (CFL figure 7).

    Both panels have one scale: members of a cluster disagree where the largest norm of an update stays up while that of
    the mean update falls. Thresholds are drawn as dashed lines.
    """
    lines = _Lines(run)
    figure = style.new_figure(9.6, 6.6)
    top, bottom = figure.subplots(2, 1, sharex=True, sharey=True)
    style.plain(top, bottom)
    eps2, eps1 = facts.thresholds_of_norms(run)
    for axes, column, name, threshold, symbol in (
        (top, "max_norm", "largest norm of an update", eps2, "ε₂"),
        (bottom, "mean_norm", "norm of the mean update", eps1, "ε₁"),
    ):
        lines.draw(axes, facts.criterion_courses(run, column))
        style.label(axes, y=name)
        if isinstance(threshold, Mapping):
            lines.draw_thresholds(axes, threshold)
            style.note(axes, f"dashed: {symbol}, a tenth of the largest so far", (1, 1), shift=(-2, -12), ha="right")
        elif threshold is not None:
            axes.axhline(threshold, color=style.INK, linewidth=1.0, linestyle="--", gid="threshold")
            style.note(axes, f"{symbol} = {threshold:g}", (1, threshold), y="data", shift=(-2, 2), ha="right")
    style.log_scale(top, bottom)
    lines.legend(top)
    lines.finish(figure, [top, bottom], "Norms of the updates in every cluster")
    return figure


def _draw_similarity_course(axes: Axes, lines: _Lines, run: Run) -> None:
    """Draw g(α) of every cluster; α_cross^max where the truth is not known."""
    known = facts.Outcome.of(run).truth is not None
    courses = facts.criterion_courses(run, "separation_gap" if known else "alpha_cross_max")
    style.label(axes, y="separation gap g(α)" if known else "α cross max")
    if not courses:
        style.explain_empty(axes, ALONE)
        return
    axes.axhline(0.0, color=style.INK, linewidth=1.0, gid="zero")
    lines.draw(axes, courses)
    if known:
        style.note(axes, "above 0 the optimal bi-partition is right", (1, 1), shift=(0, 2), ha="right")


@dataclass(frozen=True)
class _Lines:
    """Draws a line for every cluster, always in the same colour.

    Current clusters have colours; those that were split are grey, the root the darkest. With more than ``LEGEND_LIMIT``
    current clusters, all share one pale colour, and their mean is drawn over them.
    """

    run: Run

    @cached_property
    def leaves(self) -> tuple[Node, ...]:
        return facts.leaves_in_tree_order(self.run.tree)

    @property
    def crowded(self) -> bool:
        return len(self.leaves) > LEGEND_LIMIT

    @cached_property
    def width(self) -> float:
        """Points; thinner where many clusters or noisy rounds lie close together."""
        return 1.0 if self.crowded or self.run.summary["rounds"] > MANY_ROUNDS else 1.8

    @cached_property
    def styles(self) -> Mapping[int, dict[str, Any]]:
        """How the line of each node looks."""
        styles: dict[int, dict[str, Any]] = {}
        for node in self.run.tree.nodes:
            grey = style.INK if node.parent is None else style.MUTED
            styles[node.id] = {"color": grey, "linewidth": self.width, "zorder": 2.5}
        for i, leaf in enumerate(self.leaves):
            if self.crowded:
                styles[leaf.id] = {**PALE, "alpha": max(0.04, min(0.35, 10 / len(self.leaves)))}
            else:
                dashes = "-" if i < 5 else (0, (4, 1.2))  # a second sign, as ten colours are many
                look = {"color": style.CLUSTERS[i], "linewidth": self.width, "linestyle": dashes, "zorder": 3}
                styles[leaf.id] = look
        return styles

    def draw(self, axes: Axes, courses: Mapping[int, Series], *, forked: bool = False) -> None:
        """Draw one line for each node that has a course; with ``forked``, each goes on from its parent's last point."""
        few = self.run.summary["rounds"] <= style.FEW_ROUNDS
        marker: dict[str, Any] = {"marker": "o", "markersize": 4} if few else {}
        lines = facts.joined_courses(self.run.tree, courses) if forked else courses
        for node, line in lines.items():
            axes.plot(line.rounds, line.values, gid=f"node {node}", **self.styles[node], **marker)
        if self.crowded:
            mean = facts.mean_course(courses.values())
            axes.plot(mean.rounds, mean.values, gid="mean", **MEAN)

    def draw_thresholds(self, axes: Axes, courses: Mapping[int, Series]) -> None:
        """Draw a dashed line for each node that has a threshold of its own; where there are many, their mean."""
        if self.crowded:
            courses = {0: facts.mean_course(courses.values())}
        for node, line in courses.items():
            gid = f"threshold {node}"
            axes.plot(line.rounds, line.values, color=style.INK, linewidth=1.0, linestyle="--", gid=gid)

    def legend(self, axes: Axes) -> None:
        """Tell the clusters by name if they have colours, and else how many there are."""
        if self.crowded:
            number = count(len(self.leaves), "cluster")
            handles = [style.handle(number, {**PALE, "alpha": 0.5}), style.handle("mean of the clusters", MEAN)]
        else:
            names = [f"{leaf.id} ({count(len(leaf.members), 'client')})" for leaf in self.leaves]
            handles = [style.handle(n, self.styles[leaf.id]) for n, leaf in zip(names, self.leaves, strict=True)]
        split = [node for nodes in facts.splits_by_round(self.run.tree).values() for node in nodes]
        handles += [style.handle("0, until its split", self.styles[node]) for node in split if node == 0]
        handles += [style.handle("others, until theirs", self.styles[node]) for node in split if node != 0][:1]
        if self.run.tree.nodes[0].split_in == 0 and any(row["cluster"] == 0 for row in self.run.clients):
            handles.append(style.handle("0, in no other yet", self.styles[0]))
        style.legend_beside(axes, handles, "cluster")

    def finish(self, figure: Figure, panels: Sequence[Axes], title: str) -> None:
        """Put on what all panels share: rounds, split markers, and the title."""
        rounds = self.run.summary["rounds"]
        style.label(panels[-1], x="round")
        style.over_rounds(panels[-1], rounds)
        style.mark_splits(panels, facts.splits_by_round(self.run.tree), rounds)
        style.set_title(figure, title, facts.heading(self.run))
