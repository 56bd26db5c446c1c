"""IFCA: against the paper's pseudo-code, its restarts, and what becomes of those who do not take part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedclade import IFCA, ConfigError, LocalTraining, simulate
from fedclade.channel import Channel, OpposingUpdates
from fedclade.clustering.routing import assign_to_lowest_loss, estimate_by_loss
from fedclade.core.queries import Evaluation, RoundPlan
from tests.reference.fedavg import as_numpy
from tests.reference.ifca import iterative_federated_clustering, risk
from tests.tiny import Metered, ScriptedClients, details, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH = [0, 1, 2, 0, 1, 2, 0, 1]
SIZES = [20, 26, 31, 24, 40, 22, 28, 5]


def world(seed=0):
    return federation_of(TRUTH, SIZES, seed=seed)


def models(k: int, seed=0) -> torch.Tensor:
    return torch.stack([simulated(world(), linear(100 * seed + j))[1] for j in range(k)])


class Choosers(ScriptedClients):
    """Clients whose loss is the distance of a one-entry model from where they would have it."""

    wants: Sequence[float] = (0.0, 0.0, 10.0, 11.0)

    def evaluate(self, ids, models, assignment, split):
        losses = [
            abs(float(models[row, 0]) - self.wants[client])
            for client, row in zip(ids, assignment, strict=True)
        ]
        losses = torch.tensor(losses, dtype=torch.float64)
        return Evaluation(tuple(ids), losses[:, None], losses, torch.ones(len(ids)))


class WithLiar(Choosers):
    """Six clients, the last of which claims a small loss where its own is large, and the other way round."""

    wants: Sequence[float] = (0.0, 0.0, 0.0, 10.0, 10.0, 10.0)

    def evaluate(self, ids, models, assignment, split):
        true = super().evaluate(ids, models, assignment, split)
        losses = torch.where(
            torch.tensor([client == 5 for client in ids]), 100 - true.losses, true.losses
        )
        return replace(true, losses=losses)


def told(log) -> list[tuple[str, int, list[int] | None]]:
    return [(event.kind, event.node, details(event).get("clients")) for event in log.events]


def choosers(delta=1.0, sizes=None) -> Choosers:
    return Choosers({client: [delta * (client + 1)] for client in range(4)}, sizes or {})


@pytest.mark.parametrize("average", ["models", "gradients"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_algorithm_1_round_by_round(average, seed):
    """The same identities, and every model, after each of 6 rounds; at least two models are in use at the end."""
    federation, start = world(seed), models(3, seed)
    clients, _ = simulated(federation, linear())
    played = play(IFCA(clusters=3, average=average), clients, start, 6, spec=SPEC, seed=seed)
    theta_0 = [as_numpy(model) for model in start]
    settings = {"option": average, "seed": seed, "rounds": 6}
    expected = iterative_federated_clustering(theta_0, federation, linear(), SPEC, **settings)
    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert state.tree.leaf_of == {i: 1 + j for i, j in wanted.identity.items()}
        for leaf, theta in zip(state.tree.leaves, wanted.theta, strict=True):
            np.testing.assert_allclose(leaf.params.numpy(), theta, atol=1e-5)
    assert len(set(expected[-1].identity.values())) > 1


def test_the_estimate_is_the_lowest_loss_on_training_data():
    federation, start = world(), models(3)
    clients, _ = simulated(federation, linear())
    tree = IFCA(clusters=3).init(start, clients).tree
    chosen, mean = assign_to_lowest_loss(tree, [4, 1, 7], clients)
    losses = {
        i: [risk(as_numpy(model), i, federation, linear())[0] for model in start] for i in (4, 1, 7)
    }
    assert {client: chosen.leaf_of[client] for client in losses} == {
        i: 1 + int(np.argmin(each)) for i, each in losses.items()
    }
    assert mean == pytest.approx(np.mean([min(each) for each in losses.values()]), rel=1e-6)
    assert [
        call.split for call in play(IFCA(clusters=3), clients, start, 1).clients.calls if call.split
    ] == ["train"]


def test_a_loss_that_is_no_number_is_the_highest():
    clients = choosers()
    tree = IFCA().init(torch.tensor([[float("nan")], [10.0]]), clients).tree
    assert set(assign_to_lowest_loss(tree, range(4), clients)[0].leaf_of.values()) == {2}


def test_a_cluster_moves_by_its_share_of_the_cohort_with_gradients():
    """Clients 0 and 1 of 3 and 1 examples take model 1; the others, of 4 together, model 2."""
    clients = choosers(sizes={0: 3, 1: 1, 2: 2, 3: 2})
    algorithm = IFCA(average="gradients")
    state = algorithm.init(torch.tensor([[1.0], [10.0]]), clients)
    state, _ = algorithm.step(state, [0, 1, 2, 3], clients, RoundPlan(1, LocalTraining(lr=0.5)))
    first, second = (float(leaf.params) for leaf in state.tree.leaves)
    assert first == pytest.approx(1 + 0.5 * (3 * 1 + 1 * 2) / 8)
    assert second == pytest.approx(10 + 0.5 * (2 * 3 + 2 * 4) / 8)


def test_a_model_that_nobody_takes_stays_and_is_reported_once():
    clients = choosers(delta=0.0)
    played = play(IFCA(clusters=3), clients, torch.tensor([[0.0], [10.0], [99.0]]), 3)
    assert float(played.states[-1].tree.nodes[3].params) == 99
    assert told(played.logs[0]) == [
        ("joined", 1, [0, 1]),
        ("joined", 2, [2, 3]),
        ("empty", 3, None),
    ]
    assert [told(log) for log in played.logs[1:]] == [[], []]


def test_a_cluster_that_loses_its_last_member_is_reported():
    """Model 2 overshoots clients 2 and 3 in round 1; they go to model 1 then."""
    clients = Choosers({0: [8.0], 1: [8.0], 2: [90.0], 3: [90.0]})
    played = play(IFCA(), clients, torch.tensor([[1.0], [10.0]]), 2)
    assert told(played.logs[1]) == [("joined", 1, [2, 3]), ("empty", 2, None)]
    assert played.states[-1].tree.nodes[1].members == (0, 1, 2, 3)


def test_only_the_cohort_chooses_anew_and_who_was_never_asked_is_in_no_cluster():
    clients = choosers(delta=0.0)
    algorithm = IFCA()
    state = algorithm.init(torch.tensor([[1.0], [10.0]]), clients)
    assert set(state.tree.leaf_of.values()) == {0}
    state, _ = algorithm.step(state, [0, 2], clients, RoundPlan(1, SPEC))
    assert state.tree.leaf_of == {0: 1, 1: 0, 2: 2, 3: 0}
    assert algorithm.models_for(state, clients).nodes == {0: 1, 1: 1, 2: 2, 3: 2}
    clients.wants = (10.0, 10.0, 0.0, 0.0)
    state, _ = algorithm.step(state, [1, 2], clients, RoundPlan(2, SPEC))
    assert state.tree.leaf_of == {0: 1, 1: 2, 2: 1, 3: 0}


def test_restarts_go_on_with_the_set_of_lowest_loss_as_if_there_were_no_other():
    """Three sets of models train for two rounds; then one does, and is what it would have been alone."""
    clients, _ = simulated(world(), linear())
    sets = torch.stack([models(3, seed) for seed in range(3)])
    together = play(
        IFCA(clusters=3, restarts=3, restart_rounds=2),
        clients,
        sets.view(9, -1),
        5,
        spec=SPEC,
        seed=4,
    )
    alone = [play(IFCA(clusters=3), clients, each, 5, spec=SPEC, seed=4) for each in sets]
    (chosen,) = [event for event in together.logs[2].events if event.kind == "restart"]
    losses = [
        assign_to_lowest_loss(played.states[2].tree, range(8), clients)[1] for played in alone
    ]
    # The estimate of round 3 is made at the models of round 2, before anybody has changed cluster.
    assert details(chosen)["losses"] == pytest.approx(losses)
    best = int(np.argmin(losses))
    assert details(chosen)["chosen"] == best
    for ours, theirs in zip(
        together.states[5].tree.nodes[1:], alone[best].states[5].tree.nodes[1:], strict=True
    ):
        assert ours.members == theirs.members
        assert torch.equal(ours.params, theirs.params)
    assert [bool(state.tensors()) for state in together.states] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert not any(event.kind == "restart" for log in together.logs[3:] for event in log.events)


@pytest.mark.parametrize(("middleware", "chosen"), [((), 1), ((OpposingUpdates(0.2),), 0)])
def test_where_clients_may_lie_one_cannot_choose_the_set_of_models(middleware, chosen):
    """The first set fits all clients. The second has a spoiled model, and the lower mean of what they claim."""
    sets = torch.tensor([[0.0], [10.0], [4.0], [-90.0]])
    clients = Channel(WithLiar({client: [0.0] for client in range(6)}), *middleware)
    played = play(IFCA(restarts=2, restart_rounds=1), clients, sets, 2, spec=SPEC)
    (event,) = [event for event in played.logs[1].events if event.kind == "restart"]
    losses = [90 / 6, (3 * 4 + 2 * 6) / 6]
    assert details(event) == {"chosen": chosen, "losses": pytest.approx(losses, rel=1e-6)}


@pytest.mark.parametrize(("share", "trimmed"), [(0.0, 22.0), (0.1, 22.0), (0.2, 3.0), (0.4, 3.0)])
def test_a_share_of_the_lowest_and_highest_losses_can_be_left_out(share, trimmed):
    clients = Choosers({client: [0.0] for client in range(5)})
    clients.wants = (1.0, 2.0, 3.0, 4.0, 100.0)
    tree = IFCA(clusters=1).init(torch.zeros(1, 1), clients).tree
    estimate = estimate_by_loss(tree, range(5), Channel(clients, OpposingUpdates(share)))
    assert (estimate.mean, estimate.trimmed) == (pytest.approx(22.0), pytest.approx(trimmed))


@pytest.mark.parametrize(("second", "chosen"), [(1.05, 1), (1.2, 0)])
def test_a_set_is_chosen_by_its_mean_unless_it_is_clearly_worse_without_the_extremes(
    second, chosen
):
    """The second set has the lower mean by one client alone."""
    sets = torch.tensor([[0.0], [-50.0], [second - 1], [-60.0]])
    clients = Choosers({client: [0.0] for client in range(5)})
    clients.wants = (-1.0, -1.0, -1.0, -1.0, -58.0)
    played = play(
        IFCA(restarts=2, restart_rounds=1),
        Channel(clients, OpposingUpdates(0.2)),
        sets,
        2,
        spec=SPEC,
    )
    (event,) = [event for event in played.logs[1].events if event.kind == "restart"]
    assert details(event)["chosen"] == chosen


def test_during_restarts_the_state_shows_the_set_with_the_lowest_loss():
    clients, _ = simulated(world(), linear())
    sets = torch.stack([models(2, seed) for seed in range(3)])
    played = play(IFCA(restarts=3, restart_rounds=9), clients, sets.view(6, -1), 2, spec=SPEC)
    losses = [
        assign_to_lowest_loss(IFCA().init(each, clients).tree, range(8), clients)[1]
        for each in sets
    ]
    best = int(np.argmin(losses))
    alone = play(IFCA(), clients, sets[best], 1, spec=SPEC)
    assert all(
        torch.equal(ours.params, theirs.params)
        for ours, theirs in zip(
            played.states[1].tree.leaves, alone.states[1].tree.leaves, strict=True
        )
    )


def test_traffic_is_k_models_down_and_one_up_for_each_set_and_client():
    metered = Metered(choosers())
    algorithm = IFCA(clusters=3, restarts=2, restart_rounds=1)
    state = algorithm.init(torch.tensor([[0.0], [10.0], [50.0], [1.0], [2.0], [3.0]]), metered)
    state, _ = algorithm.step(state, [0, 2], metered, RoundPlan(1, SPEC))
    assert (metered.meter.readings()["bytes_down"], metered.meter.readings()["bytes_up"]) == (
        2 * 2 * 3 * 4,
        2 * 2 * 4,
    )
    before = metered.meter.readings()
    state, _ = algorithm.step(state, [0, 2], metered, RoundPlan(2, SPEC))
    used = metered.meter.since(before, 1.0)
    # both sets compete, one is trained
    assert (used["bytes_down"], used["bytes_up"]) == (2 * 2 * 3 * 4, 2 * 4)
    before = metered.meter.readings()
    algorithm.step(state, [0, 2], metered, RoundPlan(3, SPEC))
    used = metered.meter.since(before, 1.0)
    assert (used["bytes_down"], used["bytes_up"]) == (2 * 3 * 4, 2 * 4)


def test_it_starts_from_different_models():
    clients = choosers()
    with pytest.raises(
        ConfigError, match="ifca needs 2 different initial models, got 1; let the model's initial"
    ):
        IFCA().init(torch.ones(2, 1), clients)
    with pytest.raises(ConfigError, match="ifca needs 2 different initial models, got 1"):
        IFCA().init(torch.ones(1), clients)


def test_simulate_draws_the_initial_models_by_seed():
    """A name, or a function that makes a module from a seed; the first is the model of every other algorithm."""
    settings = {"local": LocalTraining(lr=1e-9), "rounds": 1}
    by_name, again, other = (
        simulate(IFCA(clusters=3), "mclr", world(), seed=s, **settings) for s in (5, 5, 6)
    )
    leaves = torch.stack([leaf.params for leaf in by_name.tree.leaves])
    assert len(torch.unique(leaves, dim=0)) == 3
    assert torch.equal(leaves, torch.stack([leaf.params for leaf in again.tree.leaves]))
    assert not torch.equal(leaves, torch.stack([leaf.params for leaf in other.tree.leaves]))
    fedavg = simulate("fedavg", "mclr", world(), seed=5, **settings)
    torch.testing.assert_close(leaves[0], fedavg.tree.nodes[0].params, rtol=0, atol=1e-6)
    made = simulate(IFCA(clusters=3), linear, world(), seed=5, **settings)
    torch.testing.assert_close(
        made.tree.leaves[0].params, simulated(world(), linear(5))[1], rtol=0, atol=1e-6
    )


def test_simulate_cannot_make_several_models_of_a_module():
    text = "IFCA starts from 4 different models, but the given module is only one model; pass the model's name, or"
    with pytest.raises(ConfigError, match=text):
        simulate(IFCA(restarts=2), linear(), world(), rounds=1)


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("clusters", 0, "at least 1"),
        ("average", "model", "'models' or 'gradients'"),
        ("restarts", 0, "at least 1"),
        ("restart_rounds", 0, "at least 1"),
    ],
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(
        ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
    ):
        IFCA(**{option: value})
