"""The limit on clients that join a run over a network at once: who waits, for how long, and who does not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedclade import ConfigError, RunInterrupted
from fedclade.channel import Meter
from fedclade.flower import Network
from fedclade.flower.exchange import Exchange
from fedclade.flower.newcomers import NEW_FOR, NewcomerLimit, is_new
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.registration import RegisteredClient
from tests.flower.grids import federated, grid_of, housed, network_of, node_of
from tests.flower.test_connected import at, connect, told
from tests.tiny import federation_of

TEN = federation_of([0] * 10)
LATE = range(4, 10)


def registered(*since: int) -> dict[int, RegisteredClient]:
    """Return clients that joined in some rounds; client k is node 100 + k."""
    return {
        k: RegisteredClient(node_of(k), f"c{k}", 10, since=number) for k, number in enumerate(since)
    }


@pytest.mark.parametrize(
    ("share", "number", "since", "room"),
    [
        (math.inf, 3, [0] * 12, None),
        (0.25, 0, [0] * 12, None),
        (0.25, 1, [0] * 12, None),
        (0.25, 3, [0] * 12, 3),
        (0.25, 3, [0] * 12 + [2], 2),
        (0.25, 3, [0] * 12 + [3] * 9, 0),
        (0.25, 2 + NEW_FOR, [0] * 12 + [2] * 4, 4),
        (0.25, 3, [0] * 3, 2),
        (0.0, 3, [0] * 12, 0),
    ],
)
def test_room_is_a_share_of_the_clients_that_are_no_newcomers(share, number, since, room):
    clients = registered(*since)
    assert (
        NewcomerLimit(share).room(number, clients, [one.node for one in clients.values()]) == room
    )


def test_clients_that_are_gone_make_no_room_and_newcomers_that_are_gone_take_it():
    clients = registered(*[0] * 12, 2, 2)
    assert NewcomerLimit(0.5).room(3, clients, [node_of(k) for k in range(12)]) == 4
    assert NewcomerLimit(0.5).room(3, clients, [node_of(k) for k in range(8)]) == 2


def test_a_newcomer_is_one_for_ten_rounds():
    one = registered(4)[0]
    assert [number for number in range(4, 20) if is_new(one, number)] == list(range(4, 4 + NEW_FOR))
    assert not is_new(replace(one, since=0), 2)


def late_to(grid, number: int = 2):
    """Return an ``on_round`` by which six clients connect after a round."""
    connect(grid, *LATE, connected=False)
    return at(number, lambda: connect(grid, *LATE))


def test_of_many_newcomers_two_join_four_clients_and_the_others_wait_ten_rounds():
    grid = grid_of(TEN)
    run = federated(grid, "fedavg", rounds=13, on_round=late_to(grid), evaluate_every=13)
    joined = [(number, clients) for number, _, clients in told(run, "joined")]
    assert [(number, len(clients)) for number, clients in joined] == [(3, 2), (13, 2)]
    waiting = [
        (event["round"], len(event["nodes"])) for event in run.events if event["kind"] == "waiting"
    ]
    assert waiting == [(3, 4), (13, 2)], "it is told when others wait than before"
    assert run.metric_rows[-1]["clients_trained"] == 8


@pytest.mark.parametrize("newcomers", [math.inf, 2.0])
def test_as_many_join_as_the_setting_allows(newcomers):
    grid = grid_of(TEN)
    on_round, network = late_to(grid), network_of(grid, newcomers=newcomers)
    run = federated(
        grid, "fedavg", rounds=3, on_round=on_round, network=replace(network, clients=4)
    )
    assert told(run, "joined") == [(3, "joined", list(LATE))]
    assert told(run, "waiting") == []


def test_with_a_share_of_0_nobody_joins():
    grid = grid_of(TEN)
    on_round, network = late_to(grid), network_of(grid, newcomers=0.0)
    run = federated(
        grid, "fedavg", rounds=3, on_round=on_round, network=replace(network, clients=4)
    )
    assert told(run, "joined") == []
    assert len(run.events[-1]["nodes"]) == 6


def test_who_comes_back_is_no_newcomer():
    grid = grid_of(TEN)

    def leave_and_return(row, tree):
        if row["round"] in (2, 3):
            connect(grid, *LATE, connected=row["round"] == 3)

    run = federated(grid, "fedavg", rounds=4, on_round=leave_and_return)
    assert told(run, "reconnected", "waiting") == [(4, "reconnected", list(LATE))]


def test_a_crowd_does_not_get_in_when_the_server_starts_again(tmp_path: Path):
    grid = housed(grid_of(TEN), tmp_path / "homes")
    connect(grid, *LATE, connected=False)
    network = network_of(grid)
    callbacks = {
        "on_round": at(2, lambda: connect(grid, *LATE)),
        "network": network,
        "folder": tmp_path / "run",
    }

    def stop(row, tree):
        if row["round"] == 2:
            connect(grid, *LATE)
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, RunInterrupted)):
        federated(grid, "fedavg", rounds=4, checkpoint_every=1, **{**callbacks, "on_round": stop})
    run = federated(grid, "fedavg", rounds=4, checkpoint_every=1, **{**callbacks, "on_round": None})
    assert sum(len(clients) for _, _, clients in told(run, "joined")) == 2


def test_a_list_of_keys_is_no_crowd():
    exchange = Exchange(grid_of(TEN), Meter(), 1.0)
    limit = NewcomerLimit(0.25)
    assert NodeRegistry(exchange, newcomers=limit).newcomers == 0.25
    assert math.isinf(NodeRegistry(exchange, keys={"ab": 0}, newcomers=limit).newcomers)
    assert math.isinf(NodeRegistry(exchange).newcomers)


def test_a_negative_share_is_refused():
    with pytest.raises(ConfigError, match=r"network\.newcomers should be at least 0, got -0.1"):
        Network(newcomers=-0.1)
    assert "newcomers" not in Network().described
    assert Network(newcomers=1.0).described["newcomers"] == 1.0
