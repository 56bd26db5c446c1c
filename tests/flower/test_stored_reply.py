"""A client of a network answers a repeated query from memory, and sends exactly the same update."""

from __future__ import annotations

import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedclade import Federation, ReplicatedCFL, Task
from fedclade.channel import Adversary, Budget, DifferentialPrivacy, Middleware, ReplyMemory
from fedclade.core import PolicyError
from fedclade.flower import stored_reply
from fedclade.flower.client_app import LyingHandler
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.policy import Policy
from fedclade.flower.wire import Content
from fedclade.training import SimulatedClients
from tests.flower.test_agreement import both, same
from tests.flower.test_client_handler import MODEL, ask
from tests.flower.test_data_splits import ONE_STEP
from tests.tiny import federation_of, perceptron

from .grids import handler_of

FEDERATION = federation_of([0], sizes=[40])


def client_in(
    folder: Path | None = None, federation: Federation = FEDERATION, **settings: Any
) -> ClientHandler:
    if folder is not None:
        settings["folder"] = folder
    return handler_of(0, federation, **settings)


def check(client: ClientHandler, **words: Any) -> Content:
    """Return the reply to a query for updates from four parts, as a check sends it."""
    words = {"round": 1, "part_size": 10, "compares_parts": True, "spec": ONE_STEP} | words
    return ask(client, replicates=4, **words)


@contextmanager
def counted() -> Generator[list[int]]:
    """Count the queries that clients carry out by training: four for each check."""
    count: list[int] = []
    handle = SimulatedClients.handle_updates

    def handled(clients: SimulatedClients, query: Any, sink: Any = None) -> Any:
        count.append(query.round.number)
        return handle(clients, query, sink)

    with mock.patch.object(SimulatedClients, "handle_updates", handled):
        yield count


def update_in(reply: Content) -> bytes:
    return reply.vector("update")


@pytest.mark.parametrize("restarts", [False, True])
def test_a_query_that_the_server_repeats_is_answered_from_memory(restarts: bool, tmp_path: Path):
    """The client has a folder, or the same process receives both queries."""
    folder = tmp_path if restarts else None
    client = client_in(folder)
    with counted() as queries:
        first = check(client)
        if restarts:
            client = client_in(folder)
        again = check(client, query=5)
    assert len(queries) == 4
    assert update_in(again) == update_in(first)
    assert "remembered" not in first.values
    assert again.values == {**first.values, "query": 5, "remembered": True}
    if restarts:
        assert stat.S_IMODE((tmp_path / stored_reply.FILE).stat().st_mode) == 0o600


def test_a_client_that_remembers_sends_what_a_client_that_trains_sends():
    client = client_in()
    check(client)
    check(client, round=3)  # other training in between
    assert update_in(check(client)) == update_in(check(client_in()))


@pytest.mark.parametrize(
    "change",
    [
        {"sent": {"model": MODEL + 1e-6}},
        {"round": 2},
        {"seed": 9},
        {"purpose": "other"},
        {"run": "another run"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_query_is_answered_by_training(change: dict[str, Any]):
    client = client_in()
    check(client)
    with counted() as queries:
        assert "remembered" not in check(client, **change).values
    assert len(queries) == 4


@pytest.mark.parametrize(
    "words", [{"part_size": 0}, {"compares_parts": False}, {"round": 2}], ids=str
)
def test_parts_that_no_check_repeats_are_not_remembered(words: dict[str, Any], tmp_path: Path):
    client = client_in(tmp_path)
    with counted() as queries:
        for _ in range(2):
            check(client, **words)
    assert len(queries) == 8
    assert not (tmp_path / stored_reply.FILE).exists()


def test_a_client_with_other_data_trains_again(tmp_path: Path):
    first = check(client_in(tmp_path))
    other = check(client_in(tmp_path, federation_of([0], sizes=[40], seed=1)))
    assert "remembered" not in other.values
    assert update_in(other) != update_in(first)
    # Only the latest reply is stored.
    assert "remembered" not in check(client_in(tmp_path)).values
    assert "remembered" in check(client_in(tmp_path)).values


def test_a_client_with_another_task_trains_again(tmp_path: Path):
    check(client_in(tmp_path))
    task = Task("classification", class_weights=(1.0, 2.0, 1.0, 1.0))
    assert "remembered" not in check(client_in(tmp_path, task=task)).values


@pytest.mark.parametrize("damage", [b"", b"no safetensors at all"])
def test_a_damaged_file_is_replaced(damage: bytes, tmp_path: Path, caplog: Any):
    first = check(client_in(tmp_path))
    path = tmp_path / stored_reply.FILE
    path.write_bytes(damage)
    again = check(client_in(tmp_path))
    assert update_in(again) == update_in(first)
    assert "remembered" not in again.values
    assert "reply.safetensors is damaged, so the client trains again" in caplog.text
    assert "remembered" in check(client_in(tmp_path)).values


def test_the_file_has_one_reply(tmp_path: Path):
    client = client_in(tmp_path)
    path = tmp_path / stored_reply.FILE
    sizes: list[int] = []
    for seed in range(1, 4):
        check(client, seed=seed)
        sizes.append(path.stat().st_size)
    assert len(set(sizes)) == 1
    assert "remembered" in check(client, seed=3).values


def test_a_policy_that_forbids_the_query_now_forbids_the_stored_reply(tmp_path: Path):
    check(client_in(tmp_path))
    with pytest.raises(PolicyError, match="forbids"):
        check(client_in(tmp_path, policy=Policy(min_part=11)))


def test_a_reply_with_noise_is_another_one_each_time(tmp_path: Path):
    privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1.0)
    federation = federation_of([0], sizes=[64])  # a private client reports a power of two
    client = client_in(tmp_path, federation, privacy=privacy, budget=Budget(epsilon=1e6))
    first = check(client)
    again = check(client)
    assert update_in(first) != update_in(again)
    assert "remembered" not in again.values
    assert not (tmp_path / stored_reply.FILE).exists()


def test_with_middleware_of_the_user_the_client_trains():
    client = client_in(middleware=[Middleware()])
    check(client)
    assert "remembered" not in check(client).values


def test_an_adversary_lies_anew():
    client = LyingHandler(FEDERATION, perceptron(0), adversary=Adversary(kind="gaussian"))
    check(client)
    assert "remembered" not in check(client).values


def test_a_network_counts_the_steps_of_a_simulation():
    """With six clients, all checks repeat the query of round 1; none finds anything."""
    algorithm = ReplicatedCFL(level=0.01, check_every=2)
    here, there = both(algorithm, rounds=8)
    same(here, there)
    with mock.patch.object(ReplyMemory, "recall", return_value=None):
        forgetful_here, forgetful_there = both(algorithm, rounds=8)
    same(forgetful_here, forgetful_there)
    assert there.summary["steps"]["total"] < forgetful_there.summary["steps"]["total"]
    assert there.events == forgetful_there.events
