"""Clusters that a sample of the clients shows, and where all others belong."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.similarity import Labels, cosines

AT_ONCE = 2048
"""Clients that are compared with the means together."""


def to_nearest_mean(signatures: Tensor, drawn: NDArray[np.int64], labels: Labels, metric: str) -> Labels:
    """Return the cluster of each client, ``[n]``: of those drawn their own, of all others that with the nearest mean.

    Whatever the linkage: of noisy clients a mean gives back more of the clusters that the linkage finds among all than
    the farthest, the mean, or the nearest distance to the members does (``benchmarks/pairs.py``).

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
    rows, clusters = torch.from_numpy(drawn).to(signatures.device), torch.from_numpy(labels).to(signatures.device)
    members = signatures[rows].double()
    if metric == "cosine":
        members /= torch.linalg.vector_norm(members, dim=1, keepdim=True).clamp(min=1e-150)
    sizes = torch.bincount(clusters).double()[:, None]
    means = members.new_zeros(len(sizes), members.shape[1]).index_add_(0, clusters, members) / sizes
    found = np.empty(len(signatures), dtype=np.int64)
    for start in range(0, len(found), AT_ONCE):
        some = signatures[start : start + AT_ONCE]
        if metric == "cosine":
            nearest = cosines(some, means.to(some)).argmax(1)
        else:
            nearest = torch.cdist(some.double(), means, p=1 if metric == "l1" else 2).argmin(1).cpu().numpy()
        found[start : start + AT_ONCE] = nearest
    found[drawn] = labels
    return found
