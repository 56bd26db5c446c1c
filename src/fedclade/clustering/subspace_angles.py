"""Principal angles between the subspaces in which clients' data lies."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Angles = NDArray[np.float64]


def angles(vectors: Tensor, angle: Literal["smallest", "same_place"] = "smallest") -> Angles:
    """Return the angle between every two clients in degrees, ``[n, n]``, from their vectors ``[n, L, d, p]``."""
    vectors = vectors.cpu().double()
    held = vectors[..., 0].any(dim=2)
    degrees = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for i, mine in enumerate(vectors):
        products = mine.mT @ vectors
        if angle == "smallest":  # its cosine is the largest singular value of UᵀV
            each = _degrees(torch.linalg.matrix_norm(products, 2))
        else:
            each = _degrees(products.diagonal(dim1=-2, dim2=-1)).mean(dim=2)
        counted = held[i] | held
        degrees[i] = (each * counted).sum(dim=1) / counted.sum(dim=1)
    return degrees.fill_diagonal_(0.0).numpy()


def _degrees(cosines: Tensor) -> Tensor:
    return torch.rad2deg(cosines.abs().clamp(max=1.0).arccos())
