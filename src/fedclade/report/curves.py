"""Pictures of a run: scores and norms over the rounds, similarities, dendrogram.

Scores with separation gaps are drawn as in figure 8 of the CFL paper, norms as in its figure 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering import Similarity
from fedclade.core import Clustered, DataChanged
from fedclade.report import queries
from fedclade.report.colours import truth_colour
from fedclade.report.formats import count
from fedclade.report.picture import (
    FEW_ROUNDS,
    Axis,
    Band,
    Box,
    HeatMap,
    LegendEntry,
    Line,
    Mark,
    Panel,
    Picture,
    Rule,
    rounds_axis,
)
from fedclade.report.queries import Series
from fedclade.report.run_view import ClientOrder, RunView, truth_blocks
from fedclade.runs import Run, SimilarityMatrix, events_of

# The dendrogram of a step of hierarchical clustering: the merges of clusters and their distances.

NAMED = 40
"""With up to this number of clients, their names are below the leaves."""

STRIP = 0.05
"""Height of the strip of true clusters, as a share of the panel's."""

LABELLED = 0.02
"""Smallest share of the clients with which a true cluster has a label in the strip."""

METRICS = {
    "l1": "L1 distance",
    "l2": "L2 distance",
    "cosine": "cosine distance",
    "angle": "angle in degrees",
    "descriptor": "distance of descriptors",
}
"""Titles of the axis of distances, by the metric of the clustering."""


def clustering_step(run: Run) -> tuple[int, Clustered] | None:
    """Return the last step of hierarchical clustering and its round; None if there was none."""
    steps = events_of(run.events, Clustered)
    return steps[-1] if steps else None


def compared(step: Clustered) -> str:
    """Return the noun for the data of a step's distances: ``data`` or ``updates``."""
    return "data" if step.metric in ("angle", "descriptor") else "updates"


@dataclass(frozen=True)
class Merges:
    """Layout of a dendrogram: clients side by side so that no lines cross, merges above them.

    Clusters are numbered as in SciPy: first the m clients, then the merges.
    """

    run: Run
    at: int
    """Round of the step."""
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
        """Height of each cluster; clients are at 0."""
        return [0.0] * self.m + [height for _, _, height in self.step.merges]

    @cached_property
    def order(self) -> list[int]:
        """Indices of the clients from left to right."""
        order: list[int] = []
        pending = [len(self.heights) - 1]
        # No recursion: with single linkage, chains can be as deep as the number of clients.
        while pending:
            cluster = pending.pop()
            if cluster < self.m:
                order.append(cluster)
            else:
                pending += reversed(self.parts[cluster - self.m])
        return order

    @cached_property
    def clients(self) -> list[int]:
        """Ids of the clients from left to right."""
        return [self.step.clients[place] for place in self.order]

    @cached_property
    def places(self) -> list[float]:
        """Horizontal place of each cluster: whole numbers for clients, middles for merges."""
        places = [0.0] * self.m
        for place, client in enumerate(self.order):
            places[client] = place
        for a, b in self.parts:
            places.append((places[a] + places[b]) / 2)
        return places

    @cached_property
    def found(self) -> list[int | None]:
        """Tree node of each client after the step; None for clients that have left the run.

        Children that were created before any round belong to a clustering at the start of the
        first round.
        """
        node = self.run.tree.nodes[self.step.node]
        node_of = dict.fromkeys(node.members, node.id)
        for child in self.run.tree.children(node.id):
            if child.born in (self.at, 0):
                node_of.update(dict.fromkeys(child.members, child.id))
        return [node_of.get(client) for client in self.step.clients]

    @cached_property
    def nodes(self) -> list[int | None]:
        """Tree node of each cluster; None above the cut. Clients that left are ignored."""
        nodes_within = [set[int]() if node is None else {node} for node in self.found]
        for a, b in self.parts:
            nodes_within.append(nodes_within[a] | nodes_within[b])
        return [next(iter(nodes)) if len(nodes) == 1 else None for nodes in nodes_within]

    @cached_property
    def cluster_sizes(self) -> list[int]:
        """Number of clients of each cluster."""
        sizes = [1] * self.m
        for a, b in self.parts:
            sizes.append(sizes[a] + sizes[b])
        return sizes

    @property
    def top(self) -> float:
        """Upper end of a scale on which all merges and the cut can be seen."""
        return 1.06 * max(*self.heights, self.step.threshold or 0.0) or 1.0

    def bridge(self, merge: int) -> list[tuple[float, float]]:
        """Return the corners of the line that joins the parts of a merge, as places and heights."""
        a, b = self.parts[merge]
        height = self.heights[self.m + merge]
        return [
            (self.places[a], self.heights[a]),
            (self.places[a], height),
            (self.places[b], height),
            (self.places[b], self.heights[b]),
        ]


def dendrogram_picture(view: RunView, at: int, step: Clustered) -> Picture:
    """Return the dendrogram of a clustering step, with the height of the cut (FL+HC).

    Below the cut, every cluster has its colour of the other pictures. If the true clusters are
    known, a strip under the leaves shows that of each client.
    """
    merges = Merges(view.run, at, step)
    marks = [*_draw_bridges(view, merges), *_draw_truth_strip(view, merges)]
    title = f"Dendrogram of the clients’ {compared(step)}, round {at}"
    if step.threshold is None:
        title += ", not cut"
    else:
        clusters = count(len(step.sizes), "cluster")
        marks.append(Rule(step.threshold, f"cut at {step.threshold:.4g}: {clusters}"))
    low = 0.0 if view.outcome.truth is None else -1.5 * STRIP * merges.top
    distance = METRICS.get(step.metric, f"{step.metric} distance")
    y_axis = Axis(f"{distance}, {step.linkage} linkage", range=(low, merges.top))
    legend = [*view.colours.current("line"), LegendEntry("@muted", "above the cut")]
    x_axis = _leaf_axis(view, merges)
    return Picture(title, [Panel(marks, y_axis)], x_axis, height=440, legend=legend)


def _leaf_axis(view: RunView, merges: Merges) -> Axis:
    """Return the axis of the clients: their names, or of many their number."""
    ends = (-1, merges.m)
    if merges.m > NAMED:
        return Axis(count(merges.m, "client"), range=ends, grid=False, ticks={})
    ticks = {float(i): view.outcome.name(client) for i, client in enumerate(merges.clients)}
    return Axis("", range=ends, grid=False, ticks=ticks)


def _draw_bridges(view: RunView, merges: Merges) -> list[Mark]:
    """Return the bridges of each node as one broken line in its colour; above the cut in grey."""
    points: dict[int | None, list[tuple[float | None, float | None]]] = {}
    for merge, node in enumerate(merges.nodes[merges.m :]):
        points.setdefault(node, []).extend([*merges.bridge(merge), (None, None)])
    lines: list[Mark] = []
    for node in sorted(points, key=lambda node: -1 if node is None else node):
        line = Line(
            x=[x for x, _ in points[node]],
            y=[y for _, y in points[node]],
            colour="@muted" if node is None else view.colours.of(node),
            name="above the cut" if node is None else f"in cluster {node}",
            hover="{name}<br>distance %{y:.4g}",
            width=1.6 if merges.m <= 200 else 1,
        )
        lines.append(line)
    return lines


def _draw_truth_strip(view: RunView, merges: Merges) -> list[Mark]:
    """Return the strip of true clusters below the leaves; nothing if they are not known."""
    bottom = -1.4 * STRIP * merges.top
    top = -0.4 * STRIP * merges.top
    smallest = LABELLED * merges.m
    boxes: list[Mark] = []
    for start, size, label in truth_blocks(merges.clients, view.outcome.truth or {}):
        box = Box(
            x0=start - 0.5,
            x1=start + size - 0.5,
            y0=bottom,
            y1=top,
            colour=truth_colour(label),
            label=str(label) if size >= smallest else "",
        )
        boxes.append(box)
    return boxes


# Heat maps of the similarities in each cluster, clients in the order of the tree.

MOST_BLOCKS = 80
"""With more clusters, no lines are drawn between them, and with more true clusters no strip."""

LOWEST_BLOCK = 0.04
"""Smallest share of a matrix with which a cluster has a label beside it."""


def similarity_pictures(
    view: RunView, matrices: Sequence[SimilarityMatrix], side: int
) -> list[Picture]:
    """Return a heat map of each matrix of cosine similarities, all with one scale.

    White lines separate the current clusters. If the true clusters are known, a strip at the left
    shows that of each client.

    Parameters
    ----------
    view
        The run.
    matrices
        Similarities of the clients of some nodes.
    side
        Largest number of drawn rows; of more clients, means over neighbours are drawn.
    """
    order = ClientOrder(view.run)
    limit = _find_largest_similarity(matrices)
    return [_similarity_picture(view, matrix, order, limit, side=side) for matrix in matrices]


def _find_largest_similarity(matrices: Sequence[SimilarityMatrix]) -> float:
    """Return the largest absolute similarity of two clients, rounded up to a tenth."""
    largest = 0.0
    for matrix in matrices:
        pairs = np.abs(matrix.alpha[~np.eye(len(matrix.clients), dtype=bool)])
        largest = max(largest, float(pairs[np.isfinite(pairs)].max(initial=0.0)))
    return min(1.0, math.ceil(10 * largest) / 10) or 0.1


def _similarity_picture(
    view: RunView, matrix: SimilarityMatrix, order: ClientOrder, limit: float, *, side: int
) -> Picture:
    rows = order.rows(matrix.clients)
    clients = [matrix.clients[row] for row in rows]
    alpha = matrix.alpha[np.ix_(rows, rows)].astype(float)
    np.fill_diagonal(alpha, np.nan)  # a client's similarity to itself is no information
    client_names = [view.outcome.name(client) for client in clients]
    values, names, step = _average_neighbours(alpha, client_names, side)
    n = len(names)
    clusters = order.clusters(clients)
    truth = order.true_clusters(clients)
    marks: list[Mark] = [HeatMap(values, names, limit, "α")]
    marks += _draw_cluster_lines(clusters, step, n)
    if truth and len(truth) <= MOST_BLOCKS:
        marks += _draw_similarity_strip(truth, step, n)
    ticks: dict[float, str] = {}
    for start, size, name in clusters:
        if size / len(clients) >= LOWEST_BLOCK:
            ticks[(start + size / 2) / step - 0.5] = name
    left = -0.5 if order.truth is None else -0.5 - 0.06 * n  # leaves room for the strip
    labels = sorted(set((order.truth or {}).values()))[:10]
    legend = [LegendEntry(truth_colour(label), f"true cluster {label}", "box") for label in labels]
    subject = "root" if matrix.node == 0 else f"cluster {matrix.node}"
    title = f"{subject}: {count(len(clients), 'client')}, round {matrix.round}"
    y_axis = Axis("true cluster" if truth else "", range=(n - 0.5, -0.5), grid=False)
    x_axis = Axis("current cluster", range=(left, n - 0.5), ticks=ticks, grid=False)
    return Picture(title, [Panel(marks, y_axis)], x_axis, height=520, legend=legend)


def _average_neighbours(
    alpha: Similarity, names: list[str], side: int
) -> tuple[Similarity, list[str], int]:
    """Reduce a matrix to at most ``side`` rows by means over neighbours.

    Returns
    -------
    tuple
        The matrix, the names of its rows, and the number of clients of a row.
    """
    n = len(alpha)
    step = -(-n // side)
    if step == 1:
        if len(set(names)) < n:
            names = [f"{name} ({i})" for i, name in enumerate(names)]
        return alpha, names, 1
    starts = np.arange(0, n, step)
    known = ~np.isnan(alpha)
    sums = _sum_blocks(np.where(known, alpha, 0.0), starts)
    counts = _sum_blocks(known.astype(float), starts)
    block_names = [f"{names[i]} … ({i // step})" for i in starts]
    with np.errstate(invalid="ignore"):  # a block of one client with itself has no mean
        return sums / counts, block_names, step


def _sum_blocks(values: Similarity, starts: NDArray[np.int_]) -> Similarity:
    """Sum a matrix over the square blocks that begin at some rows and columns."""
    return np.add.reduceat(np.add.reduceat(values, starts, 0), starts, 1)


def _draw_cluster_lines(blocks: Sequence[tuple[int, int, str]], step: int, n: int) -> list[Mark]:
    """Return lines between the current clusters."""
    if len(blocks) > min(MOST_BLOCKS, n / 2):
        return []
    places = [start / step - 0.5 for start, _, _ in blocks[1:]]
    low = -0.5
    high = n - 0.5
    vertical: list[Mark] = [Box(place, place, low, high, colour="@panel") for place in places]
    horizontal: list[Mark] = [Box(low, high, place, place, colour="@panel") for place in places]
    return vertical + horizontal


def _draw_similarity_strip(truth: Sequence[tuple[int, int, int]], step: int, n: int) -> list[Mark]:
    """Return the strip of true clusters."""
    left = -0.5 - 0.055 * n
    right = -0.5 - 0.015 * n
    smallest = LOWEST_BLOCK * n * step
    boxes: list[Mark] = []
    for start, size, label in truth:
        box = Box(
            x0=left,
            x1=right,
            y0=start / step - 0.5,
            y1=(start + size) / step - 0.5,
            colour=truth_colour(label),
            label=str(label) if size >= smallest else "",
        )
        boxes.append(box)
    return boxes


# Scores and norms over the rounds.

BAND = (10, 90)
"""Percentiles of the clusters' values between which a band is drawn if there are many."""


def score_picture(view: RunView) -> Picture:
    """Return the score of every cluster over the rounds, and the separation gap below (CFL fig. 8).

    If the true clusters are not known, α_cross^max takes the place of the gap g(α). If the run has
    neither, only the scores are drawn.
    """
    scores = queries.joined_series(view.run.tree, queries.score_series(view.run))
    lines = _draw_lines(view, scores, f"{view.score.label} {view.score.hover()}")
    panels = [Panel(lines, view.score.axis("mean test"), share=2)]
    if view.outcome.truth is not None:
        gaps = queries.criterion_series(view.run, "separation_gap")
        name = "separation gap g(α)"
        y_axis = Axis("gap g(α)")
    else:
        gaps = queries.criterion_series(view.run, "alpha_cross_max")
        name = "α cross max"
        y_axis = Axis(name)
    if gaps:
        zero = Rule(0, dashed=False)
        panels.append(Panel([zero, *_draw_lines(view, gaps, f"{name} %{{y:.3g}}")], y_axis))
    title = f"{view.score.title} of the clusters"
    return _rounds_picture(view, title, panels, height=500 if gaps else 380)


def norms_picture(view: RunView) -> Picture | None:
    """Return the two norms of CFL over the rounds for every cluster (eqs. 32 and 33, CFL fig. 7).

    If the norm of the mean update falls and the largest norm of an update does not, the members of
    a cluster have different optima. Thresholds are dashed. None for a run without norms.
    """
    largest = queries.criterion_series(view.run, "max_norm")
    mean = queries.criterion_series(view.run, "mean_norm")
    if not largest and not mean:
        return None
    is_positive = all(_is_positive(series) for series in [*largest.values(), *mean.values()])
    eps2, eps1 = queries.norm_thresholds(view.run)
    panels: list[Panel] = []
    for title, norms, threshold, symbol in (
        ("largest", largest, eps2, "ε₂"),
        ("mean", mean, eps1, "ε₁"),
    ):
        marks = _draw_lines(view, norms, f"{title} norm %{{y:.3g}}")
        if isinstance(threshold, Mapping):
            marks += _draw_thresholds(view, threshold, symbol)
        elif threshold is not None:
            marks.append(Rule(threshold, f"{symbol} = {threshold:g}"))
        panels.append(Panel(marks, Axis(f"{title} update", log=is_positive)))
    return _rounds_picture(view, "Norms of the updates", panels, height=460)


def _is_positive(series: Series) -> bool:
    return all(value > 0 for value in series.values)


def _rounds_picture(view: RunView, title: str, panels: list[Panel], *, height: int) -> Picture:
    """Return panels over the rounds, with vertical lines at splits and changes of the data."""
    labels: dict[int, str] = {}
    for round_number, nodes in queries.splits_by_round(view.run.tree).items():
        names = f"{len(nodes)} nodes"
        if len(nodes) <= 2:
            names = ", ".join(str(node) for node in nodes)
        labels[round_number] = f"split {names}"
    for round_number, _ in events_of(view.run.events, DataChanged):
        if round_number in labels:
            labels[round_number] += ", other data"
        else:
            labels[round_number] = "other data"
    x_axis = rounds_axis(view.rounds)
    return Picture(title, panels, x_axis, height, legend=_list_legend(view), uprights=labels)


def _list_legend(view: RunView) -> list[LegendEntry]:
    if view.colours.crowded:
        low, high = BAND
        band = f"{low}th to {high}th percentile of the clusters"
        return [LegendEntry("@c1", "mean of the clusters"), LegendEntry("@accent", band)]
    legend = view.colours.legend()
    return legend if len(legend) > 1 else []


def _draw_lines(view: RunView, series_of: Mapping[int, Series], label: str) -> list[Mark]:
    """Return a line for every cluster; with more clusters than colours, a mean and a band."""
    hover = f"{{name}}, round %{{x}}<br>{label}"
    if view.colours.crowded:
        return _draw_band(series_of, hover)
    lines: list[Mark] = []
    for node, series in series_of.items():
        line = Line(
            x=series.rounds,
            y=series.values,
            colour=view.colours.of(node),
            name=f"cluster {node}",
            hover=hover,
            dash=view.colours.dash(node),
            dots=view.rounds <= FEW_ROUNDS or len(series.rounds) == 1,
        )
        lines.append(line)
    return lines


def _draw_band(series_of: Mapping[int, Series], hover: str) -> list[Mark]:
    """Return the mean of the clusters, and a band that contains most of them."""
    values = queries.values_by_round(series_of.values())
    mean = queries.mean_series(series_of.values())
    low = [float(np.percentile(at_round, BAND[0])) for at_round in values.values()]
    high = [float(np.percentile(at_round, BAND[1])) for at_round in values.values()]
    name = "mean of the clusters"
    line = Line(x=mean.rounds, y=mean.values, colour="@c1", name=name, hover=hover)
    return [Band(tuple(values), low, high, "@accent"), line]


def _draw_thresholds(view: RunView, series_of: Mapping[int, Series], symbol: str) -> list[Mark]:
    """Return a dashed line for each cluster's own threshold; for many clusters, their mean."""
    if view.colours.crowded:
        series_of = {0: queries.mean_series(series_of.values())}
    lines: list[Mark] = []
    for node, series in series_of.items():
        line = Line(
            x=series.rounds,
            y=series.values,
            colour="@ink",
            dash="dash",
            width=1,
            name=f"{symbol} of {node}",
            hover="{name}, round %{x}<br>%{y:.3g}",
        )
        lines.append(line)
    return lines
