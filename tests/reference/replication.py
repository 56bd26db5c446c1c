"""Replicated clustering, written out: the gain of a partition, and the p-value, one pair and one order at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage


def gain(similarity: np.ndarray, clusters: Sequence[Sequence[int]], noise: float) -> float:
    """G = (1/n) · [Σ_c |c| · (mean similarity within c − mean similarity of all) − (k − 1) · σ²]."""
    n = len(similarity)
    of_all = [similarity[i, j] for i in range(n) for j in range(n) if i != j]
    total = 0.0
    for cluster in clusters:
        within = [similarity[i, j] for i in cluster for j in cluster if i != j]
        if within:
            total += len(cluster) * (np.mean(within) - np.mean(of_all))
    return (total - (len(clusters) - 1) * noise) / n


def cuts(similarity: np.ndarray) -> list[list[list[int]]]:
    """Return the partitions of average linkage into 1, 2, ..., n clusters."""
    n = len(similarity)
    condensed = np.array([1 - similarity[i, j] for i in range(n) for j in range(i + 1, n)])
    merges = linkage(condensed, "average")
    found = []
    for k in range(1, n + 1):
        labels = fcluster(merges, k, "maxclust")
        found.append([[i for i in range(n) if labels[i] == label] for label in sorted(set(labels))])
    return found


def best(a: np.ndarray, b: np.ndarray, noise: float) -> tuple[int, float]:
    """Return the number of clusters whose partitions of each half gain most on the other, and that gain."""
    pairs = zip(cuts(a), cuts(b), strict=True)
    gains = [(gain(b, of_a, noise) + gain(a, of_b, noise)) / 2 for of_a, of_b in pairs]
    return 1 + int(np.argmax(gains)), max(gains)


def p_value(a: np.ndarray, b: np.ndarray, noise: float) -> float:
    """Return the share of all orders of B's clients in which the best gains at least as much as in the true one."""
    seen = best(a, b, noise)[1]
    every = [
        best(a, b[np.ix_(order, order)], noise)[1]
        for order in map(list, permutations(range(len(b))))
    ]
    return float(np.mean([each >= seen - 1e-9 for each in every]))


def exceeded(a: np.ndarray, b: np.ndarray, noise: float, now: Sequence[int]) -> float:
    """Return the share of orders that keep B's clients in their clusters in which the best gains more."""
    seen, n = best(a, b, noise)[1], len(b)
    orders = [
        list(order)
        for order in permutations(range(n))
        if all(now[order[i]] == now[i] for i in range(n))
    ]
    return float(
        np.mean([best(a, b[np.ix_(order, order)], noise)[1] > seen + 1e-9 for order in orders])
    )
