"""Clients as an algorithm sees them: they can be queried, wherever they are."""

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
    """N clients, in this process or behind a network. Every query goes through :meth:`ask`; the others compose it."""

    @property
    @abstractmethod
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""

    @property
    def reachable(self) -> Sequence[int]:
        """Those that are there in this round, where that is known beforehand; else all."""
        return self.ids

    @property
    @abstractmethod
    def sizes(self) -> Mapping[int, int]:
        """Number |D_i| of training examples of each client."""

    @property
    def stage(self) -> int:
        """How often what clients hold has changed so far; see :class:`~fedclade.data.Stage`."""
        return 0

    @abstractmethod
    def ask(self, query: Query[R], /) -> R:
        """Put a query; return the reply."""

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
        """Let each client train from its model; see :class:`UpdateQuery`."""
        query = UpdateQuery(
            ids, "train", models, assignment, this_round, anchors, own, shares, data_rounds
        )
        return self.ask(query if mixture is None else replace(query, mixture=mixture))

    def gradients(
        self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round
    ) -> Updates:
        """Let each client take the negative gradient at its model; see :class:`UpdateQuery`."""
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
        """Let each client evaluate its model on a split of its own data; see :class:`EvaluationQuery`."""
        query = EvaluationQuery(
            ids, models, assignment, split, compares, mixture, data_round=data_round
        )
        return self.ask(query)


class Workers(Clients):
    """Clients that do the work themselves, or reach those that do: three handlers of queries."""

    layout: Layout
    """Where each tensor of the model lies in a vector."""

    @property
    @abstractmethod
    def engine(self) -> str:
        """How clients are trained; ``auto`` until that is settled, or where every client settles it for itself."""

    @property
    @abstractmethod
    def engine_taken(self) -> str | None:
        """What rounding depends on of the engine, as far as it is known here."""

    def ask(self, query: Query[R], /) -> R:
        """Put a query; return the reply."""
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
        """Return the reply to a query that each client answers from its own data."""
