"""Stability of clusters: whether other examples of the same clients would give the same clusters.

A test that rejects "all clients have one distribution" does not state that clients form groups. If
clients differ gradually, any division of them into clusters is arbitrary: the test rejects, but
other examples of the same clients give other clusters. This module measures both properties of
groups, from the updates of several parts of each client's data:

*Reproducible.* The parts of each client are divided at random into two sets. Clusters are found by
the first set alone, and then each client is assigned to one of these clusters by its second set
alone, which had no influence on the clusters. The stability is the mean adjusted Rand index of both
partitions over many divisions: 1 if they always agree, 0 if they agree as by chance. Judging a
partition by a classification of data that was not used to find it is the method of Lange, Roth,
Braun and Buhmann (2004) and of Tibshirani and Walther (2005). In addition, every single group must
be found again: the Jaccard index of a group and the clients that are assigned to it, with the
similarities of all divisions summed, must be at least 0.75, the limit of Hennig (2007).

*Separate.* Clusters of a continuum are reproducible, too, if noise is small: it is then always cut
at the same places (Ben-David, von Luxburg and Pal 2006). So no client may be between two groups.
For each pair of groups, the border of each group, which is the fifth of its clients that is nearest
to the other group, is found by one set of the parts. By the other set it is measured how much more
similar the border is to its own group than to the border of the other group, as a share of the
difference between the mean similarities within the group and between the groups. This *gap*, the
smaller one of both groups, is about 1 for groups without inner structure. If points are spread
evenly on a line that is cut in two, it is 0.12; it may be negative.

If clusters do not have these properties, the most similar of them are merged, one pair after the
other. The first partition with both properties is the partition into *stable groups*. Often there
is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fedclade.clustering.linkage import Matrix, Merges, agglomerate, cut
from fedclade.clustering.part_test import build_views
from fedclade.clustering.similarity import Labels, number_clusters

LEAST_STABILITY = 0.5
"""Smallest stability (mean adjusted Rand index) of a partition into stable groups.

Groups are found by about half of the data and confirmed by the other half, with more noise than in
the partition of all data.
"""

LEAST_JACCARD = 0.75
"""Smallest Jaccard index of a stable group and of the clients that are assigned to it.

Hennig (2007) calls a cluster with a mean Jaccard index of at least 0.75 stable.
"""

LEAST_GAP = 0.45
"""Smallest gap between two stable groups, as a share of the difference of their similarities.

In the studies by which it was chosen, groups have gaps from 0.53, and continua gaps up to 0.32.
"""

NEAREST = 0.2
"""Share of a group's clients that counts as its border with another group; at least one client."""

DIVISIONS = 24
"""Number of random divisions of all clients' parts into two sets."""

MOST_COMPARED = 128
"""Largest number of clients whose similarities are compared. Of more clients, a sample is drawn."""

MOST_GROUPS = 32
"""Largest number of stable groups that is considered, which limits the time."""

MOST_MOVES = 20
"""Largest number of times that clients change to their most similar cluster."""

SEED = 20071
"""Seed of the random divisions, so that the same similarities always give the same result."""


@dataclass(frozen=True, eq=False)
class Stability:
    """Stability of a partition of n clients into clusters, and the stable groups among them.

    Parameters
    ----------
    value
        Stability in [0, 1]: mean adjusted Rand index between clusters that are found by some parts
        of the clients' data, and the assignment of the clients to these clusters by other parts. It
        is about the partition into stable groups, or about the clusters if no groups are stable.
    groups
        Number of the stable group of each client, ``[n]``; None if no groups are stable. Each group
        has all clients of one or more clusters.
    """

    value: float
    groups: Labels | None


def measure_stability(
    cosines: Matrix, parts: int, labels: Labels, *, view: int = 0, compares_own: bool = True
) -> Stability:
    """Measure how stable a partition of clients is, and find the stable groups.

    Parameters
    ----------
    cosines
        Cosines of the updates from r parts of each of n clients, ``[n·r, n·r]``, with zeros on the
        diagonal and each client's parts in consecutive rows.
    parts
        Number r of parts of each client, at least 2.
    labels
        Cluster of each client, ``[n]``; there are at least two clusters.
    view
        Number of the view in which the clusters were found
        (:func:`~fedclade.clustering.build_views`).
    compares_own
        Whether the similarity of two parts of one client may confirm a cluster of this client
        alone. False at a model that has memorized the client's examples: parts of one client are
        then similar in any case, and no client alone is a stable group.

    Raises
    ------
    ValueError
        If there are fewer than two clusters or parts.
    """
    clusters = number_clusters(labels)
    if parts < 2 or clusters.max() < 1:
        raise ValueError(
            "stability needs at least 2 parts of each client and 2 clusters, got "
            f"parts={parts} and {clusters.max() + 1} clusters"
        )
    draw = np.random.default_rng(SEED)
    sampled = _sample(clusters, draw)
    rows = (sampled[:, None] * parts + np.arange(parts)).ravel()
    compared = cosines[np.ix_(rows, rows)]
    if view:
        compared = build_views(compared)[view]
    divisions = [
        _Division.draw(compared, parts, draw, compares_own=compares_own) for _ in range(DIVISIONS)
    ]
    mean = np.mean([division.across + division.across.T for division in divisions], axis=0) / 2

    first_value: float | None = None
    for merged in _merge_most_similar(mean, clusters[sampled]):
        if merged.max() >= MOST_GROUPS:
            continue
        value, smallest_jaccard = _confirm(divisions, merged)
        if first_value is None:
            first_value = value
        if value < LEAST_STABILITY or smallest_jaccard < LEAST_JACCARD:
            continue
        if _has_gaps(divisions, mean, merged):
            return Stability(value, _extend(merged, sampled, clusters))
    return Stability(first_value or 0.0, None)


def _sample(clusters: Labels, draw: np.random.Generator) -> Labels:
    """Return the clients that are compared: all, or a sample with clients of every cluster."""
    n = len(clusters)
    if n <= MOST_COMPARED:
        return np.arange(n)
    order = draw.permutation(n)
    _, first = np.unique(clusters[order], return_index=True)
    others = np.delete(order, first)
    chosen = np.concatenate([order[first], others])[: max(MOST_COMPARED, len(first))]
    return np.sort(chosen)


def _extend(merged: Labels, sampled: Labels, clusters: Labels) -> Labels:
    """Return the group of every client, given the groups of the sampled clients."""
    group_of = np.zeros(clusters.max() + 1, dtype=np.int64)
    group_of[clusters[sampled]] = merged
    return number_clusters(group_of[clusters])


@dataclass(frozen=True, eq=False)
class _Division:
    """Division of the parts of n clients into two sets, with the similarities of the clients.

    Parameters
    ----------
    first, second
        Mean similarities of clients by parts of the first set alone, and of the second set alone,
        ``[n, n]``. The diagonals are not used.
    across
        Mean similarities of the first set of a client (row) and the second set of another (column),
        ``[n, n]``.
    merges
        Dendrogram of the clients by ``first`` (average linkage).
    own
        Similarity of the two sets of each client, ``[n]``; minus infinity if it must not be used.
    """

    first: Matrix
    second: Matrix
    across: Matrix
    merges: Merges
    own: NDArray[np.float64]

    @classmethod
    def draw(
        cls, cosines: Matrix, parts: int, draw: np.random.Generator, *, compares_own: bool
    ) -> _Division:
        """Divide the parts of each client at random; the first set is larger if r is odd."""
        n = len(cosines) // parts
        order = draw.random((n, parts)).argsort(axis=1)
        size = (parts + 1) // 2
        in_first = (order < size).ravel() / size
        in_second = (order >= size).ravel() / (parts - size)
        first = _average(cosines, in_first, in_first, parts)
        second = _average(cosines, in_second, in_second, parts)
        across = _average(cosines, in_first, in_second, parts)
        own = across.diagonal().copy() if compares_own else np.full(n, -np.inf)
        for matrix in (first, second):
            np.fill_diagonal(matrix, 0.0)
        apart = 1 - first
        np.fill_diagonal(apart, 0.0)
        condensed = scipy.spatial.distance.squareform(apart, checks=False)
        return cls(first, second, across, agglomerate(condensed, "average"), own)

    def find_clusters(self, count: int) -> Labels:
        """Return clusters by the first set: a cut of the dendrogram, then moves of single clients.

        A client moves to the cluster whose other members are most similar on average. Clients that
        are alone do not move.
        """
        labels = cut(self.merges, count)
        for _ in range(MOST_MOVES):
            alone = np.bincount(labels)[labels] == 1
            towards = _average_towards(self.first, labels)
            moved = np.where(alone, labels, np.nan_to_num(towards, nan=-np.inf).argmax(1))
            if (moved == labels).all():
                break
            labels = number_clusters(moved)
        return labels

    def score(self, labels: Labels) -> Matrix:
        """Return the similarity of each client's second set to clusters of the first, ``[n, k]``.

        The client's own first set is left out, unless the client is a cluster by itself.
        """
        towards = _average_towards(self.across.T, labels)
        rows = np.arange(len(labels))
        own_cluster = towards[rows, labels]
        towards[rows, labels] = np.where(np.isnan(own_cluster), self.own, own_cluster)
        return towards


def _average(
    cosines: Matrix, rows: NDArray[np.float64], columns: NDArray[np.float64], parts: int
) -> Matrix:
    """Return the weighted mean similarity of the parts of two clients, ``[n, n]``.

    ``rows`` and ``columns`` are the weights of all parts, ``[n·r]``.
    """
    n = len(cosines) // parts
    weighted = cosines * rows[:, None] * columns
    return weighted.reshape(n, parts, n, parts).sum((1, 3))


def _average_towards(similarity: Matrix, labels: Labels) -> Matrix:
    """Return the mean similarity of each client to the other clients of each cluster, ``[n, k]``.

    It is NaN for the cluster of a client that is alone.
    """
    members = np.eye(labels.max() + 1)[labels]
    own = similarity.diagonal()[:, None] * members
    counts = members.sum(0) - members
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, (similarity @ members - own) / counts, np.nan)


def _merge_most_similar(similarity: Matrix, clusters: Labels) -> Iterator[Labels]:
    """Yield the clusters, and then the partitions after merging the two most similar clusters.

    The last partition has two clusters. The similarity of two clusters is the mean over all pairs
    of their members (average linkage).
    """
    labels = number_clusters(clusters)
    while labels.max() > 0:
        yield labels
        mean = _average_between(similarity, labels)
        np.fill_diagonal(mean, -np.inf)
        one, other = np.unravel_index(mean.argmax(), mean.shape)
        labels = number_clusters(np.where(labels == other, one, labels))


def _average_between(similarity: Matrix, labels: Labels) -> Matrix:
    """Return the mean similarity of the members of two clusters, ``[k, k]``."""
    members = np.eye(labels.max() + 1)[labels]
    sizes = members.sum(0)
    return members.T @ similarity @ members / np.outer(sizes, sizes)


def _confirm(divisions: list[_Division], labels: Labels) -> tuple[float, float]:
    """Compare clusters that are found by some parts with the assignment of clients by other parts.

    Parameters
    ----------
    divisions
        Divisions of the parts.
    labels
        Partition of the clients whose clusters must be found again, ``[n]``.

    Returns
    -------
    tuple of float
        The stability: mean adjusted Rand index, at least 0, of the clusters that are found by the
        first set and of the assignment by the second set. The smallest Jaccard index of a cluster
        of ``labels`` and of the clients that are assigned to it by all divisions together.
    """
    count = int(labels.max()) + 1
    indices: list[float] = []
    totals = np.zeros((len(labels), count))
    for division in divisions:
        found = division.find_clusters(count)
        scores = division.score(found)
        indices.append(_compute_rand_index(found, scores.argmax(1)))
        totals += _match(scores, found, labels)
    assigned = totals.argmax(1)
    jaccards = [_compute_jaccard(labels == each, assigned == each) for each in range(count)]
    return max(0.0, float(np.mean(indices))), min(jaccards)


def _match(scores: Matrix, found: Labels, labels: Labels) -> Matrix:
    """Return similarities to found clusters as similarities to the clusters of ``labels``.

    Each found cluster is matched to the cluster with which it has the most members in common (in
    the best matching of all clusters). A cluster without match is as dissimilar as possible.
    """
    overlap = np.eye(labels.max() + 1)[labels].T @ np.eye(found.max() + 1)[found]
    wanted, matched = scipy.optimize.linear_sum_assignment(-overlap)
    lowest = scores[np.isfinite(scores)].min()
    result = np.full((len(labels), labels.max() + 1), lowest)
    result[:, wanted] = np.maximum(scores[:, matched], lowest)
    return result


def _compute_rand_index(labels: Labels, others: Labels) -> float:
    """Return the adjusted Rand index of two partitions of n clients (Hubert and Arabie 1985).

    It is 1 for equal partitions, and on average 0 for independent partitions.
    """
    table = np.eye(labels.max() + 1)[labels].T @ np.eye(others.max() + 1)[others]

    def count_pairs(sizes: NDArray[np.float64]) -> float:
        return float((sizes * (sizes - 1)).sum()) / 2

    together = count_pairs(table)
    rows, columns = count_pairs(table.sum(1)), count_pairs(table.sum(0))
    expected = rows * columns / max(1.0, count_pairs(table.sum()[None]))
    largest = (rows + columns) / 2
    if largest == expected:  # both partitions have one cluster, or only clusters of one client
        return 1.0
    return (together - expected) / (largest - expected)


def _compute_jaccard(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """Return the Jaccard index of two sets of clients: their common share of all their clients."""
    return float((one & other).sum() / max(1, (one | other).sum()))


def _has_gaps(divisions: list[_Division], similarity: Matrix, labels: Labels) -> bool:
    """Return whether the gap between any two groups is large enough, the most similar pair first.

    ``similarity`` is the mean similarity of the clients, ``[n, n]``.
    """
    mean = _average_between(similarity, labels)
    pairs = np.argwhere(np.triu(np.ones_like(mean), 1))
    order = np.argsort(-mean[pairs[:, 0], pairs[:, 1]], kind="stable")
    return all(
        _compute_gap(divisions, labels, int(one), int(other)) >= LEAST_GAP
        for one, other in pairs[order]
    )


def _compute_gap(divisions: list[_Division], labels: Labels, one: int, other: int) -> float:
    """Return the gap between two groups, as a share of the difference of their similarities.

    In each division, the border clients of both groups are found by one set of the parts, and all
    similarities are then measured by the other set. The result is the smaller gap of both groups:
    next to a group of very similar clients, a wide group would otherwise seem to be separate. It is
    0 if clients of different groups are not less similar than clients of one group.

    Parameters
    ----------
    divisions
        Divisions of the parts.
    labels
        Group of each client, ``[n]``.
    one, other
        Numbers of the two groups.
    """
    members = (np.flatnonzero(labels == one), np.flatnonzero(labels == other))
    gaps = np.zeros(2)  # of each group
    contrasts = np.zeros(2)
    for division in divisions:
        sets = (division.first, division.second)
        for by, measured in (sets, sets[::-1]):
            borders = (_find_border(by, *members), _find_border(by, *members[::-1]))
            between_borders = measured[np.ix_(*borders)].mean()
            between = measured[np.ix_(*members)].mean()
            for side, (border, group) in enumerate(zip(borders, members, strict=True)):
                inside = _average_inside(measured, division.own, border, group)
                gaps[side] += inside - between_borders
                contrasts[side] += _average_inside(measured, division.own, group, group) - between
    if contrasts.min() <= 0:
        return 0.0
    return float((gaps / contrasts).min())


def _find_border(similarity: Matrix, group: Labels, other: Labels) -> Labels:
    """Return the clients of a group that are nearest to another group, relative to their own."""
    to_other = similarity[np.ix_(group, other)].mean(1)
    to_own = similarity[np.ix_(group, group)].sum(1) / max(1, len(group) - 1)
    count = max(1, round(NEAREST * len(group)))
    return group[np.argsort(to_own - to_other, kind="stable")[:count]]


def _average_inside(
    similarity: Matrix, own: NDArray[np.float64], clients: Labels, group: Labels
) -> float:
    """Return the mean similarity of some clients of a group to the other clients of the group.

    A client that is alone is compared with itself. The diagonal of ``similarity`` is 0.
    """
    if len(group) == 1:
        return float(own[group[0]])
    return float(similarity[np.ix_(clients, group)].sum() / (len(clients) * (len(group) - 1)))
