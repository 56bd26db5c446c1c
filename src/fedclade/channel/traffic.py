"""What travels between clients and server, and how long clients take."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

from torch import Tensor

from fedclade.core import (
    Clients,
    ClientsWrapper,
    Evaluation,
    Round,
    Split,
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


class MeteredClients(ClientsWrapper):
    """Simulated clients with a meter: what would travel between them and the server, and how long they take.

    A client receives a model before it trains, and a second one where the proximal term pulls it towards another, and
    sends an update back, unless the round says that less travels; gradients are taken at a model that it already has.
    Evaluation is not metered, since a client has its model anyway; but on training data, which is how a client chooses
    among several, each of them is sent to it first. A client that drops out has received what it was asked with, and
    sends nothing; what is too late or not usable was sent all the same.

    Parameters
    ----------
    clients
        Those who do the work.

    Attributes
    ----------
    meter
        What it counts.
    """

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        self.meter = Meter()

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
    ) -> Updates:
        """Let each client train from its model; return the updates Δθ_i."""
        with self.meter.training():
            updates = self._clients.train(ids, models, assignment, this_round, anchors)
        if this_round.travels == "all":
            pulled_to = anchors if anchors is not None and this_round.spec.mu else assignment
            sent = len(ids) + sum(anchor != row for anchor, row in zip(pulled_to, assignment, strict=True))
            self.meter.bytes_down += sent * models[0].nbytes
        if this_round.travels != "nothing":
            self.meter.bytes_up += len(updates.senders) * updates.each.shape[1] * models.itemsize
        return updates

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients at each client's model."""
        with self.meter.training():
            updates = self._clients.gradients(ids, models, assignment, this_round)
        self.meter.bytes_up += len(updates.senders) * models[0].nbytes
        return updates

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data."""
        with self.meter.evaluating():
            evaluation = self._clients.evaluate(ids, models, assignment, split)
        if split == "train":
            self.meter.bytes_down += len(ids) * models[0].nbytes
        return evaluation

    def subspaces(self, ids: Sequence[int], n_vectors: int, per_label: bool) -> Tensor:
        """Let each client decompose its training inputs; return their left singular vectors ``[n, L, d, p]``."""
        with self.meter.training():
            vectors = self._clients.subspaces(ids, n_vectors, per_label)
        self.meter.bytes_up += vectors[vectors.flatten(1).any(dim=1)].nbytes  # of who does not answer all are zeros
        return vectors
