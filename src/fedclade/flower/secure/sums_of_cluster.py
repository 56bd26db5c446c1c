"""Several sums for one cluster, so that a malicious client spoils only one of them.

A malicious client under masks can turn the mean of its sum to any direction. So a cluster's clients
are dealt at random into m disjoint sums, each mean is shortened to the median length, and a robust
rule computes one update from the m means.
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
"""Fewest sums for a robust rule: of two means either could be the wrong one."""


def deal(
    clients: Sequence[int], sums: int, fewest: int, draw: np.random.Generator
) -> list[list[int]]:
    """Deal clients at random into disjoint sums of nearly equal size.

    Return one list with all clients if they are too few for :data:`FEWEST_SUMS` sums.

    Parameters
    ----------
    clients
        Clients of the cluster.
    sums
        Largest number of sums.
    fewest
        Smallest number of clients in a sum.
    draw
        Generator of the random order.
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
    """Return one sum for a cluster from several sums of its clients.

    Fewer than :data:`FEWEST_SUMS` sums are added up.
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
    # The rule "mean" is replaced by the median: a malicious client can turn the mean of m means by
    # 1/m of what it can do to the mean of its own sum.
    how = replace(rule, rule="median") if rule.rule == "mean" else rule
    # In the rule every sum has the same weight, regardless of its clients' examples.
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
    """Shorten means ``[m, d]`` to at most their median length."""
    norms = row_norms(means)
    typical = median_low(norms.tolist())
    scale = torch.where(norms > typical, typical / norms, torch.ones_like(norms))
    return means * scale[:, None]


def _typical(values: Sequence[float], shares: Sequence[float]) -> float:
    """Return the median of enough sums, since one may be false; else their weighted mean."""
    if len(values) >= FEWEST_SUMS:
        return median_low(values)
    return sum(value * share for value, share in zip(values, shares, strict=True))
