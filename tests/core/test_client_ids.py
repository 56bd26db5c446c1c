"""Ids in arrays are the tuples that they stand for, and trees of many clients those of few."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedclade import ParameterTree
from fedclade.core import (
    ArrayMapping,
    ClientIds,
    Positions,
    ascending_ids,
    client_ids,
    concatenated_ids,
    id_array,
    numbers_of,
    sum_of,
    tree,
    without_ids,
)
from fedclade.core.tree import Group

MANY = 200_000

ids_of_clients = st.lists(st.integers(-3, 30), unique=True, max_size=12)


@pytest.fixture
def few_are_many(monkeypatch):
    """Store also a single id in an array."""
    monkeypatch.setattr(client_ids, "MANY_IDS", 1)
    monkeypatch.setattr(tree, "MANY_IDS", 1)


@given(ids_of_clients)
def test_ids_in_an_array_are_a_tuple(ids: list[int]):
    stored = ClientIds(np.array(ids, dtype=np.int64))
    assert stored == tuple(ids)
    assert hash(stored) == hash(tuple(ids))
    assert stored == ClientIds(np.array(ids, dtype=np.int64))
    assert stored != (*ids, 99)
    assert stored != ids  # as a tuple, too
    assert [*stored] == ids
    assert stored[1:] == tuple(ids[1:])
    assert np.asarray(stored).tolist() == ids
    for place, client in enumerate(ids):
        assert (stored[place], stored.index(client), client in stored) == (client, place, True)
        assert type(stored[place]) is int
    assert 99 not in stored
    with pytest.raises(ValueError, match="99 is not in"):
        stored.index(99)


@given(ids_of_clients, ids_of_clients)
def test_functions_of_ids_do_not_depend_on_how_ids_are_stored(ids: list[int], others: list[int]):
    tuples = ascending_ids(ids), without_ids(sorted(ids), others), concatenated_ids([ids, others])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_ids, "MANY_IDS", 1)
        stored = ascending_ids(ids), without_ids(sorted(ids), others)
        both = concatenated_ids([ids, others])
    assert [*stored[0]] == [*tuples[0]] == sorted(ids)
    assert [*stored[1]] == [*tuples[1]] == sorted(set(ids) - set(others))
    assert [*both] == [*tuples[2]] == [*ids, *others]


def test_numbers_of_clients_are_read_from_arrays():
    squares = ArrayMapping(Positions(np.arange(5)), np.arange(5) ** 2)
    assert numbers_of(squares, [3, 1]).tolist() == [9, 1]
    assert numbers_of({3: 9, 1: 1}, [3, 1]).tolist() == [9, 1]
    for everyone in (squares, range(5)):
        assert numbers_of(squares, everyone) is squares.array
    assert sum_of(squares) == sum_of(dict(squares)) == 30
    assert type(sum_of(squares)) is int
    assert id_array(squares).tolist() == id_array(range(5)).tolist() == [0, 1, 2, 3, 4]


def change_tree() -> list[ParameterTree]:
    """Apply all changes of members to small trees."""
    zeros = torch.zeros(2)
    star = ParameterTree.star([(4, 2), ()], torch.eye(2), unassigned=[0, 7, 1])
    moved = star.reassigned({0: 2, 4: 2, 1: 1})
    root = ParameterTree.root_only([3, 1, 0, 2, 4], zeros)
    parts = [torch.zeros(2, 1), torch.ones(2, 1)]
    split = root.split(0, [(4, 0), (3, 1)], params=zeros, cached=parts, round_number=2, criteria={})
    placed = split.with_members(1, [2], torch.full((1, 1), 2.0))
    newer = placed.with_newcomers([9, 8])
    groups = [Group((9, 0), 1, zeros, None), Group((4, 3), 0, zeros, None)]
    regrouped = newer.regrouped(groups, round_number=3)
    return [star, moved, root, split, placed, newer, regrouped, newer.without([4, 9])]


def describe(each: ParameterTree) -> object:
    cached = [None if node.cached is None else node.cached.tolist() for node in each.nodes]
    members = [[*node.members] for node in each.nodes]
    waiting = {node: [*ids] for node, ids in each.stragglers.items()}
    return members, cached, dict(each.leaf_of), waiting, each.has_leaf([0, 1, 2, 9, 77]).tolist()


def test_changes_of_trees_do_not_depend_on_how_members_are_stored(few_are_many):
    many = change_tree()
    assert all(isinstance(each.nodes[0].members, ClientIds) for each in many)
    assert all(isinstance(each.leaf_of, ArrayMapping) for each in many)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_ids, "MANY_IDS", 10_000)
        patch.setattr(tree, "MANY_IDS", 10_000)
        few = change_tree()
    assert isinstance(few[0].nodes[0].members, tuple)
    assert [describe(each) for each in many] == [describe(each) for each in few]


def test_members_outside_the_root_have_a_leaf(few_are_many):
    root = ParameterTree.root_only([0, 1], torch.zeros(1))
    leaf = ParameterTree.star([[5]], torch.zeros(1)).nodes[1]
    assert dict(ParameterTree((root.nodes[0], leaf)).leaf_of) == {0: 0, 1: 0, 5: 1}


def test_a_tree_of_many_clients_takes_few_bytes_for_each():
    tracemalloc.start()
    try:
        many = ParameterTree.star([()] * 4, torch.zeros(1), range(MANY)).reassigned({7: 2, 9: 1})
        assert (many.leaf_of[7], many.leaf_of[8]) == (2, 0)
        assert len(many.stragglers[0]) == MANY - 2
        stored, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Ids, leaves and stragglers take 8, 4 and 8 bytes; a tuple and a dict take more than 100.
    assert stored < 40 * MANY
    assert peak < 80 * MANY
