"""SCAFFOLD: against the paper's pseudo-code, its first round, and what its control variates are."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FedAvg, LocalTraining, RunFacts, Scaffold
from fedclade.channel import Channel, Limiting
from fedclade.core import Limits, RoundPlan
from fedclade.runs.churn import ChurningClients
from fedclade.training import PERSONAL, SimulatedClients
from tests.reference.scaffold import scaffold
from tests.tiny import Metered, federation_of, perceptron, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, lr_decay=0.9)
SIZES = [20, 26, 31, 5]


def world():
    return federation_of([0, 1, 0, 1], SIZES, seed=2)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_equals_algorithm_1_round_by_round(fraction, engine):
    federation = world()
    clients, params = simulated(federation, perceptron(), engine)
    played = play(Scaffold(server_lr=0.8), clients, params, 4, spec=SPEC, seed=3, fraction=fraction)
    cohorts = [sorted(log.losses) for log in played.logs]
    expected = scaffold(
        params, federation, perceptron(), SPEC, server_lr=0.8, seed=3, cohorts=cohorts
    )
    assert played.states[1:]
    for state, (x, c, _) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), x, atol=1e-5)
        np.testing.assert_allclose(state.control.numpy(), c, atol=1e-5)
    assert expected[-1][2]
    for client, c_i in expected[-1][2].items():
        ours = clients.store.latest(client).get("rule/c", torch.zeros_like(params))
        np.testing.assert_allclose(ours.numpy(), c_i, atol=2e-5)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_plain_means_are_those_of_algorithm_1(fraction):
    federation = world()
    clients, params = simulated(federation, perceptron())
    played = play(
        Scaffold(server_lr=0.8, weighted=False),
        clients,
        params,
        4,
        spec=SPEC,
        seed=3,
        fraction=fraction,
    )
    cohorts = [sorted(log.losses) for log in played.logs]
    arguments = {"server_lr": 0.8, "seed": 3, "cohorts": cohorts}
    expected = scaffold(params, federation, perceptron(), SPEC, plain=True, **arguments)
    of_sizes = scaffold(params, federation, perceptron(), SPEC, **arguments)
    for state, (x, c, _) in zip(played.states[1:], expected, strict=True):
        np.testing.assert_allclose(state.tree.nodes[0].params.numpy(), x, atol=1e-5)
        np.testing.assert_allclose(state.control.numpy(), c, atol=1e-5)
    assert float((expected[-1][0] - of_sizes[-1][0]).abs().max()) > 1e-3, "or the test cannot fail"


def test_c_of_plain_means_is_the_mean_over_all_clients_newcomers_included():
    clients, params = simulated(world(), perceptron())
    method, coming = Scaffold(weighted=False), ChurningClients(clients, {2: 2, 3: 2}, {})
    state = method.init(params, coming)
    for number, cohort in ((1, [0, 1]), (2, [0, 2]), (3, [1, 2])):
        state, _ = coming.begin(method, state, RoundPlan(number, SPEC))
        state, _ = method.step(state, cohort, coming, RoundPlan(number, SPEC))
    zeros = torch.zeros_like(params)
    mean = sum(clients.store.latest(client).get("rule/c", zeros) for client in range(4)) / 4
    torch.testing.assert_close(state.control, mean, rtol=0, atol=1e-5)


def test_the_first_round_is_fedavgs():
    clients, params = simulated(world(), perceptron())
    ours, fedavg = (
        play(each, clients, params, 2, spec=SPEC).states for each in (Scaffold(), FedAvg())
    )
    torch.testing.assert_close(ours[1].tree.nodes[0].params, fedavg[1].tree.nodes[0].params)
    assert not torch.allclose(
        ours[2].tree.nodes[0].params, fedavg[2].tree.nodes[0].params, atol=1e-4
    )


def test_with_one_client_the_corrections_cancel():
    clients, params = simulated(federation_of([0]), perceptron())
    ours, fedavg = (
        play(each, clients, params, 3, spec=SPEC).states[-1].tree for each in (Scaffold(), FedAvg())
    )
    torch.testing.assert_close(ours.nodes[0].params, fedavg.nodes[0].params, rtol=0, atol=1e-5)


def test_c_is_the_mean_of_the_clients_own():
    clients, params = simulated(world(), perceptron())
    state = play(Scaffold(), clients, params, 4, spec=SPEC, fraction=0.5).states[-1]
    zeros = torch.zeros_like(params)
    mean = sum(
        size / sum(SIZES) * clients.store.latest(k).get("rule/c", zeros)
        for k, size in enumerate(SIZES)
    )
    torch.testing.assert_close(state.control, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "limits", [Limits(largest_weight=2), Limits(clip_above=1.1)], ids=["weight", "length"]
)
def test_where_the_server_limits_what_clients_do_it_still_follows_what_they_did(limits: Limits):
    sizes = [10, 20, 20, 90]
    inner, params = simulated(federation_of([0, 1, 0, 1], sizes, seed=2), perceptron())
    limiting = Limiting(limits, inner.layout.n_parameters, lambda: inner.sizes)
    clients = Channel(inner, limiting)
    played = play(Scaffold(), clients, params, 4, spec=SPEC)
    each = [inner.store.latest(client)["rule/c"] for client in range(4)]
    weights = [limiting.weights(inner.sizes)[client] for client in range(4)]
    mean = sum(weight / sum(weights) * c_i for weight, c_i in zip(weights, each, strict=True))
    torch.testing.assert_close(played.states[-1].control, mean, rtol=0, atol=1e-5)
    plain = play(
        Scaffold(),
        simulated(federation_of([0, 1, 0, 1], sizes, seed=2), perceptron())[0],
        params,
        4,
        spec=SPEC,
    )
    assert not torch.allclose(
        played.states[-1].tree.nodes[0].params, plain.states[-1].tree.nodes[0].params, atol=1e-3
    )


def test_c_is_the_mean_over_newcomers_too():
    clients, params = simulated(world(), perceptron())
    method, coming = Scaffold(), ChurningClients(clients, {2: 2, 3: 2}, {})
    state = method.init(params, coming)
    for number, cohort in ((1, [0, 1]), (2, [0, 2]), (3, [1, 2])):
        state, _ = coming.begin(method, state, RoundPlan(number, SPEC))
        state, _ = method.step(state, cohort, coming, RoundPlan(number, SPEC))
    zeros = torch.zeros_like(params)
    mean = sum(
        size / sum(SIZES) * clients.store.latest(k).get("rule/c", zeros)
        for k, size in enumerate(SIZES)
    )
    torch.testing.assert_close(state.control, mean, rtol=0, atol=1e-5)


def test_personal_parameters_have_no_control_variate():
    """A personal head is trained as in FedAvg with one, as long as the shared part is not corrected either."""
    kept = []
    for method in (Scaffold(), FedAvg()):
        clients = SimulatedClients(
            federation_of([0]), module := perceptron(), engine="loop", personal=["3.*"]
        )
        play(method, clients, clients.layout.flatten(module), 3, spec=SPEC)
        kept.append(clients.store.latest(0)[PERSONAL])
    torch.testing.assert_close(*kept, rtol=0, atol=1e-5)


def test_two_vectors_go_down_and_one_comes_up():
    clients, params = simulated(world(), perceptron())
    metered = Metered(clients)
    play(Scaffold(), metered, params, 2, spec=SPEC)
    readings = metered.meter.readings()
    assert readings["bytes_down"] == 2 * readings["bytes_up"] == 2 * 2 * 4 * params.nbytes


def test_momentum_is_refused_and_what_is_out_of_range():
    with pytest.raises(
        ConfigError,
        match=re.escape("local.momentum should be 0 with the local rule 'control_variates'"),
    ):
        Scaffold().check(RunFacts(local=LocalTraining(momentum=0.9)))
    with pytest.raises(
        ConfigError, match=re.escape("algorithm.server_lr should be greater than 0")
    ):
        Scaffold(server_lr=0.0)


def test_who_diverges_keeps_no_control_variate():
    clients, params = simulated(world(), perceptron())
    method, spec = Scaffold(), LocalTraining(batch_size=10, lr=3e38)
    state, log = method.step(method.init(params, clients), [0, 1], clients, RoundPlan(1, spec))
    assert not log.losses
    assert not state.control.any()
