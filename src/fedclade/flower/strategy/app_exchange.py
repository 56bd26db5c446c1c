"""Exchange of plain messages of Flower with the nodes of a grid.

In contrast to :mod:`fedclade.flower.exchange`, messages have no nonce and replies no signature: a
plain ClientApp, and the mods around it, expect one record of arrays and one config.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedclade.channel import Meter
from fedclade.core import TOO_LATE, UpdateError
from fedclade.flower.exchange import (
    AT_ONCE,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STOPPED,
    UNREACHED,
    Inbox,
    describe_error,
)
from fedclade.flower.wire import untrusted

UNLIMITED = 2**62
"""Number of bytes above every size: the size of a plain reply is not limited."""


@dataclass(frozen=True, eq=False)
class AppRequest:
    """Request to one client.

    Parameters
    ----------
    client, node
        Id of the client, and of its node.
    content
        Arrays and config of the message. Requests with the same model share the record of arrays.
    place
        Number of the request among the client's requests of one query, from 0.
    """

    client: int
    node: int
    content: RecordDict
    place: int = 0


class AppExchange:
    """Sender of requests to nodes, and receiver of their replies.

    Parameters
    ----------
    grid
        Grid of Flower.
    meter
        Counter of the bytes of all arrays in messages.
    timeout
        Number of seconds after a request during which replies are accepted; None to wait for all.
    clock, sleep
        Functions that return the time and pause, in seconds. Tests replace both.
    """

    def __init__(
        self,
        grid: Grid,
        meter: Meter,
        timeout: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid = grid
        self.clock = clock
        self.sleep = sleep
        self._meter = meter
        self._timeout = timeout
        self._inbox = Inbox(grid)

    def ask(
        self, requests: Sequence[AppRequest], kind: str, group: str
    ) -> Iterator[tuple[AppRequest, RecordDict | str]]:
        """Send requests; yield each with the content of its reply, in order of arrival.

        For a request without a usable reply, the reason is yielded in place of the content. If the
        ClientApp of a node stopped before it replied, the request is sent to the node once more.

        Parameters
        ----------
        requests
            The requests.
        kind
            Type of the Flower messages: train or evaluate.
        group
            Group of the Flower messages, for Flower's logs.
        """
        pending: dict[str, AppRequest] = {}
        for start in range(0, len(requests), AT_ONCE):
            yield from self._send(requests[start : start + AT_ONCE], kind, group, pending)
        repeated: set[AppRequest] = set()
        end = None if self._timeout is None else self.clock() + self._timeout
        pause = FIRST_PAUSE
        while pending:
            before = len(pending)
            for message_id, reply in self._inbox.read(dict.fromkeys(pending, UNLIMITED)):
                request = pending.pop(message_id, None)
                if request is None:  # the message replies to no known request
                    continue
                content = self._read(reply, request)
                if content == STOPPED and request not in repeated:
                    repeated.add(request)
                    yield from self._send([request], kind, group, pending)
                else:
                    yield request, content
            if not pending or (end is not None and self.clock() >= end):
                break
            pause = FIRST_PAUSE if len(pending) < before else pause
            self.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        yield from ((request, TOO_LATE) for request in pending.values())

    def _send(
        self, requests: Sequence[AppRequest], kind: str, group: str, pending: dict[str, AppRequest]
    ) -> Iterator[tuple[AppRequest, str]]:
        """Send requests and add them to ``pending`` by message id; yield those that are not sent."""
        messages = [
            Message(each.content, each.node, kind, ttl=self._ttl, group_id=group)
            for each in requests
        ]
        sent = {each for each in self.grid.push_messages(messages) if each}
        for request, message in zip(requests, messages, strict=True):
            message_id = message.metadata.message_id  # the grid has set this id
            if message_id in sent:
                pending[message_id] = request
                self._meter.bytes_down += array_bytes(request.content)
            else:
                yield request, UNREACHED

    @property
    def _ttl(self) -> float | None:
        """Seconds for which messages are valid; None for Flower's default."""
        return None if self._timeout is None else self._timeout + LONGEST_PAUSE

    def _read(self, reply: Message | str, request: AppRequest) -> RecordDict | str:
        """Return the content of a reply to a request, or the reason why it is unusable."""
        if isinstance(reply, str):
            return reply
        if reply.has_error():
            return describe_error(reply)
        if reply.metadata.src_node_id != request.node:
            return f"the reply is from another node, {reply.metadata.src_node_id}"
        try:
            with untrusted():
                content = reply.content
                size = array_bytes(content)
        except UpdateError as error:
            return str(error)
        self._meter.bytes_up += size
        return content


def array_bytes(content: RecordDict) -> int:
    """Return the number of bytes of all arrays in a message."""
    return sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )


def only_record(content: RecordDict, kind: str) -> str:
    """Return the name of the only record of a kind in a reply.

    Parameters
    ----------
    content
        Content of the reply.
    kind
        ``ArrayRecord`` or ``MetricRecord``.

    Raises
    ------
    UpdateError
        If the reply does not have exactly one record of the kind.
    """
    records = content.array_records if kind == "ArrayRecord" else content.metric_records
    if len(records) != 1:
        raise UpdateError(
            f"the reply should have exactly one {kind}, got {len(records)} ({list(records)[:8]})"
        )
    return next(iter(records))
