"""Which client is behind which node: who has joined, who is connected now, and who was refused."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from flwr.app import MessageType

from fedclade.core import (
    ClientRegistry,
    ModelError,
    RunError,
    UpdateError,
    appear,
)
from fedclade.flower import wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.registration import Member, Registration, read_member, read_schema
from fedclade.flower.signing import KEY_FILE, Asked
from fedclade.flower.wire import Content, distrusting

Identity = Literal["node", "number"]

HELLO_SECONDS = 600.0
"""How long a node may take to introduce itself. Nobody waits for it: it takes part from the round after."""

ASKED_AGAIN = 30.0
"""Seconds after which a node that was refused is asked again: what kept it out may be mended, or be over."""

LOOK_EVERY = 0.5
"""Seconds between two looks at who is connected, while not enough are."""

LOOK_MEANWHILE = 3.0
"""Seconds between two looks at who is connected, while answers are awaited."""

GATHERING = 30
"""One part in so many of the time to wait for anybody is given to the others, once the first is back."""

CLIENTS = "clients.json"
"""The file of a run folder that says which client is behind which node."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class News:
    """What is new since the last news: numbers of clients, and why nodes were refused. Who has joined is in the roster.

    Parameters
    ----------
    disconnected, reconnected
        Clients that were known before.
    refused
        Why, by node.
    """

    disconnected: list[int] = field(default_factory=list[int])
    reconnected: list[int] = field(default_factory=list[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True)
class _Refusal:
    why: str
    at: float
    """On the exchange's clock."""


class NodeRegistry:
    """The clients of a run, and the nodes that they are behind.

    What clients of a run have in common (the model's structure, what examples look like, the secret) is what most of
    the first have, so that one which is set up wrongly shuts out nobody but itself.

    Parameters
    ----------
    exchange
        Asks the nodes.
    identity
        What tells that a client has come back: its ``node``, whose id Flower binds to the node's key, or the ``number``
        that it says it has, for nodes without keys, whose ids do not last. A client that keeps a key of its own in its
        folder is recognised by that alone.
    keys
        The number of each client by its public key, where an operator lists them: nobody else is let in.
    """

    def __init__(self, exchange: Exchange, identity: Identity = "node", keys: Mapping[str, int] | None = None) -> None:
        self._exchange = exchange
        self._identity = identity
        self._keys = keys
        self._members: dict[int, Member] = {}
        self._truth: dict[int, int] = {}
        self._connected: set[int] = set()
        self._asked: dict[str, Asked] = {}
        """Which nodes have not answered yet, by the message that asks them to introduce themselves."""
        self._doubted: set[int] = set()
        """Nodes of clients that signed with another key, or may have to: they must introduce themselves anew."""
        self._introduced: list[Registration] = []
        """Who waits for enough others, so that it is known what most have in common."""
        self._refused: dict[int, _Refusal] = {}
        self._untold: dict[int, str] = {}
        """Why nodes were refused since the last news."""
        self._told, self._known = set[int](), set[int]()
        """Who was connected at the last news, and who had ever been."""
        self._expected: Registration | None = None
        self._looked = exchange.clock()
        exchange.meanwhile = self._glance

    @property
    def known(self) -> bool:
        """Whether it is settled what the clients of the run have in common."""
        return self._expected is not None

    @property
    def roster(self) -> ClientRegistry:
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
                "the server's model is not built like the clients': its tensors have other names, shapes or types, or "
                "its frozen parameters, which are not sent, have other values; give server_app and client_app the same "
                "model, with frozen parameters from a file or a seed of their own"
            )

    def node(self, client: int) -> int | None:
        """Return the node of a client; None if it is not connected."""
        node = self._members[client].node
        return node if node in self._connected else None

    def checked(self, client: int, answer: Content) -> Content:
        """Check that an answer is signed by the key that a client introduced itself with.

        Raises
        ------
        UpdateError
            If it is not; the node must introduce itself anew.
        """
        member = self._members[client]
        if answer.signer is None or answer.signer.key != member.key:
            self._doubted.add(member.node)
            self._connected.discard(member.node)
            raise UpdateError("signed by another key than that of the client's introduction")
        return answer

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
        end, told, late = self._exchange.clock() + seconds, -1, False
        while True:
            self.look(1 if late else count)
            here = len(self.connected)
            if here >= count:
                return
            if late:
                refused = "".join(f"; node {node} was refused: {no.why}" for node, no in self._refused.items())
                raise UpdateError(
                    f"{here} of {count} clients connected within {seconds:g} s; start more SuperNodes, or lower "
                    f"network.clients{refused}"
                )
            if (coming := here + len(self._introduced)) != told:
                _log.info("%d of %d clients are connected", coming, count)
                told = coming
            self._exchange.sleep(LOOK_EVERY)
            late = self._exchange.clock() >= end

    def look(self, enough: int = 1) -> None:
        """See who is connected, ask new nodes to introduce themselves, and take in who has; wait for nobody.

        Parameters
        ----------
        enough
            The first are taken in once so many have introduced themselves.
        """
        self.refresh()
        if self._introduced and (self.known or len(self._introduced) >= enough):
            self._take_in(self._introduced)

    def reach(self, seconds: float) -> bool:
        """See who is connected in the middle of a round; if nobody is, wait for those who come back.

        Returns
        -------
        bool
            Whether anybody is connected now.
        """
        self.refresh()
        if self.connected:
            return True
        end = self._exchange.clock() + seconds
        _log.info("nobody is connected; waiting for up to %g s", seconds)
        while not self.connected and self._exchange.clock() < end:
            self._exchange.sleep(LOOK_EVERY)
            self.refresh()
        end = min(end, self._exchange.clock() + seconds / GATHERING)
        while len(self.connected) < len(self._members) and self._exchange.clock() < end:
            self._exchange.sleep(LOOK_EVERY)
            self.refresh()
        return bool(self.connected)

    def _glance(self) -> None:
        if self._exchange.clock() - self._looked >= LOOK_MEANWHILE:
            self.refresh()

    def refresh(self) -> None:
        """See who is connected, and who has come back; newcomers wait until :meth:`look` takes them in.

        It can be called in the middle of a round: which clients there are stays the same.
        """
        self._looked = self._exchange.clock()
        nodes = set(self._exchange.grid.get_node_ids())
        self._connected = (nodes & {member.node for member in self._members.values()}) - self._doubted
        self._refused = {node: refusal for node, refusal in self._refused.items() if node in nodes}
        self._introduced = [one for one in self._introduced if one.member.node in nodes]
        self._ask(nodes)
        for node, answer in self._exchange.poll(self._asked):
            try:
                if isinstance(answer, str):
                    raise UpdateError(answer)
                with distrusting():
                    self._introduced.append(Registration.read(answer, node))
            except UpdateError as error:
                self._refuse(node, f"it did not introduce itself: {error}")
        self._take_in([one for one in self._introduced if one.number in self._members])

    def news(self) -> News:
        """Return what is new since the last news."""
        here = set(self.connected)
        back = (here - self._told) & self._known
        news = News(sorted(self._told - here), sorted(back), self._untold)
        self._told, self._known, self._untold = here, set(self._members), {}
        return news

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
            "connected": sorted(self._told),
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
            members = {int(client): read_member(member) for client, member in kept["clients"].items()}
            told = set[int](kept["connected"]) & set(members)
            first = Registration(
                number=None,
                member=next(iter(members.values())),
                schema=read_schema(kept["schema"]),
                **{name: str(kept[name]) for name in ("description", "layout", "secret")},
            )
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            why = f"{type(error).__name__}: {error}"
            raise RunError(f"{path} is damaged ({why}); restore it, or name another run folder") from error
        self._begin(first)
        for client, member in members.items():
            self._enter(client, member)
        self._told, self._known = told, set(members)
        self._doubted = {member.node for member in members.values() if not member.lasts}

    def _ask(self, nodes: set[int]) -> None:
        """Ask those of some nodes to introduce themselves who have not, and do not wait for something."""
        now = self._exchange.clock()
        self._asked = {message: asked for message, asked in self._asked.items() if asked.node in nodes}
        busy = (
            self._connected
            | {asked.node for asked in self._asked.values()}
            | {one.member.node for one in self._introduced}
        )
        busy |= {node for node, refusal in self._refused.items() if now - refusal.at < ASKED_AGAIN}
        questions = dict.fromkeys(sorted(nodes - busy), wire.record({"what": "hello"}))
        asked, _ = self._exchange.send(questions, MessageType.QUERY, "hello", HELLO_SECONDS)
        self._asked |= asked

    def _take_in(self, some: Sequence[Registration]) -> None:
        if some and not self.known:
            (most, _), *_ = Counter(one.kind for one in some).most_common(1)
            self._begin(next(one for one in some if one.kind == most))
        # In the order of their numbers: results should not depend on who was first.
        introduced = [self._numbered(one) for one in some]
        introduced.sort(key=lambda one: (one.number is None, one.number, one.member.node))
        for one in introduced:
            client = one.number if one.number is not None else max(self._members, default=-1) + 1
            if why := self._objection(one, client):
                self._refuse(one.member.node, why)
            else:
                self._refused.pop(one.member.node, None)
                self._doubted.discard(one.member.node)
                self._enter(client, one.member)
                self._connected.add(one.member.node)
        self._introduced = [one for one in self._introduced if one not in some]

    def _numbered(self, one: Registration) -> Registration:
        """Return an introduction with the number that goes with its key, if it says none."""
        known = self._number_of_key(one.member.key)
        return replace(one, number=known) if one.number is None and known is not None else one

    def _number_of_key(self, key: str) -> int | None:
        if self._keys is not None:
            return self._keys.get(key)
        return next((client for client, member in self._members.items() if member.key == key), None)

    def _refuse(self, node: int, why: str) -> None:
        if node not in self._refused or self._refused[node].why != why:
            _log.warning("node %d is refused: %s", node, why)
            self._untold[node] = why
        self._refused[node] = _Refusal(why, self._exchange.clock())

    def _objection(self, one: Registration, client: int) -> str | None:
        """Say why a node cannot be taken; None if it can."""
        expected = self._expected
        assert expected is not None  # at least this one's own
        if one.layout != expected.layout:
            return "its model is not built like the others'"
        if one.shape != expected.shape:
            return f"its examples look like {wire.shown(one.shape)}, and the others' like {wire.shown(expected.shape)}"
        if one.secret != expected.secret:
            return "it does not share the secret of the others; give all clients the same file, or none"
        known = self._number_of_key(one.member.key)
        if self._keys is not None and known is None:
            return f"its key {one.member.key} is none of network.keys"
        if known is not None and known != client:
            return f"it says it is client {client}, and its key is that of client {known}"
        taken = next((number for number, member in self._members.items() if member.node == one.member.node), client)
        if taken != client:
            return f"it says it is client {client}, and its node is that of client {taken}"
        return self._is_another(one.member, client) if client in self._members else None

    def _is_another(self, one: Member, client: int) -> str | None:
        before = self._members[client]
        if before.node in self._connected:
            return f"it says it is client {client}, which node {before.node} is, and that is connected"
        if one.size != before.size:
            return f"it says it has {one.size} training examples, and client {client} joined with {before.size}"
        if self._keys is not None or one.key == before.key:
            return None
        if before.lasts:
            return f"it says it is client {client}, and has another key; give it the folder of that client's {KEY_FILE}"
        if self._identity == "node" and one.node != before.node:
            return (
                f"it says it is client {client}, which was node {before.node}; start it with the key of that node, or, "
                "where nodes have no keys, set network.identity = 'number'"
            )
        return None

    def _begin(self, first: Registration) -> None:
        self._expected = first
        self._roster = ClientRegistry(first.schema, first.description)

    def _enter(self, client: int, member: Member) -> None:
        self._members[client] = member
        self._members = dict(sorted(self._members.items()))
        roster = self._roster
        roster.names = {c: m.name for c, m in self._members.items()}
        roster.sizes = {c: m.size for c, m in self._members.items()}
        # One mapping that grows: the oracle is made of it, and looks newcomers up there.
        self._truth |= {} if member.true_cluster is None else {client: member.true_cluster}
        roster.true_clusters = self._truth if self._truth.keys() == self._members.keys() else None
