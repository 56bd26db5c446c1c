from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade import ConfigError
from fedclade.clustering import similarity
from fedclade.clustering.similarity import k_means, ternary_similarity
from tests.reference.fedgroup import tightest, zeta


def updates(n=9, d=40, seed=0) -> torch.Tensor:
    """Return updates of very different lengths."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=draw) * torch.logspace(-1, 1, n)[:, None]


def generator(seed=0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("directions", [1, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_eqs_7_to_9_with_the_singular_value_decomposition_written_out(directions, seed):
    """Up to the sign of each singular vector."""
    delta_W = updates(seed=seed).double().numpy()
    V = np.linalg.svd(delta_W.T, full_matrices=False)[0][:, :directions]
    expected = np.array([zeta(delta, V) for delta in delta_W])
    found = ternary_similarity(updates(seed=seed), directions)
    assert found.shape == (9, directions)
    np.testing.assert_allclose(np.abs(1 - 2 * found), np.abs(1 - 2 * expected), atol=2e-5)
    for column, wanted in zip(found.T, expected.T, strict=True):
        assert np.allclose(column, wanted, atol=2e-5) or np.allclose(column, 1 - wanted, atol=2e-5)


@pytest.mark.parametrize("clients", [updates(12), updates(3).repeat(4, 1), torch.zeros(12, 5)])
def test_of_many_updates_only_the_directions_asked_for_are_computed_and_are_the_same(
    clients, monkeypatch
):
    whole = ternary_similarity(clients)
    monkeypatch.setattr(similarity, "LARGEST_DECOMPOSED", 4)
    np.testing.assert_allclose(ternary_similarity(clients), whole, atol=1e-5)


def test_an_update_along_a_base_direction_is_0_against_it_1_and_across_it_half():
    """The axes are the base directions, which may point either way; the longest updates lie along the first."""
    found = ternary_similarity(
        torch.tensor([[2.0, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 0.5]])
    )
    assert sorted(found[:, 0].tolist()) == [0, 0.5, 0.5, 0.5, 1]
    assert sorted(found[:2, 0].tolist()) == sorted(found[2:4, 1].tolist()) == [0, 1]
    assert found[:, 2].tolist() == [0.5, 0.5, 0.5, 0.5, 0]


def test_an_update_of_zeros_is_at_right_angles_to_all():
    assert ternary_similarity(torch.tensor([[0.0, 0], [1, 0]])).tolist() == [
        [0.5, 0.5, 0.5],
        [0, 0.5, 0.5],
    ]
    assert ternary_similarity(torch.zeros(4, 3)).tolist() == [[0.5] * 3] * 4


def test_directions_beyond_the_rank_of_the_updates_tell_nothing_apart():
    """Two updates have two directions at most, and equal updates have one."""
    assert ternary_similarity(updates(2)).shape == (2, 3)
    assert (ternary_similarity(updates(2))[:, 2] == 0.5).all()
    equal = updates(1).repeat(6, 1)
    assert len(np.unique(ternary_similarity(equal), axis=0)) == 1


def test_rounding_of_float32_makes_no_difference():
    signatures = updates()
    noise = 1 + 1e-7 * torch.randn(signatures.shape, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(
        ternary_similarity(signatures * noise), ternary_similarity(signatures), atol=1.1e-5
    )
    equal = updates(1).repeat(6, 1) * noise[:6]
    assert len(np.unique(ternary_similarity(equal), axis=0)) == 1


@given(st.permutations(range(9)))
def test_the_order_of_updates_changes_nothing_but_the_order(order):
    np.testing.assert_allclose(
        ternary_similarity(updates()[list(order)]),
        ternary_similarity(updates())[list(order)],
        atol=1.1e-5,
    )


def test_the_order_of_entries_changes_nothing():
    """Permutation privacy: P·ΔW has the same products as ΔW."""
    shuffled = updates()[:, torch.randperm(40, generator=torch.Generator().manual_seed(2))]
    np.testing.assert_allclose(
        ternary_similarity(shuffled), ternary_similarity(updates()), atol=1.1e-5
    )


POINTS = np.array([[0.0, 0], [5, 5], [0, 0.1], [5, 5.1], [9, 0], [0.1, 0], [9, 0.2]])


@pytest.mark.parametrize("seed", range(5))
def test_k_means_finds_what_lies_apart_and_numbers_it_as_it_appears(seed):
    assert k_means(POINTS, 3, generator(seed)).tolist() == [0, 1, 0, 1, 2, 0, 2]


@given(st.integers(0, 50), st.integers(1, 6))
@settings(max_examples=20)
def test_k_means_finds_the_tightest_clusters_there_are(seed, m):
    points = np.random.default_rng(seed).random((7, 3))
    labels = k_means(points, m, generator())
    parts = [np.flatnonzero(labels == k).tolist() for k in range(m)]
    assert parts == tightest(points, m)


@given(st.permutations(range(7)), st.integers(0, 3))
@settings(max_examples=20)
def test_the_order_of_points_changes_nothing_but_the_numbers(order, seed):
    points = np.random.default_rng(seed).random((7, 3))
    labels = k_means(points, 3, generator())
    back = k_means(points[list(order)], 3, generator())[np.argsort(order)]
    assert len(set(zip(labels.tolist(), back.tolist(), strict=True))) == 3


def test_the_draw_decides_only_what_is_random():
    points = np.random.default_rng(0).random((40, 3))
    assert k_means(points, 5, generator(1)).tolist() == k_means(points, 5, generator(1)).tolist()


def test_fewer_distinct_points_than_clusters_leave_the_last_clusters_empty():
    points = np.array([[1.0, 0], [0, 1], [1, 0], [0, 1]])
    assert k_means(points, 3, generator()).tolist() == [0, 1, 0, 1]
    assert k_means(np.ones((5, 3)), 4, generator()).tolist() == [0] * 5


def test_k_means_counts_equal_points():
    """Of 0, 3 and 5.5 the two that share a cluster are those which that costs least: 3 joins the side that is light."""
    assert k_means(np.array([[0.0]] * 5 + [[3.0], [5.5], [5.5]]), 2, generator()).tolist() == [
        0
    ] * 5 + [1, 1, 1]
    assert k_means(np.array([[0.0], [3.0], *[[5.5]] * 5]), 2, generator()).tolist() == [
        0,
        0,
        *[1] * 5,
    ]


@pytest.mark.parametrize(
    ("points", "told"),
    [
        (
            np.zeros((0, 3)),
            "points should be an array of numbers [n, k] with at least 1 point, got float64 of shape [0, 3]",
        ),
        (np.zeros(3), "with at least 1 point, got float64 of shape [3]"),
        ("x", "got <U1 of shape []"),
        (None, "got object of shape []"),
        ([[1, 2], [3]], "points should be an array of numbers [n, k], got [[1, 2], [3]]"),
        (np.array([["a"]]), "got <U1 of shape [1, 1]"),
        (
            np.array([[0, 1], [np.nan, 1]]),
            "points should be finite numbers, got array([nan,  1.]) in row 1",
        ),
        (
            torch.zeros(2, 2, device="meta"),
            "points should be an array of numbers [n, k]: the tensor is on the 'meta'",
        ),
        (
            np.ma.masked_array([[1.0]], mask=True),
            "points should be an array of numbers [n, k]: 1 of 1 values are masked",
        ),
    ],
)
def test_points_that_are_none_are_refused(points, told):
    with pytest.raises(ConfigError) as caught:
        k_means(points, 2, generator())
    assert told in str(caught.value)


def test_k_means_needs_a_cluster_and_a_generator():
    with pytest.raises(ConfigError, match="n_clusters should be at least 1, got 0"):
        k_means(np.zeros((2, 2)), 0, generator())
    with pytest.raises(ConfigError, match="draw of k_means should be of type Generator, got 0"):
        k_means(np.zeros((2, 2)), 1, 0)
