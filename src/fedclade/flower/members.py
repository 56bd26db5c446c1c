"""Which client is behind which node: who has joined, who is connected now, and who was refused."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flwr.app import MessageType

from fedclade.errors import ModelError, RunError, UpdateError
from fedclade.files import appear
from fedclade.flower import wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.wire import Content
from fedclade.roster import Roster, Schema

Identity = Literal["node", "number"]

HELLO_SECONDS = 60.0
"""How long a node may take to introduce itself; it is asked again before the next round."""

LOOK_EVERY = 0.5
"""Seconds between two looks at who is connected, while not enough are."""

CLIENTS = "clients.json"
"""The file of a run folder that says which client is behind which node."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """A client, as it introduced itself.

    Parameters
    ----------
    node
        Flower's id of its node.
    name
        What people call it.
    size
        Training examples.
    true_cluster
        Where it says so, which only experiments do. For scoring only.
    """

    node: int
    name: str
    size: int
    true_cluster: int | None = None


@dataclass(frozen=True)
class Introduction:
    """What a node says of its client.

    Parameters
    ----------
    number
        Of the client; None lets the server number it.
    member
        The client.
    schema
        What its examples look like.
    description
        What its data is, for people.
    layout
        Digest of its model's structure.
    secret
        What it tells of the secret that clients share: enough to see who has the same, and no more. Empty for none.
    """

    number: int | None
    member: Member
    schema: Schema
    description: str
    layout: str
    secret: str

    @classmethod
    def read(cls, content: Content, node: int) -> Introduction:
        """Check and read an introduction.

        Raises
        ------
        UpdateError
            If it is malformed.
        """
        words = content.words
        number, truth, size = words.get("number", int), words.get("true_cluster", int), words.get("size", int)
        if size < 1:
            raise UpdateError(f"it has {size} training examples, expected at least 1")
        try:
            schema = _schema(words.json("schema"))
        except (TypeError, ValueError) as error:
            raise UpdateError(f"its schema is malformed: {error}") from error
        return cls(
            number=None if number < 0 else number,
            member=Member(node, words.get("name", str), size, None if truth < 0 else truth),
            schema=schema,
            description=words.get("description", str),
            layout=words.get("layout", str),
            secret=words.get("secret", str),
        )


@dataclass(frozen=True)
class Changes:
    """What changed since the last look: numbers of clients, and why nodes were refused."""

    joined: list[int] = field(default_factory=list[int])
    disconnected: list[int] = field(default_factory=list[int])
    reconnected: list[int] = field(default_factory=list[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])


class Members:
    """The clients of a run, and the nodes that they are behind.

    Parameters
    ----------
    exchange
        Asks the nodes.
    identity
        What tells that a client has come back: its ``node``, whose id Flower binds to the node's key, or the ``number``
        that it says it has, for nodes without keys, whose ids do not last.
    """

    def __init__(self, exchange: Exchange, identity: Identity = "node") -> None:
        self._exchange = exchange
        self._identity = identity
        self._members: dict[int, Member] = {}
        self._connected: set[int] = set()
        self._refused: dict[int, str] = {}
        self._expected: Introduction | None = None

    @property
    def roster(self) -> Roster:
        """All who ever joined; it grows."""
        return self._roster

    @property
    def secret(self) -> str:
        """What clients tell of the secret that they share; empty if they have none."""
        return "" if self._expected is None else self._expected.secret

    def check_layout(self, layout: str) -> None:
        """Check that the server's model is built like the clients'.

        Raises
        ------
        ModelError
            If it is not.
        """
        if self._expected is not None and layout != self._expected.layout:
            raise ModelError(
                "the server's model is not built like the clients': its tensors have other names, shapes or types; "
                "give server_app and client_app the same model"
            )

    def node(self, client: int) -> int | None:
        """Return the node of a client; None if it is not connected."""
        node = self._members[client].node
        return node if node in self._connected else None

    @property
    def connected(self) -> list[int]:
        """The clients that are connected."""
        return [client for client, member in self._members.items() if member.node in self._connected]

    def wait(self, count: int, seconds: float) -> None:
        """Wait until so many clients are connected.

        Raises
        ------
        UpdateError
            If that takes too long; says how many there are, and who was refused.
        """
        end, told = time.monotonic() + seconds, -1
        while True:
            self.look()
            here = len(self.connected)
            if here >= count:
                return
            if here != told:
                _log.info("%d of %d clients are connected", here, count)
                told = here
            if time.monotonic() >= end:
                refused = "".join(f"; node {node} was refused: {why}" for node, why in self._refused.items())
                raise UpdateError(
                    f"{here} of {count} clients connected within {seconds:g} s; start more SuperNodes, or lower "
                    f"network.clients{refused}"
                )
            time.sleep(LOOK_EVERY)

    def look(self) -> Changes:
        """See who is connected, and let new nodes introduce themselves."""
        nodes = set(self._exchange.grid.get_node_ids())
        known = {member.node: client for client, member in self._members.items()}
        gone = [known[node] for node in sorted(self._connected - nodes) if node in known]
        back = [known[node] for node in sorted(nodes - self._connected) if node in known]
        self._refused = {node: why for node, why in self._refused.items() if node in nodes}
        self._connected = {node for node in nodes if node in known}
        new = sorted(nodes - set(known) - set(self._refused))
        changes = Changes(disconnected=gone, reconnected=back)
        question = wire.record({"what": "hello"})
        introduced: list[Introduction] = []
        for node, answer in self._exchange.ask(dict.fromkeys(new, question), MessageType.QUERY, "hello", HELLO_SECONDS):
            try:
                if isinstance(answer, str):
                    raise UpdateError(answer)
                introduced.append(Introduction.read(answer, node))
            except UpdateError as error:  # it is asked again the next time
                _log.warning("node %d did not introduce itself: %s", node, error)
        # In the order of their numbers: results should not depend on who was first.
        for each in sorted(introduced, key=lambda one: (one.number is None, one.number, one.member.node)):
            self._take(each, changes)
        return changes

    def save(self, folder: Path) -> None:
        """Write down which client is behind which node.

        Raises
        ------
        RunError
            If it cannot be written.
        """
        assert self._expected is not None  # nobody saves before the first has joined
        kept = {
            "clients": {str(client): asdict(member) for client, member in self._members.items()},
            **{"schema": asdict(self._expected.schema), "description": self._roster.description},
            **{"layout": self._expected.layout, "secret": self._expected.secret},
        }
        text = json.dumps(kept, indent=2)
        try:
            if not (folder / CLIENTS).exists() or (folder / CLIENTS).read_text() != text:
                appear(folder / CLIENTS, lambda beside: beside.write_text(text))
        except OSError as error:
            raise RunError(f"cannot write {folder / CLIENTS}: {error}") from error

    def load(self, folder: Path) -> None:
        """Go on with the clients of an earlier run of this server, if there was one.

        Raises
        ------
        RunError
            If the file is damaged.
        """
        path = folder / CLIENTS
        try:
            kept = json.loads(path.read_text())
            members = {int(client): Member(**member) for client, member in kept["clients"].items()}
            schema = _schema(kept["schema"])
            first = Introduction(0, next(iter(members.values())), schema, *(kept[k] for k in _OF_ALL))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise RunError(f"{path} cannot be read: {error}; restore it, or name another run folder") from error
        self._begin(first)
        for client, member in members.items():
            self._enter(client, member)

    def _take(self, one: Introduction, changes: Changes) -> None:
        """Take a client in, or refuse its node."""
        if self._expected is None:
            self._begin(one)
        client = one.number if one.number is not None else max(self._members, default=-1) + 1
        returning = client in self._members
        if why := self._objection(one, client):
            self._refused[one.member.node] = changes.refused[one.member.node] = why
            _log.warning("node %d is refused: %s", one.member.node, why)
            return
        self._enter(client, one.member)
        self._connected.add(one.member.node)
        (changes.reconnected if returning else changes.joined).append(client)

    def _objection(self, one: Introduction, client: int) -> str | None:
        """Say why a node cannot be taken; None if it can."""
        expected = self._expected
        assert expected is not None  # at least this one's own
        if one.layout != expected.layout:
            return "its model is not built like the others'"
        if _shape(one.schema) != _shape(expected.schema):
            return (
                f"its examples look like {_shape(one.schema)}, and those of the others like {_shape(expected.schema)}"
            )
        if one.secret != expected.secret:
            return "it does not share the secret of the others; give all clients the same file, or none"
        if client in self._members and (why := self._is_another(one, client)):
            return why
        return None

    def _is_another(self, one: Introduction, client: int) -> str | None:
        before = self._members[client].node
        if before in self._connected:
            return f"it says it is client {client}, which node {before} is, and that is connected"
        if self._identity == "node":
            return (
                f"it says it is client {client}, which was node {before}; start it with the key of that node, or, "
                "where nodes have no keys, set network.identity = 'number'"
            )
        return None

    def _begin(self, first: Introduction) -> None:
        self._expected = first
        self._roster = Roster(first.schema, first.description)

    def _enter(self, client: int, member: Member) -> None:
        self._members[client] = member
        self._members = dict(sorted(self._members.items()))
        roster, truth = self._roster, {c: m.true_cluster for c, m in self._members.items()}
        roster.names = {c: m.name for c, m in self._members.items()}
        roster.sizes = {c: m.size for c, m in self._members.items()}
        told = {c: cluster for c, cluster in truth.items() if cluster is not None}
        roster.true_clusters = told if len(told) == len(truth) else None


_OF_ALL = ("description", "layout", "secret")


def _schema(kept: dict[str, Any]) -> Schema:
    """Return a schema as JSON has it: tuples are lists there."""
    schema = Schema(**kept)
    mean, std = schema.scaled or (None, None)
    scaled = None if mean is None or std is None else (float(mean), float(std))
    return replace(schema, input_shape=tuple(int(length) for length in schema.input_shape), scaled=scaled)


def _shape(schema: Schema) -> tuple[object, ...]:
    return (schema.input_shape, schema.outputs, schema.task, schema.vocabulary_size)
