"""Clusters that a sample of the clients shows, and where all others belong."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.similarity import Labels, cosines

ENTRIES_AT_ONCE = 2**21
"""Of signatures that are converted to float64 together: 16 MiB."""


def to_nearest_mean(signatures: Tensor, drawn: NDArray[np.int64], labels: Labels, metric: str) -> Labels:
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
            nearest = cosines(some, means).argmax(1)
        else:
            nearest = torch.cdist(some, means, p=1 if metric == "l1" else 2).argmin(1).cpu().numpy()
        found[start : start + at_once] = nearest
    found[drawn] = labels
    return found
