"""Permutation test for clusters, from updates of several parts of each client's data.

It works for any number of clients, however small. Each client makes r updates of one model, each
from an equally large part of its training data. If all clients have the same distribution, and no
part had more influence on that model than another, then all n·r parts are exchangeable: it does
not matter which client owns which part. The test shuffles the parts over all clients. Six clients
with four parts each can be split into three and three in 24!/(12!·12!) ways, and even a single
client can be compared with others by its parts.

*Clusters.* The similarity of two clients is the mean cosine of a part of one and a part of the
other. The similarity of a client with itself is that of two different parts. Average linkage makes
a dendrogram. A cluster c is worth |c| times the mean similarity of its pairs, and a single client
is worth its similarity with itself. The worth of a partition is the sum over its clusters, so the
best pruning of the dendrogram, at a cost λ of each cluster, is found from the leaves up.

*Statistic.* It is Λ, the largest cost of a cluster at which more than one cluster still pays. As
it is the gain per cluster, it detects one client that differs as well as two halves that differ.
The p-value is the share of shuffles, including the true order, in which Λ is at least as large.
Linkage and pruning are repeated for each shuffle.

*Views.* All of this is done in two views of the parts (:func:`build_views`), each at half the
level: the cosines, and the cosines after the directions of largest variance are scaled down.

*Cut.* If a test rejects that there is one cluster, the dendrogram is pruned at the cost that Λ
exceeds in one of twenty shuffles. Then single clients change their cluster as long as this makes
the partition worth more. Of the views in which the clusters gain more than the noise of an update
each, the one that rejects most clearly counts. Each of its clusters is tested again by itself,
until no test rejects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.linkage import Dendrograms, Matrix
from fedclade.clustering.similarity import Labels, are_signs, convert_sign_cosines, number_clusters

# Similarity of clients by the updates of parts of their data, and the worth of a partition.

VIEWS = 2
"""Number of views in which parts are compared; see :func:`build_views`."""

EVENED = 10
"""Multiple of the median variance at which a direction is scaled by half in the second view."""

LEAST_GAIN = 1e-9
"""Least gain of moving a client: less is rounding, and such moves might go on for ever."""

NOTHING = 1e-6
"""Variance, as a share of the largest, below which a direction is rounding."""


def compute_part_similarity(signatures: Tensor) -> Matrix:
    """Compute the cosines of all parts.

    Parameters
    ----------
    signatures
        Of r parts of each of n clients, ``[n, r, R]``.

    Returns
    -------
    numpy.ndarray
        ``[n·r, n·r]``, with zeros on the diagonal.
    """
    rows = signatures.flatten(0, 1)
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    cosines = (unit @ unit.T).double().cpu().numpy()
    if are_signs(rows):
        cosines = convert_sign_cosines(cosines)
    np.fill_diagonal(cosines, 0.0)
    return cosines


def average_client_similarity(cosines: Matrix, parts: int) -> Matrix:
    """Average the similarities of parts over pairs of clients.

    Parameters
    ----------
    cosines
        Of all parts, ``[..., n·r, n·r]``, with zeros on the diagonal.
    parts
        Number r of parts of each client.

    Returns
    -------
    numpy.ndarray
        ``[..., n, n]``. The diagonal has the mean over each client's pairs of different parts.
    """
    *batch, size, _ = cosines.shape
    n = size // parts
    mean = cosines.reshape(*batch, n, parts, n, parts).sum((-3, -1)) / parts**2
    diagonal = np.arange(n)
    # A client's r parts make r(r − 1) pairs of different parts; the other r summands are zeros.
    mean[..., diagonal, diagonal] *= parts / (parts - 1)
    return mean


def compute_worth(similarity: Matrix, labels: Labels) -> float:
    """Return the worth of a partition ``[n]``: Σ |c| times the mean similarity of pairs in c."""
    worth = 0.0
    for cluster in np.unique(labels):
        members = np.flatnonzero(labels == cluster)
        block = similarity[np.ix_(members, members)]
        if len(members) == 1:
            worth += float(block.sum())
        else:
            worth += float((block.sum() - np.trace(block)) / (len(members) - 1))
    return worth


def improve_partition(similarity: Matrix, labels: Labels, cost: float) -> Labels:
    """Move single clients to other clusters while the worth, less the costs, grows.

    A dendrogram never undoes a merge, so a single noisy client may be in the wrong branch. The move
    that gains most is made first. If the partition pays, merging all clients into one cluster gains
    nothing.

    Parameters
    ----------
    similarity
        Of clients, ``[n, n]``.
    labels
        The partition ``[n]``, with labels 0, 1, ...; it is not changed.
    cost
        Cost of each cluster.

    Returns
    -------
    numpy.ndarray
        The improved partition ``[n]``.
    """
    own = similarity.diagonal()
    labels = labels.copy()
    pairs = similarity - np.diag(own)
    rows = np.arange(len(labels))
    while True:
        members = np.eye(labels.max() + 1)[labels]  # [n, k]
        sizes = members.sum(0)
        towards = pairs @ members  # sum of similarities of each client to each cluster, [n, k]
        inside = (members * towards).sum(0)
        single_worth = own @ members  # applies to clusters of one client
        worth = np.where(sizes > 1, inside / np.maximum(sizes - 1, 1), single_worth)
        to_own_cluster = towards[rows, labels]
        remaining = _compute_remaining_worth(
            sizes[labels],
            inside[labels] - 2 * to_own_cluster,
            single_worth[labels] - own,
            cost=cost,
        )
        gain_of_joining = (inside + 2 * towards) / sizes - worth
        gain_of_leaving = (remaining - worth[labels])[:, None]
        gains = gain_of_joining + gain_of_leaving  # [n, k]
        gains[rows, labels] = 0.0
        client, cluster = np.unravel_index(gains.argmax(), gains.shape)
        if gains[client, cluster] <= LEAST_GAIN:
            return labels
        labels[client] = cluster
        labels = np.unique(labels, return_inverse=True)[1]


def _compute_remaining_worth(
    sizes: Matrix, inside: Matrix, single_worth: Matrix, *, cost: float
) -> Matrix:
    """Return, for each client, the worth ``[n]`` of its cluster if the client left it.

    A cluster of this client alone would become empty, which saves the cost of a cluster.
    """
    many_worth = inside / np.maximum(sizes - 2, 1)
    of_others = np.where(sizes == 2, single_worth, many_worth)
    return np.where(sizes == 1, cost, of_others)


def estimate_noise(similarity: Matrix, parts: int) -> float:
    """Estimate σ², the noise of the mean of a client's r parts.

    It is 1/r of the noise of one part, which shows in the similarity of two parts of one client.
    """
    return max(0.0, 1 - float(similarity.diagonal().mean())) / parts


def compute_gain_by_parts(similarity: Matrix, labels: Labels, noise: float) -> float:
    """Return the gain of a partition ``[n]`` per client.

    The gain is the worth of the partition, less that of one cluster, less the noise σ² for each
    cluster but the first.
    """
    clusters = len(np.unique(labels))
    one_cluster = compute_worth(similarity, np.zeros_like(labels))
    extra_noise = (clusters - 1) * noise
    return (compute_worth(similarity, labels) - one_cluster - extra_noise) / len(labels)


def build_views(cosines: Matrix, across: Matrix | None = None) -> tuple[Matrix, Matrix]:
    """Build two views of the similarity of parts: the cosines, and the evened cosines.

    Updates often vary most for reasons of no interest: the number of examples of each label that a
    part happens to have moves the whole last layer. In the second view the directions of variance
    v (eigenvalues of the centred cosines) are therefore scaled to v/(v + λ), with λ ten times the
    median of v. Directions of large variance then count about equally. The more parts there are,
    the better this separates noise that all of them share from differences of some of them.

    Neither view uses the clients that own the parts, so shuffling the parts shuffles the views.

    Parameters
    ----------
    cosines
        Of N parts (:func:`compute_part_similarity`), from which the views are made, ``[N, N]``.
    across
        Of M other parts with these, ``[M, N]``. If given, the views of these are returned instead,
        and their rows may have any scale.

    Returns
    -------
    tuple of numpy.ndarray
        The two views, ``[N, N]`` with zeros on the diagonal, or ``[M, N]``.
    """
    whole = cosines + np.eye(len(cosines))
    middle = whole.mean(0)
    centred = whole - middle - middle[:, None] + middle.mean()
    values, vectors = np.linalg.eigh(centred)
    values = np.maximum(values, 0.0)
    median = float(np.median(values[values >= NOTHING * values[-1]]))
    damped = values + EVENED * max(median, 1e-30)
    evening = (vectors / damped) @ vectors.T
    lengths = np.sqrt(np.maximum((centred * evening).sum(1), 1e-30))
    if across is not None:
        centred_across = across - across.mean(1, keepdims=True) - middle + middle.mean()
        return across, centred_across @ evening / lengths
    evened = centred @ evening / np.outer(lengths, lengths)
    np.fill_diagonal(evened, 0.0)
    return cosines, evened


def estimate_gammas(similarity: Matrix, parts: int) -> Matrix:
    """Estimate γ_i of CFL's eq. 39 for whole updates, ``[n]``.

    A whole update has 1/r of the noise of a part's update.
    """
    own = similarity.diagonal()
    with np.errstate(divide="ignore"):
        return np.where(own > 0, np.sqrt(np.maximum(1 / own - 1, 0) / parts), np.inf)


CUT = 0.05
"""Share of shuffles in which Λ exceeds the cost of the cut."""

DRAWS_TO_RESOLVE = 4
"""Number of shuffles in a sample, as a multiple of 1 / level."""

FEWEST_DRAWS = 400
"""Least number of shuffles, from which the cost of the cut is estimated."""

MOST_DRAWS = 4_000_000
"""Largest sample of shuffles. No result is significant at a level that needs more shuffles, and
few of them show that as well."""

ENOUGH = 100
"""Shuffles with as large a Λ after which sampling stops: the p-value is not small, whatever else
would be drawn (Besag and Clifford 1991)."""

LARGEST_TESTED = 128
"""Largest number of clients whose parts are shuffled. If there are more, a sample of this size is
tested, and the other clients join the clusters of the sample."""

ENTRIES_AT_ONCE = 2**21
"""Similarities that are shuffled at a time: 16 MiB."""

MOST_PARTS = 8
"""Largest number of parts of a client's data."""

PLENTY = 150
"""Examples in a part above which more parts improve the test more than larger parts do."""

PARTS_OF_ALL = 160
"""Largest number of parts of all clients together that plenty of data leads to."""


@dataclass(frozen=True, eq=False)
class PartFinding:
    """Result of the test by parts."""

    labels: Labels  # the clusters [n]; zeros if no test rejects that there is one
    p_value: float  # of the hypothesis of one distribution, from both views together
    strength: float  # Λ over its critical value, in the view that gave the clusters; 0 if none did
    view: int  # number of that view
    tested: Labels  # clients [m] whose parts were shuffled: all, or a sample if there are many
    similarities: tuple[Matrix, ...]  # of the tested clients in each view, [m, m]
    parts: int

    def compute_gains(self, labels: Labels) -> list[float]:
        """Return the gain per client of a partition ``[n]``, in each view."""
        tested_labels = labels[self.tested]
        gains: list[float] = []
        for similarity in self.similarities:
            noise = estimate_noise(similarity, self.parts)
            gains.append(compute_gain_by_parts(similarity, tested_labels, noise))
        return gains


def choose_part_count(clients: int, examples: int, level: float, smallest: int) -> int:
    """Choose the number r of parts of each client's data.

    It is the smallest r by which one client of n can be distinguished from the others at this
    level, or a larger one if data are plenty. In a shuffle the r parts of some client stay together
    with probability n/C(n·r, r). Fewer parts are larger, so a model learns more from each; more
    parts give a better estimate of the noise.

    Parameters
    ----------
    clients
        Number n of clients.
    examples
        Number of training examples of the client with the fewest.
    level
        Significance level of the test.
    smallest
        Least number of examples in a part. It is exceeded only to have two parts.

    Returns
    -------
    int
        From 2 to :data:`MOST_PARTS`.
    """
    needed = 2
    while needed < MOST_PARTS and clients / math.comb(clients * needed, needed) > level / 12:
        needed += 1
    plenty = min(MOST_PARTS, examples // PLENTY, PARTS_OF_ALL // clients)
    return max(2, min(max(needed, plenty), examples // smallest))


def compute_lowest_p_value(clients: int, parts: int) -> float:
    """Return the smallest possible p-value, for two clusters of equal size.

    It is at least the smallest p-value that the number of shuffles can resolve.
    """
    # Beyond 100 of 200 parts the number of shuffles is the limit, and the binomial is a huge
    # number.
    half = min(100, clients // 2 * parts)
    ways = math.comb(min(clients * parts, 200), half)
    smallest = 2 / ways if clients % 2 == 0 else 1 / ways
    return max(smallest, DRAWS_TO_RESOLVE / MOST_DRAWS)


def find_by_parts(
    cosines: Matrix,
    parts: int,
    level: float,
    draw: np.random.Generator,
    level_inside: float | None = None,
) -> PartFinding:
    """Find the clusters of n clients by the cosines of their parts.

    Parameters
    ----------
    cosines
        Of the parts' updates, ``[n·r, n·r]``, with each client's parts in consecutive rows; see
        :func:`compute_part_similarity`.
    parts
        Number r of parts of each client, at least 2.
    level
        Probability of splitting clients that have one distribution.
    draw
        Generator of the shuffles.
    level_inside
        Probability of splitting a found cluster of one distribution; ``level`` by default.

    Returns
    -------
    PartFinding
        The clusters and the p-value.
    """
    inside = level_inside or level
    n = len(cosines) // parts
    if n > LARGEST_TESTED:
        return _find_in_sample(cosines, parts, level, draw=draw, level_inside=inside)
    views = build_views(cosines)
    similarities = tuple(average_client_similarity(view, parts) for view in views)
    best = PartFinding(
        labels=np.zeros(n, dtype=np.int64),
        p_value=1.0,
        strength=0.0,
        view=0,
        tested=np.arange(n),
        similarities=similarities,
        parts=parts,
    )
    if n < 2:
        return best
    for number, (view, similarity) in enumerate(zip(views, similarities, strict=True)):
        labels, p_value, strength = _test_once(view, parts, level / VIEWS, draw=draw)
        best = replace(best, p_value=min(best.p_value, VIEWS * p_value))
        if not labels.any() or strength <= best.strength:
            continue
        _split_further(labels, view, parts, level=inside, draw=draw)
        if compute_gain_by_parts(similarity, labels, estimate_noise(similarity, parts)) > 0:
            best = replace(best, labels=number_clusters(labels), strength=strength, view=number)
    return best


def _split_further(
    labels: Labels, view: Matrix, parts: int, *, level: float, draw: np.random.Generator
) -> None:
    """Test each cluster by itself, split it if the test rejects, and change ``labels`` in place."""
    pending = list(range(labels.max() + 1))
    while pending:
        members = np.flatnonzero(labels == pending.pop())
        if len(members) < 2:
            continue
        rows = _list_part_rows(members, parts)
        inner_labels = _test_once(view[np.ix_(rows, rows)], parts, level, draw=draw)[0]
        for inner in range(1, inner_labels.max() + 1):
            labels[members[inner_labels == inner]] = labels.max() + 1
        if inner_labels.any():
            pending += np.unique(labels[members]).tolist()


def _list_part_rows(clients: Labels, parts: int) -> NDArray[np.int64]:
    """Return the row numbers of the parts of some clients."""
    return (clients[:, None] * parts + np.arange(parts)).ravel()


def _test_once(
    view: Matrix, parts: int, level: float, *, draw: np.random.Generator
) -> tuple[Labels, float, float]:
    """Test for clusters and prune once.

    Returns
    -------
    tuple of numpy.ndarray, float and float
        The clusters ``[n]``, the p-value, and Λ over its critical value.
    """
    similarity = average_client_similarity(view, parts)
    trees = Dendrograms(similarity[None])
    # A shuffle that differs by rounding only should count as equal, so that p is not too small.
    observed = float(trees.find_critical_costs()[0]) - 1e-12

    def count_at_least(costs: Matrix) -> int:
        return int((costs >= observed).sum())

    shuffled, at_least = _sample_critical_costs(
        view, parts, level, draw=draw, count_at_least=count_at_least
    )
    p_value = (at_least + 1) / (len(shuffled) + 1)  # the true order is one of the shuffles
    critical = float(np.quantile(shuffled, 1 - level))
    strength = max(observed, 0.0) / max(critical, 1e-12)
    if p_value > level:
        return np.zeros(len(view) // parts, dtype=np.int64), p_value, strength
    cost = float(np.quantile(shuffled, 1 - max(CUT, level)))
    labels = improve_partition(similarity, trees.find_labels(cost), cost)
    # Number the clusters by clients: the order in a dendrogram may depend on rounding.
    return number_clusters(labels), p_value, strength


def _sample_critical_costs(
    cosines: Matrix,
    parts: int,
    level: float,
    *,
    draw: np.random.Generator,
    count_at_least: Callable[[Matrix], int],
) -> tuple[Matrix, int]:
    """Return Λ of as many shuffles as the level needs, and the number of those at least observed.

    ``count_at_least`` counts the values of a batch that are at least as large as the true one.
    """
    size = len(cosines)
    draws = max(FEWEST_DRAWS, math.ceil(DRAWS_TO_RESOLVE / level))
    if draws > MOST_DRAWS:
        draws = FEWEST_DRAWS
    max_batch = max(1, ENTRIES_AT_ONCE // size**2)
    batches: list[Matrix] = []
    at_least = 0
    drawn = 0
    while drawn < draws and at_least < ENOUGH:
        # Small batches first: if there are no clusters, a few hundred shuffles usually suffice.
        batch_size = min(max_batch, max(drawn, ENOUGH), draws - drawn)
        orders = np.argsort(draw.random((batch_size, size)), axis=1)
        shuffles = cosines[orders[:, :, None], orders[:, None, :]]
        costs = Dendrograms(average_client_similarity(shuffles, parts)).find_critical_costs()
        batches.append(costs)
        at_least += count_at_least(costs)
        drawn += len(orders)
    return np.concatenate(batches), at_least


def _find_in_sample(
    cosines: Matrix, parts: int, level: float, *, draw: np.random.Generator, level_inside: float
) -> PartFinding:
    """Find the clusters of a sample of clients, and assign each other client to the most similar.

    The similarity of a client to a cluster is its mean similarity to the members in the sample.
    """
    n = len(cosines) // parts
    sampled = np.sort(draw.choice(n, LARGEST_TESTED, replace=False))
    rows = _list_part_rows(sampled, parts)
    within = cosines[np.ix_(rows, rows)]
    finding = find_by_parts(within, parts, level, draw=draw, level_inside=level_inside)
    members = np.eye(finding.labels.max() + 1)[finding.labels]  # [m, k]
    view = build_views(within, cosines[:, rows])[finding.view]
    to_sampled = view.reshape(n, parts, len(sampled), parts).mean((1, 3))
    to_clusters = to_sampled @ members / members.sum(0)
    labels = to_clusters.argmax(1)
    labels[sampled] = finding.labels
    return replace(finding, labels=labels, tested=sampled)
