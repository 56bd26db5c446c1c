"""Permutation test for clusters, from updates of several parts of each client's data.

It works for any number of clients, however small. Each client makes r updates of one model, each
from an equally large part of its training data. If all clients have the same distribution, and no
part had more influence on that model than another, then all n·r parts are exchangeable: it does
not matter which client owns which part. The test shuffles the parts over all clients. Six clients
with four parts each can be split into three and three in 24!/(12!·12!) ways, and even a single
client can be compared with others by its parts.

*Clusters.* The similarity of two clients is the mean cosine of a part of one client and a part of
the other. The similarity of a client with itself is the mean cosine of two different parts of this
client. Average linkage makes a dendrogram. A cluster c is worth |c| times the mean similarity of
its pairs, and a single client is worth its similarity with itself. The worth of a partition is the
sum over its clusters, so the best pruning of the dendrogram, at a cost λ of each cluster, is found
from the leaves up.

*Statistic.* The test statistic is Λ, the largest cost of a cluster at which the best pruning still
has more than one cluster. Since Λ is the gain per cluster, the test detects one client that differs
as well as two halves that differ. The p-value is the share of shuffles, including the true order,
in which Λ is at least as large. Linkage and pruning are repeated for each shuffle.

*Views.* The test is done in two views of the parts (:func:`build_views`), each at half the level:
the cosines, and the cosines after the directions of largest variance are scaled down.

*Cut.* If a test rejects the hypothesis of one cluster, the dendrogram is pruned at the cost that Λ
exceeds in one of twenty shuffles. Then single clients change their cluster as long as this makes
the partition worth more. Of the views in which the clusters have a positive gain
(:func:`compute_gain_by_parts`), the view that rejects most clearly is used. Each of its clusters
is tested again by itself, until no test rejects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.linkage import Dendrograms, Matrix
from fedclade.clustering.repeated_test import compute_rank_e_value
from fedclade.clustering.similarity import Labels, are_signs, convert_sign_cosines, number_clusters

if TYPE_CHECKING:
    from torch import Tensor

# Similarity of clients by the updates of parts of their data, and the worth of a partition.

VIEWS = 2
"""Number of views in which parts are compared; see :func:`build_views`."""

EVENED = 10
"""Multiple of the median variance at which the second view scales a direction by one half."""

LEAST_GAIN = 1e-9
"""Smallest gain for which a client is moved.

Smaller gains are rounding errors, for which moves might never end.
"""

NOTHING = 1e-6
"""Share of the largest variance below which the variance of a direction is a rounding error."""


def compute_part_similarity(signatures: Tensor) -> Matrix:
    """Compute the cosines of the updates from all parts of all clients' data.

    Parameters
    ----------
    signatures
        Signatures (vectors of R numbers) of the updates from r parts of each of n clients,
        ``[n, r, R]``.

    Returns
    -------
    numpy.ndarray
        Cosines, ``[n·r, n·r]``, with zeros on the diagonal.
    """
    rows = signatures.flatten(0, 1)
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
    cosines = (unit @ unit.T).double().cpu().numpy()
    if are_signs(rows):
        cosines = convert_sign_cosines(cosines)
    np.fill_diagonal(cosines, 0.0)
    return cosines


def average_client_similarity(cosines: Matrix, parts: int) -> Matrix:
    """Average the cosines of parts to similarities of clients.

    Parameters
    ----------
    cosines
        Cosines of the updates from all parts of n clients, ``[..., n·r, n·r]``, with zeros on the
        diagonal.
    parts
        Number r of parts of each client.

    Returns
    -------
    numpy.ndarray
        Similarities of clients, ``[..., n, n]``. The diagonal has the mean over each client's
        pairs of different parts.
    """
    *batch, size, _ = cosines.shape
    n = size // parts
    mean = cosines.reshape(*batch, n, parts, n, parts).sum((-3, -1)) / parts**2
    diagonal = np.arange(n)
    # A client's r parts make r(r − 1) pairs of different parts; the other r summands are zeros.
    mean[..., diagonal, diagonal] *= parts / (parts - 1)
    return mean


def compute_worth(similarity: Matrix, labels: Labels) -> float:
    """Return the worth of a partition: the sum over clusters of size times mean similarity.

    A cluster of one client is worth the client's similarity with itself.

    Parameters
    ----------
    similarity
        Similarities of n clients, ``[n, n]``.
    labels
        Cluster of each client, ``[n]``.
    """
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
    """Move single clients to other clusters while this improves the partition.

    A partition improves if its worth minus the cost of its clusters grows. A dendrogram never
    undoes a merge, so a single noisy client may be in the wrong branch. The move with the largest
    gain is made first, until no move has a gain.

    Parameters
    ----------
    similarity
        Similarities of n clients, ``[n, n]``.
    labels
        Cluster of each client, ``[n]``, with labels 0, 1, ...; the array is not changed.
    cost
        Cost of each cluster.

    Returns
    -------
    numpy.ndarray
        Cluster of each client in the improved partition, ``[n]``.
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
    """Return, for each of n clients, the worth of its cluster after the client has left it.

    A cluster of this client alone would become empty, which saves the cost of a cluster.

    Parameters
    ----------
    sizes
        Size of each client's cluster, ``[n]``.
    inside
        Sum of similarities over ordered pairs of the other members of each client's cluster,
        ``[n]``.
    single_worth
        Sum of the other members' similarities with themselves, ``[n]``.
    cost
        Cost of a cluster.
    """
    many_worth = inside / np.maximum(sizes - 2, 1)
    of_others = np.where(sizes == 2, single_worth, many_worth)
    return np.where(sizes == 1, cost, of_others)


def estimate_noise(similarity: Matrix, parts: int) -> float:
    """Estimate σ², the noise of the mean update of a client's r parts.

    σ² is 1/r of the noise of one part, which is estimated from the similarity of two parts of one
    client.

    Parameters
    ----------
    similarity
        Similarities of n clients, ``[n, n]``, each client's similarity with itself on the diagonal.
    parts
        Number r of parts of each client's data.
    """
    return max(0.0, 1 - float(similarity.diagonal().mean())) / parts


def compute_gain_by_parts(similarity: Matrix, labels: Labels, noise: float) -> float:
    """Return the gain of a partition, divided by the number of clients.

    The gain is the worth of the partition, minus the worth of a single cluster of all clients,
    minus the noise σ² for each cluster but the first.

    Parameters
    ----------
    similarity
        Similarities of n clients, ``[n, n]``.
    labels
        Cluster of each client, ``[n]``.
    noise
        Noise σ² of a client's mean update.
    """
    clusters = len(np.unique(labels))
    one_cluster = compute_worth(similarity, np.zeros_like(labels))
    extra_noise = (clusters - 1) * noise
    return (compute_worth(similarity, labels) - one_cluster - extra_noise) / len(labels)


def build_views(cosines: Matrix, across: Matrix | None = None) -> tuple[Matrix, Matrix]:
    """Build two views (kinds of similarity) of parts: their cosines, and their evened cosines.

    Updates often vary most for irrelevant reasons: for example, the random number of examples of
    each label in a part moves the whole last layer. In the second view the directions of variance v
    (eigenvalues of the centred cosines) are therefore scaled to v/(v + λ), with λ ten times the
    median of v, so that directions of large variance count about equally ("evened"). The more parts
    there are, the better this separates noise that all parts share from differences of some parts.

    Neither view depends on which client owns which part, so that shuffling the parts only shuffles
    the views.

    Parameters
    ----------
    cosines
        Cosines of N parts (:func:`compute_part_similarity`), from which the views are made,
        ``[N, N]``.
    across
        Cosines of M other parts with the N parts, ``[M, N]``. If given, the views of these cosines
        are returned instead, and their rows may have any scale.

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
    """Estimate the relative noise γ_i of each client's whole update (CFL eq. 39), ``[n]``.

    A whole update has 1/r of the squared noise of an update from one part. γ_i is infinite if the
    client's parts are not similar at all.

    Parameters
    ----------
    similarity
        Similarities of n clients, ``[n, n]``, each client's similarity with itself on the diagonal.
    parts
        Number r of parts of each client's data.
    """
    own = similarity.diagonal()
    with np.errstate(divide="ignore"):
        return np.where(own > 0, np.sqrt(np.maximum(1 / own - 1, 0) / parts), np.inf)


CUT = 0.05
"""Share of shuffles in which the statistic Λ exceeds the cost at which the dendrogram is pruned."""

DRAWS_TO_RESOLVE = 4
"""Number of shuffles for a p-value, as a multiple of 1 / level."""

FEWEST_DRAWS = 400
"""Smallest number of shuffles, from which the cost of a cluster in the pruning is estimated."""

MOST_DRAWS = 4_000_000
"""Largest number of shuffles for a p-value. No result can be significant at a level that needs more
shuffles, so only :data:`FEWEST_DRAWS` are drawn at such a level."""

ENOUGH = 100
"""Number of shuffles with at least the observed Λ after which no more shuffles are drawn.

The p-value is then not small, whatever else would be drawn (Besag and Clifford 1991).
"""

LARGEST_TESTED_BY_PARTS = 128
"""Largest number of clients whose parts are shuffled. Of more clients, a sample of this size is
tested, and the other clients join the clusters of the sample."""

ENTRIES_AT_ONCE = 2**21
"""Number of similarities that are shuffled at a time: 16 MiB."""

MOST_PARTS = 8
"""Largest number of parts of a client's data."""

PLENTY = 150
"""Number of examples in a part from which on more parts improve the test more than larger parts."""

PARTS_OF_ALL = 160
"""Largest number of parts of all clients together to which :data:`PLENTY` of data leads."""


@dataclass(frozen=True, eq=False)
class PartFinding:
    """Result of the permutation test by parts: clusters, p-value, e-value and similarities."""

    labels: Labels  # cluster of each client [n]; zeros if no test rejects a single cluster
    p_value: float  # of the hypothesis of one distribution, from both views together
    strength: float  # Λ over its critical value in the view of the clusters; 0 without clusters
    view: int  # number of the view in which the clusters were found
    tested: Labels  # clients [m] whose parts were shuffled: all, or a sample if there are many
    similarities: tuple[Matrix, ...]  # of the tested clients in each view, [m, m]
    parts: int
    e_value: float  # of the same hypothesis: the mean of both views

    def compute_gains(self, labels: Labels) -> list[float]:
        """Return the gain per client of a partition of the n clients, in each view."""
        tested_labels = labels[self.tested]
        gains: list[float] = []
        for similarity in self.similarities:
            noise = estimate_noise(similarity, self.parts)
            gains.append(compute_gain_by_parts(similarity, tested_labels, noise))
        return gains


def choose_part_count(clients: int, examples: int, level: float, smallest: int) -> int:
    """Choose the number r of parts of each client's data.

    The result is the smallest r by which one client of n can be distinguished from the other
    clients at this level, or a larger r if clients have much data. In a shuffle the r parts of some
    client stay together with probability n/C(n·r, r). Fewer parts are larger, so a model learns
    more from each part; more parts give a better estimate of the noise.

    Parameters
    ----------
    clients
        Number n of clients.
    examples
        Number of training examples of the client with the fewest.
    level
        Significance level of the test.
    smallest
        Smallest number of examples in a part. A part has fewer examples only if there would
        otherwise be fewer than two parts.

    Returns
    -------
    int
        Number of parts, from 2 to :data:`MOST_PARTS`.
    """
    needed = 2
    while needed < MOST_PARTS and clients / math.comb(clients * needed, needed) > level / 12:
        needed += 1
    plenty = min(MOST_PARTS, examples // PLENTY, PARTS_OF_ALL // clients)
    return max(2, min(max(needed, plenty), examples // smallest))


def count_shuffles(level: float) -> int:
    """Return the number of shuffles to draw for a test at a significance level.

    If the level needs more than :data:`MOST_DRAWS` shuffles, no result can be significant, and only
    :data:`FEWEST_DRAWS` are drawn.
    """
    draws = max(FEWEST_DRAWS, math.ceil(DRAWS_TO_RESOLVE / level))
    return draws if draws <= MOST_DRAWS else FEWEST_DRAWS


def compute_lowest_p_value(clients: int, parts: int) -> float:
    """Return the smallest p-value that the test can have if the clients form two clusters.

    Two perfectly separate clusters of equal size would have this p-value. The result is not smaller
    than the smallest p-value for which the test can draw enough shuffles.

    Parameters
    ----------
    clients
        Number of clients.
    parts
        Number of parts of each client's data.
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
    *,
    shuffles: int | None = None,
    is_better: Callable[[PartFinding], bool] | None = None,
) -> PartFinding:
    """Find the clusters of n clients by a permutation test of the cosines of their parts.

    Parameters
    ----------
    cosines
        Cosines of the updates from r parts of each client, ``[n·r, n·r]``, with each client's parts
        in consecutive rows; see :func:`compute_part_similarity`.
    parts
        Number r of parts of each client, at least 2.
    level
        Level of the test: largest probability of splitting clients that all have the same
        distribution.
    draw
        Generator of the shuffles.
    level_inside
        Level of the tests inside the clusters that were found: largest probability of splitting a
        cluster whose clients all have the same distribution. By default ``level``.
    shuffles
        Largest number of shuffles in each view; by default as many as the level needs.
    is_better
        Function of preliminary clusters that returns whether the caller would use these clusters if
        the test rejected. If they would not be used, only a few hundred shuffles are drawn, since
        no decision depends on the p-value.

    Returns
    -------
    PartFinding
        The clusters, the p-value and the e-value.
    """
    inside = level_inside or level
    draws = count_shuffles(level / VIEWS) if shuffles is None else shuffles
    n = len(cosines) // parts
    if n > LARGEST_TESTED_BY_PARTS:
        return _find_in_sample(
            cosines,
            parts,
            level,
            draw=draw,
            level_inside=inside,
            shuffles=shuffles,
            is_better=is_better,
        )
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
        e_value=0.0,
    )
    if n < 2:
        return best
    tests = [_ViewTest(view, parts, level / VIEWS) for view in views]
    if is_better is not None:
        first_looks = _look_first(tests, best, level_inside=inside, draw=draw)
        if not any(map(is_better, first_looks)):
            draws = FEWEST_DRAWS
    e_values: list[float] = []
    for number, test in enumerate(tests):
        test.draw_shuffles(draws, draw)
        e_values.append(compute_rank_e_value(1 + test.at_least, draws))
        best = replace(best, p_value=min(best.p_value, VIEWS * test.p_value))
        labels = test.find_labels(test.level)
        if labels.any() and test.strength > best.strength:
            best = _split_if_it_pays(best, test, labels, view=number, level=inside, draw=draw)
    return replace(best, e_value=float(np.mean(e_values)))


def _look_first(
    tests: Sequence[_ViewTest],
    nothing: PartFinding,
    *,
    level_inside: float,
    draw: np.random.Generator,
) -> list[PartFinding]:
    """Return preliminary clusters of each view, from the first few hundred shuffles.

    Views without clusters are left out.

    Parameters
    ----------
    tests
        Tests of all views, to which the shuffles are added.
    nothing
        Finding without clusters, from which the preliminary findings are made.
    level_inside
        Level of the tests that split the clusters further.
    draw
        Generator of the shuffles.
    """
    found: list[PartFinding] = []
    for number, test in enumerate(tests):
        test.draw_shuffles(FEWEST_DRAWS, draw)
        labels = test.find_labels(max(CUT, test.level))
        if labels.any():
            found.append(
                _split_if_it_pays(nothing, test, labels, view=number, level=level_inside, draw=draw)
            )
    return found


def _split_if_it_pays(
    best: PartFinding,
    test: _ViewTest,
    labels: Labels,
    *,
    view: int,
    level: float,
    draw: np.random.Generator,
) -> PartFinding:
    """Split the clusters of a view further where tests reject, and return them as a finding.

    If the resulting clusters gain nothing compared with a single cluster, ``best`` is returned
    unchanged.

    Parameters
    ----------
    best
        Best finding so far.
    test
        Test in the view.
    labels
        Cluster of each client in the view, ``[n]``; changed in place by further splits.
    view
        Number of the view.
    level
        Level of the tests inside the clusters.
    draw
        Generator of the shuffles.
    """
    _split_further(labels, test.view, test.parts, level=level, draw=draw)
    similarity = best.similarities[view]
    if compute_gain_by_parts(similarity, labels, estimate_noise(similarity, test.parts)) <= 0:
        return best
    return replace(best, labels=number_clusters(labels), strength=test.strength, view=view)


def _split_further(
    labels: Labels, view: Matrix, parts: int, *, level: float, draw: np.random.Generator
) -> None:
    """Test each cluster by itself, and split it if the test rejects; change ``labels`` in place."""
    pending = list(range(labels.max() + 1))
    while pending:
        members = np.flatnonzero(labels == pending.pop())
        if len(members) < 2:
            continue
        rows = _list_part_rows(members, parts)
        test = _ViewTest(view[np.ix_(rows, rows)], parts, level)
        test.draw_shuffles(count_shuffles(level), draw)
        inner_labels = test.find_labels(level)
        for inner in range(1, inner_labels.max() + 1):
            labels[members[inner_labels == inner]] = labels.max() + 1
        if inner_labels.any():
            pending += np.unique(labels[members]).tolist()


def _list_part_rows(clients: Labels, parts: int) -> NDArray[np.int64]:
    """Return the row numbers of all parts of some clients, in the matrix of cosines."""
    return (clients[:, None] * parts + np.arange(parts)).ravel()


class _ViewTest:
    """Permutation test for clusters in one view, to which more shuffles can be added later.

    A view is a matrix of similarities between all parts; see :func:`build_views`.

    Parameters
    ----------
    view
        Cosines of all parts in this view, ``[n·r, n·r]``.
    parts
        Number r of parts of each client.
    level
        Significance level of the test in this view.
    """

    def __init__(self, view: Matrix, parts: int, level: float) -> None:
        self.view = view
        self.parts = parts
        self.level = level
        self.at_least = 0  # shuffles with Λ at least that of the true order
        self._similarity = average_client_similarity(view, parts)
        self._trees = Dendrograms(self._similarity[None])
        # A shuffle that differs by rounding only should count as equal, so that p is not too small.
        self._observed = float(self._trees.find_critical_costs()[0]) - 1e-12
        self._batches: list[Matrix] = []

    @property
    def drawn(self) -> int:
        """Number of shuffles that have been drawn so far."""
        return sum(map(len, self._batches))

    @property
    def p_value(self) -> float:
        """Share of orders in which the statistic Λ is at least as large as in the true order.

        The true order itself counts as one of the orders.
        """
        return (self.at_least + 1) / (self.drawn + 1)

    @property
    def strength(self) -> float:
        """Statistic Λ of the true order, divided by its critical value.

        At the level p of the test, the critical value is the (1 − p) quantile of Λ over the
        shuffles.
        """
        critical = float(np.quantile(np.concatenate(self._batches), 1 - self.level))
        return max(self._observed, 0.0) / max(critical, 1e-12)

    def draw_shuffles(self, draws: int, draw: np.random.Generator) -> None:
        """Draw shuffles of the parts until there are ``draws`` shuffles in all.

        Drawing stops early once :data:`ENOUGH` shuffles have at least the observed Λ.
        """
        size = len(self.view)
        max_batch = max(1, ENTRIES_AT_ONCE // size**2)
        drawn = self.drawn
        while drawn < draws and self.at_least < ENOUGH:
            # Small batches first: if there are no clusters, a few hundred shuffles usually suffice.
            batch_size = min(max_batch, max(drawn, ENOUGH), draws - drawn)
            orders = np.argsort(draw.random((batch_size, size)), axis=1)
            shuffles = self.view[orders[:, :, None], orders[:, None, :]]
            trees = Dendrograms(average_client_similarity(shuffles, self.parts))
            costs = trees.find_critical_costs()
            self._batches.append(costs)
            self.at_least += int((costs >= self._observed).sum())
            drawn += batch_size

    def find_labels(self, level: float) -> Labels:
        """Return the cluster of each client ``[n]`` if the test rejects at a level, or zeros."""
        if self.p_value > level:
            return np.zeros(len(self._similarity), dtype=np.int64)
        shuffled = np.concatenate(self._batches)
        cost = float(np.quantile(shuffled, 1 - max(CUT, level)))
        labels = improve_partition(self._similarity, self._trees.find_labels(cost), cost)
        # Number the clusters by clients: the order in a dendrogram may depend on rounding.
        return number_clusters(labels)


def _find_in_sample(
    cosines: Matrix,
    parts: int,
    level: float,
    *,
    draw: np.random.Generator,
    level_inside: float,
    shuffles: int | None,
    is_better: Callable[[PartFinding], bool] | None,
) -> PartFinding:
    """Find the clusters of a sample of clients, and assign all other clients to these clusters.

    A client outside the sample joins the cluster whose sampled members are most similar to the
    client on average. The parameters are the same as for :func:`find_by_parts`.
    """
    n = len(cosines) // parts
    sampled = np.sort(draw.choice(n, LARGEST_TESTED_BY_PARTS, replace=False))
    rows = _list_part_rows(sampled, parts)
    within = cosines[np.ix_(rows, rows)]

    def is_better_in_sample(finding: PartFinding) -> bool:
        labels = np.zeros(n, dtype=np.int64)
        labels[sampled] = finding.labels
        return is_better is not None and is_better(replace(finding, labels=labels, tested=sampled))

    finding = find_by_parts(
        within,
        parts,
        level,
        draw=draw,
        level_inside=level_inside,
        shuffles=shuffles,
        is_better=None if is_better is None else is_better_in_sample,
    )
    members = np.eye(finding.labels.max() + 1)[finding.labels]  # [m, k]
    view = build_views(within, cosines[:, rows])[finding.view]
    to_sampled = view.reshape(n, parts, len(sampled), parts).mean((1, 3))
    to_clusters = to_sampled @ members / members.sum(0)
    labels = to_clusters.argmax(1)
    labels[sampled] = finding.labels
    return replace(finding, labels=labels, tested=sampled)
