"""Alternative ways to find clusters in updates from parts of the clients' data, and to test them.

All ways are applied to the same recorded updates. In this module, the *parts* of a client are equal
shares of its data, such as two halves. ``rcfl_choices.py`` prints the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rcfl import LOCAL
from scipy.spatial.distance import squareform
from torch import Tensor

from fedclade import FedAvg
from fedclade.clustering.linkage import LINKAGES, agglomerate, cut
from fedclade.clustering.similarity import Similarity, compute_cosines, cosine_similarity
from fedclade.clustering.split_half import DRAWS_TO_RESOLVE, Across, Finding, Labels, Replicates
from fedclade.core import ClientWork, Nothing, SplitPart
from fedclade.core.queries import Round, RoundPlan
from fedclade.data import Federation
from fedclade.runs.backend import Backend
from fedclade.tasks.metrics import cluster_scores

Line = dict[str, Any]
Halves = Sequence[Similarity]

CHECKED = (3, 11)
"""Rounds in which updates are recorded."""

LEVEL = 0.005
"""Level of the first test of rcfl: half of its default level 0.01."""

COMPARED = ("one half", "within", "across", "sums")
"""Similarities of clients that are compared by clusters of the true number."""

COARSE = 0.02
"""Level for which p-values are computed. It needs 1,000 shuffles, enough to compare at LEVEL."""


def record(federation: Federation, seed: int) -> dict[str, list[Tensor]]:
    """Return the updates of the parts, at the models of FedAvg.

    Returns
    -------
    dict
        For each key a list with the updates ``[n, D]`` of each part. For example, "3 in 2" has the
        updates of the two halves in round 3. "11 as 3" has the updates in round 11 from the same
        halves as in round 3. A method that combines the evidence of both rounds would have to use
        the same halves again, because new halves share examples with the old halves.
    """
    algorithm, found = FedAvg(), dict[str, list[Tensor]]()
    world = Backend.simulated_by(federation, "mlp", algorithm, seed=seed, engine="stacked")
    state, (first, last) = algorithm.init(world.initial, world.clients), CHECKED

    def parts(drawn_in: int, m: int, purpose: str) -> list[Tensor]:
        model, rows = state.tree.nodes[0].params[None], [0] * len(federation)
        updates: list[Tensor] = []
        for k in range(m):
            this_round = Round(drawn_in, LOCAL, seed, purpose=f"{purpose} {k}")
            work = ClientWork(data=SplitPart(k, m), store=Nothing())
            of_part = world.clients.train(federation.ids, model, rows, this_round, work)
            updates.append(of_part.signatures)
        return updates

    for number in range(1, last + 1):
        if number in CHECKED:
            found |= {f"{number} in {m}": parts(number, m, "replicate") for m in (2, 3, 4)}
        if number == last:
            found[f"{last} as {first}"] = parts(first, 2, "again")
        state, _ = algorithm.step(
            state, federation.ids, world.clients, RoundPlan(number, LOCAL, seed)
        )
    return found


def partitions(similarity: Similarity, method: str) -> Labels:
    """Return the partitions of a linkage into 1, 2, ..., n clusters, ``[n, n]``.

    Ward's linkage takes Euclidean distances of the updates scaled to length 1, other linkages take
    1 − cosine.
    """
    apart = squareform(1 - similarity, checks=False)
    merges = agglomerate(np.sqrt(np.maximum(2 * apart, 0)) if method == "ward" else apart, method)
    return np.stack([cut(merges, k) for k in range(1, len(similarity) + 1)])


def found_on(halves: Halves, noise: float, cuts_of: Callable[[Similarity], Labels]) -> Finding:
    """Find clusters in the same way as fedclade, but with the partitions of ``cuts_of``."""
    across = Across(halves, [cuts_of(half) for half in halves], noise)
    gains = across.compute_gains(np.arange(len(halves[0]))[None])[0]
    best, both = int(gains.argmax()), np.mean(halves, axis=0)
    return Finding(cuts_of(both)[best], float(gains[best]), noise, both, across)


def nested(halves: Halves, noise: float, level: float, draw: np.random.Generator) -> Labels:
    """Divide clients in two, and each cluster again, as long as a test at this level rejects."""
    labels, left = np.zeros(len(halves[0]), dtype=np.int64), [np.arange(len(halves[0]))]
    while left:
        members = left.pop()
        inside = [half[np.ix_(members, members)] for half in halves]
        found = found_on(inside, noise, lambda half: partitions(half, "average")[:2])
        if found.compute_p_value(level, draw) <= level:
            second = members[found.labels == 1]
            labels[second] = labels.max() + 1
            left += [members[found.labels == 0], second]
    return labels


def each_way(parts: Sequence[Tensor], draw: np.random.Generator) -> tuple[Labels, float]:
    """Find clusters on each of m parts, and judge them on the mean of the other parts.

    Returns
    -------
    tuple
        The best partition ``[n]``, and its p-value.
    """
    similarities, m = [cosine_similarity(part) for part in parts], len(parts)
    cuts, noise = (
        [partitions(similarity, "average") for similarity in similarities],
        noise_of(parts),
    )
    as_it_is = np.arange(len(parts[0]))[None]
    seen = gains_each_way(similarities, cuts, noise, [as_it_is] * m)[0]
    if not (best := int(seen.argmax())):
        return np.zeros_like(as_it_is[0]), 1.0
    draws = round(DRAWS_TO_RESOLVE / COARSE)
    shuffled = [np.argsort(draw.random((draws, as_it_is.size)), axis=1) for _ in range(m - 1)]
    by_chance = gains_each_way(
        similarities, cuts, noise, [np.repeat(as_it_is, draws, axis=0), *shuffled]
    )
    p_value = (int((by_chance.max(axis=1) >= seen[best] - 1e-12).sum()) + 1) / (draws + 1)
    return partitions(np.mean(similarities, axis=0), "average")[best], p_value


def gains_each_way(
    similarities: Sequence[Similarity],
    cuts: Sequence[Labels],
    noise: float,
    orders: Sequence[Labels],
) -> NDArray[np.float64]:
    """Return the gain G of each part's partitions on the other parts, averaged over the parts.

    G is linear in the similarities that judge a partition, so the result is the mean over all pairs
    of parts.

    Parameters
    ----------
    similarities
        Similarities ``[n, n]`` of each part.
    cuts
        Partitions ``[K, n]`` of each part.
    noise
        The noise σ² of a whole update.
    orders
        Permutations ``[draws, n]`` of each part's clients. For a pair of parts, only the order of
        one part relative to the other matters.

    Returns
    -------
    numpy.ndarray
        Gains ``[draws, K]``.
    """
    of_pairs: list[NDArray[np.float64]] = []
    for one, two in combinations(range(len(cuts)), 2):
        across = Across([similarities[one], similarities[two]], [cuts[one], cuts[two]], noise)
        of_pairs.append(
            across.compute_gains(
                np.take_along_axis(orders[two], np.argsort(orders[one], axis=1), axis=1)
            )
        )
    return np.mean(of_pairs, axis=0)


def noise_of(parts: Sequence[Tensor]) -> float:
    """Return the noise σ² of a whole update; an update from one of m parts has m times as much."""
    agreement = mean(float(Replicates(*pair).agreement.mean()) for pair in combinations(parts, 2))
    return max(0.0, 1 - agreement) / len(parts)


def outcomes(recorded: Mapping[str, Sequence[Tensor]], truth: Labels, seed: int) -> dict[str, Line]:
    """Apply all ways to the same updates; return the result of each way by its name.

    Parameters
    ----------
    recorded
        The result of :func:`record`.
    truth
        The true cluster of each client, ``[n]``.
    seed
        Seed of the shuffles.
    """
    draw, found = np.random.default_rng(seed), dict[str, Line]()
    alike = {
        name: [cosine_similarity(half) for half in halves] for name, halves in recorded.items()
    }
    noise = {name: noise_of(halves) for name, halves in recorded.items()}

    def score(way: str, labels: Labels, p_value: float = 0.0) -> None:
        decided = labels if p_value <= LEVEL else np.zeros_like(labels)
        ari = _ari(decided, truth)
        found[way] = {
            "ari": ari,
            "right": ari == 1,
            "parted": bool(decided.any()),
            "p_value": p_value,
        }

    def judge(way: str, halves: Halves, sigma2: float, method: str = "average") -> Labels:
        finding = found_on(halves, sigma2, lambda half: partitions(half, method))
        score(way, finding.labels, finding.compute_p_value(COARSE, draw))
        return finding.labels

    for number in CHECKED:
        two = f"{number} in 2"
        best = {
            method: judge(f"{number} {method}", alike[two], noise[two], method)
            for method in LINKAGES
        }["average"]
        alike_in_all = cosine_similarity(recorded[two][0] + recorded[two][1])
        labels = partitions(alike_in_all, "average")[best.max()]
        score(f"{number} labels of the sums", labels, found[f"{number} average"]["p_value"])
        for level in (LEVEL, 0.05):
            score(f"{number} nested at {level}", nested(alike[two], noise[two], level, draw))
        for m in (3, 4):
            score(f"{number} in {m}", *each_way(recorded[f"{number} in {m}"], draw))
        if truth.any():
            for name, similarity in ways_to_compare(*recorded[two]).items():
                score(f"{number} {name}", partitions(similarity, "average")[truth.max()])
    first, last = CHECKED
    for name, halves in {
        "the same halves": f"{last} as {first}",
        "new halves": f"{last} in 2",
    }.items():
        both = [
            (one + other) / 2
            for one, other in zip(alike[f"{first} in 2"], alike[halves], strict=True)
        ]
        judge(f"{last} and {first}, {name}", both, (noise[f"{first} in 2"] + noise[halves]) / 2)
    return found


def ways_to_compare(first: Tensor, second: Tensor) -> dict[str, Similarity]:
    """Return four similarities of clients, by their names in ``COMPARED``.

    They are computed from one half only; from each half, then averaged; between updates of
    different halves; and from the sums of both halves.
    """
    halves = [cosine_similarity(half) for half in (first, second)]
    across = compute_cosines(first, second)
    across = (across + across.T) / 2
    np.fill_diagonal(across, 1.0)
    compared = halves[0], (halves[0] + halves[1]) / 2, across, cosine_similarity(first + second)
    return dict(zip(COMPARED, compared, strict=True))


def _ari(labels: Labels, truth: Labels) -> float:
    ari = cluster_scores(dict(enumerate(labels.tolist())), dict(enumerate(truth.tolist())))["ari"]
    assert ari is not None  # the true clusters are known
    return ari
