"""Answers from a SuperLink, of which no more is fetched, and no more unpacked, than their limit.

Flower's own ``HttpGrid.pull_messages`` unpacks whatever comes: a malformed answer ends the call, and with it all that
it has fetched, which the SuperLink has forgotten by then; one whose chunks are repeated grows without bound; and one
that is announced and never sent holds up all others. So the objects that a message is made of are fetched here,
checked, and only then put together by Flower. Like :mod:`fedclade.flower.local_grid` this uses Flower's internals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice

import httpx
from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from fedclade.core import UpdateError
from fedclade.flower import wire
from fedclade.flower.inbox import Inbox

MOST_OBJECTS = 64  # of a message, besides the pieces of its vectors: itself, its records, its arrays
MOST_INCOMING = 4096  # answers that are on their way; of more, the oldest are forgotten, which may be awaited no longer

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
            raise UpdateError(f"the answer takes {unpacked} bytes once it is unpacked, more than {allowed}")
        answer = inflate_object_from_contents(message, contents)
        if not isinstance(answer, Message):
            raise UpdateError(f"the answer is a {type(answer).__name__}, expected a message")
        return answer

    def _object(self, name: str) -> bytes | None:
        run, node = self._http.run.run_id, self._http.node
        try:
            found = self._superlink.PullObject(PullObjectRequest(node=node, run_id=run, object_id=name))
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
        raise UpdateError(f"the answer says {values} bytes besides its vectors, more than {wire.LARGEST_VALUES}")
    return values + vectors
