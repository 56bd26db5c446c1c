"""Share of the differences between clients that their clusters explain, with a permutation test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 999
"""Number of random permutations of the clients among the clusters."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Explained:
    """Share of the differences among clients that their clusters explain (R²), with a p-value.

    Parameters
    ----------
    share
        Sum of squares between the clusters, divided by the total sum of squares between clients.
    by_chance
        Mean share if the same clients are put into clusters of the same sizes at random.
    p_value
        Share of random partitions, including the actual clusters, that explain at least as much.
    """

    share: float
    by_chance: float
    p_value: float


def explain_differences(
    differences: Sequence[Floats], clusters: Sequence[int], draw: np.random.Generator
) -> list[Explained | None]:
    """Return the share of each difference between clients that their clusters explain.

    Several columns of one difference count together: the sums of squares of the columns are added
    (the R² of PERMANOVA, Anderson 2001), so the columns should have comparable units.

    Parameters
    ----------
    differences
        Values of n clients in which they may differ, each ``[n]`` or ``[n, columns]``; NaN counts
        as the mean of the column.
    clusters
        Cluster of each client, ``[n]``.
    draw
        Generator of the permutations. The same permutations are used for all differences.

    Returns
    -------
    list
        A result for each difference; None for a difference in which clients do not differ. All
        results are None for fewer than two clusters, or if each client is a separate cluster.
    """
    labels = _number_clusters(clusters)
    if not differences or not _has_clusters(labels):
        return [None] * len(differences)
    tables = [values.reshape(len(labels), -1) for values in differences]
    centred = np.hstack([_centre(table) for table in tables])
    ends = np.cumsum([table.shape[1] for table in tables])[:-1]
    random_labels = [draw.permutation(labels) for _ in range(PERMUTATIONS)]
    observed = _sums_between(centred, labels)
    permuted = np.stack([_sums_between(centred, each) for each in random_labels])
    found: list[Explained | None] = []
    for table, mine, sums, random_sums in zip(
        tables,
        np.split(centred, ends, axis=1),
        np.split(observed, ends),
        np.split(permuted, ends, axis=1),
        strict=True,
    ):
        total = float((mine**2).sum())
        if total <= _bound_rounding(table):
            found.append(None)
        else:
            found.append(_compare(float(sums.sum()) / total, random_sums.sum(1) / total))
    return found


def _compare(share: float, permuted: Floats) -> Explained:
    """Compare an explained share with the shares that random clusters explain.

    Shares that differ only by rounding count as equal.
    """
    as_large = int((permuted >= share - 1e-9).sum())
    return Explained(float(share), float(permuted.mean()), (1 + as_large) / (1 + len(permuted)))


def _centre(values: Floats) -> Floats:
    """Subtract from values the mean of their column; NaN becomes 0."""
    known = ~np.isnan(values)
    counts = np.maximum(known.sum(0), 1)
    means = np.where(known, values, 0).sum(0) / counts
    return np.where(known, values - means, 0.0)


def _bound_rounding(values: Floats) -> float:
    """Return the largest total sum of squares that may be due to rounding of equal values."""
    largest = float(np.nanmax(np.abs(values), initial=0.0)) if values.size else 0.0
    return len(values) * (1e-12 * largest) ** 2


def _number_clusters(clusters: Sequence[int]) -> NDArray[np.int64]:
    """Return the clusters numbered 0, 1, ... without gaps."""
    return np.unique(np.asarray(clusters), return_inverse=True)[1].astype(np.int64)


def _has_clusters(labels: NDArray[np.int64]) -> bool:
    """Return whether there are at least two clusters, and some cluster has at least two clients."""
    n_clusters = len(np.unique(labels))
    return 2 <= n_clusters < len(labels)


def _sums_between(centred: Floats, labels: NDArray[np.int64]) -> Floats:
    """Return the sum of squares between clusters, for each column of centred values.

    Parameters
    ----------
    centred
        Values of n clients minus the mean of their column, ``[n, columns]``.
    labels
        Cluster of each client, ``[n]``.
    """
    sizes = np.bincount(labels)
    members = np.eye(len(sizes))[labels]
    sums = members.T @ centred
    return (sums**2 / sizes[:, None]).sum(0)
