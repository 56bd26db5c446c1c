"""Correctness of a bi-partition: CFL's Theorem 1, corollary and criterion (Sattler et al. 2019).

A bi-partition splits the clients of a cluster in two; it is correct if no two clients of one
distribution are separated. The relative noise γ_i of a client's gradient is the distance of this
gradient from the exact gradient of the client's distribution, divided by the norm of the exact
gradient (eq. 16). From γ alone the theorem bounds how similar clients of two distributions can be
across the best bi-partition, and how dissimilar clients of one distribution can be. If the bounds
do not overlap, the bi-partition is correct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fedclade.clustering.similarity import Similarity, cosine_similarity
from fedclade.clustering.spanning_tree import (
    Bipartition,
    find_bipartition_by_tree,
    find_optimal_bipartition,
)
from fedclade.core import Updates, require

if TYPE_CHECKING:
    from torch import Tensor

Gammas = NDArray[np.float64]


def noise_cosine(gamma_i: ArrayLike, gamma_j: ArrayLike) -> NDArray[np.float64]:
    """Return the smallest possible cosine similarity of two clients of one distribution (eq. 20).

    It is H_ij = −γ_i γ_j + √(1 − γ_i²)·√(1 − γ_j²), the cosine of arcsin γ_i + arcsin γ_j.

    Parameters
    ----------
    gamma_i, gamma_j
        Relative noise of the gradients of both clients, in [0, 1); arrays are broadcast.
    """
    i = np.asarray(gamma_i, dtype=np.float64)
    j = np.asarray(gamma_j, dtype=np.float64)
    return -i * j + np.sqrt(1 - i**2) * np.sqrt(1 - j**2)


def bound_cross_similarity(gammas: Sequence[float], truth: Sequence[int]) -> float:
    """Return the upper bound on α_cross^max, the similarity across the best bi-partition (eq. 19).

    For two clients of different distributions the bound is cos φ·H + sin φ·√(1 − H²), or 1 if
    H < cos φ. Here H is :func:`noise_cosine` of the two clients, φ is π/(k − 1), and k is the
    number of distributions. The clients across the best bi-partition are not known beforehand, so
    the result is the largest bound over all pairs of clients of different distributions.

    Parameters
    ----------
    gammas
        Relative noise γ_i of m clients, in [0, 1).
    truth
        I(i), the distribution of each client, with at least 2 different distributions.

    Raises
    ------
    ConfigError
        If a γ_i is out of range, the lengths differ, or there is one distribution only.
    """
    noise, labels = _check_gammas(gammas, truth)
    k = len(np.unique(labels))
    require(("truth", f"{k} distribution", k >= 2, "labels of at least 2 distributions"))
    H = noise_cosine(noise[:, None], noise)[~np.equal.outer(labels, labels)]
    phi = math.pi / (k - 1)
    bounds = math.cos(phi) * H + math.sin(phi) * np.sqrt(np.clip(1 - H**2, 0, None))
    return float(np.where(math.cos(phi) <= H, bounds, 1.0).max())


def bound_intra_similarity(gammas: Sequence[float], truth: Sequence[int]) -> float:
    """Return the lower bound on α_intra^min, the similarity within a distribution (eq. 21).

    It is the smallest H_ij (:func:`noise_cosine`) of two clients of one distribution.

    Parameters
    ----------
    gammas
        Relative noise γ_i of m clients, in [0, 1).
    truth
        I(i), the distribution of each client. If no two clients have the same distribution, the
        result is 1.

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
    """Return the bound on the relative noise below which a bi-partition is correct (eq. 39).

    A bi-partition is certainly correct if γ_max, the largest relative noise of a client, is below
    √((1 − α_cross^max) / 2). This follows from α_intra^min ≥ 1 − 2γ_max² (eq. 38), and needs
    neither the true clusters nor their number.

    Parameters
    ----------
    alpha_cross_max
        Largest similarity of two clients across the optimal bi-partition.
    """
    return math.sqrt((1.0 - alpha_cross_max) / 2.0)


def separation_gap(alpha: Similarity, truth: Sequence[int], alpha_cross_max: float) -> float:
    """Return the separation gap g(α) = α_intra^min − α_cross^max (Definition 2, eqs. 28 and 29).

    α_intra^min is the smallest similarity of two clients of one distribution, and α_cross^max the
    largest similarity across the optimal bi-partition. The optimal bi-partition is correct if the
    gap is positive (Corollary 1). Remark 2 of the paper states "if and only if", but a split can be
    correct without a gap: members of one distribution may be less similar than clients across the
    split, as they often are in figure 3 (``fedclade reproduce cfl-fig3-theory``).

    Parameters
    ----------
    alpha
        Similarities of n clients, ``[n, n]``.
    truth
        True cluster of each client, ``[n]``. True clusters are known in experiments only.
    alpha_cross_max
        Largest similarity of two clients across the optimal bi-partition.
    """
    labels = np.asarray(truth)
    # This includes the diagonal, so α_intra^min is 1 if all clients have different distributions.
    alpha_intra_min = float(alpha[np.equal.outer(labels, labels)].min())
    return alpha_intra_min - alpha_cross_max


def _check_gammas(
    gammas: Sequence[float], truth: Sequence[int]
) -> tuple[Gammas, NDArray[np.int64]]:
    """Check the relative noises and true clusters of clients, and return both as arrays.

    Raises
    ------
    ConfigError
        If a relative noise is out of range, or the lengths differ.
    """
    noise = np.asarray(gammas, dtype=np.float64)
    invalid = noise[~((noise >= 0) & (noise < 1))]
    same_length = f"one number for each of the {len(truth)} clients in truth"
    require(
        ("gammas", invalid[:1].tolist(), len(invalid) == 0, "in [0, 1)"),
        ("gammas", len(noise), len(noise) == len(truth), same_length),
    )
    return noise, np.asarray(truth)


# Criteria of a split, from the updates of one cluster: how near the cluster is to a stationary
# point, and how much its members disagree.

MOST_PAIRED = 5000
"""Largest number of clients for which a similarity matrix is stored (200 MB).

For more clients, the bi-partition is found by a minimum spanning tree, without the matrix.
"""


@dataclass(frozen=True, eq=False)
class SplitCriteria:
    """Quantities by which CFL decides whether to split a cluster in a round.

    These are the norms of eqs. 32 and 33 and the similarities of eq. 51. They are computed from the
    updates of the cluster's members, which all start from the same model.
    """

    members: tuple[int, ...]  # the clients that replied, [n]
    mean_norm: float  # ‖Σ |D_i|/|D_c| Δθ_i‖, the norm of the mean (eq. 32), in parameter units
    max_norm: float  # max_i ‖Δθ_i‖ (eq. 33), in parameter units
    similarity: Similarity | None  # α [n, n] of the signatures (eq. 51); None if not computed
    by_tree: Bipartition | None = None  # optimal bi-partition, if found without a matrix

    @classmethod
    def of(
        cls, updates: Updates, mean: Tensor | None, similarity: Similarity | None = None
    ) -> SplitCriteria:
        """Compute the norms of CFL's criteria (eqs. 32 and 33) from the updates of one cluster.

        Parameters
        ----------
        updates
            Updates of the cluster's members.
        mean
            Mean of the updates, ``[S]``; None if no member sent an update.
        similarity
            Similarities of the members, ``[n, n]``; None if not computed.
        """
        if mean is None:
            return cls((), 0.0, 0.0, None)
        mean_norm = torch.linalg.vector_norm(mean[: updates.n_parameters], dtype=torch.float64)
        return cls(updates.ids, float(mean_norm), float(updates.norms.max()), similarity)

    def compared(self, signatures: Tensor, members: Sequence[int]) -> SplitCriteria:
        """Return the criteria with the similarities of the cluster's members.

        For more than :data:`MOST_PAIRED` members only the optimal bi-partition is stored.

        Parameters
        ----------
        signatures
            Signatures (vectors by which clients are compared) of n members, ``[n, R]``.
        members
            Ids of the members.
        """
        ids = tuple(members)
        if len(members) <= MOST_PAIRED:
            return replace(self, members=ids, similarity=cosine_similarity(signatures))
        bipartition = find_bipartition_by_tree(signatures, members)
        return replace(self, members=ids, by_tree=bipartition)

    @cached_property
    def bipartition(self) -> Bipartition | None:
        """Optimal bi-partition of the members (eq. 25).

        It is None for fewer than two members, or if the members were not compared.
        """
        if self.similarity is None or len(self.members) < 2:
            return self.by_tree
        return find_optimal_bipartition(self.similarity, self.members)

    @property
    def numbers(self) -> dict[str, float]:
        """Quantities that decide on a split, by name.

        These are ``mean_norm`` and ``max_norm`` and, if there is a bi-partition,
        ``alpha_cross_max`` and ``gamma_bound``.
        """
        numbers = {"mean_norm": self.mean_norm, "max_norm": self.max_norm}
        if self.bipartition is not None:
            numbers["alpha_cross_max"] = self.bipartition.alpha_cross_max
            numbers["gamma_bound"] = gamma_bound(self.bipartition.alpha_cross_max)
        return numbers
