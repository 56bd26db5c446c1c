"""Split-half test for clusters: their number, and whether they are real.

Each client makes two updates, A and B, of the same model, from two halves of its training data.
Both updates depend in the same way on the client's distribution, but their random errors, which are
due to the sampled examples, are independent. A partition of the clients that was found by the
updates A can therefore be judged by the updates B, which were not used to find it, and vice versa.

*Gain.* The members of a cluster share the mean of their updates. In a smaller cluster this mean is
less biased for each member, and noisier. With unit updates u_i, the mean similarity of two members
of a cluster c, minus the mean similarity of any two clients, estimates ‖μ_c − μ‖², the bias that
the cluster removes. Each additional cluster costs the noise of one update, shared by all n clients.
The gain of a partition into k clusters is

    G = (1/n) · [Σ_c |c| · (mean similarity within c − mean similarity of all) − (k − 1) · σ²],

with σ² the noise of a whole update. No client is compared with itself: what a model has memorized
of a client's examples affects both halves of that client, but nothing that two clients have in
common. A cluster of one client therefore has no gain.

*Test.* For each number of clusters, a partition is found on A and judged on B, and another is found
on B and judged on A. The number of clusters with the largest mean of both gains is chosen. If all
clients have one distribution, it does not matter which client owns which of B's updates: after
shuffling B's clients, A and B fit each other as well as before. The p-value is the share of orders
of B's clients (shuffles and the true order) whose largest gain over all numbers of clusters is at
least that of the true order. Each shuffle repeats the judgement in both directions and the choice
of the number of clusters, so the p-value accounts for both. The test is exact if the halves of one
client have no more in common than the halves of two clients. For a model that was trained on none
of the data, this is true, whatever the distribution of updates. For a model that was trained on the
data, it is true as far as the examples that the model has memorized of one client carry no
information about another client.

*More clusters.* If the clients are in several clusters already, and the clusters are real, the
p-value is small even if a further cluster gains only by chance. B's clients are therefore also
shuffled within the current clusters only: if the current clusters are right, the largest gain is no
larger in the true order than in other orders. In small clusters few orders differ, so the shuffles
hardly ever reject a further cluster, and the gain alone decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedclade.clustering.linkage import agglomerate, cut
from fedclade.clustering.similarity import (
    Labels,
    Similarity,
    are_signs,
    convert_sign_cosines,
    cosine_similarity,
)

MOST_CLUSTERS = 32
"""Largest number of clusters into which a dendrogram is cut."""

DRAWS_INSIDE = 400
"""Number of random orders in which the clients of each current cluster are shuffled."""

DRAWS_TO_RESOLVE = 20
"""Number of shuffles as a multiple of 1 / level.

A p-value near the level is then known with an error of about a quarter of the level.
"""

MOST_DRAWS = 10_000
"""Largest number of shuffles for a p-value."""

ENTRIES_AT_ONCE = 2**22
"""Number of similarities that are shuffled at a time: 32 MiB."""

ENOUGH = 100
"""Number of shuffles with at least the observed gain after which no more shuffles are drawn.

The p-value is then not small, whatever else would be drawn (Besag and Clifford 1991).
"""

LARGEST_TESTED_BY_HALVES = 500
"""Largest number of clients whose similarities are shuffled. Of more clients, a sample of this size
is tested."""

ROUNDING = 1e-12
"""Largest difference of gains that may be due to rounding."""


@dataclass(frozen=True, eq=False)
class Replicates:
    """Two updates of each of n clients, made from the same model and two halves of their data.

    Parameters
    ----------
    first, second
        Signatures (vectors by which clients are compared) of both updates, ``[n, R]`` each.
    """

    first: torch.Tensor
    second: torch.Tensor

    @property
    def agreement(self) -> NDArray[np.float64]:
        """Cosine of each client's two updates, ``[n]``.

        It estimates 1/(1 + γ²), where γ is the relative noise of an update from half of the data.
        """
        dots = (self.first * self.second).sum(1)
        norms = self.first.norm(dim=1) * self.second.norm(dim=1)
        cosines = (dots / norms.clamp(min=1e-30)).double().clamp(-1, 1).cpu().numpy()
        return convert_sign_cosines(cosines) if are_signs(self.first) else cosines

    @property
    def gammas(self) -> NDArray[np.float64]:
        """Estimated relative noise γ_i of each client's whole update (CFL eq. 39), ``[n]``.

        A whole update has half the squared noise of an update from half of the data. γ_i is
        infinite if the client's two updates are not similar at all.
        """
        agreement = self.agreement
        with np.errstate(divide="ignore"):
            gammas = np.sqrt(np.maximum(1 / agreement - 1, 0) / 2)
            return np.where(agreement > 0, gammas, np.inf)


@dataclass(frozen=True, eq=False)
class Across:
    """Partitions of n clients that are found on one half of the data and judged on the other.

    Partitions are found by the clients' updates from half A and from half B of their data. The gain
    of a partition is computed from the updates from the other half. To compute p-values, gains are
    also computed with the clients of half B in other orders.
    """

    halves: Sequence[Similarity]  # similarities [n, n] of the clients in half A and in half B
    cuts: Sequence[Labels]  # partitions [K, n] into 1 to K clusters, found on A and found on B
    noise: float  # σ², the noise of a whole update

    def select_clients(self, rows: Labels) -> Across:
        """Restrict the similarities, and the partitions of all clients, to some of the clients."""
        halves = [half[np.ix_(rows, rows)] for half in self.halves]
        cuts = [_select_columns(partitions, rows) for partitions in self.cuts]
        return replace(self, halves=halves, cuts=cuts)

    @cached_property
    def weights_and_costs(self) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Weights of client pairs and costs in the gain, for A's and for B's partitions.

        The gain of a partition is the weighted sum of similarities minus the cost. For each half,
        the result has the weights ``[K, n²]`` and the costs ``[K]`` of K partitions.
        """
        flattened: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        for partitions in self.cuts:
            weights, costs = weigh_pairs(partitions, self.noise)
            flattened.append((weights.reshape(len(weights), -1), costs))
        return flattened

    def compute_gains(self, orders: Labels) -> NDArray[np.float64]:
        """Compute the gain G of the partitions into 1 to K clusters, with clients of B permuted.

        The gain is the mean of two directions: partitions of A judged on B, and of B judged on A.

        Parameters
        ----------
        orders
            Permutations of B's clients, ``[m, n]``.

        Returns
        -------
        numpy.ndarray
            ``[m, K]``: for each order and for 1 to K clusters.
        """
        (weights_a, costs_a), (weights_b, costs_b) = self.weights_and_costs
        on_b = permute_pairs(self.halves[1], orders) @ weights_a.T - costs_a
        # B's partitions stay as they are, so A's clients move by the inverse permutation.
        inverse = np.argsort(orders, axis=1)
        on_a = permute_pairs(self.halves[0], inverse) @ weights_b.T - costs_b
        return (on_b + on_a) / 2


@dataclass(frozen=True, eq=False)
class Finding:
    """Best partition of the clients, which has the largest gain, and the data for its tests.

    Each client has made an update from each of two or more parts of its data. The tests keep the
    updates from one part, and assign the updates from another part to the clients in random orders
    (:class:`Across`).
    """

    labels: Labels  # best partition [n], found on both halves; zeros if one cluster is best
    gain: float  # gain G of this partition, judged across halves; 0 for one cluster
    noise: float  # σ², the noise of a whole update
    similarity: Similarity  # [n, n], mean of the similarities of both halves
    across: Across  # partitions and similarities from which the p-value is computed
    own: NDArray[np.float64] | None = None  # similarity of each client's two updates [n]

    def compute_p_value(self, level: float, draw: np.random.Generator) -> float:
        """Compute the p-value of the hypothesis that all clients have one distribution.

        Parameters
        ----------
        level
            Significance level that the p-value will be compared with. It determines the number of
            shuffles if there are too many orders to try all of them.
        draw
            Generator of the shuffles.

        Returns
        -------
        float
            The p-value; 1 if a single cluster of all clients has the largest gain.
        """
        if not self.labels.any():
            return 1.0
        across, _ = self._sample_clients(self.labels, draw)
        return _compute_p_value(across, level, draw)

    def compute_share_exceeding(self, now: Labels, draw: np.random.Generator) -> float:
        """Return the share of shuffles whose largest gain is greater than in the true order.

        The clients of one half are shuffled only within their current clusters, so a small share is
        evidence for more clusters than the current ones.

        Parameters
        ----------
        now
            Current cluster of each client, ``[n]``.
        draw
            Generator of the shuffles.
        """
        across, now = self._sample_clients(now, draw)
        true_order = np.arange(len(now))[None]
        observed = float(across.compute_gains(true_order).max()) + ROUNDING
        exceeding = 0
        for gains in _sample_best_gains(across, DRAWS_INSIDE, draw=draw, clusters=now):
            exceeding += int((gains > observed).sum())
        return exceeding / DRAWS_INSIDE

    def limit_clusters(self, clusters: int) -> Finding:
        """Return the best partition into at most a given number of clusters."""
        return find_best(self.similarity, self.across, own=self.own, max_clusters=clusters)

    def _sample_clients(self, clusters: Labels, draw: np.random.Generator) -> tuple[Across, Labels]:
        """Return the partitions to test and the given clusters, for all clients or for a sample.

        A sample is drawn if there are more than :data:`LARGEST_TESTED_BY_HALVES` clients.
        """
        n = len(clusters)
        if n <= LARGEST_TESTED_BY_HALVES:
            return self.across, clusters
        rows = np.sort(draw.choice(n, LARGEST_TESTED_BY_HALVES, replace=False))
        return self.across.select_clients(rows), clusters[rows]


def find_clusters(replicates: Replicates) -> Finding:
    """Find the partition of clients with the largest gain, by two updates of each client.

    Parameters
    ----------
    replicates
        Two updates of each client, from halves of its data.

    Returns
    -------
    Finding
        The partition and its gain, from which a p-value can be computed.
    """
    halves = [cosine_similarity(half) for half in (replicates.first, replicates.second)]
    own = replicates.agreement
    noise = max(0.0, 1 - float(own.mean())) / 2
    across = Across(halves, [_cut_dendrogram(similarity) for similarity in halves], noise)
    mean = (halves[0] + halves[1]) / 2
    return find_best(mean, across, own=own)


def compute_gain(
    similarity: Similarity, labels: Labels, noise: float, own: NDArray[np.float64] | None = None
) -> float:
    """Compute the gain G of a partition, by similarities that were not used to find the partition.

    The gain estimates by how much the partition is better than a single cluster: the bias that it
    removes minus the noise that it adds, see :mod:`fedclade.clustering.split_half`.

    Parameters
    ----------
    similarity
        Similarities of n clients, ``[n, n]``.
    labels
        Cluster of each client, ``[n]``, with labels 0, 1, ....
    noise
        Noise σ² of a whole update.
    own
        Similarity of each client's two updates, ``[n]``. If given, clusters of one client have a
        gain as well; otherwise their gain is 0.
    """
    weights, costs = weigh_pairs(labels[None], noise)
    gain = float((weights[0] * similarity).sum() - costs[0])
    if own is None:
        return gain
    n = len(labels)
    alone = np.bincount(labels, minlength=1)[labels] == 1
    overall_mean = (similarity.sum() - np.trace(similarity)) / max(n * (n - 1), 1)
    return gain + float((own[alone] - overall_mean).sum()) / n


def find_best(
    similarity: Similarity,
    across: Across,
    *,
    own: NDArray[np.float64] | None,
    max_clusters: int = MOST_CLUSTERS,
) -> Finding:
    """Find the number of clusters with the largest gain, and the partition into that many clusters.

    Parameters
    ----------
    similarity
        Mean similarity of the n clients over both halves, ``[n, n]``. The returned partition is
        found by these similarities.
    across
        Partitions into each number of clusters that were found on one half and are judged on the
        other half. Their mean gains determine the number of clusters.
    own
        Similarity of each client's two updates, ``[n]``, which is stored in the result; None if
        unknown.
    max_clusters
        Largest number of clusters.
    """
    true_order = np.arange(len(similarity))[None]
    gains = across.compute_gains(true_order)[0, :max_clusters]
    best = int(gains.argmax())
    return Finding(
        labels=_cut_dendrogram(similarity)[best],
        gain=float(gains[best]),
        noise=across.noise,
        similarity=similarity,
        across=across,
        own=own,
    )


def _cut_dendrogram(similarity: Similarity) -> Labels:
    """Return the partitions of n clients by average linkage into 1 to K clusters, ``[K, n]``."""
    apart = scipy.spatial.distance.squareform(1 - similarity, checks=False)
    merges = agglomerate(apart, "average")
    max_clusters = min(len(similarity), MOST_CLUSTERS)
    return np.stack([cut(merges, k) for k in range(1, max_clusters + 1)])


def _select_columns(partitions: Labels, rows: Labels) -> Labels:
    """Restrict K partitions ``[K, n]`` to some clients.

    The clusters that remain are labelled 0, 1, ... without gaps.
    """
    selected = [np.unique(labels[rows], return_inverse=True)[1] for labels in partitions]
    return np.stack(selected)


def weigh_pairs(
    partitions: Labels, noise: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the weights of client pairs, and the costs, in the gain G of K partitions.

    G is linear in the similarities: the weighted sum over all pairs, minus the cost (k − 1)·σ²/n of
    k clusters.

    Parameters
    ----------
    partitions
        Cluster of each of n clients in each partition, ``[K, n]``.
    noise
        Noise σ² of a whole update.

    Returns
    -------
    tuple of numpy.ndarray
        The weights, ``[K, n, n]``, and the costs, ``[K]``.
    """
    n = partitions.shape[1]
    same = (partitions[:, :, None] == partitions[:, None, :]).astype(np.float64)
    others = same.sum(2, keepdims=True) - 1  # number of other members of each client's cluster
    off_diagonal = 1 - np.eye(n)
    # |c| times the mean over the |c|(|c| − 1) ordered pairs of c weighs each pair by 1/(|c| − 1).
    inside = np.divide(same, others, out=np.zeros_like(same), where=others > 0)
    # The mean over all n(n − 1) pairs is subtracted once for each client that is not alone.
    not_alone = (others[:, :, 0] > 0).sum(1)[:, None, None]
    of_all_pairs = not_alone / (n * max(n - 1, 1))
    return (inside - of_all_pairs) * off_diagonal / n, noise * partitions.max(1) / n


def is_same_partition(one: Labels, other: Labels) -> bool:
    """Return whether two labellings of n clients have the same clusters, whatever their labels."""
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


def permute_pairs(similarity: Similarity, orders: Labels) -> NDArray[np.float64]:
    """Return the similarity matrix with its clients permuted in m orders, each flattened.

    Parameters
    ----------
    similarity
        Similarities of n clients, ``[n, n]``.
    orders
        Permutations of the clients, ``[m, n]``.

    Returns
    -------
    numpy.ndarray
        ``[m, n²]``.
    """
    permuted = similarity[orders[:, :, None], orders[:, None, :]]
    return permuted.reshape(len(orders), -1)


def _compute_p_value(across: Across, level: float, draw: np.random.Generator) -> float:
    """Return the p-value of the largest gain, by comparison with other orders of half B's clients.

    The p-value is the share of orders in which the largest gain of all partitions is at least as
    large as in the true order. All orders are tried if they are few; otherwise random orders are
    drawn.

    Parameters
    ----------
    across
        Partitions of each half, to be judged on the other half.
    level
        Significance level, which determines the number of random orders.
    draw
        Generator of the random orders.
    """
    n = len(across.halves[0])
    # An order that differs by rounding only should count as equal, so that p is not too small.
    observed = float(across.compute_gains(np.arange(n)[None]).max()) - ROUNDING
    draws = min(MOST_DRAWS, math.ceil(DRAWS_TO_RESOLVE / level))
    if math.factorial(n) <= draws:
        all_orders = np.array(list(permutations(range(n))))
        return float((across.compute_gains(all_orders).max(axis=1) >= observed).mean())
    at_least = 0
    drawn = 0
    one_cluster = np.zeros(n, dtype=np.int64)
    for gains in _sample_best_gains(across, draws, draw=draw, clusters=one_cluster):
        at_least += int((gains >= observed).sum())
        drawn += len(gains)
        if at_least >= ENOUGH:
            break
    return (at_least + 1) / (drawn + 1)  # the true order is one of the shuffles


def _sample_best_gains(
    across: Across, draws: int, *, draw: np.random.Generator, clusters: Labels
) -> Iterator[NDArray[np.float64]]:
    """Yield, in batches, the largest gain of all partitions in random orders of half B's clients.

    Parameters
    ----------
    across
        Partitions of each half, to be judged on the other half.
    draws
        Number of random orders in all.
    draw
        Generator of the orders.
    clusters
        Cluster of each client, ``[n]``; clients are shuffled only within their cluster.
    """
    n = len(clusters)
    batch_size = max(1, ENTRIES_AT_ONCE // n**2)
    by_cluster = np.argsort(clusters, kind="stable")
    for drawn in range(0, draws, batch_size):
        orders = np.empty((min(batch_size, draws - drawn), n), dtype=np.int64)
        # Sorted by cluster and, within each cluster, in random order.
        orders[:, by_cluster] = np.argsort(clusters + draw.random(orders.shape), axis=1)
        yield across.compute_gains(orders).max(axis=1)
