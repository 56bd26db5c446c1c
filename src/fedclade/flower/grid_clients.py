"""Implementation of the ``Clients`` protocol over a Flower grid.

Each query becomes messages to nodes, and every reply is checked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from flwr.app import Array, MessageType, RecordDict
from torch import Tensor

from fedclade.algorithms import Algorithm, State
from fedclade.channel import ENCODINGS, Channel, Sketch, encoded_bytes
from fedclade.core import (
    DROPPED_OUT,
    FORBIDS,
    NOT_ASKED,
    OWN,
    TOO_LATE,
    ChoiceQuery,
    Clients,
    ConfigError,
    DataQuery,
    Disconnected,
    Evaluation,
    EvaluationQuery,
    Event,
    Layout,
    ParameterTree,
    R,
    Reconnected,
    Refused,
    Round,
    RowQuery,
    Split,
    UpdateError,
    UpdateQuery,
    Updates,
    Waiting,
    Workers,
)
from fedclade.data import Statistics, StatisticsQuery
from fedclade.flower import wire
from fedclade.flower.exchange import AT_ONCE, Exchange
from fedclade.flower.kinds import check_travels
from fedclade.flower.models_sent import (
    ModelsSent,
    as_values,
    length_of,
    of_mixture,
    training_values,
)
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.policy import check_allowed
from fedclade.flower.replies import (
    LARGEST_LOSS,
    Scores,
    UpdateReply,
    evaluation_of,
    examples_trained_on,
    largest_of_class,
    read_choice,
    read_scores,
    read_update,
    read_wins,
    summed,
)
from fedclade.flower.row_messages import largest_reply, read_row, values_of, vectors_of
from fedclade.flower.secure.server import secure_updates
from fedclade.flower.secure.terms import Members, SecureAggregation
from fedclade.flower.wire import Content
from fedclade.runs import ComingAndGoing
from fedclade.tasks import FittedTask

# Clients of a network as an algorithm sees them: new clients are admitted, disconnected clients are
# left out.

_log = logging.getLogger(__name__)


class ConnectedClients(Channel, ComingAndGoing):
    """Clients that may join before any round, and may disconnect for a while or for good.

    A disconnected client stays in its cluster. Rounds leave it out without waiting for it, and it
    takes part again as soon as it reconnects. If no client is connected, the round waits. The
    registry is saved in the folder of the run, if the run has one.

    Parameters
    ----------
    clients
        Clients that reply to queries.
    registry
        Registry of the clients and their nodes.
    folder
        Folder of the run; None if the run has no folder.
    wait
        Seconds to wait for a client if none is connected.
    """

    def __init__(
        self, clients: Clients, registry: NodeRegistry, folder: Path | None, wait: float
    ) -> None:
        super().__init__(clients)
        self._registry = registry
        self._folder = folder
        self._wait = wait

    def begin(
        self, algorithm: Algorithm, state: State, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Begin a round and add clients that have joined; return the next state and the events."""
        self._registry.begin(this_round.number)
        if not self._registry.connected:
            self._registry.wait(1, self._wait)
        changes = self._registry.changes()
        if self._folder is not None:
            self._registry.save(self._folder)
        events: list[Event] = [
            happened(0, tuple(clients))
            for happened, clients in (
                (Disconnected, changes.disconnected),
                (Reconnected, changes.reconnected),
            )
            if clients
        ]
        if changes.refused:
            events.append(Refused(0, dict(changes.refused)))
        if changes.postponed:
            events.append(Waiting(0, tuple(changes.postponed)))
            _log.warning(
                "%d newcomers wait for a later round, as network.newcomers = %g allows no more "
                "at once; list the keys of the clients in network.keys, or raise it",
                len(changes.postponed),
                self._registry.newcomers,
            )
        known = state.tree.leaf_of
        if new := [client for client in self.ids if client not in known]:
            state, joined = algorithm.join(state, new, self, this_round)
            events += joined
        return state, events

    def stay(self, number: int, tree: ParameterTree) -> None:
        """Check after the last round that a client of the run is connected; wait if none is.

        Raises
        ------
        UpdateError
            If no client connects in time.
        """
        if not self._registry.wait_for_any(self._wait):
            raise UpdateError(
                f"round {number}, the last, was not evaluated, and no client is connected within "
                f"{self._wait:g} s; start the SuperNodes and the ServerApp, with network.finish = "
                "true"
            )


# Clients that are skipped by some queries, since their last reply was too late.

LONGEST = 32  # largest number of queries in a row that skip a client


class Backoff:
    """Record of late clients that the next queries skip.

    A client that is too late is skipped by the next query; if it is too late again, by the next 2
    queries, then 4, 8, up to 32. Otherwise a client that hangs would cost the whole deadline at
    every query. The record counts queries that the client would otherwise receive, and not seconds,
    so that a run does not depend on its speed.
    """

    def __init__(self) -> None:
        self._late: dict[int, int] = {}  # late replies in a row, by client
        self._skips: dict[int, int] = {}  # queries left to skip, by client

    def skipped(self, clients: Collection[int], connected: Collection[int]) -> dict[int, str]:
        """Return the clients that this query skips, with the reason of each.

        The result is empty if the query would otherwise skip all connected clients.
        """
        if all(self._skips.get(client, 0) for client in connected):
            return {}
        skipped = [client for client in clients if self._skips.get(client, 0)]
        for client in skipped:
            self._skips[client] -= 1
        return {
            client: f"{NOT_ASKED}, as it was too late the last {self._times(client)}"
            for client in skipped
        }

    def late(self, client: int) -> None:
        """Record that a client's reply was too late."""
        self._late[client] = self._late.get(client, 0) + 1
        self._skips[client] = min(LONGEST, 2 ** (self._late[client] - 1))

    def reset(self, client: int) -> None:
        """Record that a client has replied in time, or is disconnected."""
        self._late.pop(client, None)
        self._skips.pop(client, None)

    def _times(self, client: int) -> str:
        return "time" if self._late[client] == 1 else f"{self._late[client]} times"


# Updates arrive over a network one by one; they are copied into one tensor and checked together.


class UpdateBuffer:
    """Tensor that collects the updates of some clients.

    Each update is copied into its row as it arrives, so that no update is stored twice. The updates
    are checked together, which takes a fraction of the time of separate checks.

    Parameters
    ----------
    rows
        Number of updates that the buffer has room for.
    length
        Length of an update.
    models
        Models that the clients were sent; the buffer has their type and device.
    """

    def __init__(self, rows: int, length: int, models: Tensor) -> None:
        self._deltas = models.new_empty(rows, length)
        # client, number of training examples, and loss, by row
        self._reply_of: dict[int, tuple[int, int, float | None]] = {}
        self._component_of: dict[
            int, int
        ] = {}  # component of a mixture that each client chose, by client

    @property
    def full(self) -> bool:
        """Whether every row is filled."""
        return len(self._reply_of) == len(self._deltas)

    def put(self, client: int, reply: UpdateReply, row: int | None = None) -> None:
        """Copy an update into the given row, or the next."""
        row = len(self._reply_of) if row is None else row
        self._deltas[row] = reply.update
        self._reply_of[row] = (client, reply.size, reply.loss)
        if reply.component is not None:
            self._component_of[client] = reply.component

    def checked(self, n_parameters: int, number: int) -> Updates:
        """Return the usable updates of a round, in the order of rows.

        Losses that clients withhold are NaN.
        """
        rows = sorted(self._reply_of)
        deltas = self._deltas if self.full else self._deltas[rows]
        replies = [self._reply_of[row] for row in rows]
        ids = [client for client, *_ in replies]
        sizes = [size for _, size, _ in replies]
        losses = torch.tensor(
            [0.0 if loss is None else loss for *_, loss in replies], dtype=torch.float64
        )
        updates = Updates.received(ids, sizes, deltas, n_parameters, losses, number)
        if self._component_of:
            updates = replace(
                updates,
                components=torch.tensor([self._component_of[client] for client in updates.ids]),
            )
        withheld = {client for client, _, loss in replies if loss is None}
        if not withheld:
            return updates
        hidden = torch.tensor([client in withheld for client in updates.ids], dtype=torch.bool)
        return replace(updates, losses=updates.losses.masked_fill(hidden, torch.nan))


T = TypeVar("T")

DISCLOSES_NO_SCORES = (
    f'{FORBIDS} scores, as the client reported when it joined; to allow them, set disclose="scores", and name evaluate '
    "in allow, in its node config"
)


class GridClients(Workers):
    """Clients of a Flower grid.

    Each node receives one message with the model of its client's cluster. Every reply is checked as
    it arrives: it must be about the round, the query and the model that the client was sent, have
    the right length, and be finite. Clients that send another reply, or none in time, are left out
    of the round, by name and with the reason. Late replies are discarded.

    Parameters
    ----------
    exchange
        Sends requests to nodes.
    registry
        Registry of each client's node and of the connected nodes.
    layout
        Layout of the model.
    task
        Task with the metrics by which clients are scored.
    sketch
        Sketch by which the updates from splits of a client's data are compared.
    wait
        Seconds to wait for any client, if all disconnect in the middle of a round.
    secure
        Secure aggregation, which adds updates up under masks; if None, each update is received
        separately.
    """

    def __init__(
        self,
        exchange: Exchange,
        registry: NodeRegistry,
        layout: Layout,
        task: FittedTask,
        sketch: Sketch | None = None,
        wait: float = 0.0,
        secure: SecureAggregation | None = None,
    ) -> None:
        self._exchange = exchange
        self._registry = registry
        self._wait = wait
        self.layout = layout
        self._task = task
        self._structure = wire.layout_digest(layout)
        self._sketch = sketch
        self._backoff = Backoff()
        self._secure = secure
        self._scored: dict[tuple[int, Split], int] = {}
        """Number of examples that each client is scored on, by split; it never changes."""

    @property
    def engine(self) -> str:
        """Engine of local training: always "auto", since each client chooses its own."""
        return "auto"

    @property
    def engine_taken(self) -> str | None:
        """Engine that training uses: always None, since the server does not know it."""
        return None

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients that ever joined, in a fixed order."""
        return self._registry.clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples that each client registered with."""
        return self._registry.clients.sizes

    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Return the updates, or gradients, of the clients that reply.

        Each client starts from the model that the query assigns to it.
        """
        kind = query.kind
        ids = query.ids
        this_round = query.round
        sent = ModelsSent.of(query)
        values = training_values(query, self._sketch)
        if self._secure is not None and not query.is_secret:
            updates = secure_updates(
                self._secure, self, query, sent, values, self._members, self.layout.n_parameters
            )
            check_allowed(kind, ids, updates.left_out, len(self._registry.connected))
            return updates
        repeated = {name: values[name] for name in ("round", "query", "purpose")}
        contents = {
            client: self.content(kind, values, vectors) for client, vectors in sent.vectors.items()
        }
        expected = {
            client: {"what": kind, **repeated, "model": name} for client, name in sent.names.items()
        }
        length, n_parameters = self._shape(query)
        largest = max(encoded_bytes(length, encoding, n_parameters) for encoding in ENCODINGS)
        left_out: dict[int, str] = {}

        def read(client: int, content: Content) -> UpdateReply:
            size = examples_trained_on(query, self._registry.clients.sizes[client])
            components = len(query.models) if query.mixture else 0
            return read_update(
                content, length, n_parameters, self.layout.dtype, size, expected[client], components
            )

        replies = self.request(
            contents, MessageType.TRAIN, str(this_round.number), read, left_out, largest
        )
        updates = self._collected(query, replies, left_out)
        check_allowed(kind, ids, left_out, len(self._registry.connected))
        return updates

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Return the scores of each client's models on a split of its own data.

        A client receives all of its models in one message.
        """
        if isinstance(query, ChoiceQuery):
            return self._choices(query)
        ids = query.ids
        split = query.split
        rows: dict[int, list[int]] = {}
        for client, row in zip(ids, query.assignment, strict=True):
            rows.setdefault(client, []).append(row)
        arrays = wire.raw_vectors(query.models, query.assignment)
        together = of_mixture(query) if query.mixture else None
        contents: dict[int, RecordDict] = {}
        for client, mine in rows.items():
            sent = together or {str(k): arrays[row] for k, row in enumerate(mine) if row != OWN}
            said = {
                "split": split,
                "own": OWN in mine,
                "compares": query.compares,
                **as_values(query),
            }
            contents[client] = self.content("evaluate", said, sent)
        scores = dict[int, list[Scores]]()
        wins = dict[int, list[int]]()
        left_out: dict[int, str] = {}
        # algorithms use scores on training data, so clients report a refusal themselves
        if split != "train":
            for client in [
                client for client in contents if not self._registry.discloses_scores(client)
            ]:
                del contents[client]  # models are large, and the client would refuse to score them
                left_out[client] = DISCLOSES_NO_SCORES

        def read(client: int, content: Content) -> list[Scores]:
            smallest_loss = 0.0 if self._task.has_nonnegative_loss else -LARGEST_LOSS
            known = self._examples(client, split)
            found = read_scores(
                content, len(rows[client]), self._task.metrics, known, smallest_loss=smallest_loss
            )
            if query.compares:
                wins[client] = read_wins(content, len(found), found[0][2])
            return found

        for client, mine in self.request(
            contents, MessageType.EVALUATE, f"evaluate {split}", read, left_out
        ):
            self._scored[client, split] = mine[0][2]
            scores[client] = mine
        if split == "train":  # a round depends on these scores; all other scores only describe it
            check_allowed("evaluate", [*rows], left_out, len(self._registry.connected))
        return evaluation_of(ids, scores, wins, self._task.metrics, left_out)

    def _choices(self, query: ChoiceQuery) -> Evaluation:
        """Return each client's choice of the best of its models; they travel in one message."""
        rows: dict[int, list[int]] = {}
        for client, row in zip(query.ids, query.assignment, strict=True):
            rows.setdefault(client, []).append(row)
        arrays = wire.raw_vectors(query.models, query.assignment)
        contents: dict[int, RecordDict] = {}
        for client, client_rows in rows.items():
            contents[client] = self.content(
                "choose", {}, {str(k): arrays[row] for k, row in enumerate(client_rows)}
            )
        left_out: dict[int, str] = {}

        def read(client: int, content: Content) -> int:
            return read_choice(content, len(rows[client]))

        chosen = dict(self.request(contents, MessageType.QUERY, "choose", read, left_out))
        check_allowed("choose", [*rows], left_out, len(self._registry.connected))
        replied = [client for client in rows if client in chosen]
        ids = [client for client in replied for _ in rows[client]]
        wins = [int(k == chosen[client]) for client in replied for k in range(len(rows[client]))]
        return Evaluation(
            ids=tuple(ids),
            scores=torch.full((len(ids), len(self._task.metrics)), math.nan, dtype=torch.float64),
            losses=torch.full((len(ids),), math.nan, dtype=torch.float64),
            examples=torch.ones(len(ids), dtype=torch.int64),
            left_out=left_out,
            higher_is_better=self._task.metrics[0].higher_is_better,
            wins=torch.tensor(wins, dtype=torch.int64),
            without_loss=frozenset(ids),
        )

    def handle_data(self, query: DataQuery[R]) -> R:
        """Return the clients' replies to a query about their data."""
        if isinstance(query, RowQuery):
            return cast("R", self._rows(query))
        if isinstance(query, StatisticsQuery):
            return cast("R", self._statistics(query))
        raise ConfigError(
            f"a {type(query).__name__} cannot be put over a network; make it a subclass of "
            "fedclade.RowQuery, or run a simulation"
        )

    def _rows(self, query: RowQuery) -> Tensor:
        """Return the row of each client; zeros for a client that does not reply."""
        check_travels(type(query))
        schema = self._registry.clients.schema
        shape = query.shape(schema)
        content = self.content(query.kind, values_of(query), vectors_of(query))
        contents = dict.fromkeys(query.ids, content)
        rows = query.no_rows(schema)
        place_of = {client: place for place, client in enumerate(query.ids)}
        left_out: dict[int, str] = {}  # these clients are queried again, and reported after that

        def read(client: int, content: Content) -> Tensor:
            return read_row(query, content, shape)

        largest = largest_reply(query, shape)
        replies = self.request(contents, MessageType.QUERY, query.kind, read, left_out, largest)
        for client, row in replies:
            rows[place_of[client]] = row
        check_allowed(query.kind, query.ids, left_out, len(self._registry.connected))
        return rows

    def _statistics(self, query: StatisticsQuery) -> Statistics:
        """Return the statistics of all clients; raise an UpdateError unless most reply."""
        clients = self._registry.clients
        content = self.content(query.kind, {})
        columns = math.prod(clients.schema.input_shape)
        return summed(query, clients.sizes, columns, content, self.request)

    def content(
        self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None
    ) -> RecordDict:
        """Return the message content of one kind of request about this run's model."""
        values = {"what": kind, **values, "layout": self._structure, **self._registry.of_all}
        return wire.record(values, vectors)

    def request(
        self,
        contents: Mapping[int, RecordDict],
        kind: str,
        group: str,
        read: Callable[[int, Content], T],
        left_out: dict[int, str],
        largest: int = 0,
    ) -> Iterator[tuple[int, T]]:
        """Send requests to clients; yield each client with its parsed reply, in order of arrival.

        Clients that are disconnected, or were late before, are skipped.

        Parameters
        ----------
        contents
            Content of the request, by client.
        kind
            Type of the Flower message.
        group
            Group of the Flower messages, for Flower's logs.
        read
            Parser and check of a reply, given the client and the content.
        left_out
            Dictionary that receives the reason of each client that is left out.
        largest
            Largest size of the vectors of a reply, in bytes.

        Raises
        ------
        UpdateError
            If no client is connected or reconnects in time. Requests for scores then yield nothing
            instead, since a run can do without scores.
        """
        if not self._registry.wait_for_any(self._wait) and kind != MessageType.EVALUATE:
            raise UpdateError(
                f"nobody is connected any more, and nobody came back within {self._wait:g} s; "
                "start the SuperNodes again, and then the server with the same folder"
            )
        node_of = {client: self._registry.node(client) for client in contents}
        for client in (client for client, node in node_of.items() if node is None):
            self._backoff.reset(client)
            left_out[client] = DROPPED_OUT
        connected = {client: node for client, node in node_of.items() if node is not None}
        left_out |= (skipped := self._backoff.skipped(connected, self._registry.connected))
        client_of = {node: client for client, node in connected.items() if client not in skipped}
        sent = {node: contents[client] for node, client in client_of.items()}
        for node, answer in self._exchange.ask(sent, kind, group, largest):
            client = client_of[node]
            (self._backoff.late if answer == TOO_LATE else self._backoff.reset)(client)
            try:
                if isinstance(answer, str):
                    raise UpdateError(answer)
                self._registry.check_signer(client, answer)
                with wire.untrusted():
                    found = read(client, answer)
            except UpdateError as error:
                left_out[client] = str(error)
            else:
                yield client, found

    def _collected(
        self,
        query: UpdateQuery,
        replies: Iterator[tuple[int, UpdateReply]],
        left_out: Mapping[int, str],
    ) -> Updates:
        """Return all updates in the order of the query, or those that its sink did not take."""
        length, _ = self._shape(query)
        # Rows are in the order of the query, since results must not depend on the order of arrival.
        if query.sink is None:
            place_of = {client: place for place, client in enumerate(query.ids)}
            buffer = UpdateBuffer(len(query.ids), length, query.models)
            for client, reply in replies:
                buffer.put(client, reply, place_of[client])
            return self._checked(buffer, query, left_out)
        buffer = UpdateBuffer(AT_ONCE, length, query.models)
        for client, reply in replies:
            buffer.put(client, reply)
            if buffer.full:
                query.sink(self._checked(buffer, query, {}))
                buffer = UpdateBuffer(AT_ONCE, length, query.models)
        return self._checked(buffer, query, left_out)

    def _checked(
        self, buffer: UpdateBuffer, query: UpdateQuery, left_out: Mapping[int, str]
    ) -> Updates:
        updates = buffer.checked(self._shape(query)[1], query.round.number)
        return replace(updates, left_out={**left_out, **updates.left_out})

    @property
    def _members(self) -> Members:
        return Members(self._registry.clients.sizes, self._registry.keys)

    def _shape(self, query: UpdateQuery) -> tuple[int, int]:
        """Return the length of an update, and the number of its entries that are compared."""
        if query.is_secret:
            return 0, 0
        if query.mixture is not None:
            return length_of(query, self.layout, self._registry.clients.schema.labels)
        if query.round.replicates == 1 or not query.round.compares_parts:
            return self.layout.size, self.layout.n_parameters
        sketches = query.round.replicates * (
            self._sketch.dim if self._sketch else self.layout.n_parameters
        )
        return self.layout.size + sketches, self.layout.n_parameters

    def _examples(self, client: int, split: Split) -> int | None:
        """Return the number of examples that a client is scored on, if it is known."""
        size = self._registry.clients.sizes[client]
        if split == "train" and self._task.kind != "language" and largest_of_class(size) == size:
            return size
        return self._scored.get((client, split))
