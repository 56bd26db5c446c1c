"""The test by parts, written out: similarities pair by pair, every pruning of the dendrogram, one shuffle at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.cluster.hierarchy import linkage


def similarity(cosines: np.ndarray, parts: int) -> np.ndarray:
    """Return the mean cosine of the parts of two clients, or of two different parts of one."""
    n = len(cosines) // parts
    found = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            pairs = [
                (i * parts + a, j * parts + b)
                for a in range(parts)
                for b in range(parts)
                if (i, a) != (j, b)
            ]
            found[i, j] = np.mean([cosines[pair] for pair in pairs])
    return found


def worth(similar: np.ndarray, clusters: Sequence[Sequence[int]]) -> float:
    """Σ |c| · mean similarity of different clients of c, and of a client by itself that of its own parts."""
    total = 0.0
    for cluster in clusters:
        pairs = [similar[i, j] for i in cluster for j in cluster if i != j or len(cluster) == 1]
        total += len(cluster) * np.mean(pairs)
    return total


def prunings(similar: np.ndarray) -> list[list[list[int]]]:
    """Return every partition that the dendrogram of average linkage has."""
    n = len(similar)
    condensed = np.array([1 - similar[i, j] for i in range(n) for j in range(i + 1, n)])
    merges = linkage(condensed, "average")

    def members(node: int) -> list[int]:
        if node < n:
            return [node]
        return members(int(merges[node - n, 0])) + members(int(merges[node - n, 1]))

    def of(node: int) -> list[list[list[int]]]:
        if node < n:
            return [[[node]]]
        left, right = (of(int(child)) for child in merges[node - n, :2])
        return [[sorted(members(node))], *(a + b for a in left for b in right)]

    return of(2 * n - 2)


def steepest(similar: np.ndarray) -> float:
    """Λ: the largest gain per further cluster, and 0 if none gains."""
    every = prunings(similar)
    one = worth(similar, [list(range(len(similar)))])
    return max(
        0.0, *((worth(similar, each) - one) / (len(each) - 1) for each in every if len(each) > 1)
    )


def best(similar: np.ndarray, cost: float) -> float:
    """Return the largest worth less costs."""
    return max(worth(similar, each) - cost * len(each) for each in prunings(similar))


def evened(signatures: np.ndarray) -> np.ndarray:
    """Return the cosines of parts ``[N, R]`` whose principal coordinates of variance v are divided by √(v + 10·median).

    Of parts that are as long as each other, less their mean.
    """
    unit = signatures / np.linalg.norm(signatures, axis=1, keepdims=True)
    _, lengths, axes = np.linalg.svd(unit - unit.mean(0), full_matrices=False)
    kept = lengths > 1e-6 * lengths[0]
    variances, axes = lengths[kept] ** 2, axes[kept]
    scaled = (unit - unit.mean(0)) @ axes.T / np.sqrt(variances + 10 * np.median(variances))
    scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
    found = scaled @ scaled.T
    np.fill_diagonal(found, 0)
    return found
