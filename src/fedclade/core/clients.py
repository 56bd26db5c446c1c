"""Interfaces of the clients that an algorithm queries, wherever the clients are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from fedclade.core.data_queries import DataQuery, check_kind
from fedclade.core.evaluation import Evaluation
from fedclade.core.mixtures import Mixture
from fedclade.core.params import Layout
from fedclade.core.queries import (
    EvaluationQuery,
    Query,
    R,
    Round,
    Split,
    UpdateQuery,
    refuse_unknown,
)
from fedclade.core.updates import Updates


class Clients(ABC):
    """N clients, in this process or connected by a network.

    Every query is sent by :meth:`ask`; the other methods build a query and call it.
    """

    @property
    @abstractmethod
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""

    @property
    def reachable(self) -> Sequence[int]:
        """Clients that are available in this round, if that is known in advance; otherwise all."""
        return self.ids

    @property
    @abstractmethod
    def sizes(self) -> Mapping[int, int]:
        """Number |D_i| of training examples of each client."""

    @property
    def stage(self) -> int:
        """Number of changes of the clients' data so far; see :class:`~fedclade.data.Stage`."""
        return 0

    @abstractmethod
    def ask(self, query: Query[R], /) -> R:
        """Send a query and return the reply."""

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
        *,
        own: bool = False,
        shares: bool = False,
        data_rounds: Sequence[tuple[int, ...]] | None = None,
        mixture: Mixture | None = None,
    ) -> Updates:
        """Let each client train from its model and send its update; see :class:`UpdateQuery`.

        Parameters
        ----------
        ids
            The n clients.
        models
            The distinct models, ``[K, S]``.
        assignment
            The row of each client's model, ``[n]``.
        this_round
            The round, with the settings of local training.
        anchors
            The row of each client's anchor, ``[n]``; None: the model from which it starts.
        own
            Whether each client stores the model that it trains as its own.
        shares
            Whether clients send the model that they store.
        data_rounds
            For each client, the rounds whose data it trains on, ``[n]``; None: its current data.
        mixture
            Description of the mixture whose components the models are; None if they are not a
            mixture.
        """
        query = UpdateQuery(
            ids, "train", models, assignment, this_round, anchors, own, shares, data_rounds
        )
        return self.ask(query if mixture is None else replace(query, mixture=mixture))

    def gradients(
        self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round
    ) -> Updates:
        """Let each client compute the negative gradient at its model; see :class:`UpdateQuery`."""
        return self.ask(UpdateQuery(ids, "gradients", models, assignment, this_round))

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
        """Let each client evaluate its model on a split of its own data.

        See :class:`EvaluationQuery` for the parameters.
        """
        query = EvaluationQuery(
            ids, models, assignment, split, compares, mixture, data_round=data_round
        )
        return self.ask(query)


class Workers(Clients):
    """Clients that train models, or a connection to such clients.

    Each kind of query has one handler.
    """

    layout: Layout
    """Position of each tensor of the model in a vector."""

    @property
    @abstractmethod
    def engine(self) -> str:
        """Name of the engine that trains clients.

        It is ``auto`` until the engine is chosen, and if every client chooses its own.
        """

    @property
    @abstractmethod
    def engine_taken(self) -> str | None:
        """Properties of the engine that rounding depends on, as far as they are known here."""

    def ask(self, query: Query[R], /) -> R:
        """Pass a query to its handler and return the reply."""
        return cast("R", self._handle(query))

    def _handle(self, query: Query[Any]) -> Any:
        if isinstance(query, UpdateQuery):
            return self.handle_updates(query)
        if isinstance(query, EvaluationQuery):
            return self.handle_evaluation(query)
        if isinstance(query, DataQuery):
            check_kind(type(query))
            return self.handle_data(query)
        return refuse_unknown(query)

    @abstractmethod
    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Return the updates of the clients that reply."""

    @abstractmethod
    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Return the scores of the clients that reply."""

    @abstractmethod
    def handle_data(self, query: DataQuery[R]) -> R:
        """Return the reply to a query that each client computes from its own data."""
