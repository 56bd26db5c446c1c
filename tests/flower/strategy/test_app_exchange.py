"""Exchange of plain messages: the request to a ClientApp that stopped is repeated once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedclade.channel import Meter
from fedclade.flower.exchange import STOPPED
from fedclade.flower.flwr_internals import ErrorCode
from fedclade.flower.strategy.app_exchange import AppExchange, AppRequest
from tests.flower.grids import Clock, answered
from tests.flower.test_exchange import SlowGrid


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
