"""A run over its rounds: scores and separation gaps as in figure 8 of the CFL paper, norms as in its figure 7."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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

# How a step of hierarchical clustering came about: which clusters merged at what distance, and
# where that was cut.

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


# Which updates are alike: heat maps of the similarities in each cluster, clients in the order of
# the tree.

MOST_BLOCKS = 80
"""Between more clusters there are no lines, and of more true ones no strip: there would be nothing else to see."""

LOWEST_BLOCK = 0.04
"""Clusters of a smaller share of a matrix have no label beside it."""


def similarity_pictures(view: RunView, matrices: Sequence[SimilarityMatrix], side: int) -> list[Picture]:
    """Return a heat map of the cosine similarities for each of some matrices, all with one scale.

    White lines separate the current clusters; where the truth is known, a strip at the left shows each client's true
    cluster. Of more clients than ``side``, means over neighbours are drawn, so many in a row.
    """
    order, limit = ClientOrder(view.run), _largest_similarity(matrices)
    return [_picture(view, matrix, order, limit, side) for matrix in matrices]


def _largest_similarity(matrices: Sequence[SimilarityMatrix]) -> float:
    """Return the largest similarity of two different clients, up to the next tenth: the end of a colour scale."""
    pairs = [np.abs(m.alpha[~np.eye(len(m.clients), dtype=bool)]) for m in matrices]
    largest = max((float(each[np.isfinite(each)].max(initial=0.0)) for each in pairs), default=0.0)
    return min(1.0, math.ceil(10 * largest) / 10) or 0.1


def _picture(view: RunView, matrix: SimilarityMatrix, order: ClientOrder, limit: float, side: int) -> Picture:
    rows = order.rows(matrix.clients)
    clients = [matrix.clients[row] for row in rows]
    alpha = matrix.alpha[np.ix_(rows, rows)].astype(float)
    np.fill_diagonal(alpha, np.nan)  # everybody is like themselves
    values, names, step = _thinned(alpha, [view.outcome.name(client) for client in clients], side)
    n, truth = len(names), order.true_clusters(clients)
    marks: list[Mark] = [HeatMap(values, names, limit, "α"), *_similarity_lines(order.clusters(clients), step, n)]
    if truth and len(truth) <= MOST_BLOCKS:
        marks += _similarity_strip(truth, step, n)
    left = -0.5 - 0.06 * n if order.truth is not None else -0.5
    ticks = {
        (start + size / 2) / step - 0.5: name
        for start, size, name in order.clusters(clients)
        if size / len(clients) >= LOWEST_BLOCK
    }
    name = "root" if matrix.node == 0 else f"cluster {matrix.node}"
    title = f"{name}: {count(len(clients), 'client')}, round {matrix.round}"
    labels = sorted(set((order.truth or {}).values()))[:10]
    legend = [LegendEntry(truth_colour(label), f"true cluster {label}", "box") for label in labels]
    panel = Panel(marks, Axis("true cluster" if truth else "", range=(n - 0.5, -0.5), grid=False))
    return Picture(title, [panel], Axis("current cluster", range=(left, n - 0.5), ticks=ticks, grid=False), 520, legend)


def _thinned(alpha: Similarity, names: list[str], side: int) -> tuple[Similarity, list[str], int]:
    """Return a matrix of at most ``side`` rows, what to call them, and how many clients each stands for."""
    n = len(alpha)
    step = -(-n // side)
    if step == 1:
        unique = names if len(set(names)) == n else [f"{name} ({i})" for i, name in enumerate(names)]
        return alpha, unique, 1
    starts = np.arange(0, n, step)
    known = ~np.isnan(alpha)
    sums, counts = (
        np.add.reduceat(np.add.reduceat(values, starts, 0), starts, 1)
        for values in (np.where(known, alpha, 0.0), known.astype(float))
    )
    with np.errstate(invalid="ignore"):  # a block of one client with itself has no mean
        return sums / counts, [f"{names[i]} … ({i // step})" for i in starts], step


def _similarity_lines(blocks: Sequence[tuple[int, int, str]], step: int, n: int) -> list[Mark]:
    """Return lines between the current clusters."""
    if len(blocks) > min(MOST_BLOCKS, n / 2):
        return []
    places = [start / step - 0.5 for start, _, _ in blocks[1:]]
    upright: list[Mark] = [Box(at, at, -0.5, n - 0.5, "@panel") for at in places]
    return [*upright, *(Box(-0.5, n - 0.5, at, at, "@panel") for at in places)]


def _similarity_strip(truth: Sequence[tuple[int, int, int]], step: int, n: int) -> list[Mark]:
    """Return the strip of true clusters."""
    left, right, smallest = -0.5 - 0.055 * n, -0.5 - 0.015 * n, LOWEST_BLOCK * n * step
    return [
        Box(left, right, at / step - 0.5, (at + size) / step - 0.5, truth_colour(k), str(k) if size >= smallest else "")
        for at, size, k in truth
    ]


BAND = (10, 90)
"""Percentiles between which most of many clusters lie."""


def score_picture(view: RunView) -> Picture:
    """Return the score of every cluster over the rounds, and below it the separation gap g(α) (CFL figure 8).

    Where the true clusters are not known there is no gap, and α_cross^max is drawn instead; where there is neither,
    only the scores.
    """
    scores = queries.joined_series(view.run.tree, queries.score_series(view.run))
    panels = [Panel(_lines(view, scores, f"{view.score.label} {view.score.hover()}"), view.score.axis("mean test"), 2)]
    known = view.outcome.truth is not None
    if gaps := queries.criterion_series(view.run, "separation_gap" if known else "alpha_cross_max"):
        what = "separation gap g(α)" if known else "α cross max"
        panels.append(
            Panel(
                [Rule(0, dashed=False), *_lines(view, gaps, f"{what} %{{y:.3g}}")], Axis("gap g(α)" if known else what)
            )
        )
    return _over_rounds(view, f"{view.score.title} of the clusters", panels, 500 if gaps else 380)


def norms_picture(view: RunView) -> Picture | None:
    """Return the two norms that CFL splits by (eqs. 32 and 33), over the rounds for every cluster (CFL figure 7).

    Members of a cluster disagree where the largest norm of an update stays up while that of the mean update falls.
    Thresholds are dashed. None for a run without norms.
    """
    panels: list[Panel] = []
    eps2, eps1 = queries.norm_thresholds(view.run)
    norms = {what: queries.criterion_series(view.run, f"{what}_norm") for what in ("max", "mean")}
    positive = all(value > 0 for each in norms.values() for series in each.values() for value in series.values)
    for what, title, threshold, symbol in (("max", "largest", eps2, "ε₂"), ("mean", "mean", eps1, "ε₁")):
        marks = _lines(view, norms[what], f"{title} norm %{{y:.3g}}")
        if isinstance(threshold, Mapping):
            marks += _thresholds(view, threshold, symbol)
        elif threshold is not None:
            marks.append(Rule(threshold, f"{symbol} = {threshold:g}"))
        panels.append(Panel(marks, Axis(f"{title} update", log=positive)))
    return _over_rounds(view, "Norms of the updates", panels, 460) if any(norms.values()) else None


def _over_rounds(view: RunView, title: str, panels: list[Panel], height: int) -> Picture:
    splits = queries.splits_by_round(view.run.tree)
    names = {at: ", ".join(map(str, nodes)) for at, nodes in splits.items()}
    uprights = {at: f"split {names[at] if len(nodes) <= 2 else f'{len(nodes)} nodes'}" for at, nodes in splits.items()}
    for at, _ in events_of(view.run.events, DataChanged):
        uprights[at] = f"{uprights[at]}, other data" if at in uprights else "other data"
    return Picture(title, panels, rounds_axis(view.rounds), height, _legend(view), uprights)


def _legend(view: RunView) -> list[LegendEntry]:
    if view.colours.crowded:
        band = "{}th to {}th percentile of the clusters".format(*BAND)
        return [LegendEntry("@c1", "mean of the clusters"), LegendEntry("@accent", band)]
    legend = view.colours.legend()
    return legend if len(legend) > 1 else []


def _lines(view: RunView, found: Mapping[int, Series], what: str) -> list[Mark]:
    """Return a line for every cluster, or for too many of them their mean and a band that most lie in."""
    hover = f"{{name}}, round %{{x}}<br>{what}"
    if view.colours.crowded:
        values = queries.values_by_round(found.values())
        low, high = (queries.over_rounds(values, lambda each, q=q: float(np.percentile(each, q))) for q in BAND)
        mean = queries.mean_series(found.values())
        line = Line(x=mean.rounds, y=mean.values, colour="@c1", name="mean of the clusters", hover=hover)
        return [Band(low.rounds, low.values, high.values, "@accent"), line]
    return [
        Line(
            x=series.rounds,
            y=series.values,
            colour=view.colours.of(node),
            name=f"cluster {node}",
            hover=hover,
            dash=view.colours.dash(node),
            dots=view.rounds <= FEW_ROUNDS or len(series.rounds) == 1,
        )
        for node, series in found.items()
    ]


def _thresholds(view: RunView, found: Mapping[int, Series], symbol: str) -> list[Mark]:
    """Return a dashed line for each cluster that has a threshold of its own; where there are many, their mean."""
    if view.colours.crowded:
        found = {0: queries.mean_series(found.values())}
    return [
        Line(
            x=series.rounds,
            y=series.values,
            colour="@ink",
            dash="dash",
            width=1,
            name=f"{symbol} of {node}",
            hover="{name}, round %{x}<br>%{y:.3g}",
        )
        for node, series in found.items()
    ]
