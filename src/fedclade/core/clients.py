"""Interfaces of the clients that an algorithm queries, in simulations and over a network.

An algorithm sees a :class:`Clients` object. :class:`Workers` are the clients at the end of the
chain of middleware: they carry out the queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from fedclade.core.data_queries import DataQuery, check_kind
from fedclade.core.evaluation import Evaluation
from fedclade.core.mixtures import Mixture
from fedclade.core.params import Layout
from fedclade.core.queries import (
    EvaluationQuery,
    Query,
    R,
    Round,
    Sink,
    Split,
    TrainQuery,
    refuse_unknown,
)
from fedclade.core.updates import Updates
from fedclade.core.work import ClientWork, FullGradient, Models, Nothing

if TYPE_CHECKING:
    from torch import Tensor


class Clients(ABC):
    """Clients of a run that can be queried, in this process or over a network.

    Every query is sent by :meth:`ask`. The other methods build a query and call :meth:`ask`.
    """

    @property
    @abstractmethod
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""

    @property
    def reachable(self) -> Sequence[int]:
        """Ids of the clients that are available in this round.

        If the availability is not known in advance, these are all clients.
        """
        return self.ids

    @property
    def evaluated(self) -> Sequence[int]:
        """Ids of the clients that are being evaluated: all clients, or the run's sample of them.

        An algorithm that queries clients to find the models for an evaluation
        (:meth:`Algorithm.models_for <fedclade.Algorithm.models_for>`) queries these clients only.
        """
        return self.ids

    @property
    @abstractmethod
    def sizes(self) -> Mapping[int, int]:
        """Number |D_i| of training examples of each client, by client id."""

    def weigh(self, weights: Mapping[int, float]) -> Mapping[int, float]:
        """Return the weights of clients in means over clients.

        Parameters
        ----------
        weights
            Weight that the method gives to each client, by client id, such as :attr:`sizes`.

        Returns
        -------
        Mapping
            The same weights, unless ``aggregate.weights`` of the run sets other weights.
        """
        return weights

    @property
    def undivided(self) -> Collection[int]:
        """Ids of the clients whose training examples cannot be divided into parts.

        Their examples form too few groups of examples that depend on each other. A client in a
        network is not listed here: it refuses to reply if it is queried for updates from parts.
        """
        return frozenset()

    @property
    def stage(self) -> int:
        """Number of the current data stage: how often the clients' data has changed so far.

        See :class:`~fedclade.data.Stage`.
        """
        return 0

    @abstractmethod
    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        """Send a query to the clients that it names, and return their combined reply.

        See :class:`~fedclade.core.Ask` for the parameters.
        """

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        work: ClientWork | None = None,
        *,
        anchors: Sequence[int] | None = None,
        sent_before: bool = False,
        require_all: bool = False,
    ) -> Updates:
        """Query n clients to train their models, and return their model updates.

        See :class:`TrainQuery` for details.

        Parameters
        ----------
        ids
            Ids of the n clients.
        models
            K distinct models, ``[K, S]``: each row is the vector of a model.
        assignment
            For each of the n clients, the row of ``models`` from which it starts.
        this_round
            The round, with the settings of local training.
        work
            The work of each client: its initial model, training examples, steps, what it stores,
            and its reply. If None, a client trains from the model that it receives, stores its
            personal state, and replies with its update.
        anchors
            For each of the n clients, the row of ``models`` that is its anchor, to which a proximal
            term, for example, pulls its model. None if the work needs no anchor.
        sent_before
            Whether the clients have received the models earlier in this round, so that their
            transfer is not counted again.
        require_all
            Whether clients that do not reply are queried again.
        """
        query = TrainQuery(
            ids,
            Models(models, assignment, anchors, sent_before),
            this_round.for_clients,
            ClientWork() if work is None else work,
            require_all=require_all,
        )
        return self.ask(query)

    def gradients(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        *,
        require_all: bool = False,
    ) -> Updates:
        """Query clients for the negative full-batch gradients of their loss, without training.

        Each client computes the gradient at the model that ``assignment`` gives it (see
        :class:`FullGradient`). The parameters are as for :meth:`train`.
        """
        work = ClientWork(steps=FullGradient(), store=Nothing())
        return self.train(ids, models, assignment, this_round, work, require_all=require_all)

    def evaluate(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        split: Split,
        data_round: int = 0,
        *,
        compares: bool = False,
        mixture: Mixture | None = None,
    ) -> Evaluation:
        """Query clients to evaluate models on a split of their own data, and return the scores.

        See :class:`EvaluationQuery` for the parameters.
        """
        query = EvaluationQuery(
            ids, models, assignment, split, compares, mixture, data_round=data_round
        )
        return self.ask(query)


class Workers(Clients):
    """Clients that carry out queries: simulated clients, or a connection to a network.

    Training, evaluation and data queries have one handler method each.
    """

    layout: Layout
    """Position of each tensor of the model in the parameter vector."""

    @property
    @abstractmethod
    def engine(self) -> str:
        """Name of the engine that trains the clients, such as ``loop`` or ``auto``.

        The name is ``auto`` before an engine is chosen, and also if each client chooses an engine
        itself.
        """

    @property
    @abstractmethod
    def engine_taken(self) -> str | None:
        """Name and form of the engine that is in use; None if unknown.

        Rounding errors depend on the engine. A run therefore stores this text in its checkpoints,
        and uses the same engine when it is continued.
        """

    @property
    def engine_fallback(self) -> str | None:
        """Engine that trains in place of a faster one, and the reason, as ``loop, because …``.

        None if no faster engine was refused in this part of the run, or if it is unknown.
        """
        return None

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        """Call the handler for the kind of the query, and return its reply."""
        if isinstance(query, TrainQuery):
            return cast("R", self.handle_updates(query, sink))
        if isinstance(query, EvaluationQuery):
            return cast("R", self.handle_evaluation(query))
        if isinstance(query, DataQuery):
            check_kind(type(query))
            return self.handle_data(query)
        return refuse_unknown(query)

    @abstractmethod
    def handle_updates(self, query: TrainQuery, sink: Sink | None = None) -> Updates:
        """Return the updates of the clients that reply to a training query.

        If a ``sink`` is given, an update may be passed to it as soon as it arrives. The returned
        updates do not include the updates that were passed to the sink.
        """

    @abstractmethod
    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Return the scores of the clients that reply to an evaluation query."""

    @abstractmethod
    def handle_data(self, query: DataQuery[R]) -> R:
        """Return the merged reply to a query that each client answers from its own data."""
