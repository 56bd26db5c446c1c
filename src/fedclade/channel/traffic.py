"""Traffic between clients and the server, and the time that clients take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter

from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    OWN,
    Ask,
    DataQuery,
    Evaluation,
    EvaluationQuery,
    Query,
    R,
    UpdateQuery,
    Updates,
    has_replied,
    models_of,
)


@dataclass
class Meter:
    """Bytes that all clients have sent and received, and seconds spent waiting for them."""

    bytes_up: int = 0
    bytes_down: int = 0
    seconds_train: float = 0.0
    seconds_evaluate: float = 0.0

    def readings(self) -> dict[str, float]:
        """Return the readings, by column of ``metrics.parquet``."""
        return asdict(self)

    def since(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the traffic and the times since a reading.

        Of the total ``seconds`` since then, the server spent the part that clients did not.
        """
        used = {name: value - before[name] for name, value in self.readings().items()}
        server = seconds - used["seconds_train"] - used["seconds_evaluate"]
        return {**used, "seconds_server": server, "seconds": seconds}


@dataclass(frozen=True)
class Timing(Middleware):
    """Middleware that counts the seconds of clients, separately for evaluation and the rest."""

    meter: Meter

    def __call__(self, query: Query[R], ask: Ask) -> R:
        """Count the seconds until the reply."""
        start = perf_counter()
        reply = ask(query)
        seconds = perf_counter() - start
        if isinstance(query, EvaluationQuery):
            self.meter.seconds_evaluate += seconds
        else:
            self.meter.seconds_train += seconds
        return reply


@dataclass(frozen=True)
class Traffic(Middleware):
    """Middleware that counts the bytes that would travel between simulated clients and the server.

    Before a client trains, it receives a model. It receives a second model if the proximal term
    pulls it towards another one, or if its local rule needs one. It sends an update back, unless
    the round specifies less communication. Gradients are taken at a model that the client already
    has. Before it trains a mixture, it receives all models of the mixture. A client that drops out
    has received its models and sends nothing. Replies that are late or unusable were sent and
    count.

    Evaluation is not counted, since a client has its model anyway. Exception: for an evaluation on
    training data, by which a client chooses among several models, each of them is first sent to the
    client.
    """

    meter: Meter

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Count models down and updates up."""
        updates = ask(query)
        models = query.models
        if query.kind == "train" and query.round.communicates in ("all", "models"):
            pulled_to = query.assignment
            if query.anchors is not None and (query.round.uses_anchors or query.shares):
                pulled_to = query.anchors
            rows = query.assignment
            sent = sum((row != OWN) + (a != row) for a, row in zip(pulled_to, rows, strict=True))
            if (mixture := query.mixture) is not None:
                sent = len(rows) * len(models)
                self.meter.bytes_down += len(rows) * (
                    0 if mixture.rates is None else mixture.rates.nbytes
                )
            self.meter.bytes_down += sent * models[0].nbytes
        if query.kind == "gradients" or query.round.sends_updates:
            self.meter.bytes_up += (
                len(updates.senders) * updates.required_deltas.shape[1] * models.itemsize
            )
        return updates

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Count models down if clients choose among them."""
        if query.split == "train":
            self.meter.bytes_down += len(query.ids) * query.models[0].nbytes
        return ask(query)

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Count models down and rows up.

        Single numbers are not counted, just as scores are not.
        """
        reply = ask(query)
        for model in models_of(query).values():
            self.meter.bytes_down += len(query.ids) * model.nbytes
        if isinstance(reply, Tensor) and reply.dim() > 1:
            self.meter.bytes_up += reply[has_replied(reply)].nbytes
        return reply
