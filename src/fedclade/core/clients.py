"""Clients as an algorithm sees them: they can be queried, wherever they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedclade.core.evaluation import Evaluation, Statistics
from fedclade.core.params import Layout
from fedclade.core.queries import (
    DescriptorQuery,
    EvaluationQuery,
    Handlers,
    Mixture,
    Query,
    R,
    Round,
    ShiftQuery,
    Split,
    StatisticsQuery,
    SubspaceQuery,
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
        query = UpdateQuery(ids, "train", models, assignment, this_round, anchors, own, shares, data_rounds)
        return self.ask(query if mixture is None else replace(query, mixture=mixture))

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
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
        query = EvaluationQuery(ids, models, assignment, split, compares, mixture, data_round=data_round)
        return self.ask(query)

    def subspaces(self, ids: Sequence[int], n_vectors: int, per_label: bool) -> Tensor:
        """Let each client decompose its training inputs; see :class:`SubspaceQuery`."""
        return self.ask(SubspaceQuery(ids, n_vectors, per_label))

    def shifts(self, ids: Sequence[int], round_number: int, share: float, by_label: bool) -> Tensor:
        """Let each client say whether its labels have shifted; see :class:`ShiftQuery`."""
        return self.ask(ShiftQuery(ids, round_number, share, by_label))

    def descriptors(
        self, ids: Sequence[int], model: Tensor, seed: int, components: int = 0, *, per_label: bool = True
    ) -> Tensor:
        """Let each client describe its training data by a model ``[S]``; see :class:`DescriptorQuery`."""
        return self.ask(DescriptorQuery(ids, model, seed, components, per_label))


class Workers(Clients):
    """Clients that do the work themselves, or reach those that do: a handler for each kind of query."""

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
        of_models = self.handle_updates, self.handle_evaluation
        of_data = self.handle_subspaces, self.handle_statistics, self.handle_shifts, self.handle_descriptors
        return query.handled(Handlers(*of_models, *of_data, other=self.handle_other))

    def handle_other(self, query: Query[Any]) -> Any:
        """Return the reply to a kind of query that fedclade does not know; by default a ConfigError is raised."""
        return refuse_unknown(query)

    @abstractmethod
    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Return the updates of the clients that reply."""

    @abstractmethod
    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Return the scores of the clients that reply."""

    @abstractmethod
    def handle_subspaces(self, query: SubspaceQuery) -> Tensor:
        """Return singular vectors, ``[n, L, d, p]``."""

    @abstractmethod
    def handle_statistics(self, query: StatisticsQuery) -> Statistics:
        """Return what the training examples of all clients come to."""

    @abstractmethod
    def handle_shifts(self, query: ShiftQuery) -> Tensor:
        """Return whose labels have shifted, bool ``[n]``."""

    @abstractmethod
    def handle_descriptors(self, query: DescriptorQuery) -> Tensor:
        """Return descriptors, ``[n, 2 + B, C]``."""
