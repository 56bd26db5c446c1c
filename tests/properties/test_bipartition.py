"""The optimal bi-partition against the paper's Algorithm 1 and against all bi-partitions there are."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedclade.clustering.spanning_tree import Bipartition, find_optimal_bipartition
from fedclade.core.errors import UpdateError
from tests.reference import bipartition as reference


def symmetric(upper: np.ndarray, m: int) -> np.ndarray:
    alpha = np.eye(m)
    alpha[np.triu_indices(m, 1)] = upper
    return np.triu(alpha) + np.triu(alpha, 1).T


def matrices(largest: int = 12):
    """Similarity matrices: with few values, so that they tie; with values a last bit apart; of noisy clusters."""
    few = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])
    last_bits = st.integers(0, 4).map(lambda k: 0.7 + k * 2.0**-53) | st.integers(0, 4).map(
        lambda k: k * 5e-324
    )
    whole_range = st.floats(-1, 1)

    @st.composite
    def one(draw):
        m = draw(st.integers(2, largest))
        if draw(st.booleans()):
            return noisy_clusters(m, draw(st.integers(0, 2**32 - 1)))
        entries = draw(st.sampled_from([few, last_bits, whole_range]))
        pairs = m * (m - 1) // 2
        return symmetric(np.array(draw(st.lists(entries, min_size=pairs, max_size=pairs))), m)

    return one()


def noisy_clusters(m: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 3, m)
    similar = np.where(np.equal.outer(labels, labels), 0.6, -0.3) + draw.normal(0, 0.4, (m, m))
    return symmetric(np.clip(similar[np.triu_indices(m, 1)], -1, 1), m)


def all_bipartitions(m: int):
    for size in range(1, m // 2 + 1):
        for part in combinations(range(m), size):
            if 2 * size < m or 0 in part:
                yield frozenset(part), frozenset(range(m)) - frozenset(part)


def brute_force(alpha: np.ndarray) -> tuple[float, list[set[frozenset[int]]]]:
    """Return the smallest α_cross^max, and all bi-partitions that reach it (eqs. 17, 25)."""
    crosses = [
        (float(alpha[np.ix_(list(a), list(b))].max()), {a, b})
        for a, b in all_bipartitions(len(alpha))
    ]
    best = min(cross for cross, _ in crosses)
    return best, [parts for cross, parts in crosses if cross == best]


def parts(found: Bipartition) -> set[frozenset[int]]:
    return {frozenset(found.first), frozenset(found.second)}


@given(matrices())
def test_reaches_the_same_alpha_cross_max_as_algorithm_1(alpha):
    """Eq. 25, ties included."""
    found = find_optimal_bipartition(alpha, range(len(alpha)))
    assert found.alpha_cross_max == reference.alpha_cross_max(alpha, *reference.bipartition(alpha))


@given(matrices())
def test_alpha_cross_max_is_that_of_the_returned_clusters(alpha):
    """Eq. 17: the number belongs to the partition."""
    found = find_optimal_bipartition(alpha, range(len(alpha)))
    assert found.alpha_cross_max == alpha[np.ix_(found.first, found.second)].max()


@given(matrices(largest=8))
def test_both_are_the_minimum_over_all_bipartitions(alpha):
    """Eq. 25 by trying every bi-partition."""
    best, optimal = brute_force(alpha)
    assert find_optimal_bipartition(alpha, range(len(alpha))).alpha_cross_max == best
    assert set(reference.bipartition(alpha)) in optimal


@given(matrices(largest=8))
def test_the_partition_is_one_of_the_optimal_ones_and_algorithm_1s_where_it_is_unique(alpha):
    """Eq. 25; by brute force, whether only one bi-partition is optimal."""
    _, optimal = brute_force(alpha)
    found = parts(find_optimal_bipartition(alpha, range(len(alpha))))
    assert found in optimal
    if len(optimal) == 1:
        assert found == set(reference.bipartition(alpha))


@given(matrices(), st.randoms(use_true_random=False))
def test_does_not_depend_on_the_order_of_the_clients(alpha, random):
    ids = random.sample(range(100), len(alpha))
    order = random.sample(range(len(alpha)), len(alpha))
    shuffled = find_optimal_bipartition(alpha[np.ix_(order, order)], [ids[k] for k in order])
    assert shuffled == find_optimal_bipartition(alpha, ids)


@given(matrices())
def test_depends_on_the_order_of_the_similarities_only(alpha):
    """Algorithm 1 line 3 sorts: any strictly increasing transform of α gives the same clusters."""
    ranks = np.unique(alpha, return_inverse=True)[1].reshape(alpha.shape).astype(np.float64)
    found, by_rank = (
        find_optimal_bipartition(alpha, range(len(alpha))),
        find_optimal_bipartition(ranks, range(len(alpha))),
    )
    assert (by_rank.first, by_rank.second) == (found.first, found.second)


@given(matrices(), st.randoms(use_true_random=False))
def test_covers_every_client_exactly_once_in_canonical_order(alpha, random):
    ids = random.sample(range(100), len(alpha))
    found = find_optimal_bipartition(alpha, ids)
    assert sorted(found.first + found.second) == sorted(ids)
    assert list(found.first) == sorted(found.first)
    assert list(found.second) == sorted(found.second)
    assert len(found.second) >= 1
    assert (-len(found.first), found.first[0]) < (-len(found.second), found.second[0])


def test_two_clients_are_parted_even_if_they_agree_fully():
    """Algorithm 1 with |C| = 2 from the start."""
    alpha = np.ones((2, 2))
    assert find_optimal_bipartition(alpha, (7, 3)) == Bipartition((3,), (7,), 1.0)
    assert reference.bipartition(alpha) == ({0}, {1})


def test_splits_where_complete_linkage_would_not():
    """A chain 0-1-2-3 hangs together by its links; only the client far from all of them is cut off."""
    alpha = symmetric(np.array([0.9, 0.0, -0.9, 0.1, 0.9, 0.0, 0.1, 0.9, 0.1, 0.1]), 5)
    assert find_optimal_bipartition(alpha, range(5)) == Bipartition((0, 1, 2, 3), (4,), 0.1)


def test_a_single_client_cannot_be_split():
    with pytest.raises(UpdateError, match="a bi-partition needs at least 2 clients, got 1"):
        find_optimal_bipartition(np.ones((1, 1)), [4])


def test_similarities_that_are_not_finite_are_refused():
    alpha = np.array([[1.0, np.nan], [np.nan, 1.0]])
    with pytest.raises(
        UpdateError,
        match="similarities of clients should be finite, got 2 that are NaN or infinite",
    ):
        find_optimal_bipartition(alpha, [0, 1])
