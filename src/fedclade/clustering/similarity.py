"""How alike clients' updates are, how far apart, and what that says about the clusters behind them."""

from __future__ import annotations

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import ConfigError, unknown

Similarity = NDArray[np.float64]

Labels = NDArray[np.int64]
"""The cluster of each of n clients, ``[n]``."""

Distances = NDArray[np.float64]
"""Of every two of m rows, ``[m(m-1)/2]``: 0 to 1, 0 to 2, ..., 1 to 2, ..., as SciPy's linkage takes them."""

METRICS = ("l1", "l2", "cosine")

COLUMNS = 256
"""Distances are summed up over so many columns at a time: as few fit into a processor's cache for all rows."""

ROUNDING = 1e-6
"""Of cosines in float32: a distance below it is none."""


def numbered(labels: Labels) -> Labels:
    """Give the clusters of ``[n]`` their numbers in the order in which they first appear."""
    _, first, place = np.unique(labels, return_index=True, return_inverse=True)
    return first.argsort().argsort()[place]


def are_signs(signatures: Tensor) -> bool:
    """Return whether signatures are signs, 1 or −1 each (:class:`~fedclade.channel.SignSketch`), and not numbers."""
    if signatures.numel() == 0 or not bool((signatures[..., :1].abs() == 1).all()):
        return False  # without a look at all entries of whole updates, which may be millions
    return bool((signatures.abs() == 1).all())


def from_signs(agreements: Similarity) -> Similarity:
    """Return the cosines of updates, given those of their signs, in place.

    Of two updates at an angle φ a share φ/π of the signs differ, so that the cosine a of their signs is 1 − 2φ/π, and
    cos φ = sin(πa/2).
    """
    agreements *= np.pi / 2
    return np.sin(agreements, out=agreements)


def cosine_similarity(signatures: Tensor, *, signs: bool | None = None) -> Similarity:
    """Return the cosine similarity of every two rows, α of CFL's eq. 51 (or eq. 50, given gradients).

    Rows of signs, or with ``signs`` means of such rows, stand for the updates that they are of, whose cosine is
    estimated: see :func:`from_signs`.

    One matrix product. The norms are the square roots of its diagonal, so that they carry the same rounding as the
    products that they divide. From signatures ``[n, R]`` to ``[n, n]`` float64 in [-1, 1], symmetric, ones on the
    diagonal. A row of zeros points nowhere: it is 0 to all others.
    """
    alpha = (signatures @ signatures.T).to("cpu", torch.float64).numpy()
    if are_signs(signatures) if signs is None else signs:
        alpha /= signatures.shape[1]
        alpha = from_signs(alpha)
    norms = np.sqrt(np.diagonal(alpha))
    norms[norms == 0] = 1.0
    # In place, as of 10,000 clients every copy takes 0.8 GB.
    alpha /= norms[:, None]
    alpha /= norms
    alpha += alpha.T
    alpha /= 2
    np.clip(alpha, -1.0, 1.0, out=alpha)
    np.fill_diagonal(alpha, 1.0)
    return alpha


def cosines(some: Tensor, others: Tensor) -> Similarity:
    """Return the cosine similarity of each row of ``[n, D]`` to each of ``[m, D]``: ``[n, m]`` float64 in [-1, 1].

    A row of zeros is 0 to all. Signs are treated as in :func:`cosine_similarity`.
    """
    if are_signs(some) and are_signs(others):
        agreements = (some @ others.to(some).T).to("cpu", torch.float64).numpy() / some.shape[1]
        return from_signs(agreements)
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in (some, others)]
    products = (some @ others.to(some).T).double() / torch.outer(*(norm.clamp(min=1e-150) for norm in norms))
    return products.clamp(-1.0, 1.0).cpu().numpy()


def distances(signatures: Tensor, metric: str) -> Distances:
    """Return the distance of every two rows of ``[m, R]``, condensed; equal rows have distance 0, exactly.

    ``l1`` is Σ|a − b|, ``l2`` √Σ(a − b)², both in parameter units, ``cosine`` 1 − α, in [0, 2]; raises ConfigError for
    another metric.
    """
    if metric not in METRICS:
        raise ConfigError(unknown("metric", metric, METRICS))
    if metric == "cosine":
        apart = scipy.spatial.distance.squareform(cosine_similarity(signatures), checks=False)
        np.subtract(1.0, apart, out=apart)
        apart[apart < ROUNDING] = 0.0
        return apart
    p = 1 if metric == "l1" else 2
    total = torch.zeros(len(signatures) * (len(signatures) - 1) // 2, dtype=torch.float64, device=signatures.device)
    for block in signatures.split(COLUMNS, dim=1):
        total += torch.pdist(block.contiguous(), p) ** p
    return total.pow_(1 / p).cpu().numpy()
