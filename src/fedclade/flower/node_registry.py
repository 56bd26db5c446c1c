"""Registry of a run's clients and their nodes: joined, connected and refused."""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import MessageType

from fedclade.core import ClientRegistry, ConfigError, ModelError, RunError, UpdateError, appear
from fedclade.data import DataSchema, Proposal, Statistics, agree, show_some
from fedclade.flower import wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.newcomers import NewcomerLimit
from fedclade.flower.registration import (
    Admission,
    Identity,
    RegisteredClient,
    Registration,
    read_client,
    read_schema,
)
from fedclade.flower.replies import as_values, read_statistics
from fedclade.flower.schema_exchange import read_proposal, write_agreed
from fedclade.flower.signing import Request
from fedclade.flower.wire import Content, clean, untrusted

# The file of a run folder that lists the clients and their nodes.

CLIENTS = "clients.json"

SCHEMA = "schema.json"
"""File name of the agreed schema, in the format that ``[data] schema`` accepts."""

_COMMON = ("description", "layout", "secret", "task", "scaled", "encoding")


@dataclass(frozen=True)
class SavedClients:
    """Clients of a run as saved in its folder.

    Parameters
    ----------
    clients
        Registered clients by number.
    connected
        Clients that were connected when the registry was saved.
    common
        Registration with the values that all clients have in common.
    run
        Name of the run; clients store their state under it.
    statistics
        Statistics of all clients' examples, if clients need them.
    agreed
        Schema by which all clients encode their data, if there is one.
    """

    clients: Mapping[int, RegisteredClient]
    connected: Set[int]
    common: Registration
    run: str = ""
    statistics: Statistics | None = None
    agreed: DataSchema | None = None

    def save(self, folder: Path) -> None:
        """Write the clients to a folder, if anything has changed; a RunError if that fails."""
        kept = {
            "clients": {str(client): asdict(one) for client, one in self.clients.items()},
            "connected": sorted(self.connected),
            "run": self.run,
            "schema": asdict(self.common.schema),
            **{name: getattr(self.common, name) for name in _COMMON},
            **({} if self.statistics is None else {"statistics": as_values(self.statistics)}),
            **({} if self.agreed is None else {"agreed": self.agreed.digest}),
        }
        text = json.dumps(kept, indent=2)
        path = folder / CLIENTS
        try:
            if self.agreed is not None and not (folder / SCHEMA).exists():
                appear(folder / SCHEMA, self.agreed.save)
            if not path.exists() or path.read_text() != text:
                appear(path, lambda beside: beside.write_text(text))
        except OSError as error:
            raise RunError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> SavedClients | None:
        """Read the clients from a folder; None if there is no file, a RunError if it is damaged."""
        path = folder / CLIENTS
        try:
            kept = json.loads(path.read_text())
            clients = {int(client): read_client(one) for client, one in kept["clients"].items()}
            common = Registration(
                number=None,
                client=next(iter(clients.values())),
                schema=read_schema(kept["schema"]),
                **{name: str(kept[name]) for name in ("description", "layout", "secret")},
                task=str(kept.get("task", "")),
                scaled=bool(kept.get("scaled", False)),
                encoding=str(kept.get("encoding", "")),
            )
            agreed = DataSchema.load(folder / SCHEMA) if (folder / SCHEMA).exists() else None
            if kept.get("agreed", "") != ("" if agreed is None else agreed.digest):
                raise ValueError(f"{SCHEMA} is not the schema that the clients agreed on")
            connected = set[int](kept["connected"]) & set(clients)
            found = kept.get("statistics")
            lengths = [len((found or {}).get(name, [])) for name in ("means", "labels")]
            statistics = None if found is None else read_statistics(found, *lengths)
            return cls(clients, connected, common, str(kept.get("run", "")), statistics, agreed)
        except FileNotFoundError:
            return None
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            StopIteration,
            UpdateError,
        ) as error:
            why = f"{type(error).__name__}: {error}"
            raise RunError(
                f"{path} is damaged ({why}); restore it, or name another run folder"
            ) from error


REGISTRATION_SECONDS = 600.0
"""Seconds that a node has to register.

The run does not wait for the node, which takes part from the next round.
"""

# Seconds until a refused node is requested to register again: its problem may have been solved.
RETRY_AFTER = 30.0
# Seconds between two updates of the connected nodes, while too few are connected.
REFRESH_EVERY = 0.5
# Seconds between two updates of the connected nodes, while replies are awaited.
REFRESH_MEANWHILE = 3.0
# Once one client has reconnected, the others have a 30th of the waiting time to reconnect, too.
GATHERING = 30

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changes:
    """Clients that disconnected or reconnected, and nodes that were refused or have to wait.

    New clients are in the registry.
    """

    disconnected: list[int] = field(default_factory=list[int])
    reconnected: list[int] = field(default_factory=list[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    postponed: list[int] = field(default_factory=list[int])
    """Nodes of newcomers that wait for a later round; empty if they are the same as before."""


@dataclass(frozen=True)
class _Refusal:
    why: str
    at: float  # on the exchange's clock


@dataclass(frozen=True)
class _NodeProposal:
    number: int | None  # of the client, if it reports one
    proposal: Proposal


class NodeRegistry:
    """Registry of the clients of a run and of the node of each client.

    The clients of a run have in common the model's structure, the shape of examples, and the
    secret. These values are the majority's among the first clients, so a misconfigured client
    excludes only itself.

    Parameters
    ----------
    exchange
        Sends requests to nodes.
    identity
        Identity of a client that reconnects: its ``node``, with an id that Flower binds to the
        node's key, or the ``number`` that the client reports, for nodes without keys, whose ids
        change. A client that stores a key of its own in its folder is identified by that key alone.
    keys
        Number of each client by its public key, if an operator lists the keys: no other client is
        admitted.
    declared
        Schema that all clients encode their data by, if an operator declares one. Otherwise the
        first clients agree on a schema, if their data has named columns or is text.
    newcomers
        Limit on the clients that may join after the first round has begun; ignored with ``keys``.
    """

    def __init__(
        self,
        exchange: Exchange,
        identity: Identity = "node",
        keys: Mapping[str, int] | None = None,
        declared: DataSchema | None = None,
        newcomers: NewcomerLimit | None = None,
    ) -> None:
        self._exchange = exchange
        self._limit = newcomers if newcomers is not None and keys is None else NewcomerLimit()
        self._round = 0
        """Number of the current round; 0 before the first."""
        self._postponed: frozenset[int] = frozenset()
        """Nodes of newcomers that waited for a later round at the last call of changes()."""
        # Name of the run, by which clients know it; the same when the run is continued.
        self.run = secrets.token_hex(8)
        self._admission = Admission(identity, keys)
        self._registered: dict[int, RegisteredClient] = {}
        self._truth: dict[int, int] = {}
        self._connected: set[int] = set()
        # requests to register without a reply yet, by message
        self._pending: dict[str, Request] = {}
        self._declared = declared
        self._take_schema(declared)
        self._proposals: dict[int, _NodeProposal] = {}
        """Schemas that nodes propose, until enough clients are there to agree on one."""
        self._unverified: set[int] = set()
        """Nodes that must register again: their client's key has changed, or may have changed."""
        self._waiting: list[Registration] = []
        """Registrations that wait for enough others, so that a majority is known, or for room."""
        self._refused: dict[int, _Refusal] = {}
        self._new_refusals: dict[int, str] = {}
        # clients at the last call of changes()
        self._connected_before = set[int]()
        self._registered_before = set[int]()
        self._common: Registration | None = None
        # statistics of all clients' examples, if clients need them
        self.statistics: Statistics | None = None
        self._refreshed = exchange.clock()
        exchange.between_polls = self._refresh_if_due

    @property
    def settled(self) -> bool:
        """Whether the values that the run's clients have in common are settled."""
        return self._common is not None

    @property
    def clients(self) -> ClientRegistry:
        """All clients that ever joined; the object grows during the run."""
        return self._clients

    @property
    def secret(self) -> str:
        """Digest of the secret that clients share; empty if they have none."""
        return "" if self._common is None else self._common.secret

    @property
    def of_all(self) -> Mapping[str, Any]:
        """Values of the run in every query about a model.

        They are the run's name, the agreed schema, and the statistics of all clients.
        """
        statistics = {} if self.statistics is None else as_values(self.statistics)
        return {"run": self.run, **self._agreed_values, **statistics}

    def _take_schema(self, schema: DataSchema | None) -> None:
        """Set the agreed schema, and serialize it once for all messages."""
        self.agreed = schema
        self._agreed_values: Mapping[str, Any] = (
            {} if schema is None else {"agreed": write_agreed(schema)}
        )

    @property
    def scaled(self) -> bool:
        """Whether clients scale their inputs by the statistics of all clients."""
        return self._common is not None and self._common.scaled

    @property
    def columns(self) -> Mapping[str, object]:
        """Names of inputs and labels, and mean and deviation of scaled inputs.

        Users of a model need them.
        """
        found: dict[str, object] = {}
        if self.agreed is not None:
            names = {"columns": self.agreed.encoded_names, "labels": self.agreed.label_names}
            found = {key: list(value) for key, value in names.items() if value}
        if self.scaled and self.statistics is not None:
            found |= {"mean": self.statistics.mean.tolist(), "std": self.statistics.std.tolist()}
        return found

    @property
    def newcomers(self) -> float:
        """Limit on newcomers at one time, as a share of the other clients; infinity if none."""
        return self._limit.share

    @property
    def connected(self) -> list[int]:
        """Clients that are connected now."""
        return [client for client, one in self._registered.items() if one.node in self._connected]

    @property
    def keys(self) -> Mapping[int, str]:
        """Public key of each client, in hexadecimal."""
        return {client: one.key for client, one in self._registered.items()}

    def discloses_scores(self, client: int) -> bool:
        """Return whether a client has registered that it reports scores on held-out data."""
        return self._registered[client].scores

    def check_layout(self, layout: str) -> None:
        """Check that the server's model has the clients' structure; raise a ModelError if not."""
        if self._common is not None and layout != self._common.layout:
            raise ModelError(
                "the server's model is not built like the clients': its tensors have other names, "
                "shapes or types, other ones are personal, or its frozen parameters, which are "
                "not sent, have other values (as buffers that training does not change count as "
                "frozen); give server_app and client_app the same model and the same personal "
                "part (that of fedper is 'head'), with frozen parameters and buffers from a file "
                "or a seed of their own"
            )

    def check_task(self, task: str) -> None:
        """Check that the server's task is the clients' task; raise a ConfigError if not."""
        theirs = task if self._common is None else self._common.task or task
        if clean(task) != theirs:
            raise ConfigError(
                f"the server's task is {task!r}, and the clients' is {theirs!r}; give federate and "
                "client_app the same"
            )

    def node(self, client: int) -> int | None:
        """Return the node of a client; None if the client is not connected."""
        node = self._registered[client].node
        return node if node in self._connected else None

    def check_signer(self, client: int, answer: Content) -> None:
        """Check that a reply is signed by the key that its client registered with.

        Raises
        ------
        UpdateError
            If another key signed the reply. The client's node must then register again.
        """
        one = self._registered[client]
        if answer.signer is None or answer.signer.key != one.key:
            self._unverified.add(one.node)
            self._connected.discard(one.node)
            raise UpdateError("signed by another key than that of the client's introduction")

    def wait(self, count: int, seconds: float) -> None:
        """Wait until ``count`` clients are connected.

        Raises
        ------
        UpdateError
            If fewer clients are connected after ``seconds``, with the reasons of refused nodes.
        """
        end = self._exchange.clock() + seconds
        logged = -1
        late = False
        while True:
            # After the waiting time, admit all registered clients, so that the error counts them.
            self.update(1 if late else count)
            here = len(self.connected)
            if here >= count:
                return
            if late:
                refused = "".join(
                    f"; node {node} was refused: {no.why}" for node, no in self._refused.items()
                )
                raise UpdateError(
                    f"{here} of {count} clients connected within {seconds:g} s; start more "
                    f"SuperNodes, or lower network.clients{refused}"
                )
            if (coming := here + len(self._waiting) + len(self._proposals)) != logged:
                _log.info("%d of %d clients are connected", coming, count)
                logged = coming
            self._exchange.sleep(REFRESH_EVERY)
            late = self._exchange.clock() >= end

    def begin(self, number: int) -> None:
        """Begin a round: admit registered clients, within the limit on newcomers."""
        self._round = number
        self.update()

    def update(self, enough: int = 1) -> None:
        """Update the connected clients, and admit those that have registered.

        The first clients are admitted when ``enough`` of them have registered.
        """
        self.refresh()
        if self._proposals and len(self._proposals) + len(self._waiting) >= enough:
            self._agree()
        if self._waiting and (self.settled or len(self._waiting) >= enough):
            self._admit(self._with_room())

    def _with_room(self) -> list[Registration]:
        """Return the waiting registrations that the limit on newcomers admits, oldest first."""
        room = self._limit.room(self._round, self._registered, self._connected)
        if room is None:
            return self._waiting
        admitted: list[Registration] = []
        for one in self._waiting:
            is_known = self._admission.numbered(one, self._registered).number in self._registered
            if is_known or room > 0:
                admitted.append(one)
                room -= not is_known
        return admitted

    def _agree(self) -> None:
        """Agree on a schema from the proposals; the clients register with it at the next request.

        Clients whose data has no named columns are requested to register again, and refuse then. If
        most clients have such data, the others are refused.
        """
        numbered = sorted(
            self._proposals.items(),
            key=lambda item: (item[1].number is None, item[1].number, item[0]),
        )
        self._proposals = {}
        if len(self._waiting) > len(numbered):
            for node, _ in numbered:
                self._refuse(
                    node, "its data has named columns or texts, and the other clients' data has not"
                )
            return
        agreement = agree({node: one.proposal for node, one in numbered})
        self._take_schema(agreement.schema)
        self._waiting = []
        for node, why in agreement.refused.items():
            self._refuse(node, f"its data does not fit the others': {why}")

    def wait_for_any(self, seconds: float) -> bool:
        """Update the connected clients during a round, and return whether any is connected.

        If none is connected, wait for up to ``seconds``. Once one has reconnected, give the others
        a short time to reconnect, too.
        """
        self.refresh()
        if self.connected:
            return True
        end = self._exchange.clock() + seconds
        _log.info("nobody is connected; waiting for up to %g s", seconds)
        while not self.connected and self._exchange.clock() < end:
            self._exchange.sleep(REFRESH_EVERY)
            self.refresh()
        end = min(end, self._exchange.clock() + seconds / GATHERING)
        while len(self.connected) < len(self._registered) and self._exchange.clock() < end:
            self._exchange.sleep(REFRESH_EVERY)
            self.refresh()
        return bool(self.connected)

    def _refresh_if_due(self) -> None:
        if self._exchange.clock() - self._refreshed >= REFRESH_MEANWHILE:
            self.refresh()

    def refresh(self) -> None:
        """Update which known clients are connected, and send and read requests to register.

        Newcomers wait for :meth:`update`, since a round may be going on.
        """
        self._refreshed = self._exchange.clock()
        nodes = set(self._exchange.grid.get_node_ids())
        self._connected = (
            nodes & {one.node for one in self._registered.values()}
        ) - self._unverified
        self._refused = {node: refusal for node, refusal in self._refused.items() if node in nodes}
        self._waiting = [one for one in self._waiting if one.client.node in nodes]
        self._proposals = {node: one for node, one in self._proposals.items() if node in nodes}
        self._request_registrations(nodes)
        for node, answer in self._exchange.poll(self._pending):
            try:
                if isinstance(answer, str):
                    raise UpdateError(answer)
                with untrusted():
                    self._read_introduction(answer, node)
            except UpdateError as error:
                self._refuse(node, f"it did not introduce itself: {error}")
        self._admit([one for one in self._waiting if one.number in self._registered])

    def _read_introduction(self, answer: Content, node: int) -> None:
        """Read a client's registration, or the schema that it proposes before registration."""
        if "proposal" not in answer.values:
            registration = Registration.read(answer, node)
            if self.agreed is not None and registration.encoding != self.agreed.digest:
                raise UpdateError("its data is not encoded by the agreed schema")
            self._waiting.append(registration)
            return
        number, proposal = read_proposal(answer)
        if self.agreed is not None:
            # The request was sent before clients agreed on a schema. The next request to register
            # has the agreed schema.
            return
        if self.settled:
            raise UpdateError(
                "its data has named columns or texts, and the clients of this run have agreed on "
                "no schema"
            )
        self._proposals[node] = _NodeProposal(number, proposal)

    def changes(self) -> Changes:
        """Return the changes since the last call."""
        here = set(self.connected)
        back = (here - self._connected_before) & self._registered_before
        postponed = (
            frozenset(one.client.node for one in self._waiting)
            if self.settled
            else frozenset[int]()
        )
        told = sorted(postponed) if postponed != self._postponed else []
        self._postponed = postponed
        changes = Changes(
            sorted(self._connected_before - here), sorted(back), self._new_refusals, told
        )
        self._connected_before = here
        self._registered_before = set(self._registered)
        self._new_refusals = {}
        return changes

    def save(self, folder: Path) -> None:
        """Write the clients and their nodes to a folder; raise a RunError if that fails."""
        assert self._common is not None  # clients have joined before anything is saved
        saved = SavedClients(
            clients=self._registered,
            connected=self._connected_before,
            common=self._common,
            run=self.run,
            statistics=self.statistics,
            agreed=self.agreed,
        )
        saved.save(folder)

    def load(self, folder: Path) -> None:
        """Restore the clients of an earlier run of this server from its folder, if there was one.

        Raises
        ------
        RunError
            If the file is damaged, or if the clients agreed on a schema that differs from the
            declared one.
        """
        saved = SavedClients.load(folder)
        if saved is None:
            return
        if self._declared is not None and self._declared != saved.agreed:
            stored = saved.agreed or DataSchema()
            found = show_some(
                stored.differences(self._declared, here="the run", there="the declared schema")
            )
            raise RunError(
                f"the clients of the run in {folder} have agreed on another schema: {found}; "
                "declare the same, or name another run folder"
            )
        self._take_schema(saved.agreed)
        self._settle(saved.common)
        self.run = saved.run or self.run
        self.statistics = saved.statistics
        for client, one in saved.clients.items():
            self._add(client, one)
        # The run has begun, so newcomers are limited.
        self._round = max(2, *(one.since for one in saved.clients.values()))
        self._connected_before = set(saved.connected)
        self._registered_before = set(saved.clients)
        self._unverified = {one.node for one in saved.clients.values() if not one.lasts}

    def _request_registrations(self, nodes: set[int]) -> None:
        """Request registration from nodes that are unknown and have no request pending."""
        now = self._exchange.clock()
        self._pending = {
            message: request for message, request in self._pending.items() if request.node in nodes
        }
        busy = self._connected | {request.node for request in self._pending.values()}
        busy |= {one.client.node for one in self._waiting} | self._proposals.keys()
        busy |= {node for node, refusal in self._refused.items() if now - refusal.at < RETRY_AFTER}
        requests = dict.fromkeys(
            sorted(nodes - busy), wire.record({"what": "hello", **self._agreed_values})
        )
        pending, _ = self._exchange.send(requests, MessageType.QUERY, "hello", REGISTRATION_SECONDS)
        self._pending |= pending

    def _admit(self, some: Sequence[Registration]) -> None:
        """Admit registrations that fit the other clients, and refuse the others."""
        if not some:
            return
        # The majority determines the common values, so a misconfigured client excludes only itself.
        (most, _), *_ = Counter(one.kind for one in some).most_common(1)
        common = self._common or self._settle(next(one for one in some if one.kind == most))
        # Sort by number: results should not depend on the order of arrival.
        registrations = [self._admission.numbered(one, self._registered) for one in some]
        registrations.sort(key=lambda one: (one.number is None, one.number, one.client.node))
        for one in registrations:
            client = one.number
            node = one.client.node
            if client is None:
                client = max(self._registered, default=-1) + 1
            if why := self._admission.objection(
                one, client, common, self._registered, self._connected
            ):
                self._refuse(node, why)
            else:
                self._refused.pop(node, None)
                self._unverified.discard(node)
                joined_in = (
                    self._registered[client].since if client in self._registered else self._joins_in
                )
                self._add(client, replace(one.client, since=joined_in))
                self._connected.add(node)
        self._waiting = [one for one in self._waiting if one not in some]

    @property
    def _joins_in(self) -> int:
        """Round in which a newcomer joins; 0 for clients connected when the first round begins."""
        return self._round if self._round > 1 else 0

    def _refuse(self, node: int, why: str) -> None:
        if node not in self._refused or self._refused[node].why != why:
            _log.warning("node %d is refused: %s", node, why)
            self._new_refusals[node] = why
        self._refused[node] = _Refusal(why, self._exchange.clock())

    def _settle(self, common: Registration) -> Registration:
        self._common, self._clients = common, ClientRegistry(common.schema, common.description)
        return common

    def _add(self, client: int, one: RegisteredClient) -> None:
        self._registered[client] = one
        self._registered = dict(sorted(self._registered.items()))
        self._clients.names = {c: one.name for c, one in self._registered.items()}
        self._clients.sizes = {c: one.size for c, one in self._registered.items()}
        # The mapping grows in place, since the oracle stores it and looks newcomers up in it.
        self._truth |= {} if one.true_cluster is None else {client: one.true_cluster}
        self._clients.true_clusters = (
            self._truth if self._truth.keys() == self._registered.keys() else None
        )
