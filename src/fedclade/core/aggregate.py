"""From updates to a new model."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fedclade.core.updates import Updates


def mean(updates: Updates, *, weighted: bool = True) -> Tensor:
    """Return the mean update of the clients that answered, ``[S]``.

    Parameters
    ----------
    updates
        Of at least one client.
    weighted
        By their numbers of examples: Σ |D_i|/|D| Δθ_i (CFL eq. 2, FedAvg). Otherwise all clients count alike (CFL
        Algorithm 5, line 13; FedGroup Algorithm 4, line 7), which sums of weighted updates cannot tell.

    Raises
    ------
    UpdateError
        If it is not weighted, and the run streams.
    """
    if not weighted:
        return updates.required_deltas.mean(dim=0)
    total = updates.sizes.sum()
    if updates.sums is not None:
        return updates.sums.groups.sum(0) / float(total)
    return (updates.sizes / total).to(updates.required_deltas) @ updates.required_deltas


def inter_group(models: Tensor, eta_g: float, n_parameters: int) -> Tensor:
    """Return every group's model after a step along the others', w_j + η_g Σ_{l≠j} w_l/‖w_l‖ (FedGroup Algorithm 2).

    Parameters
    ----------
    models
        One for each group, ``[m, S]``.
    eta_g
        η_g, in parameter units.
    n_parameters
        D: the buffers behind the first D entries are statistics of a group's own data, and stay as they are.
    """
    directions = functional.normalize(models[:, :n_parameters], dim=1)  # of a model of zeros: zeros
    steps = functional.pad(directions.sum(0) - directions, (0, models.shape[1] - n_parameters))
    return models + eta_g * steps
