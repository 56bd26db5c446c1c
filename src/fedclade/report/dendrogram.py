"""How a step of hierarchical clustering came about: which clusters merged at what distance, and where that was cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedclade.core import Clustered
from fedclade.report.colours import truth_colour
from fedclade.report.formats import count
from fedclade.report.outcome import truth_blocks
from fedclade.report.picture import Axis, Box, LegendEntry, Line, Mark, Panel, Picture, Rule
from fedclade.report.run_view import RunView
from fedclade.runs import Run, events_of

NAMED = 40
"""Up to so many clients have their names below their leaves."""

STRIP = 0.05
"""Height of the strip of true clusters, as a share of the panel's."""

LABELLED = 0.02
"""True clusters of a smaller share of the clients have no label in the strip."""

METRICS = {
    **{"l1": "L1 distance", "l2": "L2 distance", "cosine": "cosine distance"},
    **{"angle": "angle in degrees", "descriptor": "distance of descriptors"},
}


def clustering_step(run: Run) -> tuple[int, Clustered] | None:
    """Return the last step of hierarchical clustering and its round; None if there was none."""
    steps = events_of(run.events, Clustered)
    return steps[-1] if steps else None


def compared(step: Clustered) -> str:
    """Return what of the clients was compared in a step."""
    return "data" if step.metric in ("angle", "descriptor") else "updates"


@dataclass(frozen=True)
class Merges:
    """A dendrogram: clients side by side, so that no lines cross, and every merge above its two parts.

    Clusters are numbered as in SciPy: m clients, then the merges.
    """

    run: Run
    at: int
    """The round of the step."""
    step: Clustered

    @property
    def m(self) -> int:
        """Number of clients."""
        return len(self.step.clients)

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """The two clusters of each merge."""
        return [(a, b) for a, b, _ in self.step.merges]

    @cached_property
    def heights(self) -> list[float]:
        """Of all clusters; clients are at 0."""
        return [0.0] * self.m + [height for _, _, height in self.step.merges]

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
    def clients(self) -> list[int]:
        """The ids of the clients from left to right."""
        return [self.step.clients[place] for place in self.order]

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
    def found(self) -> list[int | None]:
        """The node of the parameter tree that each client went to; None for those that have left the run since.

        Children born before any round trained are those of a clustering at the start of the first.
        """
        node = self.run.tree.nodes[self.step.node]
        born = [child for child in self.run.tree.children(node.id) if child.born in (self.at, 0)]
        node_of = {client: part.id for part in (node, *born) for client in part.members}
        return [node_of.get(client) for client in self.step.clients]

    @cached_property
    def nodes(self) -> list[int | None]:
        """Of all clusters the node that they lie in, whichever clients have left; None above the cut."""
        within = [{node} - {None} for node in self.found]
        for a, b in self.parts:
            within.append(within[a] | within[b])
        return [next(iter(nodes)) if len(nodes) == 1 else None for nodes in within]

    @cached_property
    def cluster_sizes(self) -> list[int]:
        """Of all clusters the number of clients."""
        sizes = [1] * self.m
        for a, b in self.parts:
            sizes.append(sizes[a] + sizes[b])
        return sizes

    @property
    def top(self) -> float:
        """The end of a scale on which all merges and the cut can be seen."""
        return 1.06 * max(*self.heights, self.step.threshold or 0.0) or 1.0

    def bridge(self, merge: int) -> list[tuple[float, float]]:
        """Return the corners of the line that joins the two parts of a merge, as places and heights."""
        (a, b), height = self.parts[merge], self.heights[self.m + merge]
        left, right = self.places[a], self.places[b]
        return [(left, self.heights[a]), (left, height), (right, height), (right, self.heights[b])]


def dendrogram_picture(view: RunView, at: int, step: Clustered) -> Picture:
    """Return the dendrogram of a clustering step, and the height at which it was cut (FL+HC).

    Below the cut every cluster has the colour that it has in the other pictures. Where the truth is known, a strip
    under the leaves shows each client's true cluster.
    """
    merges, found = Merges(view.run, at, step), count(len(step.sizes), "cluster")
    low = -1.5 * STRIP * merges.top if view.outcome.truth is not None else 0.0
    cut = [] if step.threshold is None else [Rule(step.threshold, f"cut at {step.threshold:.4g}: {found}")]
    distance = METRICS.get(step.metric, f"{step.metric} distance")
    y = Axis(f"{distance}, {step.linkage} linkage", range=(low, merges.top))
    panel = Panel([*_bridges(view, merges), *_strip(view, merges), *cut], y)
    named = merges.clients if merges.m <= NAMED else []
    ticks = {float(place): view.outcome.name(client) for place, client in enumerate(named)}
    x = Axis("" if ticks else count(merges.m, "client"), range=(-1, merges.m), grid=False, ticks=ticks)
    legend = [*view.colours.current("line"), LegendEntry("@muted", "above the cut")]
    title = f"Dendrogram of the clients’ {compared(step)}, round {at}{'' if cut else ', not cut'}"
    return Picture(title, [panel], x, 440, legend)


def _bridges(view: RunView, merges: Merges) -> list[Mark]:
    """Return the bridges of each node as one broken line, in its colour; above the cut in grey."""
    points: dict[int | None, list[tuple[float | None, float | None]]] = {}
    for merge, node in enumerate(merges.nodes[merges.m :]):
        points.setdefault(node, []).extend([*merges.bridge(merge), (None, None)])
    return [
        Line(
            x=[x for x, _ in points[node]],
            y=[y for _, y in points[node]],
            colour="@muted" if node is None else view.colours.of(node),
            name="above the cut" if node is None else f"in cluster {node}",
            hover="{name}<br>distance %{y:.4g}",
            width=1.6 if merges.m <= 200 else 1,
        )
        for node in sorted(points, key=lambda node: -1 if node is None else node)
    ]


def _strip(view: RunView, merges: Merges) -> list[Mark]:
    """Return the strip of true clusters below the leaves; nothing where they are not known."""
    bottom, top, smallest = -1.4 * STRIP * merges.top, -0.4 * STRIP * merges.top, LABELLED * merges.m
    return [
        Box(start - 0.5, start + n - 0.5, bottom, top, truth_colour(label), str(label) if n >= smallest else "")
        for start, n, label in truth_blocks(merges.clients, view.outcome.truth or {})
    ]
