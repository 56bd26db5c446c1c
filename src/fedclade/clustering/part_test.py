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

*The cut.* Once the test has rejected that there is one cluster, the dendrogram is pruned at the cost that is exceeded
in one of twenty shuffles, or at what a cluster should gain at least if that is more. What it finds is tested again,
each cluster by itself, until none is parted any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedclade.clustering.dendrograms import Dendrograms, Matrix
from fedclade.clustering.similarity import Labels

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


@dataclass(frozen=True)
class PartFinding:
    """What the updates of all parts say about clusters."""

    labels: Labels  # the clusters [n]; zeros where the test does not reject that there is one
    p_value: float  # of there being one distribution only
    strength: float  # Λ over what it must exceed; above 1 where the test rejects


def parts_for(clients: int, examples: int, level: float, smallest: int) -> int:
    """Return r: the fewest parts by which one client of n can be told from the others, if their data allow it.

    That all r parts of some client come to lie together has the chance n/C(n·r, r) in a shuffle. Fewer parts are
    larger, and tell more. No part has fewer than ``smallest`` examples, but there are two in any case.
    """
    r = 2
    while r < MOST_PARTS and clients / math.comb(clients * r, r) > level / 12:
        r += 1
    return max(2, min(r, examples // smallest))


def lowest_p_value(clients: int, parts: int) -> float:
    """Return the p-value that cannot be fallen below, for two clusters that are as large as they can be.

    It is no smaller than what shuffles can resolve.
    """
    half = clients // 2 * parts
    ways = math.comb(clients * parts, half)
    return max(2 / ways if clients % 2 == 0 else 1 / ways, DRAWS_TO_RESOLVE / MOST_DRAWS)


def part_similarity(signatures: Tensor) -> Matrix:
    """Return the cosines of all parts ``[n·r, n·r]`` of signatures ``[n, r, R]``, with zeros on the diagonal."""
    flat = signatures.flatten(0, 1)
    unit = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-30)
    cosines = (unit @ unit.T).double().cpu().numpy()
    np.fill_diagonal(cosines, 0.0)
    return cosines


def client_similarity(cosines: Matrix, parts: int) -> Matrix:
    """Return the mean cosine of two clients' parts ``[..., n, n]``; on the diagonal, of a client's different ones."""
    *some, size, _ = cosines.shape
    n = size // parts
    mean = cosines.reshape(*some, n, parts, n, parts).sum((-3, -1)) / parts**2
    own = np.arange(n)
    mean[..., own, own] *= parts / (parts - 1)
    return mean


def worth_of(similarity: Matrix, labels: Labels) -> float:
    """Return what a partition ``[n]`` is worth: |c| times the mean similarity of its pairs, over its clusters."""
    found = 0.0
    for cluster in np.unique(labels):
        members = np.flatnonzero(labels == cluster)
        block = similarity[np.ix_(members, members)]
        alone = len(members) == 1
        found += float(block.sum()) if alone else float((block.sum() - np.trace(block)) / (len(members) - 1))
    return found


def noise_of(similarity: Matrix, parts: int) -> float:
    """Return σ², the noise of the mean of a client's r parts: an r-th of that of one, which two of a client show."""
    return max(0.0, 1 - float(similarity.diagonal().mean())) / parts


def gain_by_parts(similarity: Matrix, labels: Labels, noise: float) -> float:
    """Return the gain of a partition ``[n]`` per client: its worth, less that of one cluster and the others' noise."""
    clusters = len(np.unique(labels))
    one = worth_of(similarity, np.zeros_like(labels))
    return (worth_of(similarity, labels) - one - (clusters - 1) * noise) / len(labels)


def find_by_parts(
    cosines: Matrix,
    parts: int,
    level: float,
    draw: np.random.Generator,
    least: float = 0.0,
    level_inside: float | None = None,
) -> PartFinding:
    """Find the clusters of n clients by the cosines of their parts, ``[n·r, n·r]``.

    Parameters
    ----------
    cosines
        Of the parts' updates, all parts of a client behind each other (:func:`part_similarity`).
    parts
        r, at least 2.
    level
        The chance of parting clients of one distribution.
    draw
        Of shuffles.
    least
        What every further cluster must gain, in sums of similarities over clients.
    level_inside
        The chance of parting a cluster that was found; ``level``, if left out.
    """
    inside = level_inside or level
    n = len(cosines) // parts
    if n > LARGEST_TESTED:
        return _found_in_some(cosines, parts, level, draw, least, inside)
    first = _tested(cosines, parts, level, draw, least)
    labels = first.labels
    open_ = list(range(labels.max() + 1)) if labels.any() else []
    while open_:
        members = np.flatnonzero(labels == open_.pop())
        if len(members) < 2:
            continue
        mine = (members[:, None] * parts + np.arange(parts)).ravel()
        deeper = _tested(cosines[np.ix_(mine, mine)], parts, inside, draw, least).labels
        for new in range(1, deeper.max() + 1):
            labels[members[deeper == new]] = labels.max() + 1
        if deeper.any():
            open_ += np.unique(labels[members]).tolist()
    return PartFinding(labels, first.p_value, first.strength)


def _tested(cosines: Matrix, parts: int, level: float, draw: np.random.Generator, least: float) -> PartFinding:
    """Test once, and prune once."""
    n = len(cosines) // parts
    together = np.zeros(n, dtype=np.int64)
    if n < 2:
        return PartFinding(together, 1.0, 0.0)
    found = Dendrograms(client_similarity(cosines, parts)[None])
    seen = float(found.steepest()[0]) - 1e-12  # rounding counts against it
    shuffled, at_least = _shuffled(cosines, parts, level, draw, lambda costs: int((costs >= seen).sum()))
    p_value = (at_least + 1) / (len(shuffled) + 1)  # the true order is one of them
    strength = seen / max(float(np.quantile(shuffled, 1 - level)), 1e-12)
    if p_value > level:
        return PartFinding(together, p_value, strength)
    cost = float(np.quantile(shuffled, 1 - max(CUT, level)))
    return PartFinding(found.labels(max(cost, least)), p_value, strength)


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
        found.append(Dendrograms(client_similarity(shuffles, parts)).steepest())
        at_least += as_large(found[-1])
        drawn += len(orders)
    return np.concatenate(found), at_least


def _found_in_some(
    cosines: Matrix, parts: int, level: float, draw: np.random.Generator, least: float, inside: float
) -> PartFinding:
    """Find the clusters of some of many clients, and put each of the others into that which it is most like."""
    n = len(cosines) // parts
    some = np.sort(draw.choice(n, LARGEST_TESTED, replace=False))
    mine = (some[:, None] * parts + np.arange(parts)).ravel()
    found = find_by_parts(cosines[np.ix_(mine, mine)], parts, level, draw, least, inside)
    members = np.eye(found.labels.max() + 1)[found.labels]  # [m, k]
    likeness = client_similarity(cosines, parts)[:, some] @ members / members.sum(0)
    labels = likeness.argmax(1)
    labels[some] = found.labels
    return PartFinding(labels, found.p_value, found.strength)


def gammas_of(similarity: Matrix, parts: int) -> Matrix:
    """Return γ_i of CFL's eq. 39 for whole updates, which have an r-th of the noise of a part's, ``[n]``."""
    own = similarity.diagonal()
    with np.errstate(divide="ignore"):
        return np.where(own > 0, np.sqrt(np.maximum(1 / own - 1, 0) / parts), np.inf)
