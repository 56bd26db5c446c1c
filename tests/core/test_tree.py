from __future__ import annotations

import re

import pytest
import torch

from fedclade import ConfigError, ParameterTree, TreeError


def grown() -> ParameterTree:
    """Root {0..4} split in round 3 into 1: {0, 1, 4} and 2: {2, 3}; node 1 in round 5 into 3: {0, 4} and 4: {1}."""
    tree = ParameterTree.root_only([3, 1, 0, 2, 4], torch.tensor([0.0]))
    tree = tree.moved(0, torch.tensor([10.0]))
    tree = split(tree, 0, [(4, 0, 1), (2, 3)], params=0.0, number=3)
    return split(tree.moved(1, torch.tensor([1.0])), 1, [(0, 4), (1,)], params=10.0, number=5)


def split(tree, node, parts, params, number):
    cached = [torch.tensor([[float(client)] for client in sorted(part)]) for part in parts]
    return tree.split(
        node,
        parts,
        params=torch.tensor([params]),
        cached=cached,
        round_number=number,
        criteria={"mean_norm": 0.5},
    )


def test_the_root_holds_all_clients_in_order():
    tree = ParameterTree.root_only([3, 1, 2], torch.zeros(1))
    assert tree.leaves == tree.nodes
    assert tree.nodes[0].members == (1, 2, 3)
    assert (tree.nodes[0].parent, tree.nodes[0].born, tree.nodes[0].split_in) == (None, 0, None)


def test_a_split_makes_children_of_a_leaf():
    tree = grown()
    assert [node.id for node in tree.leaves] == [2, 3, 4]
    assert [node.members for node in tree.children(0)] == [(0, 1, 4), (2, 3)]
    assert [node.id for node in tree.children(1)] == [3, 4]
    assert tree.children(2) == ()
    assert [node.born for node in tree.nodes] == [0, 3, 3, 5, 5]
    assert [node.split_in for node in tree.nodes] == [3, 5, None, None, None]
    assert tree.nodes[0].criteria == {"mean_norm": 0.5}
    assert tree.nodes[2].criteria == {}


def test_children_go_on_from_the_current_model_and_the_node_keeps_the_given_one():
    tree = grown()
    assert [float(node.params) for node in tree.nodes] == [0.0, 10.0, 10.0, 11.0, 11.0]


def test_cached_updates_lie_with_the_child():
    """Eq. 47: at the edge, in the order of the members."""
    tree = grown()
    assert tree.nodes[0].cached is None
    assert tree.nodes[1].cached.tolist() == [[0], [1], [4]]
    assert tree.nodes[3].cached.tolist() == [[0], [4]]


def test_every_client_has_one_leaf_and_a_path_from_the_root_to_it():
    tree = grown()
    assert tree.leaf_of == {0: 3, 4: 3, 1: 4, 2: 2, 3: 2}
    assert [node.id for node in tree.path(4)] == [0, 1, 3]
    assert [node.id for node in tree.path(2)] == [0, 2]
    assert [[node.id for node in tree.above(node)] for node in (3, 1, 0)] == [
        [0, 1, 3],
        [0, 1],
        [0],
    ]


@pytest.mark.parametrize(
    ("client", "level", "node"),
    [
        (4, 0, 0),
        (4, 1, 1),
        (4, 2, 3),
        (4, -1, 3),
        (4, -2, 1),
        (4, -3, 0),
        (2, 0, 0),
        (2, 1, 2),
        (2, -1, 2),
        (2, -2, 0),
    ],
)
def test_a_client_has_a_model_of_every_level_of_its_path(client, level, node):
    tree = grown()
    assert tree.node_for(client, level).id == node
    assert torch.equal(tree.model_for(client, level), tree.nodes[node].params)


def test_the_model_of_a_client_is_its_leafs_unless_another_is_asked_for():
    assert [float(grown().model_for(client)) for client in range(5)] == [11, 11, 10, 10, 11]


def test_a_level_that_is_no_number_is_refused():
    with pytest.raises(TreeError, match=r"^level of a node should be a whole number, got 'x'$"):
        grown().model_for(2, "x")


@pytest.mark.parametrize(
    ("level", "client", "ends"), [(3, 4, "2, or from the leaf, -1 to -3"), (-3, 2, "-1 to -2")]
)
def test_a_level_that_the_path_has_not_is_refused(level, client, ends):
    with pytest.raises(
        TreeError,
        match=rf"level {level} is not on the path of client {client}.* {re.escape(ends)}$",
    ):
        grown().model_for(client, level)


def test_a_client_that_the_tree_has_not_is_refused():
    with pytest.raises(
        TreeError, match="client 7 is not in the parameter tree, which has 5 clients from 0 to 4"
    ):
        grown().model_for(7)


@pytest.mark.parametrize("client", [99, -1, "x", None, 1.5, [1]])
def test_a_path_of_a_client_that_the_tree_has_not_is_refused(client):
    told = re.escape(
        f"client {client!r} is not in the parameter tree, which has 5 clients from 0 to 4"
    )
    for ask in (grown().path, grown().node_for, grown().model_for):
        with pytest.raises(TreeError, match=f"^{told}$"):
            ask(client)


@pytest.mark.parametrize("node", [5, -1, "x", None, 1.5, [1]])
def test_a_node_that_the_tree_has_not_is_refused(node):
    told = re.escape(f"node {node!r} is not in the parameter tree, which has the nodes 0 to 4")
    for ask in (grown().above, grown().children):
        with pytest.raises(TreeError, match=f"^{told}$"):
            ask(node)
    with pytest.raises(
        TreeError, match=r"is not in the parameter tree|nodes should be a list of whole numbers"
    ):
        grown().models([0, node])


@pytest.mark.parametrize("nodes", [[], 99, None])
def test_models_of_no_nodes_are_refused(nodes):
    with pytest.raises(
        TreeError,
        match=f"^nodes should be a list of at least 1 node, got {re.escape(repr(nodes))}$",
    ):
        grown().models(nodes)


def test_a_tree_without_clients_says_so():
    with pytest.raises(
        TreeError, match=r"client 0 is not in the parameter tree, which has no clients"
    ):
        ParameterTree.root_only([], torch.zeros(1)).path(0)


def test_a_star_has_one_leaf_for_each_cluster():
    tree = ParameterTree.star([(5, 2), (1,)], torch.ones(2))
    assert [node.members for node in tree.nodes] == [(1, 2, 5), (2, 5), (1,)]
    assert [node.parent for node in tree.nodes] == [None, 0, 0]
    assert [node.id for node in tree.leaves] == [1, 2]
    assert tree.nodes[0].split_in == 0
    assert all(torch.equal(node.params, torch.ones(2)) for node in tree.nodes)


def test_the_leaves_of_a_star_may_start_from_models_of_their_own():
    tree = ParameterTree.star([(5,), ()], torch.tensor([[1.0, 2.0], [3.0, 4.0]]), unassigned=[2])
    assert [node.params.tolist() for node in tree.nodes] == [[1, 2], [1, 2], [3, 4]]
    assert tree.leaf_of == {5: 1, 2: 0}


def test_a_star_of_one_cluster_has_one_leaf():
    assert [node.id for node in ParameterTree.star([(0, 1)], torch.ones(2)).leaves] == [1]


def test_models_stacks_each_node_once():
    vectors, rows = grown().models([3, 2, 3, 0])
    assert vectors.tolist() == [[11.0], [10.0], [0.0]]
    assert rows == [0, 1, 0, 2]


def test_moving_returns_a_new_tree_and_leaves_the_old():
    tree = ParameterTree.star([(0,), (1,)], torch.tensor([1.0]))
    moved = tree.moved(2, torch.tensor([0.5]))
    assert [float(node.params) for node in moved.nodes] == [1.0, 1.0, 1.5]
    assert [float(node.params) for node in tree.nodes] == [1.0, 1.0, 1.0]


def test_map_vectors_changes_models_and_if_asked_to_cached_signatures():
    tree = grown().map_vectors(lambda v: -v, lambda v: 2 * v)
    assert [float(node.params) for node in tree.nodes] == [0.0, -10.0, -10.0, -11.0, -11.0]
    assert tree.nodes[1].cached.tolist() == [[0], [2], [8]]
    assert grown().map_vectors(lambda v: -v).nodes[1].cached.tolist() == [[0], [1], [4]]
    assert tree.nodes[0].cached is None
    assert tree.nodes[3].members == (0, 4)


def test_clients_of_a_star_that_no_leaf_holds_have_the_root():
    tree = ParameterTree.star([(), (3,)], torch.ones(2), unassigned=[2, 1])
    assert [node.members for node in tree.nodes] == [(1, 2, 3), (), (3,)]
    assert tree.leaf_of == {1: 0, 2: 0, 3: 2}
    assert [node.id for node in tree.path(1)] == [0]
    assert [node.id for node in tree.path(3)] == [0, 2]


def test_with_model_replaces_one_model():
    tree = ParameterTree.star([(0,), (1,)], torch.tensor([1.0])).with_model(0, torch.tensor([3.0]))
    assert [float(node.params) for node in tree.nodes] == [3.0, 1.0, 1.0]


def test_reassigned_clients_change_their_leaf_and_the_others_stay():
    before = ParameterTree.star([(4, 0), (1, 2), ()], torch.ones(1))
    after = before.reassigned({0: 3, 2: 1, 4: 1})
    assert [node.members for node in after.nodes] == [(0, 1, 2, 4), (2, 4), (1,), (0,)]
    assert after.leaf_of == {2: 1, 4: 1, 1: 2, 0: 3}
    assert [leaf.id for leaf in after.leaves] == [1, 2, 3]
    assert before.leaf_of == {0: 1, 4: 1, 1: 2, 2: 2}


def test_reassigned_clients_may_leave_a_leaf_empty_or_have_none():
    tree = ParameterTree.star([(0, 1), (2,)], torch.ones(1)).reassigned({0: 2, 1: 0})
    assert [node.members for node in tree.nodes] == [(0, 1, 2), (), (0, 2)]
    assert tree.leaf_of == {0: 2, 1: 0, 2: 2}
    assert tree.reassigned({1: 1}).leaf_of == {0: 2, 1: 1, 2: 2}


def test_reassigned_in_a_grown_tree_keeps_the_inner_nodes_and_drops_cached_updates_that_do_not_fit():
    """Client 1 goes from leaf 4 below node 1 to leaf 2 beside it; leaf 3 is as it was."""
    tree = grown().reassigned({1: 2})
    assert [node.members for node in tree.nodes] == [
        (0, 1, 2, 3, 4),
        (0, 1, 4),
        (1, 2, 3),
        (0, 4),
        (),
    ]
    assert tree.leaf_of == {0: 3, 4: 3, 1: 2, 2: 2, 3: 2}
    assert [node.cached is None for node in tree.nodes] == [True, False, True, False, True]


def test_reassigned_to_what_is_no_leaf_is_an_error():
    told = r"one of the nodes \[0, 2, 3, 4\] \(the root, a leaf, or an inner node .*, got node 1"
    with pytest.raises(TreeError, match=told):
        grown().reassigned({0: 1})


def test_a_model_of_another_shape_is_refused():
    for change in (grown().moved, grown().with_model, grown().trained):
        with pytest.raises(
            TreeError,
            match=r"a vector for node 1 should have the shape of the node's model, \[1\], got \[3\]",
        ):
            change(1, torch.zeros(3))
        with pytest.raises(TreeError, match=r"node 9 is not in the parameter tree"):
            change(9, torch.zeros(1))


@pytest.mark.parametrize(("clusters", "shape"), [([], [1]), ([[0], [1]], [3, 1]), ([[0]], [])])
def test_a_star_starts_from_one_model_or_one_of_each_cluster(clusters, shape):
    told = re.escape(f"params of a tree with {len(clusters)} clusters should have the shape [S], ")
    with pytest.raises(TreeError, match=rf"{told}.*, got shape {re.escape(str(shape))}"):
        ParameterTree.star(clusters, torch.zeros(shape))


def test_who_is_in_no_leaf_waits_at_the_deepest_node_that_holds_it():
    """Node 1 of {0, 1, 4} is split into {0} and {1}; 5 is the root's alone."""
    tree = ParameterTree.root_only([0, 1, 2, 3, 4, 5], torch.zeros(1))
    tree = split(tree, 0, [(4, 0, 1), (2, 3)], params=0.0, number=3)
    tree = split(tree, 1, [(0,), (1,)], params=0.0, number=5)
    assert tree.leaf_of == {0: 3, 1: 4, 2: 2, 3: 2, 4: 1, 5: 0}
    assert tree.stragglers == {0: (5,), 1: (4,)}
    assert [node.id for node in tree.path(4)] == [0, 1]
    assert grown().stragglers == {}


def test_new_members_stand_in_order_and_so_do_their_signatures():
    tree = grown().with_members(2, [9, 0], torch.tensor([[9.0], [0.0]]))
    assert tree.nodes[2].members == (0, 2, 3, 9)
    assert tree.nodes[2].cached.tolist() == [[0], [2], [3], [9]]
    assert grown().nodes[2].members == (2, 3)


def test_new_members_of_a_cluster_without_signatures_bring_theirs():
    tree = ParameterTree.star([()], torch.zeros(1), unassigned=[3, 1]).with_members(
        1, [3, 1], torch.tensor([[3], [1]])
    )
    assert (tree.nodes[1].members, tree.nodes[1].cached.tolist()) == ((1, 3), [[1], [3]])


def test_what_is_known_of_the_clients_lasts_while_they_stay_and_no_longer():
    tree = ParameterTree.star([(0, 2), (1,)], torch.zeros(2), unassigned=(3, 4))
    assert tree.stragglers == {0: (3, 4)}
    moved = tree.moved(1, torch.ones(2))
    assert moved.leaf_of is tree.leaf_of
    joined = moved.reassigned({3: 2, 0: 2, 1: 2, 2: 0})
    assert [leaf.members for leaf in joined.leaves] == [(), (0, 1, 3)]
    assert dict(joined.leaf_of) == {0: 2, 1: 2, 2: 0, 3: 2, 4: 0}
    assert joined.stragglers == {0: (2, 4)}


def test_whether_models_are_served_is_true_or_false():
    with pytest.raises(ConfigError, match=r"served of models should be true or false, got tensor"):
        grown().models([0], served=torch.ones(2))
