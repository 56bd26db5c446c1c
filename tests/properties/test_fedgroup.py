"""FedGroup as a whole: against the paper's pseudo-code, and under every change that should change nothing."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch import nn

from fedclade import ConfigError, FedAvg, FedGroup, LocalTraining, RunFacts, simulate
from fedclade.algorithms import State, build_algorithm, fedgroup
from fedclade.channel import Channel, Limiting
from fedclade.core import Limits
from fedclade.core.queries import RoundPlan
from fedclade.runs.store.tree_files import read_tree, write_tree
from tests.reference.fedavg import as_numpy
from tests.reference.fedgroup import cosine, fed_group, tightest, zeta
from tests.tiny import (
    FEATURES,
    LABELS,
    Around,
    ScriptedClients,
    details,
    federation_of,
    linear,
    perceptron,
    play,
    renamed,
    simulated,
)

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH = [0, 1, 2, 3, 0, 1, 2, 3]
SIZES = [20, 26, 31, 24, 40, 22, 28, 35]


def world(seed=1, sizes=SIZES):
    return federation_of(TRUTH, sizes, seed=seed)


def groups(tree) -> list[set[int]]:
    return [set(leaf.members) for leaf in tree.leaves]


def played(algorithm, rounds, *, seed=1, fraction=1.0, spec=SPEC, federation=None, module=None):
    clients, params = simulated(federation or world(seed), module or linear(seed))
    return play(algorithm, clients, params, rounds, spec=spec, seed=seed, fraction=fraction)


def without_seconds(rows):
    return [
        {name: value for name, value in row.items() if not name.startswith("seconds")}
        for row in rows
    ]


def bits(tree) -> list[bytes]:
    return [node.params.numpy().tobytes() for node in tree.nodes]


# The literal pseudo-code


LATE = {"cold_start": "sampled"}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("options", "alpha", "eta_g", "mu", "fraction", "sizes"),
    [
        ({}, 2, 0.0, 0.0, 1.0, SIZES),
        ({}, 2, 0.05, 0.5, 1.0, SIZES),
        (
            {},
            1,
            0.05,
            0.0,
            0.5,
            SIZES,
        ),  # half of the clients pre-train, the others join before round 1
        (LATE, 1, 0.05, 0.0, 1.0, SIZES),  # half of the clients join in round 1
        (LATE, 1, 0.05, 0.5, 0.25, SIZES),  # and here later, by the groups' latest updates
        ({**LATE, "direction": "position"}, 1, 0.05, 0.5, 0.25, SIZES),
        ({**LATE, "rac": True}, 1, 0.05, 0.0, 0.25, SIZES),
        ({"rac": True, "rac_redraws": True}, 1, 0.05, 0.0, 0.5, SIZES),
        ({**LATE, "rac": True, "rac_redraws": True}, 1, 0.0, 0.0, 0.5, SIZES),
        ({"rcc": True}, 1, 0.05, 0.0, 0.5, SIZES),
        ({"newcomer_training": "remaining_epochs"}, 1, 0.05, 0.0, 1.0, SIZES),
        ({**LATE, "newcomer_training": "remaining_epochs"}, 1, 0.05, 0.5, 0.5, SIZES),
        ({}, 1, 0.0, 0.0, 0.5, [1, 200, 3, 24, 40, 7, 90, 12]),
        ({"weighted_start": True}, 1, 0.0, 0.0, 0.5, [1, 200, 3, 24, 40, 7, 90, 12]),
    ],
)
def test_equals_algorithms_2_to_4_round_by_round(seed, options, alpha, eta_g, mu, fraction, sizes):
    """The groups, every group's model and the global model after each of 6 rounds."""
    federation = world(seed, sizes)
    algorithm = FedGroup(groups=4, pretrain_scale=alpha, eta_g=eta_g, mu=mu, **options)
    run = played(algorithm, 6, seed=seed, fraction=fraction, federation=federation)
    switches = {
        "rac": algorithm.rac,
        "rcc": algorithm.rcc,
        "weighted": algorithm.weighted_start,
        "sampled": algorithm.cold_start == "sampled",
        "position": algorithm.direction == "position",
        "redrawn": algorithm.rac_redraws,
        "remaining": algorithm.newcomer_training == "remaining_epochs",
    }
    settings = {"alpha": alpha, "eta_g": eta_g, "mu": mu, "fraction": fraction, **switches}
    start = as_numpy(run.states[0].tree.nodes[0].params)
    expected = fed_group(start, federation, linear(), SPEC, m=4, seed=seed, rounds=6, **settings)
    assert run.states[1:]
    for state, wanted in zip(run.states[1:], expected, strict=True):
        assert groups(state.tree) == wanted.groups
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), wanted.w, atol=1e-5)
        for leaf, model in zip(state.tree.leaves, wanted.models, strict=True):
            np.testing.assert_allclose(leaf.params.numpy(), model, atol=1e-5)
    for log, wanted in zip(run.logs, expected, strict=True):
        assert log.discrepancy == pytest.approx(wanted.discrepancy, rel=1e-4)
    founded = [event for event in run.logs[0].events if event.kind == "group_founded"]
    assert len(founded) == (0 if algorithm.rcc else 4)
    for event in founded:
        # A base direction may point either way, and a similarity ζ be 1 − ζ.
        from_middle = np.abs(np.array(expected[0].cm[event.node - 1]) - 0.5)
        np.testing.assert_allclose(np.abs(np.array(event.cm) - 0.5), from_middle, atol=1e-4)
        assert event.sum_of_squares == pytest.approx(expected[0].squares[event.node - 1], abs=1e-4)
    assert not any(event.kind == "group_founded" for log in run.logs[1:] for event in log.events)


def test_three_base_directions_are_the_papers_and_their_number_can_be_set():
    """Four groups that share nothing: three of four right-angled directions leave the fourth at right angles to all."""
    deltas = {
        client: [10.0 - client // 2 if k == client // 2 else 0.0 for k in range(4)]
        for client in range(8)
    }
    pairs = [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    for directions in (3, 4):
        run = play(
            FedGroup(groups=4, base_directions=directions),
            ScriptedClients(deltas),
            torch.zeros(4),
            1,
        )
        assert groups(run.states[1].tree) == pairs
    run = play(FedGroup(groups=4, base_directions=2), ScriptedClients(deltas), torch.zeros(4), 1)
    assert groups(run.states[1].tree) == [{0, 1}, {2, 3}, {4, 5, 6, 7}, set()]


# Choices


@pytest.mark.parametrize(("weighted", "first"), [(False, (1 + 3) / 2), (True, (1 * 1 + 3 * 3) / 4)])
def test_groups_start_from_the_first_model_plus_the_mean_of_their_pre_training_updates(
    weighted, first
):
    """Algorithm 4, line 7: with pre-training (1, 0) and (3, 0) of 1 and 3 examples; Algorithm 1 weights round 1."""
    clients = ScriptedClients({0: [1, 0], 1: [3, 0], 2: [0, 8]}, {0: 1, 1: 3, 2: 1})
    algorithm = FedGroup(groups=2, eta_g=0.0, weighted_start=weighted)
    run = play(algorithm, clients, torch.tensor([100.0, 100.0]), 1)
    tree = run.states[1].tree
    assert groups(tree) == [{0, 1}, {2}]
    then = (1 * 1 + 3 * 3) / 4
    assert tree.nodes[1].params.tolist() == [100 + first + then, 100]
    assert tree.nodes[2].params.tolist() == [100, 100 + 8 + 8]
    assert tree.nodes[0].params.tolist() == [100 + (first + then) / 2, 100 + 8], (
        "line 11: the plain mean"
    )
    pretrain, train = run.clients.asked("train", 1)
    assert all(model.tolist() == [100, 100] for model in pretrain.models.values())
    assert {client: model.tolist() for client, model in train.models.items()} == {
        0: [100 + first, 100],
        1: [100 + first, 100],
        2: [100, 108],
    }


def late(algorithm, *, rounds=2, newcomer=(5.0, 1.0)):
    """Clients 0 to 3 pre-train in two groups; client 4 is asked for the first time in the last round."""
    deltas = {0: [4, 0], 1: [4, 0.1], 2: [0, 1], 3: [0.1, 1], 4: list(newcomer)}
    clients = ScriptedClients(deltas)
    state = algorithm.init(torch.zeros(2), clients)
    seed = next(seed for seed in range(99) if 4 not in pre_trained(algorithm, clients, seed))
    events = []
    for number in range(1, rounds + 1):
        cohort = range(4) if number < rounds else range(5)
        state, log = algorithm.step(state, cohort, clients, RoundPlan(number, SPEC, seed))
        events.append(log.events)
    return state, events


def pre_trained(algorithm, clients, seed):
    state, _ = algorithm.step(
        algorithm.init(torch.zeros(2), clients), [0], clients, RoundPlan(1, SPEC, seed)
    )
    return {client for leaf in state.tree.leaves for client in leaf.members}


@pytest.mark.parametrize("direction", ["update", "position"])
@pytest.mark.parametrize(
    ("newcomer", "group"), [((5, 1), 1), ((1, 5), 2), ((5, -1), 1), ((-5, 1), 2)]
)
def test_newcomers_join_the_group_with_the_largest_cosine(newcomer, group, direction):
    """Eq. 10: against the groups' latest updates, (4, 0.05) and (0.05, 1), or their places from the global model."""
    algorithm = FedGroup(groups=2, pretrain_scale=2, eta_g=0.0, direction=direction, **LATE)
    state, events = late(algorithm, newcomer=newcomer)
    assert state.tree.leaf_of[4] == group
    (joined,) = events[-1]
    assert (joined.kind, joined.node, details(joined)) == ("joined", group, {"clients": [4]})


def test_all_clients_join_a_group_before_round_1():
    """Some at a time, as their updates need not all be held at once."""
    federation = federation_of([k % 4 for k in range(12)], seed=1)
    for at_once in (3, 500):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fedgroup, "COLD_CLIENTS_PER_QUERY", at_once)
            run = played(
                FedGroup(groups=4, pretrain_scale=1), 2, fraction=0.25, federation=federation
            )
        first, *cold, _ = run.clients.asked("train", 1)
        assert [len(call.ids) for call in cold] == ([3, 3, 2] if at_once == 3 else [8])
        joined = [client for call in cold for client in call.ids]
        assert sorted([*first.ids, *joined]) == list(range(12))
        start = run.states[0].tree.nodes[0].params
        assert all(
            torch.equal(model, start) for call in (first, *cold) for model in call.models.values()
        )
        assert not run.states[1].tree.stragglers
        assert len(run.clients.asked("train", 2)) == 1


def test_newcomers_pre_train_at_the_current_global_model_and_then_train_at_their_groups():
    run = played(FedGroup(groups=4, pretrain_scale=1, **LATE), 5, fraction=0.25)
    newcomers = 0
    for number in range(2, 6):
        before, after = run.states[number - 1].tree, run.states[number].tree
        calls = run.clients.asked("train", number)
        cold = {client for client in calls[-1].ids if before.leaf_of[client] == 0}
        newcomers += len(cold)
        assert len(calls) == (2 if cold else 1)
        if cold:
            assert set(calls[0].ids) == cold
            assert all(
                torch.equal(model, before.nodes[0].params) for model in calls[0].models.values()
            )
        for client, model in calls[-1].models.items():
            assert torch.equal(model, before.nodes[after.leaf_of[client]].params)
    assert newcomers >= 2


def test_newcomers_of_round_1_pre_train_at_the_first_model():
    """Algorithm 2, line 11 comes after the training."""
    run = played(FedGroup(groups=4, pretrain_scale=1), 1)
    first, newcomers, _ = run.clients.asked("train", 1)
    assert len(first.ids) == len(newcomers.ids) == 4
    start = run.states[0].tree.nodes[0].params
    assert all(
        torch.equal(model, start) for call in (first, newcomers) for model in call.models.values()
    )


def test_clients_that_come_late_find_their_group():
    """Every client of a group is of one kind, also those that join in rounds 5 to 30, when the groups have moved on.

    That takes ``direction = "position"``. By what the groups learnt in their last round, which is eq. 10 to the letter,
    some would be misplaced.
    """
    truth = [k % 4 for k in range(60)]
    federation = federation_of(truth, [60] * 60, seed=2)
    algorithm = FedGroup(groups=4, pretrain_scale=4, direction="position", **LATE)
    run = played(algorithm, 30, fraction=0.1, federation=federation, module=linear(2), seed=2)
    tree = run.states[-1].tree
    assert all(len({truth[client] for client in leaf.members}) == 1 for leaf in tree.leaves)
    misplaced, came = 0, 0
    for number in range(5, 31):
        before = run.states[number - 1].tree
        pretrain, *train = run.clients.asked("train", number)
        if not train:
            continue
        last = [
            as_numpy(leaf.params - run.states[number - 2].tree.nodes[leaf.id].params)
            for leaf in before.leaves
        ]
        for client, update in zip(pretrain.ids, pretrain.answer.deltas.numpy(), strict=True):
            came += 1
            by_last = 1 + int(
                np.argmax([cosine(update, move) if move.any() else 0.0 for move in last])
            )
            misplaced += by_last != tree.leaf_of[client]
    assert came > 10
    assert misplaced > 0


def test_nobody_but_the_groups_trains_with_the_proximal_term():
    """FedGrouProx: μ of the algorithm, or else of the local training; PreTrainClient of Algorithm 3 has none."""
    by_algorithm = played(FedGroup(groups=4, mu=0.7), 2)
    by_local = played(FedGroup(groups=4), 2, spec=dataclasses.replace(SPEC, mu=0.7))
    without = played(FedGroup(groups=4, mu=0.0), 2, spec=dataclasses.replace(SPEC, mu=0.7))
    plain = played(FedGroup(groups=4), 2)
    assert bits(by_algorithm.states[-1].tree) == bits(by_local.states[-1].tree)
    assert bits(without.states[-1].tree) == bits(plain.states[-1].tree)
    assert bits(by_algorithm.states[-1].tree) != bits(plain.states[-1].tree)
    first = [
        run.clients.asked("train", 1)[0].answer.deltas for run in (by_algorithm, by_local, plain)
    ]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])


def test_pre_training_is_one_epoch():
    """As long as a round of one epoch, with draws of its own."""
    first = played(FedGroup(groups=4), 1).clients.asked("train", 1)[0]
    clients, params = simulated(world(), linear(1))
    one_epoch = dataclasses.replace(SPEC, epochs=1)
    alone = clients.train(
        first.ids, params[None], [0] * 8, RoundPlan(1, one_epoch, 1, purpose="pretrain")
    )
    assert torch.equal(first.answer.deltas, alone.deltas)


# Groups without clients


@pytest.mark.parametrize("eta_g", [0.0, 0.1])
def test_a_group_without_a_client_in_a_round_takes_part_in_the_inter_group_step_alone(eta_g):
    """Algorithm 2, lines 13, 14 and 23: w + η_g Σ w̃/‖w̃‖ over the other group, whose w̃ includes its training."""
    clients = ScriptedClients({0: [2, 0], 1: [0, 2]})
    algorithm = FedGroup(groups=2, eta_g=eta_g)
    state, _ = algorithm.step(
        algorithm.init(torch.zeros(2), clients), [0, 1], clients, RoundPlan(1, SPEC)
    )
    before = state.tree
    assert groups(before) == [{0}, {1}]
    state, log = algorithm.step(state, [1], clients, RoundPlan(2, SPEC))
    trained = before.nodes[2].params + torch.tensor([0.0, 2.0])
    torch.testing.assert_close(
        state.tree.nodes[1].params, before.nodes[1].params + eta_g * trained / trained.norm()
    )
    assert list(log.criteria) == [2]
    assert groups(state.tree) == groups(before)


def test_an_empty_group_is_an_event_and_keeps_the_first_model():
    clients = ScriptedClients({0: [1, 0], 1: [1, 0], 2: [0, 1], 3: [0, 1]})
    run = play(FedGroup(groups=3, eta_g=0.0), clients, torch.tensor([5.0, 5.0]), 2)
    tree = run.states[-1].tree
    assert groups(tree) == [{0, 1}, {2, 3}, set()]
    assert tree.nodes[3].params.tolist() == [5, 5]
    assert [(event.kind, event.node, details(event)) for event in run.logs[0].events] == [
        ("group_founded", 1, {"clients": 2, "cm": [0.0, 0.5, 0.5], "sum_of_squares": 0.0}),
        ("group_founded", 2, {"clients": 2, "cm": [0.5, 0.0, 0.5], "sum_of_squares": 0.0}),
        ("joined", 1, {"clients": [0, 1]}),
        ("joined", 2, {"clients": [2, 3]}),
        ("empty", 3, {}),
    ]
    assert run.logs[1].events == ()


def test_an_empty_group_takes_newcomers_that_point_away_from_all_others():
    """Relative to the global model, the mean of (1, 0), (0, 1) and (0, 0), the empty group lies at −(⅓, ⅓)."""
    deltas = {0: [1, 0], 1: [0, 1], 2: [1, 0], 3: [-1, -1]}
    clients = ScriptedClients(deltas)
    algorithm = FedGroup(groups=3, pretrain_scale=1, eta_g=0.0, direction="position", **LATE)
    seed = next(seed for seed in range(99) if 3 not in pre_trained(algorithm, clients, seed))
    state = algorithm.init(torch.zeros(2), clients)
    state, _ = algorithm.step(state, [0, 1, 2], clients, RoundPlan(1, SPEC, seed))
    assert groups(state.tree) == [{0, 2}, {1}, set()]
    state, log = algorithm.step(state, [3], clients, RoundPlan(2, SPEC, seed))
    assert groups(state.tree) == [{0, 2}, {1}, {3}]
    assert [event.kind for event in log.events] == ["joined"]


def test_a_run_with_an_empty_group_is_recorded_saved_and_drawn(tmp_path):
    """Four clients with the same data and draws in three groups, of which two stay empty."""
    federation = federation_of([0] * 4)
    same = tuple(dataclasses.replace(federation.clients[0], id=k, name=f"c{k}") for k in range(4))
    run = simulate(
        FedGroup(groups=3),
        linear(),
        dataclasses.replace(federation, clients=same),
        local=SPEC,
        rounds=2,
    )
    assert run.summary["clusters"]["sizes"] == [4]
    assert [event["node"] for event in run.events if event["kind"] == "empty"] == [2, 3]
    again = type(run).load(run.save(tmp_path / "run"))
    assert [leaf.members for leaf in again.tree.leaves] == [(0, 1, 2, 3), (), ()]


# Ablations


def test_random_assignment_of_newcomers_leaves_the_pre_trained_where_they_are():
    """RAC: newcomers are spread over the groups by the draw, without pre-training."""
    federation = federation_of([k % 2 for k in range(40)], seed=1)
    some = FedGroup(groups=2, pretrain_scale=5)
    with_rac, without = (
        played(dataclasses.replace(some, rac=rac), 1, federation=federation)
        for rac in (True, False)
    )
    first = with_rac.clients.asked("train", 1)[0].ids
    assert len(first) == 10
    ours, theirs = with_rac.states[-1].tree.leaf_of, without.states[-1].tree.leaf_of
    assert all(ours[client] == theirs[client] for client in first)
    assert len(with_rac.clients.asked("train", 1)) == 2
    assert len(without.clients.asked("train", 1)) == 3
    newcomers = [client for client in range(40) if client not in first]
    assert {ours[client] for client in newcomers} == {1, 2}
    assert 5 < sum(ours[client] != theirs[client] for client in newcomers) < 25


def test_random_centers_are_the_first_clients_of_the_groups():
    """RCC: m clients pre-train, each starts a group with its own model, and all others join by eq. 10."""
    truth = [k % 4 for k in range(24)]
    run = played(
        FedGroup(groups=4, eta_g=0.0, rcc=True), 1, federation=federation_of(truth, seed=1)
    )
    first, cold, train = run.clients.asked("train", 1)
    assert len(first.ids) == 4
    assert set(cold.ids) == set(range(24)) - set(first.ids)
    start, tree = run.states[0].tree.nodes[0].params, run.states[1].tree
    for place, (client, delta) in enumerate(
        zip(first.ids, first.answer.deltas, strict=True), start=1
    ):
        assert tree.leaf_of[client] == place
        assert torch.equal(train.models[client], start + delta)
    for client, delta in zip(cold.ids, cold.answer.deltas.double().numpy(), strict=True):
        cosines = [cosine(delta, each) for each in first.answer.deltas.double().numpy()]
        assert tree.leaf_of[client] == 1 + int(np.argmax(cosines))


def test_clients_of_the_random_ablation_change_groups_only_if_they_are_redrawn():
    """Those that did not pre-train for the groups; a round with half of the clients."""
    options = {"groups": 4, "pretrain_scale": 1, "rac": True}
    stay, move = (
        played(FedGroup(**options, rac_redraws=redraws), 6, fraction=0.5)
        for redraws in (False, True)
    )
    assert groups(stay.states[1].tree) == groups(stay.states[6].tree) == groups(move.states[1].tree)
    assert groups(move.states[6].tree) != groups(move.states[1].tree)
    first = set(move.clients.asked("train", 1)[0].ids)
    assert move.states[6].pretrained == tuple(sorted(first))
    assert "pretrained" not in stay.states[6].tensors()
    for before, after in zip(move.states[1:], move.states[2:], strict=False):
        changed = {c for c, leaf in after.tree.leaf_of.items() if before.tree.leaf_of[c] != leaf}
        assert not changed & first


def test_a_newcomer_goes_on_from_where_it_pre_trained_without_being_sent_a_model():
    algorithm = FedGroup(groups=4, pretrain_scale=1, newcomer_training="remaining_epochs")
    run = played(algorithm, 1)
    _, cold, going_on, others = run.clients.asked("train", 1)
    assert going_on.ids == cold.ids
    assert set(others.ids) == set(range(8)) - set(cold.ids)
    assert (cold.round.local.epochs, going_on.round.local.epochs, others.round.local.epochs) == (
        1,
        1,
        2,
    )
    assert going_on.query.models.sent_before
    for client, delta in zip(cold.ids, cold.answer.deltas, strict=True):
        assert torch.equal(going_on.models[client], run.states[0].tree.nodes[0].params + delta)


class Enlarged(Around):
    """Clients of which the first sends a hundred times its update when it goes on from where it pre-trained."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        updates = self.clients.train(ids, models, assignment, this_round, work, **more)
        if not more.get("sent_before"):
            return updates
        factors = torch.ones(len(ids), 1)
        factors[0] = 100.0
        deltas = updates.required_deltas * factors
        return updates.with_columns(deltas=deltas, norms=updates.norms * factors[:, 0])


def test_the_remaining_epochs_of_newcomers_are_within_the_limits():
    clients, params = simulated(world(), linear(1))
    limiting = Limiting(
        Limits(largest_norm=10.0), clients.layout.n_parameters, lambda: clients.sizes
    )
    algorithm = FedGroup(groups=4, pretrain_scale=1, newcomer_training="remaining_epochs")
    limited = Channel(Enlarged(clients), limiting)
    run = play(algorithm, limited, params + 100.0, 1, spec=SPEC, seed=1)
    going_on = next(call for call in run.clients.asked("train", 1) if call.query.models.sent_before)
    assert len(going_on.ids) > 3
    assert going_on.answer.left_out.keys() == {going_on.ids[0]}


class LosesNewcomers(Around):
    """Clients of which the first does not reply when it goes on from where it pre-trained."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        updates = self.clients.train(ids, models, assignment, this_round, work, **more)
        return updates.select(ids[1:]) if more.get("sent_before") else updates


def test_a_newcomer_that_does_not_reply_again_is_in_its_group_and_does_not_count():
    algorithm = FedGroup(groups=4, pretrain_scale=1, newcomer_training="remaining_epochs")
    whole = played(algorithm, 1)
    clients, params = simulated(world(), linear(1))
    run = play(algorithm, LosesNewcomers(clients), params, 1, spec=SPEC, seed=1)
    lost = run.clients.asked("train", 1)[2].ids[0]
    assert groups(run.states[1].tree) == groups(whole.states[1].tree)
    assert set(whole.logs[0].losses) - set(run.logs[0].losses) == {lost}


def test_a_newcomer_of_one_epoch_has_trained_when_it_has_pre_trained():
    algorithm = FedGroup(groups=4, pretrain_scale=1, newcomer_training="remaining_epochs")
    run = played(algorithm, 2, spec=dataclasses.replace(SPEC, epochs=1))
    assert [len(run.clients.asked("train", number)) for number in (1, 2)] == [3, 1]
    expected = fed_group(
        *(
            as_numpy(run.states[0].tree.nodes[0].params),
            world(),
            linear(),
            dataclasses.replace(SPEC, epochs=1),
        ),
        **{"m": 4, "alpha": 1, "eta_g": 0.01, "seed": 1, "rounds": 2, "remaining": True},
    )
    for leaf, model in zip(run.states[2].tree.leaves, expected[1].models, strict=True):
        np.testing.assert_allclose(leaf.params.numpy(), model, atol=1e-5)


def test_newcomers_cannot_count_epochs_of_steps():
    algorithm = FedGroup(newcomer_training="remaining_epochs")
    text = "local.epochs should be set with newcomer_training = 'remaining_epochs', got None"
    with pytest.raises(ConfigError, match=re.escape(text)):
        algorithm.check(RunFacts(local=LocalTraining(steps=5)))
    FedGroup().check(RunFacts(local=LocalTraining(steps=5)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"rac_redraws": True},
            "algorithm.rac_redraws should be false without rac = true, got True",
        ),
        (
            {"newcomer_training": "none"},
            "algorithm.newcomer_training should be 'all_epochs' or 'remaining_epochs', got 'none'",
        ),
        (
            {"newcomer_training": "remaining_epochs", "pretrain_steps": 5},
            "algorithm.pretrain_steps should be left out with newcomer_training = 'remaining_epochs', where "
            "pre-training is one epoch, got 5",
        ),
    ],
)
def test_a_switch_that_fits_no_other_setting_is_refused(options, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        FedGroup(**options)


# Changes that should change nothing


@pytest.mark.parametrize(("alpha", "seed"), [(2, 0), (2, 1), (1, 1), (1, 2)])
def test_renaming_clients_changes_nothing_but_names(alpha, seed):
    """Other ids in another order; where not all pre-train, the same clients do."""
    federation, algorithm = world(seed), FedGroup(groups=4, pretrain_scale=alpha)
    settings = {"local": SPEC, "rounds": 4, "seed": seed}
    first = set(
        played(algorithm, 1, seed=seed, federation=federation).clients.asked("train", 1)[0].ids
    )
    shuffled = np.random.default_rng(seed).permutation
    new: dict[int, int] = {}
    for part in (sorted(first), sorted(set(range(8)) - first)):
        new |= dict(zip(part, shuffled(part).tolist(), strict=True))
    assert new != {client: client for client in range(8)}
    run, other = (
        simulate(algorithm, linear(), each, **settings)
        for each in (federation, renamed(federation, new))
    )
    renamed_groups = [{new[client] for client in group} for group in groups(run.tree)]
    assert sorted(map(sorted, renamed_groups)) == sorted(map(sorted, groups(other.tree)))
    for client, leaf in run.tree.leaf_of.items():
        theirs = other.tree.nodes[other.tree.leaf_of[new[client]]].params
        torch.testing.assert_close(theirs, run.tree.nodes[leaf].params, rtol=0, atol=1e-5)


def test_the_order_of_clients_in_a_call_changes_nothing():
    clients, params = simulated(world(), linear(1))
    for algorithm in (
        FedGroup(groups=4, pretrain_scale=1),
        FedGroup(groups=4, pretrain_scale=1, rac=True),
    ):
        state = shuffled = algorithm.init(params, clients)
        for number in range(1, 4):
            this_round = RoundPlan(number, SPEC, 1)
            state, log = algorithm.step(state, range(8), clients, this_round)
            shuffled, other = algorithm.step(
                shuffled, [5, 2, 7, 0, 1, 4, 6, 3], clients, this_round
            )
            assert other.events == log.events
            assert bits(shuffled.tree) == bits(state.tree)


def test_same_seed_same_bits():
    settings = {"local": SPEC, "rounds": 4, "client_fraction": 0.5}
    algorithm = FedGroup(groups=4, pretrain_scale=1)
    first, second, other = (
        simulate(algorithm, "mclr", world(), seed=seed, **settings) for seed in (1, 1, 2)
    )
    assert bits(first.tree) == bits(second.tree)
    assert without_seconds(first.metric_rows) == without_seconds(second.metric_rows)
    assert first.events == second.events
    assert bits(first.tree) != bits(other.tree)


def test_the_engine_changes_nothing_but_rounding():
    settings = {"local": SPEC, "rounds": 4, "seed": 1, "client_fraction": 0.5}
    algorithm = FedGroup(groups=4, pretrain_scale=1)
    loop, stacked = (
        simulate(algorithm, perceptron(1), world(), engine=engine, **settings)
        for engine in ("loop", "stacked")
    )
    assert groups(loop.tree) == groups(stacked.tree)
    for ours, theirs in zip(loop.tree.nodes, stacked.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=1e-4, atol=1e-5)


def test_permuted_vectors_give_the_same_groups_and_models():
    """CFL eqs. 45 and 46: norms and cosines are all that the server takes from the vectors."""
    settings = {"local": SPEC, "rounds": 4, "seed": 1, "client_fraction": 0.5}
    algorithm = FedGroup(groups=4, pretrain_scale=1)
    plain, hidden = (
        simulate(algorithm, linear(1), world(), permute=permute, **settings)
        for permute in (False, True)
    )
    assert groups(plain.tree) == groups(hidden.tree)
    for ours, theirs in zip(plain.tree.nodes, hidden.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-5)


def test_the_tree_is_all_that_a_later_round_needs(tmp_path):
    """Written, read and gone on from after every round, with newcomers to come: not a bit differs."""
    algorithm = FedGroup(groups=4, pretrain_scale=1)
    whole = played(algorithm, 5, fraction=0.25)
    clients, params = simulated(world(), linear(1))
    state = algorithm.init(params, clients)
    for number in range(1, 6):
        assert not state.tensors()
        write_tree(state.tree, tmp_path / str(number))
        state = State(read_tree(tmp_path / str(number)))
        this_round = RoundPlan(number, SPEC, 1)
        cohort = algorithm.sample_cohort(state, 0.25, this_round.generator("cohort"))
        state, _ = algorithm.step(state, cohort, clients, this_round)
    assert bits(state.tree) == bits(whole.states[-1].tree)
    assert groups(state.tree) == groups(whole.states[-1].tree)


def test_one_group_goes_on_as_fedavg():
    """From the model after pre-training: the same cohorts, draws and means."""
    clients, params = simulated(world(), linear(1))
    algorithm, fedavg = FedGroup(groups=1, mu=0.1), FedAvg()
    state, _ = algorithm.step(
        algorithm.init(params, clients), range(8), clients, RoundPlan(1, SPEC, 1)
    )
    plain = fedavg.init(state.tree.nodes[1].params, clients)
    for number in range(2, 5):
        this_round = RoundPlan(number, SPEC, 1)
        proximal = dataclasses.replace(this_round, local=dataclasses.replace(SPEC, mu=0.1))
        cohort = algorithm.sample_cohort(state, 0.5, this_round.generator("cohort"))
        assert cohort == fedavg.sample_cohort(plain, 0.5, this_round.generator("cohort"))
        state, _ = algorithm.step(state, cohort, clients, this_round)
        plain, _ = fedavg.step(plain, cohort, clients, proximal)
    assert torch.equal(state.tree.nodes[1].params, plain.tree.nodes[0].params)
    assert torch.equal(state.tree.nodes[0].params, plain.tree.nodes[0].params)


# Models with buffers


class Watching(nn.Module):
    """A linear model behind BatchNorm, and a buffer of its own that is far larger than all parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.output = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, LABELS)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1e4 * x[0, 0]
        return self.output(self.norm(x))


def test_models_with_batch_norm_are_compared_by_their_parameters_and_average_their_buffers():
    clients, params = simulated(world(1, [24] * 8), Watching())
    D = clients.layout.n_parameters
    assert len(params) > D
    steps, still = (
        play(
            FedGroup(groups=3, pretrain_scale=2, eta_g=eta_g), clients, params, 1, spec=SPEC, seed=1
        )
        for eta_g in (0.5, 0.0)
    )
    first, newcomers, _ = steps.clients.asked("train", 1)
    assert (len(first.ids), len(newcomers.ids)) == (6, 2)
    assert groups(steps.states[1].tree) == groups(still.states[1].tree)
    deltas = first.answer.deltas[:, :D].double().numpy()
    V = np.linalg.svd(deltas.T, full_matrices=False)[0][:, :3]
    by_parameters = [
        set(part) for part in tightest(np.array([zeta(delta, V) for delta in deltas]), 3)
    ]
    found = [
        {first.ids.index(c) for c in group if c in first.ids}
        for group in groups(steps.states[1].tree)
    ]
    assert found == by_parameters
    for client, delta in zip(newcomers.ids, newcomers.answer.deltas.double().numpy(), strict=True):
        of_groups = [first.answer.select(sorted(group)) for group in groups(still.states[1].tree)]
        cosines = [cosine(delta[:D], (u.sizes @ u.deltas.double())[:D].numpy()) for u in of_groups]
        assert still.states[1].tree.leaf_of[client] == 1 + int(np.argmax(cosines))
    for moved, kept in zip(steps.states[1].tree.leaves, still.states[1].tree.leaves, strict=True):
        assert torch.equal(moved.params[D:], kept.params[D:]), "η_g moves parameters alone"
        assert not torch.equal(moved.params[:D], kept.params[:D])
        state = clients.layout.unflatten(moved.params)
        assert (state["norm.running_var"] > 0).all()
    mean = torch.stack([leaf.params for leaf in steps.states[1].tree.leaves]).mean(0)
    assert torch.equal(steps.states[1].tree.nodes[0].params, mean)


def test_a_model_with_batch_norm_runs_to_the_end():
    run = simulate(
        FedGroup(groups=4, eta_g=0.1),
        Watching(),
        world(1, [24] * 8),
        local=SPEC,
        rounds=4,
        client_fraction=0.5,
    )
    assert all(torch.isfinite(node.params).all() for node in run.tree.nodes)
    assert run.metric_rows[-1]["accuracy_mean"] > 0.25


# Client sizes


def test_a_client_of_one_example_and_one_of_500_work():
    federation = federation_of([0, 1, 0, 1], [1, 500, 300, 2], seed=3)
    run = played(FedGroup(groups=2), 3, federation=federation, module=linear(3))
    before, after = run.states[2].tree, run.states[3].tree
    answer = run.clients.asked("train", 3)[0].answer
    assert after.leaves
    for leaf in after.leaves:
        mine = answer.select(leaf.members)
        moved = before.nodes[leaf.id].params + (mine.sizes / mine.sizes.sum()).float() @ mine.deltas
        others = [n for n in before.leaves if n.id != leaf.id]
        assert len(others) == 1
        assert (leaf.params - moved).norm() == pytest.approx(0.01, rel=1e-3), (
            "η_g along one other model"
        )


# What is logged


def test_the_first_round_logs_its_pre_training_and_all_rounds_the_discrepancy_of_their_cohort():
    """Eq. 4: Σ ‖w_i − w_t‖ over S_t, each client from its group's model after all aggregation."""
    algorithm = FedGroup(groups=4, pretrain_scale=1, eta_g=0.3)
    run = simulate(algorithm, linear(1), world(), local=SPEC, rounds=3, seed=1)
    assert [row["phase"] for row in run.metric_rows] == ["pretrain", "train", "train"]
    assert run.cluster_rows[0]["node"] == 0
    watched = played(algorithm, 3)
    for number, row in enumerate(run.metric_rows, start=1):
        assert row["discrepancy"] == pytest.approx(discrepancy(watched, number), rel=1e-5)
        assert row["clients_trained"] == 8


def discrepancy(run, number: int) -> float:
    """Eq. 4 for the cohort of a round."""
    call, tree = run.clients.asked("train", number)[-1], run.states[number].tree
    local = {
        c: call.models[c] + delta
        for c, delta in zip(call.answer.ids, call.answer.deltas, strict=True)
    }
    return sum(
        float((model - tree.nodes[tree.leaf_of[client]].params).norm())
        for client, model in local.items()
    )


def test_the_discrepancy_leaves_out_those_who_only_pre_trained():
    settings = {"local": SPEC, "rounds": 1, "seed": 1, "client_fraction": 0.5}
    row = simulate(FedGroup(groups=4), linear(1), world(), **settings).metric_rows[0]
    watched = played(FedGroup(groups=4), 1, fraction=0.5)
    assert len(watched.clients.asked("train", 1)[-1].ids) == 4
    assert row["discrepancy"] == pytest.approx(discrepancy(watched, 1), rel=1e-5)


def test_pre_training_is_paid_for():
    """αm clients and as many newcomers, besides all of them in the round itself; float32 is 4 bytes."""
    run = simulate(
        FedGroup(groups=4, pretrain_scale=1), linear(1), world(), local=SPEC, rounds=2, seed=1
    )
    size = (FEATURES * LABELS + LABELS) * 4
    assert [row["bytes_up"] for row in run.metric_rows] == [(4 + 4 + 8) * size, 8 * size]


def test_the_weighted_accuracy_is_that_of_clients_in_a_group_by_their_test_examples():
    """Section IV-A: the sum of what is predicted right in all groups, divided by their test data."""
    federation = world()
    uneven = tuple(dataclasses.replace(c, test=c.test[: 5 + 2 * c.id]) for c in federation.clients)
    federation = dataclasses.replace(federation, clients=uneven)
    algorithm = FedGroup(groups=3, pretrain_scale=1, **LATE)
    run = simulate(algorithm, linear(1), federation, local=SPEC, rounds=2, client_fraction=0.25)
    assert run.metric_rows
    for row in run.metric_rows:
        scores = [r for r in run.client_rows if r["round"] == row["round"]]
        inside = [r for r in scores if r["cluster"] != 0]
        assert 0 < len(inside) < len(scores)
        right = sum(r["accuracy"] * (5 + 2 * r["client"]) for r in inside)
        assert row["accuracy_weighted"] == pytest.approx(
            right / sum(5 + 2 * r["client"] for r in inside)
        )
        assert row["accuracy_mean"] == pytest.approx(sum(r["accuracy"] for r in scores) / 8)


def test_clients_that_were_never_sampled_are_served_with_the_global_model():
    algorithm = FedGroup(groups=2, pretrain_scale=1, **LATE)
    run = played(algorithm, 1, fraction=0.25)
    tree = run.states[-1].tree
    served = algorithm.models_for(run.states[-1], run.clients).nodes
    members = {client for leaf in tree.leaves for client in leaf.members}
    assert set(served) == set(range(8))
    assert {client for client, node in served.items() if node == 0} == set(range(8)) - members
    assert 2 <= len(members) <= 4


def test_the_cohort_is_drawn_from_all_clients_whatever_their_group():
    """Algorithm 2, line 4: K of N, not K of every group."""
    run = played(FedGroup(groups=4), 12, fraction=0.25)
    cohorts = [run.clients.asked("train", number)[-1].ids for number in range(1, 13)]
    assert all(len(cohort) == 2 for cohort in cohorts)
    leaf_of = run.states[-1].tree.leaf_of
    assert any(len({leaf_of[client] for client in cohort}) == 1 for cohort in cohorts)


# Options


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("groups", 0, "at least 1"),
        ("pretrain_scale", 0, "at least 1"),
        ("eta_g", -0.01, "at least 0"),
        ("mu", -1.0, "at least 0, or left out"),
        ("base_directions", 0, "at least 1"),
        ("cold_start", "late", "'start' or 'sampled'"),
        ("direction", "model", "'update' or 'position'"),
    ],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        FedGroup(**{option: value})


def test_more_groups_than_clients_that_can_pre_train_are_refused():
    text = "algorithm.groups should be at most 8, the number of clients that can pre-train, got 9"
    with pytest.raises(ConfigError, match=re.escape(text)):
        simulate(FedGroup(groups=9), linear(), world())
    assert len(groups(played(FedGroup(groups=8), 1).states[-1].tree)) == 8


def test_an_option_of_the_wrong_type_or_name_is_refused():
    with pytest.raises(
        ConfigError, match="mu of algorithm 'fedgroup' should be a number or left out, got 'big'"
    ):
        build_algorithm("fedgroup", {"mu": "big"})
    with pytest.raises(
        ConfigError,
        match=r"pretrain_scale of algorithm 'fedgroup' should be a whole number, got 1\.5",
    ):
        build_algorithm("fedgroup", {"pretrain_scale": 1.5})
    with pytest.raises(ConfigError, match="'group'; did you mean 'groups'"):
        build_algorithm("fedgroup", {"group": 3})
