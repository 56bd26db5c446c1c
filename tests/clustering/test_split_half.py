"""Replicates: what a partition gains, whether it is real, and what chance makes of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclade.clustering import split_half as replication
from fedclade.clustering.similarity import cosine_similarity
from fedclade.clustering.split_half import Replicates, compute_gain, find_clusters
from tests.reference import replication as written_out


def replicates_of(means: torch.Tensor, noise: float, seed: int, heavy: bool = False) -> Replicates:
    """Return two replicates of clients with these mean updates ``[n, R]``, and noise of this size beside them."""
    draw = torch.Generator().manual_seed(seed)

    def half() -> torch.Tensor:
        normal = torch.randn(means.shape, generator=draw)
        if heavy:  # Student's t with 2 degrees of freedom: no variance
            normal /= torch.rand(means.shape, generator=draw).log().neg().sqrt()
        return means + noise * normal

    return Replicates(half(), half())


def grouped(truth: list[int], dim: int = 60) -> torch.Tensor:
    """Return a mean update for each client: unit directions at right angles, one for each true cluster."""
    return torch.eye(dim)[torch.tensor(truth)] * dim**0.5


def same_partition(one, other) -> bool:
    return replication.is_same_partition(np.asarray(one), np.asarray(other))


def p_value_of(finding, level: float) -> float:
    return finding.compute_p_value(level, np.random.default_rng(0))


@pytest.mark.parametrize("seed", range(5))
def test_the_gain_is_the_one_of_the_formula(seed):
    draw = np.random.default_rng(seed)
    similarity = draw.uniform(-1, 1, (9, 9))
    similarity = (similarity + similarity.T) / 2
    np.fill_diagonal(similarity, 1.0)
    labels = np.unique(draw.integers(0, 4, 9), return_inverse=True)[1]
    clusters = [np.flatnonzero(labels == label).tolist() for label in set(labels)]
    assert compute_gain(similarity, labels, 0.3) == pytest.approx(
        written_out.gain(similarity, clusters, 0.3)
    )


def test_one_cluster_gains_nothing_and_neither_do_clients_by_themselves():
    similarity = cosine_similarity(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)))
    assert compute_gain(similarity, np.zeros(5, dtype=np.int64), 0.3) == pytest.approx(0)
    assert compute_gain(similarity, np.arange(5), 0.3) == pytest.approx(-4 * 0.3 / 5)


@pytest.mark.parametrize("seed", range(4))
def test_choice_and_p_value_are_those_of_the_definition(seed):
    """Five clients: 120 orders, all of them looked at."""
    replicates = replicates_of(grouped([0, 0, 1, 1, 1], 12), 0.8, seed)
    halves = [cosine_similarity(half) for half in (replicates.first, replicates.second)]
    found = find_clusters(replicates)
    k, most = written_out.best(*halves, found.noise)
    assert found.labels.max() + 1 == k
    assert found.gain == pytest.approx(most)
    assert p_value_of(found, 0.05) == pytest.approx(
        written_out.p_value(*halves, found.noise) if k > 1 else 1.0
    )


@pytest.mark.parametrize(("noise", "heavy"), [(0.3, False), (1.5, False), (1.0, True)])
def test_clients_of_one_distribution_are_told_apart_no_more_often_than_the_level(noise, heavy):
    """Type-I error: 100 federations of 8 clients; at level 0.1, 10 are expected at most, 20 with probability 0.002."""
    mean = torch.ones(8, 20)
    found = [
        find_clusters(replicates_of(mean, noise, seed, heavy)).compute_p_value(
            0.1, np.random.default_rng(seed)
        )
        for seed in range(100)
    ]
    assert sum(p <= 0.1 for p in found) < 20


def test_p_values_are_uniform_or_larger_even_where_noise_is_thought_to_be_none(monkeypatch):
    """Without the price of a cluster some partition always gains, so that the test alone decides."""
    monkeypatch.setattr(Replicates, "agreement", property(lambda self: np.ones(len(self.first))))
    replicates = (replicates_of(torch.zeros(6, 30), 1.0, seed) for seed in range(200))
    p = np.array(
        [find_clusters(each).compute_p_value(0.05, np.random.default_rng(0)) for each in replicates]
    )
    assert p.min() < 0.05  # it can be small
    for level in (0.05, 0.1, 0.25, 0.5):
        assert (p <= level).mean() <= level + 3.1 * np.sqrt(level * (1 - level) / len(p))


def test_power_falls_as_noise_grows():
    """Share of 10 federations of 4 × 4 clients whose clusters are found, all of them, at level 0.01."""
    truth = [0, 1, 2, 3] * 4

    def found(noise: float, seed: int) -> bool:
        finding = find_clusters(replicates_of(grouped(truth), noise, seed))
        return p_value_of(finding, 0.01) <= 0.01 and same_partition(finding.labels.tolist(), truth)

    power = [np.mean([found(noise, seed) for seed in range(10)]) for noise in (0.5, 1.0, 2.0, 6.0)]
    assert power[0] == 1.0
    assert power[-1] <= 0.1
    assert power == sorted(power, reverse=True)


@pytest.mark.parametrize(
    "truth", [[0] * 17 + [1] * 3, [0] * 9 + [1] * 5 + [2] * 3, [0, 1, 2, 3, 4, 5, 6, 7] * 3]
)
def test_unequal_and_many_clusters_are_found(truth):
    finding = find_clusters(replicates_of(grouped(truth), 0.7, 3))
    assert same_partition(finding.labels.tolist(), truth)
    assert p_value_of(finding, 0.005) <= 0.005


def test_the_order_of_clients_changes_nothing_but_the_order():
    replicates = replicates_of(grouped([0, 0, 0, 1, 1, 1, 2, 2]), 0.6, 1)
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    shuffled = Replicates(replicates.first[order], replicates.second[order])
    one, other = (find_clusters(each) for each in (replicates, shuffled))
    assert same_partition(one.labels[order].tolist(), other.labels.tolist())
    assert one.gain == pytest.approx(other.gain)


def test_gamma_is_measured():
    """Whole updates have half the noise of halves: with mean and noise of norm 1 and g, γ = g / √2."""
    dim = 4000
    means = torch.randn(30, dim, generator=torch.Generator().manual_seed(1))
    for g in (0.5, 1.0, 2.0):
        measured = np.median(replicates_of(means, g, 2).gammas)
        assert measured == pytest.approx(g / 2**0.5, rel=0.1)
    assert np.isinf(Replicates(torch.ones(1, 3), -torch.ones(1, 3)).gammas).all()


def test_of_many_clients_a_sample_is_tested(monkeypatch):
    monkeypatch.setattr(replication, "LARGEST_TESTED_BY_HALVES", 12)
    truth = [0, 1] * 15
    finding = find_clusters(replicates_of(grouped(truth), 0.5, 1))
    assert same_partition(finding.labels.tolist(), truth)
    assert p_value_of(finding, 0.01) <= 0.01
    nothing = find_clusters(replicates_of(torch.ones(30, 20), 1.0, 1))
    assert (p_value_of(nothing, 0.01), nothing.gain, nothing.labels.max()) == (1.0, 0.0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_shuffles_inside_the_present_clusters_are_those_of_the_definition(seed):
    """Clusters of three and four: 144 orders, of which 400 are drawn."""
    now = np.array([0, 1, 0, 1, 1, 0, 1])
    replicates = replicates_of(grouped(now.tolist(), 12), 1.5, seed)
    halves = [cosine_similarity(half) for half in (replicates.first, replicates.second)]
    found = find_clusters(replicates)
    expected = written_out.exceeded(*halves, found.noise, now.tolist())
    assert found.compute_share_exceeding(now, np.random.default_rng(0)) == pytest.approx(
        expected, abs=0.08
    )


def test_of_many_clients_a_sample_is_shuffled_inside_clusters(monkeypatch):
    monkeypatch.setattr(replication, "LARGEST_TESTED_BY_HALVES", 18)
    truth = np.array([0, 1, 2] * 10)
    finding = find_clusters(replicates_of(grouped(truth.tolist()), 0.5, 1))
    # two of three lie together
    assert finding.compute_share_exceeding(np.minimum(truth, 1), np.random.default_rng(0)) == 0.0


def test_a_finding_among_fewer_clusters_is_the_best_of_these():
    finding = find_clusters(replicates_of(grouped([0, 0, 0, 1, 1, 1, 2, 2, 2]), 0.4, 1))
    gains = finding.across.compute_gains(np.arange(9)[None])[0]
    assert (finding.labels.max(), finding.gain) == (2, gains[2])
    fewer = finding.limit_clusters(2)
    assert (fewer.labels.max(), fewer.gain) == (1, gains[1])
    assert fewer.gain < finding.gain
