from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedclade import (
    APFL,
    Ditto,
    FedAvg,
    FedGroup,
    FineTune,
    Local,
    LocalTraining,
    PerFedAvg,
    PFedMe,
    Scaffold,
    UpdateError,
)
from fedclade.clustering.routing import (
    Assignment,
    Step,
    assign_by_loss,
    find_least_similarity,
    route,
)
from fedclade.core.queries import Evaluation, Round, Split
from fedclade.core.tree import Node, ParameterTree
from tests.tiny import ScriptedClients, SpyClients

ROUND = Round(9, LocalTraining())


def forked(*branches: Sequence[Sequence[float]]) -> ParameterTree:
    """Return a root that was split in round 5 into branches with these cached updates."""
    sizes = [len(branch) for branch in branches]
    members = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    root = ParameterTree.root_only(range(sum(sizes)), torch.zeros(2))
    cached = [torch.tensor(branch) for branch in branches]
    return root.split(0, members, params=torch.zeros(2), cached=cached, round_number=5, criteria={})


def step_of(tree: ParameterTree, update: Sequence[float]) -> Step:
    (found,) = route(tree, [7], ScriptedClients({7: update}), ROUND)
    return found.steps[0]


def test_the_largest_similarity_to_a_member_decides_not_the_mean():
    tree = forked([[1.0, 0.0], [-1.0, 0.0]], [[0.5, 1.0], [0.5, 1.0]])
    step = step_of(tree, [1.0, 0.1])
    assert (step.taken, step.by) == (1, "similarity")
    assert step.scores == pytest.approx({1: 1 / 1.01**0.5, 2: 0.6 / (1.01 * 1.25) ** 0.5})
    assert step.margin == pytest.approx(step.scores[1] - step.scores[2])


def test_of_equals_the_last_branch_is_taken():
    """Algorithm 4, line 8: v_0 only if α_0 > α_1."""
    assert step_of(forked([[1.0, 0.0]], [[1.0, 0.0]]), [1.0, 0.0]).taken == 2
    assert step_of(forked([[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]), [1.0, 0.0]).taken == 2


def test_newcomers_are_asked_in_one_call_as_in_the_round_of_the_cached_updates():
    spy = SpyClients(ScriptedClients({7: [1.0, 0.0], 8: [0.0, 1.0], 9: [1.0, 1.0]}))
    route(forked([[1.0, 0.0]], [[0.0, 1.0]]), [7, 8, 9], spy, ROUND)
    (call,) = spy.calls
    assert (call.ids, call.number) == ((7, 8, 9), 5)


PAIR = [[1.0, 0.0], [1.0, 1.0]]
"""Two updates with cosine √½."""


@pytest.mark.parametrize(
    ("cached", "least"),
    [
        (PAIR, 0.5 * 0.5**0.5),
        ([*PAIR, [-1.0, 1.0]], 0.0),  # the third is at right angles to its nearest
        ([[1.0, 0.0], [-1.0, 1.0]], -(0.5**0.5)),  # halving would raise what is below 0
        ([[1.0, 0.0]], 0.0),
    ],
)
def test_a_newcomer_fits_down_to_half_of_the_lower_end_of_the_range(cached, least):
    branch = Node(1, 0, tuple(range(len(cached))), torch.zeros(2), cached=torch.tensor(cached))
    assert find_least_similarity(branch) == pytest.approx(least, abs=1e-6)


def test_who_fits_nowhere_comes_to_a_leaf_all_the_same_and_it_is_told_what_fits():
    tree = forked([[1.0, 0.0], [1.0, 0.0]], [[-1.0, 0.0], [-1.0, 0.0]])
    first = [torch.tensor([[0.0, 1.0]] * 1), torch.tensor([[0.0, 1.0]] * 1)]
    tree = tree.split(
        1, [[0], [1]], params=torch.zeros(2), cached=first, round_number=6, criteria={}
    )
    (found,) = route(tree, [7], ScriptedClients({7: [1.0, -0.5]}), ROUND)
    assert [step.fits for step in found.steps] == [True, False]
    assert (found.path, found.node, found.fits, found.fitting) == ((0, 1, 4), 4, False, (0, 1))
    (found,) = route(tree, [7], ScriptedClients({7: [0.1, -1.0]}), ROUND)
    assert (len(found.path), found.fits, found.fitting) == (3, False, (0,))


@dataclass
class Judges(ScriptedClients):
    """Clients whose training loss with a model is told by its first entry."""

    losses: Mapping[float, float] | None = None

    def evaluate(
        self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split
    ) -> Evaluation:
        assert split == "train"
        found = torch.tensor(
            [self.losses[float(models[row, 0])] for row in assignment], dtype=torch.float64
        )
        return Evaluation(tuple(ids), torch.zeros(len(ids), 1), found, torch.ones(len(ids)))


def lowest_loss(losses: Mapping[float, float], clusters=((0,), (1,), (2,))) -> Assignment:
    models = torch.arange(1.0, len(clusters) + 1).view(-1, 1).expand(-1, 2)
    tree = ParameterTree.star(clusters, models)
    (found,) = assign_by_loss(tree, [7], Judges({7: [0.0, 0.0]}, losses=losses))
    return found


def test_without_cached_updates_the_lowest_loss_decides_and_the_first_of_equals():
    found = lowest_loss({0.0: 2.3, 1.0: 4.0, 2.0: 0.5, 3.0: 0.5})
    assert (found.path, found.steps[0].by, found.fits, found.fitting) == (
        (0, 2),
        "loss",
        True,
        (0, 2),
    )
    assert found.margin == 0.0
    assert lowest_loss({0.0: 2.3, 1.0: float("nan"), 2.0: 1.5, 3.0: 2.0}).margin == 0.5


def test_a_leaf_without_members_is_no_choice():
    assert (
        lowest_loss({0.0: 2.3, 1.0: 1.0, 2.0: 0.5, 3.0: 3.0}, clusters=((0,), (), (2,))).node == 1
    )


@pytest.mark.parametrize(
    ("best", "second", "fits"),
    [(2.2, 2.25, True), (2.4, 2.5, False), (2.4, 4.8, True), (2.5, 4.8, False), (9.0, 12.0, False)],
)
def test_a_leaf_fits_if_it_beats_a_guess_or_is_twice_as_good_as_the_next(best, second, fits):
    found = lowest_loss({0.0: 2.3, 1.0: second, 2.0: best, 3.0: 13.0})
    assert found.steps[0].taken == 2
    assert found.fits is fits
    assert found.path == (0, 2)
    assert found.fitting == ((0, 2) if fits else (0,))


def test_a_single_leaf_is_judged_by_the_guess_alone():
    assert lowest_loss({0.0: 2.3, 1.0: 2.0}, clusters=((0,),)).steps[0].margin is None
    assert not lowest_loss({0.0: 2.3, 1.0: 2.4}, clusters=((0,),)).fits


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), Local(), Ditto(), APFL(), PFedMe(), PerFedAvg(), Scaffold(), FineTune()]
)
def test_methods_whose_leaves_are_single_clients_give_newcomers_the_root(algorithm):
    clients = ScriptedClients({client: [1.0, 0.0] for client in range(3)})
    tree = algorithm.init(torch.zeros(2), clients).tree
    (found,) = algorithm.assign(tree, [2], clients, ROUND)
    assert (found.path, found.fitting, found.fits, found.margin) == ((0,), (0,), True, None)


def test_fedgroup_joins_the_group_of_the_largest_cosine_not_the_largest_product():
    """Eq. 10 from the root at (1, 1): the update (2, 1) against a long group off it, a short one along it, one away."""
    models = torch.tensor([[10.0, 1.0], [1.25, 1.125], [-1.0, 0.0]])
    tree = ParameterTree.star([(0,), (1,), (2,)], models).with_model(0, torch.ones(2))
    clients = Judges({7: [2.0, 1.0]}, losses={0.0: 2.3, 10.0: 0.1, 1.25: 0.4, -1.0: 9.0})
    (found,) = FedGroup(groups=3, direction="position").assign(tree, [7], clients, ROUND)
    assert found.steps[0].scores == pytest.approx({1: 2 / 5**0.5, 2: 1.0, 3: -1.0})
    assert (found.node, found.fits) == (2, True), "its loss is below that of a guess"
    clients.losses = {0.0: 2.3, 10.0: 0.1, 1.25: 2.4, -1.0: 9.0}
    (found,) = FedGroup(groups=3, direction="position").assign(tree, [7], clients, ROUND)
    assert (found.node, found.fits, found.fitting) == (2, False, (0,))


def test_fedgroup_compares_with_what_a_group_learnt_last():
    """Eq. 10 by the letter: group 1 moved along (0, 3) last, and group 2 along (4, 0); group 3 never had clients."""
    tree = ParameterTree.star(
        [(0,), (1,), (2,)], torch.tensor([[9.0, 0.0], [0.0, 9.0], [5.0, 5.0]])
    )
    tree = tree.trained(1, torch.tensor([0.0, 3.0])).trained(2, torch.tensor([4.0, 0.0]))
    clients = Judges({7: [1.0, 0.0]}, losses=dict.fromkeys((0.0, 9.0, 4.0, 5.0), 1.0))
    (found,) = FedGroup(groups=3).assign(tree, [7], clients, ROUND)
    assert found.steps[0].scores == pytest.approx({1: 0.0, 2: 1.0, 3: 0.0})
    # A run of an earlier version did not keep where groups came from: their places count, as they did then.
    tree = ParameterTree.star(
        [(0,), (1,), (2,)], torch.tensor([[9.0, 0.0], [0.0, 9.0], [5.0, 5.0]])
    )
    (found,) = FedGroup(groups=3).assign(
        tree.with_model(0, torch.tensor([1.0, 0.0])), [7], clients, ROUND
    )
    assert found.node == 1


def test_fedgroup_offers_no_group_that_nobody_is_in():
    tree = ParameterTree.star([(0,), ()], torch.tensor([[-1.0, 0.0], [2.0, 0.0]]))
    clients = Judges({7: [1.0, 0.0]}, losses={0.0: 2.3, -1.0: 0.5})
    (found,) = FedGroup(groups=2).assign(tree.with_model(0, torch.zeros(2)), [7], clients, ROUND)
    assert found.steps[0].scores == pytest.approx({1: -1.0})


@dataclass
class Silent(ScriptedClients):
    """Clients of whom number 8 never answers."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        return super().train([c for c in ids if c != 8], models, assignment, this_round)


@pytest.mark.parametrize(
    "tree", [forked([[1.0, 0.0]], [[0.0, 1.0]]), ParameterTree.star([(0,), (1,)], torch.eye(2))]
)
def test_a_newcomer_that_does_not_answer_is_named(tree):
    clients = Silent({7: [1.0, 0.0], 8: [1.0, 0.0]})
    algorithm = FedAvg() if tree.nodes[1].cached is not None else FedGroup(groups=2)
    told = "newcomers without a usable update cannot be assigned to a cluster: newcomer 8: dropped out; remove"
    with pytest.raises(UpdateError, match=told):
        algorithm.assign(tree, [7, 8], clients, ROUND)
