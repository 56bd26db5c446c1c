"""FeSEM: against the paper's pseudo-code, its first centres, and what is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from fedclade import ConfigError, FeSEM, LocalTraining
from fedclade.core.queries import RoundPlan
from fedclade.core.updates import Updates
from tests.reference.fedavg import as_numpy
from tests.reference.fesem import federated_sem
from tests.tiny import ScriptedClients, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
ROUND = RoundPlan(1, SPEC)


def scripted(deltas: Mapping[int, Sequence[float]], sizes=None) -> ScriptedClients:
    return ScriptedClients(deltas, sizes or {})


def centres(state) -> list[list[float]]:
    return [leaf.params.tolist() for leaf in state.tree.leaves]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_algorithm_1_round_by_round(seed):
    """The same centre for every client, and the same centres, after each of 6 rounds."""
    federation = federation_of([0, 1, 2, 0, 1, 2, 0, 1], [20, 26, 31, 24, 40, 22, 28, 5], seed=seed)
    clients, params = simulated(federation, linear(seed))
    played = play(FeSEM(clusters=3), clients, params, 6, spec=SPEC, seed=seed)
    expected = federated_sem(as_numpy(params), federation, linear(), SPEC, K=3, seed=seed, rounds=6)

    def partition(centre_of):
        return {frozenset(i for i in centre_of if centre_of[i] == k) for k in centre_of.values()}

    for state, wanted in zip(played.states[1:], expected, strict=True):
        assert partition(state.tree.leaf_of) == partition(wanted.r)
        for client, leaf in state.tree.leaf_of.items():
            np.testing.assert_allclose(
                state.tree.nodes[leaf].params.numpy(), wanted.centres[wanted.r[client]], atol=1e-5
            )
    assert len(set(expected[-1].r.values())) == 3


def test_the_first_centres_are_the_weighted_means_of_the_first_local_models():
    clients = scripted({0: [1, 0], 1: [2, 0], 2: [0, 9], 3: [0, 10]}, {0: 3, 1: 1, 2: 1, 3: 1})
    algorithm = FeSEM()
    state = algorithm.init(torch.tensor([100.0, 0.0]), clients)
    assert set(state.tree.leaf_of.values()) == {0}
    state, _ = algorithm.step(state, range(4), clients, ROUND)
    assert state.tree.leaf_of == {0: 1, 1: 1, 2: 2, 3: 2}
    assert centres(state) == [[100 + (3 * 1 + 1 * 2) / 4, 0], [100, (9 + 10) / 2]]


def test_a_client_goes_to_the_centre_nearest_to_its_local_model():
    """Client 1 trains from its centre to right beside the other one, and pulls that towards itself."""
    clients = scripted({0: [0.0], 1: [0.0], 2: [8.0], 3: [8.0]})
    algorithm = FeSEM()
    state, _ = algorithm.step(algorithm.init(torch.zeros(1), clients), range(4), clients, ROUND)
    assert centres(state) == [[0], [8]]
    clients.deltas = {0: [0.0], 1: [7.0], 2: [1.0], 3: [1.0]}
    state, log = algorithm.step(state, range(4), clients, ROUND)
    assert state.tree.leaf_of == {0: 1, 1: 2, 2: 2, 3: 2}
    assert centres(state) == [[0], [pytest.approx((7 + 9 + 9) / 3)]]
    assert {node: criteria.members for node, criteria in log.criteria.items()} == {
        1: (0, 1),
        2: (2, 3),
    }


def test_a_centre_that_nobody_goes_to_stays_and_is_reported():
    clients = scripted({0: [0.0], 1: [8.0]})
    algorithm = FeSEM()
    state, _ = algorithm.step(algorithm.init(torch.zeros(1), clients), range(2), clients, ROUND)
    clients.deltas = {0: [7.0], 1: [0.0]}
    state, log = algorithm.step(state, range(2), clients, ROUND)
    assert state.tree.leaf_of == {0: 2, 1: 2}
    assert centres(state) == [[0], [7.5]]
    assert [(event.kind, event.node) for event in log.events] == [("empty", 1), ("joined", 2)]


@pytest.mark.parametrize("cohort", [[2], [2, 0]])
def test_fewer_clients_than_centres(cohort):
    """The others stay at the initial model."""
    clients = scripted({0: [5.0], 1: [0.0], 2: [1.0]})
    algorithm = FeSEM(clusters=3)
    state, log = algorithm.step(algorithm.init(torch.zeros(1), clients), cohort, clients, ROUND)
    found = {
        client: centres(state)[leaf - 1] for client, leaf in state.tree.leaf_of.items() if leaf
    }
    assert found == {client: list(clients.deltas[client]) for client in cohort}
    assert len([event for event in log.events if event.kind == "empty"]) == 3 - len(cohort)


def test_who_was_never_asked_has_the_mean_of_the_centres():
    """Two members at 1, one at 7."""
    clients = scripted({0: [1.0], 1: [1.0], 2: [7.0], 3: [0.5]})
    algorithm = FeSEM()
    state, _ = algorithm.step(algorithm.init(torch.zeros(1), clients), [0, 1, 2], clients, ROUND)
    assert algorithm.models_for(state, clients).nodes[3] == 0
    assert float(state.tree.nodes[0].params) == pytest.approx((2 * 1 + 7) / 3)
    state, log = algorithm.step(state, [3], clients, ROUND)
    assert state.tree.leaf_of[3] == 1
    assert centres(state)[0] == [pytest.approx((2 * 1 + 7) / 3 + 0.5)]
    assert list(log.criteria) == [0]


class WithBuffer(ScriptedClients):
    """The last entry is a buffer."""

    def train(self, ids, models, assignment, this_round, work=None, **more):
        updates = super().train(ids, models, assignment, this_round)
        return Updates.received(
            ids, [1] * len(ids), updates.deltas, 1, updates.losses, this_round.number
        )


def test_buffers_are_averaged_but_not_compared():
    """By the buffer, clients 0 and 2 would be together."""
    clients = WithBuffer({0: [1.0, 900.0], 1: [1.0, 0.0], 2: [4.0, 900.0], 3: [4.0, 0.0]})
    algorithm = FeSEM()
    state, _ = algorithm.step(algorithm.init(torch.zeros(2), clients), range(4), clients, ROUND)
    assert centres(state) == [[1, 450], [4, 450]]
    state, _ = algorithm.step(state, range(4), clients, ROUND)
    assert state.tree.leaf_of == {0: 1, 1: 1, 2: 2, 3: 2}


def test_a_number_of_clusters_below_1_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.clusters should be at least 1, got 0"):
        FeSEM(clusters=0)
