"""Requests to nodes and their replies.

All requests are sent at once, and replies are read as they arrive, until a deadline.
"""

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

# Replies from a grid, read one at a time, so that an unreadable reply affects no other.


class Inbox:
    """Replies to messages, from any of Flower's grids."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def read(self, pending: Mapping[str, int]) -> Iterator[tuple[str, Message | str]]:
        """Yield the replies that have arrived, each with the id of its request.

        A reply that cannot be read is replaced by the reason.

        Parameters
        ----------
        pending
            Largest number of bytes of the vectors of a reply, by the id of its request.
        """
        for request in pending:
            try:
                # Pull each reply separately: if one cannot be read, all in the same call are lost.
                with wire.untrusted():
                    messages = list(self._grid.pull_messages([request]))
            except UpdateError as error:
                yield request, str(error)
                continue
            yield from ((message.metadata.reply_to_message_id, message) for message in messages)


def inbox_of(grid: Grid) -> Inbox:
    """Return the inbox of a grid.

    The inbox of a SuperLink fetches no more bytes of a reply than its limit.
    """
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


# Replies from a SuperLink. No more bytes of a reply are fetched or unpacked than its limit.
#
# Flower's own ``HttpGrid.pull_messages`` unpacks every reply. A malformed reply ends the call, and
# all replies fetched in the call are lost, since the SuperLink has deleted them by then. A reply
# with repeated chunks grows without bound, and a reply that is announced and never sent delays all
# others. So the objects of a message are fetched here, checked, and only then assembled by Flower.
# Like :mod:`fedclade.flower.local_grid` this uses Flower's internals.

# Largest number of objects of a message, without the pieces of its vectors: the message itself, its
# records and its arrays.
MOST_OBJECTS = 64
# Largest number of replies in transit. Beyond it the oldest are dropped: they may not be awaited
# any longer.
MOST_INCOMING = 4096

SMALLEST_PIECE = 2**18
"""Smallest size of a piece of an array, in bytes.

Flower's pieces have 5 MiB, unless the client's environment sets another size.
"""


class HttpInbox(Inbox):
    """Replies to messages, from a SuperLink."""

    def __init__(self, grid: HttpGrid) -> None:
        super().__init__(grid)
        self._http = grid
        self._incoming: dict[str, tuple[str, ObjectTree]] = {}
        """Id and object tree of each reply, by request. Its objects may still be in transit."""

    def read(self, pending: Mapping[str, int]) -> Iterator[tuple[str, Message | str]]:
        """Yield the replies that have arrived, each with the id of its request.

        A reply that cannot be read is replaced by the reason.
        """
        self._look([request for request in pending if request not in self._incoming])
        for request in [request for request in pending if request in self._incoming]:
            message, tree = self._incoming[request]
            answer: Message | str | None
            try:
                with wire.untrusted():
                    answer = self._fetched(message, tree, pending[request])
            except UpdateError as error:
                answer = str(error)
            if answer is None:  # its sender has not sent all of it yet
                continue
            del self._incoming[request]
            self._confirm(message)
            yield request, answer

    @property
    def _superlink(self) -> RuntimeHttpClient:
        return self._http._runtime_client  # pyright: ignore[reportPrivateUsage]  (there is no other way to it)

    def _look(self, requests: list[str]) -> None:
        """Find the requests that have a reply; discard messages that reply to none of them."""
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
        """Return a reply; None if parts have not arrived, an UpdateError if it is too large."""
        allowed = largest + wire.LARGEST_VALUES
        most = MOST_OBJECTS + largest // SMALLEST_PIECE
        names = [each.object_id for each in islice(iterate_object_tree(tree), most + 1)]
        if len(names) > most:
            raise UpdateError(f"the answer is in more than {most} pieces")
        contents: dict[str, bytes] = {}
        taken = 0
        # the message itself first, since it is sent last
        for name in dict.fromkeys(reversed(names)):
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
        """Confirm a message, so that the SuperLink deletes it."""
        request = ConfirmMessageReceivedRequest(
            node=self._http.node, run_id=self._http.run.run_id, message_object_id=message
        )
        self._superlink.ConfirmMessageReceived(request)


def _unpacked(contents: Mapping[str, bytes]) -> int:
    """Return the number of bytes of an assembled message.

    An array may name a piece more than once, so this can exceed the size of the fetched objects.
    """
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


# Number of messages that are sent or polled together: a grid has all messages of a call in memory.
AT_ONCE = 8
# Seconds between two polls; the pause doubles while no reply arrives.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
LOG_EVERY = 30.0  # seconds between two log lines with the number of replies
# Reason for leaving a client out if the grid did not accept its message.
UNREACHED = "could not be sent a message"

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Exchange:
    """Sender of requests to nodes over a grid, and receiver of their replies.

    Parameters
    ----------
    grid
        Grid of Flower.
    meter
        Counter of the bytes of all vectors that travel.
    deadline
        Seconds after a request until which replies are accepted.
    clock, sleep
        Functions for the time and for pauses, also used by others that wait for nodes.
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
        """Send each node its content, and yield verified replies as they arrive.

        A node without a usable reply yields the reason.

        Parameters
        ----------
        contents
            Content of the request, by node.
        kind
            Flower's message type.
        group
            Flower's group, for its logs.
        largest
            Largest number of bytes of the vectors of a reply.
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
        """Send requests with a limit of ``seconds`` for a reply, without waiting for replies.

        Returns
        -------
        tuple[dict[str, Request], list[int]]
            Requests by the id of their message, and the nodes that could not be sent one.
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
                if message.metadata.message_id in sent:  # the grid has set this id
                    pending[message.metadata.message_id] = Request.of(message, nonce, largest)
                    self._meter.bytes_down += Content.of(message.content).size
        reached = {request.node for request in pending.values()}
        return pending, [node for node in contents if node not in reached]

    def poll(self, pending: dict[str, Request]) -> Iterator[tuple[int, Content | str]]:
        """Yield the replies that have arrived, or the reasons that they cannot be used.

        Their requests are no longer pending.
        """
        for some in _slices(list(pending), AT_ONCE):
            for message_id, reply in self._inbox.read(
                {each: pending[each].largest for each in some}
            ):
                request = pending.pop(message_id, None)
                if request is not None:  # otherwise the message replies to no known request
                    yield (
                        request.node,
                        reply if isinstance(reply, str) else self._read(reply, request),
                    )
                del reply  # or the reply would stay in memory until the next arrives

    def _read(self, reply: Message, request: Request) -> Content | str:
        if reply.has_error():  # an error message is from the SuperLink, not from the node
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
    # The view ``array_records`` is not used: it refers back to the record, so the reply would stay
    # in memory until cycles are collected.
    arrays = (record.values() for record in content.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for some in arrays for array in some)


def _slices(values: Sequence[T], at_once: int) -> Iterable[Sequence[T]]:
    return (values[start : start + at_once] for start in range(0, len(values), at_once))
