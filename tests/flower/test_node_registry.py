from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from fedclade.channel.traffic import Meter
from fedclade.core import DataSpec
from fedclade.core.errors import ModelError, RunError, UpdateError
from fedclade.flower import LocalGrid, LocalNode, wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.node_registry import RETRY_AFTER, Changes, NodeRegistry
from fedclade.flower.registration import Identity, KnownClients, schema_values
from fedclade.flower.signing import key_of, signed
from tests.flower.grids import FOUR, Clock, app_of, grid_of, node_of, spoil, worded
from tests.tiny import federation_of, linear


def registry_of(
    grid: LocalGrid, identity: Identity = "node", clock: Clock | None = None
) -> NodeRegistry:
    clock = clock or Clock()
    return NodeRegistry(Exchange(grid, Meter(), 10.0, clock, clock.sleep), identity)


def four() -> LocalGrid:
    return grid_of(federation_of(FOUR))


def moved(grid: LocalGrid, client: int, to: int) -> None:
    """Let a client start anew without its key: under another node id."""
    grid.nodes[to] = grid.nodes.pop(node_of(client))


def test_all_who_connect_are_taken_in_by_number():
    grid = four()
    grid.nodes = dict(reversed(grid.nodes.items()))
    registry = registry_of(grid)
    registry.wait(4, 1.0)
    assert registry.clients.ids == (0, 1, 2, 3)
    assert registry.clients.names == {0: "c0", 1: "c1", 2: "c2", 3: "c3"}
    assert registry.clients.sizes == dict.fromkeys(range(4), 24)
    assert registry.clients.true_clusters == {0: 0, 1: 1, 2: 0, 3: 1}
    assert [registry.node(client) for client in range(4)] == [100, 101, 102, 103]
    assert registry.changes() == Changes()  # that they have joined is no news: they are new


def test_who_says_no_number_is_given_the_next_by_node():
    grid = four()
    for client in (0, 2, 3):
        spoil(grid, client, "hello", worded(number=-1))
    registry = registry_of(grid)
    registry.wait(4, 1.0)
    assert registry.connected == [1, 2, 3, 4]
    assert [registry.node(client) for client in (1, 2, 3, 4)] == [101, 100, 102, 103]


def test_the_true_clusters_are_known_if_all_tell_theirs():
    grid = four()
    spoil(grid, 2, "hello", worded(true_cluster=-1))
    registry = registry_of(grid)
    registry.wait(4, 1.0)
    assert registry.clients.true_clusters is None


def test_too_few_are_named_and_so_is_who_was_refused(caplog: pytest.LogCaptureFixture):
    grid, clock = four(), Clock()
    grid.nodes[node_of(0)].app = app_of(federation_of(FOUR), linear)
    with (
        caplog.at_level(logging.INFO, "fedclade"),
        pytest.raises(
            UpdateError,
            match=r"3 of 4 clients connected within 5 s; start more SuperNodes.*node 100 was ref",
        ),
    ):
        registry_of(grid, clock=clock).wait(4, 5.0)
    assert clock.now == pytest.approx(5.0)
    assert (
        caplog.messages.count(
            "node 100 is refused: its model differs in structure from the model of the other clients: "
            "'1.weight' is [4, 6] float32, and [8, 6] float32 in the others"
        )
        == 1
    )
    assert caplog.messages.count("3 of 4 clients are connected") == 1


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            {"layout": "0" * 32},
            "its model differs in structure from the model of the other clients",
        ),
        (
            {"schema": json.dumps({"data": "d", "input_shape": [9], "outputs": 4})},
            r"its examples have the properties ((9,), 4, 'classification', 0), but "
            r"those of the other clients have ((6,), 4, 'class",
        ),
        (
            {"secret": "0" * 64},
            "it does not share the secret of the other clients; set the same secret-file for all clients, or for none",
        ),
        ({"size": -1}, "it has not registered: 'size' should be 1 to 2**53 examples, got -1"),
        ({"refused": "no data here"}, "it has not registered: no data here"),
    ],
)
def test_one_that_is_unlike_the_others_shuts_out_itself_alone(what: dict[str, Any], why: str):
    """Be it the first: what clients have in common is what most have."""
    grid = four()
    spoil(grid, 0, "hello", worded(**what))
    registry = registry_of(grid)
    registry.wait(3, 1.0)
    for _ in range(2):
        registry.update()
    assert registry.connected == [1, 2, 3]
    (node, told), *others = registry.changes().refused.items()
    assert (node, others) == (100, [])
    assert why in told
    assert registry.changes() == Changes()  # told once


def test_who_was_refused_is_asked_again_after_a_while():
    grid, clock = four(), Clock()
    honest = grid.nodes[node_of(2)].app
    spoil(grid, 2, "hello", worded(secret="0" * 64))
    registry = registry_of(grid, clock=clock)
    registry.wait(3, 1.0)
    grid.nodes[node_of(2)].app = honest  # it was given the right secret
    clock.now += RETRY_AFTER - 1
    registry.update()
    assert registry.connected == [0, 1, 3]
    clock.now += 1
    registry.update()
    assert registry.connected == [0, 1, 2, 3]


def test_a_number_that_somebody_has_is_nobody_elses():
    grid = four()
    spoil(grid, 2, "hello", worded(number=1))
    for identity in ("node", "number"):
        registry = registry_of(grid, identity)
        registry.wait(3, 1.0)
        registry.update()
        assert registry.connected == [0, 1, 3]
        assert registry.node(1) == 101
        told = registry.changes().refused
        assert told == {102: "it registers as client 1, which is already connected as node 101"}


def test_nobody_waits_for_a_node_that_does_not_introduce_itself():
    """It is taken in when it has answered."""
    grid, clock = four(), Clock()
    pull, silent = grid.pull_messages, {node_of(3)}
    grid.pull_messages = lambda ids: pull(  # type: ignore[method-assign]
        [
            each
            for each in ids
            if each in grid._waiting and grid._waiting[each].metadata.dst_node_id not in silent
        ]
    )
    registry = registry_of(grid, clock=clock)
    registry.wait(3, 1.0)
    assert clock.now == 0
    registry.update()
    registry.update()
    assert clock.now == 0
    assert registry.connected == [0, 1, 2]
    silent.clear()
    registry.update()
    assert registry.connected == [0, 1, 2, 3]


def test_who_goes_and_comes_back_is_the_same_client():
    grid = four()
    registry = registry_of(grid)
    registry.wait(4, 1.0)
    registry.changes()
    grid.nodes[node_of(1)].connected = grid.nodes[node_of(2)].connected = False
    registry.update()
    assert registry.connected == [0, 3]
    assert registry.node(1) is None
    assert registry.changes() == Changes(disconnected=[1, 2])
    grid.nodes[node_of(1)].connected = True
    registry.update()
    assert registry.changes() == Changes(reconnected=[1])
    assert registry.node(1) == 101
    assert len(registry.clients) == 4


def test_by_its_node_a_client_is_recognised_only_with_its_key():
    grid = four()
    registry = registry_of(grid)
    registry.wait(4, 1.0)
    registry.changes()
    moved(grid, 2, 777)
    registry.update()
    assert registry.changes() == Changes(
        disconnected=[2],
        refused={
            777: "it registers as client 2, which was node 102 before; start it with "
            "the key of that node, or, if nodes have no keys, set network.identity = 'number'"
        },
    )


def test_by_its_number_it_is_recognised_wherever_it_is():
    """Also if the old node seems to be there for a while, as a SuperLink notices its end with a delay."""
    grid, clock = four(), Clock()
    registry = registry_of(grid, "number", clock)
    registry.wait(4, 1.0)
    registry.changes()
    grid.nodes[777] = grid.nodes[node_of(2)]
    registry.update()
    assert registry.node(2) == 102
    grid.nodes[node_of(2)] = type(grid.nodes[777])(grid.nodes[777].app, connected=False)
    clock.now += RETRY_AFTER
    registry.update()
    assert registry.node(2) == 777
    assert registry.connected == [0, 1, 2, 3]
    assert list(registry.changes().refused) == [777]


def test_a_model_that_is_not_the_clients_is_said():
    registry = registry_of(four())
    registry.check_layout("0" * 32)  # nobody is there who could object
    registry.wait(4, 1.0)
    with pytest.raises(
        ModelError,
        match=r"server's model differs from the clients' model.*to server_app and client_app",
    ):
        registry.check_layout("0" * 32)


def test_another_server_goes_on_with_the_same_clients(tmp_path: Path):
    grid = four()
    registry = registry_of(grid)
    registry.wait(4, 1.0)
    grid.nodes[node_of(3)].connected = False
    registry.update()
    registry.changes()
    registry.save(tmp_path)
    again = registry_of(grid)
    assert not again.settled
    again.load(tmp_path)
    assert again.settled
    assert vars(again.clients) == vars(registry.clients)
    assert again.secret == ""
    assert again.connected == []
    again.update()
    assert again.connected == [0, 1, 2]
    # the server was away, not they; and of client 3 it was told before
    assert again.changes() == Changes()
    grid.nodes[node_of(3)].connected = True
    again.update()
    assert again.changes() == Changes(reconnected=[3])
    third = registry_of(grid)
    third.load(tmp_path)
    grid.nodes[node_of(0)].connected = False
    third.update()
    assert third.changes() == Changes(disconnected=[0], reconnected=[3])


def test_a_folder_without_clients_is_a_beginning(tmp_path: Path):
    registry = registry_of(four())
    registry.load(tmp_path)
    assert not registry.settled
    assert registry.secret == ""


def test_clients_are_written_down_only_if_something_changed(tmp_path: Path):
    registry = registry_of(four())
    registry.wait(4, 1.0)
    registry.changes()
    registry.save(tmp_path)
    before = (tmp_path / "clients.json").stat().st_ino
    registry.save(tmp_path)
    assert (tmp_path / "clients.json").stat().st_ino == before
    with pytest.raises(RunError, match=r"cannot write .*nowhere.*clients.json: .*No such file"):
        registry.save(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "{",
        lambda kept: "[]",
        lambda kept: "\xff",
        lambda kept: json.dumps({**kept, "clients": []}),
        lambda kept: json.dumps({**kept, "clients": {}}),
        lambda kept: json.dumps({**kept, "clients": {"zero": kept["clients"]["0"]}}),
        lambda kept: json.dumps(
            {**kept, "clients": {"0": {**kept["clients"]["0"], "size": "many"}}}
        ),
        lambda kept: json.dumps(
            {**kept, "clients": {"0": {**kept["clients"]["0"], "true_cluster": "x"}}}
        ),
        lambda kept: json.dumps({**kept, "clients": {"0": {**kept["clients"]["0"], "extra": 1}}}),
        lambda kept: json.dumps({**kept, "schema": {}}),
        lambda kept: json.dumps({**kept, "connected": 5}),
        lambda kept: json.dumps({name: value for name, value in kept.items() if name != "layout"}),
    ],
)
def test_damaged_clients_are_one_clear_error(damage: Any, tmp_path: Path):
    registry = registry_of(four())
    registry.wait(4, 1.0)
    registry.save(tmp_path)
    path = tmp_path / "clients.json"
    path.write_text(damage(json.loads(path.read_text())), encoding="latin-1")
    with pytest.raises(
        RunError, match=r"clients.json is damaged \(.*\); restore it, or name another run folder"
    ):
        registry_of(four()).load(tmp_path)


def test_a_node_that_cannot_be_sent_a_message_is_asked_the_next_time():
    grid = four()
    push = grid.push_messages
    grid.push_messages = lambda messages: [None for _ in messages]  # type: ignore[method-assign,misc]
    registry = registry_of(grid)
    registry.update()
    assert registry.connected == []
    grid.push_messages = push  # type: ignore[method-assign]
    registry.update()
    assert registry.connected == [0, 1, 2, 3]


def test_what_is_no_introduction_is_none():
    grid = four()
    spoil(grid, 1, "hello", lambda honest: RecordDict())
    spoil(grid, 2, "hello", lambda honest: wire.record({"number": 2}))
    registry = registry_of(grid)
    registry.wait(2, 1.0)
    registry.update()
    assert registry.connected == [0, 3]
    assert set(registry.changes().refused) == {101, 102}


@pytest.mark.parametrize("numbered", [True, False])
def test_the_work_of_registering_grows_with_the_number_of_nodes_and_no_faster(
    numbered: bool, monkeypatch: pytest.MonkeyPatch
):
    """Four times as many nodes are looked at four times as often, not sixteen times."""
    schema = json.dumps(schema_values(DataSpec("data", (2,), outputs=2)))

    def register(message: Message, context: Context) -> Message:
        values = {
            **{"number": context.node_id if numbered else -1, "name": "", "size": 10},
            **{"true_cluster": -1, "scores": True, "schema": schema, "description": ""},
            **{"layout": "0" * 32, "secret": "", "task": "t", "scaled": False, "encoding": ""},
        }
        return Message(signed(wire.record(values), message, key_of(context)), reply_to=message)

    looks = 0

    def counting(read: Any) -> Any:
        def counted(clients: KnownClients) -> Any:
            nonlocal looks
            looks += len(clients)
            return read(clients)

        return counted

    for name in ("__iter__", "items", "values", "_sort"):
        monkeypatch.setattr(KnownClients, name, counting(getattr(KnownClients, name)))
    found: list[int] = []
    for nodes in (16, 64):
        looks = 0
        grid = LocalGrid({node: LocalNode(register) for node in range(1, nodes + 1)})
        registry = registry_of(grid)
        registry.wait(nodes, 5.0)
        assert len(registry.connected) == nodes
        found.append(looks)
    assert 0 < found[1] <= 4 * found[0]
