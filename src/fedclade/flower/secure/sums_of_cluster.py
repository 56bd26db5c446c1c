"""Several sums for one cluster, and one update from them: a malicious client then spoils one of the sums.

Nothing keeps a client under masks from turning the mean of its sum to any direction. So a cluster's
clients are dealt at random into m disjoint sums, each mean is shortened to the median length, and a
robust rule takes one update from the m means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np
import torch

from fedclade.core import Aggregation, Updates, mean, row_norms
from fedclade.flower.secure.secrets import ClusterSum

FEWEST_SUMS = 3
"""Of two means either could be the wrong one."""


def deal(
    clients: Sequence[int], sums: int, fewest: int, draw: np.random.Generator
) -> list[list[int]]:
    """Deal clients at random into disjoint sums of at least ``fewest`` each, as even as can be.

    Return one list with all of them if they are too few for :data:`FEWEST_SUMS` sums.
    """
    count = min(sums, len(clients) // fewest)
    if count < FEWEST_SUMS:
        return [list(clients)]
    order = draw.permutation(len(clients))
    return [
        sorted(clients[place] for place in places.tolist())
        for places in np.array_split(order, count)
    ]


def combine(sums: Sequence[ClusterSum], n_parameters: int, rule: Aggregation) -> ClusterSum:
    """Return one sum for a cluster from those of its clients.

    With fewer than :data:`FEWEST_SUMS` they are added up.
    """
    weight = sum(each.weight for each in sums)
    clients = sum(each.clients for each in sums)
    if len(sums) < FEWEST_SUMS:
        total = torch.stack([each.total for each in sums]).sum(0)
    else:
        total = _robust_mean(sums, n_parameters, rule) * weight
    return ClusterSum(
        total=total,
        weight=weight,
        clients=clients,
        loss=_typical([each.loss for each in sums], [each.weight / weight for each in sums]),
        norm=_typical([each.norm for each in sums], [each.clients / clients for each in sums]),
        norm_of_buffers=_typical(
            [each.norm_of_buffers for each in sums], [each.clients / clients for each in sums]
        ),
        clipped=sum(each.clipped for each in sums),
    )


def _robust_mean(sums: Sequence[ClusterSum], n_parameters: int, rule: Aggregation) -> torch.Tensor:
    means = torch.stack([each.total / each.weight for each in sums])
    parts = [_shortened(part) for part in (means[:, :n_parameters], means[:, n_parameters:])]
    # One malicious client can turn the mean of the means as far as the mean of a single sum over m.
    how = replace(rule, rule="median") if rule.rule == "mean" else rule
    alike = torch.ones(len(sums), dtype=torch.float64)
    as_updates = Updates(
        ids=tuple(range(len(sums))),
        sizes=alike,
        losses=alike,
        norms=alike,
        n_parameters=n_parameters,
        deltas=torch.cat(parts, dim=1),
        aggregation=how,
    )
    return mean(as_updates)


def _shortened(means: torch.Tensor) -> torch.Tensor:
    """Return means ``[m, d]``, none of them longer than their median length."""
    norms = row_norms(means)
    typical = median_low(norms.tolist())
    scale = torch.where(norms > typical, typical / norms, torch.ones_like(norms))
    return means * scale[:, None]


def _typical(values: Sequence[float], shares: Sequence[float]) -> float:
    """Return the median of enough sums, since one may be a lie; else their mean with these shares."""
    if len(values) >= FEWEST_SUMS:
        return median_low(values)
    return sum(value * share for value, share in zip(values, shares, strict=True))
