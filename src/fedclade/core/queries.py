"""Queries of a server to clients; each kind has a reply of one type."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedclade.core import rng
from fedclade.core.errors import ConfigError
from fedclade.core.evaluation import Evaluation, Statistics
from fedclade.core.local import LocalRule, LocalTraining
from fedclade.core.registry import DataSpec
from fedclade.core.updates import Updates

# Mixtures of models: each client has a weight π_m for every model m, and predicts with the weighted
# mean of all.

LEAST_MASS = 1e-8
"""Of a label in a component, in examples: no label is so rare that it is divided by less (FedRC's official code)."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """That all models of a query are the K components of one mixture.

    Parameters
    ----------
    by_label
        Whether clients send besides, for each component, how their examples of each label lean towards it.
    rates
        P̂ ``[K, C]``: how common each label is in each component; by it responsibilities are divided (FedRC). None: they
        are not.
    """

    by_label: bool = False
    rates: Tensor | None = None

    def responsibilities(self, weights: Tensor, losses: Tensor, targets: Tensor) -> Tensor:
        """Return q_j(m) ∝ π_m exp(−ℓ_jm) / P̂_m(y_j), float64 ``[n, K]``, of a client's n examples (E-step).

        ``weights`` is π ``[K]``, ``losses`` are ℓ ``[n, K]`` in nats and ``targets`` y ``[n]``.
        """
        scores = weights.double().log() - losses.double()
        if self.rates is not None:
            scores = scores - self.rates.to(scores).log().t()[targets.long()]
        return scores.softmax(1)

    def tables(self, leaning: Tensor, targets: Tensor, labels: int) -> Tensor:
        """Return Σ q_j(m) over the examples of each label, over n: ``[K, C]``, of responsibilities ``[n, K]``."""
        sums = leaning.new_zeros(labels, leaning.shape[1]).index_add_(0, targets.long(), leaning)
        return sums.t() / len(leaning)


def label_rates(mean: Tensor, examples: float) -> Tensor:
    """Return P̂ ``[K, C]`` of the clients' mean table, weighted by their examples, and how many these are in all."""
    counts = (mean.double() * examples).clamp(min=LEAST_MASS)
    return counts / counts.sum(1, keepdim=True)


def packed(deltas: Tensor, n_parameters: int, tables: Tensor | None = None) -> Tensor:
    """Return the updates ``[..., K, S]`` of K models as one vector each: parameters, then buffers, then the tables.

    Tables ``[..., K, C]`` come where buffers do: both are averaged, and compared by nobody.
    """
    parts = [deltas[..., :n_parameters], deltas[..., n_parameters:], *([] if tables is None else [tables.to(deltas)])]
    return torch.cat([part.flatten(-2) for part in parts], -1)


def unpacked(vectors: Tensor, components: int, size: int, n_parameters: int) -> tuple[Tensor, Tensor]:
    """Return the updates ``[..., K, S]`` and tables ``[..., K, C]`` that :func:`packed` has joined; C may be 0."""
    K, D, end = components, n_parameters, components * size
    shape = vectors.shape[:-1]
    parameters = vectors[..., : K * D].reshape(*shape, K, D)
    buffers = vectors[..., K * D : end].reshape(*shape, K, size - D)
    tables = vectors[..., end:].reshape(*shape, K, (vectors.shape[-1] - end) // K)
    return torch.cat([parameters, buffers], -1), tables


# What clients are asked about their updates where nobody may see one: sums of functions of them,
# and choices.
#
# A client sketches its update, scales the sketch to length 1, and that is its signature u ``[R]``,
# which stays with it. It replies with a function of u: a vector of at most length 1, of which the
# server gets the sum alone, or a choice. Any two vectors that a client could send to one question
# have an inner product of at least 0, so they lie at most √2 apart: the sensitivity of their sum
# where the data of one client are replaced.

SENSITIVITY = math.sqrt(2.0)
"""How far two vectors can lie apart that a client could send to a question for a sum."""


@dataclass(frozen=True, eq=False)
class Question(ABC):
    """A question about the signatures of clients in a round.

    Parameters
    ----------
    seed, dim
        Of the sketch, a count sketch to R = ``dim`` numbers: public, and the same for all clients.
    """

    about: ClassVar[str]
    sums: ClassVar[bool] = True  # whether the server gets the sum of the replies; otherwise each client's choice

    seed: int
    dim: int

    @property
    def options(self) -> int:
        """How many choices there are; 0 where a sum is asked for."""
        return 0

    def signatures(self, updates: Tensor) -> Tensor:
        """Return the signatures u, float64 ``[n, R]``, of updates ``[n, D]``; that of a zero update is zero."""
        draw = rng.torch_generator(self.seed, "private signature")
        buckets = torch.randint(self.dim, (updates.shape[1],), generator=draw).to(updates.device)
        signs = 2.0 * torch.randint(2, (updates.shape[1],), generator=draw) - 1.0
        sketches = updates.new_zeros(len(updates), self.dim, dtype=torch.float64)
        for row, update in zip(sketches, updates, strict=True):
            row.index_add_(0, buckets, update.double() * signs.to(row))
        return functional.normalize(sketches, dim=1)

    @abstractmethod
    def answered(self, signatures: Tensor) -> Tensor:
        """Return the replies to signatures ``[n, R]``: vectors ``[n, m]`` of at most length 1, or choices ``[n]``."""


@dataclass(frozen=True, eq=False)
class Moments(Question):
    """The second moments u uᵀ, of Frobenius norm 1, as their upper triangle; off the diagonal times √2."""

    about = "moments"

    def answered(self, signatures: Tensor) -> Tensor:
        """Return u uᵀ ``[n, R(R+1)/2]``."""
        rows, columns = torch.triu_indices(self.dim, self.dim, device=signatures.device)
        scale = torch.where(rows == columns, 1.0, SENSITIVITY).to(signatures)
        return signatures[:, rows] * signatures[:, columns] * scale


@dataclass(frozen=True, eq=False)
class Placed(Question):
    """A question about the directions v of signatures within a subspace: u projected on its basis, scaled to length 1.

    ``basis [R, d]`` has orthonormal columns.
    """

    basis: Tensor

    def directions(self, signatures: Tensor) -> Tensor:
        """Return v ``[n, d]``."""
        return functional.normalize(signatures @ self.basis.to(signatures), dim=1)


@dataclass(frozen=True, eq=False)
class Cells(Placed):
    """In the cell of the nearest of some points ``[B, d]``: 1 and v, divided by √2; zeros in all other cells."""

    about = "cells"

    points: Tensor

    def answered(self, signatures: Tensor) -> Tensor:
        """Return the cells ``[n, B (1 + d)]``."""
        v = self.directions(signatures)
        cell = (v @ self.points.to(v).T).argmax(1)
        content = torch.cat([torch.ones_like(v[:, :1]), v], dim=1) / SENSITIVITY
        cells = v.new_zeros(len(v), len(self.points), content.shape[1])
        cells[torch.arange(len(v)), cell] = content
        return cells.flatten(1)


@dataclass(frozen=True, eq=False)
class Choice(Placed):
    """Which of k centres ``[k, d]`` has the largest inner product with v."""

    about = "choice"
    sums = False

    centres: Tensor

    @property
    def options(self) -> int:
        """K."""
        return len(self.centres)

    def is_same(self, other: Choice) -> bool:
        """Whether another question is between the same centres."""
        return torch.equal(self.basis, other.basis) and torch.equal(self.centres, other.centres)

    def answered(self, signatures: Tensor) -> Tensor:
        """Return the choices, int64 ``[n]``."""
        v = self.directions(signatures)
        return (v @ self.centres.to(v).T).argmax(1)


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
        Sets the draws of a further query in the same round apart from those of the regular training.
    evaluated
        Whether clients are evaluated after it; what they are served with only then need not be made in other rounds.
    communicates
        What its training sends: models down and updates up (``all``), ``updates`` alone if the models were sent
        before, ``models`` alone where clients keep what they train, or ``nothing``.
    min_clients
        A cluster with fewer answers keeps its model, and takes no decision.
    require_all
        Whether clients that do not answer are queried again, since all are needed.
    replicates
        Above 1, clients make so many updates, each from a part of their training data, and reply with their mean and
        the signatures of all of them (:class:`~fedclade.channel.Replicating`).
    compares_parts
        Whether they send these signatures; if not, the mean alone.
    part
        ``(k, m)``: every client trains on the k-th of m parts of its training data alone, k from 0; None: on all of it.
        Parts are disjoint, of sizes that differ by at most one, and drawn anew in every round.
    part_size
        Above 0, every part has so many examples, what is left over is in none, and parts are the same in all rounds; of
        several replicates each is trained as :meth:`LocalTraining.on_part` says.
    parts_from
        Seed and round number by which data is split into parts; None: the round's own. A client of a network sets them
        where it uses parts again.
    drawn_from
        Number of its training examples from which a client draws parts: the same examples in all rounds. None: all. A
        client of a network that reports only a size class draws them from that number, so that what it refuses to do
        with parts, and what their updates are, does not reveal more of its size.
    longest
        How many times its update a client sends, if that lowers the loss of what it trained on; 1: it sends the update.
    personal_epochs
        Above 0, clients train their personal parameters alone for so many epochs, and then the shared ones alone, as
        the local training has it. Otherwise they train all together.
    rule
        What clients do in place of plain steps, see :class:`LocalRule`; what it keeps with them lasts as a model does.
    query
        Counts the round's queries from 0: it sets the faults of one apart from those of the next, and nothing else.
    expected
        Where each client is sampled by itself: how many clients of its cluster that makes on average, by client. By
        these the sums of private updates are divided, and not by how many there are.
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
        spec, part = self.spec.on_part(self.replicates, self.part_size), (place, self.replicates)
        longest = (self.spec.lr or 0.0) / (spec.lr or 1.0)  # as if the step size were that of all data
        return replace(self, spec=spec, replicates=1, part=part, longest=longest, purpose=f"{self.purpose} {place}")

    def examples(self, count: int, key: int, copies: Indices | None = None) -> Indices:
        """Return which of ``count`` training examples the client of a key trains on, ascending.

        ``copies [count]`` numbers examples, equal ones alike. Equal parts then have copies together, but for those at
        their ends: spread over parts they would make the parts of a client alike, whatever its distribution. Where some
        number is that of more than a tenth of a part, examples are few kinds rather than copies, and it has no effect.
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
        # The run's seed has no influence: a server that changes it must not get parts of all examples.
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
        ``held_out``: it is about validation or test data. ``none``: nothing does, so private clients
        refuse. ``public``: it does not depend on the data of any client.
    discloses
        What leaves the client in clear, as its policy names it, such as ``scores``; "update" for
        an update, and "nothing" for a reply that does not depend on the client's data.
    """

    mechanism: ClassVar[str] = ""
    discloses: ClassVar[str] = ""

    ids: Sequence[int]  # [n]
    data_round: int = field(default=0, kw_only=True)  # about what they held in that round; 0: about what they hold

    @abstractmethod
    def handled(self, handlers: Handlers) -> R_co:
        """Return the reply of the handler of this kind of query."""


@dataclass(frozen=True, eq=False)
class UpdateQuery(Query[Updates]):
    """Train a model, or take the gradient at it, and reply with the update.

    ``train`` replies with Δθ_i, trained − started; ``gradients`` with the negative full-batch gradient −∇r_i (CFL
    eq. 50). The proximal term, of weight :attr:`LocalTraining.mu <fedclade.core.LocalTraining>`, pulls each client
    towards its anchor: the model that it starts from (FedProx), or in Ditto (Li et al. 2021, eq. 1) the global model.

    With ``own``, each client keeps the model that it trains as its own, and its update is empty, ``[0]``. It starts
    from the model that it is sent, or where its row is :data:`OWN` from its own as that stood before the round. If it
    ``shares`` that, its update is how far the model is from its anchor, which must be given: the server then knows it.

    A :attr:`rule <Round.rule>` that needs an anchor is given its row in place of the proximal term; one that serves
    lets each client keep a model of its own besides, while its update is that of the model which it was sent.
    With a ``mixture``, each client is sent all models, the row in its place is 0, and it trains every one of them on
    its examples, each weighted by its responsibility (FedEM). Its update is that of all models, as
    :func:`~fedclade.core.queries.packed` has it; it keeps its weights π for itself.

    With a ``question``, clients reply with what it says of their updates: the sum of it over all clients that reply is
    in :attr:`Updates.sums`, or the choice of each in :attr:`Updates.components`.

    Clients that reply one by one may hand a few updates to the ``sink`` as they arrive, and reply with the rest.
    """

    mechanism = "noise"
    discloses = "update"

    kind: Literal["train", "gradients"]
    models: Tensor  # [K, S], one row for each distinct model
    assignment: Sequence[int]  # the row of each client, [n]
    round: Round
    anchors: Sequence[int] | None = None  # the row of each client's anchor, [n]; None: where it starts
    own: bool = False  # whether each client keeps the model that it trains
    shares: bool = False  # whether it then also sends it
    data_rounds: Sequence[tuple[int, ...]] | None = None  # each trains on what it held in these, [n]; None: holds now
    sink: Callable[[Updates], None] | None = None  # takes some updates early, which then need not be kept
    mixture: Mixture | None = None  # what the models are together, if they are one mixture
    question: Question | None = None  # what of their updates clients reply with, in place of these

    @property
    def is_secret(self) -> bool:
        """Whether clients keep what they train to themselves, so that updates are empty."""
        return self.own and not self.shares

    def handled(self, handlers: Handlers) -> Updates:
        """Return the updates."""
        return handlers.updates(self)

    def select(self, ids: Sequence[int]) -> UpdateQuery:
        """Return the query to some of the clients, in the order given."""
        if list(ids) == list(self.ids):
            return self
        place_of = {client: place for place, client in enumerate(self.ids)}
        places = [place_of[client] for client in ids]
        assignment = [self.assignment[k] for k in places]
        anchors = None if self.anchors is None else [self.anchors[k] for k in places]
        data_rounds = None if self.data_rounds is None else [self.data_rounds[k] for k in places]
        return replace(self, ids=ids, assignment=assignment, anchors=anchors, data_rounds=data_rounds)


@dataclass(frozen=True, eq=False)
class EvaluationQuery(Query[Evaluation]):
    """Evaluate models, each on a split of a client's own data.

    A client with several models is named once for each, and replies for all of them or for none. One whose row is
    :data:`OWN` evaluates the model of its own. With a ``mixture``, a client is named once, with row 0, and evaluates
    all models together by its weights π; one without any finds them first, on its training data (FedEM's newcomers).
    If it ``compares`` its models, which then stand side by side, it counts besides which of them is best for how many
    examples (:attr:`Evaluation.wins`).
    """

    mechanism = "held_out"
    discloses = "scores"

    models: Tensor  # [K, S]
    assignment: Sequence[int]  # the row of each client, [n]
    split: Split
    compares: bool = False
    mixture: Mixture | None = None  # what the models are together, if they are one mixture

    def handled(self, handlers: Handlers) -> Evaluation:
        """Return the scores."""
        return handlers.evaluation(self)


@dataclass(frozen=True, eq=False)
class ChoiceQuery(EvaluationQuery):
    """Let each client choose the model with the lowest loss on its training data.

    Over a network a client replies with the number of that model and nothing else: in :attr:`Evaluation.wins` it has 1,
    and the client's other models 0. Simulated clients reply as to any evaluation, and losses tell which is lowest.
    """

    mechanism = "none"
    discloses = "choice"


@dataclass(frozen=True, eq=False)
class SubspaceQuery(Query[Tensor]):
    """Decompose training inputs, one a column, and reply with their left singular vectors ``[n, L, d, p]``.

    For n clients and inputs of d numbers as they are stored; L is the number of labels, or 1. Columns are unit vectors;
    those that a client has too few examples for are zeros, and so are all of a client that does not reply.
    """

    mechanism = "none"
    discloses = "subspaces"

    n_vectors: int  # p: those of the largest singular values
    per_label: bool  # whether the inputs of each label are decomposed by themselves

    def matrices(self, spec: DataSpec) -> int:
        """Return L for some data; a ConfigError if it should be by labels, and examples have none or several."""
        if self.per_label and spec.labels is None:
            raise ConfigError(
                f"each label's data cannot be compared by itself in a {spec.task} task, whose examples do not have one "
                "label each; set algorithm.distance = 'paper'"
            )
        return (spec.labels or 1) if self.per_label else 1

    def handled(self, handlers: Handlers) -> Tensor:
        """Return the singular vectors."""
        return handlers.subspaces(self)


@dataclass(frozen=True, eq=False)
class StatisticsQuery(Query[Statistics]):
    """Count training examples and add their inputs up, and reply with what all clients' come to together."""

    mechanism = "none"
    discloses = "statistics"

    inputs: bool = False  # whether those of columns of numbers are asked for, as they were before they were scaled
    labels: int = 0  # how many labels are counted; 0: none
    largest_weight: float = math.inf  # over a network: how many times the median client's examples one counts with

    def handled(self, handlers: Handlers) -> Statistics:
        """Return the sums."""
        return handlers.statistics(self)


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
            f"clients with differential privacy or secure aggregation refuse a {kind.__name__}, which declares "
            f"mechanism = {kind.mechanism!r} and discloses = {kind.discloses!r}; declare in its class as mechanism one "
            f"of {known}, and as discloses the name of what leaves the client"
        )


def refuse_unknown(query: Query[Any]) -> Any:
    """Raise a ConfigError: the clients do not know this kind of query."""
    raise ConfigError(f"these clients do not know how to answer a {type(query).__name__}")


@dataclass(frozen=True)
class Handlers:
    """What replies to each kind of query; ``other`` to kinds that fedclade does not know."""

    updates: Callable[[UpdateQuery], Updates]
    evaluation: Callable[[EvaluationQuery], Evaluation]
    subspaces: Callable[[SubspaceQuery], Tensor]
    statistics: Callable[[StatisticsQuery], Statistics]
    shifts: Callable[[ShiftQuery], Tensor]
    descriptors: Callable[[DescriptorQuery], Tensor]
    other: Callable[[Query[Any]], Any] = refuse_unknown


class Ask(Protocol):
    """Puts a query to clients."""

    def __call__(self, query: Query[R], /) -> R:
        """Return the reply."""
        ...


# The query by which clients describe their data by what a model makes of it.

COMPONENTS = 10
"""Components of a descriptor where examples have no labels, by whose number it goes by default."""


@dataclass(frozen=True, eq=False)
class DescriptorQuery(Query[Tensor]):
    """Describe training data by a model's latent; the reply is float32 ``[n, 2 + B, C]`` (FLUX).

    The latent of an example is the input of the first dense layer behind the last convolution, flattened; of a model
    without convolutions, the input of its last dense layer. C components are taken of it, along directions that depend
    on the seed and the width of the latent alone. The rows of a client's block are: the largest entry of its latents,
    C times; what the components are of a point amid the cube that the directions were found in, of side 1; mean and
    standard deviation of its components, B = 2; and with ``per_label`` the means, and then the deviations, of each of L
    labels by itself, as the client sees them, B = 2 + 2L. Those of a label with fewer than two examples are −1. Of a
    client that does not reply all is 0.
    """

    mechanism = "none"
    discloses = "descriptors"

    model: Tensor  # [S]
    seed: int
    components: int = 0  # C; 0: as many as there are labels, the last of them 0 where the latent has fewer entries
    per_label: bool = True

    def shape(self, spec: DataSpec) -> tuple[int, int]:
        """Return 2 + B and C for some data; a ConfigError if it should be by labels, and examples have none."""
        if self.per_label and spec.labels is None:
            raise ConfigError(
                f"each label's data cannot be described by itself in a {spec.task} task, whose examples do not have "
                "one label each; set algorithm.per_label = false"
            )
        groups = 1 + (spec.labels or 0) if self.per_label else 1
        return 2 + 2 * groups, self.components or spec.labels or COMPONENTS

    def handled(self, handlers: Handlers) -> Tensor:
        """Return the descriptors."""
        return handlers.descriptors(self)


# The query by which clients say whether their data has shifted.


@dataclass(frozen=True, eq=False)
class ShiftQuery(Query[Tensor]):
    """Say whether the labels of the training data have shifted since one last said so; the reply is bool ``[n]``.

    Each client compares how often it has each of C labels with how often it had when it was first asked, or last said
    that they had shifted, n examples then. They have if the distance is above ``share · n/C``. It is Σ|a − b|/C over
    the two lists of counts, each in ascending order, which is SciPy's ``wasserstein_distance`` of counts that are taken
    for samples, and does not see that labels trade places; ``by_label`` leaves them in the order of the labels.
    Clients that do not reply have not shifted.
    """

    mechanism = "none"
    discloses = "shifts"

    round: int
    share: float
    by_label: bool

    def labels(self, spec: DataSpec) -> int:
        """Return C for some data; a ConfigError if examples have no label, or several."""
        if spec.labels is None:
            raise ConfigError(
                f"the labels of a {spec.task} task cannot be counted, so no shift is seen in its data; set "
                "algorithm.migrate = false"
            )
        return spec.labels

    def handled(self, handlers: Handlers) -> Tensor:
        """Return who has shifted."""
        return handlers.shifts(self)
