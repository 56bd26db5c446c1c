"""From similarities to clusters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.similarity import Distances, Labels, compute_cosines, compute_distances
from fedclade.core import ConfigError, UpdateError, unknown

Merges = NDArray[np.float64]
"""What merges with what, at which distance, ``[n-1, 4]`` as SciPy has it."""

LINKAGES = ("single", "complete", "average", "ward")
"""Linkages that need the distances of all pairs of clients, and nothing else of them."""

CENTROID = "centroid"
"""Linkage by the distance of the clusters' means, see :func:`merge_by_centroids`."""


def agglomerate(apart: Distances, method: str) -> Merges:
    """Merge clients, then clusters, the two nearest first, until one cluster is left.

    Parameters
    ----------
    apart
        Distances of m clients, condensed ``[m(m-1)/2]``. Where they tie, the order of the clients decides.
    method
        How far two clusters are apart: ``single``, the smallest distance of their members; ``complete``, the largest;
        ``average``, the mean over all pairs; ``ward``, √(2·a·b/(a + b)) times the distance of the means of a and b
        members, whose square is twice the growth of the sum of squares. Ward needs Euclidean distances.

    Returns
    -------
    numpy.ndarray
        ``[m-1, 4]`` as SciPy has it: the clusters that merge (those of one client are 0 to m-1, later ones count on),
        the distance at which they do, which never falls, and the size that results.

    Raises
    ------
    ConfigError
        If the linkage is unknown.
    UpdateError
        If a distance is not finite.
    """
    if method not in LINKAGES:
        raise ConfigError(unknown("linkage", method, LINKAGES))
    if not np.isfinite(apart).all():
        raise UpdateError(f"distances should be finite, got {np.count_nonzero(~np.isfinite(apart))} that are not")
    return scipy.cluster.hierarchy.linkage(apart, method=method) if len(apart) else np.empty((0, 4))


def merge_by_centroids(vectors: Tensor, metric: str) -> Merges:
    """Merge clients, then clusters, the two whose means are nearest first, until one cluster is left.

    "Average linkage averages the samples within each cluster and compares distances based on these averages" (Briggs et
    al. 2020, section I-C). Unlike with the linkages of :func:`agglomerate`, a merge may be at a smaller distance than
    the merge before it.

    Parameters
    ----------
    vectors
        Updates or other signatures of m clients, ``[m, R]``. A copy in float64 is held meanwhile.
    metric
        ``l1``, ``l2`` or ``cosine``; a ConfigError for another.

    Returns
    -------
    numpy.ndarray
        ``[m-1, 4]`` as SciPy has it; see :func:`agglomerate`. Of equal distances the first pair of clients counts.

    Raises
    ------
    UpdateError
        If an entry of a vector is not finite.
    """
    if wrong := int((~torch.isfinite(vectors).all(dim=1)).sum()):
        raise UpdateError(f"updates to be clustered should be finite, got {wrong} that are not")
    m = len(vectors)
    if m < 2:
        return np.empty((0, 4))
    apart = scipy.spatial.distance.squareform(compute_distances(vectors, metric), checks=False)
    np.fill_diagonal(apart, np.inf)
    means = vectors.double().clone()
    number, size = np.arange(m), np.ones(m, dtype=np.int64)
    nearest = apart.argmin(axis=1)
    merges = np.empty((m - 1, 4))
    for step in range(m - 1):
        first = int(apart[np.arange(m), nearest].argmin())
        kept, gone = sorted((first, int(nearest[first])))
        height = apart[kept, gone]
        total = size[kept] + size[gone]
        merges[step] = *sorted((number[kept], number[gone])), height, total
        means[kept] = (size[kept] * means[kept] + size[gone] * means[gone]) / total
        number[kept], size[kept] = m + step, total
        others = np.isfinite(apart[kept])
        others[gone] = False
        apart[gone] = apart[:, gone] = np.inf
        apart[kept, others] = apart[others, kept] = _distances_to(means[kept], means[torch.from_numpy(others)], metric)
        # Only rows whose nearest cluster changed, or that the new mean is nearer to, have to be searched again.
        stale = (nearest == kept) | (nearest == gone)
        stale |= apart[:, kept] <= apart[np.arange(m), nearest]
        stale[[kept, gone]] = True
        nearest[stale] = apart[stale].argmin(axis=1)
    return merges


def _distances_to(mean: Tensor, others: Tensor, metric: str) -> Distances:
    """Return the distance of a mean ``[R]`` to each of k others ``[k, R]``, float64 ``[k]``."""
    if metric == "cosine":
        return 1.0 - compute_cosines(mean[None], others)[0]
    p = 1.0 if metric == "l1" else 2.0
    apart = torch.cdist(mean[None], others, p=p, compute_mode="donot_use_mm_for_euclid_dist")
    return apart[0].cpu().numpy()


def cut(merges: Merges, n_clusters: int) -> Labels:
    """Undo the last merges of m clients, so that 1 to m clusters are left; return the cluster of each client, ``[m]``.

    Cluster 0 is the largest, or of those of equal size the one with the first client.
    """
    m = len(merges) + 1
    if n_clusters == 1:
        return np.zeros(m, dtype=np.int64)
    ranked = merges.copy()
    ranked[:, 2] = np.arange(1, m)  # only the order of the heights matters: they may tie, or be negative
    found = scipy.cluster.hierarchy.fcluster(ranked, m - n_clusters, criterion="distance")
    _, first, inverse, sizes = np.unique(found, return_index=True, return_inverse=True, return_counts=True)
    return np.argsort(np.lexsort((first, -sizes)))[inverse]


def find_largest_gap(heights: NDArray[np.float64]) -> int:
    """Return how many clusters a cut leaves at the largest relative gap between the heights of two merges, ``[m-1]``.

    From 2 to m/2, as two clients that happen to be alike make no cluster; 1 if there are fewer than four clients. Where
    heights fall, as those of centroid linkage may, a merge counts with the largest height up to it.
    """
    heights = _never_falling(heights)
    m = len(heights) + 1
    if m < 4:
        return 1
    numbers = np.arange(2, m // 2 + 1)
    above, below = heights[m - numbers], heights[m - numbers - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.where(above > 0, above / below, 1.0)  # clients that are equal merge at 0
    return int(numbers[np.argmax(gaps)])


def count_clusters_by_gap(heights: NDArray[np.float64]) -> int:
    """Return how many clusters the heights of the merges speak for: cut at their largest relative gap, or not at all.

    Clusters show as a gap between the heights at which their members merge and those at which they do themselves. But
    clients that all agree have a largest gap, too. It counts only if it is wider than t₀.₉₇₅(n − 1)·s, where s is the
    standard deviation of the n heights below it and t the quantile of Student's distribution: 2 for many heights, more
    for few. (Mojena's rule of 1977 cuts above the mean height plus a multiple of s; this one counts from the highest.)
    """
    heights = _never_falling(heights)
    n_clusters = find_largest_gap(heights)
    if n_clusters == 1:
        return 1
    first_above = len(heights) + 1 - n_clusters
    noise = heights[:first_above]
    bound = scipy.special.stdtrit(len(noise) - 1, 0.975) * noise.std(ddof=1)
    return n_clusters if heights[first_above] - noise[-1] > bound else 1


def find_cut_height(heights: NDArray[np.float64], n_clusters: int) -> float | None:
    """Return the height halfway between the merges that a cut keeps and those that it undoes; None without such."""
    if n_clusters == 1:
        return None
    kept = np.concatenate([[0.0], _never_falling(heights)])
    undone = len(heights) + 1 - n_clusters
    return float((kept[undone] + kept[undone + 1]) / 2)


def _never_falling(heights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest height up to each merge: the threshold from which on merges in this order include it."""
    return np.maximum.accumulate(heights)


def choose_cut(
    heights: NDArray[np.float64], threshold: float | str | None, n_clusters: int | None
) -> tuple[int, float | None]:
    """Return the number of clusters, and the height of the cut; None where nothing is cut.

    Clusters merge until the next merge is above the threshold; with centroid linkage later ones may be below it again,
    and are not made. If the threshold is no number, as many clusters are left as given, or as the largest gap says.
    """
    if isinstance(threshold, int | float):
        above = np.flatnonzero(heights > threshold)
        merges = int(above[0]) if len(above) else len(heights)
        return 1 + len(heights) - merges, threshold
    n_clusters = n_clusters or count_clusters_by_gap(heights)
    return n_clusters, find_cut_height(heights, n_clusters)


# Many dendrograms of average linkage at once, and their best prunings.

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
