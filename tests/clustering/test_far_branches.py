"""Groups of clients that are far from all others, and those that are not."""

from __future__ import annotations

import numpy as np
import pytest

from fedclade.clustering import find_far_groups
from fedclade.clustering.far_branches import compute_usual_distance


def distances(
    groups: list[int], inside: float = 1.0, across: float = 2.0, far: float = 5.0, outer: int = 1
):
    """Return distances of clients in groups, of which the last ``outer`` are far from all others."""
    label = np.repeat(np.arange(len(groups)), groups)
    apart = np.where(label[:, None] == label, inside, across)
    is_far = label >= len(groups) - outer
    apart[(is_far[:, None] | is_far) & (label[:, None] != label)] = far
    np.fill_diagonal(apart, 0.0)
    return apart


@pytest.mark.parametrize(
    ("groups", "outer", "most", "expected"),
    [
        ([5, 5, 1], 1, 2, [(10,)]),
        ([5, 5, 1, 1], 2, 2, [(11,), (10,)]),
        ([5, 5, 2], 1, 2, [(10, 11)]),
        ([5, 5, 2], 1, 1, []),
        ([5, 5, 1], 1, 0, []),
        ([5, 5], 0, 2, []),
        ([10], 0, 2, []),
    ],
)
def test_few_clients_that_are_far_are_named_and_no_others(groups, outer, most, expected):
    found = find_far_groups(distances(groups, outer=outer), most)
    assert sorted(group.places for group in found) == sorted(expected)
    for group in found:
        assert group.distance == 5.0


def test_the_usual_distance_is_that_to_other_clusters():
    assert compute_usual_distance(distances([5, 5], outer=0)) == 2.0
    assert find_far_groups(distances([5, 5, 1], far=2.4), 2) == []
    assert len(find_far_groups(distances([5, 5, 1], far=2.6), 2)) == 1


def test_how_far_a_group_says_that_it_is_does_not_change_what_is_usual():
    (near,), (far,) = (
        find_far_groups(distances([5, 5, 1], far=distance), 2) for distance in (3.0, 1e9)
    )
    assert near.usual == far.usual == 2.0


def test_clients_that_are_all_the_same_and_few_clients_are_left_together():
    assert find_far_groups(np.zeros((6, 6)), 2) == []
    assert find_far_groups(distances([1, 1, 1]), 1) == []
    assert find_far_groups(np.zeros((0, 0)), 1) == []
