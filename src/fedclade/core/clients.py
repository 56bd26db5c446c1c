"""The world as an algorithm sees it: clients that can be asked to train and to evaluate, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from fedclade.core import rng
from fedclade.core.local import LocalSpec
from fedclade.core.updates import Updates

Split = Literal["train", "validation", "test"]


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
    min_clients
        A cluster with fewer answers keeps its model, and takes no decision.
    insists
        Whether those who do not answer are asked again, since everybody is needed.
    replicates
        Above 1, clients make so many updates, each from a part of their training data, and answer with the signatures
        of all of them (:class:`~fedclade.channel.replicates.ReplicatingClients`).
    part
        ``(k, m)`` lets every client train on the k-th of m parts of its training data alone, k from 0; None on all of
        it. Parts are disjoint, of sizes that differ by at most one, and drawn anew in every round.
    query
        Counts what clients are asked in the round, from 0: it sets the faults of one query apart from those of the
        next, and nothing else.
    """

    number: int
    spec: LocalSpec
    seed: int = 0
    purpose: str = "train"
    evaluated: bool = True
    travels: Literal["all", "updates", "nothing"] = "all"
    min_clients: int = 1
    insists: bool = False
    replicates: int = 1
    part: tuple[int, int] | None = None
    query: int = 0

    @property
    def lr(self) -> float:
        """Step size of this round."""
        return self.spec.lr_at(self.number)

    def of_part(self, place: int) -> Round:
        """Return what the replicate of one part of the data is made by."""
        return replace(self, replicates=1, part=(place, self.replicates), purpose=f"{self.purpose} {place}")

    def examples(self, count: int, key: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return which of its training examples a client trains on, given how many it has and its key, ascending."""
        if self.part is None:
            return np.arange(count)
        place, parts = self.part
        order = rng.generator(self.seed, "parts", self.number, key).permutation(count)
        return np.sort(order[place::parts])

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the generator of what the server draws in this round."""
        return rng.generator(self.seed, purpose, self.number)


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
    left_out
        Why each client that was asked, and is not among ``ids``, is left out.
    """

    ids: tuple[int, ...]
    accuracies: Tensor
    losses: Tensor
    examples: Tensor
    left_out: Mapping[int, str] = field(default_factory=dict[int, str])


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
        """Let each client train from its model; return the updates Δθ_i, trained − started, of those that answer.

        ``anchors`` tells each asked client's row that the proximal term pulls it towards, of weight
        :attr:`LocalSpec.mu <fedclade.core.LocalSpec>`: by default the model that it starts from (FedProx), in Ditto
        (Li et al. 2021, eq. 1) the global model.
        """
        ...

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients −∇r_i at each client's model (CFL eq. 50), as updates."""
        ...

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data; return the scores of those that answer.

        A client with several models to evaluate is named once for each, and answers for all of them or for none.
        """
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
            Columns are unit vectors; those that a client has too few examples for are zeros, and so are all of a client
            that does not answer.
        """
        ...


class ClientsWrapper:
    """Clients around other clients that pass everything on; subclasses say what happens on the way.

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

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
    ) -> Updates:
        """Let each client train from its model; return the updates Δθ_i."""
        return self._clients.train(ids, models, assignment, this_round, anchors)

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients at each client's model."""
        return self._clients.gradients(ids, models, assignment, this_round)

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data."""
        return self._clients.evaluate(ids, models, assignment, split)

    def subspaces(self, ids: Sequence[int], n_vectors: int, per_label: bool) -> Tensor:
        """Let each client decompose its training inputs; return their left singular vectors ``[n, L, d, p]``."""
        return self._clients.subspaces(ids, n_vectors, per_label)
