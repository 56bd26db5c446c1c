"""Queries by which a server lets clients train and evaluate models, and rounds of queries.

Each class of queries has one type of reply. Queries about clients' data are in
:mod:`fedclade.core.data_queries`.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch

from fedclade.core import rng
from fedclade.core.errors import ConfigError
from fedclade.core.evaluation import Evaluation
from fedclade.core.local import LocalTraining
from fedclade.core.mixtures import Mixture
from fedclade.core.updates import Updates
from fedclade.core.work import ClientWork, FromStored, Indices, Models, Related

Split = Literal["train", "validation", "test"]

OWN = -1
"""Value of a client's row in a query that stands for the model that the client itself stores.

No model is sent to such a client.
"""

MECHANISMS = ("noise", "held_out", "none", "public")
"""Privacy mechanisms that a class of queries can declare as its :attr:`Query.mechanism`."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Round:
    """Communication round, with the properties that are sent to clients.

    Parameters
    ----------
    number
        Number of the round, from 1.
    local
        Settings of local training.
    seed
        Random seed of the run.
    purpose
        Purpose of a query. It is part of the key of random draws, so that a second query in a round
        has different draws than the regular training, and it appears in events. It has no other
        effect.
    query
        Number of the query in the round, from 0. It is part of the key of simulated faults, noise
        and adversaries, so that they differ between the queries of a round.
    """

    number: int
    local: LocalTraining
    seed: int = 0
    purpose: str = "train"
    query: int = 0

    @property
    def lr(self) -> float:
        """Step size (learning rate) of local training in this round."""
        return self.local.lr_at(self.number)

    @property
    def for_clients(self) -> Round:
        """The round without the properties that only the server uses; see :class:`RoundPlan`."""
        return self

    def generator(self, purpose: str) -> np.random.Generator:
        """Return a random generator for the server's draws in this round, by their purpose."""
        return rng.generator(self.seed, purpose, self.number)


@dataclass(frozen=True)
class RoundPlan(Round):
    """Communication round with the additional properties that only the server uses.

    :meth:`Algorithm.step <fedclade.Algorithm.step>` receives an object of this class.

    Parameters
    ----------
    evaluated
        Whether clients are evaluated after the round. If not, an algorithm can skip the computation
        of models that are needed for evaluation only.
    min_clients
        Smallest number of replies from a cluster's clients. With fewer replies, the cluster's model
        does not change, and no decision about the cluster, such as a split, is made.
    rounds
        Number of rounds of the whole run, if it does not end early; None if it is not known.
    """

    evaluated: bool = True
    min_clients: int = 1
    rounds: int | None = None

    @property
    def for_clients(self) -> Round:
        """The round without the properties that only the server uses."""
        return Round(self.number, self.local, self.seed, self.purpose, self.query)


@dataclass(frozen=True, eq=False)
class Query(ABC, Generic[R_co]):
    """Base class of queries that a server sends to clients.

    A subclass declares what its replies reveal. Clients with differential privacy or secure
    aggregation refuse a query whose class does not declare this, so that a new kind of query cannot
    disclose private data by mistake.

    Attributes
    ----------
    mechanism
        Privacy mechanism of a reply. ``noise``: the reply is an update, which clients with
        differential privacy clip and add noise to. ``held_out``: the reply depends on validation or
        test data. ``none``: the reply has no protection, so clients with differential privacy
        refuse the query. ``public``: the reply does not depend on the data of any client.
    discloses
        Name, for client policies, of the information that leaves the client unencrypted, such as
        ``scores``. The name is "update" for a model update, and "nothing" for a reply that does not
        depend on the client's data.
    """

    mechanism: ClassVar[str] = ""
    discloses: ClassVar[str] = ""

    ids: Sequence[int]  # ids of the queried clients, [n]
    # the round whose data the query is about; 0: the clients' current data
    data_round: int = field(default=0, kw_only=True)


@dataclass(frozen=True, eq=False)
class TrainQuery(Query[Updates]):
    """Query that asks clients to train models and to reply with their model updates.

    Parameters
    ----------
    ids
        Ids of the n queried clients.
    models
        The distinct models, and the row of each client's model.
    round
        The round, with the settings of local training and the keys of random draws.
    work
        The work of each client: its initial model, training examples, steps, what it stores, and
        its reply.
    require_all
        Whether clients that do not reply are queried again, since all replies are needed.
    data_round
        The round whose data the query is about; 0: the clients' current data.
    """

    mechanism = "noise"
    discloses = "update"

    models: Models
    round: Round
    work: ClientWork = field(default_factory=ClientWork)
    require_all: bool = False

    def __post_init__(self) -> None:
        if OWN in self.models.start and not isinstance(self.work.start, FromStored):
            raise ConfigError(
                "a training query with clients whose row is OWN needs work that starts from the "
                "client's stored model; set start = FromStored() in the query's ClientWork"
            )
        if self.work.needs_anchor and self.models.anchor is None:
            part = self.work.steps if self.work.steps.needs_anchor else self.work.reply
            raise ConfigError(
                f"{type(part).__name__} in a client's work needs an anchor for each client; pass "
                "the rows of the anchors as anchors=[...] to Clients.train"
            )

    @property
    def kind(self) -> Literal["train", "gradients"]:
        """Name of the clients' computation, for messages and as a key of random draws.

        The name is "gradients" for full-batch gradients, and otherwise "train".
        """
        return "gradients" if self.work.is_gradient else "train"

    @property
    def local(self) -> LocalTraining:
        """Settings of local training for this query.

        They are the settings of the round, unless the kind of training that the query requests
        (:attr:`ClientWork.steps <fedclade.ClientWork>`) changes some, such as the number of epochs.
        """
        return self.work.steps.settings(self.round.local)

    def examples(self, count: int, key: int, related: Related | None = None) -> Indices:
        """Return the ascending indices of the training examples on which a client trains.

        See :meth:`Examples.of_client` for the parameters.
        """
        data = self.work.data
        return data.of_client(count, key, self.round.seed, self.round.number, related)

    def select(self, ids: Sequence[int]) -> TrainQuery:
        """Return the same query for some of its clients, in the order of the given ids."""
        if list(ids) == list(self.ids):
            return self
        place_of = {client: place for place, client in enumerate(self.ids)}
        places = [place_of[client] for client in ids]
        return replace(self, ids=ids, models=self.models.select(places))


@dataclass(frozen=True, eq=False)
class EvaluationQuery(Query[Evaluation]):
    """Query that asks clients to evaluate models on a split of their own data.

    A split is the training, validation or test part of a client's data. In ``ids``, a client with
    several models to evaluate is listed once for each model, and replies for all of them or for
    none. ``assignment`` has the row of the model for each entry of ``ids``. A client whose row is
    :data:`OWN` evaluates the model that it stores itself.

    If ``mixture`` is set, the K models are the components of a mixture. A client is then listed
    once, with row 0, and evaluates the mixture by its own weights π of the components. A client
    without weights first determines them on its training data (FedEM's new clients).

    If ``compares`` is set, clients also count the examples for which each of their models is the
    best (:attr:`Evaluation.wins`). The entries of a client must then be adjacent.
    """

    mechanism = "held_out"
    discloses = "scores"

    models: torch.Tensor  # [K, S]
    assignment: Sequence[int]  # the row of each client, [n]
    split: Split
    compares: bool = False
    mixture: Mixture | None = None  # set if the models are the components of one mixture


@dataclass(frozen=True, eq=False)
class ChoiceQuery(EvaluationQuery):
    """Query that asks clients to choose the model with the lowest loss on their training data.

    Over a network, a client replies only with the number of the chosen model.
    :attr:`Evaluation.wins` is then 1 for the chosen model and 0 for the client's other models.
    Simulated clients reply with losses, as to any evaluation query, and the model with the lowest
    loss counts as chosen.
    """

    mechanism = "none"
    discloses = "choice"


def check_declared(kind: type[Query[Any]]) -> None:
    """Check that a class of queries declares its privacy mechanism and what it discloses.

    Raises
    ------
    ConfigError
        If the class lacks a declaration, since clients with differential privacy or secure
        aggregation refuse such queries.
    """
    known = ", ".join(repr(mechanism) for mechanism in MECHANISMS)
    if not kind.discloses or kind.mechanism not in MECHANISMS:
        raise ConfigError(
            "clients with differential privacy or secure aggregation refuse queries of the class "
            f"{kind.__name__}, which declares mechanism = {kind.mechanism!r} and discloses = "
            f"{kind.discloses!r}; in the class, set 'mechanism' to one of {known}, and 'discloses' "
            "to the name of the information that leaves the client"
        )


def refuse_unknown(query: Query[Any]) -> Any:
    """Raise a ConfigError for a query of a class that clients have no handler for."""
    raise ConfigError(
        f"clients cannot reply to a query of the class {type(query).__name__}; derive the class "
        "from TrainQuery, EvaluationQuery, DataQuery or RowQuery"
    )


Sink = Callable[[Updates], None]
"""Function that receives updates as they arrive, before the reply to a query is complete.

The reply then lacks these updates, so that they need not all be in memory at the same time.
"""


class Ask(Protocol):
    """Interface of functions that send a query to clients and return the clients' reply."""

    def __call__(self, query: Query[R], /, sink: Sink | None = None) -> R:
        """Send a query to the clients that it names, and return their combined reply.

        Parameters
        ----------
        query
            The query.
        sink
            For a training query only: function to which some updates may be passed as they arrive,
            so that they need not be stored. The returned updates then lack them.
        """
        ...
