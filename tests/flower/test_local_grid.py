from __future__ import annotations

from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedclade.flower import LocalGrid, LocalNode, wire
from tests.flower.grids import words_of


def question(node: int, **words: Any) -> Message:
    return Message(
        wire.record(words, {"model": wire.raw_vector(torch.arange(3.0))}),
        node,
        "train",
        group_id="4",
    )


def test_a_node_answers_with_its_config_and_the_run_config():
    seen: list[Context] = []

    def app(message: Message, context: Context) -> Message:
        seen.append(context)
        return Message(message.content, reply_to=message)

    grid = LocalGrid({7: LocalNode(app, {"partition-id": 2})}, {"rounds": 3})
    sent = question(7)
    (reply,) = grid.send_and_receive([sent])
    assert (seen[0].node_id, dict(seen[0].node_config), dict(seen[0].run_config)) == (
        7,
        {"partition-id": 2},
        {"rounds": 3},
    )
    assert reply.metadata.reply_to_message_id == sent.metadata.message_id
    assert (reply.metadata.src_node_id, reply.metadata.group_id) == (7, "4")
    assert reply.content == sent.content


def test_what_arrives_went_through_flowers_own_serialisation():
    """So that nothing is shared by accident between server and client."""

    def app(message: Message, context: Context) -> Message:
        message.content.config_records["fedclade"]["protocol"] = 2
        return Message(RecordDict(), reply_to=message)

    sent = question(7)
    LocalGrid({7: LocalNode(app)}).send_and_receive([sent])
    assert sent.content.config_records["fedclade"]["protocol"] == wire.PROTOCOL


def test_state_lasts_from_one_message_to_the_next():
    def app(message: Message, context: Context) -> Message:
        counted = len(context.state)
        context.state[str(counted)] = wire.record({})["fedclade"]
        return Message(wire.record({"before": counted}), reply_to=message)

    grid = LocalGrid({7: LocalNode(app)})
    found = [
        words_of(next(iter(grid.send_and_receive([question(7)]))).content)["before"]
        for _ in range(3)
    ]
    assert found == [0, 1, 2]


def test_who_is_gone_or_breaks_is_an_error_reply():
    def broken(message: Message, context: Context) -> Message:
        raise ValueError("no")

    grid = LocalGrid({7: LocalNode(broken), 8: LocalNode(broken, connected=False)})
    assert list(grid.get_node_ids()) == [7]
    failed, gone, never = grid.send_and_receive([question(7), question(8), question(9)])
    assert (failed.error.code, failed.error.reason) == (
        ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
        "ValueError: no",
    )
    assert gone.error.code == never.error.code == ErrorCode.NODE_UNAVAILABLE


def test_an_answer_is_given_once():
    grid = LocalGrid(
        {7: LocalNode(lambda message, context: Message(message.content, reply_to=message))}
    )
    (sent,) = grid.push_messages([question(7)])
    assert len(list(grid.pull_messages([sent, "never sent"]))) == 1
    assert list(grid.pull_messages([sent])) == []


def test_it_is_flowers_grid():
    grid = LocalGrid({})
    assert grid.run.run_id == 1
    grid.set_run(type(grid.run).create_empty(5))
    assert grid.run.run_id == 5
    message = grid.create_message(wire.record({}), "query", 3, "group")
    assert (message.metadata.dst_node_id, message.metadata.message_type) == (3, "query")
