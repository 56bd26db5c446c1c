"""Registry of a run's clients and of their nodes, which are Flower SuperNodes.

The registry records which clients have joined, are connected, or were refused, and saves them in
the run folder. A node joins by replying to a request to register, ``hello``.
"""

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
    KnownClients,
    RegisteredClient,
    Registration,
    read_client,
    read_schema,
    schema_values,
)
from fedclade.flower.replies import as_values, read_statistics
from fedclade.flower.schema_exchange import read_proposal, write_agreed
from fedclade.flower.signing import Request
from fedclade.flower.wire import Content, clean, untrusted
from fedclade.runs import SCHEMA
from fedclade.tasks import TargetScale

# File of a run folder that lists the clients and their nodes.

CLIENTS = "clients.json"

_COMMON = ("description", "layout", "secret", "task", "scaled", "scaled_targets", "encoding")


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
        Statistics of all clients' examples; None if clients do not need them.
    agreed
        Schema by which all clients encode their data; None if their data has no named columns or
        texts.
    """

    clients: Mapping[int, RegisteredClient]
    connected: Set[int]
    common: Registration
    run: str = ""
    statistics: Statistics | None = None
    agreed: DataSchema | None = None

    def save(self, folder: Path) -> None:
        """Write the clients to a run folder if anything has changed.

        Raises
        ------
        RunError
            If a file cannot be written.
        """
        kept: dict[str, Any] = {
            "clients": {str(client): asdict(one) for client, one in self.clients.items()},
            "connected": sorted(self.connected),
            "run": self.run,
            "schema": schema_values(self.common.schema),
            **{name: getattr(self.common, name) for name in _COMMON},
        }
        if self.statistics is not None:
            kept["statistics"] = as_values(self.statistics)
        if self.agreed is not None:
            kept["agreed"] = self.agreed.digest
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
        """Read the clients from a run folder; return None if the folder has no list of clients.

        Raises
        ------
        RunError
            If a file is damaged, or the schema is not the one that the clients agreed on.
        """
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
                scaled_targets=bool(kept.get("scaled_targets", False)),
                encoding=str(kept.get("encoding", "")),
                arrays={},
            )
            agreed = None
            digest = ""
            if (folder / SCHEMA).exists():
                agreed = DataSchema.load(folder / SCHEMA)
                digest = agreed.digest
            if kept.get("agreed", "") != digest:
                raise ValueError(
                    f"{SCHEMA} in the run folder was changed: it is not the schema that the clients "
                    f"agreed on; restore {SCHEMA} from a copy"
                )
            statistics = None
            if (found := kept.get("statistics")) is not None:
                columns, labels = (len(found.get(name, [])) for name in ("means", "labels"))
                statistics = read_statistics(found, columns, labels)
            return cls(
                clients,
                connected=set[int](kept["connected"]) & set(clients),
                common=common,
                run=str(kept.get("run", "")),
                statistics=statistics,
                agreed=agreed,
            )
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
"""Seconds within which a node has to register.

The run does not wait for the node, whose client joins in the next round after registration.
"""

# Seconds until a refused node is requested to register again, since the reason may no longer apply.
RETRY_AFTER = 30.0
# Seconds between two updates of the connected nodes, while too few are connected.
REFRESH_EVERY = 0.5
# Seconds between two updates of the connected nodes, while replies are awaited.
REFRESH_MEANWHILE = 3.0
# Once a client has reconnected, other clients have a 30th of the waiting time to reconnect, too.
GATHERING = 30

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changes:
    """Changes since the last round: disconnected and reconnected clients, and nodes not admitted.

    The fields are the ids of disconnected and of reconnected clients, the reason of each refused
    node, and the nodes of newcomers that wait. Clients that have joined are in the registry.
    """

    disconnected: list[int] = field(default_factory=list[int])
    reconnected: list[int] = field(default_factory=list[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    postponed: list[int] = field(default_factory=list[int])
    """Nodes of newcomers that wait for a later round; empty if they are the same as before."""


@dataclass(frozen=True)
class _Refusal:
    """Reason why a node was refused, and the time of the refusal."""

    why: str
    at: float  # on the exchange's clock


@dataclass(frozen=True)
class _NodeProposal:
    """Data schema that a node proposes, with the number that its client reports, if any."""

    number: int | None
    proposal: Proposal


class NodeRegistry:
    """Registry of the clients of a run and of the node of each client.

    All clients of a run must have the same model structure, shape of examples, task, encoding and
    secret. The majority of the first clients determines these values, so a misconfigured client
    excludes only itself.

    Parameters
    ----------
    exchange
        Sender of requests to nodes and receiver of their replies.
    identity
        Property by which a client that reconnects is recognized. ``node``: the id of its node,
        which Flower binds to the node's key. ``number``: the number that the client reports, for
        nodes without keys, since their ids change. A client that stores a signature key in its
        folder is recognized only by this key.
    keys
        Number of each admissible client by its public key; None to admit clients with any key.
    declared
        Schema by which all clients encode their data. If None, the first clients agree on a schema,
        provided that their data has named columns or is text.
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
        self._limit = NewcomerLimit()
        if newcomers is not None and keys is None:
            self._limit = newcomers
        self._round = 0
        """Number of the current round; 0 before the first."""
        self._postponed: frozenset[int] = frozenset()
        """Nodes of newcomers that waited for a later round at the last call of changes()."""
        # Name of the run, under which clients store data. A continued run has the same name.
        self.run = secrets.token_hex(8)
        self._admission = Admission(identity, keys)
        self._registered = KnownClients()
        self._truth: dict[int, int] = {}
        self._connected: set[int] = set()
        # requests to register without a reply yet, by message
        self._pending: dict[str, Request] = {}
        self._declared = declared
        self._take_schema(declared)
        self._proposals: dict[int, _NodeProposal] = {}
        """Schemas that nodes have proposed before enough clients are connected to agree."""
        self._unverified: set[int] = set()
        """Nodes that must register again: their client's key has changed, or may have changed."""
        self._waiting: list[Registration] = []
        """Registrations that wait to be admitted.

        Before the first round they wait until a majority is known; later, until the limit on
        newcomers admits them.
        """
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
        """Whether the values that all clients must have in common, such as the task, are fixed."""
        return self._common is not None

    @property
    def clients(self) -> ClientRegistry:
        """All clients that ever joined the run; the object is updated when clients join."""
        return self._clients

    @property
    def secret(self) -> str:
        """Digest of the secret that clients share; empty if clients share no secret."""
        return "" if self._common is None else self._common.secret

    @property
    def of_all(self) -> Mapping[str, Any]:
        """Values that every query about a model contains, the same for all clients.

        The values are the run's name and, if clients need them, the agreed schema and the
        statistics of all clients' examples.
        """
        values: dict[str, Any] = {"run": self.run, **self._agreed_values}
        if self.statistics is not None:
            values |= as_values(self.statistics)
        return values

    def _take_schema(self, schema: DataSchema | None) -> None:
        """Set the schema that clients agree on, and serialize it once for all messages."""
        self.agreed = schema
        self._agreed_values: Mapping[str, Any] = {}
        if schema is not None:
            self._agreed_values = {"agreed": write_agreed(schema)}

    @property
    def scaled(self) -> bool:
        """Whether clients scale their inputs by the statistics of all clients."""
        return self._common is not None and self._common.scaled

    @property
    def scaled_targets(self) -> int:
        """Number of targets that clients scale by statistics of all clients; 0 without scaling."""
        return 0 if self._common is None else self._common.targets

    @property
    def target_scale(self) -> TargetScale | None:
        """Mean and deviation by which targets are scaled; None if targets are not scaled."""
        if self.statistics is None or not self.scaled_targets:
            return None
        mean, std = self._scales(targets=True)
        return TargetScale(tuple(mean), tuple(std))

    def _scales(self, *, targets: bool) -> tuple[list[float], list[float]]:
        """Return the means and deviations of all inputs, or with ``targets`` of all targets."""
        assert self.statistics is not None
        # The columns of the inputs come first, those of the targets last.
        end = len(self.statistics.means)
        first_target = end - self.scaled_targets
        if targets:
            scales = self.statistics.columns(first_target, end)
        else:
            scales = self.statistics.columns(0, first_target)
        return scales.mean.tolist(), scales.std.tolist()

    @property
    def columns(self) -> Mapping[str, object]:
        """Description of the columns of the clients' data, which users of a trained model need.

        It contains the names of inputs and labels, and the mean and deviation of scaled inputs and
        targets, as far as they are known.
        """
        found: dict[str, object] = {}
        if self.agreed is not None:
            names = {
                "columns": self.agreed.encoded_names,
                "labels": self.agreed.label_names,
                "fill": self.agreed.encoded_fills,
            }
            found = {key: list(value) for key, value in names.items() if value}
        if self.scaled and self.statistics is not None:
            found["mean"], found["std"] = self._scales(targets=False)
        if self.scaled_targets and self.statistics is not None:
            found["target_mean"], found["target_std"] = self._scales(targets=True)
        return found

    @property
    def newcomers(self) -> float:
        """Largest allowed number of newcomers, divided by the number of other connected clients.

        Infinity means that there is no limit. See :class:`NewcomerLimit`.
        """
        return self._limit.share

    @property
    def connected(self) -> list[int]:
        """Ids of the clients whose nodes are connected now."""
        return [client for client, one in self._registered.items() if one.node in self._connected]

    @property
    def keys(self) -> Mapping[int, str]:
        """Public key of each client, in hexadecimal."""
        return {client: one.key for client, one in self._registered.items()}

    @property
    def encodings(self) -> Counter[str]:
        """Number of clients by the encoding in which they send updates."""
        return Counter(one.sends for one in self._registered.values())

    def discloses_scores(self, client: int) -> bool:
        """Return whether a client has registered that it reports scores on held-out data."""
        return self._registered[client].scores

    def check_layout(self, layout: str) -> None:
        """Check that the server's model has the structure of the clients' model.

        Parameters
        ----------
        layout
            Digest of the layout of the server's model.

        Raises
        ------
        ModelError
            If the structure differs.
        """
        if self._common is not None and layout != self._common.layout:
            raise ModelError(
                "the server's model differs from the clients' model in the names, shapes or types "
                "of its tensors, in its personal parameters, or in the values of its frozen "
                "parameters, which are not sent (buffers that training does not change count as "
                "frozen); pass the same model and the same personal part to server_app and "
                "client_app (for fedper, personal is 'head'), and initialize frozen parameters and "
                "buffers from a file or a fixed seed"
            )

    def check_task(self, task: str) -> None:
        """Check that the server's task equals the task of the clients.

        Parameters
        ----------
        task
            Description of the server's loss and metrics.

        Raises
        ------
        ConfigError
            If the tasks differ.
        """
        theirs = task
        if self._common is not None and self._common.task:
            theirs = self._common.task
        if clean(task) != theirs:
            raise ConfigError(
                f"the server's task is {task!r}, but the clients' task is {theirs!r}; pass the "
                "same task to federate and client_app"
            )

    def node(self, client: int) -> int | None:
        """Return the id of a client's node; None if the node is not connected."""
        node = self._registered[client].node
        if node not in self._connected:
            return None
        return node

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
            raise UpdateError(
                "the reply is signed by another key than the one that the client registered with, so "
                "the server ignores the client until it registers again"
            )

    def wait(self, count: int, seconds: float) -> None:
        """Wait until ``count`` clients are connected.

        Raises
        ------
        UpdateError
            If fewer clients are connected after ``seconds`` seconds; the text has the reasons of
            all refused nodes.
        """
        end = self._exchange.clock() + seconds
        logged = -1
        late = False
        while True:
            # After the waiting time, admit all registered clients, so that the error counts all.
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
        """Begin the round ``number``: admit registered clients, within the limit on newcomers."""
        self._round = number
        self.update()

    def update(self, enough: int = 1) -> None:
        """Update which clients are connected, and admit clients that have registered.

        The first clients of a run are admitted together as soon as ``enough`` clients have
        registered, so that the majority can determine their common values.
        """
        self.refresh()
        if self._proposals and len(self._proposals) + len(self._waiting) >= enough:
            self._agree_on_schema()
        if self._waiting and (self.settled or len(self._waiting) >= enough):
            self._admit_clients(self._with_room())

    def _with_room(self) -> list[Registration]:
        """Return the waiting registrations within the limit on newcomers, in order of arrival.

        Clients that reconnect are not limited.
        """
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

    def _agree_on_schema(self) -> None:
        """Combine the proposals of all clients into the agreed schema.

        Clients register in reply to the next request, which contains the agreed schema. A client
        whose data has neither named columns nor texts proposes no schema and cannot use the agreed
        schema, so it will refuse the next request. If most clients have data of this kind, no
        schema is computed, and the clients with proposals are refused.
        """
        numbered = sorted(
            self._proposals.items(),
            key=lambda item: (item[1].number is None, item[1].number, item[0]),
        )
        self._proposals = {}
        if len(self._waiting) > len(numbered):
            for node, _ in numbered:
                self._refuse_node(
                    node,
                    "its data has named columns or texts, but most other clients' data has neither",
                )
            return
        agreement = agree({node: one.proposal for node, one in numbered})
        self._take_schema(agreement.schema)
        self._waiting = []
        for node, why in agreement.refused.items():
            self._refuse_node(node, f"its data does not fit the data of the other clients: {why}")

    def wait_for_any(self, seconds: float) -> bool:
        """Return whether any client is connected; wait up to ``seconds`` seconds if none is.

        Once a client has reconnected, the method waits a short time for other clients, too.
        """
        self.refresh()
        if self.connected:
            return True
        end = self._exchange.clock() + seconds
        _log.info("no client is connected; waiting for up to %g s", seconds)
        while not self.connected and self._exchange.clock() < end:
            self._exchange.sleep(REFRESH_EVERY)
            self.refresh()
        end = min(end, self._exchange.clock() + seconds / GATHERING)
        while len(self.connected) < len(self._registered) and self._exchange.clock() < end:
            self._exchange.sleep(REFRESH_EVERY)
            self.refresh()
        return bool(self.connected)

    def _refresh_if_due(self) -> None:
        """Update which clients are connected, if the last update was some seconds ago."""
        if self._exchange.clock() - self._refreshed >= REFRESH_MEANWHILE:
            self.refresh()

    def refresh(self) -> None:
        """Update which clients are connected; request registrations and read those that arrived.

        Clients that reconnect are admitted. New clients wait for :meth:`update`, since a round may
        be in progress.
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
                self._refuse_node(node, f"it has not registered: {error}")
        self._admit_clients([one for one in self._waiting if one.number in self._registered])

    def _read_introduction(self, answer: Content, node: int) -> None:
        """Read a node's reply to a request to register: a registration, or a proposed schema.

        Raises
        ------
        UpdateError
            If the reply is malformed, or does not fit the agreed schema.
        """
        if "proposal" not in answer.values:
            registration = Registration.read(answer, node)
            if self.agreed is not None and registration.encoding != self.agreed.digest:
                raise UpdateError(
                    "the client's data is not encoded by the schema that the clients of this run "
                    "agreed on, so the client cannot join; its app should encode the data by the "
                    "schema in the server's request, as fedclade.flower.client_app does"
                )
            self._waiting.append(registration)
            return
        number, proposal = read_proposal(answer)
        if self.agreed is not None:
            # The node has replied to a request from before the agreement. The next request to
            # register contains the agreed schema.
            return
        if self.settled:
            raise UpdateError(
                "the client's data has named columns or texts, but the clients of this run have no "
                "schema for such data, so the client cannot join; load its data in the same form as "
                "the other clients' data"
            )
        self._proposals[node] = _NodeProposal(number, proposal)

    def changes(self) -> Changes:
        """Return which clients disconnected, reconnected or were refused since the last call."""
        here = set(self.connected)
        back = (here - self._connected_before) & self._registered_before
        postponed = frozenset[int]()
        if self.settled:
            postponed = frozenset(one.client.node for one in self._waiting)
        newly_postponed: list[int] = []
        if postponed != self._postponed:
            newly_postponed = sorted(postponed)
        self._postponed = postponed
        changes = Changes(
            sorted(self._connected_before - here), sorted(back), self._new_refusals, newly_postponed
        )
        self._connected_before = here
        self._registered_before = set(self._registered)
        self._new_refusals = {}
        return changes

    def save(self, folder: Path) -> None:
        """Write the clients and their nodes to a run folder; raise a RunError if that fails."""
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
        """Restore the clients of an interrupted run from its folder, if the folder lists clients.

        Raises
        ------
        RunError
            If a file is damaged, or if the clients agreed on a schema that differs from the
            declared schema.
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
                f"the declared schema differs from the schema of the run in {folder}: {found}; "
                "declare the same schema, or name another run folder"
            )
        self._take_schema(saved.agreed)
        self._fix_common(saved.common)
        self.run = saved.run or self.run
        self.statistics = saved.statistics
        for client, one in saved.clients.items():
            self._registered.add(client, one)
        self._update_clients(list(saved.clients))
        # The run has begun, so clients that join now count as newcomers.
        self._round = max(2, *(one.since for one in saved.clients.values()))
        self._connected_before = set(saved.connected)
        self._registered_before = set(saved.clients)
        self._unverified = {one.node for one in saved.clients.values() if not one.lasts}

    def _request_registrations(self, nodes: set[int]) -> None:
        """Send requests to register to all unknown nodes without a pending request."""
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

    def _admit_clients(self, some: Sequence[Registration]) -> None:
        """Admit registrations that fit the clients of the run, and refuse other registrations."""
        if not some:
            return
        # The majority of the first clients determines the common values, so a misconfigured client
        # excludes only itself.
        (most, _), *_ = Counter(one.kind for one in some).most_common(1)
        common = self._common or self._fix_common(next(one for one in some if one.kind == most))
        # Sort by number, since results must not depend on the order of arrival.
        registrations = [self._admission.numbered(one, self._registered) for one in some]
        registrations.sort(key=lambda one: (one.number is None, one.number, one.client.node))
        admitted: list[int] = []
        for one in registrations:
            client = one.number
            node = one.client.node
            if client is None:
                client = self._registered.free_number
            why = self._admission.objection(
                one, client, common, registered=self._registered, connected=self._connected
            )
            if why:
                self._refuse_node(node, why)
                continue
            self._refused.pop(node, None)
            self._unverified.discard(node)
            joined_in = self._joins_in
            if client in self._registered:
                joined_in = self._registered[client].since
            self._registered.add(client, replace(one.client, since=joined_in))
            self._connected.add(node)
            admitted.append(client)
        self._update_clients(admitted)
        done = {id(one) for one in some}
        self._waiting = [one for one in self._waiting if id(one) not in done]

    @property
    def _joins_in(self) -> int:
        """Number of the round in which a client joins now; 0 before the second round.

        Clients that join before or in the first round never count as newcomers.
        """
        return self._round if self._round > 1 else 0

    def _refuse_node(self, node: int, why: str) -> None:
        """Record that a node is refused, and log the reason if it is new."""
        if node not in self._refused or self._refused[node].why != why:
            _log.warning("node %d is refused: %s", node, why)
            self._new_refusals[node] = why
        self._refused[node] = _Refusal(why, self._exchange.clock())

    def _fix_common(self, common: Registration) -> Registration:
        """Fix the values that all clients of the run must have in common; return ``common``."""
        self._common = common
        self._clients = ClientRegistry(common.schema, common.description)
        return common

    def _update_clients(self, added: Sequence[int]) -> None:
        """Update the names, sizes and true clusters of all clients after some were added."""
        if not added:
            return
        self._clients.names = {c: one.name for c, one in self._registered.items()}
        self._clients.sizes = {c: one.size for c, one in self._registered.items()}
        # The mapping is changed in place, since the oracle algorithm keeps a reference to it and
        # looks up the true clusters of new clients there.
        for client in added:
            true_cluster = self._registered[client].true_cluster
            if true_cluster is not None:
                self._truth[client] = true_cluster
        all_known = len(self._truth) == len(self._registered)
        self._clients.true_clusters = self._truth if all_known else None
