"""Queries of a server to clients; each kind of query has one type of reply."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import rng
from fedclade.core.errors import ConfigError
from fedclade.core.evaluation import Evaluation
from fedclade.core.local import LocalRule, LocalTraining
from fedclade.core.mixtures import Mixture
from fedclade.core.private_questions import Question
from fedclade.core.updates import Updates

Split = Literal["train", "validation", "test"]

OWN = -1
"""Row of a client that uses the model it stores itself, so that it is sent none."""

Indices = NDArray[np.int64]
"""Indices of some examples, ``[n]``."""

MECHANISMS = ("noise", "held_out", "none", "public")
"""Values that a class of queries can declare as its :attr:`Query.mechanism`."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Round:
    """One communication round: the settings of its training, and the keys of its random draws.

    Parameters
    ----------
    number
        Number of the round, from 1.
    spec, seed
        The local training, and the run's seed.
    purpose
        Key of the random draws of a further query in the same round, so that they differ from the
        draws of the regular training.
    evaluated
        Whether clients are evaluated after the round. If not, models that are needed only for
        evaluation need not be computed.
    communicates
        What the training sends: models to clients and updates back (``all``); only ``updates`` if
        the models were sent before; only ``models`` if clients store what they train; or
        ``nothing``.
    min_clients
        A cluster with fewer replies keeps its model, and no decision about it is made.
    require_all
        Whether clients that do not reply are queried again, since all replies are needed.
    replicates
        Above 1, each client makes this number of updates, each from a part of its training data,
        and replies with their mean and the signatures of all of them
        (:class:`~fedclade.channel.Replicating`).
    compares_parts
        Whether clients send these signatures; if not, they send the mean only.
    part
        ``(k, m)``: every client trains on the k-th of m parts of its training data, k from 0; None:
        on all of its data. Parts are disjoint, their sizes differ by at most one, and they are
        drawn again in every round.
    part_size
        Above 0, every part has this number of examples, the remaining examples are in no part, and
        parts are the same in all rounds. With several replicates, each is trained with the settings
        of :meth:`LocalTraining.on_part`.
    parts_from
        Seed and round number that the split into parts depends on; None: those of this round. A
        client in a network sets them to use the same parts again.
    drawn_from
        Number of its training examples from which a client draws parts: the same examples in all
        rounds. None: all. A client in a network that reports only a size class draws from that
        number, so that neither its refusals of parts nor their updates reveal more about its size.
    longest
        Factor by which a client multiplies the parameters of its update if that lowers the loss on
        the data that it trained on; 1: it sends the update unchanged.
    personal_epochs
        Above 0, clients first train their personal parameters alone for this number of epochs, and
        then the shared ones alone, as ``spec`` specifies. Otherwise they train all together.
    rule
        Rule that replaces plain steps, see :class:`LocalRule`. What clients store for it has the
        lifetime of a stored model.
    query
        Number of the query in the round, from 0. It only distinguishes the simulated faults of one
        query from those of the next.
    expected
        If each client is sampled independently: by client, the expected number of sampled clients
        in its cluster. Sums of private updates are divided by this number, and not by the actual
        one.
    """

    number: int
    spec: LocalTraining
    seed: int = 0
    purpose: str = "train"
    evaluated: bool = True
    communicates: Literal["all", "updates", "models", "nothing"] = "all"
    min_clients: int = 1
    require_all: bool = False
    replicates: int = 1
    compares_parts: bool = True
    part: tuple[int, int] | None = None
    part_size: int = 0
    parts_from: tuple[int, int] | None = None
    drawn_from: int | None = None
    longest: float = 1.0
    personal_epochs: int = 0
    rule: LocalRule | None = None
    query: int = 0
    expected: Mapping[int, float] | None = None

    @property
    def lr(self) -> float:
        """Step size of this round."""
        return self.spec.lr_at(self.number)

    @property
    def sends_updates(self) -> bool:
        """Whether clients send the updates that they train."""
        return self.communicates in ("all", "updates")

    @property
    def uses_anchors(self) -> bool:
        """Whether local training uses the clients' anchors."""
        return bool(self.spec.mu) or (self.rule is not None and self.rule.needs_anchor)

    @property
    def lasts(self) -> bool:
        """Whether clients store what they train for themselves.

        They do not store what they train on a part of the data, or for another purpose.
        """
        return self.purpose == "train" and self.part is None

    def of_part(self, place: int) -> Round:
        """Return the round in which clients train the replicate of one part, ``place`` from 0."""
        spec = self.spec.on_part(self.replicates, self.part_size)
        part = (place, self.replicates)
        # up to the length of an update made with the step size for all data
        longest = (self.spec.lr or 0.0) / (spec.lr or 1.0)
        return replace(
            self,
            spec=spec,
            replicates=1,
            part=part,
            longest=longest,
            purpose=f"{self.purpose} {place}",
        )

    def examples(self, count: int, key: int, copies: Indices | None = None) -> Indices:
        """Return the indices of the training examples that a client trains on, ascending.

        Parameters
        ----------
        count
            Number of the client's training examples.
        key
            Key of the client.
        copies
            Numbers ``[count]`` that are the same for equal examples; None: no examples are equal.
            Equal parts are formed so that copies are in the same part, except at the ends of parts:
            copies that are spread over parts would make the parts of a client similar, whatever its
            distribution. If one number occurs more often than a tenth of a part, examples are of
            few kinds rather than copies of each other, and ``copies`` has no effect.
        """
        if self.part is None:
            return np.arange(count)
        if self.drawn_from is not None and self.drawn_from < count:
            return self._examples_of_some(self.drawn_from, count, key, copies)
        place, parts = self.part
        seed, number = self.parts_from or (self.seed, self.number)
        if size := self.part_size:
            order = rng.generator(seed, "equal parts", key).permutation(count)
            if copies is not None and 10 * int(np.bincount(copies).max()) <= size:
                # Move each copy to the place of the first one in the random order.
                first = np.full(int(copies.max()) + 1, count)
                np.minimum.at(first, copies[order], np.arange(count))
                order = order[np.argsort(first[copies[order]], kind="stable")]
            return np.sort(order[place * size : (place + 1) * size])
        order = rng.generator(seed, "parts", number, key).permutation(count)
        return np.sort(order[place::parts])

    def _examples_of_some(self, some: int, count: int, key: int, copies: Indices | None) -> Indices:
        """Return the examples of a part drawn from ``some`` of ``count`` examples, ascending."""
        # The run's seed has no influence: by changing it, a server could otherwise obtain parts of
        # all examples.
        order = rng.generator(0, "examples for parts", key).permutation(count)
        chosen = np.sort(order[:some])
        copies = None if copies is None else copies[chosen]
        return chosen[replace(self, drawn_from=None).examples(some, key, copies)]

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the random generator of the server for a purpose in this round."""
        return rng.generator(self.seed, purpose, self.number)


@dataclass(frozen=True, eq=False)
class Query(ABC, Generic[R_co]):
    """Query of a server to some clients.

    A class of queries declares what its replies reveal. Private clients, and clients that reply
    only by secure aggregation, refuse a class that declares nothing: a new kind of query reaches no
    such client by default.

    Attributes
    ----------
    mechanism
        Protection of a reply. ``noise``: the reply is an update, which clients clip and add noise
        to. ``held_out``: it is about validation or test data. ``none``: it has no protection, so
        private clients refuse. ``public``: it does not depend on the data of any client.
    discloses
        Name in client policies of what leaves the client unencrypted, such as ``scores``; "update"
        for an update, and "nothing" for a reply that does not depend on the client's data.
    """

    mechanism: ClassVar[str] = ""
    discloses: ClassVar[str] = ""

    ids: Sequence[int]  # [n]
    # the round whose data the query is about; 0: the clients' current data
    data_round: int = field(default=0, kw_only=True)


@dataclass(frozen=True, eq=False)
class UpdateQuery(Query[Updates]):
    """Train a model, or compute the gradient at it, and reply with the update.

    ``train`` replies with Δθ_i, the trained model minus the initial one; ``gradients`` replies with
    the negative full-batch gradient −∇r_i (CFL eq. 50). The proximal term, of weight
    :attr:`LocalTraining.mu <fedclade.core.LocalTraining>`, pulls each client towards its anchor:
    the model that it starts from (FedProx), or in Ditto (Li et al. 2021, eq. 1) the global model.

    With ``own``, each client stores the model that it trains as its own, and its update is empty,
    ``[0]``. It starts from the model that it is sent, or, if its row is :data:`OWN`, from its own
    model as it was before the round. If it ``shares`` that model, its update is the difference of
    the model and its anchor, which must be given: the server then knows the model.

    A :attr:`rule <Round.rule>` that needs an anchor receives its row in place of the proximal term.
    A rule that serves lets each client also store a model of its own, while its update is that of
    the model which it was sent. With a ``mixture``, each client is sent all models, its row is 0,
    and it trains every model on its examples, each weighted by its responsibility (FedEM). Its
    update is the update of all models, see :func:`~fedclade.core.packed`; it does not send its
    weights π.

    With a ``question``, clients reply with a function of their updates: its sum over all clients
    that reply is in :attr:`Updates.sums`, or the choice of each client in
    :attr:`Updates.components`.

    Clients that reply one by one may pass some updates to the ``sink`` as they arrive, and reply
    with the rest.
    """

    mechanism = "noise"
    discloses = "update"

    kind: Literal["train", "gradients"]
    models: Tensor  # [K, S], one row for each distinct model
    assignment: Sequence[int]  # the row of each client, [n]
    round: Round
    # the row of each client's anchor, [n]; None: the model from which it starts
    anchors: Sequence[int] | None = None
    own: bool = False  # whether each client stores the model that it trains
    shares: bool = False  # whether clients also send the model that they store
    # the rounds whose data each client trains on, [n]; None: its current data
    data_rounds: Sequence[tuple[int, ...]] | None = None
    # takes some updates early, which then need not be stored
    sink: Callable[[Updates], None] | None = None
    mixture: Mixture | None = None  # set if the models are the components of one mixture
    question: Question | None = None  # function of their updates that clients reply with instead

    @property
    def is_secret(self) -> bool:
        """Whether clients do not send what they train, so that updates are empty."""
        return self.own and not self.shares

    def select(self, ids: Sequence[int]) -> UpdateQuery:
        """Return the query for some of its clients, in the given order."""
        if list(ids) == list(self.ids):
            return self
        place_of = {client: place for place, client in enumerate(self.ids)}
        places = [place_of[client] for client in ids]
        assignment = [self.assignment[k] for k in places]
        anchors = None if self.anchors is None else [self.anchors[k] for k in places]
        data_rounds = None if self.data_rounds is None else [self.data_rounds[k] for k in places]
        return replace(
            self, ids=ids, assignment=assignment, anchors=anchors, data_rounds=data_rounds
        )


@dataclass(frozen=True, eq=False)
class EvaluationQuery(Query[Evaluation]):
    """Evaluate models, each on a split of a client's own data.

    A client with several models is listed once for each, and replies for all of them or for none. A
    client whose row is :data:`OWN` evaluates its own model.

    With a ``mixture``, a client is listed once, with row 0, and evaluates all models together by
    its weights π. A client without weights first determines them on its training data (FedEM's
    newcomers).

    If the query ``compares`` models, whose entries are then adjacent for each client, clients also
    count the examples for which each model is best (:attr:`Evaluation.wins`).
    """

    mechanism = "held_out"
    discloses = "scores"

    models: Tensor  # [K, S]
    assignment: Sequence[int]  # the row of each client, [n]
    split: Split
    compares: bool = False
    mixture: Mixture | None = None  # set if the models are the components of one mixture


@dataclass(frozen=True, eq=False)
class ChoiceQuery(EvaluationQuery):
    """Let each client choose the model with the lowest loss on its training data.

    Over a network a client replies only with the number of that model: in :attr:`Evaluation.wins`
    it has 1, and the client's other models have 0. Simulated clients reply as to any evaluation,
    and the lowest loss determines the choice.
    """

    mechanism = "none"
    discloses = "choice"


def check_declared(kind: type[Query[Any]]) -> None:
    """Check that a class of queries declares its mechanism and what it discloses.

    Raises
    ------
    ConfigError
        If it does not, since clients with privacy or secure aggregation refuse such a query.
    """
    known = ", ".join(repr(mechanism) for mechanism in MECHANISMS)
    if not kind.discloses or kind.mechanism not in MECHANISMS:
        raise ConfigError(
            f"clients with differential privacy or secure aggregation refuse a {kind.__name__}, "
            f"which declares mechanism = {kind.mechanism!r} and discloses = {kind.discloses!r}; "
            f"declare in its class as mechanism one of {known}, and as discloses the name of what "
            "leaves the client"
        )


def refuse_unknown(query: Query[Any]) -> Any:
    """Raise a ConfigError, since the clients do not know this kind of query."""
    raise ConfigError(f"these clients do not know how to answer a {type(query).__name__}")


class Ask(Protocol):
    """Function that sends a query to clients and returns their reply."""

    def __call__(self, query: Query[R], /) -> R:
        """Send a query and return the reply."""
        ...
