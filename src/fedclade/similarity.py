"""How alike clients' updates are, and what that says about the clusters behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Similarity = NDArray[np.float64]


def cosine_similarity(signatures: Tensor) -> Similarity:
    """Return the cosine similarity of every two rows, α of CFL's eq. 51 (or eq. 50, given gradients).

    One matrix product. The norms are the square roots of its diagonal, so that they carry the same rounding as the
    products that they divide.

    Parameters
    ----------
    signatures
        Updates ``[n, D]``.

    Returns
    -------
    numpy.ndarray
        ``[n, n]`` float64 in [-1, 1], symmetric, ones on the diagonal. A row of zeros points nowhere: it is 0 to all
        others.
    """
    alpha = (signatures @ signatures.T).to("cpu", torch.float64).numpy()
    norms = np.sqrt(np.diagonal(alpha))
    scale = np.outer(norms, norms)
    # In place: of many clients, a matrix is large.
    np.divide(alpha, scale, out=alpha, where=scale > 0)
    alpha[scale == 0] = 0.0
    alpha += alpha.T
    alpha /= 2
    np.clip(alpha, -1.0, 1.0, out=alpha)
    np.fill_diagonal(alpha, 1.0)
    return alpha


def gamma_bound(alpha_cross_max: float) -> float:
    """Return √((1 − α_cross^max) / 2): a bi-partition is certainly right while γ_max stays below it (CFL eq. 39)."""
    return math.sqrt((1.0 - alpha_cross_max) / 2.0)


def separation_gap(alpha: Similarity, truth: Sequence[int], alpha_cross_max: float) -> float:
    """Return the separation gap g(α) = α_intra^min − α_cross^max (CFL Definition 2, eqs. 28 and 29).

    The optimal bi-partition is right if, and only if, it is positive (Remark 2). Needs the truth: for scoring only.

    Parameters
    ----------
    alpha
        Similarities ``[n, n]``.
    truth
        True cluster of each client, ``[n]``.
    alpha_cross_max
        Of the optimal bi-partition of the same clients.
    """
    labels = np.asarray(truth)
    # The diagonal is among them, so that clients who are all different have an α_intra^min of 1.
    alpha_intra_min = float(alpha[np.equal.outer(labels, labels)].min())
    return alpha_intra_min - alpha_cross_max
