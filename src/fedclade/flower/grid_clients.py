"""The ``Clients`` protocol over a Flower grid: a query becomes messages, and every answer is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from flwr.app import Array, MessageType, RecordDict
from torch import Tensor

from fedclade.channel import ENCODINGS, Sketch, encoded_bytes
from fedclade.core import (
    DROPPED_OUT,
    FORBIDS,
    OWN,
    TOO_LATE,
    ChoiceQuery,
    DescriptorQuery,
    Evaluation,
    EvaluationQuery,
    Layout,
    ShiftQuery,
    Split,
    Statistics,
    StatisticsQuery,
    SubspaceQuery,
    UpdateError,
    UpdateQuery,
    Updates,
    Workers,
)
from fedclade.flower import descriptors, shifts, wire
from fedclade.flower.backoff import Backoff
from fedclade.flower.exchange import AT_ONCE, Exchange
from fedclade.flower.models_sent import ModelsSent, as_values, length_of, of_mixture, training_values
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.policy import check_allowed
from fedclade.flower.replies import (
    Scores,
    UpdateReply,
    are_singular,
    evaluation_of,
    examples_trained_on,
    largest_of_class,
    read_choice,
    read_scores,
    read_update,
    read_wins,
)
from fedclade.flower.secure.rounds import secure_updates
from fedclade.flower.secure.setting import Members, SecureAggregation
from fedclade.flower.statistics import summed
from fedclade.flower.update_buffer import UpdateBuffer
from fedclade.flower.wire import Content
from fedclade.tasks import FittedTask

T = TypeVar("T")

DISCLOSES_NO_SCORES = (
    f'{FORBIDS} scores, as the client reported when it joined; to allow them, set disclose="scores", and name evaluate '
    "in allow, in its node config"
)


class GridClients(Workers):
    """Clients behind a Flower grid: one message to each node, with its own cluster's model.

    Every answer is checked as it arrives: it must be of the round, the query and the model that it was sent, of the
    right length, and finite. Clients that send something else, or nothing in time, are left out of the round, by name
    and with the reason. Late answers are discarded.

    Parameters
    ----------
    exchange
        Sends requests to nodes.
    registry
        Which client is behind which node, and which nodes are connected.
    layout
        Of the model.
    task
        By whose metrics clients are scored.
    sketch
        What the updates of parts of a client's data are compared by.
    wait
        Seconds to wait for any client, should all be gone in the middle of a round.
    secure
        By which updates are added up under masks; without, each is received by itself.
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
        self._exchange, self._registry, self._wait = exchange, registry, wait
        self.layout, self._task = layout, task
        self._structure = wire.layout_digest(layout)
        self._sketch = sketch
        self._backoff, self._secure = Backoff(), secure
        self._scored: dict[tuple[int, Split], int] = {}
        """Number of examples of a client's scores, on each split: it is always the same."""

    @property
    def engine(self) -> str:
        """Every client chooses its own."""
        return "auto"

    @property
    def engine_taken(self) -> str | None:
        """None: it is not known here."""
        return None

    @property
    def ids(self) -> Sequence[int]:
        """All clients that ever joined, in a fixed order."""
        return self._registry.clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples that each client registered with."""
        return self._registry.clients.sizes

    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Let each client train from its model, or take the gradient at it; return the updates of those that answer."""
        kind, ids, this_round = query.kind, query.ids, query.round
        sent = ModelsSent.of(query)
        values = training_values(query, self._sketch)
        if self._secure is not None and not query.is_secret:
            updates = secure_updates(self._secure, self, query, sent, values, self._members, self.layout.n_parameters)
            check_allowed(kind, ids, updates.left_out, len(self._registry.connected))
            return updates
        repeated = {name: values[name] for name in ("round", "query", "purpose")}
        contents = {client: self.content(kind, values, vectors) for client, vectors in sent.vectors.items()}
        expected = {client: {"what": kind, **repeated, "model": name} for client, name in sent.names.items()}
        length, n_parameters = self._shape(query)
        largest = max(encoded_bytes(length, encoding, n_parameters) for encoding in ENCODINGS)
        left_out: dict[int, str] = {}

        def read(client: int, content: Content) -> UpdateReply:
            size = examples_trained_on(query, self._registry.clients.sizes[client])
            components = len(query.models) if query.mixture else 0
            return read_update(content, length, n_parameters, self.layout.dtype, size, expected[client], components)

        replies = self.request(contents, MessageType.TRAIN, str(this_round.number), read, left_out, largest)
        updates = self._collected(query, replies, left_out)
        check_allowed(kind, ids, left_out, len(self._registry.connected))
        return updates

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Let each client evaluate its models on a split of its own data, all of them in one message."""
        if isinstance(query, ChoiceQuery):
            return self._choices(query)
        ids, split = query.ids, query.split
        rows: dict[int, list[int]] = {}
        for client, row in zip(ids, query.assignment, strict=True):
            rows.setdefault(client, []).append(row)
        arrays = wire.raw_vectors(query.models, query.assignment)
        together = of_mixture(query) if query.mixture else None
        contents: dict[int, RecordDict] = {}
        for client, mine in rows.items():
            sent = together or {str(k): arrays[row] for k, row in enumerate(mine) if row != OWN}
            said = {"split": split, "own": OWN in mine, "compares": query.compares, **as_values(query)}
            contents[client] = self.content("evaluate", said, sent)
        scores, wins = dict[int, list[Scores]](), dict[int, list[int]]()
        left_out: dict[int, str] = {}
        if split != "train":  # a refusal to train on is for its run to report
            for client in [client for client in contents if not self._registry.discloses_scores(client)]:
                del contents[client]  # models are large, and it would refuse them
                left_out[client] = DISCLOSES_NO_SCORES

        def read(client: int, content: Content) -> list[Scores]:
            found = read_scores(content, len(rows[client]), self._task.metrics, self._examples(client, split))
            if query.compares:
                wins[client] = read_wins(content, len(found), found[0][2])
            return found

        for client, mine in self.request(contents, MessageType.EVALUATE, f"evaluate {split}", read, left_out):
            self._scored[client, split] = mine[0][2]
            scores[client] = mine
        if split == "train":  # what a round is made of; scores only describe it
            check_allowed("evaluate", [*rows], left_out, len(self._registry.connected))
        return evaluation_of(ids, scores, wins, self._task.metrics, left_out)

    def _choices(self, query: ChoiceQuery) -> Evaluation:
        """Let each client choose the best of its models, all of them in one message."""
        rows: dict[int, list[int]] = {}
        for client, row in zip(query.ids, query.assignment, strict=True):
            rows.setdefault(client, []).append(row)
        arrays = wire.raw_vectors(query.models, query.assignment)
        contents: dict[int, RecordDict] = {}
        for client, client_rows in rows.items():
            contents[client] = self.content("choose", {}, {str(k): arrays[row] for k, row in enumerate(client_rows)})
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

    def handle_subspaces(self, query: SubspaceQuery) -> Tensor:
        """Let each client decompose its training inputs; those of a client that does not answer are all zeros."""
        ids, schema = query.ids, self._registry.clients.schema
        shape = (query.matrices(schema), math.prod(schema.input_shape), query.n_vectors)
        content = self.content("subspaces", {"vectors": query.n_vectors, "per_label": query.per_label})
        found = torch.zeros(len(ids), *shape)
        place_of = {client: place for place, client in enumerate(ids)}
        left_out: dict[int, str] = {}  # those clients are queried again, and reported then

        def read(client: int, content: Content) -> Tensor:
            content.has_only(("subspaces",))
            return wire.read_vector(content.vector("subspaces"), shape, torch.float32, "subspaces")

        contents, largest = dict.fromkeys(ids, content), 4 * math.prod(shape)
        for client, vectors in self.request(contents, MessageType.QUERY, "subspaces", read, left_out, largest):
            if are_singular(vectors):
                found[place_of[client]] = vectors
        check_allowed("subspaces", ids, left_out, len(self._registry.connected))
        return found

    def handle_statistics(self, query: StatisticsQuery) -> Statistics:
        """Let each client add up its training examples; an UpdateError unless most do."""
        clients, content = self._registry.clients, self.content("statistics", {})
        return summed(query, clients.sizes, math.prod(clients.schema.input_shape), content, self.request)

    def handle_shifts(self, query: ShiftQuery) -> Tensor:
        """Let each client compare its labels with those of before; who does not answer has not shifted."""
        query.labels(self._registry.clients.schema)
        content, connected = self.content("shifts", shifts.described(query)), len(self._registry.connected)
        return shifts.asked(query, content, self.request, connected)

    def handle_descriptors(self, query: DescriptorQuery) -> Tensor:
        """Let each client describe its training data; those of a client that does not answer are all zeros."""
        content = self.content("descriptors", descriptors.as_values(query), {"model": wire.raw_vector(query.model)})
        return descriptors.asked(query, content, self.request, self._registry)

    def content(self, kind: str, values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None) -> RecordDict:
        """Return the content of a request of a kind about this model."""
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
        """Send clients requests, and yield as they arrive what is read of their answers; note why others are left out.

        Clients that are gone, or were late before, are skipped. If none is connected, and none comes back in time, it
        is an UpdateError, but for scores: a run can do without.
        """
        if not self._registry.wait_for_any(self._wait) and kind != MessageType.EVALUATE:
            raise UpdateError(
                f"nobody is connected any more, and nobody came back within {self._wait:g} s; start the SuperNodes "
                "again, and then the server with the same folder"
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
        self, query: UpdateQuery, replies: Iterator[tuple[int, UpdateReply]], left_out: Mapping[int, str]
    ) -> Updates:
        """Return all updates in the order of the query; or, if it has a sink, those that it did not take."""
        length, _ = self._shape(query)
        if query.sink is None:  # whatever the order in which they arrive: results must not depend on that
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

    def _checked(self, buffer: UpdateBuffer, query: UpdateQuery, left_out: Mapping[int, str]) -> Updates:
        updates = buffer.checked(self._shape(query)[1], query.round.number)
        return replace(updates, left_out={**left_out, **updates.left_out})

    @property
    def _members(self) -> Members:
        return Members(self._registry.clients.sizes, self._registry.keys)

    def _shape(self, query: UpdateQuery) -> tuple[int, int]:
        """Return how long an update is, and how much of it is compared."""
        if query.is_secret:
            return 0, 0
        if query.mixture is not None:
            return length_of(query, self.layout, self._registry.clients.schema.labels)
        if query.round.replicates == 1 or not query.round.compares_parts:
            return self.layout.size, self.layout.n_parameters
        sketches = query.round.replicates * (self._sketch.dim if self._sketch else self.layout.n_parameters)
        return self.layout.size + sketches, self.layout.n_parameters

    def _examples(self, client: int, split: Split) -> int | None:
        """Return how many examples a client is scored on, if that is known."""
        size = self._registry.clients.sizes[client]
        if split == "train" and self._task.kind != "language" and largest_of_class(size) == size:
            return size
        return self._scored.get((client, split))
