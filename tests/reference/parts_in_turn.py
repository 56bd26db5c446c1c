"""The check by parts in turn, written out: what parts before judge, in one order of clients at a time."""

from __future__ import annotations

import numpy as np

from tests.reference import replication


def mean_cosine(cosines: np.ndarray, parts: int, i: int, j: int, of_i, of_j) -> float:
    """Return the mean cosine of some parts of client i with some parts of client j."""
    return float(np.mean([cosines[i * parts + a, j * parts + b] for a in of_i for b in of_j]))


def best_gain(
    cosines: np.ndarray, parts: int, earlier: int, order: list[int], is_trained: bool
) -> float:
    """Return T: the largest gain on the next part, its clients in an order, of the partitions of those before."""
    n, before = len(cosines) // parts, range(earlier)
    similarity = np.ones((n, n))
    judged = np.ones((n, n))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            similarity[i, j] = mean_cosine(cosines, parts, i, j, before, before)
            within = cosines[order[i] * parts + earlier, order[j] * parts + earlier]
            across = mean_cosine(cosines, parts, order[i], j, [earlier], before)
            both = (within + 2 * earlier * across) / (2 * earlier + 1)
            judged[i, j] = within if is_trained else both
    if earlier == 1:
        pairs = [similarity[i, j] for i in range(n) for j in range(n) if i != j]
    else:
        pairs = [
            cosines[i * parts + a, i * parts + b]
            for i in range(n)
            for a in before
            for b in before
            if a != b
        ]
    noise = max(0.0, 1 - float(np.mean(pairs))) / parts
    return max(
        replication.gain(judged, partition, noise) for partition in replication.cuts(similarity)
    )
