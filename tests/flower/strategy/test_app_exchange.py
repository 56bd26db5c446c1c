"""Exchange of plain messages: repeated requests, and replies of bounded size, several at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedclade.channel import Meter
from fedclade.flower import LocalGrid, LocalNode
from fedclade.flower.exchange import STOPPED
from fedclade.flower.flwr_internals import ErrorCode
from fedclade.flower.strategy.app_exchange import AppExchange, AppRequest
from tests.flower.grids import Clock, answered
from tests.flower.test_exchange import SlowGrid
from tests.flower.test_http_inbox import CountingSuperLink, Grid, Parcel, SuperLink, repeated

ARRAYS = 70
"""Arrays of a model, which are more objects than a message of fedclade's own clients has."""


def model(value: float, dtype: type[np.floating[Any]] = np.float32) -> ArrayRecord:
    arrays = {f"layer.{k}": Array(np.full((3, 5), 1000 * value + k, dtype)) for k in range(ARRAYS)}
    return ArrayRecord({**arrays, "scale": Array(np.array(value, dtype))})


class AppGrid(Grid):
    """A grid before a SuperLink, whose nodes answer as plain ClientApps do, in float64."""

    def answer(self, message: Message) -> RecordDict:
        node = message.metadata.dst_node_id
        metrics = MetricRecord({"num-examples": node})
        return RecordDict({"arrays": model(node, np.float64), "metrics": metrics})


def ask(grid: Any, nodes: tuple[int, ...]) -> dict[int, RecordDict | str]:
    clock = Clock()
    exchange = AppExchange(grid, Meter(), 60.0, clock, clock.sleep)
    content = RecordDict({"arrays": model(0.0), "config": ConfigRecord()})
    requests = [AppRequest(client, node, content) for client, node in enumerate(nodes)]
    return {each.node: reply for each, reply in exchange.ask(requests, "train", "1")}


def check_reply(reply: RecordDict | str, node: int) -> None:
    assert not isinstance(reply, str), reply
    assert reply.metric_records["metrics"]["num-examples"] == node
    assert reply.array_records["arrays"]["layer.7"].numpy()[0, 0] == 1000 * node + 7


@pytest.mark.parametrize("stops", [0, 1, 2])
def test_a_request_is_repeated_once_to_a_client_app_that_stopped(stops: int):
    starts = 0

    def start_app(message: Message, context: Any) -> Message:
        nonlocal starts
        starts += 1
        if starts > stops:
            return answered(message, message.content)
        error = Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp stopped responding.")
        return Message(error, reply_to=message)

    clock = Clock()
    grid = SlowGrid(clock, {7: 1.0}, start_app)
    exchange = AppExchange(grid, Meter(), 60.0, clock, clock.sleep)
    arrays = ArrayRecord({"w": Array(np.zeros(3))})
    content = RecordDict({"arrays": arrays, "config": ConfigRecord()})
    ((request, reply),) = exchange.ask([AppRequest(0, 7, content)], "train", "1")
    assert request.client == 0
    assert (reply == STOPPED) == (stops == 2)
    assert starts == min(stops, 1) + 1


def test_no_request_has_no_reply():
    assert ask(LocalGrid({}), ()) == {}


def test_replies_are_fetched_from_a_superlink_at_the_same_time():
    """Each object waits until an object of all other replies is being fetched, too."""
    superlink = CountingSuperLink(nodes=(7, 8, 9), together=3)
    replies = ask(AppGrid(superlink), superlink.nodes)
    for node in superlink.nodes:
        check_reply(replies[node], node)
    assert superlink.most == 3


def larger(parcel: Parcel) -> Parcel:
    """Send an array of 12 MB in addition."""
    content = parcel.message.content
    content.array_records["arrays"]["more"] = Array(np.random.default_rng(0).random(1_500_000))
    return _changed(parcel, content)


def wordy(parcel: Parcel) -> Parcel:
    """Send more metrics than any client needs."""
    content = parcel.message.content
    content["metrics"] = MetricRecord({"m": [1.0] * 140_000})
    return _changed(parcel, content)


def scattered(parcel: Parcel) -> Parcel:
    """Send hundreds of small arrays."""
    content = parcel.message.content
    content["arrays"] = ArrayRecord({str(k): Array(np.zeros(1) + k) for k in range(500)})
    return _changed(parcel, content)


def _changed(parcel: Parcel, content: RecordDict) -> Parcel:
    data = parcel.message.metadata
    question = Message(RecordDict(), data.src_node_id, data.message_type)
    question.metadata.__dict__["_message_id"] = data.reply_to_message_id
    return Parcel.of(answered(question, content))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (larger, "the reply takes more than "),
        (wordy, "bytes without its vectors, expected at most "),
        (scattered, "the reply should consist of at most "),
        (repeated(100), "bytes once it is unpacked, expected at most "),
    ],
)
def test_a_reply_that_is_too_large_costs_only_its_own(spoil: Any, why: str):
    superlink = SuperLink({8: spoil})
    replies = ask(AppGrid(superlink), superlink.nodes)
    assert why in str(replies[8])
    assert "return only the arrays that the client received" in str(replies[8])
    check_reply(replies[7], 7)
    check_reply(replies[9], 9)
    assert superlink.fetched < 8 * 2**20


def test_a_reply_that_is_too_large_is_refused_on_every_grid():
    def app(message: Message, context: Any) -> Message:
        arrays = message.content.array_records["arrays"]
        arrays["more"] = Array(np.zeros(100_000))
        return answered(message, RecordDict({"arrays": arrays}))

    (reply,) = ask(LocalGrid({7: LocalNode(app)}), (7,)).values()
    assert "the reply has arrays of 8" in str(reply)
    assert "expected at most" in str(reply)
