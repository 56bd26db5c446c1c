"""Many dendrograms of average linkage at once, and their best prunings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy
from numpy.typing import NDArray

from fedclade.clustering.linkage import agglomerate
from fedclade.clustering.similarity import Labels

Matrix = NDArray[np.float64]

MERGED_TOGETHER = 32
"""Clients up to whom dendrograms are made side by side; it takes n³ steps of each, and SciPy n²."""


def _merged_one_by_one(similarities: Matrix) -> tuple[Labels, Matrix]:
    """Return what merges in each step of b dendrograms, ``[b, n-1, 2]``, and how similar they are on average."""
    found: list[Matrix] = []
    for similarity in similarities:
        apart = scipy.spatial.distance.squareform(1 - similarity, checks=False)
        found.append(agglomerate(apart, "average"))
    merges = np.stack(found) if found else np.empty((0, similarities.shape[1] - 1, 4))
    return merges[:, :, :2].astype(np.int64), 1 - merges[:, :, 2]


def _merged_together(similarities: Matrix) -> tuple[Labels, Matrix]:
    """Return the same, in as many steps for all dendrograms as for one: of few clients each takes SciPy longer."""
    b, n, _ = similarities.shape
    rows, own = np.arange(b), np.arange(n)
    merges, across = np.empty((b, n - 1, 2), dtype=np.int64), np.empty((b, n - 1))
    names, sizes, alive = np.tile(own, (b, 1)), np.ones((b, n)), np.ones((b, n), dtype=bool)
    sums, means = similarities.copy(), similarities.copy()  # over all pairs of one and the other cluster
    means[:, own, own] = -np.inf
    for step in range(n - 1):
        x, y = np.divmod(means.reshape(b, -1).argmax(axis=1), n)
        merges[:, step, 0], merges[:, step, 1], across[:, step] = names[rows, x], names[rows, y], means[rows, x, y]
        names[rows, x], alive[rows, y] = n + step, False
        sizes[rows, x] += sizes[rows, y]
        joined = sums[rows, x] + sums[rows, y]
        sums[rows, x], sums[rows, :, x] = joined, joined
        mean = np.where(alive, joined / (sizes[rows, x][:, None] * sizes), -np.inf)
        mean[rows, x] = -np.inf
        means[rows, x], means[rows, :, x] = mean, mean
        means[rows, y], means[rows, :, y] = -np.inf, -np.inf
    return merges, across


class Dendrograms:
    """Average linkage of b similarity matrices ``[b, n, n]``, and what their clusters are worth."""

    def __init__(self, similarities: Matrix) -> None:
        b, n, _ = similarities.shape
        self.n, self._rows = n, np.arange(b)
        self._merges, across = (_merged_together if n <= MERGED_TOGETHER else _merged_one_by_one)(similarities)
        self._worth = np.zeros((b, 2 * n - 1))  # of each cluster of the dendrogram
        self._worth[:, :n] = similarities.diagonal(axis1=1, axis2=2)
        inside, sizes = np.zeros((b, 2 * n - 1)), np.ones((b, 2 * n - 1))  # sums over ordered pairs
        for new, x, y in self._upwards():
            both = sizes[self._rows, x], sizes[self._rows, y]
            sizes[:, new] = both[0] + both[1]
            pairs = 2 * both[0] * both[1] * across[:, new - n]
            inside[:, new] = inside[self._rows, x] + inside[self._rows, y] + pairs
            self._worth[:, new] = inside[:, new] / (sizes[:, new] - 1)

    def _upwards(self) -> Iterator[tuple[int, Labels, Labels]]:
        for step in range(self.n - 1):
            yield self.n + step, self._merges[:, step, 0], self._merges[:, step, 1]

    def _pruned(self, cost: Matrix) -> tuple[Matrix, Matrix, NDArray[np.bool_]]:
        """Return worth and number of clusters of the best pruning, and which clusters of the dendrogram stay whole."""
        worth, clusters = self._worth.copy(), np.ones_like(self._worth)
        whole = np.ones(worth.shape, dtype=bool)
        for new, x, y in self._upwards():
            apart = worth[self._rows, x] + worth[self._rows, y]
            count = clusters[self._rows, x] + clusters[self._rows, y]
            whole[:, new] = self._worth[:, new] - cost >= apart - cost * count
            worth[:, new] = np.where(whole[:, new], self._worth[:, new], apart)
            clusters[:, new] = np.where(whole[:, new], 1, count)
        return worth[:, -1], clusters[:, -1], whole

    def steepest(self) -> Matrix:
        """Return Λ, ``[b]``: the largest cost of a cluster at which more than one pays; 0 where none does."""
        cost = np.zeros(len(self._rows))
        while True:  # each pruning gives the cost at which it ties with one cluster: there are at most n
            worth, clusters, _ = self._pruned(cost)
            ties = np.where(clusters > 1, (worth - self._worth[:, -1]) / np.maximum(clusters - 1, 1), 0.0)
            if (ties <= cost + 1e-12).all():
                return cost
            cost = np.maximum(cost, ties)

    def labels(self, cost: float) -> Labels:
        """Return the clusters ``[n]`` of the first dendrogram's best pruning."""
        _, _, whole = self._pruned(np.full(len(self._rows), cost))
        labels, found = np.zeros(self.n, dtype=np.int64), 0
        open_ = [2 * self.n - 2]
        while open_:
            if whole[0, top := open_.pop()]:
                labels[self._members(top)], found = found, found + 1
            else:
                open_ += self._merges[0, top - self.n].tolist()
        return labels

    def _members(self, cluster: int) -> list[int]:
        if cluster < self.n:
            return [cluster]
        return [i for child in self._merges[0, cluster - self.n].tolist() for i in self._members(child)]
