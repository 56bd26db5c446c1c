"""Clusters that are new learn together for a while."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade.algorithms.rcfl.method import average_models, divide, regroup, share_models
from fedclade.core import ParameterTree, Updates

SIZES = {0: 10, 1: 20, 2: 30}


def tree_of(*models: list[float], born: tuple[int, ...]) -> ParameterTree:
    tree = ParameterTree.star([(0, 1), (2,)], torch.tensor(models))
    root, *leaves = tree.nodes
    return ParameterTree(
        (root, *(replace(leaf, born=round_) for leaf, round_ in zip(leaves, born, strict=True)))
    )


def models_of(tree: ParameterTree) -> list[list[float]]:
    return [leaf.params.tolist() for leaf in tree.leaves]


def test_models_move_a_share_of_the_way_to_their_mean_which_is_less_from_round_to_round():
    # found in round 3; 30 examples each: the mean is 4
    tree = tree_of([0.0, 4.0], [8.0, 4.0], born=(2, 2))
    torch.testing.assert_close(
        models_of(share_models(tree, SIZES, 3, 0.1)), [[0.4, 4.0], [7.6, 4.0]]
    )
    torch.testing.assert_close(
        models_of(share_models(tree, SIZES, 5, 0.1)), [[0.4 * 0.81, 4.0], [8 - 0.4 * 0.81, 4.0]]
    )


def test_the_mean_is_by_examples():
    tree = tree_of([0.0], [6.0], born=(0, 0))
    assert models_of(share_models(tree, {0: 10, 1: 10, 2: 40}, 1, 0.5)) == [[2.0], [5.0]]


def test_only_new_clusters_move():
    tree = tree_of([0.0], [8.0], born=(2, 90))
    old, new = models_of(share_models(tree, SIZES, 91, 0.1))
    assert old[0] < 0.001
    torch.testing.assert_close(new, [7.6])


def test_old_clusters_and_a_cluster_alone_stay_as_they_are():
    tree = tree_of([0.0], [8.0], born=(2, 2))
    assert share_models(tree, SIZES, 100, 0.1) is tree
    assert share_models(tree, SIZES, 3, 0.0) is tree
    alone = ParameterTree.root_only([0, 1], torch.zeros(2))
    assert share_models(alone, SIZES, 3, 0.1) is alone


def test_nobody_learns_from_a_cluster_that_runs_away():
    """That of adversaries, whose updates point away from what they should learn, has no bound."""
    tree = ParameterTree.star([(0,), (1,), (2,)], torch.tensor([[1.0], [-2.0], [1000.0]]))
    tree = ParameterTree((replace(tree.nodes[0], params=torch.zeros(1)), *tree.nodes[1:]))
    # the mean of the other two
    assert average_models(tree, {0: 10, 1: 10, 2: 10}).tolist() == [-0.5]
    # a majority
    assert average_models(tree, {0: 10, 1: 10, 2: 30}).tolist() == pytest.approx(
        [(10 - 20 + 30_000) / 50]
    )
    near = ParameterTree(
        (tree.nodes[0], *tree.nodes[1:3], replace(tree.nodes[3], params=torch.tensor([6.0])))
    )
    # three times the median's way
    assert average_models(near, {0: 10, 1: 10, 2: 10}).tolist() == pytest.approx([5 / 3])


FOUND_IN = 7
WAITING = (6, 7, 8, 9, 10, 11, 12)
"""More than half of the clients: they are the root's alone."""


def with_waiting() -> ParameterTree:
    """Return two clusters of three clients, with models 1 and 2, and clients that wait for one."""
    tree = ParameterTree.star(
        [(0, 1, 2), (3, 4, 5)], torch.tensor([[1.0], [2.0]]), unassigned=WAITING
    )
    root = replace(tree.nodes[0], params=torch.tensor([-8.0]))
    leaves = [
        replace(leaf, cached=torch.tensor([[float(c)] for c in leaf.members]))
        for leaf in tree.nodes[1:]
    ]
    return ParameterTree((root, *leaves))


def clustered(*clusters: tuple[int, ...]) -> ParameterTree:
    """Return the tree after its clients were clustered anew by signatures that are their numbers."""
    ids = sorted(client for cluster in clusters for client in cluster)
    made = Updates.of(
        ids=tuple(ids),
        sizes=torch.ones(len(ids), dtype=torch.float64),
        losses=torch.zeros(len(ids)),
        norms=torch.ones(len(ids), dtype=torch.float64),
        n_parameters=1,
        deltas=torch.tensor([[float(client)] for client in ids]),
    )
    at = torch.tensor([-9.0])
    return regroup(with_waiting(), clusters, made, at, round_number=FOUND_IN, criteria={"gap": 0.5})


def leaf_with(tree: ParameterTree, *members: int):
    (found,) = (leaf for leaf in tree.leaves if leaf.members == members)
    return found


def test_clients_that_waited_and_join_an_old_cluster_do_not_reset_it():
    """However many they are: the cluster goes on with its number, its model and its age."""
    tree = clustered((0, 1, 2, *WAITING), (3, 4, 5))
    first, second = leaf_with(tree, 0, 1, 2, *WAITING), leaf_with(tree, 3, 4, 5)
    assert [(leaf.id, leaf.params.tolist(), leaf.born) for leaf in (first, second)] == [
        (1, [1.0], 0),
        (2, [2.0], 0),
    ]
    assert first.cached is not None
    assert first.cached.flatten().tolist() == [0, 1, 2, *WAITING]


def test_the_root_remembers_the_model_at_which_clusters_were_found():
    root = clustered((0, 1, 2, *WAITING), (3, 4, 5)).nodes[0]
    assert (root.params.tolist(), root.split_in, root.criteria) == ([-9.0], FOUND_IN, {"gap": 0.5})


def test_a_cluster_goes_on_where_more_than_half_of_its_members_are():
    tree = clustered((0, 1, 6), (2, 3, 4, 5))
    assert leaf_with(tree, 0, 1, 6).id == 1
    assert leaf_with(tree, 2, 3, 4, 5).id == 2
    assert leaf_with(tree, 2, 3, 4, 5).params.tolist() == [2.0], (
        "of client 2 alone nothing is taken over"
    )


def test_two_clusters_that_become_one_go_on_from_their_mean_by_clients():
    leaf = leaf_with(clustered((0, 1, 2, 3, 4, 6)), 0, 1, 2, 3, 4, 6)
    assert (leaf.id, leaf.born) == (1, 0), "the one that gives more of them"
    assert leaf.params.tolist() == pytest.approx([(3 * 1.0 + 2 * 2.0) / 5])


def test_a_cluster_of_minorities_is_new_and_starts_from_where_most_of_it_were():
    tree = clustered((0, 6, 7), (1, 2), (3, 4, 5))
    assert (leaf_with(tree, 0, 6, 7).id, leaf_with(tree, 0, 6, 7).params.tolist()) == (3, [-8.0])
    assert leaf_with(tree, 0, 6, 7).born == FOUND_IN - 1
    new = leaf_with(clustered((0, 3, 6), (1, 2), (4, 5)), 0, 3, 6)
    assert new.id == 3


def test_half_of_a_cluster_is_not_more_than_half():
    tree = ParameterTree.star([(0, 1), (2,)], torch.tensor([[1.0], [2.0]]))
    apart = divide(tree, 1, [(0,), (1,)], FOUND_IN)
    assert [(leaf.id, leaf.members) for leaf in apart.leaves if leaf.members] == [
        (2, (2,)),
        (3, (0,)),
        (4, (1,)),
    ]


def test_a_cluster_that_is_divided_keeps_the_signatures_of_its_members():
    tree = divide(with_waiting(), 1, [(0, 2), (1,)], FOUND_IN)
    larger, smaller, other = leaf_with(tree, 0, 2), leaf_with(tree, 1), leaf_with(tree, 3, 4, 5)
    assert [leaf.id for leaf in (larger, smaller, other)] == [1, 3, 2]
    cached = [
        leaf.cached.flatten().tolist()
        for leaf in (larger, smaller, other)
        if leaf.cached is not None
    ]
    assert cached == [[0.0, 2.0], [1.0], [3.0, 4.0, 5.0]]
    assert smaller.params.tolist() == [1.0]
    assert tree.nodes[0].params.tolist() == [-8.0]
