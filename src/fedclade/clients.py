"""The world as an algorithm sees it: clients that can be asked to train and to evaluate, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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

CONVERTED_AT_A_TIME = 2**17
"""Entries of updates that are turned to float64 at once: 1 MiB, which stays in a processor's cache."""


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
    evaluated
        Whether clients are evaluated after it; what they are served with only then need not be made in other rounds.
    travels
        What its training sends: models down and updates up (``all``), ``updates`` alone to whom the models were sent
        before, or ``nothing`` where clients keep what they train.
    """

    number: int
    spec: LocalSpec
    seed: int = 0
    purpose: str = "train"
    evaluated: bool = True
    travels: Literal["all", "updates", "nothing"] = "all"

    @property
    def lr(self) -> float:
        """Step size of this round."""
        return self.spec.lr_at(self.number)

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the generator of what the server draws in this round."""
        return rng.generator(self.seed, purpose, self.number)


@dataclass(frozen=True, eq=False)
class Sums:
    """What a run that streams keeps of updates: Σ |D_i| Δθ_i over each of G groups of clients.

    Parameters
    ----------
    groups
        The sums, ``[G, S]``.
    group
        Which of them each client is part of, int64 ``[n]``.
    """

    groups: Tensor
    group: Tensor

    def of(self, rows: Tensor) -> tuple[Sums, Tensor]:
        """Return the sums of the groups of some clients; and who is in them besides, as rows of these sums."""
        kept, group = torch.unique(self.group[rows], return_inverse=True)
        besides = torch.isin(self.group, kept)
        besides[rows] = False
        return Sums(self.groups[kept], group), besides.nonzero().flatten()


@dataclass(frozen=True, eq=False, kw_only=True)
class Updates:
    """What n clients answered in one round, with D parameters and S = D + buffers entries in a model.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    sizes
        Their training examples |D_i|, float64 ``[n]``.
    losses
        Mean training loss of each client in the round, ``[n]``.
    norms
        ‖Δθ_i‖ of the parameters, in parameter units, float64 ``[n]``.
    n_parameters
        D.
    deltas
        Weight updates Δθ_i (CFL eq. 1), ``[n, S]``. None in a run that streams, which has ``sums`` in their place.
    sums
        Sums of weight updates, one for each model that was sent out.
    sketches
        What clients are compared by, ``[n, R]``, where it is not the update itself; always there in a stream.
    """

    ids: tuple[int, ...]
    sizes: Tensor
    losses: Tensor
    norms: Tensor
    n_parameters: int
    deltas: Tensor | None = None
    sums: Sums | None = None
    sketches: Tensor | None = None

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
        norms = row_norms(deltas[:, :n_parameters])
        whole = torch.hypot(norms, row_norms(deltas[:, n_parameters:]))
        for i in (~(whole <= LARGEST_NORM)).nonzero().flatten().tolist():  # NaN is not less than anything
            entries = int((~torch.isfinite(deltas[i])).sum())
            what = f"has {entries} of {deltas.shape[1]} entries that are NaN or infinite"
            what = what if entries else f"has norm {float(whole[i]):.3g}, more than {LARGEST_NORM:.3g}"
            raise UpdateError(
                f"round {number}: the update of client {ids[i]} {what}; its training diverged: lower local.lr, or "
                "look at the client's data"
            )
        return cls(
            ids=tuple(ids),
            sizes=torch.tensor(sizes, dtype=torch.float64),
            losses=losses,
            norms=norms,
            n_parameters=n_parameters,
            deltas=deltas,
        )

    @property
    def each(self) -> Tensor:
        """The update of each client, ``[n, S]``, for what cannot do with less.

        Raises
        ------
        UpdateError
            If the run streams.
        """
        if self.deltas is None:
            raise UpdateError(
                f"the updates of {len(self.ids)} clients are needed one by one, but this run streams and keeps only "
                "their sums; set stream = false"
            )
        return self.deltas

    @property
    def signatures(self) -> Tensor:
        """What clients are compared by, ``[n, R]``: by default the update without its buffers, ``[n, D]``."""
        return self.each[:, : self.n_parameters] if self.sketches is None else self.sketches

    def of(self, members: Sequence[int]) -> Updates:
        """Return the updates of those members that answered, in the order of the members.

        Raises
        ------
        UpdateError
            If the run streams, and the members share a sum with others.
        """
        rows = self._rows(members)
        if torch.equal(rows, torch.arange(len(self.ids))):
            return self
        sums = None
        if self.sums is not None:
            sums, besides = self.sums.of(rows)
            if len(besides):
                raise UpdateError(
                    f"the updates of clients {self._named(rows)} cannot be told from those of clients "
                    f"{self._named(besides)}: this run streams, and keeps only sums over all clients of a model; "
                    "set stream = false"
                )
        return replace(
            self,
            ids=tuple(self._named(rows)),
            sizes=self.sizes[rows],
            losses=self.losses[rows],
            norms=self.norms[rows],
            deltas=None if self.deltas is None else self.deltas[rows],
            sums=sums,
            sketches=None if self.sketches is None else self.sketches[rows],
        )

    def signatures_of(self, members: Sequence[int]) -> Tensor:
        """Return the signatures of those members that answered, ``[m, R]`` in the order of the members."""
        return self.signatures[self._rows(members)]

    def joined(self, other: Updates) -> Updates:
        """Return these updates and those of other clients, made at the same models in the same round."""
        sums = None
        if self.sums is not None and other.sums is not None:
            behind = other.sums.group + len(self.sums.groups)
            sums = Sums(torch.cat([self.sums.groups, other.sums.groups]), torch.cat([self.sums.group, behind]))
        return Updates(
            ids=self.ids + other.ids,
            sizes=torch.cat([self.sizes, other.sizes]),
            losses=torch.cat([self.losses, other.losses]),
            norms=torch.cat([self.norms, other.norms]),
            n_parameters=self.n_parameters,
            deltas=None if sums is not None else torch.cat([self.each, other.each]),
            sums=sums,
            sketches=None if self.sketches is None else torch.cat([self.sketches, other.signatures]),
        )

    @cached_property
    def _row_of(self) -> Mapping[int, int]:
        return {client: row for row, client in enumerate(self.ids)}

    def _rows(self, members: Sequence[int]) -> Tensor:
        return torch.tensor([self._row_of[m] for m in members if m in self._row_of], dtype=torch.int64)

    def _named(self, rows: Tensor) -> list[int]:
        return [self.ids[row] for row in rows.tolist()]


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of ``[n, m]``, float64 ``[n]``, without a float64 copy of all of them."""
    at_once = max(1, CONVERTED_AT_A_TIME // max(1, rows.shape[1]))
    norms = [torch.linalg.vector_norm(some, dim=1, dtype=torch.float64) for some in rows.split(at_once)]
    return torch.cat(norms).cpu()


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
        """Let each client evaluate its model on a split of its own data; with several models it is asked repeatedly."""
        ...

    def subspaces(self, ids: Sequence[int], n_vectors: int, per_label: bool) -> Tensor:
        """Let each client decompose its training inputs, one a column; return their left singular vectors.

        Parameters
        ----------
        ids
            The clients.
        n_vectors
            How many vectors p, those of the largest singular values.
        per_label
            Whether the inputs of each label are decomposed by themselves.

        Returns
        -------
        Tensor
            ``[n, L, d, p]`` for n clients and inputs of d numbers as they are stored; L is the number of labels, or 1.
            Columns are unit vectors; those that a client has too few examples for are zeros.
        """
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

    def subspaces(self, ids: Sequence[int], n_vectors: int, per_label: bool) -> Tensor:
        """Let each client decompose its training inputs; return their left singular vectors ``[n, L, d, p]``."""
        return self._clients.subspaces(ids, n_vectors, per_label)


class MeteredClients(ClientsWrapper):
    """Clients with a meter: what travels between them and the server, and how long they take.

    A client receives a model before it trains, and a second one where the proximal term pulls it towards another, and
    sends an update back, unless the round says that less travels; gradients are taken at a model that it already has.
    Evaluation is not metered, since a client has its model anyway; but on training data, which is how a client chooses
    among several, each of them is sent to it first.

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
            self._bytes_up += len(updates.ids) * models[0].nbytes
        return updates

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients at each client's model."""
        start = perf_counter()
        updates = self._clients.gradients(ids, models, assignment, this_round)
        self._seconds_train += perf_counter() - start
        self._bytes_up += len(updates.ids) * models.shape[1] * models.element_size()
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
        self._bytes_up += vectors.nbytes
        return vectors
