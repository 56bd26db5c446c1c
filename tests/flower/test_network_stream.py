"""A server that begins to stream when more clients join, and bounds what it stores in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedclade import CFL, ConfigError, Run, Signature
from fedclade.algorithms import Algorithm, FedAvg
from fedclade.core import UpdateError, file_rows, is_in_file
from fedclade.flower import Network, grid_clients
from fedclade.flower.replies import UpdateReply
from fedclade.flower.update_buffer import UpdateBuffer
from fedclade.runs import StreamChoice, models
from tests.flower.grids import federated, grid_of, housed, network_of, node_of
from tests.flower.test_update_buffer import MODELS, PARAMETERS
from tests.tiny import federation_of, perceptron

TRUTH = (0, 1, 0, 1, 0, 1)
SIZE = 4 * sum(parameter.numel() for parameter in perceptron().parameters())
"""Bytes of an update."""


@pytest.fixture
def streams_above_four(monkeypatch: pytest.MonkeyPatch):
    """Let a server stream if the updates of more than four clients have to be stored."""
    monkeypatch.setattr(models, "EXPECTED_CLIENTS", 1)
    monkeypatch.setattr(models, "LARGEST_STORED", 4 * SIZE)


def test_a_choice_is_made_again_when_more_clients_have_joined_until_the_server_streams():
    asked: list[int] = []

    def decide(clients: int) -> bool:
        asked.append(clients)
        return clients > 5

    choice = StreamChoice(False, decide)
    assert [choice.begins(clients) for clients in (3, 3, 2, 5, 6, 7)] == [*[False] * 4, True, False]
    assert asked == [3, 5, 6]
    assert choice.active
    assert not StreamChoice(False).begins(100)
    assert not StreamChoice(True, decide).begins(100)


def play(
    tmp_path: Path, name: str, algorithm: Algorithm, fails_in: int | None = None, **settings: Any
) -> Run:
    """Run six rounds, before the fourth of which two more clients join."""
    grid = housed(grid_of(federation_of(TRUTH)), tmp_path / f"{name} clients")
    late = [node_of(client) for client in (4, 5)]
    for node in late:
        grid.nodes[node].connected = False

    def on_round(row: dict[str, Any], tree: object) -> None:
        if row["round"] == fails_in:
            raise UpdateError("the server was stopped")
        for node in late:
            grid.nodes[node].connected = row["round"] >= 3

    return federated(
        grid,
        algorithm,
        rounds=6,
        network=network_of(grid, clients=4),
        folder=tmp_path / name,
        on_round=on_round,
        **settings,
    )


@pytest.mark.usefixtures("streams_above_four")
@pytest.mark.parametrize(
    ("algorithm", "signature"),
    [
        pytest.param(FedAvg(), Signature(), id="fedavg"),
        pytest.param(
            CFL(split_rounds=(2, 5), eps2=1e-6), Signature(kind="projected", dim=64), id="cfl"
        ),
    ],
)
def test_a_server_streams_from_the_round_on_in_which_more_clients_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm, signature: Signature
):
    began: list[int] = []
    begins = StreamChoice.begins

    def counted(self: StreamChoice, clients: int) -> bool:
        found = begins(self, clients)
        if found:
            began.append(clients)
        return found

    monkeypatch.setattr(StreamChoice, "begins", counted)
    run = play(tmp_path, "auto", algorithm, signature=signature)
    assert began == [6]
    assert run.config["stream"] is True
    stored = play(tmp_path, "stored", algorithm, signature=signature, stream=False)
    assert began == [6], "the setting false is final"
    assert [node.members for node in run.tree.nodes] == [n.members for n in stored.tree.nodes]
    for ours, theirs in zip(run.tree.nodes, stored.tree.nodes, strict=True):
        torch.testing.assert_close(ours.params, theirs.params, rtol=1e-4, atol=1e-5)
    with pytest.raises(UpdateError, match="the server was stopped"):
        play(tmp_path, "again", algorithm, fails_in=2, signature=signature)
    again = play(tmp_path, "again", algorithm, signature=signature)
    assert began == [6, 6]
    for ours, theirs in zip(again.tree.nodes, run.tree.nodes, strict=True):
        assert torch.equal(ours.params, theirs.params)


# Memory.


def test_the_buffer_of_a_stream_has_the_size_that_the_network_sets(monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []

    class Counted(UpdateBuffer):
        def __init__(self, count: int, *rest: Any, **named: Any) -> None:
            rows.append(count)
            super().__init__(count, *rest, **named)

    monkeypatch.setattr(grid_clients, "UpdateBuffer", Counted)
    for size, most in ((2 * SIZE, 2), ("1 B", 1)):
        rows.clear()
        grid = grid_of(federation_of(TRUTH))
        network = network_of(grid, stream_buffer=size)
        federated(grid, FedAvg(), rounds=1, stream=True, network=network)
        assert max(rows) == most


def test_a_size_of_the_buffer_that_is_none_is_refused():
    text = (
        "network.stream_buffer should be a size such as 2GB, 500MiB or a number of bytes, got 'x'"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        Network(stream_buffer="x")


def test_updates_above_the_memory_limit_lie_in_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_rows, "LARGEST_IN_MEMORY", 0)
    size = 3 * MODELS.nbytes
    for largest, in_file in ((size, False), (size - 1, True)):
        buffer = UpdateBuffer(3, 3, MODELS, largest)
        for row in (2, 0):
            buffer.put(row, UpdateReply(5, 0.5, torch.full((3,), float(row))), row)
        updates = buffer.checked(PARAMETERS, 1)
        assert updates.required_deltas.tolist() == [[0.0] * 3, [2.0] * 3]
        assert is_in_file(buffer._deltas) is in_file  # pyright: ignore[reportPrivateUsage]


def test_a_run_with_updates_in_a_file_has_the_same_results(monkeypatch: pytest.MonkeyPatch):
    in_files: list[bool] = []

    class Watched(UpdateBuffer):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            in_files.append(self._is_in_file)

    monkeypatch.setattr(grid_clients, "UpdateBuffer", Watched)
    algorithm = CFL(split_rounds=(2,), eps2=1e-6)
    expected = federated(grid_of(federation_of(TRUTH)), algorithm)
    assert not any(in_files)
    monkeypatch.setattr(file_rows, "LARGEST_IN_MEMORY", 0)
    in_files.clear()
    found = federated(grid_of(federation_of(TRUTH)), algorithm, memory=SIZE)
    assert all(in_files)
    for ours, theirs in zip(found.tree.nodes, expected.tree.nodes, strict=True):
        assert ours.members == theirs.members
        assert torch.equal(ours.params, theirs.params)
