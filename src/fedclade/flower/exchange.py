"""Requests to nodes and their answers: all are sent at once, and answers are read as they arrive, until a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedclade.channel import Meter
from fedclade.core import DROPPED_OUT, TOO_LATE, UpdateError
from fedclade.flower.inbox import inbox_of
from fedclade.flower.signing import Request, verified, with_nonce
from fedclade.flower.wire import Content, clean, untrusted

AT_ONCE = 8  # messages that are pushed or polled together: a grid holds all of a call in memory
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two polls; they double while no answer comes
LOG_EVERY = 30.0  # seconds after which the log reports how many have answered
UNREACHED = "could not be sent a message"  # why a client is left out whose message the grid did not take

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Exchange:
    """Requests to nodes over a grid, and their answers, until ``deadline`` seconds after a request.

    The meter counts the bytes of all vectors that travel; clock and sleep are for all that waits for nodes.
    """

    def __init__(
        self,
        grid: Grid,
        meter: Meter,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid = grid
        self._inbox = inbox_of(grid)
        self._meter = meter
        self._deadline = deadline
        self.clock = clock
        self.sleep = sleep
        self.between_polls: Callable[[], None] = lambda: None

    def ask(
        self, contents: Mapping[int, RecordDict], kind: str, group: str, largest: int = 0
    ) -> Iterator[tuple[int, Content | str]]:
        """Send each node its content, and yield the verified answers as they arrive, or why there is none.

        ``kind`` and ``group`` are Flower's message type and, for its logs, group; the vectors of an answer may take
        ``largest`` bytes.
        """
        pending, lost = self.send(contents, kind, group, self._deadline, largest)
        yield from ((node, UNREACHED) for node in lost)
        end = self.clock() + self._deadline
        pause, logged = FIRST_PAUSE, self.clock()
        while pending:
            before = len(pending)
            yield from self.poll(pending)
            if not pending or self.clock() >= end:
                break
            if self.clock() - logged >= LOG_EVERY:
                logged = self.clock()
                _log.info("%s: %d of %d have answered", kind, len(contents) - len(pending), len(contents))
            pause = FIRST_PAUSE if len(pending) < before else pause
            self.between_polls()
            self.sleep(min(pause, max(0.0, end - self.clock())))
            pause = min(2 * pause, LONGEST_PAUSE)
        yield from ((request.node, TOO_LATE) for request in pending.values())

    def send(
        self, contents: Mapping[int, RecordDict], kind: str, group: str, seconds: float, largest: int = 0
    ) -> tuple[dict[str, Request], list[int]]:
        """Send requests, to be answered within so many seconds, and do not wait.

        Returns the requests by the id of their message, and the nodes to which none could be sent.
        """
        pending: dict[str, Request] = {}
        for some in _slices(list(contents), AT_ONCE):
            sealed = [with_nonce(contents[node]) for node in some]
            messages = [
                Message(content, node, kind, ttl=seconds + LONGEST_PAUSE, group_id=group)
                for node, (content, _) in zip(some, sealed, strict=True)
            ]
            sent = {each for each in self.grid.push_messages(messages) if each}
            for message, (_, nonce) in zip(messages, sealed, strict=True):
                if message.metadata.message_id in sent:  # which the grid has given it
                    pending[message.metadata.message_id] = Request.of(message, nonce, largest)
                    self._meter.bytes_down += Content.of(message.content).size
        reached = {request.node for request in pending.values()}
        return pending, [node for node in contents if node not in reached]

    def poll(self, pending: dict[str, Request]) -> Iterator[tuple[int, Content | str]]:
        """Yield the answers that have arrived by now, or why they cannot be used; they are no longer pending."""
        for some in _slices(list(pending), AT_ONCE):
            for message_id, reply in self._inbox.read({each: pending[each].largest for each in some}):
                request = pending.pop(message_id, None)
                if request is not None:  # else it answers nothing that was sent
                    yield request.node, reply if isinstance(reply, str) else self._read(reply, request)
                del reply  # or it would stay in memory until the next comes

    def _read(self, reply: Message, request: Request) -> Content | str:
        if reply.has_error():  # which a SuperLink makes in its own name
            code, reason = reply.error.code, clean(reply.error.reason or "")
            return DROPPED_OUT if code == ErrorCode.NODE_UNAVAILABLE else f"error {code}: {reason}"
        if reply.metadata.src_node_id != request.node:
            return f"answered by another node, {reply.metadata.src_node_id}"
        try:
            with untrusted():
                size = _vector_bytes(reply.content)
                if size > request.largest:
                    raise UpdateError(f"vectors of {size} bytes, at most {request.largest} were asked for")
                self._meter.bytes_up += size
                return verified(reply.content, request)
        except UpdateError as error:
            return str(error)


def _vector_bytes(content: RecordDict) -> int:
    # Not by the view ``array_records``: it refers back, and the answer would stay in memory until cycles are collected.
    arrays = (record.values() for record in content.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for some in arrays for array in some)


def _slices(values: Sequence[T], at_once: int) -> Iterable[Sequence[T]]:
    return (values[start : start + at_once] for start in range(0, len(values), at_once))
