"""Clusters from sums over clients, or from a sample of clients to which the rest is assigned.

Sums are used under central privacy, where the server receives only noisy sums over clients: it
divides the directions of updates into cells, and receives the number of clients and the sum of
their directions in each cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.clustering.similarity import Labels, compute_cosines

if TYPE_CHECKING:
    from torch import Tensor

# Directions in which clients differ, and centres of k clusters, from sums over clients that may be
# noisy.
#
# The sums have been released already, so nothing here costs privacy.

RUNS = 50
"""Number of k-means runs with different first centres, of which the best is used."""

LEAST_COUNT = 2.0
"""Smallest count of a cell that is used, in standard deviations of the noise on a count."""


def find_directions(moments: Tensor, dim: int, count: int) -> Tensor:
    """Return the directions in which clients' signatures have the largest second moment.

    Parameters
    ----------
    moments
        Sum over clients of the replies to :class:`~fedclade.core.Moments`: the upper triangle of
        the matrix of second moments, ``[R(R+1)/2]``.
    dim
        Number R of entries of a signature.
    count
        Number of directions.

    Returns
    -------
    torch.Tensor
        Orthonormal directions, ``[R, count]``, float64, in ascending order of their moments.
    """
    rows, columns = torch.triu_indices(dim, dim)
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    matrix[rows, columns] = moments.double().cpu() / torch.where(rows == columns, 1.0, 2.0**0.5)
    _, vectors = torch.linalg.eigh(matrix, UPLO="U")
    return vectors[:, -count:]


def draw_cell_points(count: int, dim: int, draw: np.random.Generator) -> Tensor:
    """Draw the centres of cells, uniformly on the unit sphere, ``[count, dim]``.

    Each client counts in the cell whose centre is nearest to the direction of its update.
    """
    normal = torch.from_numpy(draw.standard_normal((count, dim)))
    return torch.nn.functional.normalize(normal, dim=1)


def find_cell_centres(
    sums: Tensor, cells: int, k: int, noise: float, draw: np.random.Generator
) -> Tensor:
    """Find k cluster centres by weighted k-means over the mean directions of cells.

    Parameters
    ----------
    sums
        Sum over clients of the replies to :class:`~fedclade.core.Cells`: the number of clients in
        each of B cells, and the sum of their directions of d entries, ``[B (1 + d)]``.
    cells
        Number B of cells.
    k
        Number of centres.
    noise
        Standard deviation of the noise on each number. Cells with counts that may be noise are left
        out.
    draw
        Generator of the first centres.

    Returns
    -------
    torch.Tensor
        Centres as unit vectors, ``[k, d]``, float64.
    """
    from sklearn.cluster import KMeans  # slow to import: only where used

    content = sums.double().cpu().reshape(cells, -1) * 2.0**0.5
    counts = content[:, 0].numpy()
    means = torch.nn.functional.normalize(content[:, 1:], dim=1).numpy()
    used = counts > max(LEAST_COUNT * noise * 2.0**0.5, 0.5)
    if used.sum() < k:  # under very much noise
        used = np.argsort(-counts)[:k]
    weights = np.maximum(counts[used], 1e-9)
    seed = int(draw.integers(2**32))
    k_means = KMeans(k, n_init=RUNS, random_state=seed)  # pyright: ignore[reportArgumentType]
    centres = k_means.fit(means[used], sample_weight=weights).cluster_centers_
    return torch.nn.functional.normalize(torch.from_numpy(centres), dim=1)


ENTRIES_AT_ONCE = 2**21
"""Signature entries converted to float64 at a time: 16 MiB."""


def assign_to_nearest_mean(
    signatures: Tensor, drawn: NDArray[np.int64], labels: Labels, metric: str
) -> Labels:
    """Assign all clients to the clusters that were found in a sample, by the nearest cluster mean.

    The distance to a cluster is the distance to its mean, whatever the linkage of the clustering.
    The alternatives are the distances to the cluster's farthest or nearest member, as complete and
    single linkage have them. But a mean is less noisy than a member, so the mean comes closer to
    the clusters that the linkage finds among all clients (``benchmarks/pairs.py rules``).

    Parameters
    ----------
    signatures
        Signatures (vectors by which clients are compared) of all n clients, ``[n, R]``.
    drawn
        Rows of the sampled clients, ``[m]``.
    labels
        Cluster of each sampled client, ``[m]``, 0 to k − 1.
    metric
        With ``l1`` and ``l2``, the distance to the mean of a cluster's members; with ``cosine``,
        the angle to the mean of their directions.

    Returns
    -------
    numpy.ndarray
        The cluster of each client, ``[n]``. Sampled clients stay in their clusters.
    """
    batch_size = max(1, ENTRIES_AT_ONCE // max(1, signatures.shape[1]))
    means = _compute_means(signatures, drawn, labels, metric=metric, batch_size=batch_size)
    assigned = np.empty(len(signatures), dtype=np.int64)
    for start in range(0, len(assigned), batch_size):
        rows = signatures[start : start + batch_size].double()
        if metric == "cosine":
            nearest = compute_cosines(rows, means).argmax(1)
        else:
            p = 1 if metric == "l1" else 2
            nearest = torch.cdist(rows, means, p=p).argmin(1).cpu().numpy()
        assigned[start : start + batch_size] = nearest
    assigned[drawn] = labels
    return assigned


def _compute_means(
    signatures: Tensor, drawn: NDArray[np.int64], labels: Labels, *, metric: str, batch_size: int
) -> Tensor:
    """Return the mean signature of each of k clusters, ``[k, R]``.

    With the metric ``cosine``, this is the mean of the members' directions (unit vectors).

    Parameters
    ----------
    signatures
        Signatures of all clients, ``[n, R]``.
    drawn, labels
        Rows and clusters of the m sampled clients, ``[m]`` each.
    metric
        Distance by which clients are compared.
    batch_size
        Number of rows that are converted to float64 at a time.
    """
    n_clusters = int(labels.max()) + 1
    means = signatures.new_zeros(n_clusters, signatures.shape[1], dtype=torch.float64)
    for start in range(0, len(drawn), batch_size):
        places = torch.from_numpy(drawn[start : start + batch_size]).to(means.device)
        clusters = torch.from_numpy(labels[start : start + batch_size]).to(means.device)
        rows = signatures[places].double()
        if metric == "cosine":
            rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-150)
        means.index_add_(0, clusters, rows)
    means /= torch.from_numpy(np.bincount(labels)).to(means.device)[:, None]
    return means
