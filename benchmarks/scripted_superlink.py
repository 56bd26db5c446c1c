"""A SuperLink over HTTP for measurements of a server, whose nodes reply without training.

The SuperLink and the apps of all nodes run in a process of their own. The measured process so has
the work of a real server only: it sends and fetches the objects of each message over HTTP, as
Flower's ``HttpGrid`` does with a real SuperLink.
"""

from __future__ import annotations

import multiprocessing
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesRequest,
    GetNodesResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from fedclade.flower import LocalGrid

App = Callable[[Message, Context], Message]

FIRST_NODE = 1


class ScriptedSuperLink:
    """Objects and messages of a SuperLink, and the app of its nodes.

    Parameters
    ----------
    app
        App of all nodes. The node config of node ``FIRST_NODE + k`` has the ``partition-id`` k.
    nodes
        Number of nodes.
    """

    def __init__(self, app: App, nodes: int) -> None:
        self._app = app
        self._run = Run.create_empty(1)
        LocalGrid({}).set_run(self._run)  # sets the sender of messages
        self._contexts = {
            FIRST_NODE + k: Context(
                self._run.run_id, FIRST_NODE + k, {"partition-id": k}, RecordDict(), {}
            )
            for k in range(nodes)
        }
        self._objects: dict[str, bytes] = {}
        self._uses: Counter[str] = Counter()  # number of replies that contain an object, by its id
        self._unanswered: dict[str, ObjectTree] = {}
        self._names_of_reply: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self.endpoints: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "/v1/runtime/get-nodes": (GetNodesRequest, self._nodes),
            "/v1/runtime/push-messages": (PushAppMessagesRequest, self._push_messages),
            "/v1/runtime/push-object": (PushObjectRequest, self._push_object),
            "/v1/runtime/pull-messages": (PullAppMessagesRequest, self._pull_messages),
            "/v1/runtime/pull-object": (PullObjectRequest, self._pull_object),
            "/v1/runtime/confirm-message-received": (ConfirmMessageReceivedRequest, self._confirm),
        }
        """Type of the request and method that replies, by path."""

    def _nodes(self, _: GetNodesRequest) -> GetNodesResponse:
        return GetNodesResponse(nodes=[NodeInfo(node_id=node) for node in self._contexts])

    def _push_messages(self, request: PushAppMessagesRequest) -> PushAppMessagesResponse:
        """Store messages, and name the objects that are not stored yet."""
        wanted = {name for tree in request.message_object_trees for name in names_of(tree)}
        for tree in request.message_object_trees:
            self._unanswered[tree.object_id] = tree
        return PushAppMessagesResponse(
            message_ids=[tree.object_id for tree in request.message_object_trees],
            objects_to_push=wanted - self._objects.keys(),
        )

    def _push_object(self, request: PushObjectRequest) -> PushObjectResponse:
        self._objects[request.object_id] = request.object_content
        self._uses[request.object_id] += 1
        return PushObjectResponse(stored=True)

    def _pull_messages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        """Let the nodes reply to messages, and announce their replies."""
        replies: list[Message] = []
        with self._lock:
            for name in request.message_ids:
                tree = self._unanswered.pop(name, None)
                if tree is not None:
                    replies.append(self._answer(tree))
        return PullAppMessagesResponse(
            messages_list=[
                message_to_proto(remove_content_from_message(reply)) for reply in replies
            ],
            message_object_trees=[get_object_tree(reply) for reply in replies],
        )

    def _answer(self, tree: ObjectTree) -> Message:
        """Return the reply of a node to a message, and store its objects."""
        message = inflate_object_from_contents(
            tree.object_id, self._objects, keep_object_contents=True
        )
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = tree.object_id
        try:
            reply = self._app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # as in a SuperNode, any error of an app becomes a reply
            what = f"{type(error).__name__}: {error}"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, what), reply_to=message)
        objects = get_all_nested_objects(reply)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        for name, each in objects.items():
            if name not in self._objects:
                self._objects[name] = each.deflate()
        self._uses.update(list(objects))
        self._names_of_reply[reply.object_id] = list(objects)
        return reply

    def _pull_object(self, request: PullObjectRequest) -> PullObjectResponse:
        return PullObjectResponse(
            object_found=True,
            object_available=True,
            object_content=self._objects[request.object_id],
        )

    def _confirm(self, request: ConfirmMessageReceivedRequest) -> ConfirmMessageReceivedResponse:
        """Remove the objects of a reply that the server has fetched, unless others need them."""
        for name in self._names_of_reply.pop(request.message_object_id, ()):
            self._uses[name] -= 1
            if self._uses[name] == 0:
                del self._objects[name]
        return ConfirmMessageReceivedResponse()


def names_of(tree: ObjectTree) -> Iterator[str]:
    """Yield the ids of all objects of a message."""
    return (each.object_id for each in iterate_object_tree(tree))


def server_of(superlink: ScriptedSuperLink) -> ThreadingHTTPServer:
    """Return an HTTP server for a SuperLink, which does not serve yet, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # a connection serves many requests
        wbufsize = -1  # headers and body are sent together
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            kind, reply_to = superlink.endpoints[self.path]
            request = kind.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, body = 200, reply_to(request).SerializeToString()
            except Exception:  # the server then fails, and does not wait for a reply
                traceback.print_exc()
                status, body = 500, b""
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Write no line for each request."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def grid_at(port: int) -> HttpGrid:
    """Return Flower's grid for a SuperLink on this machine."""
    grid = HttpGrid(f"127.0.0.1:{port}", insecure=True, token="none")
    LocalGrid({})  # sets the sender of messages
    grid.set_run(Run.create_empty(1))
    return grid


def serve(make_app: Callable[[int], App], nodes: int, pipe: Connection) -> None:
    """Serve a SuperLink, and send its port through ``pipe``."""
    with server_of(ScriptedSuperLink(make_app(nodes), nodes)) as server:
        pipe.send(server.server_address[1])
        server.serve_forever()


@contextmanager
def scripted_superlink(make_app: Callable[[int], App], nodes: int) -> Generator[HttpGrid]:
    """Return a context with Flower's grid for a scripted SuperLink in another process.

    ``make_app`` makes the app of all nodes from their number, and is pickled.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(make_app, nodes, there), daemon=True
    )
    process.start()
    try:
        grid = grid_at(here.recv())
        yield grid
        grid.close()
    finally:
        process.terminate()
        process.join()
