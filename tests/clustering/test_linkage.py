from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import linkage
from scipy.stats import t as student
from sklearn.cluster import AgglomerativeClustering

from fedclade import ConfigError, UpdateError
from fedclade.clustering.linkage import (
    LINKAGES,
    agglomerate,
    choose_cut,
    count_clusters_by_gap,
    cut,
    find_cut_height,
    find_largest_gap,
    merge_by_centroids,
)
from fedclade.clustering.similarity import METRICS, compute_distances
from tests.reference import fl_hc as reference

PAIRS = [
    (metric, linkage)
    for metric in METRICS
    for linkage in LINKAGES
    if linkage != "ward" or metric == "l2"
]


def vectors(m: int, d: int, seed: int) -> torch.Tensor:
    """Return three loose heaps of updates."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy(
        draw.normal(size=(3, d))[draw.integers(0, 3, m)] + draw.normal(size=(m, d))
    ).float()


def as_sets(labels) -> set[frozenset[int]]:
    return {
        frozenset(np.flatnonzero(labels == label).tolist())
        for label in set(np.asarray(labels).tolist())
    }


@pytest.mark.parametrize(("metric", "linkage"), PAIRS)
@given(m=st.integers(2, 9), d=st.integers(2, 6), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_merges_are_those_of_the_definitions(metric, linkage, m, d, seed):
    """Section I-C of the FL+HC paper, by brute force: heights, and the clusters after every merge."""
    x = vectors(m, d, seed)
    found = agglomerate(compute_distances(x, metric), linkage)
    expected = reference.merges(dict(enumerate(x.double().numpy())), metric, linkage)
    np.testing.assert_allclose(
        found[:, 2], [height for _, _, height in expected], rtol=1e-4, atol=1e-6
    )
    clusters = {frozenset([i]) for i in range(m)}
    for done, (a, b, _) in enumerate(expected, start=1):
        clusters = clusters - {a, b} | {a | b}
        assert as_sets(cut(found, m - done)) == clusters


@pytest.mark.parametrize(("metric", "linkage"), PAIRS)
@pytest.mark.parametrize("n_clusters", [1, 2, 3, 7, 40])
def test_clusters_are_those_of_scikit_learn(metric, linkage, n_clusters):
    x = vectors(40, 12, seed=n_clusters)
    name = {"l1": "manhattan", "l2": "euclidean", "cosine": "cosine"}[metric]
    theirs = AgglomerativeClustering(n_clusters, metric=name, linkage=linkage).fit(
        x.double().numpy()
    )
    assert as_sets(cut(agglomerate(compute_distances(x, metric), linkage), n_clusters)) == as_sets(
        theirs.labels_
    )


@pytest.mark.parametrize(("metric", "linkage"), PAIRS)
def test_heights_never_fall(metric, linkage):
    """Monotonicity, as section I-C has it."""
    heights = agglomerate(compute_distances(vectors(60, 5, 1), metric), linkage)[:, 2]
    assert (np.diff(heights) >= 0).all()


@given(m=st.integers(1, 12), data=st.data())
@settings(max_examples=50)
def test_a_cut_leaves_so_many_clusters_the_largest_first(m, data):
    n_clusters = data.draw(st.integers(1, m))
    x = torch.from_numpy(np.random.default_rng(m).integers(0, 3, (m, 2))).float()  # with many ties
    labels = cut(agglomerate(compute_distances(x, "l1"), "single"), n_clusters)
    assert sorted(set(labels.tolist())) == list(range(n_clusters))
    keys = [
        (-np.count_nonzero(labels == k), np.flatnonzero(labels == k)[0]) for k in range(n_clusters)
    ]
    assert all(first < second for first, second in pairwise(keys))


@pytest.mark.parametrize("metric", METRICS)
@given(m=st.integers(1, 9), d=st.integers(2, 6), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_centroid_merges_are_those_of_section_i_c(metric, m, d, seed):
    """By brute force: the averages of the clusters are compared, whatever the heights of the merges before."""
    x = vectors(m, d, seed)
    found = merge_by_centroids(x, metric)
    expected = reference.merges(dict(enumerate(x.double().numpy())), metric, "centroid")
    np.testing.assert_allclose(
        found[:, 2], [height for _, _, height in expected], rtol=1e-4, atol=1e-6
    )
    clusters = {frozenset([i]) for i in range(m)}
    for done, (a, b, _) in enumerate(expected, start=1):
        clusters = clusters - {a, b} | {a | b}
        assert as_sets(cut(found, m - done)) == clusters


def test_centroid_linkage_of_euclidean_distances_is_that_of_scipy():
    x = vectors(40, 12, seed=3)
    np.testing.assert_allclose(
        merge_by_centroids(x, "l2"), linkage(x.double().numpy(), "centroid"), rtol=1e-5
    )


def test_centroid_linkage_stops_at_the_first_merge_above_the_threshold():
    """The third corner of a triangle is nearer to the middle of a side than to its ends."""
    triangle = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 1.8]])
    heights = merge_by_centroids(triangle, "l2")[:, 2]
    assert heights.tolist() == pytest.approx([2.0, 1.8])
    assert [choose_cut(heights, T, None)[0] for T in (1.9, 2.0)] == [3, 1]


def test_centroid_linkage_refuses_vectors_that_are_not_finite():
    x = vectors(4, 3, 0)
    x[1, 2], x[3, 0] = torch.nan, torch.inf
    with pytest.raises(
        UpdateError,
        match="updates to be clustered should be finite, got 2 with NaN or infinite entries",
    ):
        merge_by_centroids(x, "l1")


def test_an_unknown_linkage_suggests_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"unknown linkage 'complet'; did you mean 'complete'\? \(known: average, com",
    ):
        agglomerate(np.ones(3), "complet")


def test_distances_that_are_not_finite_are_refused():
    with pytest.raises(
        UpdateError, match="distances of clients should be finite, got 2 that are NaN or infinite"
    ):
        agglomerate(np.array([1.0, np.nan, np.inf]), "average")


# How many clusters


def bound(heights) -> float:
    """Student's 97.5 % quantile times the standard deviation."""
    n, mean = len(heights), sum(heights) / len(heights)
    return student.ppf(0.975, n - 1) * (sum((h - mean) ** 2 for h in heights) / (n - 1)) ** 0.5


def test_a_gap_counts_if_it_is_wider_than_the_heights_below_it_vary():
    noise = [1.0, 1.1, 1.15, 1.3, 1.35]
    wide, narrow = noise[-1] + bound(noise) + 1e-9, noise[-1] + bound(noise) - 1e-9
    assert wide / noise[-1] > 1.3 / 1.15, "the gap is not the largest"
    assert count_clusters_by_gap(np.array([*noise, wide, wide * 1.01])) == 3
    assert count_clusters_by_gap(np.array([*noise, narrow, narrow * 1.01])) == 1


def test_the_largest_gap_is_relative():
    """From 1 to 3 is less than from 3.2 to 6, but three times as high."""
    heights = np.array([0.98, 0.99, 1.0, 1.0, 1.01, 3.0, 3.2, 6.0])
    assert find_largest_gap(heights) == count_clusters_by_gap(heights) == 4
    assert find_cut_height(heights, 4) == (1.01 + 3.0) / 2


def test_there_are_no_more_clusters_than_half_of_the_clients():
    """Of eight clients two merge far below all others: that makes no seven clusters."""
    heights = np.array([0.1, 1.0, 1.0, 1.01, 1.02, 1.02, 1.04])
    assert find_largest_gap(heights) == 2
    assert count_clusters_by_gap(heights) == 1


@pytest.mark.parametrize("m", [1, 2, 3])
def test_fewer_than_four_clients_are_one_cluster(m):
    heights = np.array([0.1, 100.0][: m - 1])
    assert find_largest_gap(heights) == count_clusters_by_gap(heights) == 1


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_equal_updates_are_one_cluster(metric, m):
    x = torch.randn(600, generator=torch.Generator().manual_seed(0)).expand(m, -1)
    heights = agglomerate(compute_distances(x, metric), "average")[:, 2]
    assert heights.tolist() == [0] * (m - 1)
    assert count_clusters_by_gap(heights) == 1


@pytest.mark.parametrize(("metric", "linkage"), PAIRS)
def test_groups_of_equal_updates_are_clusters(metric, linkage):
    x = torch.eye(600)[[0, 1, 2, 0, 1, 2, 0, 0]]
    merges = agglomerate(compute_distances(x, metric), linkage)
    assert count_clusters_by_gap(merges[:, 2]) == 3
    assert cut(merges, 3).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(("metric", "linkage"), PAIRS)
def test_updates_that_are_all_equally_far_apart_are_one_cluster(metric, linkage):
    heights = agglomerate(compute_distances(torch.eye(10), metric), linkage)[:, 2]
    assert count_clusters_by_gap(heights) == 1


@pytest.mark.parametrize(("n_clusters", "height"), [(4, 0.5), (3, 1.5), (2, 2.5), (1, None)])
def test_a_cut_is_drawn_halfway_between_two_merges(n_clusters, height):
    assert find_cut_height(np.array([1.0, 2.0, 3.0]), n_clusters) == height


def test_where_heights_fall_a_merge_counts_with_the_largest_before_it():
    """As those of centroid linkage may: from 0.5 to 4.9 is no gap, since clusters merged at 5 before."""
    heights = np.array([1.0, 1.1, 1.0, 1.2, 1.1, 1.0, 1.1, 1.2, 1.1, 1.2, 5.0, 0.5, 4.9, 5.2])
    assert find_largest_gap(heights) == count_clusters_by_gap(heights) == 5
    assert find_cut_height(np.array([1.0, 5.0, 2.0, 6.0]), 2) == 5.5
    assert find_cut_height(np.array([1.0, 5.0, 2.0, 6.0]), 3) == 5.0
