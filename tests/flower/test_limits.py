"""What a single client can do by what it says of itself: no more than the limits let through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from fedclade import Aggregation, Signature
from fedclade.algorithms import CFL, FedAvg, ReplicatedCFL
from fedclade.core.errors import ConfigError
from fedclade.core.params import Layout
from fedclade.flower import LocalGrid, Network
from fedclade.flower.wire import RAW
from tests.flower.grids import federated, grid_of, network_of, node_of, reasons, spoil, worded
from tests.flower.test_connected import same
from tests.tiny import federation_of, perceptron

ONE_CLUSTER = (0, 0, 0, 0, 0)
BAD = 2

Change = Callable[[RecordDict], RecordDict]


def scaled(factor: float) -> Change:
    """Return a change of an update that travels as float32."""

    def change(honest: RecordDict) -> RecordDict:
        sent = honest.array_records["vectors"]["update"]
        update = np.frombuffer(sent.data, dtype="<f4") * np.float32(factor)
        vectors = ArrayRecord({"update": Array("float32", (len(update),), RAW, update.tobytes())})
        return RecordDict({**honest, "vectors": vectors})

    return change


def of_length(norm: float) -> Change:
    def change(honest: RecordDict) -> RecordDict:
        update = np.frombuffer(honest.array_records["vectors"]["update"].data, dtype="<f4")
        return scaled(norm / float(np.linalg.norm(update)))(honest)

    return change


def lying_grid(change: Change, size: int | None = None) -> LocalGrid:
    """Return five clients of one cluster; the middle one changes its updates, and lies about its size."""
    grid = grid_of(federation_of(ONE_CLUSTER))
    sized = worded() if size is None else worded(size=size)
    spoil(grid, BAD, "hello", sized)
    spoil(grid, BAD, "train", lambda answer: sized(change(answer)))
    return grid


def distance(run: Any, other: Any) -> float:
    return float(torch.linalg.vector_norm(run.tree.nodes[0].params - other.tree.nodes[0].params))


def test_a_client_that_claims_very_many_examples_weighs_no_more_than_the_limit():
    grid = lying_grid(scaled(-1.0), size=10**9)
    run = federated(grid, FedAvg(), rounds=1, network=network_of(grid, largest_weight=2.0))
    assert reasons(run) == {}
    model = Layout.of(perceptron()).flatten(perceptron())
    alone = [
        federated(only_one(client), FedAvg(), rounds=1).tree.nodes[0].params - model
        for client in range(5)
    ]
    weights = [1.0, 1.0, -2.0, 1.0, 1.0]
    expected = model + sum(w * each for w, each in zip(weights, alone, strict=True)) / 6
    torch.testing.assert_close(run.tree.nodes[0].params, expected, rtol=0, atol=1e-6)
    # Without the limit its update is all there is.
    without = federated(
        lying_grid(scaled(-1.0), size=10**9), FedAvg(), rounds=1, network=open_network(grid)
    )
    # it is all there is
    torch.testing.assert_close(without.tree.nodes[0].params, model - alone[BAD], rtol=0, atol=1e-5)


def only_one(client: int) -> LocalGrid:
    grid = grid_of(federation_of(ONE_CLUSTER))
    return LocalGrid({node_of(client): grid.nodes[node_of(client)]})


def open_network(grid: LocalGrid) -> Network:
    return network_of(grid, largest_weight=math.inf, largest_norm=math.inf)


def test_a_size_is_that_of_the_introduction():
    grid = grid_of(federation_of(ONE_CLUSTER))
    spoil(grid, BAD, "train", worded(size=10**9))
    run = federated(grid, FedAvg(), rounds=1)
    assert reasons(run) == {
        BAD: "the update is from 1000000000 training examples, expected 24 by the query and the client's registration"
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "told"), [(scaled(1000.0), ""), (of_length(1e17), "norm 1e+17"), (scaled(-1e9), "")]
)
def test_an_update_that_is_far_too_long_is_left_out(change: Change, told: str, stream: bool):
    settings: dict[str, Any] = (
        {"signature": Signature(kind="projected", dim=64), "stream": True} if stream else {}
    )
    run = federated(lying_grid(change), FedAvg(), rounds=3, **settings)
    assert list(reasons(run)) == [BAD]
    assert "more than 20 times" in reasons(run)[BAD]
    assert reasons(run)[BAD].startswith(told)
    grid = grid_of(federation_of(ONE_CLUSTER))
    grid.nodes.pop(node_of(BAD))
    assert distance(run, federated(grid, FedAvg(), rounds=3, **settings)) < 1e-5
    assert {event["round"] for event in run.events if event["kind"] == "left_out"} == {1, 2, 3}


def test_the_parts_that_clusters_are_found_by_are_measured_too():
    grid = lying_grid(scaled(1000.0))
    run = federated(grid, ReplicatedCFL(), rounds=1)
    queries = {event["query"] for event in run.events if event["kind"] == "left_out"}
    assert queries == {"train"}


@pytest.mark.parametrize("algorithm", [FedAvg(), CFL(split_rounds=(2,), eps2=1e-6)])
def test_honest_clients_do_not_notice(algorithm: Any):
    federation = federation_of((0, 1, 0, 1, 0, 1), sizes=[12, 24, 48, 24, 24, 40])
    with_doors = federated(grid_of(federation), algorithm)
    grid = grid_of(federation)
    assert reasons(with_doors) == {}
    without = federated(grid, algorithm, network=open_network(grid))
    same(with_doors, without)


def test_a_robust_rule_needs_no_limits():
    """A client that sends −1,000 times its update moves the median no further than its going would."""
    federation, loud = federation_of(ONE_CLUSTER), lying_grid(scaled(-1000.0))
    open_, median = (
        Aggregation(rule="mean", clip_above=math.inf),
        Aggregation(rule="median", clip_above=math.inf),
    )
    far = federated(loud, FedAvg(), rounds=2, network=open_network(loud), aggregate=open_)
    loud = lying_grid(scaled(-1000.0))
    near = federated(loud, FedAvg(), rounds=2, network=open_network(loud), aggregate=median)
    honest = federated(grid_of(federation), FedAvg(), rounds=2, aggregate=median)
    assert distance(far, honest) > 50
    assert distance(near, honest) < 0.5


def test_an_update_ten_times_as_long_is_shortened():
    run = federated(lying_grid(scaled(-10.0)), FedAvg(), rounds=2)
    limited = [event["clients"] for event in run.events if event["kind"] == "limited"]
    assert [list(clients) for clients in limited] == [[str(BAD)]] * 2
    assert all(
        "scaled down to 2 times the median norm of its cluster" in clients[str(BAD)]
        for clients in limited
    )
    assert reasons(run) == {}


def test_what_aggregate_says_wins_over_the_network():
    grid = lying_grid(scaled(1000.0))
    without = Aggregation(largest_norm=math.inf, largest_weight=math.inf)
    assert reasons(federated(grid, FedAvg(), rounds=1, aggregate=without)) == {}


def test_limits_are_checked():
    with pytest.raises(
        ConfigError, match=r"(?s)largest_weight .*at least 1, got 0.5.*largest_norm .*at least 1"
    ):
        Network(largest_weight=0.5, largest_norm=0.0)
