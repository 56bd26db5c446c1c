"""Requests to nodes and their answers: all are sent at once, and answers are read as they arrive, until a deadline."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import httpx
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from fedclade.channel import Meter
from fedclade.core import DROPPED_OUT, TOO_LATE, UpdateError
from fedclade.flower import wire
from fedclade.flower.signing import Request, verified, with_nonce
from fedclade.flower.wire import Content, clean, untrusted

# Answers from a grid, read one at a time: one that cannot be read is left out, and costs no other.


class Inbox:
    """The answers to messages, from any of Flower's grids."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def read(self, pending: Mapping[str, int]) -> Iterator[tuple[str, Message | str]]:
        """Yield the answers that are there by now, each with the id of its request, or why one cannot be read.

        ``pending`` is how many bytes the vectors of an answer take at most, by the id of its
        request.
        """
        for request in pending:
            try:
                # One alone: whatever is pulled together is lost together.
                with wire.untrusted():
                    messages = list(self._grid.pull_messages([request]))
            except UpdateError as error:
                yield request, str(error)
                continue
            yield from ((message.metadata.reply_to_message_id, message) for message in messages)


def inbox_of(grid: Grid) -> Inbox:
    """Return the inbox of a grid; a SuperLink's fetches no more of an answer than its limit."""
    try:
        from flwr.superlink.grid import HttpGrid

    except ImportError as error:
        _log.warning(
            "this version of flwr is built differently inside (%s): answers are fetched one by "
            "one, and how large they are is seen only then; flwr 1.41 does better",
            error,
        )
        return Inbox(grid)
    return HttpInbox(grid) if isinstance(grid, HttpGrid) else Inbox(grid)


# Answers from a SuperLink, of which no more is fetched, and no more unpacked, than their limit.
#
# Flower's own ``HttpGrid.pull_messages`` unpacks whatever comes: a malformed answer ends the call,
# and with it all that it has fetched, which the SuperLink has forgotten by then; one whose chunks
# are repeated grows without bound; and one that is announced and never sent holds up all others. So
# the objects that a message is made of are fetched here, checked, and only then put together by
# Flower. Like :mod:`fedclade.flower.local_grid` this uses Flower's internals.

# of a message, besides the pieces of its vectors: itself, its records, its arrays
MOST_OBJECTS = 64
# answers that are on their way; of more, the oldest are forgotten, which may be awaited no longer
MOST_INCOMING = 4096

SMALLEST_PIECE = 2**18
"""Bytes of a piece of an array; Flower makes them 5 MiB, unless the client's environment says otherwise."""


class HttpInbox(Inbox):
    """The answers to messages, from a SuperLink."""

    def __init__(self, grid: HttpGrid) -> None:
        super().__init__(grid)
        self._http = grid
        self._incoming: dict[str, tuple[str, ObjectTree]] = {}
        """Id and objects of an answer, which may still be on their way, by its request."""

    def read(self, pending: Mapping[str, int]) -> Iterator[tuple[str, Message | str]]:
        """Yield the answers that are there by now, each with the id of its request, or why one cannot be read."""
        self._look([request for request in pending if request not in self._incoming])
        for request in [request for request in pending if request in self._incoming]:
            message, tree = self._incoming[request]
            answer: Message | str | None
            try:
                with wire.untrusted():
                    answer = self._fetched(message, tree, pending[request])
            except UpdateError as error:
                answer = str(error)
            if answer is None:  # its sender is not done
                continue
            del self._incoming[request]
            self._confirm(message)
            yield request, answer

    @property
    def _superlink(self) -> RuntimeHttpClient:
        return self._http._runtime_client  # pyright: ignore[reportPrivateUsage]  (there is no other way to it)

    def _look(self, requests: list[str]) -> None:
        """See which requests have an answer; what answers none of them is discarded."""
        if not requests:
            return
        there = self._superlink.PullMessages(PullAppMessagesRequest(message_ids=requests))
        for message, tree in zip(there.messages_list, there.message_object_trees, strict=True):
            request = message.metadata.reply_to_message_id
            if request in requests and request not in self._incoming:
                self._incoming[request] = message.metadata.message_id, tree
            else:
                self._confirm(message.metadata.message_id)
        for request in list(self._incoming)[:-MOST_INCOMING]:
            del self._incoming[request]

    def _fetched(self, message: str, tree: ObjectTree, largest: int) -> Message | None:
        """Return an answer, None if some of it has not arrived; an UpdateError if it is larger than it may be."""
        allowed = largest + wire.LARGEST_VALUES
        most = MOST_OBJECTS + largest // SMALLEST_PIECE
        names = [each.object_id for each in islice(iterate_object_tree(tree), most + 1)]
        if len(names) > most:
            raise UpdateError(f"the answer is in more than {most} pieces")
        contents: dict[str, bytes] = {}
        taken = 0
        for name in dict.fromkeys(reversed(names)):  # the message itself first, which is sent last
            content = self._object(name)
            if content is None:
                return None
            contents[name] = content
            taken += len(content)
            if taken > allowed:
                raise UpdateError(f"the answer takes more than {allowed} bytes")
        if (unpacked := _unpacked(contents)) > allowed:
            raise UpdateError(
                f"the answer takes {unpacked} bytes once it is unpacked, more than {allowed}"
            )
        answer = inflate_object_from_contents(message, contents)
        if not isinstance(answer, Message):
            raise UpdateError(f"the answer is a {type(answer).__name__}, expected a message")
        return answer

    def _object(self, name: str) -> bytes | None:
        run = self._http.run.run_id
        node = self._http.node
        try:
            found = self._superlink.PullObject(
                PullObjectRequest(node=node, run_id=run, object_id=name)
            )
        except httpx.HTTPStatusError as error:
            raise UpdateError(f"a part of the answer cannot be fetched: {error}") from error
        if not found.object_found:
            raise UpdateError("a part of the answer was announced, and did not come")
        return found.object_content if found.object_available else None

    def _confirm(self, message: str) -> None:
        """Let the SuperLink forget a message."""
        request = ConfirmMessageReceivedRequest(
            node=self._http.node, run_id=self._http.run.run_id, message_object_id=message
        )
        self._superlink.ConfirmMessageReceived(request)


def _unpacked(contents: Mapping[str, bytes]) -> int:
    """Return how many bytes a message takes once it is put together: an array may name a piece more than once."""
    values = vectors = 0
    for content in contents.values():
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            sizes = [len(contents[piece]) for piece in pieces]
            vectors += sum(sizes[place] for place in places)
        elif kind != "ArrayChunk":
            values += len(content)
    if values > wire.LARGEST_VALUES:
        raise UpdateError(
            f"the answer says {values} bytes besides its vectors, more than {wire.LARGEST_VALUES}"
        )
    return values + vectors


AT_ONCE = 8  # messages that are pushed or polled together: a grid holds all of a call in memory
# seconds between two polls; they double while no answer comes
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
LOG_EVERY = 30.0  # seconds after which the log reports how many have answered
# why a client is left out whose message the grid did not take
UNREACHED = "could not be sent a message"

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Exchange:
    """Requests to nodes over a grid, and their answers, until ``deadline`` seconds after a request.

    The meter counts the bytes of all vectors that travel; clock and sleep are for all that waits
    for nodes.
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

        ``kind`` and ``group`` are Flower's message type and, for its logs, group; the vectors of an
        answer may take ``largest`` bytes.
        """
        pending, lost = self.send(contents, kind, group, self._deadline, largest)
        yield from ((node, UNREACHED) for node in lost)
        end = self.clock() + self._deadline
        pause = FIRST_PAUSE
        logged = self.clock()
        while pending:
            before = len(pending)
            yield from self.poll(pending)
            if not pending or self.clock() >= end:
                break
            if self.clock() - logged >= LOG_EVERY:
                logged = self.clock()
                _log.info(
                    "%s: %d of %d have answered", kind, len(contents) - len(pending), len(contents)
                )
            pause = FIRST_PAUSE if len(pending) < before else pause
            self.between_polls()
            self.sleep(min(pause, max(0.0, end - self.clock())))
            pause = min(2 * pause, LONGEST_PAUSE)
        yield from ((request.node, TOO_LATE) for request in pending.values())

    def send(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        group: str,
        seconds: float,
        largest: int = 0,
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
            for message_id, reply in self._inbox.read(
                {each: pending[each].largest for each in some}
            ):
                request = pending.pop(message_id, None)
                if request is not None:  # else it answers nothing that was sent
                    yield (
                        request.node,
                        reply if isinstance(reply, str) else self._read(reply, request),
                    )
                del reply  # or it would stay in memory until the next comes

    def _read(self, reply: Message, request: Request) -> Content | str:
        if reply.has_error():  # which a SuperLink makes in its own name
            code = reply.error.code
            reason = clean(reply.error.reason or "")
            return DROPPED_OUT if code == ErrorCode.NODE_UNAVAILABLE else f"error {code}: {reason}"
        if reply.metadata.src_node_id != request.node:
            return f"answered by another node, {reply.metadata.src_node_id}"
        try:
            with untrusted():
                size = _vector_bytes(reply.content)
                if size > request.largest:
                    raise UpdateError(
                        f"vectors of {size} bytes, at most {request.largest} were asked for"
                    )
                self._meter.bytes_up += size
                return verified(reply.content, request)
        except UpdateError as error:
            return str(error)


def _vector_bytes(content: RecordDict) -> int:
    # Not by the view ``array_records``: it refers back, and the answer would stay in memory until
    # cycles are collected.
    arrays = (record.values() for record in content.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for some in arrays for array in some)


def _slices(values: Sequence[T], at_once: int) -> Iterable[Sequence[T]]:
    return (values[start : start + at_once] for start in range(0, len(values), at_once))
