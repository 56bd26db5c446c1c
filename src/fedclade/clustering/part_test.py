"""Are there clusters? What the updates of many parts of the clients' data say, however few the clients are.

Every client makes r updates at one model, each from an equally large part of its training data. If all clients have one
distribution, and no part had more to do with that model than another, all n·r parts are exchangeable: it does not
matter which of them is whose. So they are shuffled over all clients. Six clients of four parts can be parted into three
and three in 24!/(12!·12!) ways, and a single client has parts of its own.

*Clusters.* The similarity of two clients is the mean cosine of a part of one and a part of the other; of a client with
itself, that of two different parts. Average linkage makes a dendrogram. A cluster c is worth |c| times the mean
similarity of its pairs, a client by itself its similarity with itself. The best pruning of the dendrogram, at a cost λ
for every cluster, is found from the leaves up, since the worth of a partition is the sum of that of its clusters.

*The statistic* is Λ, the largest cost of a cluster at which more than one cluster still pays. One client that differs
and two halves that do are told from chance alike, as it is the gain per cluster. The p-value is the share of shuffles,
the true order among them, in which Λ is as large; linkage and pruning are made anew in each of them.

*The views.* All of this is done in two views of the parts (:func:`~fedclade.clustering.part_similarity.build_views`), each
at half the level: by their cosines, and with the directions evened out in which they vary most.

*The cut.* Where a test rejects that there is one cluster, the dendrogram is pruned at the cost that is exceeded in one
of twenty shuffles; then single clients change their cluster while that makes the partition worth more. The view that
rejects most clearly counts, among those in which the clusters gain more than the noise of an update each. What it finds
is tested again, each cluster by itself, until none is parted any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.clustering.linkage import Dendrograms, Matrix
from fedclade.clustering.similarity import Labels, are_signs, convert_sign_cosines, number_clusters

# How alike clients are by the updates of parts of their data, and what it is worth to part the
# clients.

VIEWS = 2
"""In which parts are looked at: by their cosines, and with their directions evened out."""

EVENED = 10
"""Directions in which parts vary so many times as much as in the median one count half as much as they could."""

LEAST_GAIN = 1e-9
"""Of a move from cluster to cluster: what gains less is rounding, and might be made for ever."""

NOTHING = 1e-6
"""Of the largest variance: directions with less are those of rounding."""


def compute_part_similarity(signatures: Tensor) -> Matrix:
    """Return the cosines of all parts ``[n·r, n·r]`` of signatures ``[n, r, R]``, with zeros on the diagonal."""
    flat = signatures.flatten(0, 1)
    unit = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-30)
    cosines = (unit @ unit.T).double().cpu().numpy()
    if are_signs(flat):
        cosines = convert_sign_cosines(cosines)
    np.fill_diagonal(cosines, 0.0)
    return cosines


def average_client_similarity(cosines: Matrix, parts: int) -> Matrix:
    """Return the mean cosine of two clients' parts ``[..., n, n]``; on the diagonal, of a client's different ones."""
    *some, size, _ = cosines.shape
    n = size // parts
    mean = cosines.reshape(*some, n, parts, n, parts).sum((-3, -1)) / parts**2
    own = np.arange(n)
    mean[..., own, own] *= parts / (parts - 1)
    return mean


def compute_worth(similarity: Matrix, labels: Labels) -> float:
    """Return what a partition ``[n]`` is worth: |c| times the mean similarity of its pairs, over its clusters."""
    found = 0.0
    for cluster in np.unique(labels):
        members = np.flatnonzero(labels == cluster)
        block = similarity[np.ix_(members, members)]
        alone = len(members) == 1
        found += float(block.sum()) if alone else float((block.sum() - np.trace(block)) / (len(members) - 1))
    return found


def improve_partition(similarity: Matrix, labels: Labels, cost: float) -> Labels:
    """Return a partition ``[n]`` after single clients changed their cluster while its worth, less costs, could grow.

    A dendrogram never takes back what it once merged, so that one noisy client may sit in the wrong branch. The most
    gainful move is made first. That every client moves into one cluster gains nothing where the partition pays.
    """
    own, labels = similarity.diagonal(), labels.copy()
    pairs = similarity - np.diag(own)
    everybody = np.arange(len(labels))
    while True:
        members = np.eye(labels.max() + 1)[labels]  # [n, k]
        sizes, towards = members.sum(0), pairs @ members
        inside, alone = (members * towards).sum(0), own @ members  # alone: of clusters of one
        worth = np.where(sizes > 1, inside / np.maximum(sizes - 1, 1), alone)
        here = towards[everybody, labels]
        left = _worth_left(sizes[labels], inside[labels] - 2 * here, alone[labels] - own, cost)
        gains = (inside + 2 * towards) / sizes - worth + (left - worth[labels])[:, None]  # [n, k]
        gains[everybody, labels] = 0.0
        client, cluster = np.unravel_index(gains.argmax(), gains.shape)
        if gains[client, cluster] <= LEAST_GAIN:
            return labels
        labels[client] = cluster
        labels = np.unique(labels, return_inverse=True)[1]


def _worth_left(sizes: Matrix, inside: Matrix, alone: Matrix, cost: float) -> Matrix:
    """Return what each client's cluster is worth without it, ``[n]``; one that is left empty saves its cost."""
    of_many = inside / np.maximum(sizes - 2, 1)
    return np.where(sizes == 1, cost, np.where(sizes == 2, alone, of_many))


def estimate_noise(similarity: Matrix, parts: int) -> float:
    """Return σ², the noise of the mean of a client's r parts: an r-th of that of one, which two of a client show."""
    return max(0.0, 1 - float(similarity.diagonal().mean())) / parts


def compute_gain_by_parts(similarity: Matrix, labels: Labels, noise: float) -> float:
    """Return the gain of a partition ``[n]`` per client: its worth, less that of one cluster and the others' noise."""
    clusters = len(np.unique(labels))
    one = compute_worth(similarity, np.zeros_like(labels))
    return (compute_worth(similarity, labels) - one - (clusters - 1) * noise) / len(labels)


def build_views(cosines: Matrix, across: Matrix | None = None) -> tuple[Matrix, Matrix]:
    """Return how alike parts are in two views, each ``[N, N]`` with zeros on the diagonal: cosines, and evened out.

    Where updates vary most, it is often for reasons of no interest: how many examples of each label there happen to be
    moves the whole last layer. Therefore in the second view the directions of variance v (eigenvalues of the cosines,
    less those with the parts' mean) are scaled to v/(v + λ), with λ ten times the median of v: those of large variance
    count about alike. The more parts, the better this tells noise that all have in common from what only some have.

    Nothing in either view hangs on which part is whose, so that shuffling clients' parts shuffles the views, too.

    Parameters
    ----------
    cosines
        Of N parts (:func:`compute_part_similarity`), from which the views are made, ``[N, N]``.
    across
        Of M other parts with these, ``[M, N]``: the views are then of those, and rows may have any scale.
    """
    whole = cosines + np.eye(len(cosines))
    middle = whole.mean(0)
    own = whole - middle - middle[:, None] + middle.mean()
    values, vectors = np.linalg.eigh(own)
    values = np.maximum(values, 0.0)
    scaled = values + EVENED * max(float(np.median(values[values >= NOTHING * values[-1]])), 1e-30)
    evening = (vectors / scaled) @ vectors.T
    lengths = np.sqrt(np.maximum((own * evening).sum(1), 1e-30))
    if across is not None:
        apart = across - across.mean(1, keepdims=True) - middle + middle.mean()
        return across, apart @ evening / lengths
    evened = own @ evening / np.outer(lengths, lengths)
    np.fill_diagonal(evened, 0.0)
    return cosines, evened


def estimate_gammas(similarity: Matrix, parts: int) -> Matrix:
    """Return γ_i of CFL's eq. 39 for whole updates, which have an r-th of the noise of a part's, ``[n]``."""
    own = similarity.diagonal()
    with np.errstate(divide="ignore"):
        return np.where(own > 0, np.sqrt(np.maximum(1 / own - 1, 0) / parts), np.inf)


CUT = 0.05
"""Share of shuffles in which a cluster costs more than at the cut."""

DRAWS_TO_RESOLVE = 4
"""A sample of shuffles is so many times as large as one over the level."""

FEWEST_DRAWS = 400
"""Shuffles that the cost at the cut is read off."""

MOST_DRAWS = 4_000_000
"""Of a sample. A level that needs more is reached by nothing, and few shuffles show that as well."""

ENOUGH = 100
"""Shuffles that part as well: whatever more would be drawn, the p-value is not small (Besag and Clifford 1991)."""

LARGEST_TESTED = 128
"""Clients whose parts are shuffled; of more, so many are drawn, and the others go to the clusters of these."""

ENTRIES_AT_ONCE = 2**21
"""Of similarities that are shuffled together: 16 MiB."""

MOST_PARTS = 8
"""Of a client's data."""

PLENTY = 150
"""Examples of a part from which on more parts tell more than larger ones."""

PARTS_OF_ALL = 160
"""Clients whose data are plenty are not asked for more than so many parts together."""


@dataclass(frozen=True, eq=False)
class PartFinding:
    """What the updates of all parts say about clusters."""

    labels: Labels  # the clusters [n]; zeros where no test rejects that there is one
    p_value: float  # of there being one distribution only, of both views together
    strength: float  # Λ over what it must exceed, in the view that tells the clusters; 0 if none does
    view: int
    tested: Labels  # the clients [m] whose parts were shuffled: all, but of many
    similarities: tuple[Matrix, ...]  # of these in each view, [m, m]
    parts: int

    def gains(self, labels: Labels) -> list[float]:
        """Return what a partition ``[n]`` gains per client in each view."""
        own = labels[self.tested]
        return [compute_gain_by_parts(each, own, estimate_noise(each, self.parts)) for each in self.similarities]


def choose_part_count(clients: int, examples: int, level: float, smallest: int) -> int:
    """Return r: the fewest parts by which one client of n can be told from the others, and more if data are plenty.

    That all r parts of some client come to lie together has the chance n/C(n·r, r) in a shuffle. Fewer parts are
    larger, and a model learns more from them; from more the noise is known better. No part has fewer than ``smallest``
    examples, but there are two in any case.
    """
    r = 2
    while r < MOST_PARTS and clients / math.comb(clients * r, r) > level / 12:
        r += 1
    plenty = min(MOST_PARTS, examples // PLENTY, PARTS_OF_ALL // clients)
    return max(2, min(max(r, plenty), examples // smallest))


def compute_lowest_p_value(clients: int, parts: int) -> float:
    """Return the p-value that cannot be fallen below, for two clusters that are as large as they can be.

    It is no smaller than what shuffles can resolve.
    """
    half = min(100, clients // 2 * parts)  # from there on shuffles are what limits it, and of millions ways are long
    ways = math.comb(min(clients * parts, 200), half)
    return max(2 / ways if clients % 2 == 0 else 1 / ways, DRAWS_TO_RESOLVE / MOST_DRAWS)


def find_by_parts(
    cosines: Matrix, parts: int, level: float, draw: np.random.Generator, level_inside: float | None = None
) -> PartFinding:
    """Find the clusters of n clients by the cosines of their parts, ``[n·r, n·r]``.

    Parameters
    ----------
    cosines
        Of the parts' updates, all parts of a client behind each other (:func:`compute_part_similarity`).
    parts
        r, at least 2.
    level
        The chance of parting clients of one distribution.
    draw
        Of shuffles.
    level_inside
        The chance of parting a cluster that was found; ``level``, if left out.
    """
    inside = level_inside or level
    n = len(cosines) // parts
    if n > LARGEST_TESTED:
        return _found_in_some(cosines, parts, level, draw, inside)
    views = build_views(cosines)
    similarities = tuple(average_client_similarity(view, parts) for view in views)
    best = PartFinding(np.zeros(n, dtype=np.int64), 1.0, 0.0, 0, np.arange(n), similarities, parts)
    if n < 2:
        return best
    for number, (view, similarity) in enumerate(zip(views, similarities, strict=True)):
        labels, p_value, strength = _tested(view, parts, level / VIEWS, draw)
        best = replace(best, p_value=min(best.p_value, VIEWS * p_value))
        if labels.any() and strength > best.strength:
            _part_further(labels, view, parts, inside, draw)
            if compute_gain_by_parts(similarity, labels, estimate_noise(similarity, parts)) > 0:
                best = replace(best, labels=number_clusters(labels), strength=strength, view=number)
    return best


def _part_further(labels: Labels, view: Matrix, parts: int, level: float, draw: np.random.Generator) -> None:
    """Test each cluster by itself, and those that it is parted into, and change its labels."""
    open_ = list(range(labels.max() + 1))
    while open_:
        members = np.flatnonzero(labels == open_.pop())
        if len(members) < 2:
            continue
        mine = (members[:, None] * parts + np.arange(parts)).ravel()
        deeper = _tested(view[np.ix_(mine, mine)], parts, level, draw)[0]
        for new in range(1, deeper.max() + 1):
            labels[members[deeper == new]] = labels.max() + 1
        if deeper.any():
            open_ += np.unique(labels[members]).tolist()


def _tested(view: Matrix, parts: int, level: float, draw: np.random.Generator) -> tuple[Labels, float, float]:
    """Test once, and prune once: return the clusters, the p-value, and Λ over what it must exceed."""
    similarity = average_client_similarity(view, parts)
    trees = Dendrograms(similarity[None])
    seen = float(trees.steepest()[0]) - 1e-12  # rounding counts against it
    shuffled, at_least = _shuffled(view, parts, level, draw, lambda costs: int((costs >= seen).sum()))
    p_value = (at_least + 1) / (len(shuffled) + 1)  # the true order is one of them
    strength = max(seen, 0.0) / max(float(np.quantile(shuffled, 1 - level)), 1e-12)
    if p_value > level:
        return np.zeros(len(view) // parts, dtype=np.int64), p_value, strength
    cost = float(np.quantile(shuffled, 1 - max(CUT, level)))
    labels = number_clusters(
        improve_partition(similarity, trees.labels(cost), cost)
    )  # a dendrogram's order may be one of rounding
    return labels, p_value, strength


def _shuffled(
    cosines: Matrix, parts: int, level: float, draw: np.random.Generator, as_large: Callable[[Matrix], int]
) -> tuple[Matrix, int]:
    """Return Λ of as many shuffles as the level needs, and in how many it is as large as the true one."""
    size = len(cosines)
    draws = max(FEWEST_DRAWS, math.ceil(DRAWS_TO_RESOLVE / level))
    draws = draws if draws <= MOST_DRAWS else FEWEST_DRAWS
    most, found, at_least, drawn = max(1, ENTRIES_AT_ONCE // size**2), list[Matrix](), 0, 0
    while drawn < draws and at_least < ENOUGH:
        at_once = min(most, max(drawn, ENOUGH), draws - drawn)  # few at first: as a rule they are enough
        orders = np.argsort(draw.random((at_once, size)), axis=1)
        shuffles = cosines[orders[:, :, None], orders[:, None, :]]
        found.append(Dendrograms(average_client_similarity(shuffles, parts)).steepest())
        at_least += as_large(found[-1])
        drawn += len(orders)
    return np.concatenate(found), at_least


def _found_in_some(cosines: Matrix, parts: int, level: float, draw: np.random.Generator, inside: float) -> PartFinding:
    """Find the clusters of some of many clients, and put each of the others into that which it is most like."""
    n = len(cosines) // parts
    some = np.sort(draw.choice(n, LARGEST_TESTED, replace=False))
    mine = (some[:, None] * parts + np.arange(parts)).ravel()
    among = cosines[np.ix_(mine, mine)]
    found = find_by_parts(among, parts, level, draw, inside)
    members = np.eye(found.labels.max() + 1)[found.labels]  # [m, k]
    view = build_views(among, cosines[:, mine])[found.view]
    likeness = view.reshape(n, parts, len(some), parts).mean((1, 3)) @ members / members.sum(0)
    labels = likeness.argmax(1)
    labels[some] = found.labels
    return replace(found, labels=labels, tested=some)
