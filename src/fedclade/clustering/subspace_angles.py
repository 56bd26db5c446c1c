"""Principal angles between the subspaces in which clients' data lies."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Angles = NDArray[np.float64]


def angles(vectors: Tensor, angle: Literal["smallest", "same_place"] = "smallest") -> Angles:
    """Return the angle between every two clients in degrees, ``[n, n]``, from their vectors ``[n, L, d, p]``.

    Vectors that both of them lack, which are zeros, do not count; those that one of them lacks are at 90°.
    """
    vectors = vectors.cpu().double()
    places = vectors.any(dim=2)  # [n, L, p]
    held = places[..., 0]
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, mine in enumerate(vectors):
        products = mine.mT @ vectors
        if angle == "smallest":  # its cosine is the largest singular value of UᵀV
            each = _degrees(torch.linalg.matrix_norm(products, 2))
        else:
            there = places[i] | places
            of_places = _degrees(products.diagonal(dim1=-2, dim2=-1)) * there
            each = of_places.sum(dim=2) / there.sum(dim=2).clamp(min=1)
        counted = held[i] | held
        degrees[i] = (each * counted).sum(dim=1) / counted.sum(dim=1)
    return degrees.fill_diagonal_(0.0).numpy()


def nearest_vectors(vectors: Tensor) -> Angles:
    """Return the smallest angle between any vector of one client and any of another, in degrees, ``[n, n]``.

    This is the distance of the official code of PACFL (``calculating_adjacency``), without the signs of the vectors.

    Parameters
    ----------
    vectors
        ``[n, L, d, p]``: p unit vectors of each of L matrices of each client. A vector of zeros is missing.
    """
    side_by_side = vectors.cpu().double().transpose(1, 2).flatten(2)  # [n, d, L p]
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, client_vectors in enumerate(side_by_side):
        cosines = client_vectors.mT @ side_by_side  # a missing vector has cosine 0, which never is the largest alone
        degrees[i] = _degrees(cosines.abs().amax(dim=(1, 2)))
    return degrees.fill_diagonal_(0.0).numpy()


def _degrees(cosines: Tensor) -> Tensor:
    return torch.rad2deg(cosines.abs().clamp(max=1.0).arccos())
