"""How many clusters are there, and are they real? What two replicates of every client's update say.

Every client makes two updates, A and B, at the same model, from two halves of its training data. What the draw of its
examples adds to them is independent between the halves; what its distribution adds is not. So a partition that was
found on A can be judged on B, which had no part in finding it, and the other way round.

*Worth it.* The members of a cluster share the mean of their updates. In a smaller cluster it is less biased for each of
them, and noisier. With unit updates u_i, the mean similarity of two members of a cluster c, less that of any two
clients, estimates ‖μ_c − μ‖², the bias that its members are rid of; and every cluster more costs the noise of one
update, shared out among all n. The gain of a partition into k clusters is

    G = (1/n) · [Σ_c |c| · (mean similarity within c − mean similarity of all) − (k − 1) · σ²],

with σ² the noise of a whole update. No client is compared with itself: what a model has learnt by heart of a client's
examples is in both of its halves, and gives no two clients anything in common. So a cluster of one has no gain.

*Real.* A's partitions are judged on B and B's on A, and the cut is taken where the mean of both gains is largest. If
all clients have one distribution, it does not matter which of B's updates is whose: with B's clients shuffled, A and B
fit each other as well as before. The p-value is the share of shuffles, the true order among them, for which the best of
all cuts gains at least as much. That counts both directions and the choice of the number of clusters. It is exact where
halves of one client have no more in common than those of two: at a model that has seen none of the data, whatever the
distribution of updates is; later on, as far as what it has learnt by heart of one client tells nothing of another.

*More clusters than there are.* Where there are clusters already, they make that p-value small, and a further one might
gain by chance. So B's clients are shuffled inside the present clusters, too: if these are right, the best of all cuts
gains no more in the true order than in others. In small clusters few orders differ, and the gain alone decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
import scipy
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.linkage import agglomerate, cut
from fedclade.clustering.similarity import Labels, Similarity, are_signs, convert_sign_cosines, cosine_similarity

MOST_CLUSTERS = 32
"""That a dendrogram is cut into."""

DRAWS_INSIDE = 400
"""Shuffles inside the present clusters."""

DRAWS_TO_RESOLVE = 20
"""A sample of shuffles is so many times as large as one over the level: a p-value at it is known within a quarter."""

MOST_DRAWS = 100_000

ENTRIES_AT_ONCE = 2**22
"""Of similarities that are shuffled together: 32 MiB."""

ENOUGH = 100
"""Shuffles that gain as much: whatever more would be drawn, the p-value is not small (Besag and Clifford 1991)."""

LARGEST_TESTED = 500
"""Clients whose similarities are shuffled; of more, so many are drawn for the test."""

ROUNDING = 1e-12
"""Of gains."""


@dataclass(frozen=True, eq=False)
class Replicates:
    """Two updates of each of n clients, made at the same model from halves of their data: signatures ``[n, R]``."""

    first: Tensor
    second: Tensor

    @property
    def agreement(self) -> NDArray[np.float64]:
        """Cosine of the two updates of each client, ``[n]``; it estimates 1/(1 + γ²) of a half update."""
        dots = (self.first * self.second).sum(1)
        norms = self.first.norm(dim=1) * self.second.norm(dim=1)
        cosines = (dots / norms.clamp(min=1e-30)).double().clamp(-1, 1).cpu().numpy()
        return convert_sign_cosines(cosines) if are_signs(self.first) else cosines

    @property
    def gammas(self) -> NDArray[np.float64]:
        """γ_i of CFL's eq. 39 for whole updates, which have half the noise of halves, ``[n]``; it may be infinite."""
        agreement = self.agreement
        with np.errstate(divide="ignore"):
            return np.where(agreement > 0, np.sqrt(np.maximum(1 / agreement - 1, 0) / 2), np.inf)


@dataclass(frozen=True, eq=False)
class Across:
    """Partitions of each half, ready to be judged on the other in many orders of the clients."""

    halves: Sequence[Similarity]  # [n, n] of A and of B
    cuts: Sequence[Labels]  # the partitions [K, n] found on each, into 1 to K clusters
    noise: float  # σ²

    def of_some(self, rows: Labels) -> Across:
        """Return the same for some of the clients, in the partitions of all."""
        halves = [half[np.ix_(rows, rows)] for half in self.halves]
        numbered = [np.stack([np.unique(cut[rows], return_inverse=True)[1] for cut in cuts]) for cuts in self.cuts]
        return Across(halves, numbered, self.noise)

    @cached_property
    def _weighted(self) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Weights ``[K, n²]`` and costs ``[K]`` of A's partitions, for B, and of B's, for A."""
        found = [_weights(partitions, self.noise) for partitions in self.cuts]
        return [(weights.reshape(len(weights), -1), costs) for weights, costs in found]

    def gains(self, orders: Labels) -> NDArray[np.float64]:
        """Return G of each number of clusters, ``[m, K]``, the mean of both directions, with B's clients permuted.

        In each of m orders, ``[m, n]``.
        """
        (of_a, costs_a), (of_b, costs_b) = self._weighted
        on_b = _shuffled(self.halves[1], orders) @ of_a.T - costs_a
        on_a = _shuffled(self.halves[0], np.argsort(orders, axis=1)) @ of_b.T - costs_b
        return (on_b + on_a) / 2


@dataclass(frozen=True, eq=False)
class Finding:
    """What the replicates say about clusters."""

    labels: Labels  # the best partition [n], found on both halves; zeros where one cluster is best
    gain: float  # G of it, judged across halves; 0 for one cluster
    noise: float  # σ²
    similarity: Similarity  # [n, n], the mean of both halves'
    across: Across  # what the test shuffles
    own: NDArray[np.float64] | None = None  # similarity of each client's two updates [n]

    def p_value(self, level: float, draw: np.random.Generator) -> float:
        """Return the p-value of there being one distribution only; 1 where one cluster is best.

        The level that it is compared with says how many orders are drawn where there are too many for all.
        """
        if not self.labels.any():
            return 1.0
        return _p_value(self._tested(self.labels, draw)[0], level, draw)

    def exceeded(self, now: Labels, draw: np.random.Generator) -> float:
        """Return the share of shuffles inside the present clusters ``[n]`` in which some partition gains more."""
        across, now = self._tested(now, draw)
        seen = float(across.gains(np.arange(len(now))[None]).max()) + ROUNDING
        return sum(int((gains > seen).sum()) for gains in _best(across, DRAWS_INSIDE, draw, now)) / DRAWS_INSIDE

    def at_most(self, clusters: int) -> Finding:
        """Return the finding among partitions into no more clusters."""
        return _find(self.similarity, self.noise, self.across, self.own, clusters)

    def _tested(self, clusters: Labels, draw: np.random.Generator) -> tuple[Across, Labels]:
        """Return what is shuffled, and the clusters of these clients: all, but of many."""
        n = len(clusters)
        if n <= LARGEST_TESTED:
            return self.across, clusters
        rows = np.sort(draw.choice(n, LARGEST_TESTED, replace=False))
        return self.across.of_some(rows), clusters[rows]


def find_clusters(replicates: Replicates) -> Finding:
    """Find the clusters that gain most."""
    halves = [cosine_similarity(half) for half in (replicates.first, replicates.second)]
    own = replicates.agreement
    noise = max(0.0, 1 - float(own.mean())) / 2
    across = Across(halves, [_cuts(similarity) for similarity in halves], noise)
    return _find((halves[0] + halves[1]) / 2, noise, across, own, MOST_CLUSTERS)


def compute_gain(similarity: Similarity, labels: Labels, noise: float, own: NDArray[np.float64] | None = None) -> float:
    """Return G of a partition ``[n]`` that these similarities ``[n, n]`` had no part in finding.

    If it is known how similar the two updates of each client are, ``own [n]``, a client by itself has a gain as well.
    """
    weights, costs = _weights(labels[None], noise)
    gained = float((weights[0] * similarity).sum() - costs[0])
    if own is None:
        return gained
    n = len(labels)
    alone = np.bincount(labels, minlength=1)[labels] == 1
    of_all = (similarity.sum() - np.trace(similarity)) / max(n * (n - 1), 1)
    return gained + float((own[alone] - of_all).sum()) / n


def _find(similarity: Similarity, noise: float, across: Across, own: NDArray[np.float64] | None, most: int) -> Finding:
    gains = across.gains(np.arange(len(similarity))[None])[0, :most]
    best = int(gains.argmax())
    return Finding(_cuts(similarity)[best], float(gains[best]), noise, similarity, across, own)


def _cuts(similarity: Similarity) -> Labels:
    """Return the partitions of average linkage into 1, 2, ... clusters, ``[K, n]``."""
    merges = agglomerate(scipy.spatial.distance.squareform(1 - similarity, checks=False), "average")
    return np.stack([cut(merges, k) for k in range(1, min(len(similarity), MOST_CLUSTERS) + 1)])


def _weights(partitions: Labels, noise: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what similarities are multiplied by in G of each partition, ``[K, n, n]``, and what is taken off."""
    n = partitions.shape[1]
    same = (partitions[:, :, None] == partitions[:, None, :]).astype(np.float64)
    others = same.sum(2, keepdims=True) - 1  # of each client in its cluster
    off = 1 - np.eye(n)
    # Of a cluster |c| times the mean over its |c|(|c| − 1) ordered pairs; of all as many times that over n(n − 1).
    inside = np.divide(same, others, out=np.zeros_like(same), where=others > 0)
    shared = (others[:, :, 0] > 0).sum(1)[:, None, None] / (n * max(n - 1, 1))
    return (inside - shared) * off / n, noise * partitions.max(1) / n


def is_same_partition(one: Labels, other: Labels) -> bool:
    """Whether two labellings ``[n]`` part the same clients, whatever the labels are."""
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


def _shuffled(similarity: Similarity, orders: Labels) -> NDArray[np.float64]:
    return similarity[orders[:, :, None], orders[:, None, :]].reshape(len(orders), -1)


def _p_value(across: Across, level: float, draw: np.random.Generator) -> float:
    """Return the share of orders of B's clients in which some partition gains as much as the best in the true one."""
    n = len(across.halves[0])
    seen = float(across.gains(np.arange(n)[None]).max()) - ROUNDING  # it counts against it
    draws = min(MOST_DRAWS, math.ceil(DRAWS_TO_RESOLVE / level))
    if math.factorial(n) <= draws:
        every = np.array(list(permutations(range(n))))
        return float((across.gains(every).max(axis=1) >= seen).mean())
    at_least, drawn = 0, 0
    for gains in _best(across, draws, draw, np.zeros(n, dtype=np.int64)):
        at_least, drawn = at_least + int((gains >= seen).sum()), drawn + len(gains)
        if at_least >= ENOUGH:
            break
    return (at_least + 1) / (drawn + 1)  # the true order is one of them


def _best(across: Across, draws: int, draw: np.random.Generator, inside: Labels) -> Iterator[NDArray[np.float64]]:
    """Yield the gain of the best partition in orders drawn of B's clients, who keep to their clusters ``[n]``."""
    n = len(inside)
    at_once, places = max(1, ENTRIES_AT_ONCE // n**2), np.argsort(inside, kind="stable")
    for drawn in range(0, draws, at_once):
        orders = np.empty((min(at_once, draws - drawn), n), dtype=np.int64)
        orders[:, places] = np.argsort(inside + draw.random(orders.shape), axis=1)
        yield across.gains(orders).max(axis=1)
