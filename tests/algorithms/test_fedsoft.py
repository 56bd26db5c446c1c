"""FedSoft: against the paper's algorithm, what importance is, what clients keep and tell."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedSoft, Local, LocalTraining
from fedclade.core import OWN, TooFew
from fedclade.core.queries import RoundPlan
from tests.reference.fedavg import as_numpy
from tests.reference.fedsoft import fed_soft
from tests.tiny import Metered, federation_of, linear, own_models, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH, SIZES = [0, 3, 0, 3, 0, 3], [20, 26, 31, 24, 40, 22]


def world(seed: int, clusters: int = 2):
    clients, _ = simulated(federation_of(TRUTH, SIZES, seed=seed), linear())
    return clients, torch.stack(
        [clients.layout.flatten(linear(10 * seed + k)) for k in range(clusters + 1)]
    )


@pytest.mark.parametrize(("seed", "selection"), [(1, 10), (2, 3), (3, 3)])
def test_equals_algorithm_1_round_by_round(seed, selection):
    """The same centres, models of clients and weights, where each cluster draws and where all take part."""
    clients, params = world(seed)
    algorithm = FedSoft(lam=0.5, selection=selection)
    played = play(algorithm, clients, params, 5, spec=SPEC, seed=seed)
    federation = federation_of(TRUTH, SIZES, seed=seed)
    options = {"lam": 0.5, "S": selection, "tau": 2, "seed": seed, "rounds": 5}
    expected = fed_soft([as_numpy(row) for row in params], federation, linear(), SPEC, **options)
    for state, wanted in zip(played.states[1:], expected, strict=True):
        for leaf, centre in zip(state.tree.leaves, wanted.c, strict=True):
            np.testing.assert_allclose(leaf.params.numpy(), centre, atol=2e-5)
        for client, weights in state.weights.items():
            np.testing.assert_allclose(weights, wanted.u[client], atol=1e-12)
    kept = own_models(played)
    assert sorted(kept) == list(played.states[-1].keepers)
    for client, model in kept.items():
        np.testing.assert_allclose(model.numpy(), expected[-1].w[client], atol=2e-5)


def test_without_a_proximal_term_every_client_trains_alone():
    clients, params = world(1)
    ours = own_models(play(FedSoft(lam=0.0), clients, params, 3, spec=SPEC))
    clients, _ = world(1)
    alone = own_models(play(Local(), clients, params[-1], 3, spec=SPEC))
    assert all(torch.equal(ours[client], alone[client]) for client in range(6))


def test_importance_is_the_share_of_examples_that_a_centre_is_best_for():
    clients, params = world(2, clusters=3)
    found = clients.evaluate([4, 4, 4, 1, 1, 1], params[:3], [0, 1, 2] * 2, "train", compares=True)
    assert found.wins.view(2, 3).sum(1).tolist() == [40, 26]
    single = [
        clients.evaluate([4], params[[k]], [0], "train", compares=True).wins.item()
        for k in range(3)
    ]
    assert single == [40, 40, 40]
    same = clients.evaluate([4, 4], params[[1, 1]], [0, 1], "train", compares=True)
    assert same.wins.tolist() == [40, 0]  # of equals the first
    assert clients.evaluate([4], params, [0], "train").wins is None


def test_clients_are_sent_one_vector_and_send_one_and_keep_their_own():
    clients, params = world(1)
    metered = Metered(clients)
    played = play(FedSoft(selection=2, estimate_every=10), metered, params, 3, spec=SPEC)
    first, _, last = (played.clients.asked("train", number)[0] for number in (1, 2, 3))
    assert set(first.models) == set(first.anchors), "w_0, and what it is held near"
    assert set(last.models).isdisjoint(played.states[2].keepers)
    entries = clients.layout.size * 4
    trained = [played.clients.asked("train", number)[0] for number in (1, 2, 3)]
    # centres, for the importance
    sent = sum(len(call.ids) + len(call.models) for call in trained) + 2 * 6
    assert metered.meter.readings()["bytes_down"] == sent * entries
    assert metered.meter.readings()["bytes_up"] == sum(len(call.ids) for call in trained) * entries


def test_who_has_not_trained_is_served_with_its_centre_and_a_newcomer_estimates_when_it_comes():
    clients, params = world(1)
    algorithm = FedSoft(selection=1, estimate_every=10)
    state = algorithm.init(params, clients)
    state, log = algorithm.step(state, [0, 1, 2, 3, 4], clients, RoundPlan(1, SPEC))
    assert len(state.keepers) <= 2
    assert state.ids == (0, 1, 2, 3, 4)
    assert state.tree.leaf_of[5] == 0
    assert {event.kind for event in log.events} <= {"joined", "empty"}
    state, _ = algorithm.step(state, [5], clients, RoundPlan(2, SPEC))
    assert 5 in state.ids
    assert 5 in algorithm.models_for(state, clients).own
    assert algorithm.models_for(state, clients).nodes[5] == 1 + int(state.weights[5].argmax())
    assert state.rows([5]) == [OWN]


def test_a_centre_that_fewer_clients_than_needed_trained_for_stays():
    """Each of two clusters draws one client, so two have trained in all, but one for each centre."""
    clients, params = world(1)
    algorithm = FedSoft(selection=1)
    state = algorithm.init(params, clients)
    after, log = algorithm.step(state, range(6), clients, RoundPlan(1, SPEC, min_clients=2))
    assert len(after.keepers) == 2
    too_few = [event for event in log.events if isinstance(event, TooFew)]
    assert too_few == [TooFew(1, 1), TooFew(2, 1)]
    for before, now in zip(state.tree.leaves, after.tree.leaves, strict=True):
        assert torch.equal(before.params, now.params)


def test_too_few_initial_models_and_options_out_of_range_are_refused():
    clients, params = world(1)
    with pytest.raises(
        ConfigError,
        match="fedsoft needs 3 different initial models, got 1; let the model's initial parameters depend on the seed",
    ):
        FedSoft().init(params[[0, 0, 0]], clients)
    for option, value, rule in (
        ("lam", -1.0, "at least 0"),
        ("selection", 0, "at least 1"),
        ("estimate_every", 0, "at least 1"),
    ):
        with pytest.raises(
            ConfigError, match=re.escape(f"algorithm.{option} should be {rule}, got {value!r}")
        ):
            FedSoft(**{option: value})
