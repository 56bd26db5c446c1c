"""Clients of a Flower grid, with the same interface as simulated clients.

Each query of an algorithm becomes messages to the nodes of clients, and every reply is checked.
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
from fedclade.channel import ENCODINGS, Channel, Sketch, encoded_bytes, unpack_parts
from fedclade.core import (
    DENSE,
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
    Sink,
    Split,
    TrainQuery,
    UpdateError,
    Updates,
    Waiting,
    Workers,
)
from fedclade.data import Statistics, StatisticsQuery
from fedclade.flower import wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.kinds import check_travels
from fedclade.flower.models_sent import (
    ModelsSent,
    as_values,
    length_of,
    of_mixture,
    training_values,
)
from fedclade.flower.network import STREAM_BUFFER
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
from fedclade.flower.update_buffer import ReusedMemory, UpdateBuffer, streamed_at_once
from fedclade.flower.wire import Content
from fedclade.flower.work_sent import check_work_travels
from fedclade.runs import ComingAndGoing, StreamChoice
from fedclade.tasks import FittedTask

# The algorithm's view of the clients: before each round new clients are admitted, and disconnected
# clients are left out of the round.

_log = logging.getLogger(__name__)


class StreamSwitch:
    """Switch of a run to a server that streams, once so many clients have joined that it should.

    Parameters
    ----------
    choice
        The choice of the run, which is asked before each round.
    build
        Function that returns the clients with the middleware of a server that streams.
    """

    def __init__(self, choice: StreamChoice, build: Callable[[], Clients]) -> None:
        self._choice = choice
        self._build = build

    def apply(self, clients: Clients, joined: int, number: int) -> Clients:
        """Return the clients for a round: as given, or with the middleware of streaming.

        Parameters
        ----------
        clients
            The clients with their present middleware.
        joined
            Number of clients of the run.
        number
            Number of the round.
        """
        if not self._choice.begins(joined):
            return clients
        _log.info(
            "from round %d on the server sums updates as they arrive, since the updates of %d "
            "clients would take too much memory",
            number,
            joined,
        )
        return self._build()


class ConnectedClients(Channel, ComingAndGoing):
    """Clients that may join before any round, and may disconnect for a while or for good.

    A disconnected client remains in its cluster. Cohorts are drawn from the connected clients only,
    so rounds continue without a disconnected client until it reconnects. If no client is connected,
    the round waits. The registry of clients is saved in the run folder, if the run has a folder.

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
    switch
        Switch to a server that streams when more clients have joined; None: the server does not
        change.
    """

    def __init__(
        self,
        clients: Clients,
        registry: NodeRegistry,
        folder: Path | None,
        wait: float,
        *,
        switch: StreamSwitch | None = None,
    ) -> None:
        super().__init__(clients)
        self._switch = switch
        self._registry = registry
        self._folder = folder
        self._wait = wait
        self._away: frozenset[int] = frozenset()

    @property
    def away(self) -> frozenset[int]:
        """Ids of the clients that were disconnected when the current round began.

        Clients that disconnect later are in the cohort, and are left out as soon as they are
        queried.
        """
        return self._away

    @property
    def present(self) -> int:
        """Number of clients that were connected when the current round began."""
        return len(self.reachable)

    def begin(
        self, algorithm: Algorithm, state: State, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Begin a round: add clients that have joined, and record which clients are connected.

        Returns
        -------
        tuple[State, list[Event]]
            State of the algorithm with the new clients, and the events of disconnected,
            reconnected, refused, waiting and new clients.
        """
        self._registry.begin(this_round.number)
        if not self._registry.connected:
            self._registry.wait(1, self._wait)
        self._away = frozenset(self.ids) - frozenset(self._registry.connected)
        changes = self._registry.changes()
        if self._switch is not None:
            self._clients = self._switch.apply(self._clients, len(self.ids), this_round.number)
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
                "%d newcomers have to wait for a later round, as network.newcomers = %g limits "
                "their number at one time; list the clients' keys in network.keys, or raise "
                "network.newcomers",
                len(changes.postponed),
                self._registry.newcomers,
            )
        known = state.tree.leaf_of
        if new := [client for client in self.ids if client not in known]:
            state, joined = algorithm.join(state, new, self, this_round)
            events += joined
        return state, events

    def stay(self, number: int, tree: ParameterTree) -> None:
        """Wait after the last round until a client is connected, since evaluation needs clients.

        Parameters
        ----------
        number
            Number of the last round.
        tree
            Ignored.

        Raises
        ------
        UpdateError
            If no client connects in time.
        """
        if not self._registry.wait_for_any(self._wait):
            raise UpdateError(
                f"the last round, {number}, cannot be evaluated, since no client has connected "
                f"within {self._wait:g} s; start the SuperNodes, and then the ServerApp with "
                "network.finish = true"
            )


# Clients whose last reply was too late are left out of the next queries.

LONGEST = 32  # largest number of queries in a row that skip a client


class Backoff:
    """Exponential backoff: record of late clients and of the queries that leave them out.

    After a late reply a client is left out of the next query; if its next reply is late, too, of
    the next 2 queries, then 4, 8, and at most 32. Otherwise a client that does not respond would
    delay every query until the deadline. The record counts queries and not seconds, so that the
    results of a run do not depend on its speed.
    """

    def __init__(self) -> None:
        self._late: dict[int, int] = {}  # late replies in a row, by client
        self._skips: dict[int, int] = {}  # queries left to skip, by client

    def skipped(self, clients: Collection[int], connected: Collection[int]) -> dict[int, str]:
        """Return the clients that the next query leaves out because of late replies, with reasons.

        The result is empty if the query would otherwise leave out all connected clients. Each call
        counts as one query.

        Parameters
        ----------
        clients
            Connected clients to which the query would be sent.
        connected
            All connected clients of the run.
        """
        if all(self._skips.get(client, 0) for client in connected):
            return {}
        skipped = [client for client in clients if self._skips.get(client, 0)]
        for client in skipped:
            self._skips[client] -= 1
        return {
            client: f"{NOT_ASKED}, as it was too late the last {self._describe_times(client)}"
            for client in skipped
        }

    def late(self, client: int) -> None:
        """Record that a client's reply was too late, so that the next queries leave it out."""
        self._late[client] = self._late.get(client, 0) + 1
        self._skips[client] = min(LONGEST, 2 ** (self._late[client] - 1))

    def reset(self, client: int) -> None:
        """Forget a client's late replies, once it has replied in time or is disconnected."""
        self._late.pop(client, None)
        self._skips.pop(client, None)

    def _describe_times(self, client: int) -> str:
        """Return the number of a client's late replies in a row, in words that end a message.

        The words are "time" after one late reply, and for example "3 times" after three.
        """
        if self._late[client] == 1:
            return "time"
        return f"{self._late[client]} times"


T = TypeVar("T")

DISCLOSES_NO_SCORES = (
    f'{FORBIDS} scores, as the client reported when it joined; to allow scores, set disclose="scores" and add evaluate '
    "to allow in its node config"
)


class GridClients(Workers):
    """Clients of a Flower grid, which reply to the queries of an algorithm.

    For each query a node receives one message, for example with the model of its client's cluster.
    Every reply is checked as it arrives: it must repeat the round, the query and the model that the
    server has sent, have the right length, and be finite. A client with an invalid reply, or with
    no reply in time, is left out of the round, and the reason is reported. Late replies are
    discarded.

    Parameters
    ----------
    exchange
        Sender of requests to nodes and receiver of their replies.
    registry
        Registry of each client's node and of the connected nodes.
    layout
        Layout of the model.
    task
        Task with the metrics by which clients evaluate models.
    sketch
        Sketch (random projection) by which the updates from disjoint parts of a client's data are
        compared; None if whole updates are compared.
    wait
        Seconds to wait for any client, if all clients disconnect during a round.
    secure
        Secure aggregation, by which the server receives only sums of updates; None if the server
        receives each update separately.
    download
        Encoding of the models that clients receive to train, one of
        :data:`~fedclade.channel.DENSE_ENCODINGS`.
    stream_buffer
        Bytes of the updates that a server which streams collects before it adds them up.
    largest_in_memory
        Bytes of the updates of a query above which a server that does not stream stores them in a
        file.
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
        *,
        download: str = "float32",
        stream_buffer: int = STREAM_BUFFER,
        largest_in_memory: float = math.inf,
    ) -> None:
        self._stream_buffer = stream_buffer
        self._largest_in_memory = largest_in_memory
        self._memory = ReusedMemory()
        self._exchange = exchange
        self._registry = registry
        self._wait = wait
        self.layout = layout
        self._task = task
        self._structure = wire.layout_digest(layout)
        self._sketch = sketch
        self._backoff = Backoff()
        self._secure = secure
        self._download = download
        self._scored: dict[tuple[int, Split], int] = {}
        """Number of examples on which each client is evaluated, by client and split of the data.

        The number never changes, so each reply is checked against the first reply.
        """

    @property
    def engine(self) -> str:
        """Engine of local training: always "auto", since each client chooses its own engine."""
        return "auto"

    @property
    def engine_taken(self) -> str | None:
        """Engine that local training uses: always None, since clients do not report it."""
        return None

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients that ever joined, in a fixed order."""
        return self._registry.clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples that each client registered with."""
        return self._registry.clients.sizes

    def handle_updates(self, query: TrainQuery, sink: Sink | None = None) -> Updates:
        """Let clients train; return the updates, or gradients, of the clients that reply.

        Each client starts from the model that the query assigns to it.

        Parameters
        ----------
        query
            Training query.
        sink
            Function that receives the updates in small batches as they arrive, so that the server
            need not store all of them; None to return all updates.

        Raises
        ------
        ConfigError
            If the work that the query requests is possible in simulations only.
        """
        check_work_travels(query)
        kind = query.kind
        ids = query.ids
        this_round = query.round
        sent = ModelsSent.of(query, self._download, self.layout.n_parameters)
        values = {**training_values(query, self._sketch), **sent.values}
        if self._secure is not None and query.work.sends_update:
            updates = secure_updates(
                self._secure,
                self,
                query,
                sent=sent,
                values=values,
                members=self._member_properties,
                n_parameters=self.layout.n_parameters,
            )
            check_allowed(kind, ids, updates.left_out, len(self._registry.connected))
            return updates
        repeated = {name: values[name] for name in ("round", "query", "purpose")}
        # Clients with the same vectors get the same object, which is sent to a SuperLink once.
        content_of = {
            id(vectors): self.content(kind, values, vectors) for vectors in sent.different
        }
        contents = {client: content_of[id(vectors)] for client, vectors in sent.vectors.items()}
        expected = {
            client: {"what": kind, **repeated, "model": name} for client, name in sent.names.items()
        }
        length, n_parameters = self._reply_sizes(query)
        largest = max(encoded_bytes(length, encoding, n_parameters) for encoding in ENCODINGS)
        left_out: dict[int, str] = {}

        def read(client: int, content: Content) -> UpdateReply:
            return read_update(
                content,
                length=length,
                n_parameters=n_parameters,
                dtype=self.layout.dtype,
                size=examples_trained_on(query, self._registry.clients.sizes[client]),
                expected=expected[client],
                components=len(query.models.vectors) if query.work.mixture else 0,
            )

        replies = self.request(
            contents,
            MessageType.TRAIN,
            group=str(this_round.number),
            read=read,
            left_out=left_out,
            largest=largest,
        )
        updates = self._collect_updates(query, replies, left_out, sink)
        check_allowed(kind, ids, left_out, len(self._registry.connected))
        return updates

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Return the scores of each client's models on a split of its own data.

        A client receives all of its models in one message.
        """
        if isinstance(query, ChoiceQuery):
            return self._query_choices(query)
        ids = query.ids
        split = query.split
        rows: dict[int, list[int]] = {}
        for client, row in zip(ids, query.assignment, strict=True):
            rows.setdefault(client, []).append(row)
        arrays = wire.raw_vectors(query.models, query.assignment)
        mixture_arrays: Mapping[str, Array] = {}
        if query.mixture is not None:
            mixture_arrays = of_mixture(query.models, query.mixture)
        contents: dict[int, RecordDict] = {}
        # Clients with the same models get the same object, which is sent to a SuperLink once.
        content_of: dict[tuple[int, ...], RecordDict] = {}
        left_out: dict[int, str] = {}
        for client, client_rows in rows.items():
            # Models are large, so they are not sent to a client that has registered that it does
            # not report scores. Scores on training data are always requested, since an algorithm
            # that needs them must receive the client's own refusal.
            if split != "train" and not self._registry.discloses_scores(client):
                left_out[client] = DISCLOSES_NO_SCORES
                continue
            models = tuple(client_rows)
            if models not in content_of:
                sent = mixture_arrays or {
                    str(k): arrays[row] for k, row in enumerate(models) if row != OWN
                }
                values = {
                    "split": split,
                    "own": OWN in models,
                    "compares": query.compares,
                    **as_values(query.models, query.mixture),
                }
                content_of[models] = self.content("evaluate", values, sent)
            contents[client] = content_of[models]
        scores = dict[int, list[Scores]]()
        wins = dict[int, list[int]]()
        smallest_loss = 0.0 if self._task.has_nonnegative_loss else -LARGEST_LOSS

        def read(client: int, content: Content) -> list[Scores]:
            known = self._examples(client, split)
            found = read_scores(
                content, len(rows[client]), self._task.metrics, known, smallest_loss=smallest_loss
            )
            if query.compares:
                wins[client] = read_wins(content, len(found), found[0][2])
            return found

        replies = self.request(
            contents, MessageType.EVALUATE, group=f"evaluate {split}", read=read, left_out=left_out
        )
        for client, client_scores in replies:
            self._scored[client, split] = client_scores[0][2]
            scores[client] = client_scores
        if split == "train":  # a round depends on these scores; all other scores only describe it
            check_allowed("evaluate", [*rows], left_out, len(self._registry.connected))
        return evaluation_of(ids, scores, wins, metrics=self._task.metrics, left_out=left_out)

    def _query_choices(self, query: ChoiceQuery) -> Evaluation:
        """Return an evaluation that states which of its models each client has chosen.

        A client receives all of its models in one message. In the evaluation, ``wins`` is 1 for the
        model that a client has chosen, and 0 for its other models. All scores and losses are NaN.
        """
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

        replies = self.request(
            contents, MessageType.QUERY, group="choose", read=read, left_out=left_out
        )
        chosen = dict(replies)
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
        """Return the clients' replies to a query about their data.

        Raises
        ------
        ConfigError
            If the query is neither a row query nor a query for statistics.
        """
        if isinstance(query, RowQuery):
            return cast("R", self._rows(query))
        if isinstance(query, StatisticsQuery):
            return cast("R", self._statistics(query))
        raise ConfigError(
            f"a {type(query).__name__} cannot be sent over a network; make it a subclass of "
            "fedclade.RowQuery, or run a simulation"
        )

    def _rows(self, query: RowQuery) -> Tensor:
        """Return each client's reply to a row query, one row per client of the query.

        The row of a client that does not reply consists of zeros.
        """
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

        replies = self.request(
            contents,
            MessageType.QUERY,
            group=query.kind,
            read=read,
            left_out=left_out,
            largest=largest_reply(query, shape),
        )
        for client, row in replies:
            rows[place_of[client]] = row
        check_allowed(query.kind, query.ids, left_out, len(self._registry.connected))
        return rows

    def _statistics(self, query: StatisticsQuery) -> Statistics:
        """Return the sum of all clients' statistics; raise an UpdateError if too few reply."""
        clients = self._registry.clients
        content = self.content(query.kind, {})
        columns = query.targets
        if query.inputs:
            columns += math.prod(clients.schema.input_shape)
        return summed(query, clients.sizes, columns, content=content, ask=self.request)

    def content(
        self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None
    ) -> RecordDict:
        """Return the content of a request to clients about this run's model.

        Parameters
        ----------
        kind
            Kind of the request, such as ``train``.
        values
            Plain values of the request, by name.
        vectors
            Vectors of the request, such as models, by name.
        """
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

        Clients that are disconnected, or whose last replies were late, receive no request.

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
            If no client is connected or reconnects in time. A request for scores then yields
            nothing instead, since a run can continue without scores.
        """
        if not self._registry.wait_for_any(self._wait) and kind != MessageType.EVALUATE:
            raise UpdateError(
                "all clients are disconnected, and no client has reconnected within "
                f"{self._wait:g} s; start the SuperNodes again, and then the server with the same "
                "folder"
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
            if answer == TOO_LATE:
                self._backoff.late(client)
            else:
                self._backoff.reset(client)
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

    def _collect_updates(
        self,
        query: TrainQuery,
        replies: Iterator[tuple[int, UpdateReply]],
        left_out: Mapping[int, str],
        sink: Sink | None,
    ) -> Updates:
        """Collect and check the updates of a training query as they arrive.

        Parameters
        ----------
        query
            Training query.
        replies
            Clients with their replies, in order of arrival.
        left_out
            Reason of each client that is left out; complete once all replies are read.
        sink
            Function that receives the updates in batches; None to collect all of them.

        Returns
        -------
        Updates
            Without a sink, all updates in the order of the query's clients; with a sink, the last,
            incomplete batch.
        """
        length, _ = self._reply_sizes(query)
        # Results must not depend on the order in which replies arrive. So the rows have the order of
        # the query's clients, grouped by the model from which they started: the updates of a
        # cluster then follow each other, and the cluster need not copy them.
        if sink is None:
            by_model = sorted(
                zip(query.models.start, range(len(query.ids)), query.ids, strict=True)
            )
            place_of = {client: place for place, (*_, client) in enumerate(by_model)}
            buffer = UpdateBuffer(
                len(query.ids),
                length,
                query.models.vectors,
                self._largest_in_memory,
                memory=self._memory,
            )
            for client, reply in replies:
                buffer.put(client, reply, place_of[client])
            return self._checked(buffer, query, left_out)
        rows = streamed_at_once(length * query.models.vectors.itemsize, buffer=self._stream_buffer)
        buffer: UpdateBuffer | None = None
        for client, reply in replies:
            if buffer is None:
                buffer = UpdateBuffer(rows, length, query.models.vectors, memory=self._memory)
            buffer.put(client, reply)
            if buffer.full:
                sink(self._checked(buffer, query, {}))
                buffer = None  # so that the next buffer can use its memory
        if buffer is None:
            buffer = UpdateBuffer(0, length, query.models.vectors)
        return self._checked(buffer, query, left_out)

    def _checked(
        self, buffer: UpdateBuffer, query: TrainQuery, left_out: Mapping[int, str]
    ) -> Updates:
        """Return the usable updates in a buffer.

        If a query compares the updates from disjoint parts of each client's data, every client has
        appended the values for the comparison to its update. They are separated from the update
        here. ``left_out`` contains, for each client without a valid reply, the reason.
        """
        updates = buffer.checked(self._reply_sizes(query)[1], query.round.number)
        updates = unpack_parts(updates, query)
        return replace(updates, left_out={**left_out, **updates.left_out})

    @property
    def _member_properties(self) -> Members:
        """Registered number of examples and public key of each client, for secure aggregation."""
        return Members(self._registry.clients.sizes, self._registry.keys)

    def _reply_sizes(self, query: TrainQuery) -> tuple[int, int]:
        """Return the number of entries of a reply's vector, and its number of parameters.

        The vector has S entries for the parameters and buffers of a model. It has more entries if
        it contains all models of a mixture, or values by which the server compares updates from
        disjoint parts of the data. It is empty if clients send no update.
        """
        if not query.work.sends_update:
            return 0, 0
        if query.work.mixture is not None:
            return length_of(query, self.layout, self._registry.clients.schema.labels)
        n_parameters = self.layout.n_parameters
        if (compared := query.work.compared_splits) is None:
            return self.layout.size, n_parameters
        compared_entries = self._sketch.dim if self._sketch else n_parameters
        return self.layout.size + compared.count * compared_entries, n_parameters

    def _examples(self, client: int, split: Split) -> int | None:
        """Return the number of examples of a client in a split of its data; None if unknown.

        Replies with scores are checked against this number.
        """
        size = self._registry.clients.sizes[client]
        if split == "train" and self._task.kind not in DENSE and largest_of_class(size) == size:
            return size
        return self._scored.get((client, split))
