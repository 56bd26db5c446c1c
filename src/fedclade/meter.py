"""What travels between clients and server, and how long clients take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from torch import Tensor

from fedclade.clients import Clients, ClientsWrapper, Evaluation, Round, Split
from fedclade.updates import DROPPED_OUT, Updates


class MeteredClients(ClientsWrapper):
    """Clients with a meter: what travels between them and the server, and how long they take.

    A client receives a model before it trains, and a second one where the proximal term pulls it towards another, and
    sends an update back, unless the round says that less travels; gradients are taken at a model that it already has.
    Evaluation is not metered, since a client has its model anyway; but on training data, which is how a client chooses
    among several, each of them is sent to it first. A client that drops out has received what it was asked with, and
    sends nothing; what is too late or not usable was sent all the same.

    Parameters
    ----------
    clients
        Those who do the work.
    """

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        self._bytes_up = self._bytes_down = 0
        self._seconds_train = self._seconds_evaluate = 0.0

    def readings(self) -> dict[str, float]:
        """Return what the meter shows: bytes that all clients sent and received, and the seconds of their calls."""
        return {
            "bytes_up": self._bytes_up,
            "bytes_down": self._bytes_down,
            "seconds_train": self._seconds_train,
            "seconds_evaluate": self._seconds_evaluate,
        }

    def since(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return what was used since a reading; of the seconds that went by, the server spent what clients did not."""
        used = {name: value - before[name] for name, value in self.readings().items()}
        server = seconds - used["seconds_train"] - used["seconds_evaluate"]
        return {**used, "seconds_server": server, "seconds": seconds}

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
    ) -> Updates:
        """Let each client train from its model; return the updates Δθ_i."""
        start = perf_counter()
        updates = self._clients.train(ids, models, assignment, this_round, anchors)
        self._seconds_train += perf_counter() - start
        if this_round.travels == "all":
            pulled_to = anchors if anchors is not None and this_round.spec.mu else assignment
            sent = len(ids) + sum(anchor != row for anchor, row in zip(pulled_to, assignment, strict=True))
            self._bytes_down += sent * models[0].nbytes
        if this_round.travels != "nothing":
            self._bytes_up += _senders(updates) * models[0].nbytes
        return updates

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients at each client's model."""
        start = perf_counter()
        updates = self._clients.gradients(ids, models, assignment, this_round)
        self._seconds_train += perf_counter() - start
        self._bytes_up += _senders(updates) * models[0].nbytes
        return updates

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data."""
        start = perf_counter()
        evaluation = self._clients.evaluate(ids, models, assignment, split)
        self._seconds_evaluate += perf_counter() - start
        if split == "train":
            self._bytes_down += len(ids) * models[0].nbytes
        return evaluation

    def subspaces(self, ids: Sequence[int], n_vectors: int, per_label: bool) -> Tensor:
        """Let each client decompose its training inputs; return their left singular vectors ``[n, L, d, p]``."""
        start = perf_counter()
        vectors = self._clients.subspaces(ids, n_vectors, per_label)
        self._seconds_train += perf_counter() - start
        self._bytes_up += vectors[vectors.flatten(1).any(dim=1)].nbytes  # of who does not answer all are zeros
        return vectors


def _senders(updates: Updates) -> int:
    """Return how many clients sent an update, usable or not."""
    return len(updates.ids) + sum(why != DROPPED_OUT for why in updates.left_out.values())
