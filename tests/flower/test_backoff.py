"""Nodes that go, come back and hang in the middle of a round."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedclade.algorithms import FedAvg
from fedclade.core.errors import UpdateError
from fedclade.core.updates import DROPPED_OUT, NOT_ASKED, TOO_LATE, Updates
from fedclade.flower import LocalGrid, node_registry
from fedclade.flower.grid_clients import LONGEST, Backoff
from fedclade.flower.wire import Content
from tests.flower.grids import FOUR, federated, grid_of, network_of, node_of, reasons
from tests.flower.test_connected import told
from tests.tiny import federation_of


class Outage:
    """Takes nodes off a grid when it is asked a certain question, and brings them back after so many looks."""

    def __init__(
        self,
        grid: LocalGrid,
        clients: tuple[int, ...],
        number: int,
        looks: int,
        what: str = "train",
    ) -> None:
        self.grid, self.nodes, self.number, self.looks, self.what = (
            grid,
            [node_of(c) for c in clients],
            number,
            looks,
            what,
        )
        self.seen: int | None = None
        self._ids, self._push = grid.get_node_ids, grid.push_messages
        grid.get_node_ids, grid.push_messages = self.ids, self.push  # type: ignore[method-assign]

    def push(self, messages: Any) -> Any:
        messages = list(messages)
        words = [Content.of(message.content).values for message in messages]
        if self.seen is None and any(
            w["what"] == self.what and w.get("round", self.number) == self.number for w in words
        ):
            self.seen = 0
            self.connect(False)
        return self._push(messages)

    def ids(self) -> Any:
        if self.seen is not None:
            self.seen += 1
            if self.seen == self.looks:
                self.connect(True)
        return self._ids()

    def connect(self, connected: bool) -> None:
        for node in self.nodes:
            self.grid.nodes[node].connected = connected


def test_if_all_are_lost_in_a_round_and_back_in_time_the_round_is_held():
    grid = grid_of(federation_of(FOUR))
    Outage(grid, (0, 1, 2, 3), number=2, looks=3)
    run = federated(grid, FedAvg(), rounds=3, network=network_of(grid, wait=60.0))
    assert [row["clients_trained"] for row in run.metric_rows] == [4, 4, 4]
    assert reasons(run) == {}
    (retried,) = [event for event in run.events if event["kind"] == "retried"]
    assert (retried["round"], retried["answered"]) == (2, 4)


def test_if_they_do_not_come_back_the_run_ends_and_says_so():
    grid = grid_of(federation_of(FOUR))
    Outage(grid, (0, 1, 2, 3), number=2, looks=10**9)
    with pytest.raises(
        UpdateError,
        match=r"all clients are disconnected, and no client has reconnected within 0.5 s; start",
    ):
        federated(grid, FedAvg(), rounds=3)


def test_scores_can_do_without_anybody():
    grid = grid_of(federation_of(FOUR))
    Outage(grid, (0, 1, 2, 3), number=1, looks=4, what="evaluate")
    run = federated(grid, FedAvg(), rounds=2, network=network_of(grid, wait=1.0))
    assert [row["clients_trained"] for row in run.metric_rows] == [4, 4]


def test_one_that_is_back_before_the_next_question_is_asked_it():
    """It had to wait for the next round, since who is connected was only looked at when one began."""
    grid = grid_of(federation_of(FOUR))
    Outage(grid, (1,), number=2, looks=1)
    run = federated(grid, FedAvg(), rounds=3)
    left_out = [
        (event["round"], event["query"], event["clients"])
        for event in run.events
        if event["kind"] == "left_out"
    ]
    assert left_out == [(2, "train", {"1": DROPPED_OUT})]
    assert told(run, "disconnected", "reconnected") == []


def test_one_that_comes_back_as_another_node_misses_no_more_than_the_question(
    monkeypatch: pytest.MonkeyPatch,
):
    """Without keys it has to introduce itself again, which it does while the others still answer."""
    monkeypatch.setattr(node_registry, "REFRESH_MEANWHILE", 0.0)
    grid = grid_of(federation_of(FOUR))
    slow, waiting = grid.nodes[node_of(0)], list[int]()
    pull = grid.pull_messages

    def pulled(
        ids: Any,
    ) -> Any:  # the first client answers the question of round 2 only at the third look
        ids = list(ids)
        late = [
            each for each in ids if each in grid._waiting and asks_for_round_2(grid._waiting[each])
        ]
        if late and len(waiting) < 3:
            waiting.append(1)
            if len(waiting) == 1:
                grid.nodes[777] = grid.nodes.pop(node_of(1))
            return pull([each for each in ids if each not in late])
        return pull(ids)

    def asks_for_round_2(message: Message) -> bool:
        words = Content.of(message.content).values
        return message.metadata.dst_node_id == node_of(0) and words.get("round") == 2

    grid.pull_messages = pulled  # type: ignore[method-assign]
    run = federated(
        grid, FedAvg(), rounds=3, network=network_of(grid, identity="number", deadline=30.0)
    )
    assert grid.nodes[node_of(0)] is slow
    assert len(waiting) == 3
    left_out = [
        (event["round"], event["query"]) for event in run.events if event["kind"] == "left_out"
    ]
    assert left_out == [(2, "train")]


class Hanging:
    """Lets the questions of a node be asked, and never answers them."""

    def __init__(
        self, grid: LocalGrid, client: int, what: tuple[str, ...] = ("train", "evaluate")
    ) -> None:
        self.asked: list[str] = []
        pull = grid.pull_messages

        def hangs(message: Message) -> bool:
            return message.metadata.dst_node_id == node_of(client) and kind(message) in what

        def kind(message: Message) -> str:
            return str(Content.of(message.content).values["what"])

        def pulled(ids: Any) -> Any:
            return pull(
                [each for each in ids if not (each in grid._waiting and hangs(grid._waiting[each]))]
            )

        push = grid.push_messages

        def pushed(messages: Any) -> Any:
            messages = list(messages)
            self.asked += [kind(message) for message in messages if hangs(message)]
            return push(messages)

        grid.pull_messages, grid.push_messages = pulled, pushed  # type: ignore[method-assign]


def test_one_that_hangs_does_not_cost_the_deadline_at_every_question():
    grid = grid_of(federation_of(FOUR))
    hanging = Hanging(grid, 1)
    run = federated(grid, FedAvg(), rounds=8, network=network_of(grid, deadline=0.05))
    assert len(hanging.asked) == 4  # of 16 questions: the 1st, 3rd, 6th and 11th
    why = [event["clients"]["1"] for event in run.events if event["kind"] == "left_out"]
    assert len(why) == 16
    assert [place for place, each in enumerate(why, start=1) if each == TOO_LATE] == [1, 3, 6, 11]
    assert why[1] == f"{NOT_ASKED}, as it was too late the last time"
    assert why[3] == why[4] == f"{NOT_ASKED}, as it was too late the last 2 times"


def test_who_is_late_is_asked_ever_less_often_and_begins_anew_once_it_answers():
    backoff, asked = Backoff(), list[int]()
    for number in range(160):
        if not backoff.skipped([1], [0, 1]):
            asked.append(number)
            backoff.late(1)
    gaps = [b - a - 1 for a, b in itertools.pairwise(asked)]
    assert gaps == [1, 2, 4, 8, 16, LONGEST, LONGEST, LONGEST]
    backoff.reset(1)
    assert backoff.skipped([1], [0, 1]) == {}


def test_if_all_are_late_all_are_asked():
    backoff = Backoff()
    for client in (0, 1):
        backoff.late(client)
    assert backoff.skipped([0, 1], [0, 1]) == {}
    assert backoff.skipped([0], [0, 1, 2]).keys() == {0}


def test_who_is_not_asked_has_released_nothing():
    models = torch.zeros(1, 3)
    left_out = {1: TOO_LATE, 2: DROPPED_OUT, 3: f"{NOT_ASKED}, as it was too late the last time"}
    assert Updates.of_nobody(left_out, models, 3).senders == (1,)
