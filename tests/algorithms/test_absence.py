"""What becomes of clients that do not answer: who waits where, who joins what, and which clusters stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from fedclade import CFL, FLHC, IFCA, Ditto, FedAvg, FedGroup, FeSEM, FineTune, LocalTraining
from fedclade.algorithms import Algorithm, RoundLog, State
from fedclade.core.queries import RoundPlan
from tests.tiny import ScriptedClients, details

WARD = {"metric": "l2", "linkage": "ward", "n_clusters": 2}
RIGHT, UP = (1.0, 0.0), (0.0, 1.0)
TWO_KINDS = {0: RIGHT, 1: RIGHT, 2: RIGHT, 3: UP, 4: UP, 5: UP}


@dataclass
class Absent(ScriptedClients):
    """Clients of whom some are absent in some rounds, from all queries or from those of one name."""

    absent: Mapping[int | tuple[int, str], set[int]] = field(default_factory=dict)

    def train(self, ids, models, assignment, this_round, work=None, query="", **more):
        name = query or this_round.purpose
        gone = self.absent.get(this_round.number, set()) | self.absent.get(
            (this_round.number, name), set()
        )
        updates = (
            super()
            .train(ids, models, assignment, this_round, work)
            .select([i for i in ids if i not in gone])
        )
        return replace(updates, left_out={i: "asleep" for i in ids if i in gone})

    def gradients(self, ids, models, assignment, this_round, **more):
        return self.train(ids, models, assignment, this_round, query="gradients")


def played(
    algorithm: Algorithm, clients: ScriptedClients, rounds: int, min_clients: int = 1
) -> tuple[list[State], list[RoundLog]]:
    """Let everybody train from a model of zeros; return the states, one more than rounds, and the logs."""
    shape = (
        (2,) if algorithm.requires.initial_models == 1 else (algorithm.requires.initial_models, 2)
    )
    params = (
        torch.arange(float(torch.Size(shape).numel())).view(shape)
        if len(shape) > 1
        else torch.zeros(shape)
    )
    states, logs = [algorithm.init(params, clients)], list[RoundLog]()
    for number in range(1, rounds + 1):
        this_round = RoundPlan(number, LocalTraining(), min_clients=min_clients)
        cohort = algorithm.sample_cohort(states[-1], 1.0, this_round.generator("cohort"))
        state, log = algorithm.step(states[-1], cohort, clients, this_round)
        states.append(state)
        logs.append(log)
    return states, logs


def events(log: RoundLog, *kinds: str) -> list[tuple[str, int, object]]:
    return [
        (event.kind, event.node, details(event).get("clients"))
        for event in log.events
        if event.kind in kinds
    ]


def models(state: State) -> list[list[float]]:
    return [node.params.tolist() for node in state.tree.nodes]


# FL+HC


def test_who_misses_the_clustering_waits_at_the_root_and_joins_whom_it_is_like():
    """Clients 1 and 5 are away when the others are clustered in round 2; 1 is back in round 3, and 5 in round 4."""
    clients = Absent(TWO_KINDS, absent={2: {1, 5}, 3: {5}})
    states, logs = played(FLHC(rounds_before=1, **WARD), clients, 4)
    assert [sorted(leaf.members) for leaf in states[2].tree.leaves] == [[0, 2], [3, 4]]
    assert states[2].tree.stragglers == {0: (1, 5)}
    assert events(logs[2], "joined") == [("joined", 1, [1])]
    assert states[3].tree.stragglers == {0: (5,)}
    assert events(logs[3], "joined") == [("joined", 2, [5])]
    assert [leaf.members for leaf in states[4].tree.leaves] == [(0, 1, 2), (3, 4, 5)]
    assert states[4].tree.nodes[1].cached.tolist() == [[*RIGHT]] * 3
    assert states[4].tree.stragglers == {}


def test_who_waits_moves_no_model():
    """The root keeps the w of round 1, the mean of all; a cluster moves by its members of old in rounds 3 and 4."""
    states, logs = played(
        FLHC(rounds_before=1, **WARD), Absent(TWO_KINDS, absent={2: {1, 5}}), 3, min_clients=2
    )
    assert models(states[3]) == [[0.5, 0.5], [1.5, 0.5], [0.5, 1.5]]
    assert logs[2].losses.keys() == set(range(6))
    assert logs[2].criteria.keys() == {1, 2}, "the root's last criteria are that of the split"


def test_who_waits_may_be_fewer_than_min_clients():
    _, logs = played(
        FLHC(rounds_before=1, **WARD), Absent(TWO_KINDS, absent={2: {1}}), 3, min_clients=2
    )
    assert events(logs[2], "too_few", "joined") == [("joined", 2, [1])]


def test_too_few_answers_to_cluster_leave_it_to_the_next_round():
    clients = Absent(TWO_KINDS, absent={2: {0, 1, 2, 3, 4}, 3: set(range(6))})
    states, logs = played(FLHC(rounds_before=1, **WARD), clients, 4)
    assert [events(log, "postponed") for log in logs] == [
        [],
        [("postponed", 0, 1)],
        [("postponed", 0, 0)],
        [],
    ]
    assert details(logs[1].events[0]) == {"clients": 1, "needed": 2}
    assert states[3].tree is states[1].tree
    assert [leaf.members for leaf in states[4].tree.leaves] == [(0, 1, 2), (3, 4, 5)]


# CFL


def cfl(**options) -> CFL:
    """Split in round 2 and, whatever the updates are like, in round 3."""
    return CFL(eps2=0.5, split_rounds=(2, 3), **options)


def test_who_misses_a_split_waits_at_the_node_and_goes_down_a_level_for_each_answer():
    """Client 1 is away when {0, 1, 2} and {3, 4, 5} part; it joins the first (node 2) in the round that splits it."""
    clients = Absent({**TWO_KINDS, 2: (1.0, -0.4)}, absent={2: {1}})
    states, logs = played(cfl(), clients, 4)
    assert [leaf.members for leaf in states[2].tree.leaves] == [(3, 4, 5), (0, 2)]
    assert states[2].tree.stragglers == {0: (1,)}
    assert events(logs[2], "joined", "split") == [("joined", 2, [1]), ("split", 2, None)]
    assert states[3].tree.nodes[2].members == (0, 1, 2)
    assert states[3].tree.stragglers == {2: (1,)}
    assert events(logs[3], "joined") == [("joined", states[3].tree.leaf_of[0], [1])]
    assert states[4].tree.leaf_of[1] == states[4].tree.leaf_of[0]
    assert [node.id for node in states[4].tree.path(1)][:2] == [0, 2]


def test_who_sends_no_gradient_at_a_split_waits_as_well():
    clients = Absent(TWO_KINDS, absent={(2, "gradients"): {4}})
    states, _ = played(cfl(similarity="gradients"), clients, 2)
    assert [leaf.members for leaf in states[2].tree.leaves] == [(0, 1, 2), (3, 5)]
    assert states[2].tree.stragglers == {0: (4,)}
    assert states[2].tree.nodes[1].params.tolist() == [1.0, 1.0], "the mean of all six, twice"


@pytest.mark.parametrize("query", ["train", "gradients"])
def test_a_split_needs_two_who_answer(query):
    clients = Absent(TWO_KINDS, absent={(2, query): {0, 1, 2, 3, 4}})
    states, logs = played(cfl(similarity="gradients"), clients, 2)
    assert len(states[2].tree.nodes) == 1
    assert logs[1].criteria[0].bipartition is None


# Clusters with too few answers


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), cfl(), FLHC(rounds_before=9, **WARD), Ditto(), FineTune()]
)
def test_a_cluster_with_too_few_answers_keeps_its_model_and_is_not_split(algorithm):
    clients = Absent(TWO_KINDS, absent={2: {0, 1, 2, 3}})
    states, logs = played(algorithm, clients, 2, min_clients=3)
    assert torch.equal(states[2].tree.nodes[0].params, states[1].tree.nodes[0].params)
    assert not torch.equal(states[1].tree.nodes[0].params, states[0].tree.nodes[0].params)
    assert events(logs[0], "too_few") == []
    assert events(logs[1], "too_few", "split") == [("too_few", 0, 2)]
    assert logs[1].losses.keys() == {4, 5}


def test_a_cluster_that_is_silent_altogether_is_told():
    _, logs = played(FedAvg(), Absent(TWO_KINDS, absent={1: set(range(6))}), 1)
    assert events(logs[0], "too_few") == [("too_few", 0, 0)]
    assert logs[0].criteria == {}


@pytest.mark.parametrize("average", ["models", "gradients"])
def test_models_of_ifca_that_too_few_took_stay(average):
    """All take the first model, as all losses are equal."""
    clients = Absent(TWO_KINDS, absent={1: {0, 1, 2}})
    for min_clients, moves in ((3, True), (4, False)):
        states, logs = played(IFCA(average=average), clients, 1, min_clients=min_clients)
        assert torch.equal(states[1].tree.nodes[1].params, states[0].tree.nodes[1].params) != moves
        assert events(logs[0], "too_few") == ([] if moves else [("too_few", 1, 3)])


def test_a_centre_of_fesem_that_too_few_went_to_stays():
    """Client 5 is away in round 2, so that two of the second kind are left."""
    clients = Absent(TWO_KINDS, absent={2: {5}})
    states, logs = played(FeSEM(), clients, 2, min_clients=3)
    assert models(states[1])[1:] == [[1, 0], [0, 1]]
    assert models(states[2])[1:] == [[2, 0], [0, 1]]
    assert events(logs[1], "too_few") == [("too_few", 2, 2)]


def test_fesem_stays_as_it_is_when_nobody_answers():
    states, logs = played(FeSEM(), Absent(TWO_KINDS, absent={1: set(range(6))}), 1)
    assert states[1] is states[0]
    assert logs[0].losses == {}


# FedGroup


def fedgroup(**options) -> FedGroup:
    return FedGroup(groups=2, pretrain_scale=3, base_directions=2, eta_g=0.0, **options)


def test_who_does_not_pretrain_is_in_no_group_and_takes_no_part_until_it_does():
    clients = Absent(TWO_KINDS, absent={(1, "pretrain"): {1, 5}, (2, "pretrain"): {5}})
    states, logs = played(fedgroup(), clients, 3)
    assert [states[n].tree.stragglers for n in (1, 2, 3)] == [{0: (1, 5)}, {0: (5,)}, {}]
    assert logs[0].losses.keys() == {0, 2, 3, 4}
    assert logs[1].losses.keys() == {0, 1, 2, 3, 4}
    assert states[3].tree.leaf_of[1] == states[3].tree.leaf_of[0] != states[3].tree.leaf_of[5]


@pytest.mark.parametrize(("here", "min_clients"), [(1, 1), (4, 5)])
def test_too_few_who_pretrain_leave_the_groups_to_the_next_round(here, min_clients):
    clients = Absent(TWO_KINDS, absent={(1, "pretrain"): set(range(here, 6))})
    states, logs = played(fedgroup(), clients, 2, min_clients=min_clients)
    assert states[1] is states[0]
    assert events(logs[0], "postponed") == [("postponed", 0, here)]
    assert logs[0].phase == "pretrain"
    assert states[2].tree.stragglers == {}


def test_groups_stay_when_nobody_in_them_answers():
    clients = Absent(TWO_KINDS, absent={(2, "train"): set(range(6))})
    states, logs = played(fedgroup(), clients, 2)
    assert models(states[2]) == models(states[1])
    assert events(logs[1], "too_few") == [("too_few", 1, 0), ("too_few", 2, 0)]


# Personal models


def test_who_does_not_fine_tune_is_served_with_the_global_model():
    clients = Absent(TWO_KINDS, absent={(2, "finetune"): {3}})
    states, _ = played(algorithm := FineTune(), clients, 2)
    assert [algorithm.models_for(state, clients).own for state in states] == [
        (),
        (0, 1, 2, 3, 4, 5),
        (0, 1, 2, 4, 5),
    ]


def test_who_is_absent_keeps_its_own_model_in_ditto():
    clients = Absent(TWO_KINDS, absent={1: {5}, 2: {3}})
    states, _ = played(Ditto(), clients, 2)
    assert [state.untrained for state in states] == [(0, 1, 2, 3, 4, 5), (5,), ()]
    assert [Ditto().models_for(state, clients).own for state in states] == [
        (),
        (0, 1, 2, 3, 4),
        (0, 1, 2, 3, 4, 5),
    ]
    assert states[1].initial is not None
    assert states[2].initial is None
