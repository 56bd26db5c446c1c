"""APFL: against the paper's pseudo-code, its ends, and who is served with what."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import APFL, ConfigError, FedAvg, Local, LocalTraining, RunFacts
from fedclade.core import OWN, RoundPlan
from tests.reference.apfl import apfl
from tests.tiny import federation_of, own_models, perceptron, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)
SIZES = [20, 26, 31, 5]


def world():
    return federation_of([0, 1, 0, 1], SIZES, seed=2)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_equals_algorithm_1_round_by_round(adaptive, engine):
    federation = world()
    clients, params = simulated(federation, perceptron(), engine)
    method = APFL(alpha=0.6, adaptive=adaptive)
    played = play(method, clients, params, 4, spec=SPEC, seed=3, fraction=0.5)
    cohorts = [sorted(log.losses) for log in played.logs]
    expected = apfl(
        params,
        federation,
        perceptron(),
        SPEC,
        alpha=0.6,
        adaptive=adaptive,
        seed=3,
        cohorts=cohorts,
    )
    for state, (w, _, _) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), w, atol=1e-5)
    (_, mixed, alphas), ours = expected[-1], own_models(played)
    assert (
        ours.keys() == mixed.keys() == set(method.models_for(played.states[-1], played.clients).own)
    )
    assert (len({*alphas.values()}) > 1) == adaptive
    for client, model in ours.items():
        np.testing.assert_allclose(model.numpy(), mixed[client], atol=1e-5)
        assert float(clients.store.latest(client)["rule/alpha"]) == pytest.approx(
            alphas[client], abs=1e-5
        )


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_alpha_moves_once_a_round_as_in_the_authors_code(engine):
    federation = world()
    clients, params = simulated(federation, perceptron(), engine)
    method = APFL(alpha=0.6, adaptive=True, alpha_step="code")
    played = play(method, clients, params, 4, spec=SPEC, seed=3, fraction=0.5)
    cohorts = [sorted(log.losses) for log in played.logs]
    arguments = {"alpha": 0.6, "adaptive": True, "seed": 3, "cohorts": cohorts}
    expected = apfl(params, federation, perceptron(), SPEC, code=True, **arguments)
    of_paper = apfl(params, federation, perceptron(), SPEC, **arguments)
    (_, mixed, alphas), ours = expected[-1], own_models(played)
    assert max(abs(alphas[client] - of_paper[-1][2][client]) for client in alphas) > 1e-3, (
        "or the test cannot fail"
    )
    for client, model in ours.items():
        np.testing.assert_allclose(model.numpy(), mixed[client], atol=1e-5)
        assert float(clients.store.latest(client)["rule/alpha"]) == pytest.approx(
            alphas[client], abs=1e-6
        )


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_global_model_is_fedavgs(alpha, momentum):
    spec = LocalTraining(
        epochs=2, batch_size=10, lr=0.05, momentum=momentum, weight_decay=0.01, clip_norm=1.0
    )
    clients, params = simulated(world(), perceptron())
    ours, fedavg = (
        play(each, clients, params, 3, spec=spec).states[-1].tree
        for each in (APFL(alpha=alpha), FedAvg())
    )
    torch.testing.assert_close(ours.nodes[0].params, fedavg.nodes[0].params)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_alpha_1_a_clients_model_is_that_of_local_training(momentum):
    spec = LocalTraining(epochs=2, batch_size=10, lr=0.05, momentum=momentum)
    ours, local = (
        own_models(play(each, *simulated(world(), perceptron()), 3, spec=spec))
        for each in (APFL(alpha=1.0), Local())
    )
    assert ours.keys() == local.keys() == {0, 1, 2, 3}
    for client, model in local.items():
        torch.testing.assert_close(ours[client], model)


def test_who_has_not_trained_yet_is_served_with_the_global_model():
    clients, params = simulated(world(), perceptron())
    method = APFL()
    state, _ = method.step(method.init(params, clients), [3, 1], clients, RoundPlan(1, SPEC))
    assert method.models_for(state, clients).own == (1, 3)
    w = state.tree.nodes[0].params[None]
    ours, of_all = (clients.evaluate([1], w, [row], "test").losses for row in (OWN, 0))
    assert ours != of_all


def test_an_option_out_of_range_and_what_is_no_sgd_are_refused():
    with pytest.raises(
        ConfigError, match=re.escape("algorithm.alpha should be in [0, 1], got 1.5")
    ):
        APFL(alpha=1.5)
    with pytest.raises(
        ConfigError, match=re.escape("algorithm.alpha_step should be 'paper' or 'code', got 'once'")
    ):
        APFL(alpha_step="once")
    with pytest.raises(
        ConfigError,
        match=r"local.optimizer should be 'sgd' with the local rule 'mixture', .* 'adam'",
    ):
        APFL().check(RunFacts(local=LocalTraining(optimizer="adam")))


def test_the_step_of_an_alpha_that_is_not_learnt_is_refused():
    text = "algorithm.alpha_step should be 'paper' unless adaptive = true, since α is learnt only then, got 'code'"
    with pytest.raises(ConfigError, match=re.escape(text)):
        APFL(alpha_step="code")
