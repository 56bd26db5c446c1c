"""Clusters by the updates of parts: against its reference, its level, and what it finds with few clients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedclade.clustering import (
    PartFinding,
    average_client_similarity,
    build_views,
    choose_part_count,
    compute_gain_by_parts,
    compute_lowest_p_value,
    compute_part_similarity,
    estimate_gammas,
    estimate_noise,
    find_by_parts,
    is_same_partition,
    linkage,
)
from fedclade.clustering.linkage import Dendrograms
from fedclade.clustering.part_test import improve_partition
from tests.reference import part_test as written_out


def parts_of(
    truth: list[int], parts: int, noise: float, seed: int, heavy: bool = False
) -> torch.Tensor:
    """Return signatures [n, r, 30]: the mean of a client's cluster, and noise of its own in each part."""
    draw = np.random.default_rng(seed)
    means = np.random.default_rng(1000 + seed).normal(size=(max(truth) + 1, 30))
    shape = len(truth), parts, 30
    drawn = draw.standard_t(2, shape) if heavy else draw.normal(size=shape)
    return torch.from_numpy(means[truth][:, None] + noise * drawn)


def found(signatures: torch.Tensor, level: float, seed: int = 0) -> PartFinding:
    """Find clusters as rcfl does."""
    draw, cosines, parts = (
        np.random.default_rng(seed),
        compute_part_similarity(signatures),
        signatures.shape[1],
    )
    return find_by_parts(cosines, parts, level, draw, max(level, 0.01))


@pytest.mark.parametrize("seed", range(5))
def test_similarity_prunings_and_statistic_are_as_written_out(seed):
    cosines = compute_part_similarity(parts_of([0, 0, 0, 1, 1, 2], 3, 2.0, seed))
    similar = average_client_similarity(cosines, 3)
    np.testing.assert_allclose(similar, written_out.similarity(cosines, 3), atol=1e-12)
    trees = Dendrograms(np.stack([similar, similar[::-1, ::-1]]))
    np.testing.assert_allclose(
        trees.find_critical_costs(), written_out.steepest(similar), atol=1e-9
    )
    one = written_out.worth(similar, [list(range(6))])
    for cost in (0.0, 0.05, 0.3, 2.0):
        labels = trees.find_labels(cost)
        # of k clusters at k costs
        gained = compute_gain_by_parts(similar, labels, cost) * 6 + one - cost
        assert gained == pytest.approx(written_out.best(similar, cost))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("cost", [0.0, 0.1, 0.4])
def test_single_clients_move_until_no_move_makes_the_partition_worth_more(seed, cost):
    similar = average_client_similarity(
        compute_part_similarity(parts_of([0, 0, 0, 0, 1, 1, 1, 2, 2], 3, 3.0, seed)), 3
    )

    def worth(labels) -> float:
        clusters = [np.flatnonzero(labels == k).tolist() for k in np.unique(labels)]
        return written_out.worth(similar, clusters) - cost * len(clusters)

    start = np.random.default_rng(seed).integers(0, 3, 9)
    _, start = np.unique(start, return_inverse=True)
    labels = improve_partition(similar, start, cost)
    assert worth(labels) >= worth(start)
    for client in range(9):
        for cluster in np.unique(labels):
            other = labels.copy()
            other[client] = cluster
            assert worth(other) <= worth(labels) + 1e-8


def test_a_client_that_linkage_put_into_the_wrong_branch_moves():
    """Client 5 is most like client 0, but more like its own cluster on average."""
    similar = np.full((6, 6), 0.0)
    similar[:3, :3] = similar[3:, 3:] = 0.5
    similar[5, 0] = similar[0, 5] = 0.8
    wrong = np.array([0, 0, 0, 1, 1, 0])
    assert improve_partition(similar, wrong, 0.1).tolist() == [0, 0, 0, 1, 1, 1]
    assert wrong.tolist() == [0, 0, 0, 1, 1, 0], "what was given stays as it was"


def test_dendrograms_made_together_are_those_made_one_by_one(monkeypatch):
    similar = np.stack(
        [
            average_client_similarity(compute_part_similarity(parts_of([0] * 9, 2, 1.0, seed)), 2)
            for seed in range(20)
        ]
    )
    together = Dendrograms(similar)
    monkeypatch.setattr(linkage, "MERGED_TOGETHER", 0)
    one_by_one = Dendrograms(similar)
    np.testing.assert_allclose(
        together.find_critical_costs(), one_by_one.find_critical_costs(), atol=1e-12
    )
    assert is_same_partition(together.find_labels(0.3), one_by_one.find_labels(0.3))


def test_cosines_are_of_unit_vectors_without_those_of_a_part_with_itself():
    signatures = parts_of([0, 1], 2, 1.0, 0)
    flat = torch.nn.functional.normalize(signatures.flatten(0, 1), dim=1)
    expected = (flat @ flat.T).fill_diagonal_(0).numpy()
    np.testing.assert_allclose(compute_part_similarity(signatures), expected, atol=1e-12)
    assert (compute_part_similarity(torch.zeros(3, 2, 4)) == 0).all()


def test_the_second_view_scales_principal_coordinates_as_written_out():
    signatures = parts_of([0, 0, 1, 1, 2], 3, 2.0, 0)
    cosines = compute_part_similarity(signatures)
    plain, evened = build_views(cosines)
    assert plain is cosines
    np.testing.assert_allclose(
        evened, written_out.evened(signatures.flatten(0, 1).numpy()), atol=1e-9
    )


def test_views_do_not_hang_on_whose_a_part_is():
    cosines, order = (
        compute_part_similarity(parts_of([0, 0, 1, 1], 4, 1.0, 0)),
        np.random.default_rng(0).permutation(16),
    )
    views = build_views(cosines)
    assert len(views) == 2
    for view, shuffled in zip(views, build_views(cosines[np.ix_(order, order)]), strict=True):
        np.testing.assert_allclose(shuffled, view[np.ix_(order, order)], atol=1e-9)


def test_parts_beside_those_that_the_views_are_made_from_are_seen_alike():
    cosines = compute_part_similarity(parts_of([0, 0, 1, 1], 4, 1.0, 0))
    views = build_views(cosines)
    assert len(views) == 2
    for view, rows in zip(views, build_views(cosines, (cosines + np.eye(16))[:3]), strict=True):
        scale = rows[:, 5:] / view[:3, 5:]
        np.testing.assert_allclose(scale, np.repeat(scale[:, :1], 11, axis=1), rtol=1e-6)


def test_parts_that_are_all_alike_or_nothing_are_one_cluster():
    for signatures in (torch.ones(4, 3, 30), torch.zeros(4, 3, 30)):
        assert not found(signatures, 0.01).labels.any()


def test_clusters_that_strong_noise_in_a_few_directions_hides_are_found():
    """Such as how many examples of each label a part has; by cosines alone little is to be seen."""
    truth, directions = [0, 0, 0, 0, 1, 1, 1, 1], np.random.default_rng(0).normal(size=(2, 200))
    right = []
    for seed in range(5):
        draw = np.random.default_rng(seed)
        means, noise = 0.8 * draw.normal(size=(2, 200)), draw.normal(size=(8, 6, 200))
        shared = draw.normal(size=(8, 6, 2)) @ directions
        finding = found(torch.from_numpy(means[truth][:, None] + noise + shared), 0.005)
        right.append(finding.view == 1 and is_same_partition(finding.labels, np.array(truth)))
    assert sum(right) >= 3


def test_clusters_that_gain_less_than_noise_are_left_together(monkeypatch):
    signatures = parts_of([0, 0, 0, 1, 1, 1], 4, 0.8, 0)
    assert found(signatures, 0.01).labels.any()
    monkeypatch.setattr(
        "fedclade.clustering.part_test.estimate_noise", lambda similarity, parts: 100.0
    )
    finding = found(signatures, 0.01)
    assert finding.p_value <= 0.01
    assert not finding.labels.any()


@pytest.mark.parametrize(
    ("truth", "parts"),
    [
        ([0, 1], 8),
        ([0, 0, 1, 1], 5),
        ([0, 0, 0, 1, 1, 1], 4),
        ([0, 0, 1, 1, 2, 2, 3, 3], 4),
        ([0] * 9 + [1], 4),
        ([0] * 14 + [1, 1, 2, 2, 3, 3], 3),
        ([0, 1, 2, 3, 4] * 4, 3),
    ],
    ids=str,
)
def test_clusters_of_few_clients_and_single_clients_are_found(truth, parts):
    findings = [found(parts_of(truth, parts, 0.8, seed), 0.0017) for seed in range(3)]
    assert all(finding.p_value <= 0.0017 and finding.strength > 1 for finding in findings)
    # Inside of clusters that were found, one test in a hundred parts clients for nothing.
    assert sum(is_same_partition(finding.labels, np.array(truth)) for finding in findings) >= 2


@pytest.mark.parametrize(
    ("clients", "parts", "noise", "heavy"),
    [(2, 7, 1.0, False), (4, 5, 3.0, False), (6, 4, 0.3, True), (10, 3, 1.0, True)],
)
def test_clients_of_one_distribution_are_parted_no_more_often_than_the_level(
    clients, parts, noise, heavy
):
    """Type-I error: of 100 federations 10 may be parted at level 0.1, and 20 are with probability 0.002."""
    parted = [
        found(parts_of([0] * clients, parts, noise, seed, heavy), 0.1, seed) for seed in range(100)
    ]
    # exact: 10 are expected, not none
    assert 2 <= sum(finding.p_value <= 0.1 for finding in parted) < 20
    assert all(finding.p_value <= 0.1 for finding in parted if finding.labels.any())


def test_power_falls_as_noise_grows():
    truth = [0, 0, 0, 1, 1, 1]
    power = [
        np.mean(
            [
                is_same_partition(
                    found(parts_of(truth, 4, noise, seed), 0.002).labels, np.array(truth)
                )
                for seed in range(1, 7)
            ]
        )
        for noise in (0.5, 3.0, 20.0)
    ]
    assert power[0] >= 0.8
    assert power[-1] <= 0.1
    assert power == sorted(power, reverse=True)


def test_of_many_clients_some_are_tested_and_the_others_join_them(monkeypatch):
    monkeypatch.setattr("fedclade.clustering.part_test.LARGEST_TESTED_BY_PARTS", 16)
    truth = [0, 1, 2] * 20
    assert is_same_partition(found(parts_of(truth, 2, 0.6, 0), 0.01).labels, np.array(truth))


def test_the_order_of_clients_changes_nothing_but_the_order():
    signatures, order = parts_of([0, 0, 0, 1, 1, 1, 2, 2], 3, 0.8, 1), [5, 2, 7, 0, 1, 6, 3, 4]
    one, other = found(signatures, 0.01), found(signatures[order], 0.01)
    assert is_same_partition(one.labels[order], other.labels)


def test_rounding_changes_neither_the_clusters_nor_their_order():
    """A level of 0.3 is one at which what is drawn decides, so it has to be drawn in the same order."""
    for seed in range(12):
        signatures = parts_of([0, 1, 2, 3] * 2, 2, 2.0, seed)
        rounded = signatures * (
            1 + 1e-7 * torch.randn(signatures.shape, generator=torch.Generator().manual_seed(seed))
        )
        one, other = (found(each, 0.3, seed).labels.tolist() for each in (signatures, rounded))
        assert one == other
        assert list(dict.fromkeys(one)) == [*range(max(one) + 1)], "numbered as they first appear"


@pytest.mark.parametrize(
    ("clients", "examples", "parts"),
    [
        (2, 300, 7),
        (4, 300, 5),
        (6, 300, 4),
        (10, 300, 4),
        (20, 300, 3),
        (100, 300, 3),
        (1000, 300, 2),
        (20, 20, 2),
        (2, 5, 2),
        (10, 600, 4),
        (10, 1200, 8),
        (10, 4800, 8),
        (40, 4800, 4),
        (100, 4800, 3),
        (4, 899, 5),
        (4, 900, 6),  # 150 examples in each part are plenty
        (23, 5000, 6),  # 160 parts of all clients together
        (6, 29, 2),
        (6, 30, 3),  # no part has fewer than 10 examples
    ],
)
def test_parts_are_the_fewest_that_tell_one_client_and_more_where_data_are_plenty(
    clients, examples, parts
):
    assert choose_part_count(clients, examples, 0.01, 10) == parts


def test_the_lowest_p_value_is_one_over_the_ways_to_part_equally():
    assert compute_lowest_p_value(2, 2) == pytest.approx(2 / math.comb(4, 2))
    assert compute_lowest_p_value(3, 2) == pytest.approx(1 / math.comb(6, 2))


def test_a_level_that_no_shuffles_resolve_is_reached_by_nothing_and_takes_no_time():
    assert compute_lowest_p_value(40, 4) == pytest.approx(1e-6)
    signatures = parts_of([0, 0, 0, 1, 1, 1], 4, 0.5, seed=0)
    assert found(signatures, 0.001).labels.any()
    assert not found(signatures, 1e-12).labels.any()


def test_noise_and_gamma_are_those_of_whole_updates():
    """Of r parts, whose cosine is 1/(1 + r·γ²), the mean has an r-th of the noise."""
    mean = torch.zeros(40, 4, 3000, dtype=torch.float64)
    mean[..., 0] = 1
    draw = torch.Generator().manual_seed(0)
    signatures = mean + math.sqrt(4 * 0.25 / 3000) * torch.randn(
        mean.shape, generator=draw, dtype=torch.float64
    )
    similarity = average_client_similarity(compute_part_similarity(signatures), 4)
    assert np.median(estimate_gammas(similarity, 4)) == pytest.approx(0.5, rel=0.05)
    assert estimate_noise(similarity, 4) == pytest.approx((1 - 1 / 2) / 4, rel=0.05)
