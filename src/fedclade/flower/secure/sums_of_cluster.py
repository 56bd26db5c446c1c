"""Several sums for each cluster, so that a malicious client can spoil only one of them.

Under secure aggregation a malicious client can turn the mean of its sum to any direction. So the
clients of a cluster are divided at random into m disjoint sums, the mean of each sum is scaled down
to at most the median norm, and a robust rule computes one update from the m means.
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
"""Smallest number of sums for a robust rule: of two means, either could be the wrong one."""


def deal(
    clients: Sequence[int], sums: int, fewest: int, draw: np.random.Generator
) -> list[list[int]]:
    """Divide the clients of a cluster at random into disjoint sums of nearly equal size.

    If the clients are too few for :data:`FEWEST_SUMS` sums, all clients form one sum.

    Parameters
    ----------
    clients
        Clients of the cluster.
    sums
        Largest number of sums.
    fewest
        Smallest number of clients in a sum.
    draw
        Random generator for the order of clients.

    Returns
    -------
    list[list[int]]
        Clients of each sum.
    """
    count = min(sums, len(clients) // fewest)
    if count < FEWEST_SUMS:
        return [list(clients)]
    order = draw.permutation(len(clients))
    groups: list[list[int]] = []
    for places in np.array_split(order, count):
        members = [clients[place] for place in places.tolist()]
        groups.append(sorted(members))
    return groups


def combine(sums: Sequence[ClusterSum], n_parameters: int, rule: Aggregation) -> ClusterSum:
    """Combine several sums of a cluster's clients into one sum for the cluster.

    Fewer than :data:`FEWEST_SUMS` sums are added up, since no robust rule is possible for them.

    Parameters
    ----------
    sums
        Sums of disjoint sets of clients.
    n_parameters
        Number of parameters of the model, without buffers.
    rule
        Aggregation rule, such as the median.
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
        loss=_typical_value([each.loss for each in sums], [each.weight / weight for each in sums]),
        norm=_typical_value(
            [each.norm for each in sums], [each.clients / clients for each in sums]
        ),
        norm_of_buffers=_typical_value(
            [each.norm_of_buffers for each in sums], [each.clients / clients for each in sums]
        ),
        clipped=sum(each.clipped for each in sums),
    )


def _robust_mean(sums: Sequence[ClusterSum], n_parameters: int, rule: Aggregation) -> torch.Tensor:
    """Compute one update ``[S]`` from the means of several sums by a robust rule.

    The parameters are those of :func:`combine`.
    """
    means = torch.stack([each.total / each.weight for each in sums])
    parts = [_limit_norms(part) for part in (means[:, :n_parameters], means[:, n_parameters:])]
    # The rule "mean" is replaced by the median, since a malicious client that controls the mean of
    # its own sum also has 1/m of this effect on the mean of m means.
    if rule.rule == "mean":
        rule = replace(rule, rule="median")
    # In the rule every sum has the same weight, regardless of its clients' examples.
    alike = torch.ones(len(sums), dtype=torch.float64)
    as_updates = Updates.of(
        ids=tuple(range(len(sums))),
        sizes=alike,
        losses=alike,
        norms=alike,
        n_parameters=n_parameters,
        deltas=torch.cat(parts, dim=1),
        aggregation=rule,
    )
    return mean(as_updates)


def _limit_norms(means: torch.Tensor) -> torch.Tensor:
    """Scale m mean updates, the rows of ``[m, d]``, down to at most their median norm."""
    norms = row_norms(means)
    typical = median_low(norms.tolist())
    scale = torch.where(norms > typical, typical / norms, torch.ones_like(norms))
    return means * scale[:, None]


def _typical_value(values: Sequence[float], shares: Sequence[float]) -> float:
    """Return a typical value of several sums, such as the loss.

    For at least :data:`FEWEST_SUMS` sums the result is the median of their values, since a
    malicious client may have falsified the value of its sum. For fewer sums the result is the mean,
    weighted by ``shares``, whose total is 1.
    """
    if len(values) >= FEWEST_SUMS:
        return median_low(values)
    return sum(value * share for value, share in zip(values, shares, strict=True))
