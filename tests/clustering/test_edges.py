from __future__ import annotations

import numpy as np
import pytest
from scipy.cluster.hierarchy import linkage

from fedclade.clustering.spanning_tree import Edges, Forest, build_merges, order_points


def edges(*some: tuple[int, int, float]) -> Edges:
    one, other, apart = zip(*some, strict=True)
    return Edges(np.array(one), np.array(other), np.array(apart))


def all_pairs(n: int, seed: int) -> Edges:
    i, j = np.triu_indices(n, 1)
    return Edges(i, j, np.random.default_rng(seed).random(len(i)))


def test_edges_of_length_0_and_edges_that_are_there_twice_span_like_others():
    tree = edges(
        (2, 1, 0.0), (0, 1, 0.0), (1, 2, 0.5), (0, 2, 0.0), (3, 0, 2.0), (0, 3, 1.0)
    ).find_spanning_forest(4)
    assert list(zip(tree.first, tree.second, tree.length, strict=True)) == [
        (0, 1, 0.0),
        (0, 2, 0.0),
        (0, 3, 1.0),
    ]


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_the_tree_of_some_at_a_time_is_that_of_all(most):
    pairs, forest = all_pairs(12, seed=0), Forest(12, most)
    for start in range(0, 66, 5):
        some = slice(start, start + 5)
        forest.add(Edges(pairs.first[some], pairs.second[some], pairs.length[some]))
    found, expected = forest.find_tree(), pairs.find_spanning_forest(12)
    assert (found.first.tolist(), found.second.tolist()) == (
        expected.first.tolist(),
        expected.second.tolist(),
    )


def test_merges_are_those_of_scipy():
    pairs = all_pairs(20, seed=1)
    np.testing.assert_allclose(
        build_merges(pairs.find_spanning_forest(20)), linkage(pairs.length, "single")
    )


def test_the_largest_gap_between_two_points_in_order_is_the_height_at_which_they_merge():
    """Of edges 0-2 (1), 1-3 (2) and 2-3 (3) the ways to 0 have the longest edges 3, 1 and 3."""
    order, gaps = order_points(build_merges(edges((0, 2, 1.0), (1, 3, 2.0), (2, 3, 3.0))))
    assert (order.tolist(), gaps.tolist()) == ([0, 2, 1, 3], [1.0, 3.0, 2.0])
