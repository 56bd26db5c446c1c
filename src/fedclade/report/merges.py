"""A step of hierarchical clustering: where the clusters that merged lie in a dendrogram."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedclade.report import facts
from fedclade.runs import Row, Run

_METRICS = {"l1": "L1 distance", "l2": "L2 distance", "cosine": "cosine distance", "angle": "angle in degrees"}


def metric_in_words(metric: str) -> str:
    """Return what to call a metric."""
    return _METRICS.get(metric, f"{metric} distance")


@dataclass(frozen=True)
class Merges:
    """A dendrogram: clients side by side, so that no lines cross, and every merge above its two parts.

    Clusters are numbered as in SciPy: m clients, then the merges.

    Parameters
    ----------
    run
        In which the clients were clustered.
    step
        The event of that, see :func:`fedclade.report.facts.clustering_step`.
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
    def found(self) -> list[int | None]:
        """The node of the parameter tree that each client went to; None for those that have left the run since."""
        node_of = facts.children_of_split(self.run, self.step)
        return [node_of.get(client) for client in self.step["clients"]]

    @cached_property
    def nodes(self) -> list[int | None]:
        """Of all clusters the node that they lie in, whoever has left; None above the cut."""
        within = [{node} - {None} for node in self.found]
        for a, b in self.parts:
            within.append(within[a] | within[b])
        return [next(iter(nodes)) if len(nodes) == 1 else None for nodes in within]

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """The number of clients in each node, from left to right."""
        return Counter(node for client in self.order if (node := self.found[client]) is not None)

    @property
    def top(self) -> float:
        """The end of a scale on which all merges and the cut can be seen."""
        return 1.06 * max(self.heights[-1], self.step["threshold"] or 0.0) or 1.0

    @cached_property
    def bridges(self) -> list[list[tuple[float, float]]]:
        """The four corners of the line that joins the two parts of each merge, as places and heights."""
        bridges: list[list[tuple[float, float]]] = []
        for (a, b), height in zip(self.parts, self.heights[self.m :], strict=True):
            left, right = (self.places[a], self.heights[a]), (self.places[b], self.heights[b])
            bridges.append([left, (left[0], height), (right[0], height), right])
        return bridges
