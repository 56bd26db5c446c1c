"""CLoVE: against the authors' order of steps, its matching, when it stops, and late clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch

from fedclade import CLoVE, ConfigError, LocalTraining
from fedclade.algorithms.clove import choose_cluster_count, match_clusters_to_models
from fedclade.core.queries import Evaluation, RoundPlan
from tests.reference.clove import best_matching, clustering_of_loss_vectors
from tests.reference.fedavg import as_numpy
from tests.tiny import Metered, ScriptedClients, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH = [0, 1, 2, 0, 1, 2, 0, 1]
SIZES = [20, 26, 31, 24, 40, 22, 28, 5]


def start_models(k: int, seed: int = 0) -> torch.Tensor:
    federation = federation_of(TRUTH, SIZES)
    return torch.stack([simulated(federation, linear(100 * seed + j))[1] for j in range(k)])


class WithLosses(ScriptedClients):
    """Clients whose losses with each model are given, whatever the models are."""

    table: Mapping[int, list[float]] = MappingProxyType({})

    def evaluate(self, ids, models, assignment, split):
        losses = torch.tensor(
            [self.table[client][row] for client, row in zip(ids, assignment, strict=True)],
            dtype=torch.float64,
        )
        return Evaluation(tuple(ids), losses[:, None], losses, torch.ones(len(ids)))


def with_losses(table: dict[int, list[float]]) -> WithLosses:
    clients = WithLosses({client: [1.0] for client in table})
    clients.table = table
    return clients


def start(algorithm: CLoVE, clients):
    models = torch.arange(algorithm.clusters, dtype=torch.float32)[:, None]
    return algorithm.init(models, clients)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"square_root": True}),
        (2, {"stable_rounds": 1, "fraction": 0.6}),
        (4, {"stable_rounds": 1, "fraction": 0.4}),
    ],
)
def test_equals_the_authors_steps_round_by_round(seed, options):
    """The same model for every client, and the same models, after each of 6 rounds."""
    federation, params = federation_of(TRUTH, SIZES, seed=seed), start_models(3, seed)
    clients, _ = simulated(federation, linear())
    algorithm = CLoVE(
        clusters=3,
        stable_rounds=options.get("stable_rounds", 3),
        loss_transform="square_root" if "square_root" in options else "identity",
    )
    fraction = options.get("fraction", 1.0)
    played = play(algorithm, clients, params, 6, spec=SPEC, seed=seed, fraction=fraction)
    expected = clustering_of_loss_vectors(
        [as_numpy(model) for model in params],
        federation,
        linear(),
        SPEC,
        seed=seed,
        rounds=6,
        **options,
    )
    for state, wanted in zip(played.states[1:], expected, strict=True):
        leaf_of = {i: leaf for i, leaf in state.tree.leaf_of.items() if leaf}
        assert leaf_of == {i: 1 + j for i, j in wanted.model_of.items()}
        assert state.stopped == wanted.stopped
        for leaf, theta in zip(state.tree.leaves, wanted.theta, strict=True):
            np.testing.assert_allclose(leaf.params.numpy(), theta, atol=1e-5)
    assert len({*expected[-1].model_of.values()}) == 3
    assert expected[-1].stopped


def test_clients_whose_best_model_is_the_same_are_separated():
    """The example of the paper's figure 1: model 0 is best for all, but the loss vectors differ."""
    clients = with_losses({0: [1.0, 5.1], 1: [1.1, 5.0], 2: [2.1, 3.5], 3: [2.0, 3.6]})
    algorithm = CLoVE(clusters=2)
    state, log = algorithm.step(start(algorithm, clients), range(4), clients, RoundPlan(1, SPEC))
    assert state.tree.leaf_of == {0: 1, 1: 1, 2: 2, 3: 2}
    assert [(event.kind, event.node) for event in log.events] == [("joined", 1), ("joined", 2)]


def test_the_matching_is_the_best_of_all():
    draw = np.random.default_rng(0)
    for _ in range(50):
        vectors = draw.uniform(size=(9, 4))
        labels = np.array([0, 0, 1, 1, 2, 2, 2, 0, 1])
        clusters = [np.flatnonzero(labels == k).tolist() for k in range(3)]
        found = match_clusters_to_models(vectors, labels)
        assert tuple(found.values()) == best_matching(clusters, list(vectors), 4)


def test_clustering_stops_when_assignments_repeat_and_then_only_own_models_travel():
    table = {0: [0.0, 9.0], 1: [0.1, 9.0], 2: [9.0, 0.0]}
    clients, algorithm = Metered(with_losses(table)), CLoVE(clusters=2, stable_rounds=2)
    state = start(algorithm, clients)
    stopped, sent = [], []
    for number in range(1, 5):
        before = clients.meter.readings()
        state, _ = algorithm.step(state, range(3), clients, RoundPlan(number, SPEC))
        sent.append(clients.meter.since(before, 1.0)["bytes_down"])
        stopped.append(state.stopped)
    assert stopped == [False, False, True, True]
    # Models of one number: two models for each of three clients, and then one.
    assert sent == [3 * 2 * 4, 3 * 2 * 4, 3 * 4, 3 * 4]


def test_with_stable_rounds_0_clustering_never_stops_and_clients_change():
    clients, algorithm = with_losses({0: [0.0, 9.0], 1: [9.0, 0.0]}), CLoVE(stable_rounds=0)
    state = start(algorithm, clients)
    for number in range(1, 6):
        state, _ = algorithm.step(state, range(2), clients, RoundPlan(number, SPEC))
    assert state.tree.leaf_of == {0: 1, 1: 2}
    clients.table = {0: [9.0, 0.0], 1: [0.0, 9.0]}
    state, _ = algorithm.step(state, range(2), clients, RoundPlan(6, SPEC))
    assert state.tree.leaf_of == {0: 2, 1: 1}


def test_a_late_client_joins_the_nearest_centroid_and_an_unseen_one_the_lowest_loss():
    """Client 2's lowest loss is with model 0, but its loss vector is nearer to client 1's."""
    table = {0: [0.0, 9.0], 1: [6.0, 5.0], 2: [4.0, 5.0], 3: [4.0, 5.0]}
    clients, algorithm = with_losses(table), CLoVE(clusters=2, stable_rounds=1)
    state = start(algorithm, clients)
    for number in (1, 2):
        state, _ = algorithm.step(state, [0, 1], clients, RoundPlan(number, SPEC))
    assert state.stopped
    state, _ = algorithm.step(state, [0, 1, 2], clients, RoundPlan(3, SPEC))
    assert state.tree.leaf_of == {0: 1, 1: 2, 2: 2, 3: 0}
    assert algorithm.models_for(state, clients).nodes == {0: 1, 1: 2, 2: 2, 3: 1}


def test_a_diverged_model_counts_as_the_largest_finite_loss():
    table = {0: [0.0, float("nan")], 1: [float("inf"), 0.5], 2: [0.1, 7.0]}
    clients, algorithm = with_losses(table), CLoVE(clusters=2)
    state, _ = algorithm.step(start(algorithm, clients), range(3), clients, RoundPlan(1, SPEC))
    assert state.tree.leaf_of == {0: 1, 1: 2, 2: 1}
    assert state.centroids.tolist() == [[pytest.approx(0.05), 7.0], [7.0, 0.5]]


def test_the_number_of_clusters_is_chosen_by_silhouette():
    draw = np.random.default_rng(0)
    centres = 10 * np.eye(5)[[0, 1, 2] * 8]
    vectors = centres + 0.1 * draw.normal(size=centres.shape)
    assert choose_cluster_count(vectors, 5) == 3
    assert choose_cluster_count(vectors[:1], 5) == 1
    assert choose_cluster_count(np.ones((6, 5)), 5) == 1


def test_few_participants_are_clusters_of_their_own_as_in_the_authors_code():
    """Five copies of each vector give clusters of one client the best silhouette."""
    vectors = np.random.default_rng(0).uniform(size=(5, 8))
    assert choose_cluster_count(vectors, 8) == 5


def test_options_that_are_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.clusters should be at least 1, got 0"):
        CLoVE(clusters=0)
    with pytest.raises(ConfigError, match=r"at least 2 with algorithm\.unknown_k, got 1"):
        CLoVE(clusters=1, unknown_k=True)
    with pytest.raises(ConfigError, match=r"'identity' or 'square_root', got 'log'"):
        CLoVE(loss_transform="log")
    with pytest.raises(ConfigError, match=r"stable_rounds should be at least 0, got -1"):
        CLoVE(stable_rounds=-1)


def test_equal_initial_models_are_refused():
    clients = with_losses({0: [0.0, 1.0]})
    with pytest.raises(ConfigError, match="clove needs 2 different initial models, got 1"):
        CLoVE(clusters=2).init(torch.zeros(2, 3), clients)
