"""What travels between clients and server, and how long clients take."""

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
    """The bytes that all clients sent and received so far, and the seconds that the server waited for them."""

    bytes_up: int = 0
    bytes_down: int = 0
    seconds_train: float = 0.0
    seconds_evaluate: float = 0.0

    def readings(self) -> dict[str, float]:
        """Return what the meter shows, by column of ``metrics.parquet``."""
        return asdict(self)

    def since(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return what was used since a reading; the server spent those of the ``seconds`` that clients did not."""
        used = {name: value - before[name] for name, value in self.readings().items()}
        server = seconds - used["seconds_train"] - used["seconds_evaluate"]
        return {**used, "seconds_server": server, "seconds": seconds}


@dataclass(frozen=True)
class Timing(Middleware):
    """Counts the seconds that clients take, to evaluate or for all else."""

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
    """Counts the bytes that would travel between simulated clients and the server.

    A client receives a model before it trains, and a second one where the proximal term pulls it
    towards another or its local rule needs one, and sends an update back, unless the round says
    that less travels; gradients are taken at a model that it already has. Evaluation is not
    counted, since a client has its model anyway; but on training data, which is how a client
    chooses among several, each of them is sent to it first. Before it trains a mixture, a client
    receives all models of it. One that drops out has received its models and sends nothing; what is
    too late or not usable was sent all the same.
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
        """Count models down, where clients choose among them."""
        if query.split == "train":
            self.meter.bytes_down += len(query.ids) * query.models[0].nbytes
        return ask(query)

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Count models down and rows up.

        Single numbers are not counted, as scores are not.
        """
        reply = ask(query)
        for model in models_of(query).values():
            self.meter.bytes_down += len(query.ids) * model.nbytes
        if isinstance(reply, Tensor) and reply.dim() > 1:
            self.meter.bytes_up += reply[has_replied(reply)].nbytes
        return reply
