"""Exchange of messages with nodes: the server sends requests and reads the replies.

A node is a Flower SuperNode, which runs one client. All requests are sent at once, and replies are
read as they arrive, until a deadline.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TypeVar

import httpx
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedclade.channel import Meter
from fedclade.core import DROPPED_OUT, TOO_LATE, UpdateError
from fedclade.flower import wire
from fedclade.flower.flwr_internals import (
    ConfirmMessageReceivedRequest,
    ErrorCode,
    HttpGrid,
    ObjectTree,
    PullAppMessagesRequest,
    PullObjectRequest,
    RuntimeHttpClient,
    get_object_body,
    get_object_head_values_from_object_content,
    inflate_object_from_contents,
    iterate_object_tree,
)
from fedclade.flower.signing import Request, verified, with_nonce
from fedclade.flower.wire import Content, clean, untrusted

# Replies are read from a grid one at a time, so that an unreadable reply affects no other reply.


# Number of messages whose replies a grid is polled for in one call. A grid stores all messages of a
# call in memory at the same time.
AT_ONCE = 8

MOST_SENT = 256
"""Number of messages that are sent in one call.

The grid of a SuperLink sends what the messages of a call have in common only once, so few large
calls take fewer requests than many small ones.
"""

MOST_SENT_BYTES = 2**26
"""Bytes of different vectors in the messages that are sent in one call, unless it is one message.

A grid may copy the vectors of all messages of a call.
"""


# Largest number of Flower objects in a message, not counting the pieces of its vectors: the message
# itself, its records and its arrays.
MOST_OBJECTS = 64


@dataclass(frozen=True)
class ReplyLimit:
    """Limits on the size of a reply.

    Parameters
    ----------
    vectors
        Largest number of bytes of the vectors (arrays) of the reply.
    values
        Largest number of bytes of the reply without its vectors.
    objects
        Largest number of Flower objects in the reply, without the pieces of its vectors.
    hint
        Advice to the operator if a reply exceeds the limits, for error texts.
    """

    vectors: int
    values: int = wire.LARGEST_VALUES
    objects: int = MOST_OBJECTS
    hint: str = "install the same version of fedclade on server and clients"

    @property
    def bytes(self) -> int:
        """Largest number of bytes of the reply."""
        return self.vectors + self.values


class Inbox:
    """Reader of replies from any of Flower's grids."""

    at_once = AT_ONCE
    """Number of requests whose replies are looked for in one call of :meth:`read`."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def read(self, pending: Mapping[str, ReplyLimit]) -> Iterator[tuple[str, Message | str]]:
        """Yield the replies that have arrived, each as the id of its request and the message.

        For a reply that cannot be read, the reason is yielded in place of the message.

        Parameters
        ----------
        pending
            Limits on the size of a reply, by the id of its request.
        """
        for request in pending:
            try:
                # Pull each reply in a separate call: if one reply of a call cannot be read, Flower
                # loses all replies of that call.
                with wire.untrusted():
                    messages = list(self._grid.pull_messages([request]))
            except UpdateError as error:
                yield request, str(error)
                continue
            yield from ((message.metadata.reply_to_message_id, message) for message in messages)


def inbox_of(grid: Grid) -> Inbox:
    """Return the reader of replies that fits a grid.

    For the grid of a SuperLink it is an :class:`HttpInbox`, which limits the size of each reply
    before it is fetched.
    """
    return HttpInbox(grid) if isinstance(grid, HttpGrid) else Inbox(grid)


# Replies from a SuperLink. No more bytes of a reply are fetched or unpacked than its limit.
#
# Flower's own ``HttpGrid.pull_messages`` unpacks every reply. A malformed reply ends the call, and
# all replies fetched in the call are lost, since the SuperLink has deleted them by then. A reply
# with repeated chunks grows without bound, and a reply that is announced and never sent delays all
# other replies. So the objects of a message are fetched here, checked, and only then assembled by
# Flower. Like :mod:`fedclade.flower.local_grid` this uses Flower's internals.

# Largest number of replies that are partly fetched. Beyond this number the oldest replies are
# discarded, since they may not be awaited any longer.
MOST_INCOMING = 4096

MOST_FETCHES_NEAR, MOST_FETCHES_FAR = 4, 16
"""Number of replies that are fetched at the same time, from a SuperLink that is near or far away.

A reply takes up to seven requests, one after the other. If a request takes long to travel, many
fetches at the same time hide that. Otherwise they only cost processor time: before each request,
Flower's HTTP client looks at all pairs of its connections.
"""

NEAR = 0.003
"""A SuperLink is near if the fastest of three requests for its nodes takes at most these seconds."""

MOST_FETCHED = 2**26
"""Largest number of bytes of the replies that are fetched at the same time, if they have the largest
allowed size. One reply is always fetched.
"""

SMALLEST_PIECE = 2**18
"""Smallest size of a piece of an array, in bytes.

Flower's pieces have 5 MiB, unless the client's environment sets another size.
"""


class HttpInbox(Inbox):
    """Reader of replies from a SuperLink, which fetches no more bytes of a reply than allowed.

    Several replies are fetched at the same time, by a bounded number of threads.
    """

    # A SuperLink announces replies before they are fetched, so many can be looked for at once.
    at_once = 256

    def __init__(self, grid: HttpGrid) -> None:
        super().__init__(grid)
        self._http = grid
        self._incoming: dict[str, tuple[str, ObjectTree]] = {}
        """Message id and object tree of each announced reply, by the id of its request.

        Some objects of the reply may not have arrived yet.
        """

    def read(self, pending: Mapping[str, ReplyLimit]) -> Iterator[tuple[str, Message | str]]:
        """Yield the replies that have arrived, each as the id of its request and the message.

        For a reply that is too large or cannot be read, the reason is yielded in place of the
        message. See :meth:`Inbox.read` for the parameter.
        """
        self._find_replies([request for request in pending if request not in self._incoming])
        arrived = [request for request in pending if request in self._incoming]
        if not arrived:
            return
        allowed = max(pending[request].bytes for request in arrived)
        most = MOST_FETCHES_NEAR if self._is_near else MOST_FETCHES_FAR
        at_once = min(most, len(arrived), max(1, MOST_FETCHED // allowed))
        with ThreadPoolExecutor(at_once, thread_name_prefix="fetch") as pool:
            remaining = iter(arrived)

            def start(request: str) -> tuple[str, Future[Message | str | None]]:
                message, tree = self._incoming[request]
                return request, pool.submit(self._fetch, message, tree, pending[request])

            # Start a fetch only when a reply is taken, so that no further replies fill the memory.
            running = deque(start(request) for request in islice(remaining, at_once))
            while running:
                request, fetch = running.popleft()
                answer = fetch.result()
                if answer is not None:  # otherwise the node has not sent all of the reply yet
                    del self._incoming[request]
                    yield request, answer
                del fetch, answer  # or the reply would stay in memory until the next arrives
                running.extend(start(following) for following in islice(remaining, 1))

    def _fetch(self, message: str, tree: ObjectTree, limit: ReplyLimit) -> Message | str | None:
        """Fetch a reply and confirm its receipt; return it, or the reason why it is unusable.

        See :meth:`_fetch_reply` for the parameters. The result is None if the node has not sent all
        objects of the reply yet.
        """
        answer: Message | str | None
        try:
            with wire.untrusted():
                answer = self._fetch_reply(message, tree, limit)
        except UpdateError as error:
            answer = str(error)
        if answer is not None:
            self._confirm_receipt(message)
        return answer

    @cached_property
    def _is_near(self) -> bool:
        """Whether requests to the SuperLink take little time; measured at the first fetch."""
        seconds: list[float] = []
        for _ in range(3):  # some may wait for the processor
            start = time.perf_counter()
            self._http.get_node_ids()
            seconds.append(time.perf_counter() - start)
        return min(seconds) <= NEAR

    @property
    def _superlink(self) -> RuntimeHttpClient:
        """Flower's HTTP client for requests to the SuperLink."""
        return self._http._runtime_client  # pyright: ignore[reportPrivateUsage]  (Flower has no public access)

    def _find_replies(self, requests: list[str]) -> None:
        """Record the first reply to each request; discard all other messages."""
        if not requests:
            return
        awaited = set(requests)
        there = self._superlink.PullMessages(PullAppMessagesRequest(message_ids=requests))
        for message, tree in zip(there.messages_list, there.message_object_trees, strict=True):
            request = message.metadata.reply_to_message_id
            if request in awaited and request not in self._incoming:
                self._incoming[request] = message.metadata.message_id, tree
            else:
                self._confirm_receipt(message.metadata.message_id)
        for request in list(self._incoming)[:-MOST_INCOMING]:
            del self._incoming[request]

    def _fetch_reply(self, message: str, tree: ObjectTree, limit: ReplyLimit) -> Message | None:
        """Fetch a reply from the SuperLink and assemble its message.

        Parameters
        ----------
        message
            Id of the reply's message.
        tree
            Ids of the objects that the message consists of.
        limit
            Limits on the size of the reply.

        Returns
        -------
        Message or None
            The reply; None if the node has not sent all objects of the reply yet.

        Raises
        ------
        UpdateError
            If the reply is too large, cannot be fetched, or is not a message.
        """
        allowed = limit.bytes
        most = limit.objects + limit.vectors // SMALLEST_PIECE
        names = [each.object_id for each in islice(iterate_object_tree(tree), most + 1)]
        if len(names) > most:
            raise UpdateError(
                f"the reply should consist of at most {most} objects, got more; {limit.hint}"
            )
        contents: dict[str, bytes] = {}
        taken = 0
        # Fetch the message itself first. A node sends it last, so if it has not arrived, fetching
        # the other objects would be in vain.
        for name in dict.fromkeys(reversed(names)):
            content = self._fetch_object(name)
            if content is None:
                return None
            contents[name] = content
            taken += len(content)
            if taken > allowed:
                raise UpdateError(
                    f"the reply takes more than {allowed} bytes, the limit for a reply to this "
                    f"request, so the server ignores it; {limit.hint}"
                )
        if (unpacked := _unpacked(contents, limit)) > allowed:
            raise UpdateError(
                f"the reply takes {unpacked} bytes once it is unpacked, expected at most {allowed}; "
                f"{limit.hint}"
            )
        answer = inflate_object_from_contents(message, contents)
        if not isinstance(answer, Message):
            raise UpdateError(
                f"the client's reply is a Flower object of type {type(answer).__name__}, expected a "
                "Message, so the server ignores it"
            )
        return answer

    def _fetch_object(self, name: str) -> bytes | None:
        """Fetch an object of a reply by its id; return None if the node has not sent it yet."""
        run = self._http.run.run_id
        node = self._http.node
        try:
            found = self._superlink.PullObject(
                PullObjectRequest(node=node, run_id=run, object_id=name)
            )
        except httpx.HTTPStatusError as error:
            raise UpdateError(
                f"a part of the client's reply cannot be fetched from the SuperLink: {error}; see "
                "the log of the SuperLink for the cause"
            ) from error
        if not found.object_found:
            raise UpdateError(
                "the SuperLink has announced a part of the client's reply that it does not have, so "
                "the server ignores the reply; see the log of the SuperLink for the cause"
            )
        return found.object_content if found.object_available else None

    def _confirm_receipt(self, message: str) -> None:
        """Confirm the receipt of a message to the SuperLink, which then deletes the message."""
        request = ConfirmMessageReceivedRequest(
            node=self._http.node, run_id=self._http.run.run_id, message_object_id=message
        )
        self._superlink.ConfirmMessageReceived(request)


def _unpacked(contents: Mapping[str, bytes], limit: ReplyLimit) -> int:
    """Return the number of bytes that a message takes once its objects are assembled.

    The number can exceed the total size of the objects, since an array may contain the same object
    several times.

    Parameters
    ----------
    contents
        Bytes of each object of the message, by id.
    limit
        Limits on the size of the message.

    Raises
    ------
    UpdateError
        If the message without its vectors is too large.
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
    if values > limit.values:
        raise UpdateError(
            f"the reply takes {values} bytes without its vectors, expected at most "
            f"{limit.values}; {limit.hint}"
        )
    return values + vectors


# Seconds between two polls; the pause doubles while no reply arrives.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
LOG_EVERY = 30.0  # seconds between two log lines with the number of replies
# Reason for leaving a client out if the grid did not accept its message.
UNREACHED = "could not be sent a message"
# Reason for a SuperNode's error: it had no heartbeat of the ClientApp's process for a minute, so the
# token with which the process takes up its task has expired.
STOPPED = (
    "the ClientApp stopped responding before it replied: on an overloaded machine, importing the "
    "app can take so long that Flower's token for the task expires; start fewer clients at once on "
    "the machine, and see the log of the SuperNode for other causes"
)

T = TypeVar("T")


def describe_error(reply: Message) -> str:
    """Return the reason for leaving a client out whose reply is an error message of Flower."""
    code = reply.error.code
    if code == ErrorCode.NODE_UNAVAILABLE:
        return DROPPED_OUT
    if code == ErrorCode.CLIENT_APP_CRASHED:
        return STOPPED
    return f"error {code}: {clean(reply.error.reason or '')}"


_log = logging.getLogger(__name__)


class Exchange:
    """Sender of requests to nodes over a Flower grid, and receiver of the nodes' replies.

    Parameters
    ----------
    grid
        Grid of Flower.
    meter
        Counter of the bytes of all vectors in messages.
    deadline
        Number of seconds after a request during which replies are accepted.
    clock
        Function that returns the time in seconds.
    sleep
        Function that pauses for a number of seconds. Tests replace ``clock`` and ``sleep``, so that
        they need not wait. Other classes that wait for nodes use both functions of the exchange.
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
        """Send requests to nodes; yield each node with its verified reply, in order of arrival.

        For a node without a usable reply before the deadline, the reason is yielded in place of the
        reply. If the ClientApp of a node stopped before it replied, the request is sent to the node
        once more.

        Parameters
        ----------
        contents
            Content of the request, by node.
        kind
            Type of the Flower messages.
        group
            Group of the Flower messages, for Flower's logs.
        largest
            Largest number of bytes of the vectors of a reply.
        """
        pending, lost = self.send(contents, kind, group, self._deadline, largest)
        yield from ((node, UNREACHED) for node in lost)
        end = self.clock() + self._deadline
        repeated: set[int] = set()
        pause = FIRST_PAUSE
        logged = self.clock()
        while pending:
            before = len(pending)
            stopped: list[int] = []
            for node, reply in self.poll(pending):
                if reply == STOPPED and node not in repeated and self.clock() < end:
                    stopped.append(node)
                else:
                    yield node, reply
                del reply  # or the reply would stay in memory until the next arrives
            if stopped:
                _log.warning(
                    "the ClientApps of %d nodes stopped; repeating the request", len(stopped)
                )
                again = {node: contents[node] for node in stopped}
                sent, lost = self.send(again, kind, group, end - self.clock(), largest)
                pending |= sent
                repeated.update(stopped)
                yield from ((node, STOPPED) for node in lost)
            if not pending or self.clock() >= end:
                break
            if self.clock() - logged >= LOG_EVERY:
                logged = self.clock()
                _log.info(
                    "%s: %d of %d nodes have replied",
                    kind,
                    len(contents) - len(pending),
                    len(contents),
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
        """Send requests to nodes without waiting for replies.

        Parameters
        ----------
        contents
            Content of the request, by node.
        kind
            Type of the Flower messages.
        group
            Group of the Flower messages, for Flower's logs.
        seconds
            Number of seconds within which nodes may reply.
        largest
            Largest number of bytes of the vectors of a reply.

        Returns
        -------
        tuple[dict[str, Request], list[int]]
            Sent requests by the id of their message, and nodes to which no request could be sent.
        """
        pending: dict[str, Request] = {}
        for nodes in sent_at_once(contents):
            messages: list[Message] = []
            nonces: list[str] = []
            for node in nodes:
                group_id, nonce = with_nonce(group)
                ttl = seconds + LONGEST_PAUSE
                messages.append(Message(contents[node], node, kind, ttl=ttl, group_id=group_id))
                nonces.append(nonce)
            sent = {each for each in self.grid.push_messages(messages) if each}
            for message, nonce in zip(messages, nonces, strict=True):
                if message.metadata.message_id in sent:  # the grid has set this id
                    pending[message.metadata.message_id] = Request.of(message, nonce, largest)
                    self._meter.bytes_down += vector_bytes(message.content)
        reached = {request.node for request in pending.values()}
        return pending, [node for node in contents if node not in reached]

    def poll(self, pending: dict[str, Request]) -> Iterator[tuple[int, Content | str]]:
        """Yield each node whose reply has arrived, with the reply or the reason why it is unusable.

        Requests with a reply are removed from ``pending``, which contains requests by message id.
        """
        for some in slices(list(pending), self._inbox.at_once):
            for message_id, reply in self._inbox.read(
                {each: ReplyLimit(pending[each].largest) for each in some}
            ):
                request = pending.pop(message_id, None)
                if request is not None:  # otherwise the message replies to no known request
                    yield (
                        request.node,
                        reply if isinstance(reply, str) else self._read(reply, request),
                    )
                del reply  # or the reply would stay in memory until the next arrives

    def _read(self, reply: Message, request: Request) -> Content | str:
        """Return the verified content of a reply to a request, or the reason why it is unusable."""
        if reply.has_error():  # an error message is from the SuperLink, not from the node
            return describe_error(reply)
        if reply.metadata.src_node_id != request.node:
            return f"the reply is from another node, {reply.metadata.src_node_id}"
        try:
            with untrusted():
                size = vector_bytes(reply.content)
                if size > request.largest:
                    raise UpdateError(
                        f"the reply has vectors of {size} bytes, expected at most "
                        f"{request.largest} for this request, so the server ignores the reply"
                    )
                self._meter.bytes_up += size
                return verified(reply.content, request)
        except UpdateError as error:
            return str(error)


def vector_bytes(content: RecordDict) -> int:
    """Return the number of bytes of all vectors in a reply."""
    # The view ``array_records`` is not used: it refers back to the record, so the reply would stay
    # in memory until cycles are collected.
    arrays = (record.values() for record in content.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for some in arrays for array in some)


def sent_at_once(contents: Mapping[int, RecordDict]) -> Iterator[list[int]]:
    """Yield the nodes of the messages that are sent in one call, for one call after the other.

    A call has at most :data:`MOST_SENT` messages, with at most :data:`MOST_SENT_BYTES` bytes of
    different vectors, or one message.

    Parameters
    ----------
    contents
        Content of the message, by node.
    """
    nodes: list[int] = []
    size_of: dict[int, int] = {}  # bytes of each different array in the call
    for node, content in contents.items():
        arrays = (each for each in content.values() if isinstance(each, ArrayRecord))
        sizes = {id(array): len(array.data) for record in arrays for array in record.values()}
        is_too_large = sum((size_of | sizes).values()) > MOST_SENT_BYTES
        if nodes and (is_too_large or len(nodes) == MOST_SENT):
            yield nodes
            nodes, size_of = [], {}
        nodes.append(node)
        size_of |= sizes
    if nodes:
        yield nodes


def slices(values: Sequence[T], at_once: int) -> Iterable[Sequence[T]]:
    """Return consecutive slices of a sequence, each of at most ``at_once`` values."""
    return (values[start : start + at_once] for start in range(0, len(values), at_once))
