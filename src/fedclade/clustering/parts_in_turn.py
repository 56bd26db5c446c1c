"""E-value of one check for clusters, from updates of several parts of each client's data.

Clients make updates from r parts of their data. For each s from 1 to r − 1, partitions of the
clients are found by the updates from the first s parts, and judged by the updates from part s + 1:
their gain is compared with the gain after the clients of that part are shuffled. So every part but
the first gives an e-value, a statistic that has a mean of at most 1 if there are no clusters,
whatever the parts before it. Products of successive e-values are e-values as well, and so is the
mean q of these products (:func:`compute_e_value_by_parts`). The e-value q may grow as the (r −
1)-th power of the number of shuffles, although each of the r − 1 steps has only an (r − 1)-th of
the shuffles. :mod:`fedclade.clustering.repeated_test` adds up the e-values of successive checks.

The partition to adopt is found by leaving out one part after the other
(:func:`find_clusters_by_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.linkage import Matrix, agglomerate
from fedclade.clustering.part_test import LARGEST_TESTED_BY_PARTS, average_client_similarity
from fedclade.clustering.repeated_test import LEAST, MOST_SHUFFLES, draw_e_value
from fedclade.clustering.similarity import Labels, Similarity
from fedclade.clustering.split_half import (
    MOST_CLUSTERS,
    Across,
    Finding,
    find_best,
    permute_pairs,
    weigh_pairs,
)

ENTRIES_AT_ONCE = 2**22
"""Similarities that are shuffled at a time: 32 MiB."""


# The e-value of one check.


def compute_e_value_by_parts(
    cosines: Matrix,
    parts: int,
    draw: np.random.Generator,
    *,
    is_trained: bool,
    shuffles: int = MOST_SHUFFLES,
) -> float:
    """Compute the e-value q of one check, from the cosines of r parts of each client.

    Average linkage of the updates from parts 1 to s gives a partition into each number of clusters.
    The gains G of these partitions (:mod:`fedclade.clustering.split_half`) are computed from the
    updates from part s + 1, and T is the largest gain. Under the null hypothesis of one
    distribution, the clients of part s + 1 may be shuffled, given all earlier parts, and the rank
    of T among its values after shuffles gives an e-value e_s. For s = 1 to r − 1, q is replaced by
    (q + 1/(r − 1))·e_s, starting from q = 0. The result is the mean of the products e_s·…·e_{r−1}
    over all s.

    Parameters
    ----------
    cosines
        Cosines of the updates of all parts of n clients, ``[n·r, n·r]``, with each client's parts
        in consecutive rows.
    parts
        Number r of parts, at least 2.
    draw
        Generator of the shuffles, and of the sample of clients if they are many.
    is_trained
        Whether the updates start from a model that was trained on these data. If not, part s + 1 is
        also compared with the parts before it. For a trained model this comparison would exceed the
        level of the test, since two parts of one client have in common what the model memorized of
        this client.
    shuffles
        Largest number of shuffles of all steps together.
    """
    n = len(cosines) // parts
    if n < 2:
        return LEAST
    by_part = cosines.reshape(n, parts, n, parts).transpose(1, 3, 0, 2)  # [r, r, n, n]
    if n > LARGEST_TESTED_BY_PARTS:
        rows = np.sort(draw.choice(n, LARGEST_TESTED_BY_PARTS, replace=False))
        by_part = by_part[:, :, rows[:, None], rows]
    steps = parts - 1
    e_value = 0.0
    for earlier in range(1, parts):
        judgement = _Judgement.of(by_part, earlier, is_trained=is_trained)
        e_value = (e_value + 1 / steps) * judgement.draw_e_value(draw, shuffles // steps)
    return e_value


@dataclass(frozen=True, eq=False)
class _Judgement:
    """Partitions of n clients, with the similarities from which their gains are computed.

    Each client has an update from each of several parts of its data. The partitions were found by
    the updates from the earlier parts. They are judged by the updates from the next part, which did
    not influence them: the gain G of a partition is a weighted sum of similarities of these
    updates, minus the cost of its clusters.

    Parameters
    ----------
    weights, costs
        Weights ``[K, n²]`` of all pairs of clients in the gain of K partitions, and the costs
        ``[K]``.
    within
        Cosines of the n clients' updates from the next part, ``[n, n]``.
    across
        Mean cosines of each client's update from the next part (rows) with other clients' updates
        from the earlier parts (columns), ``[n, n]``; None if only ``within`` is used.
    share_across
        Weight of ``across`` in the similarities, in [0, 1]; ``within`` has the remaining weight.
    """

    weights: NDArray[np.float64]
    costs: NDArray[np.float64]
    within: Similarity
    across: Similarity | None
    share_across: float

    @classmethod
    def of(cls, by_part: NDArray[np.float64], earlier: int, *, is_trained: bool) -> _Judgement:
        """Find partitions by the updates from the first parts, to be judged by the next part.

        Parameters
        ----------
        by_part
            Cosines of n clients for each pair of their r parts, ``[r, r, n, n]``.
        earlier
            Number of parts on which partitions are found.
        is_trained
            Whether the updates start from a model that was trained on these data.
        """
        before = by_part[:earlier, :earlier].mean((0, 1))
        noise = _estimate_noise(by_part, earlier)
        weights, costs = weigh_pairs(_cut_into_all_numbers(before), noise)
        return cls(
            weights=weights.reshape(len(weights), -1),
            costs=costs,
            within=by_part[earlier, earlier],
            across=None if is_trained else by_part[earlier, :earlier].mean(0),
            # One pair of parts is within, and 2·s ordered pairs are across.
            share_across=0.0 if is_trained else 2 * earlier / (2 * earlier + 1),
        )

    def draw_e_value(self, draw: np.random.Generator, shuffles: int) -> float:
        """Return the e-value of the largest gain T, by its rank among the gains after shuffles.

        Parameters
        ----------
        draw
            Generator of the shuffles.
        shuffles
            Largest number of shuffles.
        """
        n = len(self.within)

        def sample(count: int) -> NDArray[np.float64]:
            return self._compute_best_gains(np.argsort(draw.random((count, n)), axis=1))

        observed = float(self._compute_best_gains(np.arange(n)[None])[0])
        return draw_e_value(observed, sample, shuffles, max(1, ENTRIES_AT_ONCE // n**2))

    def _compute_best_gains(self, orders: Labels) -> NDArray[np.float64]:
        """Return the largest gain T of all partitions in each of m orders of clients, ``[m]``.

        Parameters
        ----------
        orders
            Orders of the clients' updates from the part that judges the partitions, ``[m, n]``.
        """
        pairs = permute_pairs(self.within, orders)
        if self.across is not None:
            # Only rows are permuted: columns belong to earlier parts, whose clients are not
            # shuffled.
            rows = self.across[orders].reshape(len(orders), -1)
            pairs = (1 - self.share_across) * pairs + self.share_across * rows
        return (pairs @ self.weights.T - self.costs).max(axis=1)


def _estimate_noise(by_part: NDArray[np.float64], earlier: int) -> float:
    """Estimate σ², the noise of the mean update of a client's r parts, from its earlier parts.

    The estimate follows from the mean similarity of two parts of one client. With one earlier part
    this similarity is not known. The mean similarity of the parts of different clients replaces it.
    As it may be smaller, σ² may then be estimated too large.

    Parameters
    ----------
    by_part
        Cosines of n clients for each pair of their r parts, ``[r, r, n, n]``.
    earlier
        Number of the first parts that are used.
    """
    parts, n = by_part.shape[0], by_part.shape[2]
    if earlier == 1:
        in_common = by_part[0, 0].sum() / max(n * (n - 1), 1)
    else:
        own = by_part[:earlier, :earlier].diagonal(axis1=2, axis2=3)  # zeros for equal parts
        in_common = own.sum() / (n * earlier * (earlier - 1))
    return max(0.0, 1 - float(in_common)) / parts


def _cut_into_all_numbers(similarity: Similarity) -> Labels:
    """Return the partitions of n clients by average linkage into 1, 2, ... clusters, ``[K, n]``.

    The partitions are made from the merges one after the other, which takes a fraction of the time
    of a separate cut for each number of clusters. The diagonal of ``similarity [n, n]`` is ignored.
    """
    n = len(similarity)
    distances = 1 - similarity[np.triu_indices(n, 1)]
    labels = np.arange(n)
    member = list(range(n))  # a client of each node of the dendrogram
    partitions = [labels.copy()]
    for one, other in agglomerate(distances, "average")[:, :2].astype(int).tolist():
        first, second = sorted((labels[member[one]], labels[member[other]]))
        last = labels.max()
        labels[labels == second] = first
        labels[labels == last] = second  # so that labels have no gaps
        member.append(member[one])
        partitions.append(labels.copy())
    return np.stack(partitions[::-1][:MOST_CLUSTERS])


# The partition to adopt.


class AcrossParts(Across):
    """Partitions that are found on all parts of the data but one, and judged on the remaining part.

    Each of the r parts is left out in turn. In contrast to the base class, ``halves`` has the
    cosines within each part, and ``cuts`` the partitions that were found on the other parts.
    """

    def compute_gains(self, orders: Labels) -> NDArray[np.float64]:
        """Compute the gain G of the partitions into 1 to K clusters, for permuted clients.

        G states how much better the clusters' mean updates predict the updates from an unseen part
        than the mean of all clients does. It is computed with each part as the unseen part in turn;
        the result is the mean. In the unseen part, updates are assigned to the clients in the order
        of a permutation, to test whether the true order has a larger gain.

        Parameters
        ----------
        orders
            Permutations of the clients in the part that is left out, ``[m, n]``.

        Returns
        -------
        numpy.ndarray
            ``[m, K]``: for each permutation and for 1 to K clusters.
        """
        gains = np.zeros((len(orders), len(self.cuts[0])))
        for within, (weights, costs) in zip(self.halves, self.weights_and_costs, strict=True):
            gains += permute_pairs(within, orders) @ weights.T - costs
        return gains / len(self.halves)


def find_clusters_by_parts(cosines: Matrix, parts: int) -> Finding:
    """Find the partition of clients with the largest gain, by leaving out one part after the other.

    For each number of clusters, a partition is found on all parts but one, and its gain is computed
    on the part left out; the mean gain over all parts judges the number of clusters. The result is
    the partition of all parts together into the best number of clusters.

    Parameters
    ----------
    cosines
        Cosines of the updates of all parts of n clients, ``[n·r, n·r]``, with each client's parts
        in consecutive rows.
    parts
        Number r of parts, at least 2.
    """
    n = len(cosines) // parts
    by_part = cosines.reshape(n, parts, n, parts).transpose(1, 3, 0, 2)
    within: list[Similarity] = []
    cuts: list[Labels] = []
    for part in range(parts):
        others = [other for other in range(parts) if other != part]
        similarity = by_part[np.ix_(others, others)].mean((0, 1))
        cuts.append(_cut_into_all_numbers(similarity))
        within.append(by_part[part, part])
    similarity = average_client_similarity(cosines, parts)
    own = similarity.diagonal().copy()
    np.fill_diagonal(similarity, 1.0)
    noise = max(0.0, 1 - float(own.mean())) / parts
    return find_best(similarity, AcrossParts(within, cuts, noise), own=own)
