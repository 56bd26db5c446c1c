from __future__ import annotations

import torch

from fedclade.algorithms import ClusterUpdate
from fedclade.algorithms.cluster_update import LARGEST_COMPARED
from fedclade.core import LocalTraining, RoundPlan, Updates

ROUND = RoundPlan(1, LocalTraining())


def updates_of(n: int) -> Updates:
    return Updates.received(range(n), [1] * n, torch.eye(n), n, torch.zeros(n), 1)


def test_similarities_are_computed_only_when_asked_for():
    part = ClusterUpdate.of(0, updates_of(3), ROUND)
    assert part.criteria.similarity is None
    assert part.compared().criteria.similarity.tolist() == torch.eye(3).tolist()


def test_more_clients_than_can_be_compared_every_round_are_not():
    assert (
        ClusterUpdate.of(0, updates_of(LARGEST_COMPARED + 1), ROUND).compared().criteria.similarity
        is None
    )
