"""The world as an algorithm sees it: clients that can be asked to train and to evaluate, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedclade import rng
from fedclade.errors import UpdateError
from fedclade.local import LocalSpec

Split = Literal["train", "validation", "test"]


LARGEST_NORM = 1e18
"""Of an update: the product of two larger ones overflows float32, and no similarity could be computed."""


@dataclass(frozen=True)
class Round:
    """One communication round: what keys its random draws, and what clients are asked to do in it.

    Parameters
    ----------
    number
        Counted from 1.
    spec
        The local training.
    seed
        Of the run.
    purpose
        Sets the draws of a further query in the same round apart from those of the regular training.
    """

    number: int
    spec: LocalSpec
    seed: int = 0
    purpose: str = "train"

    @property
    def lr(self) -> float:
        """Step size of this round."""
        return self.spec.lr_at(self.number)

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the generator of what the server draws in this round."""
        return rng.generator(self.seed, purpose, self.number)


@dataclass(frozen=True, eq=False)
class Updates:
    """What n clients answered in one round, with D parameters and S = D + buffers entries in a model.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    sizes
        Their training examples |D_i|, float64 ``[n]``.
    deltas
        Weight updates Δθ_i (CFL eq. 1), ``[n, S]``.
    signatures
        What clients are compared by, ``[n, D]``: the update without its buffers.
    losses
        Mean training loss of each client in the round, ``[n]``.
    """

    ids: tuple[int, ...]
    sizes: Tensor
    deltas: Tensor
    signatures: Tensor
    losses: Tensor

    @classmethod
    def received(
        cls, ids: Sequence[int], sizes: Sequence[int], deltas: Tensor, n_parameters: int, losses: Tensor, number: int
    ) -> Updates:
        """Check what came from the clients, and only then make updates of it.

        Raises
        ------
        UpdateError
            If there is not one row for each client, or a row is not finite or too large to be compared; names the
            client and the round.
        """
        if deltas.ndim != 2 or len(deltas) != len(ids):
            shape = tuple(deltas.shape)
            raise UpdateError(f"round {number}: expected {len(ids)} updates, got a tensor of shape {shape}")
        bad = (~torch.isfinite(deltas)).sum(1).tolist()
        norms = torch.linalg.vector_norm(deltas, dim=1, dtype=torch.float64).tolist()
        for client, entries, norm in zip(ids, bad, norms, strict=True):
            if entries or norm > LARGEST_NORM:
                what = f"has {entries} of {deltas.shape[1]} entries that are NaN or infinite"
                what = what if entries else f"has norm {norm:.3g}, more than {LARGEST_NORM:.3g}"
                raise UpdateError(
                    f"round {number}: the update of client {client} {what}; its training diverged: lower local.lr, or "
                    "look at the client's data"
                )
        return cls(tuple(ids), torch.tensor(sizes, dtype=torch.float64), deltas, deltas[:, :n_parameters], losses)

    def of(self, members: Sequence[int]) -> Updates:
        """Return the updates of those members that answered, in the order of the members."""
        row = {client: i for i, client in enumerate(self.ids)}
        ids = [client for client in members if client in row]
        rows = torch.tensor([row[client] for client in ids], dtype=torch.int64)
        return replace(
            self,
            ids=tuple(ids),
            sizes=self.sizes[rows],
            deltas=self.deltas[rows],
            signatures=self.signatures[rows],
            losses=self.losses[rows],
        )

    def joined(self, other: Updates) -> Updates:
        """Return these updates and those of other clients, made at the same models in the same round."""
        return Updates(
            self.ids + other.ids,
            torch.cat([self.sizes, other.sizes]),
            torch.cat([self.deltas, other.deltas]),
            torch.cat([self.signatures, other.signatures]),
            torch.cat([self.losses, other.losses]),
        )


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How n clients fare on one split of their own data.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    accuracies
        Share of targets predicted right, float64 ``[n]``, in [0, 1].
    losses
        Mean cross-entropy, float64 ``[n]``, in nats; its exponential is the perplexity.
    examples
        Number of targets, int64 ``[n]``.
    """

    ids: tuple[int, ...]
    accuracies: Tensor
    losses: Tensor
    examples: Tensor


class Clients(Protocol):
    """N clients, wherever they are: in this process, or behind a network.

    ``models`` is always ``[K, S]``, one row for each distinct model; ``assignment`` tells each asked client's row.
    """

    @property
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""
        ...

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number |D_i| of training examples of each client."""
        ...

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
    ) -> Updates:
        """Let each client train from its model; return the updates Δθ_i, trained − started.

        ``anchors`` tells each asked client's row that the proximal term pulls it towards, of weight
        :attr:`LocalSpec.mu <fedclade.local.LocalSpec>`: by default the model that it starts from (FedProx), in Ditto
        (Li et al. 2021, eq. 1) the global model.
        """
        ...

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients −∇r_i at each client's model (CFL eq. 50), as updates."""
        ...

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data."""
        ...


class ClientsWrapper:
    """Clients around other clients; subclasses say what happens on the way.

    Parameters
    ----------
    clients
        Those who do the work.
    """

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    @property
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""
        return self._clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client."""
        return self._clients.sizes


class MeteredClients(ClientsWrapper):
    """Clients with a meter: what travels between them and the server, and how long they take.

    A client receives a model before it trains, and a second one where the proximal term pulls it towards another, and
    sends an update back; gradients are taken at a model that it already has. Evaluation is not metered: a client has
    its model anyway.

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
        pulled_to = anchors if anchors is not None and this_round.spec.mu else assignment
        sent = len(ids) + sum(anchor != row for anchor, row in zip(pulled_to, assignment, strict=True))
        self._bytes_down += sent * models.shape[1] * models.element_size()
        self._bytes_up += updates.deltas.nbytes
        return updates

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients at each client's model."""
        start = perf_counter()
        updates = self._clients.gradients(ids, models, assignment, this_round)
        self._seconds_train += perf_counter() - start
        self._bytes_up += updates.deltas.nbytes
        return updates

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data."""
        start = perf_counter()
        evaluation = self._clients.evaluate(ids, models, assignment, split)
        self._seconds_evaluate += perf_counter() - start
        return evaluation
