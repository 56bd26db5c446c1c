from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import is_valid_linkage, linkage
from scipy.spatial.distance import pdist

from fedclade import ConfigError, UpdateError
from fedclade.clustering import spanning_tree
from fedclade.clustering.linkage import cut
from fedclade.clustering.similarity import METRICS, cosine_similarity
from fedclade.clustering.spanning_tree import (
    Edges,
    Points,
    find_bipartition_by_tree,
    find_optimal_bipartition,
    single_linkage,
)

NAMES = {"l1": "cityblock", "l2": "euclidean", "cosine": "cosine"}
SIZES = [(40, 30), (64, 64), (97, 500)]
"""Of a block and of the sample: many of both, blocks that divide n or do not, blocks beyond n."""


def heaps(n: int, d: int, seed: int, *, noise: float = 1.0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(
        draw.normal(size=(3, d))[draw.integers(0, 3, n)] + noise * draw.normal(size=(n, d))
    ).float()


def scipy_heights(rows: torch.Tensor, metric: str) -> np.ndarray:
    return linkage(pdist(rows.double().numpy(), NAMES[metric]), "single")[:, 2]


def as_sets(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("block", "sample"), SIZES)
@pytest.mark.parametrize("noise", [1.0, 1e-2])
def test_merges_are_those_of_scipy(metric, block, sample, noise):
    rows = heaps(233, 20, seed=block, noise=noise)
    found = single_linkage(rows, metric, block, sample)
    expected = linkage(pdist(rows.double().numpy(), NAMES[metric]), "single")
    assert is_valid_linkage(found)
    np.testing.assert_allclose(found[:, 2], expected[:, 2], rtol=1e-6, atol=1e-6)
    for n_clusters in (2, 3, 20):
        assert as_sets(cut(found, n_clusters)) == as_sets(cut(expected, n_clusters))


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_merges_of_10000_clients_are_those_of_scipy(metric):
    rows = heaps(10_000, 128, seed=0)
    found, expected = (
        single_linkage(rows, metric),
        linkage(pdist(rows.double().numpy(), NAMES[metric]), "single"),
    )
    np.testing.assert_allclose(found[:, 2], expected[:, 2], rtol=1e-6)
    assert as_sets(cut(found, 2)) == as_sets(cut(expected, 2))


@given(
    n=st.integers(2, 30),
    d=st.integers(1, 4),
    block=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("metric", METRICS)
def test_ties_and_equal_rows_change_no_height(metric, n, d, block, seed):
    """Small whole numbers tie in great number, and are exact; rows of zeros are among them."""
    rows = torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, (n, d))).float()
    found = single_linkage(rows, metric, block, sample=3)
    expected = linkage(1 - cosine_similarity(rows)[np.triu_indices(n, 1)], "single")[:, 2]
    if metric != "cosine":
        expected = scipy_heights(rows, metric)
    assert is_valid_linkage(found)
    np.testing.assert_allclose(found[:, 2], expected, rtol=1e-6, atol=2e-6)


@given(
    m=st.integers(2, 60),
    seed=st.integers(0, 2**32 - 1),
    sizes=st.sampled_from([(4, 3), (16, 9), (64, 64)]),
)
@settings(max_examples=30, deadline=None)
def test_the_bipartition_is_that_of_the_matrix(m, seed, sizes):
    rows, ids = heaps(m, 6, seed), np.random.default_rng(seed).permutation(1000)[:m].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(spanning_tree.BLOCK, "cpu", sizes[0])
        patch.setattr(spanning_tree, "SAMPLE", sizes[1])
        found, expected = (
            find_bipartition_by_tree(rows, ids),
            find_optimal_bipartition(cosine_similarity(rows), ids),
        )
    assert found.alpha_cross_max == pytest.approx(expected.alpha_cross_max, abs=1e-6)
    heights = linkage(pdist(rows.double().numpy(), "cosine"), "single")[:, 2]
    if m == 2 or heights[-1] - heights[-2] > 1e-5:
        assert (found.first, found.second) == (expected.first, expected.second)


@pytest.mark.parametrize("metric", METRICS)
def test_neither_blocks_nor_the_sample_change_the_merges(metric):
    rows = heaps(150, 8, seed=5)
    some = [
        single_linkage(rows, metric, block, sample)
        for block, sample in [(7, 2), (50, 20), (150, 149), (9, 150)]
    ]
    assert some[1:]
    for each in some[1:]:
        np.testing.assert_array_equal(each, some[0])


@pytest.mark.parametrize("metric", METRICS)
def test_clients_that_are_all_equal_merge_at_0(metric):
    rows = torch.randn(300, generator=torch.Generator().manual_seed(0)).expand(60, -1)
    assert single_linkage(rows, metric, 8, 8)[:, 2].tolist() == [0.0] * 59


def test_near_rows_far_from_the_origin_are_told_apart():
    """Norm 1,000, distances of 1e-3: in float32 the squares of norms differ by 0.06 when they should not at all."""
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(1000 * np.eye(1, 40) + 1e-3 * draw.normal(size=(200, 40))).float()
    np.testing.assert_allclose(
        single_linkage(rows, "l2", 16, 16)[:, 2], scipy_heights(rows, "l2"), rtol=1e-4
    )


@pytest.mark.parametrize("scale", [1e-30, 1e17])
def test_lengths_are_neither_too_large_nor_too_small(scale):
    """The squares of 1e-30 are zeros in float32."""
    rows = heaps(50, 5, seed=2)
    np.testing.assert_allclose(
        single_linkage(rows * scale, "l2", 9, 9)[:, 2] / scale, scipy_heights(rows, "l2"), 1e-6
    )


def test_no_distances_are_held_but_those_of_two_blocks_and_of_the_sample(monkeypatch):
    largest, kept, build_key_function, joined = (
        [0],
        [0],
        Points.build_key_function,
        Edges.concatenate,
    )

    def recorded(points, *some):
        keys_to = build_key_function(points, *some)

        def recording(others):
            keys, scale = keys_to(others)
            largest[0] = max(largest[0], keys.numel())
            return keys, scale

        return recording

    def joining(some):
        kept[0] = max(kept[0], sum(len(each.first) for each in some))
        return joined(some)

    monkeypatch.setattr(Points, "build_key_function", recorded)
    monkeypatch.setattr(Edges, "concatenate", joining)
    monkeypatch.setattr(spanning_tree, "MOST_EDGES", 1000)
    single_linkage(heaps(600, 8, seed=3), "l2", block=32, sample=40)
    assert largest[0] <= spanning_tree.SAMPLE * 40
    assert kept[0] <= 600 + 1000 + 32 * 32 < 600 * 599 / 50


def test_few_pairs_are_lighter_than_the_first_tree():
    """About n²/m of a sample of m."""
    n, m = 2000, 200
    points = Points(heaps(n, 64, seed=0), "cosine")
    tree = spanning_tree._build_first_tree(points, m)
    assert (
        sum(len(each.first) for each in spanning_tree._find_lighter_pairs(points, tree, 500))
        < 2 * n**2 / m
    )


def test_of_long_signatures_a_block_has_fewer(monkeypatch):
    """Down to 64, of which the distances still come by one product."""
    rows, asked, build_key_function = heaps(200, 300, seed=1), [], Points.build_key_function
    expected = single_linkage(rows, "cosine")
    monkeypatch.setattr(spanning_tree, "BLOCK_ENTRIES", 70 * 300)
    monkeypatch.setattr(
        Points,
        "build_key_function",
        lambda self, some, *rest: asked.append(len(some)) or build_key_function(self, some, *rest),
    )
    np.testing.assert_array_equal(single_linkage(rows, "cosine"), expected)
    assert max(asked) == 70


def test_one_client_has_no_merges():
    assert single_linkage(torch.ones(1, 3), "l2").shape == (0, 4)


def test_signatures_that_are_not_finite_are_refused():
    rows = torch.ones(4, 2)
    rows[1, 0], rows[3, 1] = torch.nan, torch.inf
    with pytest.raises(
        UpdateError,
        match="signatures of clients should be finite, got 2 with NaN or infinite entries",
    ):
        single_linkage(rows, "cosine")


def test_an_unknown_metric_suggests_the_nearest():
    with pytest.raises(ConfigError, match="unknown metric 'l3'"):
        single_linkage(torch.ones(2, 2), "l3")


def test_a_single_client_cannot_be_split():
    with pytest.raises(UpdateError, match="a bi-partition needs at least 2 clients, got 1"):
        find_bipartition_by_tree(torch.ones(1, 2), [4])
