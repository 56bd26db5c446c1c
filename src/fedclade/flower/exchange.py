"""Asking nodes and hearing their answers: all are asked at once, and heard as they come, until a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedclade.errors import UpdateError
from fedclade.flower.wire import Content
from fedclade.meter import Meter
from fedclade.updates import DROPPED_OUT, TOO_LATE

AT_ONCE = 8
"""Messages that are pushed or pulled together: a grid holds all of a call in memory."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two looks for answers; they double while none comes."""

TOLD_EVERY = 30.0
"""Seconds after which a wait is told of in the log."""

GONE = 5
"""Flower's code of the error reply that a SuperLink makes for a node that is no longer there."""

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
        Tell the time in seconds, and let it pass.
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
        self._meter = meter
        self._deadline = deadline
        self._clock = clock
        self._sleep = sleep

    def ask(
        self, questions: Mapping[int, RecordDict], kind: str, group: str, deadline: float | None = None
    ) -> Iterator[tuple[int, Content | str]]:
        """Ask nodes, and yield what each answers as it comes, or why it does not.

        Parameters
        ----------
        questions
            By node.
        kind
            Flower's message type.
        group
            Flower's group: the round, for its logs.
        deadline
            Seconds; the exchange's own if left out.
        """
        seconds = self._deadline if deadline is None else deadline
        pending, lost = self._push(questions, kind, group, seconds)
        yield from ((node, "could not be sent a message") for node in lost)
        end = self._clock() + seconds
        pause, told = FIRST_PAUSE, self._clock()
        while pending:
            heard = 0
            for reply in self._pull(list(pending)):
                node = pending.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:  # else it is nobody's that was asked
                    heard += 1
                    yield node, self._read(reply, node)
                del reply  # or it would stay in memory until the next comes
            if not pending or self._clock() >= end:
                break
            if self._clock() - told >= TOLD_EVERY:
                told = self._clock()
                _log.info("%s: %d of %d have answered", kind, len(questions) - len(pending), len(questions))
            pause = FIRST_PAUSE if heard else min(2 * pause, LONGEST_PAUSE)
            self._sleep(min(pause, max(0.0, end - self._clock())))
        yield from ((node, TOO_LATE) for node in pending.values())

    def _push(
        self, questions: Mapping[int, RecordDict], kind: str, group: str, seconds: float
    ) -> tuple[dict[str, int], list[int]]:
        """Send all questions; return the node of each message by its id, and to whom none could be sent."""
        pending: dict[str, int] = {}
        for some in _slices(list(questions), AT_ONCE):
            messages = [Message(questions[n], n, kind, ttl=seconds + LONGEST_PAUSE, group_id=group) for n in some]
            sent = {each for each in self.grid.push_messages(messages) if each}
            for node, message in zip(some, messages, strict=True):
                if message.metadata.message_id in sent:  # which the grid has given it
                    pending[message.metadata.message_id] = node
                    self._meter.bytes_down += Content.of(message.content).size
        reached = set(pending.values())
        return pending, [node for node in questions if node not in reached]

    def _pull(self, ids: Sequence[str]) -> Iterator[Message]:
        for some in _slices(ids, AT_ONCE):
            replies = list(self.grid.pull_messages(some))
            replies.reverse()
            while replies:  # each is let go as soon as it is read
                yield replies.pop()

    def _read(self, reply: Message, node: int) -> Content | str:
        if reply.has_error():
            return DROPPED_OUT if reply.error.code == GONE else f"error {reply.error.code}: {reply.error.reason}"
        if reply.metadata.src_node_id != node:
            return f"answered by another node, {reply.metadata.src_node_id}"
        try:
            content = Content.of(reply.content)
        except UpdateError as error:
            return str(error)
        self._meter.bytes_up += content.size
        return content.words.values.get("refused", content) if "refused" in content.words.values else content


def _slices(values: Sequence[T], at_once: int) -> Iterable[Sequence[T]]:
    return (values[start : start + at_once] for start in range(0, len(values), at_once))
