"""Flower grid whose nodes run in this process, for tests and to try apps without a SuperLink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedclade.flower.flwr_internals import (
    SUPERLINK_NODE_ID,
    ErrorCode,
    Run,
    TaskIdentity,
    message_from_proto,
    message_to_proto,
)


@dataclass
class LocalNode:
    """Node of a :class:`LocalGrid`, which stands for one SuperNode and runs one client.

    Parameters
    ----------
    app
        Flower app of the client.
    config
        Node config, with the settings of the client.
    connected
        Whether the node is connected. A message to a disconnected node has an error as its reply.
    """

    app: ClientApp | Callable[[Message, Context], Message]
    config: Mapping[str, str | int | float | bool] = field(
        default_factory=dict[str, str | int | float | bool]
    )
    connected: bool = True


class LocalGrid(Grid):
    """Implementation of Flower's grid protocol without a network.

    Every message passes through Flower's own serialization. A node computes its reply when the
    reply is pulled, one node after the other, so that only one reply at a time takes memory.

    Parameters
    ----------
    nodes
        Nodes by their id.
    run_config
        Run config, which every node receives in its context.
    """

    def __init__(
        self,
        nodes: Mapping[int, LocalNode],
        run_config: Mapping[str, str | int | float | bool] | None = None,
    ):
        self.nodes = dict(nodes)
        self._run_config = dict(run_config or {})
        self._run = Run.create_empty(1)
        # Flower writes the sender of a message from the identity of the process.
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = self._run.run_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self._waiting: dict[str, Message] = {}
        self._states: dict[int, RecordDict] = {}

    def set_run(self, run: Run) -> None:
        """Set the Flower run to which the messages of the grid belong."""
        self._run = run

    @property
    def run(self) -> Run:
        """Flower run to which the messages of the grid belong."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node; Flower's protocol has this method for older apps."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return [node for node, each in self.nodes.items() if each.connected]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to nodes, and return the ids of the messages."""
        ids: list[str] = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())  # as Flower's own grids do
            ids.append(message.metadata.message_id)
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages; each node computes its reply during this call."""
        return [
            self._answer(self._waiting.pop(each))
            for each in list(message_ids)
            if each in self._waiting
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages to nodes, and return all replies."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        """Run the app of a message's node, and return the reply, or an error message."""
        node = message.metadata.dst_node_id
        there = self.nodes.get(node)
        if there is None or not there.connected:
            return Message(
                Error(ErrorCode.NODE_UNAVAILABLE, "the node is not connected"), reply_to=message
            )
        state = self._states.setdefault(node, RecordDict())
        context = Context(self._run.run_id, node, dict(there.config), state, dict(self._run_config))
        try:
            return _sent(there.app(_sent(message), context))
        except Exception as error:
            # As in a SuperNode, any error of an app becomes an error message.
            return Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}"),
                reply_to=message,
            )


def _sent(message: Message) -> Message:
    """Serialize and deserialize a message, as if it were sent over a network."""
    return message_from_proto(message_to_proto(message))
