"""How a step of hierarchical clustering came about: which clusters merged at what distance, and where that was cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedclade.report import facts, style
from fedclade.report.formats import count
from fedclade.report.merges import Merges, metric_in_words
from fedclade.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 40
"""Up to so many clients are told by name below their leaves."""

STRIP = 0.05
"""Height of the strip of true clusters, as a share of the panel's."""


def dendrogram_figure(run: Run) -> Figure | None:
    """Draw the dendrogram of a run's clustering step, and the height at which it was cut (FL+HC).

    Below the cut every cluster has the colour that it has in the other figures. Where the truth is known, a strip under
    the leaves shows each client's true cluster. None for a run without such a step.
    """
    step = facts.clustering_step(run)
    if step is None:
        return None
    figure = style.new_figure(9.6, 5.6)
    axes = figure.subplots()
    style.plain(axes)
    axes.grid(visible=False, axis="x")
    layout = _Layout(run, step)
    layout.draw_merges(axes)
    layout.draw_cut(axes)
    layout.draw_clients(axes)
    layout.draw_legend(axes)
    style.label(axes, y=f"{metric_in_words(step['metric'])} of clusters that merge, {step['linkage']} linkage")
    compared = "data" if step["metric"] == "angle" else "updates"
    style.set_title(figure, f"Dendrogram of the clients’ {compared}, round {step['round']}", facts.heading(run))
    return figure


@dataclass(frozen=True)
class _Layout(Merges):
    """A dendrogram as it is drawn."""

    @property
    def crowded(self) -> bool:
        """Whether there are more clusters than colours."""
        return len(self.sizes) > len(style.CLUSTERS)

    def colour(self, node: int | None) -> str:
        """Return the colour of a node, the one that it has in the other figures."""
        if node is None:
            return style.MUTED
        return style.ACCENT if self.crowded else style.CLUSTERS[sorted(self.sizes).index(node)]

    def draw_merges(self, axes: Axes) -> None:
        """Draw every merge as a bridge over its two parts."""
        from matplotlib.collections import LineCollection

        colours = [self.colour(node) for node in self.nodes[self.m :]]
        width = 1.3 if self.m <= 200 else 0.6
        axes.add_collection(LineCollection(self.bridges, colors=colours, linewidths=width, gid="merges"))
        axes.set_xlim(-1, self.m)
        axes.set_ylim(0, self.top)

    def draw_cut(self, axes: Axes) -> None:
        """Draw the line of the cut, and say what it leaves."""
        threshold, clusters = self.step["threshold"], count(len(self.step["sizes"]), "cluster")
        if threshold is None:
            style.note(axes, f"not cut: {clusters}", (1, 1), shift=(-4, -4), ha="right", va="top", gid="cut label")
            return
        axes.axhline(threshold, color=style.INK, linewidth=1.0, linestyle="--", gid="cut")
        label = f"cut at {threshold:.4g}: {clusters}"
        style.note(axes, label, (1, threshold), y="data", shift=(-2, 3), ha="right", gid="cut label")

    def draw_clients(self, axes: Axes) -> None:
        """Draw what is known of each client under its leaf: its name if there is room, and its true cluster."""
        outcome, top = facts.Outcome.of(self.run), axes.get_ylim()[1]
        clients = [self.step["clients"][place] for place in self.order]
        named = clients if self.m <= NAMED else []
        axes.set_xticks(range(len(named)), [outcome.name(client) for client in named], rotation=90)
        axes.tick_params(axis="x", length=0, labelsize=8.5)
        label = "client" if named else count(self.m, "client")
        if outcome.truth is not None:
            for start, size, cluster in facts.truth_blocks(clients, outcome.truth):
                colour = style.TRUTH[cluster % len(style.TRUTH)]
                axes.bar(
                    start + (size - 1) / 2, STRIP * top, size, -1.4 * STRIP * top, color=colour, gid="true cluster"
                )
                if size >= 0.02 * self.m:
                    middle = (start + (size - 1) / 2, -0.9 * STRIP * top)
                    axes.text(*middle, str(cluster), ha="center", va="center", fontsize=9.5, color=style.INK)
            axes.set_ylim(-1.5 * STRIP * top, top)
            label = "true cluster of each client" if named else f"true clusters of the {label}"
        style.label(axes, x=label)

    def draw_legend(self, axes: Axes) -> None:
        """Tell the clusters by name, or how many there are."""
        names = {node: f"{node} ({count(n, 'client')})" for node, n in self.sizes.items()}
        handles = [style.handle(name, {"color": self.colour(node)}) for node, name in names.items()]
        if self.crowded:
            handles = [style.handle(count(len(names), "cluster"), {"color": style.ACCENT})]
        style.legend_beside(axes, handles, "cluster")
