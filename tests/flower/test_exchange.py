"""Deadlines and answers that do not come as they should, on a clock that only moves when somebody sleeps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode

from fedclade.channel.traffic import Meter
from fedclade.core.updates import DROPPED_OUT, TOO_LATE
from fedclade.flower import LocalGrid, LocalNode, wire
from fedclade.flower.exchange import (
    FIRST_PAUSE,
    LOG_EVERY,
    LONGEST_PAUSE,
    STOPPED,
    UNREACHED,
    Exchange,
)
from fedclade.flower.wire import Content
from tests.flower.grids import Clock, answered


def echo(message: Message, context: Any) -> Message:
    """Answer with the question, and the node."""
    words = Content.of(message.content).values
    return answered(message, wire.record({**words, "node": message.metadata.dst_node_id}))


@dataclass
class SlowGrid(LocalGrid):
    """A grid whose answers come so many seconds after the question."""

    clock: Clock
    seconds: dict[int, float]
    app: Callable[[Message, Any], Message] = echo
    lost: tuple[int, ...] = ()
    pushed: list[int] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)
    ready: dict[str, float] = field(default_factory=dict)
    more: list[Message] = field(default_factory=list)
    """What comes besides, with the next pull."""

    def __post_init__(self) -> None:
        super().__init__({node: LocalNode(self.app) for node in self.seconds})

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:  # type: ignore[override]
        messages = list(messages)
        self.pushed.append(len(messages))
        ids = list(super().push_messages(messages))
        for each, message in zip(ids, messages, strict=True):
            self.ready[each] = self.clock() + self.seconds[message.metadata.dst_node_id]
        return [
            None if m.metadata.dst_node_id in self.lost else i
            for i, m in zip(ids, messages, strict=True)
        ]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        self.pulled.append(len(ids))
        more, self.more = self.more, []
        return [
            *super().pull_messages([each for each in ids if self.ready[each] <= self.clock()]),
            *more,
        ]


def ask(grid: SlowGrid, deadline: float = 10.0, **words: Any) -> dict[int, Content | str]:
    exchange = Exchange(grid, Meter(), deadline, grid.clock, grid.clock.sleep)
    questions = {node: wire.record({"what": "train", **words}) for node in grid.seconds}
    found: dict[int, Content | str] = {}
    for node, answer in exchange.ask(questions, "train", "1"):
        assert node not in found  # everybody answers once
        found[node] = answer
    return found


def said(answer: Content | str) -> Any:
    return answer if isinstance(answer, str) else answer.values["node"]


def test_all_are_heard_as_they_come():
    answers = ask(SlowGrid(clock := Clock(), {7: 3.0, 8: 0.0, 9: 1.0}))
    assert list(answers) == [8, 9, 7]
    assert {node: said(answer) for node, answer in answers.items()} == {7: 7, 8: 8, 9: 9}
    assert 3.0 <= clock.now < 3.0 + LONGEST_PAUSE


def test_what_comes_after_the_deadline_is_too_late():
    grid = SlowGrid(Clock(), {7: 0.0, 8: 10.5})
    assert {node: said(answer) for node, answer in ask(grid).items()} == {7: 7, 8: TOO_LATE}
    assert grid.clock.now == pytest.approx(10.0)


def test_a_late_answer_is_never_taken_for_one_to_a_later_question():
    grid = SlowGrid(Clock(), {8: 12.0})
    assert ask(grid, round=1) == {8: TOO_LATE}
    late = dict(grid._waiting)
    grid.clock.now += 5.0
    assert ask(grid, round=2) == {8: TOO_LATE}
    assert late.keys() < grid._waiting.keys()  # nobody asks for it any more
    grid.seconds[8] = 0.0
    answer = ask(grid, round=3)[8]
    assert not isinstance(answer, str)
    assert answer.values["round"] == 3


def test_pauses_double_while_nobody_answers_and_begin_anew_when_somebody_does():
    grid = SlowGrid(Clock(), {7: 0.2, 8: 100.0})
    ask(grid, deadline=5.0)
    assert grid.clock.slept[:5] == [
        FIRST_PAUSE,
        2 * FIRST_PAUSE,
        4 * FIRST_PAUSE,
        FIRST_PAUSE,
        2 * FIRST_PAUSE,
    ]
    assert max(grid.clock.slept) == LONGEST_PAUSE
    assert sum(grid.clock.slept) == pytest.approx(5.0)


def test_a_long_wait_is_told_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "fedclade"):
        ask(SlowGrid(Clock(), {7: 0.0, 8: 100.0}), deadline=2 * LOG_EVERY + 5)
    assert caplog.messages == 2 * ["train: 1 of 2 nodes have replied"]


def test_who_cannot_be_sent_a_message_is_named_at_once():
    grid = SlowGrid(Clock(), {7: 0.0, 8: 0.0, 9: 0.0}, lost=(8,))
    assert {node: said(answer) for node, answer in ask(grid).items()} == {8: UNREACHED, 7: 7, 9: 9}
    assert grid.clock.now == 0


def test_a_grid_that_says_of_fewer_messages_that_they_left_lost_the_others():
    class Cut(SlowGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str | None]:  # type: ignore[override]
            return list(super().push_messages(messages))[:-1]

    assert {n: said(a) for n, a in ask(Cut(Clock(), {7: 0.0, 8: 0.0})).items()} == {
        7: 7,
        8: UNREACHED,
    }


def test_messages_go_all_at_once_and_come_one_by_one():
    """A grid loses all replies of one call if one of them cannot be read."""
    grid = SlowGrid(Clock(), dict.fromkeys(range(1, 21), 0.0))
    assert len(ask(grid)) == 20
    assert grid.pushed == [20]
    assert grid.pulled == 20 * [1]


def test_an_answer_is_forgotten_before_the_next_is_read():
    """Not when Python next looks for cycles: that may be after a hundred others."""
    grid = SlowGrid(Clock(), dict.fromkeys(range(3), 0.0))
    answer, contents = grid._answer, list[ref[RecordDict]]()

    def noted(message: Message) -> Message:
        reply = answer(message)
        contents.append(ref(reply.content))
        return reply

    grid._answer = noted  # type: ignore[method-assign]
    gc.disable()
    try:
        for _ in Exchange(grid, Meter(), 1.0).ask(
            dict.fromkeys(grid.seconds, wire.record({})), "train", "1"
        ):
            assert not any(content() for content in contents[:-1])
    finally:
        gc.enable()
    assert len(contents) == 3


def replying(make: Callable[[Message], Message]) -> Content | str:
    return ask(SlowGrid(Clock(), {7: 0.0}, app=lambda message, context: make(message)))[7]


def test_a_node_that_is_gone_has_dropped_out():
    assert (
        replying(lambda message: Message(Error(5, "unavailable"), reply_to=message)) == DROPPED_OUT
    )


def test_an_error_is_told_cleaned():
    assert replying(lambda message: Message(Error(2, "a\nb"), reply_to=message)) == "error 2: a b"
    assert replying(lambda message: Message(Error(2), reply_to=message)) == "error 2: "


def test_another_nodes_answer_is_not_taken():
    grid = SlowGrid(Clock(), {7: 0.0})
    answer = grid._answer

    def forged(message: Message) -> Message:
        reply = answer(message)
        reply.metadata.__dict__["_src_node_id"] = 666
        return reply

    grid._answer = forged  # type: ignore[method-assign]
    assert ask(grid) == {7: "the reply is from another node, 666"}


def test_what_answers_no_question_or_one_again_is_nobodys():
    clock = Clock()
    grid = SlowGrid(clock, {7: 0.0, 8: 2.0})
    answer = grid._answer

    def twice(message: Message) -> Message:
        reply = answer(message)
        stray = answer(message)
        stray.metadata.__dict__["_reply_to_message_id"] = "a message that was never sent"
        grid.more += [reply, stray]
        return reply

    grid._answer = twice  # type: ignore[method-assign]
    assert {node: said(answer) for node, answer in ask(grid).items()} == {7: 7, 8: 8}


def test_a_refusal_is_its_reason():
    assert replying(lambda message: answered(message, wire.refusal("no\tdata"))) == "no data"
    assert replying(lambda message: answered(message, RecordDict())) == (
        "a message of fedclade should have the record 'fedclade', got the records []; run both sides with the apps of "
        "fedclade.flower"
    )


def test_bytes_of_vectors_are_counted_both_ways_and_those_that_did_not_leave_are_not():
    grid, meter = SlowGrid(Clock(), {7: 0.0, 8: 0.0}, lost=(8,)), Meter()
    answer = wire.record({}, {"update": wire.raw_vector(torch.zeros(5))})
    grid.nodes[7].app = lambda message, context: answered(message, answer)
    question = wire.record({}, {"model": wire.raw_vector(torch.zeros(3))})
    assert (
        len(list(Exchange(grid, meter, 1.0).ask({7: question, 8: question}, "train", "1", 20))) == 2
    )
    assert (meter.bytes_down, meter.bytes_up) == (12, 20)


@dataclass
class SlowStarter:
    """ClientApp whose first processes stop before they reply, as a SuperNode reports it."""

    stops: int
    starts: int = 0

    def __call__(self, message: Message, context: Any) -> Message:
        self.starts += 1
        if self.starts > self.stops:
            return echo(message, context)
        error = Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding.")
        return Message(error, reply_to=message)


def test_a_request_is_repeated_once_to_a_client_app_that_stopped_before_it_replied():
    app = SlowStarter(stops=1)
    grid = SlowGrid(Clock(), {7: 1.0}, app)
    assert {node: said(answer) for node, answer in ask(grid).items()} == {7: 7}
    assert (grid.pushed, app.starts) == ([1, 1], 2)


def test_a_client_app_that_stops_again_is_left_out_with_the_cause():
    app = SlowStarter(stops=9)
    grid = SlowGrid(Clock(), {7: 1.0}, app)
    assert ask(grid) == {7: STOPPED}
    assert "Flower's token for the task expires" in STOPPED
    assert app.starts == 2


def test_the_repeated_request_has_the_same_deadline():
    app = SlowStarter(stops=1)
    grid = SlowGrid(Clock(), {7: 6.0}, app)
    assert ask(grid, deadline=10.0) == {7: TOO_LATE}
    assert grid.clock.now == pytest.approx(10.0)


def test_a_repeated_request_that_cannot_be_sent_leaves_the_client_out_with_the_cause():
    app = SlowStarter(stops=1)
    grid = SlowGrid(Clock(), {7: 1.0}, app)
    pushes = iter([(), (7,)])

    def push(messages: Iterable[Message]) -> Iterable[str | None]:
        grid.lost = next(pushes)
        return SlowGrid.push_messages(grid, messages)

    grid.push_messages = push  # type: ignore[method-assign]
    assert ask(grid) == {7: STOPPED}
