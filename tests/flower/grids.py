"""A small federation over a grid in this process, as tests need it: its nodes, and what answers wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedclade import LocalTraining
from fedclade.algorithms import CFL
from fedclade.core.errors import UpdateError
from fedclade.data.federation import Federation
from fedclade.flower import LocalGrid, LocalNode, Network, client_app, federate, wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.signing import Key, key_of, signed, with_nonce
from fedclade.flower.wire import Content
from fedclade.runs.store import Run
from tests.tiny import federation_of, perceptron

FIRST_NODE = 100
"""Node ids begin here, so that they are no client's number."""

FOUR = (0, 1, 0, 1)
"""Four clients in two true clusters."""

CFL_OF_TWO = CFL(split_rounds=(2,), eps2=1e-6)
"""Splits them in round 2."""

ALL_ALLOWED = {"allow": "train evaluate gradients subspaces shifts descriptors", "min-part": 8}
"""The node config of clients that answer every kind of question, and take steps of one batch of ``LOCAL``."""

LOCAL = LocalTraining(batch_size=8, lr=0.5)


def node_of(client: int) -> int:
    return FIRST_NODE + client


def app_of(federation: Federation, model: Any = perceptron, **settings: Any) -> ClientApp:
    """Return the app of all nodes, each of which holds the data of its ``partition-id``."""
    return client_app(
        model,
        lambda context: federation.alone(int(context.node_config["partition-id"])),
        **settings,
    )


def grid_of(
    federation: Federation,
    model: Any = perceptron,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> LocalGrid:
    """Return a grid with a node for each client; ``config`` is added to every node's."""
    app = app_of(federation, model, **settings)
    return LocalGrid(
        {node_of(c): LocalNode(app, {"partition-id": c, **(config or {})}) for c in federation.ids}
    )


def housed(grid: LocalGrid, folder: Path) -> LocalGrid:
    """Give every client of a grid a folder of its own, in which its key outlives it."""
    for node, each in grid.nodes.items():
        each.config = {**each.config, "folder": str(folder / str(node))}
    return grid


def federated(grid: LocalGrid, algorithm: Any, model: Any = perceptron, **settings: Any) -> Run:
    """Run over a grid, whose nodes all have to be there at the start unless ``network`` says otherwise."""
    network = settings.pop("network", None) or network_of(grid)
    settings = {"local": LOCAL, "rounds": 4, **settings}
    return federate(grid, algorithm, model, network=network, **settings)


def network_of(grid: LocalGrid, **settings: Any) -> Network:
    if settings.get("secure_aggregation"):
        settings = {"secure_norm": 8.0, **settings}
    return Network(
        **{"clients": len(list(grid.get_node_ids())), "wait": 0.5, "deadline": 0.5, **settings}
    )


@dataclass
class Spoilt:
    """The app of a node whose answers are spoilt before they leave.

    ``spoil`` gets the question and the honest answer, and returns another, or None for the honest one. It is signed
    again: these are the lies of a client with a key, not of one that would like to be another.
    """

    app: Callable[[Message, Context], Message]
    spoil: Callable[[Content, RecordDict], RecordDict | None]

    def __call__(self, message: Message, context: Context) -> Message:
        honest = self.app(message, context)
        spoilt = self.spoil(Content.of(message.content), honest.content)
        return honest if spoilt is None else answered(message, spoilt, key_of(context))


KEY = Key.new()


def answered(message: Message, content: RecordDict, key: Key = KEY) -> Message:
    """Return an answer, signed if it is one that can be: clients that lie sign their lies."""
    with suppress(UpdateError):
        content = signed(content, message, key)
    return Message(content, reply_to=message)


def hello_to(node: int) -> Message:
    """Return the question by which a node is asked to introduce itself."""
    return request_to(node, wire.record({"what": "hello"}), "query")


def request_to(node: int, content: RecordDict, kind: str = "train") -> Message:
    """Return a request to a node, with a nonce."""
    return Message(content, node, kind, ttl=60, group_id=with_nonce("test")[0])


def only(
    what: str, change: Callable[[RecordDict], RecordDict | None]
) -> Callable[[Content, RecordDict], Any]:
    """Return a ``spoil`` that changes the answers to one kind of question alone."""

    def spoil(question: Content, honest: RecordDict) -> RecordDict | None:
        return change(honest) if question.values["what"] == what else None

    return spoil


def words_of(record: RecordDict) -> dict[str, Any]:
    """Return the plain values of a message."""
    return dict(Content.of(record).values)


def with_words(record: RecordDict, words: Mapping[str, Any]) -> RecordDict:
    """Return a message with other plain values, and with the same further records."""
    return RecordDict({**record, "fedclade": wire.record(words)["fedclade"]})


def worded(**values: Any) -> Callable[[RecordDict], RecordDict]:
    """Return a change of an answer's plain values; None takes one away."""

    def change(honest: RecordDict) -> RecordDict:
        words = {**words_of(honest), **values}
        return with_words(
            honest, {name: value for name, value in words.items() if value is not None}
        )

    return change


def spoil(
    grid: LocalGrid, client: int, what: str, change: Callable[[RecordDict], RecordDict | None]
) -> None:
    """Let a client answer one kind of question wrongly."""
    node = grid.nodes[node_of(client)]
    node.app = Spoilt(node.app, only(what, change))


def reasons(run: Run, *, of_training: bool = False) -> dict[int, str]:
    """Return why clients were left out of a run: the first reason of each; or, of its training alone."""
    found: dict[int, str] = {}
    for event in run.events:
        if event["kind"] == "left_out" and not (
            of_training and event["query"].startswith("evaluate")
        ):
            for client, why in event["clients"].items():
                found.setdefault(int(client), why)
    return found


def handler_of(
    client: int = 0, federation: Federation | None = None, **settings: Any
) -> ClientHandler:
    """Return one client, to be asked without a grid."""
    return ClientHandler(
        (federation or federation_of(FOUR)).alone(client), perceptron, number=client, **settings
    )


@dataclass
class Clock:
    """A clock that moves when somebody sleeps."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
