"""Clients of a grid that run a plain ClientApp, as an algorithm queries them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from torch import Tensor

from fedclade.algorithms import Algorithm, State
from fedclade.channel import Channel
from fedclade.core import (
    DROPPED_OUT,
    TOO_LATE,
    Clients,
    DataQuery,
    Disconnected,
    DistanceToAnchor,
    Evaluation,
    EvaluationQuery,
    Event,
    Layout,
    ParameterTree,
    R,
    Reconnected,
    Round,
    Sink,
    SplitPart,
    TrainQuery,
    UpdateError,
    Updates,
    Workers,
)
from fedclade.flower.grid_clients import Backoff, StreamSwitch
from fedclade.flower.replies import MOST_EXAMPLES, Scores, UpdateReply, evaluation_of
from fedclade.flower.strategy.app_exchange import AppExchange, AppRequest, only_record
from fedclade.flower.strategy.app_nodes import AppNodes
from fedclade.flower.strategy.app_queries import check_query
from fedclade.flower.strategy.array_model import ArrayModel
from fedclade.flower.strategy.parts import PartSent
from fedclade.flower.strategy.score_keys import ScoreKeys, find_train_loss, read_number
from fedclade.flower.update_buffer import ReusedMemory, UpdateBuffer, streamed_at_once
from fedclade.flower.wire import clean
from fedclade.runs import ComingAndGoing

SERVER_ROUND = "server-round"
"""Name of the round's number in the config of a message, as Flower's own strategies use it."""


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """Names of records and of the weight in messages, and the user's configs.

    Parameters
    ----------
    arrays, config, weight
        Name of the record of arrays, of the config, and of the metric with the number of examples.
    train_config, evaluate_config
        Values that every request to train or to evaluate contains.
    """

    arrays: str = "arrays"
    config: str = "config"
    weight: str = "num-examples"
    train_config: ConfigRecord = field(default_factory=ConfigRecord)
    evaluate_config: ConfigRecord = field(default_factory=ConfigRecord)

    def content(
        self, arrays: ArrayRecord, config: ConfigRecord, number: int, values: Mapping[str, int]
    ) -> RecordDict:
        """Return the content of a request: the arrays, and the user's config with further values."""
        given = ConfigRecord({**config, SERVER_ROUND: number, **values})
        return RecordDict({self.arrays: arrays, self.config: given})


@dataclass(eq=False)
class RoundReplies:
    """Metrics of the replies in one round, without arrays, by client."""

    _train: list[tuple[int, RecordDict]] = field(default_factory=list[tuple[int, RecordDict]])
    _evaluate: dict[int, RecordDict] = field(default_factory=dict[int, RecordDict])

    # Both lists have the order of clients: sums of metrics must not depend on the order in which
    # replies arrive.

    @property
    def train(self) -> list[RecordDict]:
        """Replies to requests to train, in the order of clients."""
        return [content for _, content in sorted(self._train, key=lambda each: each[0])]

    @property
    def evaluate(self) -> list[RecordDict]:
        """Last reply of each client to a request to evaluate, in the order of clients."""
        return [content for _, content in sorted(self._evaluate.items())]

    def add_training(self, client: int, content: RecordDict) -> None:
        """Add a client's reply to a request to train."""
        self._train.append((client, content))

    def add_evaluation(self, client: int, content: RecordDict) -> None:
        """Add a client's reply to a request to evaluate, in place of an earlier one."""
        self._evaluate[client] = content


class AppClients(Workers):
    """Clients of a grid that run a plain ClientApp.

    A training query becomes a message of type ``train`` with the arrays of a model and the config;
    an evaluation becomes a message of type ``evaluate`` for each model of a client. Every reply is
    checked. A client with an invalid reply, or with no reply in time, is left out, and the reason
    is reported.

    Parameters
    ----------
    exchange
        Sender of requests, and receiver of replies.
    nodes
        Registry of the clients and their nodes.
    model
        Names, shapes and types of the model's arrays.
    messages
        Names in messages, and the user's configs.
    keys
        Names of the metrics by which clients are scored.
    evaluates
        Whether clients are evaluated after rounds.
    largest_in_memory
        Bytes of the updates of a query above which a server that does not stream stores them in a
        file.

    Attributes
    ----------
    number
        Number of the current round.
    replies
        Metrics of the replies in the current round.
    """

    def __init__(
        self,
        exchange: AppExchange,
        nodes: AppNodes,
        model: ArrayModel,
        messages: MessageFormat,
        keys: ScoreKeys,
        *,
        evaluates: bool = True,
        largest_in_memory: float = math.inf,
    ) -> None:
        self._largest_in_memory = largest_in_memory
        self._memory = ReusedMemory()
        self._exchange = exchange
        self._nodes = nodes
        self._model = model
        self._messages = messages
        self._keys = keys
        self._evaluates = evaluates
        self._backoff = Backoff()
        self.layout: Layout = model.layout
        self.number = 0
        self.replies = RoundReplies()

    @property
    def engine(self) -> str:
        """Engine of local training: always "auto", since each ClientApp trains by itself."""
        return "auto"

    @property
    def engine_taken(self) -> str | None:
        """Engine that local training uses: None, since it is unknown."""
        return None

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients that ever joined, in a fixed order."""
        return self._nodes.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples that each client has last reported."""
        return self._nodes.sizes

    def begin(self, number: int) -> None:
        """Begin a round: forget the replies of the round before."""
        self.number = number
        self.replies = RoundReplies()

    def handle_updates(self, query: TrainQuery, sink: Sink | None = None) -> Updates:
        """Let clients train; return the updates of the clients that reply.

        Raises
        ------
        UnansweredQueryError
            If a plain ClientApp cannot do the work.
        """
        check_query(query)
        vectors = query.models.vectors
        base = query.models.start
        if isinstance(query.work.reply, DistanceToAnchor) and query.models.anchor is not None:
            base = query.models.anchor
        base_of = dict(zip(query.ids, base, strict=True))
        records = {row: self._model.record(vectors[row]) for row in set(query.models.start)}
        left_out: dict[int, str] = {}
        requests: list[AppRequest] = []
        for client, row in zip(query.ids, query.models.start, strict=True):
            content = self._messages.content(
                records[row],
                self._messages.train_config,
                query.round.number,
                _name_part(query, client),
            )
            requests.append(AppRequest(client, self._nodes.node(client), content))

        def read(content: RecordDict, client: int) -> UpdateReply:
            return self._read_update(content, vectors[base_of[client]], query, client)

        replies = self._request(requests, MessageType.TRAIN, str(query.round.number), left_out)
        at_once = streamed_at_once(self.layout.size * vectors.itemsize)
        buffer = UpdateBuffer(
            len(query.ids) if sink is None else at_once,
            self.layout.size,
            vectors,
            math.inf if sink is not None else self._largest_in_memory,
            memory=self._memory,
        )
        place_of = {client: place for place, client in enumerate(query.ids)}
        n_parameters = self.layout.n_parameters
        for request, content in replies:
            client = request.client
            try:
                reply = read(content, client)
            except UpdateError as error:
                left_out[client] = self._name_node(client, error)
                continue
            # Without a sink, rows have the order of the query's clients: results must not depend on
            # the order in which replies arrive.
            buffer.put(client, reply, place_of[client] if sink is None else None)
            if sink is not None and buffer.full:
                sink(buffer.checked(n_parameters, query.round.number))
                del buffer  # so that the next buffer can use its memory
                buffer = UpdateBuffer(at_once, self.layout.size, vectors, memory=self._memory)
        updates = buffer.checked(n_parameters, query.round.number)
        return replace(updates, left_out={**left_out, **updates.left_out})

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Return the scores of each client's models on the data on which its ClientApp evaluates.

        A ClientApp has one set of data for evaluation, so queries about training data are answered
        on it, too.

        Raises
        ------
        UnansweredQueryError
            If a plain ClientApp cannot reply.
        UpdateError
            If clients choose models by their losses, and return none.
        """
        check_query(query)
        is_of_round = query.split == "test"
        metrics = (self._keys.metric,)
        if is_of_round and not self._evaluates:
            return evaluation_of((), {}, {}, metrics, {})
        if not is_of_round and self._keys.loss is None:
            raise UpdateError(
                "clients should choose a model by its loss, but return no loss when they evaluate; "
                "return a metric such as 'eval_loss', and name it as loss_key"
            )
        rows: dict[int, list[int]] = {}
        for client, row in zip(query.ids, query.assignment, strict=True):
            rows.setdefault(client, []).append(row)
        left_out: dict[int, str] = {}
        found: dict[int, dict[int, Scores]] = {client: {} for client in rows}
        requests = self._requests_to_evaluate(rows, query.models)
        group = f"evaluate {self.number}"
        for request, content in self._request(requests, MessageType.EVALUATE, group, left_out):
            client = request.client
            try:
                found[client][request.place] = self._read_scores(content)
            except UpdateError as error:
                left_out[client] = self._name_node(client, error)
                continue
            if is_of_round:
                self.replies.add_evaluation(client, content)
        # A client replies for all of its models or for none.
        scores = {
            client: [each for _, each in sorted(of_client.items())]
            for client, of_client in found.items()
            if len(of_client) == len(rows[client]) and client not in left_out
        }
        return evaluation_of(query.ids, scores, {}, metrics, left_out)

    def handle_data(self, query: DataQuery[R]) -> R:
        """Refuse a query about the clients' data, by an UnansweredQueryError."""
        check_query(query)
        raise NotImplementedError  # check_query has raised already

    def _requests_to_evaluate(
        self, rows: Mapping[int, Sequence[int]], models: Tensor
    ) -> list[AppRequest]:
        """Return the requests to evaluate the models of each client's rows."""
        used = {row for of_client in rows.values() for row in of_client}
        records = {row: self._model.record(models[row]) for row in used}
        requests: list[AppRequest] = []
        for client, of_client in rows.items():
            for place, row in enumerate(of_client):
                config = self._messages.evaluate_config
                content = self._messages.content(records[row], config, self.number, {})
                requests.append(AppRequest(client, self._nodes.node(client), content, place))
        return requests

    def _request(
        self, requests: Sequence[AppRequest], kind: str, group: str, left_out: dict[int, str]
    ) -> Iterator[tuple[AppRequest, RecordDict]]:
        """Send requests; yield each with the content of its reply.

        Clients that are disconnected, or whose last replies were late, receive no request. The
        reason of a client without a reply is written to ``left_out``.
        """
        connected = set(self._nodes.connected)
        asked = {request.client for request in requests}
        left_out |= dict.fromkeys(asked - connected, DROPPED_OUT)
        left_out |= self._backoff.skipped(asked & connected, connected)
        sent = [request for request in requests if request.client not in left_out]
        late: set[int] = set()
        replied: set[int] = set()
        for request, reply in self._exchange.ask(sent, kind, group):
            client = request.client
            if not isinstance(reply, str):
                replied.add(client)
                yield request, reply
                continue
            if reply == TOO_LATE:
                late.add(client)
            plain = (DROPPED_OUT, TOO_LATE)
            left_out[client] = reply if reply in plain else self._name_node(client, reply)
        # A client may have several requests in one query, which count as one late reply.
        for client in replied - late:
            self._backoff.reset(client)
        for client in late:
            self._backoff.late(client)

    def _name_node(self, client: int, reason: object) -> str:
        """Return the reason why a client is left out, with its node, safe for tables and logs."""
        return f"node {self._nodes.node(client)}: {clean(str(reason))}"

    def _read_update(
        self, content: RecordDict, base: Tensor, query: TrainQuery, client: int
    ) -> UpdateReply:
        """Check and read a reply to a request to train.

        Parameters
        ----------
        content
            Content of the reply.
        base
            The model ``[S]`` from which the update is counted.
        query, client
            The query, and the id of the client.
        """
        arrays = content.array_records[only_record(content, "ArrayRecord")]
        metrics = read_metrics(content)
        size = read_size(metrics, self._messages.weight)
        is_part = isinstance(query.work.data, SplitPart)
        if is_part:
            _check_part(size, self._nodes.sizes[client])
        else:
            self._nodes.sizes[client] = size
        update = self._model.read(arrays).to(base) - base
        self.replies.add_training(client, without_arrays(content))
        return UpdateReply(size, find_train_loss(metrics), update)

    def _read_scores(self, content: RecordDict) -> Scores:
        """Check and read a reply to a request to evaluate: the score, the loss and the examples."""
        metrics = read_metrics(content)
        size = read_size(metrics, self._messages.weight)
        score, loss = self._keys.read(metrics)
        return [score], loss, size


def read_metrics(content: RecordDict) -> MetricRecord:
    """Return the metrics of a reply; raise an UpdateError if it has not exactly one record."""
    return content.metric_records[only_record(content, "MetricRecord")]


def read_size(metrics: MetricRecord, weight: str) -> int:
    """Return the number of examples of a reply, at least 1.

    Raises
    ------
    UpdateError
        If it is missing, not a number, less than 1, or more than 2**53.
    """
    size = read_number(metrics, weight)
    if not 1 <= size <= MOST_EXAMPLES:  # NaN is out of range, too
        raise UpdateError(
            f"the metric {weight!r} should be a number of examples from 1 to 2**53, got {size:g}"
        )
    return round(size)


def without_arrays(content: RecordDict) -> RecordDict:
    """Return the metrics of a reply without its arrays, which would take memory."""
    return RecordDict(dict(content.metric_records))


def _name_part(query: TrainQuery, client: int) -> Mapping[str, int]:
    """Return the values of a config that name the part of the data on which a client trains."""
    if not isinstance(query.work.data, SplitPart):
        return {}
    part = PartSent(query.work.data, client, query.round.seed, query.round.number)
    return part.values()


def _check_part(size: int, whole: int) -> None:
    """Check that a client has trained on a part of its data, and not on all of it.

    Raises
    ------
    UpdateError
        If it reports as many examples as for all of its data.
    """
    if size >= whole > 1:
        raise UpdateError(
            f"the client should train on a part of its data, but reports {size} examples, and it "
            f"has {whole}; in the function that trains, call "
            "fedclade.flower.part_of(dataset, msg.content['config'])"
        )


class AppMembers(Channel, ComingAndGoing):
    """Clients that may join before any round, and may disconnect for a while or for good.

    A disconnected client stays in its cluster, and cohorts are drawn from the connected clients.

    Parameters
    ----------
    clients
        Clients that reply to queries, with all middleware.
    workers
        The same clients without middleware.
    nodes
        Registry of the clients and their nodes.
    folder
        Folder of the run, in which the nodes are saved; None without a folder.
    switch
        Switch to a server that streams when more clients have joined; None: the server does not
        change.
    """

    def __init__(
        self,
        clients: Clients,
        workers: AppClients,
        nodes: AppNodes,
        folder: Path | None,
        *,
        switch: StreamSwitch | None = None,
    ) -> None:
        super().__init__(clients)
        self._switch = switch
        self._workers = workers
        self._nodes = nodes
        self._folder = folder
        self._before: frozenset[int] | None = None
        # all clients that were connected in an earlier round, or before an interruption
        self._seen = frozenset(nodes.ids)

    @property
    def away(self) -> frozenset[int]:
        """Ids of the clients that were disconnected when the current round began."""
        return frozenset(self._nodes.ids).difference(self._nodes.connected)

    @property
    def present(self) -> int | None:
        """Number of connected clients."""
        return len(self._nodes.connected)

    def begin(
        self, algorithm: Algorithm, state: State, this_round: Round
    ) -> tuple[State, list[Event]]:
        """Begin a round: look which nodes are connected, and add new clients to the clusters."""
        self._nodes.wait(1)
        self._workers.begin(this_round.number)
        if self._folder is not None:
            self._nodes.save(self._folder)
        if self._switch is not None:
            self._clients = self._switch.apply(self._clients, len(self.ids), this_round.number)
        events = self._list_changes()
        known = state.tree.leaf_of
        if new := [client for client in self._nodes.connected if client not in known]:
            state, joined = algorithm.join(state, new, self, this_round)
            events += joined
        return state, events

    def stay(self, number: int, tree: ParameterTree) -> None:
        """Wait until a client is connected, so that a finished round can be evaluated."""
        self._nodes.wait(1)
        self._workers.begin(number)

    def _list_changes(self) -> list[Event]:
        """List the events of clients that have disconnected or reconnected since the last round."""
        now = frozenset(self._nodes.connected)
        before = now if self._before is None else self._before
        self._before = now
        gone = tuple(sorted(before - now))
        back = tuple(client for client in sorted(now - before) if client in self._seen)
        self._seen |= now
        events: list[Event] = [Disconnected(0, gone)] if gone else []
        return [*events, Reconnected(0, back)] if back else events
