"""OCFL: against the authors' running code, a literal twin, and clients that do not take part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedclade import OCFL, ConfigError, FedAvg, LocalTraining
from fedclade.algorithms import RunFacts
from fedclade.algorithms.ocfl import compute_temperature
from fedclade.core.queries import RoundPlan
from tests.reference.fedavg import as_numpy
from tests.reference.ocfl import one_shot_clustering
from tests.tiny import ScriptedClients, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
ROUND = RoundPlan(1, SPEC)
TRUTH = [0, 1, 2, 3] * 3
SIZES = [20, 26, 31, 24, 40, 22, 28, 35, 30, 20, 24, 33]
AUTHORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "ocfl.json").read_text(encoding="utf-8")
)


def clusters(tree) -> list[list[int]]:
    return sorted(list(leaf.members) for leaf in tree.leaves)


@pytest.mark.parametrize("method", ["mean_shift", "hdbscan"])
def test_equals_the_running_code_of_the_authors(method):
    """The updates of two rounds; benchmarks/ocfl_authors.py ran the authors' code on them."""
    first, second = AUTHORS["updates"]
    clients = ScriptedClients(dict(enumerate(first)))
    algorithm = OCFL(method=method)
    state = algorithm.init(torch.zeros(len(first[0])), clients)
    state, log = algorithm.step(state, range(12), clients, ROUND)
    measured = [log.numbers["temperature"]]
    assert clusters(state.tree) == [list(range(12))]
    clients.deltas = dict(enumerate(second))
    state, log = algorithm.step(state, range(12), clients, RoundPlan(2, SPEC))
    measured.append(log.numbers["temperature"])
    assert clusters(state.tree) == AUTHORS[method]["clusters"]
    assert measured == pytest.approx(AUTHORS[method]["temperatures"], rel=1e-5)
    for leaf in state.tree.leaves:
        wanted = np.mean(first, axis=0) + np.mean([second[i] for i in leaf.members], axis=0)
        np.testing.assert_allclose(leaf.params.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_a_literal_twin_round_by_round(seed):
    federation = federation_of(TRUTH, SIZES, seed=seed)
    clients, params = simulated(federation, linear(seed))
    played = play(OCFL(), clients, params, 6, spec=SPEC, seed=seed)
    expected = one_shot_clustering(
        as_numpy(params), federation, linear(), SPEC, seed=seed, rounds=6
    )
    for state, log, wanted in zip(played.states[1:], played.logs, expected, strict=True):
        assert clusters(state.tree) == sorted(wanted.clusters)
        if wanted.temperature is None:
            assert log.numbers == {}
        else:
            assert log.numbers["temperature"] == pytest.approx(wanted.temperature, rel=1e-4)
        for members, model in zip(wanted.clusters, wanted.models, strict=True):
            leaf = state.tree.nodes[state.tree.leaf_of[members[0]]]
            np.testing.assert_allclose(leaf.params.numpy(), model, atol=1e-5)
    assert len(expected[-1].clusters) > 1


def test_the_temperature_is_0_for_equal_directions_and_1_for_two_opposite_clients():
    assert compute_temperature(np.zeros((5, 5))) == 0
    assert compute_temperature(np.array([[0.0, 2.0], [2.0, 0.0]])) == 1


def test_without_a_rise_it_is_fedavg():
    clients, algorithm = ScriptedClients({0: [1.0, 0.0], 1: [0.0, 1.0]}), OCFL()
    state = algorithm.init(torch.zeros(2), clients)
    other = FedAvg()
    fedavg = other.init(torch.zeros(2), clients)
    for number in range(1, 4):
        plan = RoundPlan(number, SPEC)
        state, log = algorithm.step(state, [0, 1], clients, plan)
        fedavg, _ = other.step(fedavg, [0, 1], clients, plan)
        assert log.events == ()
    assert torch.equal(state.tree.nodes[0].params, fedavg.tree.nodes[0].params)
    assert not state.clustered


def split_in_round_2(cohort, min_cluster_size=2):
    """Two directions, which are equal in round 1 and opposite in round 2, among clients 0 to 5."""
    clients = ScriptedClients({i: [1.0, 0.1 * i] for i in range(6)})
    algorithm = OCFL(method="hdbscan", min_cluster_size=min_cluster_size)
    state = algorithm.init(torch.zeros(2), clients)
    state, _ = algorithm.step(state, range(6), clients, ROUND)
    signs = [1, 1, 1, -1, -1, -1]
    clients.deltas = {i: [float(sign), 0.01 * i] for i, sign in enumerate(signs)}
    state, log = algorithm.step(state, cohort, clients, RoundPlan(2, SPEC))
    return algorithm, clients, state, log


def test_a_client_that_was_not_sampled_joins_the_similar_cluster_when_it_replies():
    algorithm, clients, state, log = split_in_round_2([0, 1, 3, 4])
    assert [event.kind for event in log.events] == ["split"]
    assert clusters(state.tree) == [[0, 1], [3, 4]]
    assert state.tree.stragglers == {0: (2, 5)}
    state, log = algorithm.step(state, [2, 5], clients, RoundPlan(3, SPEC))
    assert clusters(state.tree) == [[0, 1, 2], [3, 4, 5]]
    assert [event.kind for event in log.events] == ["joined", "joined"]


def test_too_few_replies_postpone_the_clustering():
    _, _, state, log = split_in_round_2([0, 3], min_cluster_size=3)
    assert [event.kind for event in log.events] == ["postponed"]
    assert not state.clustered
    assert clusters(state.tree) == [list(range(6))]


def test_one_reply_has_no_temperature():
    clients, algorithm = ScriptedClients({0: [1.0], 1: [2.0]}), OCFL()
    state, log = algorithm.step(algorithm.init(torch.zeros(1), clients), [1], clients, ROUND)
    assert log.numbers == {}
    assert state.temperature == float("inf")
    assert float(state.tree.nodes[0].params) == 2


def test_clients_that_are_all_noise_stay_together():
    """HDBSCAN finds no cluster of three among clients that all differ."""
    clients = ScriptedClients({i: [1.0, 0.0, 0.0, 0.0] for i in range(4)})
    algorithm = OCFL(method="hdbscan", min_cluster_size=3)
    state = algorithm.init(torch.zeros(4), clients)
    state, _ = algorithm.step(state, range(4), clients, ROUND)
    clients.deltas = {i: np.eye(4)[i].tolist() for i in range(4)}
    state, log = algorithm.step(state, range(4), clients, RoundPlan(2, SPEC))
    assert state.clustered
    assert clusters(state.tree) == [[0, 1, 2, 3]]
    assert log.phase == "cluster"


def test_options_that_are_refused():
    with pytest.raises(ConfigError, match=r"method should be 'mean_shift' or 'hdbscan', got 'dbs"):
        OCFL(method="dbscan")
    with pytest.raises(ConfigError, match=r"min_cluster_size should be at least 2, got 1"):
        OCFL(min_cluster_size=1)
    with pytest.raises(ConfigError, match=r"at most the number of clients, 4, got 5"):
        OCFL(method="hdbscan", min_cluster_size=5).check(RunFacts(clients=4))
