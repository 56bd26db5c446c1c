"""From updates to a new model."""

from __future__ import annotations

from torch import Tensor

from fedclade.clients import Updates


def weighted_mean(updates: Updates) -> Tensor:
    """Return Σ |D_i|/|D| Δθ_i over the clients that answered (CFL eq. 2, FedAvg), ``[S]``."""
    total = updates.sizes.sum()
    if updates.sums is not None:
        return updates.sums.groups.sum(0) / float(total)
    return (updates.sizes / total).to(updates.each) @ updates.each
