"""What a check by halves makes of clusters that there are already: chance parts them no further, a difference does."""

from __future__ import annotations

import numpy as np
import torch

from fedclade.algorithms.rcfl.replicate_test import cluster_by_halves
from fedclade.clustering import RepeatedTest, Replicates, compute_gain, find_clusters
from fedclade.core import Updates

TRUTH = np.repeat([0, 1, 2], 12)
FEDERATIONS = 24


def federation(seed: int, noise: float = 1.0) -> Updates:
    """Return halves of clients in three clusters; as of small models, a few directions make up most of the noise."""
    draw, dim = torch.Generator().manual_seed(seed), 60
    size = 1 / torch.arange(1, dim + 1).float()
    turned = torch.linalg.qr(torch.randn(dim, dim, generator=draw))[0]
    means = torch.eye(dim)[torch.tensor(TRUTH)] * dim**0.5
    halves = (
        noise
        * torch.randn(len(TRUTH), 2, dim, generator=draw)
        * (size / size.norm() * dim**0.5)
        @ turned
    )
    n, ones = len(TRUTH), torch.ones(len(TRUTH))
    parts = means[:, None] + halves
    return Updates.of(
        ids=tuple(range(n)), sizes=ones, losses=ones, norms=ones, n_parameters=dim, parts=parts
    )


def found(updates: Updates, now: np.ndarray, seed: int) -> np.ndarray:
    return cluster_by_halves(updates, now, RepeatedTest(0.1), np.random.default_rng(seed)).labels


def test_right_clusters_are_parted_further_by_chance_alone_seldom():
    """What gains more than the present clusters is often chance: the gain alone parts them in a quarter of checks."""
    by_gain = by_check = 0
    for seed in range(FEDERATIONS):
        updates = federation(seed)
        assert updates.parts is not None
        alone = find_clusters(Replicates(*updates.parts.unbind(1)))
        by_gain += alone.labels.max() > 2 and alone.gain > compute_gain(
            alone.similarity, TRUTH, alone.noise, alone.own
        )
        by_check += found(updates, TRUTH, seed).max() > 2
    assert by_gain >= FEDERATIONS // 8  # there is something to withstand
    assert by_check <= FEDERATIONS // 8


def test_clusters_that_lie_together_are_parted():
    for seed in range(5):
        labels = found(federation(seed), np.minimum(TRUTH, 1), seed)
        members = [set(TRUTH[labels == label].tolist()) for label in np.unique(labels)]
        assert all(len(of_one) == 1 for of_one in members)


def test_a_client_in_the_wrong_cluster_changes_it():
    now = TRUTH.copy()
    now[0] = 1
    for seed in range(5):
        assert np.array_equal(found(federation(seed, noise=0.3), now, seed), TRUTH)
