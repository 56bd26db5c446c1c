"""Agglomerative clustering: dendrograms, the choice of their cut, and their best prunings.

A dendrogram is a binary tree of merges of clients into clusters. A cut undoes the last merges; a
pruning may undo different numbers of merges in different branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from fedclade.clustering.similarity import Distances, Labels, compute_cosines, compute_distances
from fedclade.core import ConfigError, UpdateError, unknown

if TYPE_CHECKING:
    from torch import Tensor

Merges = NDArray[np.float64]
"""Merges of n clients in SciPy's format, ``[n-1, 4]``.

Each row has the numbers of the two clusters that merge, their distance, and the size of the result.
"""

LINKAGES = ("single", "complete", "average", "ward")
"""Names of linkages (distances of two clusters) that need only the distances of clients."""

CENTROID = "centroid"
"""Linkage by the distance of the clusters' means; see :func:`merge_by_centroids`."""


def agglomerate(apart: Distances, method: str) -> Merges:
    """Merge the two nearest clusters of clients repeatedly, until one cluster remains.

    Parameters
    ----------
    apart
        Distances of all pairs of m clients, in SciPy's condensed form ``[m(m-1)/2]``. Ties are
        broken by the order of clients.
    method
        Distance of two clusters: ``single``, the smallest distance of their members; ``complete``,
        the largest; ``average``, the mean over all pairs; ``ward``, √(2·a·b/(a + b)) times the
        distance of the means of a and b members. The square of Ward's distance is twice the growth
        of the sum of squares; ``ward`` needs Euclidean distances.

    Returns
    -------
    numpy.ndarray
        Merges, ``[m-1, 4]``, in SciPy's format: two columns with the clusters that merge (0 to m-1
        are single clients, merged clusters are numbered from m on), the distance at which they
        merge, which never falls, and the size of the merged cluster.

    Raises
    ------
    ConfigError
        If the linkage is unknown.
    UpdateError
        If a distance is not finite.
    """
    if method not in LINKAGES:
        raise ConfigError(unknown("linkage", method, LINKAGES))
    invalid = np.count_nonzero(~np.isfinite(apart))
    if invalid:
        raise UpdateError(
            f"distances of clients should be finite, got {invalid} that are NaN or infinite; leave "
            "out the clients with these distances"
        )
    if len(apart) == 0:
        return np.empty((0, 4))
    return scipy.cluster.hierarchy.linkage(apart, method=method)


def merge_by_centroids(vectors: Tensor, metric: str) -> Merges:
    """Merge the two clusters with the nearest means repeatedly, until one cluster remains.

    "Average linkage averages the samples within each cluster and compares distances based on these
    averages" (Briggs et al. 2020, section I-C). In contrast to the linkages of
    :func:`agglomerate`, a merge may have a smaller distance than the merge before it.

    Parameters
    ----------
    vectors
        Updates or other signatures of m clients, ``[m, R]``. The function makes a float64 copy.
    metric
        ``l1``, ``l2`` or ``cosine``.

    Returns
    -------
    numpy.ndarray
        Merges, ``[m-1, 4]``, in SciPy's format; see :func:`agglomerate`. Of pairs with equal
        distances, the first pair of clients merges.

    Raises
    ------
    ConfigError
        If the metric is unknown.
    UpdateError
        If an entry of a vector is not finite.
    """
    invalid = int((~torch.isfinite(vectors).all(dim=1)).sum())
    if invalid:
        raise UpdateError(
            f"updates to be clustered should be finite, got {invalid} with NaN or infinite "
            "entries; leave out the clients with these updates"
        )
    m = len(vectors)
    if m < 2:
        return np.empty((0, 4))
    apart = scipy.spatial.distance.squareform(compute_distances(vectors, metric), checks=False)
    np.fill_diagonal(apart, np.inf)
    means = vectors.double().clone()
    rows = np.arange(m)
    # Row i belongs to cluster numbers[i] as long as some distances in the row are finite.
    numbers = np.arange(m)
    sizes = np.ones(m, dtype=np.int64)
    nearest = apart.argmin(axis=1)
    merges = np.empty((m - 1, 4))
    for step in range(m - 1):
        row = int(apart[rows, nearest].argmin())
        merged, removed = sorted((row, int(nearest[row])))
        total = sizes[merged] + sizes[removed]
        low, high = sorted((numbers[merged], numbers[removed]))
        merges[step] = low, high, apart[merged, removed], total

        weighted_sum = sizes[merged] * means[merged] + sizes[removed] * means[removed]
        means[merged] = weighted_sum / total
        numbers[merged] = m + step
        sizes[merged] = total

        others = np.isfinite(apart[merged])
        others[removed] = False
        apart[removed] = np.inf
        apart[:, removed] = np.inf
        distances = _distances_to(means[merged], means[torch.from_numpy(others)], metric)
        apart[merged, others] = distances
        apart[others, merged] = distances

        # Search again only the rows whose nearest cluster changed, or that the new mean is at least
        # as near to as their nearest. A full search in each step would take O(m³).
        stale = (nearest == merged) | (nearest == removed)
        stale |= apart[:, merged] <= apart[rows, nearest]
        stale[[merged, removed]] = True
        nearest[stale] = apart[stale].argmin(axis=1)
    return merges


def _distances_to(mean: Tensor, others: Tensor, metric: str) -> Distances:
    """Return the distances of a cluster mean ``[R]`` to k other means ``[k, R]``, as ``[k]``."""
    if metric == "cosine":
        return 1.0 - compute_cosines(mean[None], others)[0]
    p = 1.0 if metric == "l1" else 2.0
    apart = torch.cdist(mean[None], others, p=p, compute_mode="donot_use_mm_for_euclid_dist")
    return apart[0].cpu().numpy()


def cut(merges: Merges, n_clusters: int) -> Labels:
    """Cut a dendrogram of m clients into a number of clusters, by undoing its last merges.

    Parameters
    ----------
    merges
        Merges, ``[m-1, 4]``, in SciPy's format.
    n_clusters
        Number of clusters, 1 to m.

    Returns
    -------
    numpy.ndarray
        Cluster of each client, ``[m]``. Clusters are numbered from the largest to the smallest;
        clusters of equal size are ordered by their first client.
    """
    m = len(merges) + 1
    if n_clusters == 1:
        return np.zeros(m, dtype=np.int64)
    # SciPy cuts by height. Heights may tie or be negative, so the order of merges replaces them.
    ranked = merges.copy()
    ranked[:, 2] = np.arange(1, m)
    clusters = scipy.cluster.hierarchy.fcluster(ranked, m - n_clusters, criterion="distance")
    _, first, inverse, sizes = np.unique(
        clusters, return_index=True, return_inverse=True, return_counts=True
    )
    return np.argsort(np.lexsort((first, -sizes)))[inverse]


def find_largest_gap(heights: NDArray[np.float64]) -> int:
    """Return the number of clusters after a cut at the largest relative gap between merge heights.

    The height of a merge is the distance of the two clusters that merge. Heights of centroid
    linkage may fall; a merge then counts with the largest height up to this merge.

    Parameters
    ----------
    heights
        Heights of the merges of m clients, ``[m-1]``.

    Returns
    -------
    int
        Number of clusters: 1 if m < 4, otherwise from 2 to m/2. More clusters are not considered,
        since the gap after the first few merges only shows that a few clients happen to be similar.
    """
    heights = _raise_to_running_maximum(heights)
    m = len(heights) + 1
    if m < 4:
        return 1
    numbers = np.arange(2, m // 2 + 1)
    above = heights[m - numbers]
    below = heights[m - numbers - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.where(above > 0, above / below, 1.0)  # equal clients merge at height 0
    return int(numbers[np.argmax(gaps)])


def count_clusters_by_gap(heights: NDArray[np.float64]) -> int:
    """Estimate the number of clusters from the largest relative gap between merge heights.

    Clusters cause a gap between the heights at which members of one cluster merge and the heights
    at which whole clusters merge. Clients of a single cluster have some largest gap, too. A gap
    therefore counts only if it is wider than t₀.₉₇₅(n − 1)·s, where s is the standard deviation of
    the n heights below it and t the quantile of Student's distribution: 2 for many heights, more
    for few. (Mojena's rule of 1977 cuts above the mean height plus a multiple of s; this rule
    starts from the largest height below the gap instead.)

    Parameters
    ----------
    heights
        Heights of the merges of m clients, ``[m-1]``.

    Returns
    -------
    int
        Number of clusters; 1 if the largest gap is too small.
    """
    heights = _raise_to_running_maximum(heights)
    n_clusters = find_largest_gap(heights)
    if n_clusters == 1:
        return 1
    first_above = len(heights) + 1 - n_clusters
    below = heights[:first_above]
    bound = scipy.special.stdtrit(len(below) - 1, 0.975) * below.std(ddof=1)
    return n_clusters if heights[first_above] - below[-1] > bound else 1


def find_cut_height(heights: NDArray[np.float64], n_clusters: int) -> float | None:
    """Return the height halfway between the last merge below a cut and the first one above it.

    Parameters
    ----------
    heights
        Heights of the merges of m clients, ``[m-1]``.
    n_clusters
        Number of clusters after the cut.

    Returns
    -------
    float or None
        Height of the cut; None for one cluster, since no merge is above the cut.
    """
    if n_clusters == 1:
        return None
    from_zero = np.concatenate([[0.0], _raise_to_running_maximum(heights)])
    below = len(heights) + 1 - n_clusters
    return float((from_zero[below] + from_zero[below + 1]) / 2)


def _raise_to_running_maximum(heights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each merge the largest height of all merges up to and including this merge.

    This is the lowest threshold at which a cut does not undo the merge.
    """
    return np.maximum.accumulate(heights)


def choose_cut(
    heights: NDArray[np.float64], threshold: float | str | None, n_clusters: int | None
) -> tuple[int, float | None]:
    """Return the number of clusters, and the height at which a dendrogram is cut into them.

    Parameters
    ----------
    heights
        Heights of the merges of m clients, ``[m-1]``.
    threshold
        Height of the cut: all merges from the first merge above this height on are undone. With
        centroid linkage, these may include later merges below the height. If ``threshold`` is not a
        number, ``n_clusters`` decides.
    n_clusters
        Number of clusters; if unset, :func:`count_clusters_by_gap` decides.

    Returns
    -------
    tuple of int and float or None
        Number of clusters, and height of the cut. The height is None if no merge is undone and no
        threshold is given.
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
"""Largest number of clients for which dendrograms are made in one batch.

The batch takes n³ steps for each dendrogram, and SciPy n².
"""


def _merge_one_by_one(similarities: Matrix) -> tuple[Labels, Matrix]:
    """Make the dendrograms of average linkage of b similarity matrices, one by one, with SciPy.

    Returns
    -------
    tuple of numpy.ndarray
        The clusters that merge in each step, ``[b, n-1, 2]``, and their mean similarity,
        ``[b, n-1]``.
    """
    dendrograms: list[Matrix] = []
    for similarity in similarities:
        apart = scipy.spatial.distance.squareform(1 - similarity, checks=False)
        dendrograms.append(agglomerate(apart, "average"))
    if not dendrograms:
        n = similarities.shape[1]
        return np.empty((0, n - 1, 2), dtype=np.int64), np.empty((0, n - 1))
    merges = np.stack(dendrograms)
    return merges[:, :, :2].astype(np.int64), 1 - merges[:, :, 2]


def _merge_in_batch(similarities: Matrix) -> tuple[Labels, Matrix]:
    """Make the dendrograms of average linkage of b similarity matrices, all in one batch.

    The result is that of :func:`_merge_one_by_one`. For few clients, each merge step for the whole
    batch is faster than a call of SciPy for each dendrogram.
    """
    b, n, _ = similarities.shape
    rows = np.arange(b)
    diagonal = np.arange(n)
    merges = np.empty((b, n - 1, 2), dtype=np.int64)
    across = np.empty((b, n - 1))
    # Column i belongs to cluster numbers[:, i] as long as alive[:, i] is true.
    numbers = np.tile(diagonal, (b, 1))
    sizes = np.ones((b, n))
    alive = np.ones((b, n), dtype=bool)
    sums = similarities.copy()  # sums over all pairs of clients of two clusters
    means = similarities.copy()
    means[:, diagonal, diagonal] = -np.inf
    for step in range(n - 1):
        x, y = np.divmod(means.reshape(b, -1).argmax(axis=1), n)
        merges[:, step, 0] = numbers[rows, x]
        merges[:, step, 1] = numbers[rows, y]
        across[:, step] = means[rows, x, y]

        numbers[rows, x] = n + step
        alive[rows, y] = False
        sizes[rows, x] += sizes[rows, y]
        joined_sums = sums[rows, x] + sums[rows, y]
        sums[rows, x] = joined_sums
        sums[rows, :, x] = joined_sums

        joined_means = joined_sums / (sizes[rows, x][:, None] * sizes)
        joined_means = np.where(alive, joined_means, -np.inf)
        joined_means[rows, x] = -np.inf
        means[rows, x] = joined_means
        means[rows, :, x] = joined_means
        means[rows, y] = -np.inf
        means[rows, :, y] = -np.inf
    return merges, across


class Dendrograms:
    """Dendrograms of average linkage for b similarity matrices, and their best prunings.

    A cluster c is worth |c| times the mean similarity of its pairs, and a single client is worth
    its similarity with itself. The worth of a partition is the sum over its clusters, so the best
    pruning of a dendrogram, at a given cost of each cluster, is found from the leaves up.

    Parameters
    ----------
    similarities
        Similarities of n clients in b symmetric matrices, ``[b, n, n]``.
    """

    def __init__(self, similarities: Matrix) -> None:
        b, n, _ = similarities.shape
        self.n = n
        self._rows = np.arange(b)
        merge = _merge_in_batch if n <= MERGED_TOGETHER else _merge_one_by_one
        self._merges, across = merge(similarities)
        self._worth = np.zeros((b, 2 * n - 1))  # of each cluster of the dendrogram
        self._worth[:, :n] = similarities.diagonal(axis1=1, axis2=2)
        inside = np.zeros((b, 2 * n - 1))  # sum of similarities over ordered pairs of a cluster
        sizes = np.ones((b, 2 * n - 1))
        for cluster, x, y in self._iterate_merges():
            x_size = sizes[self._rows, x]
            y_size = sizes[self._rows, y]
            sizes[:, cluster] = x_size + y_size
            pairs = 2 * x_size * y_size * across[:, cluster - n]
            inside[:, cluster] = inside[self._rows, x] + inside[self._rows, y] + pairs
            self._worth[:, cluster] = inside[:, cluster] / (sizes[:, cluster] - 1)

    def _iterate_merges(self) -> Iterator[tuple[int, Labels, Labels]]:
        """Yield the number of each merged cluster with its two children, from the leaves up.

        The children are arrays with one cluster number for each of the b dendrograms.
        """
        for step in range(self.n - 1):
            yield self.n + step, self._merges[:, step, 0], self._merges[:, step, 1]

    def _prune(self, cost: Matrix) -> tuple[Matrix, Matrix, NDArray[np.bool_]]:
        """Find the pruning of each dendrogram with the largest worth minus costs.

        Parameters
        ----------
        cost
            Cost of a cluster in each of the b dendrograms, ``[b]``.

        Returns
        -------
        tuple of numpy.ndarray
            The worth of each pruning, ``[b]``; its number of clusters, ``[b]``; and whether each
            cluster of the dendrogram remains whole, ``[b, 2n-1]``.
        """
        worth = self._worth.copy()
        counts = np.ones_like(self._worth)
        whole = np.ones(worth.shape, dtype=bool)
        for cluster, x, y in self._iterate_merges():
            split_worth = worth[self._rows, x] + worth[self._rows, y]
            split_count = counts[self._rows, x] + counts[self._rows, y]
            own_worth = self._worth[:, cluster]
            stays_whole = own_worth - cost >= split_worth - cost * split_count
            whole[:, cluster] = stays_whole
            worth[:, cluster] = np.where(stays_whole, own_worth, split_worth)
            counts[:, cluster] = np.where(stays_whole, 1, split_count)
        return worth[:, -1], counts[:, -1], whole

    def find_critical_costs(self) -> Matrix:
        """Return Λ of each dendrogram, ``[b]``, the statistic of the permutation test by parts.

        Λ is the largest cost of a cluster at which the best pruning still has more than one
        cluster; 0 if there is no such cost above 0. The search begins with the best pruning at a
        cost of 0. In each step, the cost rises to the value at which the current pruning is worth
        no more than a single cluster, and the best pruning at this cost is found. It has fewer
        clusters than the pruning before, so there are at most n steps.
        """
        cost = np.zeros(len(self._rows))
        while True:
            worth, counts, _ = self._prune(cost)
            gain_per_cluster = (worth - self._worth[:, -1]) / np.maximum(counts - 1, 1)
            ties = np.where(counts > 1, gain_per_cluster, 0.0)
            if (ties <= cost + 1e-12).all():
                return cost
            cost = np.maximum(cost, ties)

    def find_labels(self, cost: float) -> Labels:
        """Return the cluster of each client ``[n]`` in the best pruning of the first dendrogram.

        Parameters
        ----------
        cost
            Cost of a cluster.
        """
        _, _, whole = self._prune(np.full(len(self._rows), cost))
        labels = np.zeros(self.n, dtype=np.int64)
        next_label = 0
        pending = [2 * self.n - 2]
        while pending:
            cluster = pending.pop()
            if whole[0, cluster]:
                labels[self._list_members(cluster)] = next_label
                next_label += 1
            else:
                pending += self._merges[0, cluster - self.n].tolist()
        return labels

    def _list_members(self, cluster: int) -> list[int]:
        """Return the clients of a cluster of the first dendrogram."""
        members: list[int] = []
        pending = [cluster]
        while pending:
            node = pending.pop()
            if node < self.n:
                members.append(node)
            else:
                pending += self._merges[0, node - self.n].tolist()
        return members
