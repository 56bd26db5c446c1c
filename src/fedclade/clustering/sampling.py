"""Clusters that a sample of the clients shows, and where all others belong."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedclade.clustering.similarity import Labels, compute_cosines

# From sums over clients, noisy or exact, to the directions in which they differ and the centres of
# k clusters.
#
# What goes in has been released already, so nothing here costs privacy.

RUNS = 50
"""Of k-means, of which the best counts."""

LEAST_COUNT = 2.0
"""A cell counts if it has so many standard deviations of the noise on a count."""


def find_directions(moments: Tensor, dim: int, count: int) -> Tensor:
    """Return the ``count`` directions of largest second moment, ``[R, count]``, R = ``dim``.

    ``moments [R(R+1)/2]`` is the sum of :class:`~fedclade.core.Moments`.
    """
    rows, columns = torch.triu_indices(dim, dim)
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    matrix[rows, columns] = moments.double().cpu() / torch.where(rows == columns, 1.0, 2.0**0.5)
    _, vectors = torch.linalg.eigh(matrix, UPLO="U")
    return vectors[:, -count:]


def draw_cell_points(count: int, dim: int, draw: np.random.Generator) -> Tensor:
    """Return points on the unit sphere, drawn uniformly, ``[count, dim]``: each is the middle of a cell."""
    return functional.normalize(torch.from_numpy(draw.standard_normal((count, dim))), dim=1)


def find_cell_centres(sums: Tensor, cells: int, k: int, noise: float, draw: np.random.Generator) -> Tensor:
    """Return k centres, unit vectors ``[k, d]``, by weighted k-means over the mean directions of cells.

    Parameters
    ----------
    sums
        The sum ``[B (1 + d)]`` of :class:`~fedclade.core.Cells`, B = ``cells``.
    noise
        Standard deviation of the noise on each number; cells whose count it may have made are left out.
    draw
        Draws the first centres.
    """
    from sklearn.cluster import KMeans  # slow to import: only where used

    content = sums.double().cpu().reshape(cells, -1) * 2.0**0.5
    counts, means = content[:, 0].numpy(), functional.normalize(content[:, 1:], dim=1).numpy()
    kept = counts > max(LEAST_COUNT * noise * 2.0**0.5, 0.5)
    if kept.sum() < k:  # as under very much noise
        kept = np.argsort(-counts)[:k]
    weights = np.maximum(counts[kept], 1e-9)
    seed = int(draw.integers(2**32))
    means_of = KMeans(k, n_init=RUNS, random_state=seed)  # pyright: ignore[reportArgumentType]
    found = means_of.fit(means[kept], sample_weight=weights).cluster_centers_
    return functional.normalize(torch.from_numpy(found), dim=1)


ENTRIES_AT_ONCE = 2**21
"""Of signatures that are converted to float64 together: 16 MiB."""


def assign_to_nearest_mean(signatures: Tensor, drawn: NDArray[np.int64], labels: Labels, metric: str) -> Labels:
    """Return the cluster of each client, ``[n]``: of those drawn their own, of all others that with the nearest mean.

    Whatever the linkage: a mean is less noisy than any member, so that it gives back more of the clusters that the
    linkage finds among all than the farthest or the nearest member does (``benchmarks/pairs.py rules``).

    Parameters
    ----------
    signatures
        ``[n, R]``.
    drawn, labels
        The rows in the sample ``[m]``, and the cluster of each, 0 to k − 1.
    metric
        ``l1`` and ``l2``: the distance to the mean of the cluster's members; ``cosine``: the angle to that of their
        directions.
    """
    at_once = max(1, ENTRIES_AT_ONCE // max(1, signatures.shape[1]))
    means = signatures.new_zeros(int(labels.max()) + 1, signatures.shape[1], dtype=torch.float64)
    for start in range(0, len(drawn), at_once):
        places, clusters = (
            torch.from_numpy(each[start : start + at_once]).to(means.device) for each in (drawn, labels)
        )
        some = signatures[places].double()
        if metric == "cosine":
            some /= torch.linalg.vector_norm(some, dim=1, keepdim=True).clamp(min=1e-150)
        means.index_add_(0, clusters, some)
    means /= torch.from_numpy(np.bincount(labels)).to(means.device)[:, None]
    found = np.empty(len(signatures), dtype=np.int64)
    for start in range(0, len(found), at_once):
        some = signatures[start : start + at_once].double()
        if metric == "cosine":
            nearest = compute_cosines(some, means).argmax(1)
        else:
            nearest = torch.cdist(some, means, p=1 if metric == "l1" else 2).argmin(1).cpu().numpy()
        found[start : start + at_once] = nearest
    found[drawn] = labels
    return found
