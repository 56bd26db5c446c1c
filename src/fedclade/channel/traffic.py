"""What travels between clients and server, and how long clients take."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from time import perf_counter

from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    Evaluation,
    EvaluationQuery,
    SubspaceQuery,
    UpdateQuery,
    Updates,
)


class Meter:
    """What travelled between clients and server so far, and how long the server waited for clients.

    Attributes
    ----------
    bytes_up, bytes_down
        What all clients sent, and received.
    seconds_train, seconds_evaluate
        Of the calls.
    """

    def __init__(self) -> None:
        self.bytes_up = self.bytes_down = 0
        self.seconds_train = self.seconds_evaluate = 0.0

    def readings(self) -> dict[str, float]:
        """Return what the meter shows, by column of ``metrics.parquet``."""
        return dict(vars(self))

    def since(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return what was used since a reading; of the seconds that went by, the server spent what clients did not."""
        used = {name: value - before[name] for name, value in self.readings().items()}
        server = seconds - used["seconds_train"] - used["seconds_evaluate"]
        return {**used, "seconds_server": server, "seconds": seconds}

    @contextmanager
    def training(self) -> Generator[None]:
        """Count the seconds of the block as clients' training."""
        start = perf_counter()
        yield
        self.seconds_train += perf_counter() - start

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Count the seconds of the block as clients' evaluation."""
        start = perf_counter()
        yield
        self.seconds_evaluate += perf_counter() - start


class Timing(Middleware):
    """Counts the seconds that clients take.

    Parameters
    ----------
    meter
        What counts them.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Count as training."""
        with self._meter.training():
            return ask(query)

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Count as evaluation."""
        with self._meter.evaluating():
            return ask(query)

    def subspaces(self, query: SubspaceQuery, ask: Ask) -> Tensor:
        """Count as training."""
        with self._meter.training():
            return ask(query)


class Traffic(Middleware):
    """Counts the bytes that would travel between simulated clients and the server.

    A client receives a model before it trains, and a second one where the proximal term pulls it towards another, and
    sends an update back, unless the round says that less travels; gradients are taken at a model that it already has.
    Evaluation is not counted, since a client has its model anyway; but on training data, which is how a client chooses
    among several, each of them is sent to it first. A client that drops out has received what it was asked with, and
    sends nothing; what is too late or not usable was sent all the same.

    Parameters
    ----------
    meter
        What counts them.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Count models down and updates up."""
        updates, models, travels = ask(query), query.models, query.round.communicates
        if query.kind == "train" and travels == "all":
            pulled_to = query.anchors if query.anchors is not None and query.round.spec.mu else query.assignment
            sent = len(query.ids) + sum(a != row for a, row in zip(pulled_to, query.assignment, strict=True))
            self._meter.bytes_down += sent * models[0].nbytes
        if query.kind == "gradients" or travels != "nothing":
            self._meter.bytes_up += len(updates.senders) * updates.required_deltas.shape[1] * models.itemsize
        return updates

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Count models down, where clients choose among them."""
        if query.split == "train":
            self._meter.bytes_down += len(query.ids) * query.models[0].nbytes
        return ask(query)

    def subspaces(self, query: SubspaceQuery, ask: Ask) -> Tensor:
        """Count vectors up."""
        vectors = ask(query)
        self._meter.bytes_up += vectors[vectors.flatten(1).any(dim=1)].nbytes  # all zeros where none came
        return vectors
