"""Ditto: against the paper's pseudo-code, its two ends, and what travels."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError, Ditto, FedAvg, Local, LocalTraining
from fedclade.core.queries import Round
from tests.reference.ditto import ditto
from tests.reference.fedavg import as_numpy
from tests.tiny import Metered, ScriptedClients, federation_of, perceptron, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)
SIZES = [20, 26, 31, 5]


def world():
    return federation_of([0, 1, 0, 1], SIZES, seed=2)


@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_equals_algorithm_1_round_by_round(lam, fraction):
    """The global model and every personal one after each of 5 rounds, whoever takes part."""
    federation = world()
    clients, params = simulated(federation, perceptron())
    played = play(Ditto(lam=lam), clients, params, 5, spec=SPEC, seed=3, fraction=fraction)
    cohorts = [sorted(log.losses) for log in played.logs]
    assert {len(cohort) for cohort in cohorts} == {4 * fraction}
    expected = ditto(as_numpy(params), federation, perceptron(), SPEC, lam=lam, seed=3, cohorts=cohorts)
    for state, (w, v) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), w, atol=1e-5)
        for client, personal in v.items():
            np.testing.assert_allclose(state.tree.nodes[1 + client].params.numpy(), personal, atol=1e-5)


def test_the_global_model_is_fedavgs():
    clients, params = simulated(world(), perceptron())
    ours, fedavg = (play(each, clients, params, 4, spec=SPEC).states[-1].tree for each in (Ditto(lam=5.0), FedAvg()))
    assert torch.equal(ours.nodes[0].params, fedavg.nodes[0].params)


def test_without_the_proximal_term_personal_models_are_those_of_local_training():
    clients, params = simulated(world(), perceptron())
    ours, local = (play(each, clients, params, 4, spec=SPEC).states[-1].tree for each in (Ditto(lam=0.0), Local()))
    for ours_leaf, local_leaf in zip(ours.leaves, local.leaves, strict=True):
        assert ours_leaf.members == local_leaf.members
        assert torch.equal(ours_leaf.params, local_leaf.params)


def test_the_larger_lambda_the_nearer_to_the_global_model():
    clients, params = simulated(world(), perceptron())
    trees = [play(Ditto(lam=lam), clients, params, 4, spec=SPEC).states[-1].tree for lam in (0.0, 0.5, 4.0)]
    gaps = [sum(float((leaf.params - tree.nodes[0].params).norm()) for leaf in tree.leaves) for tree in trees]
    assert gaps[0] > 1.2 * gaps[1] > 1.4 * gaps[2]


def test_personal_models_are_pulled_to_the_global_model_as_it_was_before_the_round():
    clients, params = simulated(world(), perceptron())
    played = play(Ditto(lam=0.7, epochs=3), clients, params, 2, spec=SPEC)
    for number in (1, 2):
        before = played.states[number - 1].tree
        global_call, personal_call = played.clients.asked("train", number)
        assert all(torch.equal(model, before.nodes[0].params) for model in global_call.models.values())
        assert all(torch.equal(anchor, before.nodes[0].params) for anchor in personal_call.anchors.values())
        assert all(torch.equal(m, before.nodes[1 + c].params) for c, m in personal_call.models.items())


class Specs(ScriptedClients):
    seen: list = []  # noqa: RUF012

    def train(self, ids, models, assignment, this_round, anchors=None):
        self.seen.append(this_round.spec)
        return super().train(ids, models, assignment, this_round)


@pytest.mark.parametrize(("epochs", "personal"), [(None, 2), (5, 5)])
def test_lambda_and_epochs_are_those_of_personal_training_alone(epochs, personal):
    clients = Specs({0: [1.0]})
    clients.seen = []
    play(Ditto(lam=0.7, epochs=epochs), clients, torch.zeros(1), 1, spec=LocalTraining(epochs=2, mu=0.1))
    assert [(spec.mu, spec.epochs) for spec in clients.seen] == [(0.1, 2), (0.7, personal)]


def test_who_has_not_trained_yet_is_served_with_the_global_model():
    clients = ScriptedClients({5: [1.0], 3: [2.0], 9: [3.0]})
    algorithm = Ditto()
    state = algorithm.init(torch.zeros(1), clients)
    assert set(algorithm.serve(state, clients).values()) == {0}
    state, log = algorithm.step(state, [9, 3], clients, Round(1, SPEC))
    served = algorithm.serve(state, clients)
    assert served[5] == 0
    assert {client: float(state.tree.nodes[served[client]].params) for client in (3, 9)} == {3: 2, 9: 3}
    assert float(state.tree.nodes[0].params) == 2.5
    assert list(log.criteria) == [0]
    state, _ = algorithm.step(state, [5], clients, Round(2, SPEC))
    assert algorithm.serve(state, clients)[3] == served[3]


def test_nothing_travels_for_personal_models():
    meters = [Metered(ScriptedClients({0: [1.0, 2.0], 1: [1.0, 2.0]})) for _ in range(2)]
    for metered, algorithm in zip(meters, (Ditto(), FedAvg()), strict=True):
        play(algorithm, metered, torch.zeros(2), 2)
    ours, fedavg = ({k: v for k, v in metered.meter.readings().items() if "bytes" in k} for metered in meters)
    assert ours == fedavg == {"bytes_up": 2 * 2 * 2 * 4, "bytes_down": 2 * 2 * 2 * 4}


@pytest.mark.parametrize(
    ("option", "value", "rule"), [("lam", -0.1, "at least 0"), ("epochs", 0, "at least 1, or left")]
)
def test_an_option_out_of_range_is_refused(option, value, rule):
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{option} should be {rule}")):
        Ditto(**{option: value})
