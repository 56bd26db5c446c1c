"""When a bi-partition is right: CFL's Theorem 1, its corollary, and the criterion that follows (Sattler et al. 2019).

The noise of a client's gradient is γ_i, its distance from the gradient of its distribution as a share of the norm of
that (eq. 16). From γ alone the theorem bounds how like clients of two distributions can be across the best
bi-partition, and how unlike clients of one distribution. Where the bounds do not meet, the bi-partition is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedclade.clustering.similarity import Similarity, cosine_similarity
from fedclade.clustering.spanning_tree import Bipartition, find_bipartition_by_tree, find_optimal_bipartition
from fedclade.core import Updates, require

Gammas = NDArray[np.float64]


def noise_cosine(gamma_i: ArrayLike, gamma_j: ArrayLike) -> NDArray[np.float64]:
    """Return H_ij = −γ_i γ_j + √(1 − γ_i²)·√(1 − γ_j²) (eq. 20).

    It is the cosine of arcsin γ_i + arcsin γ_j: the least similarity of two clients of one distribution. Relative
    noises are in [0, 1); arrays are broadcast.
    """
    i, j = np.asarray(gamma_i, dtype=np.float64), np.asarray(gamma_j, dtype=np.float64)
    return -i * j + np.sqrt(1 - i**2) * np.sqrt(1 - j**2)


def bound_cross_similarity(gammas: Sequence[float], truth: Sequence[int]) -> float:
    """Return the bound on α_cross^max from above (eq. 19): no optimal bi-partition has a larger one.

    For two clients of different distributions it is cos φ·H + sin φ·√(1 − H²) with φ = π/(k − 1), or 1 where H < cos φ;
    the clients across the best split are not known beforehand, so the largest over all such pairs counts. γ_i of m
    clients are in [0, 1), ``truth`` is I(i), the distribution of each, k ≥ 2 of them; raises ConfigError otherwise.
    """
    noise, labels = _checked(gammas, truth)
    k = len(np.unique(labels))
    require(("truth", f"{k} distribution", k >= 2, "of at least 2 distributions"))
    H = noise_cosine(noise[:, None], noise)[~np.equal.outer(labels, labels)]
    phi = math.pi / (k - 1)
    bounds = math.cos(phi) * H + math.sin(phi) * np.sqrt(np.clip(1 - H**2, 0, None))
    return float(np.where(math.cos(phi) <= H, bounds, 1.0).max())


def bound_intra_similarity(gammas: Sequence[float], truth: Sequence[int]) -> float:
    """Return the bound on α_intra^min from below (eq. 21): the least H_ij of two clients of one distribution.

    If no two clients share a distribution there is nothing to bound, and it is 1.
    """
    noise, labels = _checked(gammas, truth)
    alike = np.equal.outer(labels, labels)
    np.fill_diagonal(alike, val=False)
    return float(noise_cosine(noise[:, None], noise)[alike].min(initial=1.0))


def gamma_bound(alpha_cross_max: float) -> float:
    """Return √((1 − α_cross^max) / 2): a bi-partition is certainly right while γ_max stays below it (eq. 39).

    It follows from α_intra^min ≥ 1 − 2γ_max² (eq. 38), and needs neither the truth nor the number of distributions.
    α_cross^max is that of the optimal bi-partition.
    """
    return math.sqrt((1.0 - alpha_cross_max) / 2.0)


def separation_gap(alpha: Similarity, truth: Sequence[int], alpha_cross_max: float) -> float:
    """Return the separation gap g(α) = α_intra^min − α_cross^max (Definition 2, eqs. 28 and 29).

    The optimal bi-partition is right if it is positive (Corollary 1). Remark 2 has "if and only if", but a split can be
    right without a gap: members of one distribution may be less alike than clients across the split, as they often are
    in figure 3 (``fedclade reproduce cfl-fig3-theory``). It needs the true cluster of each client, ``[n]``: for scoring
    only.
    """
    labels = np.asarray(truth)
    # The diagonal is among them, so that clients who are all different have an α_intra^min of 1.
    alpha_intra_min = float(alpha[np.equal.outer(labels, labels)].min())
    return alpha_intra_min - alpha_cross_max


def _checked(gammas: Sequence[float], truth: Sequence[int]) -> tuple[Gammas, NDArray[np.int64]]:
    noise = np.asarray(gammas, dtype=np.float64)
    odd = noise[~((noise >= 0) & (noise < 1))]
    require(
        ("gammas", odd[:1].tolist(), len(odd) == 0, "in [0, 1)"),
        ("gammas", len(noise), len(noise) == len(truth), f"as many as there are clients in truth, {len(truth)}"),
    )
    return noise, np.asarray(truth)


# What the updates of one cluster show: how near it is to a stationary point, and how far its
# members disagree.

MOST_PAIRED = 5000
"""Clients whose similarities are held as a matrix, of 200 MB; of more, a minimum spanning tree alone is found."""


@dataclass(frozen=True, eq=False)
class SplitCriteria:
    """The quantities of CFL's criteria for one cluster in one round, all from updates made at the same model."""

    members: tuple[int, ...]  # the clients that answered, [n]
    mean_norm: float  # ‖Σ |D_i|/|D_c| Δθ_i‖, the norm of the mean (eq. 32), in parameter units
    max_norm: float  # max_i ‖Δθ_i‖ (eq. 33), in parameter units
    similarity: Similarity | None  # α [n, n] of the signatures (eq. 51); None where it was not computed
    by_tree: Bipartition | None = None  # the optimal one, where it was found without these

    @classmethod
    def of(cls, updates: Updates, mean: Tensor | None, similarity: Similarity | None = None) -> SplitCriteria:
        """Measure the updates of one cluster and their mean ``[S]``, which is None if there are none."""
        if mean is None:
            return cls((), 0.0, 0.0, None)
        mean_norm = torch.linalg.vector_norm(mean[: updates.n_parameters], dtype=torch.float64)
        return cls(updates.ids, float(mean_norm), float(updates.norms.max()), similarity)

    def compared(self, signatures: Tensor, members: Sequence[int]) -> SplitCriteria:
        """Return the same for clients with these signatures ``[n, R]``, compared; of one there is nothing to compare.

        Of more than ``MOST_PAIRED`` the optimal bi-partition alone is kept, and no matrix is made.
        """
        if len(members) <= MOST_PAIRED:
            return replace(self, members=tuple(members), similarity=cosine_similarity(signatures))
        return replace(self, members=tuple(members), by_tree=find_bipartition_by_tree(signatures, members))

    @cached_property
    def bipartition(self) -> Bipartition | None:
        """The optimal bi-partition (eq. 25); None for a cluster of one client, or where clients were not compared."""
        if self.similarity is None or len(self.members) < 2:
            return self.by_tree
        return find_optimal_bipartition(self.similarity, self.members)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that a split is decided by; the last two are missing where there is no bi-partition."""
        numbers = {"mean_norm": self.mean_norm, "max_norm": self.max_norm}
        if self.bipartition is not None:
            numbers["alpha_cross_max"] = self.bipartition.alpha_cross_max
            numbers["gamma_bound"] = gamma_bound(self.bipartition.alpha_cross_max)
        return numbers
