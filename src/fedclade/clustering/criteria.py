"""What the updates of one cluster show: how near it is to a stationary point, and how far its members disagree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedclade.clustering.bipartition import (
    Bipartition,
    optimal_bipartition,
)
from fedclade.clustering.separation import gamma_bound
from fedclade.clustering.similarity import Similarity, cosine_similarity
from fedclade.core import Updates, mean

LARGEST_COMPARED = 1000
"""Members whose similarities are computed in every round; those of more take more memory and time than all else."""


@dataclass(frozen=True, eq=False)
class SplitCriteria:
    """The quantities of CFL's criteria for one cluster in one round, all from updates made at the same model.

    Parameters
    ----------
    members
        The clients that answered, ``[n]``.
    mean_norm
        ‖Σ |D_i|/|D_c| Δθ_i‖, the norm of the mean (eq. 32), in parameter units.
    max_norm
        max_i ‖Δθ_i‖ (eq. 33), in parameter units.
    similarity
        α ``[n, n]`` of the signatures (eq. 51); None where it was not computed.
    """

    members: tuple[int, ...]
    mean_norm: float
    max_norm: float
    similarity: Similarity | None

    @classmethod
    def of(
        cls, updates: Updates, moved: Tensor | None = None, *, largest_compared: int = LARGEST_COMPARED
    ) -> SplitCriteria:
        """Measure the updates of one cluster, be it none.

        Parameters
        ----------
        updates
            The updates.
        moved
            Their mean ``[S]``, if it is known; otherwise it is the weighted one.
        largest_compared
            Of how many clients, at most, the similarities are computed.
        """
        if not updates.ids:
            return cls((), 0.0, 0.0, None)
        moved = mean(updates) if moved is None else moved
        return cls(
            updates.ids,
            float(torch.linalg.vector_norm(moved[: updates.n_parameters], dtype=torch.float64)),
            float(updates.norms.max()),
            cosine_similarity(updates.signatures) if len(updates.ids) <= largest_compared else None,
        )

    @cached_property
    def bipartition(self) -> Bipartition | None:
        """The optimal bi-partition (eq. 25); None for a cluster of one client, or without similarities."""
        if self.similarity is None or len(self.members) < 2:
            return None
        return optimal_bipartition(self.similarity, self.members)

    @property
    def criteria(self) -> dict[str, float]:
        """The numbers that a split is decided by; the last two are missing where there is no bi-partition."""
        numbers = {"mean_norm": self.mean_norm, "max_norm": self.max_norm}
        if self.bipartition is not None:
            numbers["alpha_cross_max"] = self.bipartition.alpha_cross_max
            numbers["gamma_bound"] = gamma_bound(self.bipartition.alpha_cross_max)
        return numbers
