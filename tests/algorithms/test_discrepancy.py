"""FedGroup's eq. 4 in every round: how far the clients' models are from their cluster's after aggregation."""

from __future__ import annotations

import pytest
import torch

from fedclade import CFL, FLHC, LocalTraining, Signature, simulate
from fedclade.algorithms import Algorithm, FeSEM, Local
from fedclade.core.queries import RoundPlan
from tests.tiny import ScriptedClients, federation_of, linear, play, simulated

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
TRUTH = [0, 1, 2, 3, 0, 1, 2, 3]
SIZES = [20, 26, 31, 24, 40, 3, 28, 200]


def world():
    return federation_of(TRUTH, SIZES, seed=1)


def literal(played, number: int) -> float:
    """Σ ‖w_i − w_t‖ over S_t, from what every client was sent and answered in a round."""
    call, after = played.clients.asked("train", number)[-1], played.states[number].tree
    total = 0.0
    for client, delta in zip(call.answer.ids, call.answer.deltas, strict=True):
        w_i, w_t = call.models[client] + delta, after.nodes[after.leaf_of[client]].params
        total += float((w_i - w_t).norm())
    return total


@pytest.mark.parametrize(
    "algorithm",
    ["fedavg", CFL(eps1=0.3, eps2=0.6), CFL(eps1=0.3, eps2=0.6, weighted=False), FeSEM(clusters=3)],
    ids=["fedavg", "cfl", "cfl, unweighted", "fesem"],
)
def test_is_the_sum_of_the_distances_from_the_model_after_aggregation(algorithm: Algorithm | str):
    if algorithm == "fedavg":
        algorithm = FLHC(rounds_before=99)  # whose rounds before clustering are federated averaging
    run = simulate(algorithm, linear(1), world(), local=SPEC, rounds=7, seed=1)
    clients, params = simulated(world(), linear(1))
    played = play(algorithm, clients, params, 7, spec=SPEC, seed=1)
    assert [row["discrepancy"] for row in run.metric_rows] == pytest.approx(
        [literal(played, number) for number in range(1, 8)], rel=1e-4
    )
    if isinstance(algorithm, CFL):
        assert any(event["kind"] == "split" for event in run.events), (
            "splits give models to new nodes"
        )


def test_by_hand():
    """Updates 0 and 4 of 1 and 3 examples: the model moves by 3, which is 3 from one client and 1 from the other."""
    clients = ScriptedClients({0: [0.0], 1: [4.0]}, {0: 1, 1: 3})
    algorithm = FLHC(rounds_before=99)
    state = algorithm.init(torch.zeros(1), clients)
    _, log = algorithm.step(state, [0, 1], clients, RoundPlan(1, SPEC))
    assert log.discrepancy == 3 + 1
    _, log = algorithm.step(state, [0, 1], clients, RoundPlan(1, SPEC, min_clients=3))
    assert log.discrepancy == 0 + 4, "with too few answers the model stays"


def test_is_nothing_for_clients_alone_in_the_round_of_clustering_and_in_a_stream():
    local = simulate(Local(), linear(1), world(), local=SPEC, rounds=2, seed=1)
    assert [row["discrepancy"] for row in local.metric_rows] == [0.0, 0.0]
    clustered = simulate(
        FLHC(rounds_before=1, n_clusters=2), linear(1), world(), local=SPEC, rounds=3, seed=1
    )
    assert [row["discrepancy"] is None for row in clustered.metric_rows] == [False, True, False]
    projected = Signature(kind="projected", dim=8)
    stream = simulate(
        "fedavg", linear(1), world(), local=SPEC, rounds=2, signature=projected, stream=True
    )
    assert [row["discrepancy"] for row in stream.metric_rows] == [None, None]
