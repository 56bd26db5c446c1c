"""Correctness of a bi-partition: CFL's Theorem 1, its corollary, and criterion (Sattler et al. 2019).

The relative noise γ_i of a client's gradient is its distance from the gradient of the client's
distribution, divided by the norm of the latter (eq. 16). From γ alone the theorem bounds how
similar clients of two distributions can be across the best bi-partition, and how dissimilar clients
of one distribution can be. If the bounds do not overlap, the bi-partition is correct.
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
from fedclade.clustering.spanning_tree import (
    Bipartition,
    find_bipartition_by_tree,
    find_optimal_bipartition,
)
from fedclade.core import Updates, require

Gammas = NDArray[np.float64]


def noise_cosine(gamma_i: ArrayLike, gamma_j: ArrayLike) -> NDArray[np.float64]:
    """Return H_ij = −γ_i γ_j + √(1 − γ_i²)·√(1 − γ_j²) (eq. 20).

    It is the cosine of arcsin γ_i + arcsin γ_j: the least similarity of two clients of one
    distribution. Relative noises are in [0, 1); arrays are broadcast.
    """
    i = np.asarray(gamma_i, dtype=np.float64)
    j = np.asarray(gamma_j, dtype=np.float64)
    return -i * j + np.sqrt(1 - i**2) * np.sqrt(1 - j**2)


def bound_cross_similarity(gammas: Sequence[float], truth: Sequence[int]) -> float:
    """Return the upper bound on α_cross^max (eq. 19): no optimal bi-partition has a larger one.

    For two clients of different distributions the bound is cos φ·H + sin φ·√(1 − H²) with
    φ = π/(k − 1), or 1 if H < cos φ. The clients across the best split are not known beforehand, so
    the result is the largest bound over all such pairs.

    Parameters
    ----------
    gammas
        γ_i of m clients, in [0, 1).
    truth
        I(i), the distribution of each client; at least 2 distributions.

    Raises
    ------
    ConfigError
        If a γ_i is out of range, the lengths differ, or there is one distribution only.
    """
    noise, labels = _check_gammas(gammas, truth)
    k = len(np.unique(labels))
    require(("truth", f"{k} distribution", k >= 2, "of at least 2 distributions"))
    H = noise_cosine(noise[:, None], noise)[~np.equal.outer(labels, labels)]
    phi = math.pi / (k - 1)
    bounds = math.cos(phi) * H + math.sin(phi) * np.sqrt(np.clip(1 - H**2, 0, None))
    return float(np.where(math.cos(phi) <= H, bounds, 1.0).max())


def bound_intra_similarity(gammas: Sequence[float], truth: Sequence[int]) -> float:
    """Return the lower bound on α_intra^min (eq. 21): the least H_ij within a distribution.

    Parameters
    ----------
    gammas
        γ_i of m clients, in [0, 1).
    truth
        I(i), the distribution of each client. If no two clients share one, the result is 1.

    Raises
    ------
    ConfigError
        If a γ_i is out of range, or the lengths differ.
    """
    noise, labels = _check_gammas(gammas, truth)
    alike = np.equal.outer(labels, labels)
    np.fill_diagonal(alike, val=False)
    return float(noise_cosine(noise[:, None], noise)[alike].min(initial=1.0))


def gamma_bound(alpha_cross_max: float) -> float:
    """Return √((1 − α_cross^max) / 2) (eq. 39).

    A bi-partition is certainly correct while γ_max is below this bound. It follows from
    α_intra^min ≥ 1 − 2γ_max² (eq. 38), and needs neither the true clusters nor their number.

    Parameters
    ----------
    alpha_cross_max
        Largest similarity across the optimal bi-partition.
    """
    return math.sqrt((1.0 - alpha_cross_max) / 2.0)


def separation_gap(alpha: Similarity, truth: Sequence[int], alpha_cross_max: float) -> float:
    """Return the separation gap g(α) = α_intra^min − α_cross^max (Definition 2, eqs. 28 and 29).

    The optimal bi-partition is correct if the gap is positive (Corollary 1). Remark 2 has "if and
    only if", but a split can be correct without a gap: members of one distribution may be less
    similar than clients across the split, as they often are in figure 3
    (``fedclade reproduce cfl-fig3-theory``).

    Parameters
    ----------
    alpha
        Similarities ``[n, n]``.
    truth
        True cluster of each client, ``[n]``. They are known in experiments only.
    alpha_cross_max
        Largest similarity across the optimal bi-partition.
    """
    labels = np.asarray(truth)
    # This includes the diagonal, so α_intra^min is 1 if all clients have different distributions.
    alpha_intra_min = float(alpha[np.equal.outer(labels, labels)].min())
    return alpha_intra_min - alpha_cross_max


def _check_gammas(
    gammas: Sequence[float], truth: Sequence[int]
) -> tuple[Gammas, NDArray[np.int64]]:
    """Return both as arrays, or raise ConfigError."""
    noise = np.asarray(gammas, dtype=np.float64)
    invalid = noise[~((noise >= 0) & (noise < 1))]
    same_length = f"as many as there are clients in truth, {len(truth)}"
    require(
        ("gammas", invalid[:1].tolist(), len(invalid) == 0, "in [0, 1)"),
        ("gammas", len(noise), len(noise) == len(truth), same_length),
    )
    return noise, np.asarray(truth)


# Criteria of a split, from the updates of one cluster: how near the cluster is to a stationary
# point, and how much its members disagree.

MOST_PAIRED = 5000
"""Number of clients up to which a similarity matrix is stored, of 200 MB. For more clients, only a
minimum spanning tree is found."""


@dataclass(frozen=True, eq=False)
class SplitCriteria:
    """Quantities of CFL's criteria for one cluster in one round, from updates of the same model."""

    members: tuple[int, ...]  # the clients that replied, [n]
    mean_norm: float  # ‖Σ |D_i|/|D_c| Δθ_i‖, the norm of the mean (eq. 32), in parameter units
    max_norm: float  # max_i ‖Δθ_i‖ (eq. 33), in parameter units
    similarity: Similarity | None  # α [n, n] of the signatures (eq. 51); None if not computed
    by_tree: Bipartition | None = None  # optimal bi-partition, if found without a matrix

    @classmethod
    def of(
        cls, updates: Updates, mean: Tensor | None, similarity: Similarity | None = None
    ) -> SplitCriteria:
        """Measure the updates of one cluster and their mean ``[S]``, or None without updates."""
        if mean is None:
            return cls((), 0.0, 0.0, None)
        mean_norm = torch.linalg.vector_norm(mean[: updates.n_parameters], dtype=torch.float64)
        return cls(updates.ids, float(mean_norm), float(updates.norms.max()), similarity)

    def compared(self, signatures: Tensor, members: Sequence[int]) -> SplitCriteria:
        """Return the criteria with the similarities of the members' signatures ``[n, R]``.

        For more than :data:`MOST_PAIRED` members only the optimal bi-partition is stored.
        """
        ids = tuple(members)
        if len(members) <= MOST_PAIRED:
            return replace(self, members=ids, similarity=cosine_similarity(signatures))
        bipartition = find_bipartition_by_tree(signatures, members)
        return replace(self, members=ids, by_tree=bipartition)

    @cached_property
    def bipartition(self) -> Bipartition | None:
        """Optimal bi-partition (eq. 25); None for one client, or if clients were not compared."""
        if self.similarity is None or len(self.members) < 2:
            return self.by_tree
        return find_optimal_bipartition(self.similarity, self.members)

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers that decide on a split; without a bi-partition the last two are missing."""
        numbers = {"mean_norm": self.mean_norm, "max_norm": self.max_norm}
        if self.bipartition is not None:
            numbers["alpha_cross_max"] = self.bipartition.alpha_cross_max
            numbers["gamma_bound"] = gamma_bound(self.bipartition.alpha_cross_max)
        return numbers
