"""Stability of clusters: groups are stable, and cuts of a continuum or of noise are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from fedclade.clustering import (
    Labels,
    Stability,
    agglomerate,
    average_client_similarity,
    compute_part_similarity,
    cut,
    is_same_partition,
    measure_stability,
)
from fedclade.clustering.stability import MOST_COMPARED, _compute_rand_index


def cosines_of(means: np.ndarray, parts: int, noise: float, seed: int = 0) -> np.ndarray:
    """Return cosines of parts of clients with these means, ``[n, F]``, and noise of this length."""
    draw = np.random.default_rng(seed)
    clients, length = means.shape
    drawn = draw.normal(size=(clients, parts, length)) / np.sqrt(length)
    return compute_part_similarity(torch.from_numpy(means[:, None] + noise * drawn))


def separate(truth: list[int], length: int = 30) -> np.ndarray:
    """Return means of clients: unit vectors at right angles, one for each group."""
    return np.eye(length)[truth]


def on_an_arc(clients: int, degrees: float = 120.0, length: int = 30) -> np.ndarray:
    """Return means of clients that are evenly spread on an arc."""
    angles = np.radians(np.linspace(0, degrees, clients))
    means = np.zeros((clients, length))
    means[:, 0], means[:, 1] = np.cos(angles), np.sin(angles)
    return means


def cluster(cosines: np.ndarray, parts: int, count: int) -> Labels:
    """Return clusters by average linkage of all parts."""
    apart = 1 - average_client_similarity(cosines, parts)
    return cut(agglomerate(apart[np.triu_indices(len(apart), 1)], "average"), count)


def measured(cosines: np.ndarray, parts: int, count: int, **options: bool) -> Stability:
    return measure_stability(cosines, parts, cluster(cosines, parts, count), **options)


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_separate_groups_are_stable(parts, seed):
    truth = np.array([0] * 8 + [1] * 8 + [2] * 4)
    cosines = cosines_of(separate(truth.tolist()), parts, 0.5, seed)
    found = measure_stability(cosines, parts, truth)
    assert found.groups is not None
    assert is_same_partition(found.groups, truth)
    assert found.value == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_continuum_is_not_stable_although_it_is_always_cut_at_the_same_places(seed, count):
    cosines = cosines_of(on_an_arc(24), 3, 0.2, seed)
    found = measured(cosines, 3, count)
    assert found.groups is None
    assert found.value > 0.6, "noise is small, so that only the missing gap tells them from groups"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [2, 4])
def test_clusters_of_noise_are_not_stable(seed, count):
    cosines = cosines_of(separate([0] * 20), 3, 1.0, seed)
    found = measured(cosines, 3, count)
    assert found.groups is None
    assert found.value < 0.4


@pytest.mark.parametrize("seed", range(3))
def test_clusters_that_cut_a_group_are_merged_again(seed):
    truth = np.array([0] * 10 + [1] * 10)
    cosines = cosines_of(separate(truth.tolist()), 4, 0.5, seed)
    found = measure_stability(cosines, 4, np.array([0] * 5 + [1] * 5 + [2] * 10))
    assert found.groups is not None
    assert is_same_partition(found.groups, truth)


def test_a_single_client_is_a_stable_group_unless_its_parts_are_not_compared():
    truth = np.array([0] * 10 + [1])
    cosines = cosines_of(separate(truth.tolist()), 3, 0.5)
    found = measure_stability(cosines, 3, truth)
    assert found.groups is not None
    assert is_same_partition(found.groups, truth)
    assert measure_stability(cosines, 3, truth, compares_own=False).groups is None


def test_groups_of_a_sample_are_those_of_all_clients():
    truth = np.arange(MOST_COMPARED + 70) % 3
    cosines = cosines_of(separate(truth.tolist()), 2, 0.5)
    found = measure_stability(cosines, 2, truth)
    assert found.groups is not None
    assert is_same_partition(found.groups, truth)


def test_two_clients_are_two_groups_if_they_differ():
    cosines = cosines_of(separate([0, 1]), 6, 0.5)
    found = measure_stability(cosines, 6, np.array([0, 1]))
    assert found.groups is not None
    assert found.groups.tolist() == [0, 1]
    alike = cosines_of(separate([0, 0]), 6, 0.5)
    assert measure_stability(alike, 6, np.array([0, 1])).groups is None


def test_the_result_depends_on_neither_the_numbers_of_clusters_nor_a_random_state():
    truth = np.array([0] * 6 + [1] * 6)
    cosines = cosines_of(separate(truth.tolist()), 3, 1.5, 1)
    first = measure_stability(cosines, 3, truth)
    np.random.default_rng().normal()
    again = measure_stability(cosines, 3, 5 - 3 * truth)
    assert again.value == first.value
    assert 0 < first.value < 1


def test_other_views_are_measured_too():
    """Noise along one direction hides the groups from the first view; the second view evens it."""
    truth = np.array([0] * 8 + [1] * 8)
    draw = np.random.default_rng(3)
    loud = np.zeros((16, 4, 40))
    loud[..., 39] = 2 * draw.normal(size=(16, 4))
    rows = separate(truth.tolist(), 40)[:, None] + loud + 0.1 * draw.normal(size=(16, 4, 40))
    cosines = compute_part_similarity(torch.from_numpy(rows))
    assert measure_stability(cosines, 4, truth).groups is None
    found = measure_stability(cosines, 4, truth, view=1)
    assert found.groups is not None
    assert is_same_partition(found.groups, truth)


@pytest.mark.parametrize(("parts", "labels"), [(1, [0, 1, 1]), (3, [2, 2, 2])])
def test_one_part_or_one_cluster_is_refused(parts, labels):
    cosines = np.zeros((3 * parts, 3 * parts))
    clusters = len(set(labels))
    with pytest.raises(ValueError, match=f"got parts={parts} and {clusters} clusters"):
        measure_stability(cosines, parts, np.array(labels))


@pytest.mark.parametrize("seed", range(5))
def test_rand_index_is_that_of_scikit_learn(seed):
    draw = np.random.default_rng(seed)
    one, other = draw.integers(0, 4, 30), draw.integers(0, 1 + seed, 30)
    assert _compute_rand_index(one, other) == pytest.approx(adjusted_rand_score(one, other))
    assert _compute_rand_index(one, one) == 1
