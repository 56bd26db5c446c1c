"""How a step of hierarchical clustering came about: which clusters merged at what distance, and where that was cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fedclade.report import facts, style
from fedclade.report.formats import count
from fedclade.store.run import Row, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMED = 40
"""Up to so many clients are told by name below their leaves."""

STRIP = 0.05
"""Height of the strip of true clusters, as a share of the panel's."""

METRICS = {"l1": "L1 distance", "l2": "L2 distance", "cosine": "cosine distance", "angle": "angle in degrees"}
"""What to call a metric in words."""


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
    style.label(axes, y=f"{METRICS[step['metric']]} of clusters that merge, {step['linkage']} linkage")
    compared = "data" if step["metric"] == "angle" else "updates"
    style.set_title(figure, f"Dendrogram of the clients’ {compared}, round {step['round']}", facts.heading(run))
    return figure


@dataclass(frozen=True)
class _Layout:
    """A dendrogram: clients side by side, so that no lines cross, and every merge above its two parts.

    Clusters are numbered as in SciPy: m clients, then the merges.
    """

    run: Run
    step: Row

    @property
    def m(self) -> int:
        """Number of clients."""
        return len(self.step["clients"])

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """The two clusters of each merge."""
        return [(a, b) for a, b, _ in self.step["merges"]]

    @cached_property
    def heights(self) -> list[float]:
        """Of all clusters; clients are at 0."""
        return [0.0] * self.m + [height for _, _, height in self.step["merges"]]

    @cached_property
    def order(self) -> list[int]:
        """The clients from left to right."""
        order: list[int] = []
        pending = [len(self.heights) - 1]
        while pending:  # no recursion: single linkage makes chains as deep as there are clients
            cluster = pending.pop()
            if cluster < self.m:
                order.append(cluster)
            else:
                pending += reversed(self.parts[cluster - self.m])
        return order

    @cached_property
    def places(self) -> list[float]:
        """Of all clusters from left to right: of a client a whole number, of a merge the middle of its parts."""
        places = [0.0] * self.m
        for place, client in enumerate(self.order):
            places[client] = place
        for a, b in self.parts:
            places.append((places[a] + places[b]) / 2)
        return places

    @cached_property
    def found(self) -> list[int]:
        """The node of the parameter tree that each client went to."""
        node_of = facts.children_of_split(self.run, self.step)
        return [node_of[client] for client in self.step["clients"]]

    @cached_property
    def nodes(self) -> list[int | None]:
        """Of all clusters the node that they lie in; None above the cut."""
        nodes: list[int | None] = [*self.found]
        for a, b in self.parts:
            nodes.append(nodes[a] if nodes[a] == nodes[b] else None)
        return nodes

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """The number of clients in each node, from left to right."""
        return Counter(self.found[client] for client in self.order)

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

        bridges: list[list[tuple[float, float]]] = []
        for (a, b), height in zip(self.parts, self.heights[self.m :], strict=True):
            left, right = (self.places[a], self.heights[a]), (self.places[b], self.heights[b])
            bridges.append([left, (left[0], height), (right[0], height), right])
        colours = [self.colour(node) for node in self.nodes[self.m :]]
        width = 1.3 if self.m <= 200 else 0.6
        axes.add_collection(LineCollection(bridges, colors=colours, linewidths=width, gid="merges"))
        axes.set_xlim(-1, self.m)
        axes.set_ylim(0, 1.06 * max(self.heights[-1], self.step["threshold"] or 0.0) or 1.0)

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
            for start, size, cluster in facts.blocks([outcome.truth[client] for client in clients]):
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
