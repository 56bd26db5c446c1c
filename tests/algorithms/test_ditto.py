"""Ditto: against the paper's pseudo-code, its two ends, and what travels."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError, Ditto, FedAvg, Local, LocalTraining, Sgd
from fedclade.core.queries import OWN, RoundPlan
from fedclade.training import OWN_MODEL
from tests.reference.ditto import ditto
from tests.reference.fedavg import as_numpy
from tests.tiny import (
    Metered,
    ScriptedClients,
    federation_of,
    own_models,
    perceptron,
    play,
    simulated,
)

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)
SIZES = [20, 26, 31, 5]


def world():
    return federation_of([0, 1, 0, 1], SIZES, seed=2)


@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_equals_algorithm_1_round_by_round(lam, fraction):
    """The global model after each of 5 rounds, and every personal one at their end, whoever takes part."""
    federation = world()
    clients, params = simulated(federation, perceptron())
    played = play(Ditto(lam=lam), clients, params, 5, spec=SPEC, seed=3, fraction=fraction)
    cohorts = [sorted(log.losses) for log in played.logs]
    assert {len(cohort) for cohort in cohorts} == {4 * fraction}
    expected = ditto(
        as_numpy(params), federation, perceptron(), SPEC, lam=lam, seed=3, cohorts=cohorts
    )
    for state, (w, _) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), w, atol=1e-5)
    ours, trained = own_models(played), {client for cohort in cohorts for client in cohort}
    assert ours.keys() == trained
    for client, model in ours.items():
        np.testing.assert_allclose(model.numpy(), expected[-1][1][client], atol=1e-5)


def test_the_global_model_is_fedavgs():
    clients, params = simulated(world(), perceptron())
    ours, fedavg = (
        play(each, clients, params, 4, spec=SPEC).states[-1].tree
        for each in (Ditto(lam=5.0), FedAvg())
    )
    assert torch.equal(ours.nodes[0].params, fedavg.nodes[0].params)
    assert len(ours.nodes) == 1


def test_without_the_proximal_term_personal_models_are_those_of_local_training():
    ours, local = (
        own_models(play(each, *simulated(world(), perceptron()), 4, spec=SPEC))
        for each in (Ditto(lam=0.0), Local())
    )
    assert ours.keys() == local.keys() == {0, 1, 2, 3}
    assert all(torch.equal(ours[client], model) for client, model in local.items())


def test_the_larger_lambda_the_nearer_to_the_global_model():
    gaps = []
    for lam in (0.0, 0.5, 4.0):
        played = play(Ditto(lam=lam), *simulated(world(), perceptron()), 4, spec=SPEC)
        w = played.states[-1].tree.nodes[0].params
        gaps.append(sum(float((model - w).norm()) for model in own_models(played).values()))
    assert gaps[0] > 1.2 * gaps[1] > 1.4 * gaps[2]


def test_personal_models_are_pulled_to_the_global_model_as_it_was_before_the_round():
    clients, params = simulated(world(), perceptron())
    played = play(Ditto(lam=0.7, epochs=3), clients, params, 2, spec=SPEC)
    for number in (1, 2):
        before = played.states[number - 1].tree
        global_call, personal_call = played.clients.asked("train", number)
        assert (global_call.own, personal_call.own) == (False, True)
        assert personal_call.models.keys() == ({0, 1, 2, 3} if number == 1 else set()), (
            "then they have their own"
        )
        assert all(
            torch.equal(model, before.nodes[0].params) for model in global_call.models.values()
        )
        assert all(
            torch.equal(anchor, before.nodes[0].params) for anchor in personal_call.anchors.values()
        )


class Specs(ScriptedClients):
    seen: list = []  # noqa: RUF012

    def train(self, ids, models, assignment, this_round, work=None, **more):
        steps = Sgd() if work is None else work.steps
        self.seen.append(steps.settings(this_round.local))
        return super().train(ids, models, assignment, this_round, work)


@pytest.mark.parametrize(("epochs", "personal"), [(None, 2), (5, 5)])
def test_lambda_and_epochs_are_those_of_personal_training_alone(epochs, personal):
    clients = Specs({0: [1.0]})
    clients.seen = []
    play(
        Ditto(lam=0.7, epochs=epochs),
        clients,
        torch.zeros(1),
        1,
        spec=LocalTraining(epochs=2, mu=0.1),
    )
    assert [(spec.mu, spec.epochs) for spec in clients.seen] == [(0.1, 2), (0.7, personal)]


def test_who_has_not_trained_yet_starts_from_the_initial_model_and_is_served_with_the_global_one():
    clients, params = simulated(world(), perceptron())
    algorithm = Ditto(lam=0.0)
    state = algorithm.init(params, clients)
    state, log = algorithm.step(state, [3, 1], clients, RoundPlan(1, SPEC))
    assert (state.untrained, list(log.criteria)) == ((0, 2), [0])
    w = state.tree.nodes[0].params[None]
    assert algorithm.models_for(state, clients).own == (1, 3)
    ours, of_all = (clients.evaluate([1], w, [row], "test").losses for row in (OWN, 0))
    assert ours != of_all
    state, _ = algorithm.step(state, [0, 2], clients, RoundPlan(2, SPEC))
    assert (state.untrained, state.initial, algorithm.models_for(state, clients).own) == (
        (),
        None,
        (0, 1, 2, 3),
    )
    alone, _ = simulated(world(), perceptron())
    delta = alone.train([2], params[None], [0], RoundPlan(2, SPEC)).required_deltas[0]
    assert torch.equal(clients.store.latest(2)[OWN_MODEL], params + delta)


def test_a_round_that_is_asked_for_again_starts_from_before_it():
    clients, params = simulated(world(), perceptron())
    algorithm, ours = Ditto(), list[torch.Tensor]()
    state, _ = algorithm.step(algorithm.init(params, clients), [0, 1], clients, RoundPlan(1, SPEC))
    for _ in range(2):
        algorithm.step(state, [0, 1], clients, RoundPlan(2, SPEC))
        ours.append(clients.store.latest(1)[OWN_MODEL])
    assert torch.equal(*ours)


def test_nothing_travels_for_personal_models():
    meters = [Metered(ScriptedClients({0: [1.0, 2.0], 1: [1.0, 2.0]})) for _ in range(2)]
    for metered, algorithm in zip(meters, (Ditto(), FedAvg()), strict=True):
        play(algorithm, metered, torch.zeros(2), 2)
    ours, fedavg = (
        {k: v for k, v in metered.meter.readings().items() if "bytes" in k} for metered in meters
    )
    assert ours == fedavg == {"bytes_up": 2 * 2 * 2 * 4, "bytes_down": 2 * 2 * 2 * 4}


@pytest.mark.parametrize(
    ("option", "value", "rule"), [("lam", -0.1, "at least 0"), ("epochs", 0, "at least 1, or left")]
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{option} should be {rule}")):
        Ditto(**{option: value})
