"""Asking nodes and hearing their answers: all are asked at once, and heard as they come, until a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedclade.channel import Meter
from fedclade.core import (
    DROPPED_OUT,
    TOO_LATE,
    UpdateError,
)
from fedclade.flower import signing
from fedclade.flower.inbox import inbox_of
from fedclade.flower.signing import Asked
from fedclade.flower.wire import Content, clean, distrusting

AT_ONCE = 8
"""Messages that are pushed or looked for together: a grid holds all of a call in memory."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two looks for answers; they double while none comes."""

TOLD_EVERY = 30.0
"""Seconds after which a wait is told of in the log."""

GONE = 5
"""Flower's code of the error reply that a SuperLink makes for a node that is no longer there."""

UNREACHED = "could not be sent a message"
"""Why a client is left out whose message the grid did not take."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Exchange:
    """Questions to nodes over a grid, and their answers.

    Parameters
    ----------
    grid
        Flower's.
    meter
        Counts the bytes of all vectors that travel.
    deadline
        Seconds until an answer is too late.
    clock, sleep
        Tell the time in seconds, and let it pass; for all that waits for nodes.
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
        self.meanwhile: Callable[[], None] = lambda: None
        """What is done now and then while answers are awaited."""

    def ask(
        self, questions: Mapping[int, RecordDict], kind: str, group: str, largest: int = 0
    ) -> Iterator[tuple[int, Content | str]]:
        """Ask nodes, and yield what each answers as it comes, or why it does not.

        An answer returns the nonce of its question, and is signed by the key that it names.

        Parameters
        ----------
        questions
            By node.
        kind
            Flower's message type.
        group
            Flower's group: the round, for its logs.
        largest
            Bytes that the vectors of an answer take at most.
        """
        pending, lost = self.send(questions, kind, group, self._deadline, largest)
        yield from ((node, UNREACHED) for node in lost)
        end = self.clock() + self._deadline
        pause, told = FIRST_PAUSE, self.clock()
        while pending:
            asked = len(pending)
            yield from self.poll(pending)
            if not pending or self.clock() >= end:
                break
            if self.clock() - told >= TOLD_EVERY:
                told = self.clock()
                _log.info("%s: %d of %d have answered", kind, len(questions) - len(pending), len(questions))
            pause = FIRST_PAUSE if len(pending) < asked else pause
            self.meanwhile()
            self.sleep(min(pause, max(0.0, end - self.clock())))
            pause = min(2 * pause, LONGEST_PAUSE)
        yield from ((asked.node, TOO_LATE) for asked in pending.values())

    def send(
        self, questions: Mapping[int, RecordDict], kind: str, group: str, seconds: float, largest: int = 0
    ) -> tuple[dict[str, Asked], list[int]]:
        """Send questions, each with a nonce of its own, to be answered within so many seconds; wait for none.

        Returns
        -------
        dict of str to Asked
            What was asked of whom, by the id of the message.
        list of int
            The nodes to whom none could be sent.
        """
        pending: dict[str, Asked] = {}
        for some in _slices(list(questions), AT_ONCE):
            contents = [signing.question(questions[node]) for node in some]
            messages = [
                Message(content, node, kind, ttl=seconds + LONGEST_PAUSE, group_id=group)
                for node, (content, _) in zip(some, contents, strict=True)
            ]
            sent = {each for each in self.grid.push_messages(messages) if each}
            for message, (_, nonce) in zip(messages, contents, strict=True):
                if message.metadata.message_id in sent:  # which the grid has given it
                    pending[message.metadata.message_id] = Asked.of(message, nonce, largest)
                    self._meter.bytes_down += Content.of(message.content).size
        reached = {asked.node for asked in pending.values()}
        return pending, [node for node in questions if node not in reached]

    def poll(self, pending: dict[str, Asked]) -> Iterator[tuple[int, Content | str]]:
        """Yield the answers that have come by now, or why they are none, and take them off what is pending."""
        for some in _slices(list(pending), AT_ONCE):
            for question, reply in self._inbox.read({each: pending[each].largest for each in some}):
                asked = pending.pop(question, None)
                if asked is not None:  # else it is nobody's that was asked
                    yield asked.node, reply if isinstance(reply, str) else self._read(reply, asked)
                del reply  # or it would stay in memory until the next comes

    def _read(self, reply: Message, asked: Asked) -> Content | str:
        if reply.has_error():  # which a SuperLink makes in its own name
            code, reason = reply.error.code, clean(reply.error.reason or "")
            return DROPPED_OUT if code == GONE else f"error {code}: {reason}"
        if reply.metadata.src_node_id != asked.node:
            return f"answered by another node, {reply.metadata.src_node_id}"
        try:
            with distrusting():
                size = _vector_bytes(reply.content)
                if size > asked.largest:
                    raise UpdateError(f"vectors of {size} bytes, at most {asked.largest} were asked for")
                self._meter.bytes_up += size
                return signing.verified(reply.content, asked)
        except UpdateError as error:
            return str(error)


def _vector_bytes(content: RecordDict) -> int:
    # Not by the view ``array_records``: it refers back, and the answer would stay in memory until cycles are collected.
    arrays = (record.values() for record in content.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for some in arrays for array in some)


def _slices(values: Sequence[T], at_once: int) -> Iterable[Sequence[T]]:
    return (values[start : start + at_once] for start in range(0, len(values), at_once))
