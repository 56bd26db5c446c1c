"""From updates to a new model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.core.robust import robust
from fedclade.core.updates import Updates


def mean(updates: Updates, *, weighted: bool = True) -> Tensor:
    """Return the mean update ``[S]`` of at least one client, by default Σ |D_i|/|D| Δθ_i (CFL eq. 2, FedAvg).

    Unweighted, all clients count alike (CFL Algorithm 5, line 13; FedGroup Algorithm 4, line 7). A run that streams
    cannot do that: it has sums of weighted updates alone, and an UpdateError is raised.

    Where :attr:`Updates.aggregation` names another rule, that takes the place of the mean, and counts clients alike.
    """
    if (how := updates.aggregation) is not None:
        return robust(updates.required_deltas, updates.n_parameters, how)
    if not weighted:
        return updates.required_deltas.mean(dim=0)
    total = updates.sizes.sum()
    if updates.sums is not None:
        return updates.sums.groups.sum(0) / float(total)
    return (updates.sizes / total).to(updates.required_deltas) @ updates.required_deltas


def mean_of_all(parts: Sequence[Updates]) -> Tensor:
    """Return the mean update ``[S]`` of clients that were queried apart, none of them twice, weighted by |D_i|."""
    if parts[0].aggregation is not None:
        return mean(reduce(Updates.concat, parts))
    weights = [float(updates.sizes.sum()) for updates in parts]
    each = [mean(updates) * (weight / sum(weights)) for updates, weight in zip(parts, weights, strict=True)]
    return torch.stack(each).sum(0)


def centre_of(updates: Updates, models: Tensor, members: Sequence[int], before: Tensor) -> Tensor:
    """Return what a robust rule makes of the models ``[n, S]`` that clients have reached, of some members: ``[S]``.

    For methods whose clients reach a centre from elsewhere. The rule is given how far they are from ``before``, where
    the centre was.
    """
    return before + mean(replace(updates, deltas=models - before).select(members))


def inter_group(models: Tensor, eta_g: float, n_parameters: int, *, averages: bool = False) -> Tensor:
    """Return every group's model after a step along the others', w_j + η_g Σ_{l≠j} w_l/‖w_l‖ (FedGroup Algorithm 2).

    If it ``averages``, that is divided by the sum of the weights, 1 + Σ_{l≠j} η_g/‖w_l‖ (FlexCFL's code).
    ``models`` has a row for each group, ``[m, S]``; ``eta_g`` is η_g in parameter units. The buffers behind the first
    D = ``n_parameters`` entries are statistics of a group's own data, and stay as they are.
    """
    parameters = models[:, :n_parameters]
    directions = functional.normalize(parameters, dim=1)  # of a model of zeros: zeros
    moved = parameters + eta_g * (directions.sum(0) - directions)
    if averages:
        weights = eta_g / torch.linalg.vector_norm(parameters, dim=1, keepdim=True)
        weights = weights.where(weights.isfinite(), 0.0)
        moved = moved / (1 + weights.sum() - weights)
    return torch.cat([moved, models[:, n_parameters:]], dim=1)
