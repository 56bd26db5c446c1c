"""Clusters that are new learn together for a while."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade.algorithms.regrouping import drawn_together, joint_model
from fedclade.core import ParameterTree

SIZES = {0: 10, 1: 20, 2: 30}


def tree_of(*models: list[float], born: tuple[int, ...]) -> ParameterTree:
    tree = ParameterTree.star([(0, 1), (2,)], torch.tensor(models))
    root, *leaves = tree.nodes
    return ParameterTree((root, *(replace(leaf, born=round_) for leaf, round_ in zip(leaves, born, strict=True))))


def models_of(tree: ParameterTree) -> list[list[float]]:
    return [leaf.params.tolist() for leaf in tree.leaves]


def test_models_move_a_share_of_the_way_to_their_mean_which_is_less_from_round_to_round():
    tree = tree_of([0.0, 4.0], [8.0, 4.0], born=(2, 2))  # found in round 3; 30 examples each: the mean is 4
    torch.testing.assert_close(models_of(drawn_together(tree, SIZES, 3, 0.1)), [[0.4, 4.0], [7.6, 4.0]])
    torch.testing.assert_close(
        models_of(drawn_together(tree, SIZES, 5, 0.1)), [[0.4 * 0.81, 4.0], [8 - 0.4 * 0.81, 4.0]]
    )


def test_the_mean_is_by_examples():
    tree = tree_of([0.0], [6.0], born=(0, 0))
    assert models_of(drawn_together(tree, {0: 10, 1: 10, 2: 40}, 1, 0.5)) == [[2.0], [5.0]]


def test_only_new_clusters_move():
    tree = tree_of([0.0], [8.0], born=(2, 90))
    old, new = models_of(drawn_together(tree, SIZES, 91, 0.1))
    assert old[0] < 0.001
    torch.testing.assert_close(new, [7.6])


def test_old_clusters_and_a_cluster_alone_stay_as_they_are():
    tree = tree_of([0.0], [8.0], born=(2, 2))
    assert drawn_together(tree, SIZES, 100, 0.1) is tree
    assert drawn_together(tree, SIZES, 3, 0.0) is tree
    alone = ParameterTree.root_only([0, 1], torch.zeros(2))
    assert drawn_together(alone, SIZES, 3, 0.1) is alone


def test_nobody_learns_from_a_cluster_that_runs_away():
    """That of adversaries, whose updates point away from what they should learn, has no bound."""
    tree = ParameterTree.star([(0,), (1,), (2,)], torch.tensor([[1.0], [-2.0], [1000.0]]))
    tree = ParameterTree((replace(tree.nodes[0], params=torch.zeros(1)), *tree.nodes[1:]))
    assert joint_model(tree, {0: 10, 1: 10, 2: 10}).tolist() == [-0.5]  # the mean of the other two
    assert joint_model(tree, {0: 10, 1: 10, 2: 30}).tolist() == pytest.approx([(10 - 20 + 30_000) / 50])  # a majority
    near = ParameterTree((tree.nodes[0], *tree.nodes[1:3], replace(tree.nodes[3], params=torch.tensor([6.0]))))
    assert joint_model(near, {0: 10, 1: 10, 2: 10}).tolist() == pytest.approx([5 / 3])  # three times the median's way
