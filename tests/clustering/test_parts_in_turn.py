"""The e-value of a check by parts in turn: against its reference, its mean without groups, and what it finds."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from fedclade.clustering import (
    Replicates,
    compute_e_value_by_parts,
    compute_part_similarity,
    find_clusters,
    find_clusters_by_parts,
    is_same_partition,
    parts_in_turn,
)
from fedclade.clustering.repeated_test import LEAST
from fedclade.clustering.split_half import _cut_dendrogram
from tests.reference import parts_in_turn as written_out


def cosines_of(truth: list[int], parts: int, noise: float, seed: int) -> np.ndarray:
    """Return cosines of parts: of unit means at right angles, and noise of this length."""
    draw = np.random.default_rng(seed)
    rows = np.eye(30)[truth][:, None] + noise * draw.normal(size=(len(truth), parts, 30)) / 30**0.5
    return compute_part_similarity(torch.from_numpy(rows))


def by_part(cosines: np.ndarray, parts: int) -> np.ndarray:
    n = len(cosines) // parts
    return cosines.reshape(n, parts, n, parts).transpose(1, 3, 0, 2)


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("earlier", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_statistic_is_that_of_the_definition_in_every_order(seed, earlier, is_trained):
    cosines = cosines_of([0, 0, 1, 1, 1], 3, 1.5, seed)
    judgement = parts_in_turn._Judgement.of(by_part(cosines, 3), earlier, is_trained=is_trained)
    orders = list(permutations(range(5)))[::7]
    found = judgement._compute_best_gains(np.array(orders))
    expected = [
        written_out.best_gain(cosines, 3, earlier, list(order), is_trained) for order in orders
    ]
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_cuts_are_those_of_the_dendrogram(seed):
    draw = np.random.default_rng(seed)
    similarity = draw.normal(size=(40, 40))
    similarity = (similarity + similarity.T) / 2
    mine = parts_in_turn._cut_into_all_numbers(similarity)
    np.fill_diagonal(similarity, 1.0)
    theirs = _cut_dendrogram(similarity)
    assert mine.shape == theirs.shape
    for one, other in zip(mine, theirs, strict=True):
        assert is_same_partition(one, other)
        assert set(one) == set(range(one.max() + 1))


@pytest.mark.parametrize("is_trained", [False, True])
def test_shuffled_clients_of_the_last_part_have_e_values_with_a_mean_of_at_most_one(is_trained):
    """Given the first part, all 120 orders of the second are equally likely without groups."""
    cosines = by_part(cosines_of([0, 0, 1, 1, 1], 2, 1.0, 3), 2)
    e_values = []
    for seed, order in enumerate(map(list, permutations(range(5)))):
        shuffled = cosines.copy()
        shuffled[1, 1] = cosines[1, 1][np.ix_(order, order)]
        shuffled[1, 0], shuffled[0, 1] = cosines[1, 0][order], cosines[0, 1][:, order]
        cells = shuffled.transpose(2, 0, 3, 1).reshape(10, 10)
        for again in range(4):
            draw = np.random.default_rng([seed, again])
            e_values.append(
                compute_e_value_by_parts(cells, 2, draw, is_trained=is_trained, shuffles=50)
            )
    assert np.mean(e_values) <= 1 + 3 * np.std(e_values) / len(e_values) ** 0.5
    assert max(e_values) > 1.5  # the true order is among the best


def test_without_groups_products_of_steps_have_a_mean_of_about_one_at_most():
    """Four parts of 12 clients: 300 checks; a product above 1000 would be one in a thousand."""
    e_values = [
        compute_e_value_by_parts(
            cosines_of([0] * 12, 4, 2.0, seed),
            4,
            np.random.default_rng(seed),
            is_trained=True,
            shuffles=1000,
        )
        for seed in range(300)
    ]
    assert np.median(e_values) < 1
    assert np.mean(np.array(e_values) >= 100) <= 0.01 + 3 * (0.01 / 300) ** 0.5


def test_groups_have_e_values_far_above_the_number_of_shuffles():
    cosines = cosines_of([0, 1, 2, 3] * 5, 4, 0.7, 0)
    for is_trained in (False, True):
        draw = np.random.default_rng(0)
        assert compute_e_value_by_parts(cosines, 4, draw, is_trained=is_trained) > 1e7


def test_one_client_shows_nothing():
    draw = np.random.default_rng(0)
    assert compute_e_value_by_parts(np.zeros((4, 4)), 4, draw, is_trained=True) == LEAST


def test_of_many_clients_a_sample_is_shuffled(monkeypatch):
    monkeypatch.setattr(parts_in_turn, "LARGEST_TESTED_BY_PARTS", 12)
    seen: list[int] = []
    sampled = parts_in_turn._Judgement._compute_best_gains

    def look(self, orders):
        seen.append(orders.shape[1])
        return sampled(self, orders)

    monkeypatch.setattr(parts_in_turn._Judgement, "_compute_best_gains", look)
    cosines = cosines_of([0, 1] * 20, 3, 0.5, 1)
    e_value = compute_e_value_by_parts(cosines, 3, np.random.default_rng(0), is_trained=True)
    assert set(seen) == {12}
    assert e_value > 100


def test_no_more_shuffles_are_drawn_than_allowed(monkeypatch):
    drawn = 0
    compute = parts_in_turn._Judgement._compute_best_gains

    def count(self, orders):
        nonlocal drawn
        drawn += len(orders)
        return compute(self, orders)

    monkeypatch.setattr(parts_in_turn._Judgement, "_compute_best_gains", count)
    cosines = cosines_of([0, 1, 2, 3] * 5, 4, 0.7, 0)
    compute_e_value_by_parts(cosines, 4, np.random.default_rng(0), is_trained=True)
    assert drawn == 9999 + 3  # and the true order in each of three steps


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("truth", [[0] * 9 + [1] * 5 + [2] * 3, [0, 1] * 6])
def test_the_partition_to_adopt_is_the_true_one(truth, parts):
    found = find_clusters_by_parts(cosines_of(truth, parts, 0.6, 2), parts)
    assert is_same_partition(found.labels, np.array(truth))
    assert found.gain > 0


def test_with_two_parts_numbers_of_clusters_gain_as_with_two_halves():
    draw = np.random.default_rng(5)
    rows = np.eye(30)[[0, 0, 0, 1, 1, 1, 2, 2]][:, None] + draw.normal(size=(8, 2, 30)) / 6
    signatures = torch.from_numpy(rows)
    by_parts = find_clusters_by_parts(compute_part_similarity(signatures), 2)
    by_halves = find_clusters(Replicates(*signatures.unbind(1)))
    true_order = np.arange(8)[None]
    np.testing.assert_allclose(
        by_parts.across.compute_gains(true_order),
        by_halves.across.compute_gains(true_order),
        atol=1e-12,
    )
    assert is_same_partition(by_parts.labels, by_halves.labels)
    assert by_parts.limit_clusters(2).labels.max() == 1
