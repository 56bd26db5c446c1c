"""Exchange of plain messages of Flower with the nodes of a grid.

In contrast to :mod:`fedclade.flower.exchange`, messages have no nonce and replies no signature: a
plain ClientApp, and the mods around it, expect one record of arrays and one config.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedclade.channel import Meter
from fedclade.core import TOO_LATE, UpdateError
from fedclade.flower.exchange import (
    AT_ONCE,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_OBJECTS,
    STOPPED,
    UNREACHED,
    ReplyLimit,
    describe_error,
    inbox_of,
    slices,
    vector_bytes,
)
from fedclade.flower.wire import LARGEST_VALUES, untrusted

ENTRY_BYTES = 8
"""Largest number of bytes of an entry of an array: a client may return arrays of any precision."""

ARRAY_BYTES = 2**10
"""Number of bytes that the name, the shape and the type of an array may take."""


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
        self._inbox = inbox_of(grid)

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
        if not requests:
            return
        pending: dict[str, AppRequest] = {}
        for some in slices(requests, AT_ONCE):
            yield from self._send(some, kind, group, pending)
        limit = reply_limit(requests[0].content)  # models of all requests have the same arrays
        repeated: set[AppRequest] = set()
        end = None if self._timeout is None else self.clock() + self._timeout
        pause = FIRST_PAUSE
        while pending:
            before = len(pending)
            for request, content in self._poll(pending, limit):
                if content == STOPPED and request not in repeated:
                    repeated.add(request)
                    yield from self._send([request], kind, group, pending)
                else:
                    yield request, content
                del content  # or the reply would stay in memory until the next arrives
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
                self._meter.bytes_down += vector_bytes(request.content)
            else:
                yield request, UNREACHED

    def _poll(
        self, pending: dict[str, AppRequest], limit: ReplyLimit
    ) -> Iterator[tuple[AppRequest, RecordDict | str]]:
        """Yield each request whose reply has arrived, with the content or the reason against it.

        These requests are removed from ``pending``, which contains requests by message id.
        """
        for some in slices(list(pending), self._inbox.at_once):
            for message_id, reply in self._inbox.read(dict.fromkeys(some, limit)):
                request = pending.pop(message_id, None)
                if request is not None:  # otherwise the message replies to no known request
                    yield request, self._read(reply, request, limit)
                del reply  # or the reply would stay in memory until the next arrives

    @property
    def _ttl(self) -> float | None:
        """Seconds for which messages are valid; None for Flower's default."""
        return None if self._timeout is None else self._timeout + LONGEST_PAUSE

    def _read(
        self, reply: Message | str, request: AppRequest, limit: ReplyLimit
    ) -> RecordDict | str:
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
                size = vector_bytes(content)
                if size > limit.vectors:
                    raise UpdateError(
                        f"the reply has arrays of {size} bytes, expected at most {limit.vectors} "
                        f"for this request, so the server ignores the reply; {limit.hint}"
                    )
        except UpdateError as error:
            return str(error)
        self._meter.bytes_up += size
        return content


def reply_limit(content: RecordDict) -> ReplyLimit:
    """Return the limits on the size of a reply: a client returns at most the arrays it received.

    Parameters
    ----------
    content
        Content of the request.
    """
    arrays = [
        array
        for record in content.values()
        if isinstance(record, ArrayRecord)
        for array in record.values()
    ]
    entries = sum(math.prod(array.shape) for array in arrays)
    return ReplyLimit(
        vectors=ENTRY_BYTES * entries + ARRAY_BYTES * len(arrays),
        values=LARGEST_VALUES + ARRAY_BYTES * len(arrays),
        objects=MOST_OBJECTS + 2 * len(arrays),  # an array is an object, and so are its numbers
        hint="return only the arrays that the client received, and short metrics",
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
