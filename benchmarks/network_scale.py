"""Measure what a server spends on many nodes: to register them, to send models, to fetch replies.

The nodes are in this process and do next to nothing. ``registration`` measures the processor time
until n nodes are registered over a LocalGrid; it includes the nodes' keys and signatures.
``sending`` and ``fetching`` use Flower's grid for a SuperLink, before a SuperLink in this process:
the processor time to send one of two models to each node, and the time to fetch an update of each
node if every request to the SuperLink takes ``--latency`` milliseconds.

    python benchmarks/network_scale.py registration --nodes 500 1000 2000 4000 10000
    python benchmarks/network_scale.py sending --nodes 100 1000 --entries 1000000
    python benchmarks/network_scale.py fetching --nodes 100 1000 --entries 1000 --latency 5
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import (
    GetNodesRequest,
    GetNodesResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid
from scripted_superlink import names_of

from fedclade.channel import Meter
from fedclade.core import DataSpec
from fedclade.flower import LocalGrid, LocalNode, wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.registration import schema_values
from fedclade.flower.signing import Key, key_of, signed

SECONDS = 600.0  # deadline of all requests
FIRST_NODE = 1


def measure_registration(nodes: int) -> float:
    """Return the processor time, in seconds, until n nodes are registered over a LocalGrid."""
    schema = json.dumps(schema_values(DataSpec("benchmark", (20,), outputs=10)))

    def register(message: Message, context: Context) -> Message:
        values = {
            "number": context.node_id - FIRST_NODE,
            "name": f"client {context.node_id}",
            "size": 100,
            "true_cluster": -1,
            "scores": True,
            "schema": schema,
            "description": "benchmark",
            "layout": "0" * 32,
            "secret": "",
            "task": "classification",
            "scaled": False,
            "encoding": "",
        }
        return Message(signed(wire.record(values), message, key_of(context)), reply_to=message)

    grid = LocalGrid({FIRST_NODE + n: LocalNode(register) for n in range(nodes)})
    registry = NodeRegistry(Exchange(grid, Meter(), SECONDS))
    start = time.process_time()
    registry.wait(nodes, SECONDS)
    seconds = time.process_time() - start
    assert len(registry.connected) == nodes
    return seconds


@dataclass
class SuperLink:
    """SuperLink in this process, in which every node replies with an update at once."""

    entries: int
    latency: float = 0.0
    """Seconds that each request takes."""
    requests: int = 0
    stored: set[str] = field(default_factory=set)
    replies: dict[str, Message] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    def GetNodes(self, _: GetNodesRequest) -> GetNodesResponse:  # noqa: N802
        """Return no nodes; a server measures how long this takes."""
        self._wait()
        return GetNodesResponse()

    def PushMessages(self, request: PushAppMessagesRequest) -> PushAppMessagesResponse:  # noqa: N802
        """Store messages, and name the objects that are not stored yet."""
        wanted = {name for tree in request.message_object_trees for name in names_of(tree)}
        missing = wanted - self.stored
        self.stored |= wanted
        ids = [tree.object_id for tree in request.message_object_trees]
        return PushAppMessagesResponse(message_ids=ids, objects_to_push=missing)

    def PushObject(self, _: PushObjectRequest) -> PushObjectResponse:  # noqa: N802
        """Store an object."""
        return PushObjectResponse(stored=True)

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        """Announce the replies to messages."""
        self._wait()
        found = [self.replies.pop(name) for name in request.message_ids if name in self.replies]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(reply) for reply in found],
            message_object_trees=[get_object_tree(reply) for reply in found],
        )

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        """Return an object of a reply."""
        self._wait()
        return PullObjectResponse(
            object_found=True,
            object_available=True,
            object_content=self.contents[request.object_id],
        )

    def ConfirmMessageReceived(self, _: Any) -> None:  # noqa: N802
        """Take note that a reply has arrived."""
        self._wait()

    def reply(self, message: Message, update: Any, key: Key) -> None:
        """Let the node of a message reply with an update."""
        content = signed(wire.record({"node": message.metadata.dst_node_id}, update), message, key)
        reply = Message(content, reply_to=message)
        objects = get_all_nested_objects(reply)
        self.contents |= {name: each.deflate() for name, each in objects.items()}
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.replies[message.metadata.message_id] = reply

    def _wait(self) -> None:
        self.requests += 1
        time.sleep(self.latency)


class Grid(HttpGrid):
    """Flower's grid for a SuperLink, before a SuperLink in this process."""

    def __init__(self, superlink: SuperLink) -> None:
        super().__init__(token="none")
        self._client = superlink  # type: ignore[assignment]
        self.set_run(Run.create_empty(1))
        LocalGrid({})  # sets the sender of messages


class ReplyingGrid(Grid):
    """Grid whose nodes have replied as soon as a message is sent."""

    def __init__(self, superlink: SuperLink) -> None:
        super().__init__(superlink)
        self._superlink = superlink
        self._update = {"update": wire.raw_vector(torch.rand(superlink.entries))}
        self._key = Key.new()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, to which the nodes reply at once."""
        messages = list(messages)
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self._superlink.reply(message, self._update, self._key)
        return [message.metadata.message_id for message in messages]


def measure_sending(nodes: int, entries: int) -> float:
    """Return the processor time, in seconds, to send one of two models to each of n nodes."""
    exchange = Exchange(Grid(SuperLink(entries)), Meter(), SECONDS)
    models = torch.rand(2, entries)
    start = time.process_time()
    arrays = wire.raw_vectors(models, [0, 1])
    records = [wire.record({"what": "train", "round": 1}, {"model": arrays[k]}) for k in (0, 1)]
    contents = {FIRST_NODE + n: records[n % 2] for n in range(nodes)}
    sent, lost = exchange.send(contents, "train", "1", SECONDS)
    seconds = time.process_time() - start
    assert len(sent) == nodes
    assert not lost
    return seconds


def measure_fetching(nodes: int, entries: int, latency: float) -> tuple[float, int]:
    """Return the seconds, and the requests, to fetch the updates of n nodes.

    ``latency`` is in seconds for each request.
    """
    superlink = SuperLink(entries, latency)
    exchange = Exchange(ReplyingGrid(superlink), Meter(), SECONDS)
    questions = {FIRST_NODE + n: wire.record({"what": "train"}) for n in range(nodes)}
    pending, _ = exchange.send(questions, "train", "1", SECONDS, largest=4 * entries)
    start = time.perf_counter()
    replies = dict(exchange.poll(pending))
    seconds = time.perf_counter() - start
    assert len(replies) == nodes
    assert not any(isinstance(reply, str) for reply in replies.values())
    return seconds, superlink.requests


def main() -> None:
    """Print one row of a table for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["registration", "sending", "fetching"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--entries", type=int, default=1000, help="numbers of a model")
    parser.add_argument("--latency", type=float, default=5.0, help="milliseconds of each request")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for nodes in arguments.nodes:
        if arguments.what == "registration":
            print(f"| {nodes:,} | {measure_registration(nodes):.2f} s |", flush=True)
        elif arguments.what == "sending":
            seconds = measure_sending(nodes, arguments.entries)
            print(f"| {nodes:,} | {arguments.entries:,} | {seconds:.2f} s |", flush=True)
        else:
            latency = arguments.latency / 1000
            seconds, requests = measure_fetching(nodes, arguments.entries, latency)
            print(f"| {nodes:,} | {requests:,} | {seconds:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
