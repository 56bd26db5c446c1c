"""Queries of a server to clients; each kind has a reply of one type."""

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
"""In place of the row of a client's model: the model of its own that it keeps, so that it is sent none."""

Indices = NDArray[np.int64]
"""Which of some examples, ``[n]``."""

MECHANISMS = ("noise", "held_out", "none", "public")
"""What a class of queries can declare as its :attr:`Query.mechanism`."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Round:
    """One communication round: what keys its random draws, and what clients do in it.

    Parameters
    ----------
    number
        Counted from 1.
    spec, seed
        The local training, and the run's seed.
    purpose
        Sets the draws of a further query in the same round apart from those of the regular
        training.
    evaluated
        Whether clients are evaluated after it; what they are served with only then need not be made
        in other rounds.
    communicates
        What its training sends: models down and updates up (``all``), ``updates`` alone if the
        models were sent before, ``models`` alone where clients keep what they train, or
        ``nothing``.
    min_clients
        A cluster with fewer answers keeps its model, and takes no decision.
    require_all
        Whether clients that do not answer are queried again, since all are needed.
    replicates
        Above 1, clients make so many updates, each from a part of their training data, and reply
        with their mean and the signatures of all of them (:class:`~fedclade.channel.Replicating`).
    compares_parts
        Whether they send these signatures; if not, the mean alone.
    part
        ``(k, m)``: every client trains on the k-th of m parts of its training data alone, k from 0;
        None: on all of it. Parts are disjoint, of sizes that differ by at most one, and drawn anew
        in every round.
    part_size
        Above 0, every part has so many examples, what is left over is in none, and parts are the
        same in all rounds; of several replicates each is trained as :meth:`LocalTraining.on_part`
        says.
    parts_from
        Seed and round number by which data is split into parts; None: the round's own. A client of
        a network sets them where it uses parts again.
    drawn_from
        Number of its training examples from which a client draws parts: the same examples in all
        rounds. None: all. A client of a network that reports only a size class draws them from that
        number, so that what it refuses to do with parts, and what their updates are, does not
        reveal more of its size.
    longest
        How many times its update a client sends, if that lowers the loss of what it trained on; 1:
        it sends the update.
    personal_epochs
        Above 0, clients train their personal parameters alone for so many epochs, and then the
        shared ones alone, as the local training has it. Otherwise they train all together.
    rule
        What clients do in place of plain steps, see :class:`LocalRule`; what it keeps with them
        lasts as a model does.
    query
        Counts the round's queries from 0: it sets the faults of one apart from those of the next,
        and nothing else.
    expected
        Where each client is sampled by itself: how many clients of its cluster that makes on
        average, by client. By these the sums of private updates are divided, and not by how many
        there are.
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
        """Whether clients send what they train."""
        return self.communicates in ("all", "updates")

    @property
    def uses_anchors(self) -> bool:
        """Whether local training looks at a client's anchor."""
        return bool(self.spec.mu) or (self.rule is not None and self.rule.needs_anchor)

    @property
    def lasts(self) -> bool:
        """Whether clients keep what they train for themselves: not from a part of the data, or for another purpose."""
        return self.purpose == "train" and self.part is None

    def of_part(self, place: int) -> Round:
        """Return the round of the replicate that is made from one part of the data."""
        spec = self.spec.on_part(self.replicates, self.part_size)
        part = (place, self.replicates)
        # as if the step size were that of all data
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
        """Return which of ``count`` training examples the client of a key trains on, ascending.

        ``copies [count]`` numbers examples, equal ones alike. Equal parts then have copies
        together, but for those at their ends: spread over parts they would make the parts of a
        client alike, whatever its distribution. Where some number is that of more than a tenth of a
        part, examples are few kinds rather than copies, and it has no effect.
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
                first = np.full(int(copies.max()) + 1, count)
                np.minimum.at(first, copies[order], np.arange(count))
                order = order[np.argsort(first[copies[order]], kind="stable")]
            return np.sort(order[place * size : (place + 1) * size])
        order = rng.generator(seed, "parts", number, key).permutation(count)
        return np.sort(order[place::parts])

    def _examples_of_some(self, some: int, count: int, key: int, copies: Indices | None) -> Indices:
        """Return the examples of a part that is drawn from ``some`` of ``count`` examples, ascending."""
        # The run's seed has no influence: a server that changes it must not get parts of all
        # examples.
        order = rng.generator(0, "examples for parts", key).permutation(count)
        chosen = np.sort(order[:some])
        copies = None if copies is None else copies[chosen]
        return chosen[replace(self, drawn_from=None).examples(some, key, copies)]

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the generator of what the server draws in this round."""
        return rng.generator(self.seed, purpose, self.number)


@dataclass(frozen=True, eq=False)
class Query(ABC, Generic[R_co]):
    """A query of a server to some clients.

    A class of queries declares what its replies reveal. Private clients, and clients that reply by
    secure aggregation alone, refuse a class that does not: a new kind of query is closed to them.

    Attributes
    ----------
    mechanism
        What keeps a reply private. ``noise``: it is an update, which clients clip and put noise on.
        ``held_out``: it is about validation or test data. ``none``: nothing does, so private
        clients refuse. ``public``: it does not depend on the data of any client.
    discloses
        What leaves the client in clear, as its policy names it, such as ``scores``; "update" for
        an update, and "nothing" for a reply that does not depend on the client's data.
    """

    mechanism: ClassVar[str] = ""
    discloses: ClassVar[str] = ""

    ids: Sequence[int]  # [n]
    # about what they held in that round; 0: about what they hold
    data_round: int = field(default=0, kw_only=True)


@dataclass(frozen=True, eq=False)
class UpdateQuery(Query[Updates]):
    """Train a model, or take the gradient at it, and reply with the update.

    ``train`` replies with Δθ_i, trained − started; ``gradients`` with the negative full-batch
    gradient −∇r_i (CFL eq. 50). The proximal term, of weight :attr:`LocalTraining.mu
    <fedclade.core.LocalTraining>`, pulls each client towards its anchor: the model that it starts
    from (FedProx), or in Ditto (Li et al. 2021, eq. 1) the global model.

    With ``own``, each client keeps the model that it trains as its own, and its update is empty,
    ``[0]``. It starts from the model that it is sent, or where its row is :data:`OWN` from its own
    as that stood before the round. If it ``shares`` that, its update is how far the model is from
    its anchor, which must be given: the server then knows it.

    A :attr:`rule <Round.rule>` that needs an anchor is given its row in place of the proximal term;
    one that serves lets each client keep a model of its own besides, while its update is that of
    the model which it was sent. With a ``mixture``, each client is sent all models, the row in its
    place is 0, and it trains every one of them on its examples, each weighted by its responsibility
    (FedEM). Its update is that of all models, as :func:`~fedclade.core.packed` has it; it keeps its
    weights π for itself.

    With a ``question``, clients reply with what it says of their updates: the sum of it over all
    clients that reply is in :attr:`Updates.sums`, or the choice of each in
    :attr:`Updates.components`.

    Clients that reply one by one may hand a few updates to the ``sink`` as they arrive, and reply
    with the rest.
    """

    mechanism = "noise"
    discloses = "update"

    kind: Literal["train", "gradients"]
    models: Tensor  # [K, S], one row for each distinct model
    assignment: Sequence[int]  # the row of each client, [n]
    round: Round
    # the row of each client's anchor, [n]; None: where it starts
    anchors: Sequence[int] | None = None
    own: bool = False  # whether each client keeps the model that it trains
    shares: bool = False  # whether it then also sends it
    # each trains on what it held in these, [n]; None: holds now
    data_rounds: Sequence[tuple[int, ...]] | None = None
    # takes some updates early, which then need not be kept
    sink: Callable[[Updates], None] | None = None
    mixture: Mixture | None = None  # what the models are together, if they are one mixture
    question: Question | None = None  # what of their updates clients reply with, in place of these

    @property
    def is_secret(self) -> bool:
        """Whether clients keep what they train to themselves, so that updates are empty."""
        return self.own and not self.shares

    def select(self, ids: Sequence[int]) -> UpdateQuery:
        """Return the query to some of the clients, in the order given."""
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

    A client with several models is named once for each, and replies for all of them or for none.
    One whose row is :data:`OWN` evaluates the model of its own. With a ``mixture``, a client is
    named once, with row 0, and evaluates all models together by its weights π; one without any
    finds them first, on its training data (FedEM's newcomers). If it ``compares`` its models, which
    then stand side by side, it counts besides which of them is best for how many examples
    (:attr:`Evaluation.wins`).
    """

    mechanism = "held_out"
    discloses = "scores"

    models: Tensor  # [K, S]
    assignment: Sequence[int]  # the row of each client, [n]
    split: Split
    compares: bool = False
    mixture: Mixture | None = None  # what the models are together, if they are one mixture


@dataclass(frozen=True, eq=False)
class ChoiceQuery(EvaluationQuery):
    """Let each client choose the model with the lowest loss on its training data.

    Over a network a client replies with the number of that model and nothing else: in
    :attr:`Evaluation.wins` it has 1, and the client's other models 0. Simulated clients reply as to
    any evaluation, and losses tell which is lowest.
    """

    mechanism = "none"
    discloses = "choice"


def check_declared(kind: type[Query[Any]]) -> None:
    """Check that a class of queries declares its mechanism and what it discloses.

    Raises
    ------
    ConfigError
        If it does not: clients with privacy or secure aggregation refuse it.
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
    """Raise a ConfigError: the clients do not know this kind of query."""
    raise ConfigError(f"these clients do not know how to answer a {type(query).__name__}")


class Ask(Protocol):
    """Puts a query to clients."""

    def __call__(self, query: Query[R], /) -> R:
        """Return the reply."""
        ...
