"""What the updates of one cluster show: how near it is to a stationary point, and how far its members disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedclade.clustering.bipartition import Bipartition, bipartition_by_tree, optimal_bipartition
from fedclade.clustering.separation import gamma_bound
from fedclade.clustering.similarity import Similarity, cosine_similarity
from fedclade.core import Updates

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
        return replace(self, members=tuple(members), by_tree=bipartition_by_tree(signatures, members))

    @cached_property
    def bipartition(self) -> Bipartition | None:
        """The optimal bi-partition (eq. 25); None for a cluster of one client, or where clients were not compared."""
        if self.similarity is None or len(self.members) < 2:
            return self.by_tree
        return optimal_bipartition(self.similarity, self.members)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that a split is decided by; the last two are missing where there is no bi-partition."""
        numbers = {"mean_norm": self.mean_norm, "max_norm": self.max_norm}
        if self.bipartition is not None:
            numbers["alpha_cross_max"] = self.bipartition.alpha_cross_max
            numbers["gamma_bound"] = gamma_bound(self.bipartition.alpha_cross_max)
        return numbers
