"""Clients that come and go during a run, and a server that is started again."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from fedclade import Callback, EndRecord, RoundRecord, Run, RunInterrupted, SplitRecord
from fedclade.algorithms import FLHC, PACFL, Algorithm, FedAvg, FedGroup
from fedclade.core.errors import ConfigError, RunError, UpdateError
from fedclade.flower import LocalGrid, LocalNode
from fedclade.flower.node_registry import CLIENTS
from tests.flower.grids import (
    ALL_ALLOWED,
    CFL_OF_TWO,
    FOUR,
    app_of,
    federated,
    grid_of,
    housed,
    network_of,
    node_of,
    reasons,
    spoil,
    worded,
)
from tests.flower.test_agreement import ALGORITHMS as EVERY
from tests.tiny import federation_of, linear, perceptron

TRUTH = (0, 1, 0, 1, 0, 1)


def at(number: int, do: Callable[[], object]) -> Callable[[Any, Any], None]:
    """Return an ``on_round`` that does something after a round."""

    def on_round(row: dict[str, Any], tree: object) -> None:
        if row["round"] == number:
            do()

    return on_round


def connect(grid: LocalGrid, *clients: int, connected: bool = True) -> None:
    for client in clients:
        grid.nodes[node_of(client)].connected = connected


def told(run: Run, *kinds: str) -> list[tuple[int, str, Any]]:
    """Return round, kind and clients of events."""
    return [
        (e["round"], e["kind"], e.get("clients", e.get("nodes")))
        for e in run.events
        if e["kind"] in kinds
    ]


def clusters(run: Run) -> set[frozenset[int]]:
    return {frozenset(leaf.members) for leaf in run.tree.leaves if leaf.members}


def test_callbacks_hear_the_same_as_in_a_simulation(tmp_path):
    class Heard(Callback):
        def __init__(self) -> None:
            self.order: list[Any] = []

        def on_split(self, record: SplitRecord, /) -> None:
            self.order.append((record.round, record.children))

        def on_round(self, record: RoundRecord, /) -> bool:
            self.order.append(record.round)
            return record.round == 3

        def on_end(self, record: EndRecord, /) -> None:
            self.order.append((record.reason, record.folder))

    heard, after = Heard(), Heard()
    with pytest.raises(RunInterrupted):
        federated(
            grid_of(federation_of(FOUR)), CFL_OF_TWO, callbacks=[heard], folder=tmp_path / "run"
        )
    at_split = next(each for each in heard.order if isinstance(each, tuple))
    assert at_split == (at_split[0], {1: (0, 2), 2: (1, 3)})
    assert heard.order.count(at_split) == 1
    assert [each for each in heard.order if each != at_split] == [
        1,
        2,
        3,
        ("interrupted", tmp_path / "run"),
    ]
    federated(grid_of(federation_of(FOUR)), CFL_OF_TWO, callbacks=[after], folder=tmp_path / "run")
    assert after.order == [4, ("finished", tmp_path / "run")]


def test_who_connects_later_finds_the_right_cluster():
    """They go down the tree by their own update, level by level (CFL Algorithm 4)."""
    grid = grid_of(federation_of((*FOUR, 0, 1), sizes=[60] * 6))
    connect(grid, 4, 5, connected=False)
    run = federated(grid, CFL_OF_TWO, rounds=5, on_round=at(2, lambda: connect(grid, 4, 5)))
    assert clusters(run) == {frozenset({0, 2, 4}), frozenset({1, 3, 5})}
    joined = told(run, "joined")
    assert joined[0] == (3, "joined", [4, 5])
    assert run.summary["clusters"]["ari"] == 1.0


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), FLHC(rounds_before=2, n_clusters=2), FedGroup(groups=2), PACFL(n_clusters=2)],
)
def test_whatever_the_algorithm_who_connects_later_takes_part(algorithm: Algorithm):
    grid = grid_of(federation_of(FOUR), config=ALL_ALLOWED)
    connect(grid, 3, connected=False)
    run = federated(grid, algorithm, rounds=6, on_round=at(3, lambda: connect(grid, 3)))
    assert (4, "joined", [3]) in told(run, "joined")
    assert sorted(client for cluster in clusters(run) for client in cluster) == [0, 1, 2, 3]
    assert 3 in {row["client"] for row in run.client_rows}


def test_an_oracle_learns_of_them_too_as_far_as_they_tell():
    grid = grid_of(federation_of(FOUR))
    connect(grid, 3, connected=False)
    run = federated(grid, "oracle", on_round=at(2, lambda: connect(grid, 3)))
    assert clusters(run) == {frozenset({0, 2}), frozenset({1, 3})}
    connect(grid, 3, connected=False)
    spoil(grid, 3, "hello", worded(true_cluster=-1))
    with pytest.raises(
        ConfigError,
        match=r"algorithm 'oracle' cannot assign the newcomers \[3\]: their true clusters are",
    ):
        federated(grid, "oracle", on_round=at(2, lambda: connect(grid, 3)))
    connect(grid, 3, connected=False)
    run = federated(grid, "fedavg", on_round=at(2, lambda: connect(grid, 3)))
    # what is not known is not scored
    assert [row["ari"] for row in run.metric_rows] == [0.0, 0.0, None, None]


def test_who_disconnects_is_left_out_at_once_and_its_cluster_goes_on():
    grid = grid_of(federation_of(FOUR))
    seconds: list[float] = []

    def on_round(row: dict[str, Any], tree: object) -> None:
        seconds.append(time.monotonic())
        if row["round"] == 2:
            connect(grid, 2, connected=False)

    start = network_of(grid, deadline=300.0)
    run = federated(grid, CFL_OF_TWO, rounds=5, on_round=on_round, network=start)
    assert max(b - a for a, b in itertools.pairwise(seconds)) < 60  # and not the deadline
    assert told(run, "disconnected") == [(3, "disconnected", [2])]
    assert reasons(run) == {2: "dropped out"}
    assert clusters(run) == {frozenset({0, 2}), frozenset({1, 3})}  # it keeps its place
    rows = [row for row in run.cluster_rows if row["round"] == 5]
    assert sorted(row["clients"] for row in rows) == [1, 2]  # that answered


@pytest.mark.parametrize(("fraction", "trained"), [(0.2, 2), (0.02, 1)])
def test_cohorts_are_a_share_of_the_connected_clients(fraction: float, trained: int):
    """Also if most registered clients are away, and the share is less than one connected client."""
    grid = grid_of(federation_of((0,) * 30, sizes=[8] * 30), linear)
    run = federated(
        grid,
        FedAvg(),
        linear,
        client_fraction=fraction,
        on_round=at(1, lambda: connect(grid, *range(10, 30), connected=False)),
        evaluate_every=4,
    )
    later = [(row["clients_present"], row["clients_trained"]) for row in run.metric_rows[1:]]
    assert later == [(10, trained)] * 3
    assert reasons(run, of_training=True) == {}


def test_a_cohort_that_vanishes_costs_its_round_and_not_the_run(caplog):
    """The clients drop out after the cohort of round 2 is drawn; the next rounds draw others."""
    grid = grid_of(federation_of((0,) * 12, sizes=[8] * 12), linear)
    gone: list[int] = []

    class Leaving(FedAvg):
        def step(self, state, cohort, clients, this_round):
            if this_round.number == 2:
                gone.extend(cohort)
                connect(grid, *cohort, connected=False)
                clients._registry.refresh()
            return super().step(state, cohort, clients, this_round)

    run = federated(grid, Leaving(), linear, client_fraction=0.1, evaluate_every=4)
    assert len(gone) == 1
    assert [row["clients_trained"] for row in run.metric_rows] == [1, 0, 1, 1]
    assert [row["clients_present"] for row in run.metric_rows] == [12, 12, 11, 11]
    assert "round 2: no client replied, so no model changes" in caplog.text


def test_one_that_comes_back_takes_part_again():
    grid = grid_of(federation_of(FOUR))

    def on_round(row: dict[str, Any], tree: object) -> None:
        connect(grid, 1, connected=row["round"] != 2)

    run = federated(grid, CFL_OF_TWO, rounds=5, on_round=on_round)
    assert told(run, "disconnected", "reconnected") == [
        (3, "disconnected", [1]),
        (4, "reconnected", [1]),
    ]
    assert {event["round"] for event in run.events if event["kind"] == "left_out"} == {3}


def test_if_all_are_gone_the_server_waits_and_then_says_so(tmp_path: Path):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    gone = at(2, lambda: connect(grid, *range(4), connected=False))
    with pytest.raises(
        UpdateError, match=r"0 of 1 clients connected within 0.5 s; start more SuperNodes"
    ):
        federated(grid, CFL_OF_TWO, folder=folder, on_round=gone)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round-000002"]
    connect(grid, *range(4))
    same(
        federated(grid, CFL_OF_TWO, folder=folder),
        federated(grid_of(federation_of(FOUR)), CFL_OF_TWO),
        but=("events",),
    )


def test_if_all_are_gone_for_a_moment_the_run_goes_on():
    grid = grid_of(federation_of(FOUR))
    looks, ids = iter(range(1000)), grid.get_node_ids
    absent: list[int] = []

    def flickering() -> Any:
        if absent and next(looks) < 2:
            return []
        return ids()

    grid.get_node_ids = flickering  # type: ignore[method-assign]
    run = federated(
        grid,
        FedAvg(),
        rounds=3,
        on_round=at(1, lambda: absent.append(1)),
        network=network_of(grid, wait=9.0),
    )
    assert reasons(run) == {}
    assert told(run, "disconnected", "reconnected") == []  # between two rounds nobody missed them


def test_a_client_without_its_key_is_refused_and_the_fix_named():
    grid = grid_of(federation_of(FOUR))

    def anew() -> None:
        grid.nodes[777] = grid.nodes.pop(node_of(1))

    run = federated(grid, FedAvg(), rounds=3, on_round=at(1, anew))
    (event,) = [event for event in run.events if event["kind"] == "refused"]
    assert event["round"] == 2
    assert event["nodes"]["777"].endswith("if nodes have no keys, set network.identity = 'number'")
    assert reasons(run) == {1: "dropped out"}

    grid = grid_of(federation_of(FOUR))
    run = federated(
        grid, FedAvg(), rounds=3, on_round=at(1, anew), network=network_of(grid, identity="number")
    )
    assert [event["kind"] for event in run.events] == []


def test_two_secrets_are_no_secret(tmp_path: Path):
    federation = federation_of(FOUR)
    grid = grid_of(federation)
    for client in range(4):
        secret = tmp_path / f"secret-{client}"
        secret.write_text(("ab" if client else "cd") * 32)
        grid.nodes[node_of(client)] = LocalNode(
            app_of(federation), {"partition-id": client, "secret-file": str(secret)}
        )
    why = (
        "node 100 was refused: it does not share the secret of the other "
        "clients; set the same secret-file for all clients, or for none"
    )
    with pytest.raises(UpdateError, match=f"3 of 4 clients connected .*; {why}"):
        federated(grid, FedAvg(), permute=True)
    run = federated(grid, FedAvg(), permute=True, rounds=1, network=network_of(grid, clients=3))
    assert [event["nodes"] for event in run.events] == [
        {"100": why.removeprefix("node 100 was refused: ")}
    ]
    for permute, rule in (
        (False, "true, since the clients share a secret"),
        (True, "false, since the clients share no secret"),
    ):
        with pytest.raises(
            ConfigError, match=f"privacy.permute should be {rule} .*, got {permute}"
        ):
            federated(
                grid if not permute else grid_of(federation),
                FedAvg(),
                permute=permute,
                network=network_of(grid, clients=3),
            )


ALGORITHMS: dict[str, Algorithm] = {**EVERY, "cfl": CFL_OF_TWO}

STOPPED = UpdateError("the server was stopped")


def stopped_after(number: int) -> Callable[[Any, Any], None]:
    def stop() -> None:
        raise STOPPED

    return at(number, stop)


def answering(grid: LocalGrid, folder: Path) -> LocalGrid:
    """Give clients of few examples folders of their own, and let them answer two runs' questions for replicates."""
    for each in grid.nodes.values():
        each.config = {**each.config, "max-partings": 10}
    return housed(grid, folder)


@pytest.mark.parametrize(
    ("name", "number"),
    [("cfl", 1), ("cfl", 2), ("cfl", 3), *((n, 2) for n in ALGORITHMS if n != "cfl")],
)
def test_a_server_that_is_started_again_ends_as_if_it_had_not_been_stopped(
    name: str, number: int, tmp_path: Path
):
    federation, algorithm = federation_of(FOUR), ALGORITHMS[name]
    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    grid = answering(grid_of(federation, perceptron, ALL_ALLOWED), tmp_path / "clients")
    uninterrupted = federated(grid, algorithm, folder=whole)
    with pytest.raises(UpdateError, match="the server was stopped"):
        federated(grid, algorithm, folder=folder, on_round=stopped_after(number))
    assert not (folder / "summary.json").exists()
    grid = answering(grid_of(federation, perceptron, ALL_ALLOWED), tmp_path / "clients")
    same(federated(grid, algorithm, folder=folder), uninterrupted)
    for table in ("clusters.parquet", "clients.parquet"):
        assert pq.read_table(folder / table).equals(pq.read_table(whole / table))
    tree = [path.relative_to(whole) for path in (whole / "tree").rglob("*") if path.is_file()]
    assert tree
    for file in ("config.toml", "events.jsonl", *tree):
        assert (folder / file).read_bytes() == (whole / file).read_bytes()
    ours, theirs = (json.loads((path / CLIENTS).read_text()) for path in (folder, whole))
    # so that clients keep nothing from one to the other
    assert ours.pop("run") != theirs.pop("run")
    assert ours == theirs


def test_so_does_one_that_was_killed(tmp_path: Path):
    """Nothing is saved on the way out; the round after the last checkpoint is held again."""
    federation, folder = federation_of(FOUR), tmp_path / "run"

    def kill() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated(
            grid_of(federation), CFL_OF_TWO, folder=folder, on_round=at(3, kill), checkpoint_every=1
        )
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "round-000001",
        "round-000002",
    ]
    same(
        federated(grid_of(federation), CFL_OF_TWO, folder=folder),
        federated(grid_of(federation), CFL_OF_TWO),
    )


def same(run: Run, other: Run, but: tuple[str, ...] = ()) -> None:
    """Check that two runs are the same but for the seconds that they took."""
    assert [node.members for node in run.tree.nodes] == [node.members for node in other.tree.nodes]
    for ours, theirs in zip(run.tree.nodes, other.tree.nodes, strict=True):
        assert torch.equal(ours.params, theirs.params)
    metrics = [
        [
            {name: value for name, value in row.items() if not name.startswith("seconds")}
            for row in each.metric_rows
        ]
        for each in (run, other)
    ]
    assert metrics[0] == metrics[1]
    assert "events" in but or run.events == other.events


def test_a_finished_run_is_returned_at_once(tmp_path: Path):
    """Its clients need not be there."""
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    network = network_of(grid, wait=300.0)
    run = federated(grid, FedAvg(), rounds=2, folder=folder, network=network)
    connect(grid, *range(4), connected=False)
    start = time.monotonic()
    same(federated(grid, FedAvg(), rounds=2, folder=folder, network=network), run)
    assert time.monotonic() - start < 60


def test_more_rounds_and_another_network_continue_a_run(tmp_path: Path):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    federated(grid, FedAvg(), rounds=2, folder=folder)
    run = federated(
        grid, FedAvg(), rounds=3, folder=folder, network=network_of(grid, clients=3, deadline=9.0)
    )
    assert len(run.metric_rows) == 3
    assert run.config["network"]["deadline"] == 9.0
    with pytest.raises(
        RunError,
        match="contains a run with another config: its seed is 0, not 1; name another folder",
    ):
        federated(grid, FedAvg(), rounds=3, folder=folder, seed=1)


def test_a_server_that_is_started_again_waits_for_its_clients_too(tmp_path: Path):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    network = network_of(grid)
    with pytest.raises(UpdateError, match="the server was stopped"):
        federated(grid, FedAvg(), folder=folder, on_round=stopped_after(2), network=network)
    connect(grid, 0, 1, connected=False)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UpdateError, match=r"2 of 4 clients connected within 0.5 s"):
        federated(grid, FedAvg(), folder=folder, network=network)
    assert sorted(folder.rglob("*")) == before


def test_damaged_clients_stop_the_server_and_nothing_is_changed(tmp_path: Path):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    with pytest.raises(UpdateError, match="the server was stopped"):
        federated(grid, FedAvg(), folder=folder, on_round=stopped_after(2))
    (folder / CLIENTS).write_text("{")
    before = sorted(path for path in folder.rglob("*"))
    with pytest.raises(RunError, match=r"clients.json is damaged"):
        federated(grid, FedAvg(), folder=folder)
    assert sorted(path for path in folder.rglob("*")) == before


def test_one_who_joined_after_the_last_checkpoint_joins_again(tmp_path: Path):
    """It is written down who it is, but not yet in the tree."""
    federation, folder = federation_of(FOUR), tmp_path / "run"
    grid = grid_of(federation)
    connect(grid, 3, connected=False)
    with pytest.raises(UpdateError, match="the server was stopped"):
        federated(grid, FedAvg(), folder=folder, on_round=stopped_after(1), checkpoint_every=1)
    kept = json.loads((folder / CLIENTS).read_text())
    kept["clients"]["3"] = {"node": node_of(3), "name": "c3", "size": 24, "true_cluster": 1}
    (folder / CLIENTS).write_text(json.dumps(kept))
    connect(grid, 3)
    run = federated(grid, FedAvg(), folder=folder)
    assert told(run, "joined") == [(2, "joined", [3])]
    assert clusters(run) == {frozenset(range(4))}


def test_names_in_tables_and_files_are_clean(tmp_path: Path):
    grid = grid_of(federation_of(FOUR))
    spoil(grid, 1, "hello", worded(name="\x1b[31m[bold]evil\n" + 1000 * "x"))
    run = federated(grid, FedAvg(), rounds=1, folder=tmp_path / "run")
    names = {row["client"]: row["name"] for row in run.client_rows}
    assert names[1].isprintable()
    assert len(names[1]) <= 60
    assert "\\u001b" not in (tmp_path / "run" / CLIENTS).read_text()
