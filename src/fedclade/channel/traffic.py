"""Middleware that counts the traffic between clients and server, training steps, and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    OWN,
    OWN_COLUMNS,
    STEPS_TAKEN,
    ClientWork,
    DataQuery,
    EvaluationQuery,
    Query,
    Round,
    TrainQuery,
    Updates,
    count_steps,
    has_replied,
    models_of,
)


@dataclass
class Meter:
    """Counts of all clients' bytes and training steps, and of the seconds that they took.

    ``bytes_up`` are bytes from clients to the server, and ``bytes_down`` from the server to
    clients. ``steps`` are the training steps that queries requested from clients, and
    ``cohort_steps`` the steps of one local training of each sampled client in each round, as in
    FedAvg. The seconds are those in which the server waited for clients to train or to evaluate.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    steps: int = 0
    cohort_steps: int = 0
    seconds_train: float = 0.0
    seconds_evaluate: float = 0.0

    def readings(self) -> dict[str, float]:
        """Return the current counts, by column name of ``metrics.parquet``."""
        return asdict(self)

    def since(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the traffic and the times since an earlier call of :meth:`readings`.

        Parameters
        ----------
        before
            Counts that the earlier call returned.
        seconds
            Time since then, in seconds. The part that was not spent waiting for clients counts as
            time of the server (``seconds_server``).
        """
        used = {name: value - before[name] for name, value in self.readings().items()}
        server = seconds - used["seconds_train"] - used["seconds_evaluate"]
        return {**used, "seconds_server": server, "seconds": seconds}


@dataclass
class Timing(Middleware):
    """Middleware that measures the seconds that the server waits for clients.

    Evaluations are measured separately; all other queries count as training.
    """

    meter: Meter
    _since: float = 0.0

    def before(self, query: Query[Any]) -> Query[Any]:
        """Start to measure the time that clients take for a query; return the query unchanged."""
        self._since = perf_counter()
        return query

    def after(self, query: Query[Any], reply: Any) -> Any:
        """Count the seconds that the server has waited for a reply; return the reply.

        If updates arrive in several groups, the method is called for each group, and counts the
        seconds since the group before.
        """
        now = perf_counter()
        seconds = now - self._since
        self._since = now
        if isinstance(query, EvaluationQuery):
            self.meter.seconds_evaluate += seconds
        else:
            self.meter.seconds_train += seconds
        return reply


@dataclass(frozen=True)
class StepCounting(Middleware):
    """Middleware that counts the training steps that clients are requested to take.

    A step is the update of a model by one mini-batch. It counts for each client to which a query is
    sent, whether the client replies or not, and again if the query is repeated. The steps are those
    of the settings of local training, except for a user's own code whose steps are known. A client
    that trains on several parts of its data takes the steps of all parts. The computation of a
    full-batch gradient counts as no step, and so does a repeated query that a client answers from
    memory. Clients are counted with their present number of examples, also if they train on
    examples from earlier rounds.

    Parameters
    ----------
    meter
        Meter to which the steps are added.
    sizes_in
        Function that returns each client's number of training examples in a round, by client id.
        Its parameter is the number of the round, from 1.
    """

    queries = (TrainQuery,)

    meter: Meter
    sizes_in: Callable[[int], Mapping[int, int]]

    def before(self, query: TrainQuery) -> TrainQuery:
        """Count the steps that a query requests; return the query unchanged."""
        sizes = self.sizes_in(query.round.number)
        self.meter.steps += count_steps(query.work, query.round.local, sizes, query.ids)
        return query

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Correct the count by the steps that clients have really taken; return the reply.

        Clients that replied from memory have taken none, and those with a user's own code may have
        taken other numbers of steps than the settings state.
        """
        remembered = [False] * len(reply.ids)
        if reply.remembered is not None:
            remembered = reply.remembered.tolist()
        own = reply.columns.get(STEPS_TAKEN)
        if own is None and not any(remembered):
            return reply.with_columns(remembered=None)
        sizes = self.sizes_in(query.round.number)
        for place, client in enumerate(reply.ids):
            planned = count_steps(query.work, query.round.local, sizes, [client])
            taken = planned if own is None else int(own[place])
            self.meter.steps += (0 if remembered[place] else taken) - planned
        return reply.with_columns(remembered=None)

    def add_cohort(self, cohort: Sequence[int], this_round: Round) -> None:
        """Count the steps of one local training of each client in a cohort.

        Parameters
        ----------
        cohort
            Ids of the clients sampled for the round.
        this_round
            The round, with its number and settings of local training.
        """
        sizes = self.sizes_in(this_round.number)
        self.meter.cohort_steps += count_steps(ClientWork(), this_round.local, sizes, cohort)


@dataclass(frozen=True)
class Traffic(Middleware):
    """Middleware that counts the bytes that would travel between simulated clients and the server.

    Before a client trains, it receives a model, unless the server has sent the models earlier in
    the round. The client receives a second model if training needs an anchor (a second vector of a
    model's size, as in a proximal term) other than the start model. The client sends an update
    back, unless the query requests none. A query for full-batch gradients sends no model, since
    the client already has the model at which the gradient is computed. Before a client trains a
    mixture, it receives all models of the mixture. A client that drops out has received its models
    and sends nothing. Late or unusable replies count, since they were sent.

    Evaluations are not counted, since a client has its model anyway. Exception: for an evaluation
    on training data, by which a client chooses among several models, each model is first sent to
    the client. Single numbers about the data are not counted, just as scores are not.
    """

    queries = (TrainQuery, EvaluationQuery, DataQuery)

    meter: Meter

    def before(self, query: Any) -> Any:
        """Count the bytes of the models that the server sends with a query; return the query."""
        if isinstance(query, TrainQuery):
            if not query.work.is_gradient and not query.models.sent_before:
                self.meter.bytes_down += _bytes_of_models(query)
        elif isinstance(query, EvaluationQuery):
            if query.split == "train":
                self.meter.bytes_down += len(query.ids) * query.models[0].nbytes
        else:
            for model in models_of(query).values():
                self.meter.bytes_down += len(query.ids) * model.nbytes
        return query

    def after(self, query: Any, reply: Any) -> Any:
        """Count the bytes of updates and of rows of numbers in a reply; return the reply."""
        if isinstance(query, TrainQuery):
            if query.work.sends_update:
                self.meter.bytes_up += _bytes_of_updates(query, reply)
        elif isinstance(query, DataQuery) and isinstance(reply, Tensor) and reply.dim() > 1:
            self.meter.bytes_up += reply[has_replied(reply)].nbytes
        return reply


def _bytes_of_models(query: TrainQuery) -> int:
    """Return the number of bytes of all models that clients receive before they train."""
    models = query.models.vectors
    rows = query.models.start
    if (mixture := query.work.mixture) is not None:
        of_rates = 0 if mixture.rates is None else mixture.rates.nbytes
        return len(rows) * (models.nbytes + of_rates)
    sent = sum(row != OWN for row in rows)
    if query.models.anchor is not None and query.work.needs_anchor:
        pairs = zip(query.models.anchor, rows, strict=True)
        sent += sum(anchor != row for anchor, row in pairs)
    return sent * models[0].nbytes


def _bytes_of_updates(query: TrainQuery, updates: Updates) -> int:
    """Return the number of bytes of all updates that clients have sent, usable or not.

    The vectors that a method adds to updates (columns) count as well, but not the columns that the
    library computes at the server.
    """
    length = updates.required_deltas.shape[1]
    if updates.parts is not None:
        length += updates.parts.shape[1:].numel()
    added = 0
    for name, column in updates.columns.items():
        if name not in (*OWN_COLUMNS, STEPS_TAKEN):
            added += column.shape[1:].numel() * column.itemsize
    return len(updates.senders) * (length * query.models.vectors.itemsize + added)
