"""Pictures of a run: scores and update norms over the rounds, similarities, and a dendrogram.

A picture (:class:`fedclade.report.picture.Picture`) is a description of a plot that is drawn with
Plotly on pages and with matplotlib in files. Scores with separation gaps follow figure 8 of the CFL
paper, norms its figure 7.
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

# The dendrogram of a hierarchical clustering step: the merges of clusters and their distances.

NAMED = 40
"""Largest number of clients with which the clients' names are written below a dendrogram."""

STRIP = 0.05
"""Height of the strip of true clusters below a dendrogram, as a share of the axis above 0."""

LABELLED = 0.02
"""Smallest share of the clients with which a true cluster is labelled in the strip."""

METRICS = {
    "l1": "L1 distance",
    "l2": "L2 distance",
    "cosine": "cosine distance",
    "angle": "angle in degrees",
    "descriptor": "distance of descriptors",
}
"""Titles of the axis of distances, by the metric of the clustering."""


def clustering_step(run: Run) -> tuple[int, Clustered] | None:
    """Return the round and event of a run's last hierarchical clustering; None if there is none."""
    steps = events_of(run.events, Clustered)
    if not steps:
        return None
    return steps[-1]


def compared(step: Clustered) -> str:
    """Return the noun for the data that a clustering step compared: ``data`` or ``updates``."""
    return "data" if step.metric in ("angle", "descriptor") else "updates"


@dataclass(frozen=True)
class Merges:
    """Layout of the dendrogram of a hierarchical clustering step.

    Clients are side by side in an order in which no lines cross, and merges of two clusters are
    above them. Clusters are numbered as in SciPy: first the m clients (0 to m - 1), then one
    cluster per merge.

    Parameters
    ----------
    run
        Run whose clients were clustered.
    at
        Round of the clustering step.
    step
        Event of the clustering step, with the merges and their distances.
    """

    run: Run
    at: int
    """Round of the step."""
    step: Clustered

    @property
    def m(self) -> int:
        """Number of clustered clients."""
        return len(self.step.clients)

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """The two clusters that each merge joins, by their numbers."""
        return [(a, b) for a, b, _ in self.step.merges]

    @cached_property
    def heights(self) -> list[float]:
        """Height (distance of the merge) of each cluster by cluster number; 0 for a client."""
        return [0.0] * self.m + [height for _, _, height in self.step.merges]

    @cached_property
    def order(self) -> list[int]:
        """Positions of the clients in ``step.clients``, in the order from left to right."""
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
        """Ids of the clients in the order from left to right."""
        return [self.step.clients[place] for place in self.order]

    @cached_property
    def places(self) -> list[float]:
        """Horizontal position of each cluster, by cluster number.

        Clients are at 0, 1, 2, ...; a merge is in the middle between its two clusters.
        """
        places = [0.0] * self.m
        for place, client in enumerate(self.order):
            places[client] = place
        for a, b in self.parts:
            places.append((places[a] + places[b]) / 2)
        return places

    @cached_property
    def found(self) -> list[int | None]:
        """Id of the tree node that each client belongs to after the clustering step.

        The order is that of ``step.clients``. The entry of a client that has left the run is None.
        Children of the clustered node belong to the step if they were created in its round, or in
        round 0, which stands for a clustering at the start of the first round.
        """
        node = self.run.tree.nodes[self.step.node]
        node_of = dict.fromkeys(node.members, node.id)
        for child in self.run.tree.children(node.id):
            if child.born in (self.at, 0):
                node_of.update(dict.fromkeys(child.members, child.id))
        return [node_of.get(client) for client in self.step.clients]

    @cached_property
    def nodes(self) -> list[int | None]:
        """Id of the tree node that contains all clients of each cluster, by cluster number.

        None for clusters above the cut, which contain clients of several nodes. Clients that have
        left the run are ignored.
        """
        nodes_within = [set[int]() if node is None else {node} for node in self.found]
        for a, b in self.parts:
            nodes_within.append(nodes_within[a] | nodes_within[b])
        return [next(iter(nodes)) if len(nodes) == 1 else None for nodes in nodes_within]

    @cached_property
    def cluster_sizes(self) -> list[int]:
        """Number of clients in each cluster, by cluster number."""
        sizes = [1] * self.m
        for a, b in self.parts:
            sizes.append(sizes[a] + sizes[b])
        return sizes

    @property
    def top(self) -> float:
        """Upper end of the vertical axis, above all merges and the cut."""
        return 1.06 * max(*self.heights, self.step.threshold or 0.0) or 1.0

    def bridge(self, merge: int) -> list[tuple[float, float]]:
        """Return the corners (position, height) of the line that joins the two clusters of a merge.

        Parameters
        ----------
        merge
            Number of the merge, counted from 0.
        """
        a, b = self.parts[merge]
        height = self.heights[self.m + merge]
        return [
            (self.places[a], self.heights[a]),
            (self.places[a], height),
            (self.places[b], height),
            (self.places[b], self.heights[b]),
        ]


def dendrogram_picture(view: RunView, at: int, step: Clustered) -> Picture:
    """Return the dendrogram of a clustering step, with a line at the height of the cut (FL+HC).

    Below the cut, every cluster has the colour that it has in all other pictures. If the true
    clusters are known, a strip under the dendrogram has the colour of each client's true cluster.

    Parameters
    ----------
    view
        The run.
    at
        Round of the clustering step.
    step
        Event of the clustering step.
    """
    merges = Merges(view.run, at, step)
    marks = [*_draw_bridges(view, merges), *_draw_truth_strip(view, merges)]
    title = f"Dendrogram of the clients’ {compared(step)}, round {at}"
    if step.threshold is None:
        title += ", not cut"
    else:
        clusters = count(len(step.sizes), "cluster")
        marks.append(Rule(step.threshold, f"cut at {step.threshold:.4g}: {clusters}"))
    if view.outcome.truth is None:
        low = 0.0
    else:
        low = -1.5 * STRIP * merges.top
    distance = METRICS.get(step.metric, f"{step.metric} distance")
    y_axis = Axis(f"{distance}, {step.linkage} linkage", range=(low, merges.top))
    legend = [*view.colours.current("line"), LegendEntry("@muted", "above the cut")]
    x_axis = _leaf_axis(view, merges)
    return Picture(title, [Panel(marks, y_axis)], x_axis, height=440, legend=legend)


def _leaf_axis(view: RunView, merges: Merges) -> Axis:
    """Return the horizontal axis of a dendrogram, with the names of the clients.

    If there are too many clients for names, the axis only states their number.
    """
    ends = (-1, merges.m)
    if merges.m > NAMED:
        return Axis(count(merges.m, "client"), range=ends, grid=False, ticks={})
    ticks = {float(i): view.outcome.name(client) for i, client in enumerate(merges.clients)}
    return Axis("", range=ends, grid=False, ticks=ticks)


def _put_none_first(node: int | None) -> int:
    """Return a sort key by which None is sorted before all node ids."""
    return -1 if node is None else node


def _draw_bridges(view: RunView, merges: Merges) -> list[Mark]:
    """Return the lines of a dendrogram: for each tree node one line with gaps, in its colour.

    A line consists of the merges of clusters that belong to the node. Merges above the cut, which
    join clients of several nodes, are one grey line.
    """
    points: dict[int | None, list[tuple[float | None, float | None]]] = {}
    for merge, node in enumerate(merges.nodes[merges.m :]):
        points.setdefault(node, []).extend([*merges.bridge(merge), (None, None)])
    lines: list[Mark] = []
    for node in sorted(points, key=_put_none_first):
        if node is None:
            colour = "@muted"
            name = "above the cut"
        else:
            colour = view.colours.of(node)
            name = f"in cluster {node}"
        line = Line(
            x=[x for x, _ in points[node]],
            y=[y for _, y in points[node]],
            colour=colour,
            name=name,
            hover="{name}<br>distance %{y:.4g}",
            width=1.6 if merges.m <= 200 else 1,
        )
        lines.append(line)
    return lines


def _draw_truth_strip(view: RunView, merges: Merges) -> list[Mark]:
    """Return the boxes of the strip of true clusters under a dendrogram; empty if none is known."""
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


# Heat maps of the similarities in each cluster, with clients in the order of the tree.

MOST_BLOCKS = 80
"""Largest number of clusters with lines between them, and of true clusters with a strip."""

LOWEST_BLOCK = 0.04
"""Smallest share of a matrix with which a cluster has a label next to the matrix."""


def similarity_pictures(
    view: RunView, matrices: Sequence[SimilarityMatrix], side: int
) -> list[Picture]:
    """Return a heat map of each matrix of cosine similarities; all have the same colour scale.

    White lines separate the current clusters. If the true clusters are known, a strip at the left
    has the colour of each client's true cluster.

    Parameters
    ----------
    view
        The run.
    matrices
        Similarity matrices of the clients of some nodes of the parameter tree.
    side
        Largest number of drawn rows. For more clients, means over neighbouring rows are drawn.
    """
    order = ClientOrder(view.run)
    limit = _find_largest_similarity(matrices)
    return [_similarity_picture(view, matrix, order, limit, side=side) for matrix in matrices]


def _find_largest_similarity(matrices: Sequence[SimilarityMatrix]) -> float:
    """Return the largest absolute similarity of two different clients, rounded up to a tenth."""
    largest = 0.0
    for matrix in matrices:
        pairs = np.abs(matrix.alpha[~np.eye(len(matrix.clients), dtype=bool)])
        largest = max(largest, float(pairs[np.isfinite(pairs)].max(initial=0.0)))
    return min(1.0, math.ceil(10 * largest) / 10) or 0.1


def _similarity_picture(
    view: RunView, matrix: SimilarityMatrix, order: ClientOrder, limit: float, *, side: int
) -> Picture:
    """Return the heat map of one matrix of cosine similarities.

    Parameters
    ----------
    view
        The run.
    matrix
        Similarities of the clients of one tree node.
    order
        Order of the clients in the heat map.
    limit
        Absolute similarity at the ends of the colour scale.
    side
        Largest number of drawn rows.
    """
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
    if matrix.node == 0:
        subject = "root"
    else:
        subject = f"cluster {matrix.node}"
    title = f"{subject}: {count(len(clients), 'client')}, round {matrix.round}"
    y_axis = Axis("true cluster" if truth else "", range=(n - 0.5, -0.5), grid=False)
    x_axis = Axis("current cluster", range=(left, n - 0.5), ticks=ticks, grid=False)
    return Picture(title, [Panel(marks, y_axis)], x_axis, height=520, legend=legend)


def _average_neighbours(
    alpha: Similarity, names: list[str], side: int
) -> tuple[Similarity, list[str], int]:
    """Reduce a similarity matrix to at most ``side`` rows by means over blocks of neighbours.

    Parameters
    ----------
    alpha
        Similarities ``[n, n]`` of n clients; missing values are NaN.
    names
        Names of the n clients.
    side
        Largest number of rows of the result.

    Returns
    -------
    tuple
        The reduced matrix, the names of its rows, and the number of clients per row.
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
    with np.errstate(invalid="ignore"):  # 0 / 0 for a block that is only a client with itself
        return sums / counts, block_names, step


def _sum_blocks(values: Similarity, starts: NDArray[np.int_]) -> Similarity:
    """Divide a square matrix into blocks, and return the sum of each block.

    Rows and columns are divided at the same positions ``starts``, the first of each block.
    """
    return np.add.reduceat(np.add.reduceat(values, starts, 0), starts, 1)


def _draw_cluster_lines(blocks: Sequence[tuple[int, int, str]], step: int, n: int) -> list[Mark]:
    """Return lines between the current clusters in a heat map; none if there are too many clusters.

    Parameters
    ----------
    blocks
        Clusters in the order of rows: first client, number of clients, name.
    step
        Number of clients per row of the heat map.
    n
        Number of rows of the heat map.
    """
    if len(blocks) > min(MOST_BLOCKS, n / 2):
        return []
    places = [start / step - 0.5 for start, _, _ in blocks[1:]]
    low = -0.5
    high = n - 0.5
    vertical: list[Mark] = [Box(place, place, low, high, colour="@panel") for place in places]
    horizontal: list[Mark] = [Box(low, high, place, place, colour="@panel") for place in places]
    return vertical + horizontal


def _draw_similarity_strip(truth: Sequence[tuple[int, int, int]], step: int, n: int) -> list[Mark]:
    """Return the boxes of the strip of true clusters at the left of a heat map.

    Parameters
    ----------
    truth
        True clusters in the order of rows: first client, number of clients, true cluster.
    step
        Number of clients per row of the heat map.
    n
        Number of rows of the heat map.
    """
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
"""Percentiles of the clusters' values between which a band is drawn if there are many clusters."""

BAND_COLOUR = "@accent/0.25"
"""Colour of this band and of its entry in the legend."""


def score_picture(view: RunView) -> Picture:
    """Return the scores of the clusters over the rounds, with the separation gap (CFL fig. 8).

    The separation gap g(α) of each cluster is drawn below the scores. If the true clusters are
    unknown, α_cross^max (the largest similarity across the best bi-partition) takes its place. If
    the run has recorded neither, only the scores are drawn.
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
    a cluster have different optima. Thresholds are drawn as dashed lines. None for a run without
    recorded norms.
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
    """Return whether all values of a series are greater than 0, as a logarithmic axis requires."""
    return all(value > 0 for value in series.values)


def _rounds_picture(view: RunView, title: str, panels: list[Panel], *, height: int) -> Picture:
    """Return a picture of panels over the rounds, with a legend.

    Vertical lines mark the rounds in which clusters were split or clients' data changed.
    """
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
    """Return the legend of a picture of lines; empty if there is only one line."""
    if view.colours.crowded:
        low, high = BAND
        band = f"{low}th to {high}th percentile of the clusters"
        mean = LegendEntry("@c1", "mean of the clusters")
        return [mean, LegendEntry(BAND_COLOUR, band, "box")]
    legend = view.colours.legend()
    return legend if len(legend) > 1 else []


def _draw_lines(view: RunView, series_of: Mapping[int, Series], label: str) -> list[Mark]:
    """Return a line for every cluster; for more clusters than colours, their mean and a band.

    Parameters
    ----------
    view
        The run.
    series_of
        Values over the rounds, by the node id of a cluster.
    label
        Plotly's template for the text that is shown at the mouse pointer.
    """
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
    """Return the mean of the clusters over the rounds, and a band between two percentiles."""
    values = queries.values_by_round(series_of.values())
    mean = queries.mean_series(series_of.values())
    low = [float(np.percentile(at_round, BAND[0])) for at_round in values.values()]
    high = [float(np.percentile(at_round, BAND[1])) for at_round in values.values()]
    name = "mean of the clusters"
    line = Line(x=mean.rounds, y=mean.values, colour="@c1", name=name, hover=hover)
    return [Band(tuple(values), low, high, BAND_COLOUR), line]


def _draw_thresholds(view: RunView, series_of: Mapping[int, Series], symbol: str) -> list[Mark]:
    """Return a dashed line for the threshold of each cluster; for many clusters, only their mean.

    Parameters
    ----------
    view
        The run.
    series_of
        Threshold over the rounds, by the node id of a cluster.
    symbol
        Symbol of the threshold, such as ``ε₁``.
    """
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
